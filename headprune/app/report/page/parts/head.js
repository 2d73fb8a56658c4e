// One head: its scores, where it stays and where it goes, its role, and what it attends to in the examples.

const panel = by("head");

let held = false;

/** A pointer is over a head: it is shown, unless another one is held. Fingers do not hover. */
function hover(event, i) {
  if (!held && event.pointerType !== "touch") choose("head", i);
}

/** The keyboard's focus is on a head: it is shown. */
function reach(i) {
  if (i !== state.head) release();
  choose("head", i);
}

/** A head was clicked or tapped: it stays until it is clicked again. On a narrow screen the panel comes up. */
function hold(i) {
  const again = held && i === state.head;
  choose("head", i);
  held = !again;
  tell();
  if (document.activeElement !== document.body) document.activeElement.scrollIntoView({ block: "nearest" });
}

function release() {
  held = false;
  tell();
}

function tell() {
  panel.classList.toggle("open", held);
  by("head-pinned").textContent = held ? "Pinned: Esc releases it." : "";
}

{
  let query = 0;
  let sample = 0;
  const row = (i) => by("heads").querySelector(`[data-head="${i}"]`);

  function facts(i) {
    const found = [];
    const profile = data.profiles?.heads[i];
    if (profile?.role) {
      const role = made("p", "", { class: "role" });
      role.append(made("b", profile.role), profile.because ? `: ${profile.because}` : "");
      found.push(role);
    }
    if (profile?.unseen) found.push(made("p", `Its attention could not be seen: ${profile.unseen}`, { class: "muted" }));
    const pruned = data.sizes.filter((s) => s.file);
    if (pruned.length) {
      const list = made("ul", "", { class: "fates", "aria-label": "In the pruned models" });
      for (const size of pruned.slice().reverse()) {
        const gone = size.gone.includes(i);
        list.append(made("li", `${size.kept} heads: ${gone ? "pruned" : "kept"}`, { class: gone ? "gone" : "kept" }));
      }
      found.push(list);
    }
    if (data.methods.length) {
      const table = made("table");
      const line = table.createTHead().insertRow();
      for (const name of ["method", "score", "rank"]) line.append(made("th", name, { scope: "col" }));
      for (const [m, method] of data.methods.entries()) {
        const value = method.values[i];
        const rank = value === null ? "–" : `${1 + method.values.filter((v) => v !== null && v > value).length} of ${heads.length}`;
        const line = (table.tBodies[0] ?? table.createTBody()).insertRow();
        line.append(made("th", method.name, { scope: "row" }), made("td", row(i).cells[m + 1].textContent), made("td", rank));
      }
      found.push(table);
    }
    if (profile?.figures) {
      const more = made("details");
      more.open = panel.querySelector("details")?.open ?? false;
      const list = made("dl", "", { class: "figures" });
      for (const [k, name] of data.profiles.figures.entries()) {
        if (profile.figures[k] === null) continue;
        const unit = name === "mean distance" ? ` ${data.profiles.unit}` : "";
        list.append(made("dt", name), made("dd", profile.figures[k] + unit));
      }
      more.append(made("summary", "Where its attention goes, in figures"), list);
      found.push(more);
    }
    return found;
  }

  function show() {
    const i = state.head;
    if (i === null) return;
    by("head-title").textContent = heads[i].label;
    by("head-body").replaceChildren(...facts(i));
    see();
  }

  function see() {
    const i = state.head;
    const place = by("attention");
    by("seen").hidden = !data.samples.length;
    if (i === null || !data.samples.length) return;
    const layer = Number(data.layers[heads[i].layer][0].slice(1));
    const seen = attention(data.samples[sample], layer, heads[i].head);
    if (!seen) {
      place.replaceChildren(made("p", "Not held for this layer.", { class: "muted" }));
      return;
    }
    query = Math.min(query, seen.rows.length - 1);
    const pick = made("select", "", { id: "query" });
    for (const [r, position] of seen.rows.entries()) pick.append(new Option(`${position}: ${seen.queries.labels[position]}`, r, false, r === query));
    pick.addEventListener("change", () => ((query = Number(pick.value)), see(), by("query").focus()));
    const label = made("label", "From ", { class: "sample" });
    label.append(pick);
    const top = d3.greatest(d3.range(seen.count), (key) => seen.at(query, key));
    const most = made("p", `Most to “${seen.keys.labels[top]}” (${seen.at(query, top).toFixed(2)}).`, { class: "muted" });
    place.replaceChildren(
      label, keys(seen, query), most,
      matrix(seen, Math.max(200, Math.min(420, place.clientWidth || 320)), query, (r) => ((query = r), see())),
      made("p", "Rows attend to columns; the stronger the colour, the more (square root of the weight, so that small ones are visible). Click a row to see it above.", { class: "muted" }),
    );
  }

  for (const [k, held] of data.samples.entries()) by("sample").append(new Option(held.title ? `${k + 1}: ${clipped(held.title, 40)}` : k + 1, k));
  by("sample").addEventListener("change", () => {
    sample = Number(by("sample").value);
    see();
  });
  on("head", show);
  by("head-close").addEventListener("click", release);
  document.addEventListener("keydown", (event) => event.key === "Escape" && release());
}
