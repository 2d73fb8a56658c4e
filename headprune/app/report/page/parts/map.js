// The map of heads, layers by heads: how important each is, and which the chosen size has lost.

{
  const method = () => data.methods[Number(document.querySelector("[name=method]:checked")?.value ?? 0)];
  const value = (i) => method()?.values[i] ?? null;
  const strength = (i) => (method() ? shade(Math.abs(value(i) ?? 0), method()) : 0.35);
  const gone = () => new Set(state.size === null ? [] : data.sizes[state.size].gone);
  const said = (i) => {
    const row = by("heads").querySelector(`[data-head="${i}"]`);
    const place = data.methods.indexOf(method()) + 1;
    const score = method() ? `, ${method().name} ${row.cells[place].textContent}` : "";
    return heads[i].label + score + (gone().has(i) ? ", pruned" : "");
  };
  // Even in size up to the usual score and in ratio beyond it, so that a few large scores hide no other.
  const shade = (v, { usual, most }) => Math.asinh(v / usual) / Math.asinh(most / usual);
  let cells = [];
  let crosses = [];

  const draw = drawn(by("map"), (width) => {
    const widest = d3.max(data.layers, ([, count]) => count);
    const left = 34;
    const side = Math.max(24, Math.min(64, Math.floor((width - left - 6) / widest)));
    const indices = d3.range(heads.length);
    const svg = Plot.plot({
      width: left + 6 + side * widest, height: 26 + 4 + Math.min(side, 36) * data.layers.length,
      marginLeft: left, marginRight: 6, marginTop: 26, marginBottom: 4, style: { fontSize: "12px" },
      x: { type: "band", domain: d3.range(widest), axis: "top", label: null, tickSize: 0, padding: 0.06, ticks: null, tickFormat: (h) => (h % (side < 28 ? 2 : 1) ? "" : h) },
      y: { type: "band", domain: d3.range(data.layers.length), label: null, tickSize: 0, padding: 0.06, tickFormat: (l) => data.layers[l][0] },
      marks: [
        Plot.cell(indices, {
          x: (i) => heads[i].head, y: (i) => heads[i].layer, rx: 3, ariaLabel: said,
          fill: { value: (i) => ((value(i) ?? 0) < 0 ? "var(--harm)" : "var(--seq)"), scale: null },
          fillOpacity: { value: (i) => strength(i), scale: null },
        }),
        Plot.text(indices, { x: (i) => heads[i].head, y: (i) => heads[i].layer, text: () => "×", fontSize: 17, fontWeight: 700, fill: "var(--ink)", stroke: "var(--panel)", strokeWidth: 3, pointerEvents: "none", ariaHidden: "true" }),
      ],
    });
    svg.setAttribute("role", "group");
    svg.setAttribute("aria-label", `Heads, layers by heads${method() ? `, coloured by ${method().name}` : ""}; arrow keys move`);
    cells = [...svg.querySelectorAll("g[aria-label=cell] rect")];
    crosses = [...svg.querySelectorAll("g[aria-label=text] text")];
    for (const [i, cell] of cells.entries()) {
      cell.setAttribute("role", "button");
      cell.addEventListener("pointerenter", (event) => hover(event, i));
      cell.addEventListener("focus", () => reach(i));
      cell.addEventListener("click", () => {
        cell.focus();
        hold(i);
      });
      cell.addEventListener("keydown", (event) => move(event, i));
    }
    unlabelled(svg);
    mark();
    return svg;
  });

  /** Which heads are gone, and which one is chosen. */
  function mark() {
    const lost = gone();
    for (const [i, cell] of cells.entries()) {
      crosses[i].style.display = lost.has(i) ? "" : "none";
      cell.setAttribute("aria-label", said(i));
      cell.setAttribute("tabindex", i === (state.head ?? 0) ? 0 : -1);
      cell.setAttribute("aria-pressed", i === state.head);
    }
  }

  function move(event, i) {
    const { layer, head } = heads[i];
    const first = d3.cumsum([0, ...data.layers.map(([, count]) => count)]);
    const within = (l, h) => first[l] + Math.max(0, Math.min(data.layers[l][1] - 1, h));
    const to = {
      ArrowRight: () => within(layer, head + 1), ArrowLeft: () => within(layer, head - 1),
      ArrowDown: () => within(Math.min(data.layers.length - 1, layer + 1), head), ArrowUp: () => within(Math.max(0, layer - 1), head),
      Home: () => within(layer, 0), End: () => within(layer, Infinity),
    }[event.key];
    if (event.key === "Enter" || event.key === " ") hold(i);
    else if (to) cells[to()].focus();
    else return;
    event.preventDefault();
  }

  function legend() {
    const m = method();
    const bar = made("span", "", { class: `ramp${m?.signed ? " signed" : ""}`, "aria-hidden": "true" });
    const ends = m?.signed ? [`−${m.said}`, m.said] : ["0", m?.said];
    const scale = m ? [made("span", ends[0]), bar, made("span", ends[1])] : [];
    const words = m ? [made("span", `${m.unit}${m.signed ? "; red: harmful" : ""}; linear near 0, logarithmic beyond`, { class: "line" })] : [];
    if (data.sizes.length) words.push(made("span", "×: pruned in the chosen size", { class: "line" }));
    by("map-legend").replaceChildren(...scale, ...words);
  }

  for (const radio of document.querySelectorAll("[name=method]")) radio.addEventListener("change", () => (draw(), legend()));
  on("size", mark);
  on("head", mark);
  legend();
}
