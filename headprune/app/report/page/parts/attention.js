// What a head attends to in an example: every query by every key, and one query's keys as they stand in the text or image.

const weights = new Map();

/** A head's weights in a sample, or null: {queries, keys, rows, scale, at(row, key)} with positions' labels; `scale` is the largest weight that is held. */
function attention(sample, layer, head) {
  const found = sample.layers.find((held) => held.layer === layer);
  if (!found || head >= found.shape[0]) return null;
  if (!weights.has(found)) weights.set(found, Uint8Array.from(atob(found.weights), (c) => c.charCodeAt(0)));
  const [, rows, keys] = found.shape;
  const bytes = weights.get(found);
  const scale = found.scale ?? 1;
  return {
    queries: sample.positions[found.queries], keys: sample.positions[found.keys], count: keys, scale,
    rows: found.rows ?? d3.range(rows), at: (row, key) => (bytes[(head * rows + row) * keys + key] / 255) * scale,
  };
}

/** How strongly a weight is painted: small ones stay visible. */
const painted = (weight) => Math.sqrt(weight);

function matrix(seen, width, chosen, then) {
  const cells = seen.rows.flatMap((_, row) => d3.range(seen.count).map((key) => ({ row, key, weight: seen.at(row, key) })));
  const side = Math.min(22, width / seen.count);
  const named = side >= 9;
  const margin = named ? 70 : 4;
  const label = (positions, i) => clipped(positions.labels[i] ?? "", 9);
  const svg = Plot.plot({
    width, height: margin + 4 + ((width - margin - 4) / seen.count) * seen.rows.length, marginLeft: margin, marginTop: margin, marginRight: 4, marginBottom: 4,
    style: { fontSize: named ? "10px" : "0" },
    ariaLabel: "Attention of every query (rows) to every key (columns)",
    x: { type: "band", domain: d3.range(seen.count), axis: named ? "top" : null, label: null, tickSize: 0, tickRotate: -90, tickFormat: (i) => label(seen.keys, i), padding: 0 },
    y: { type: "band", domain: d3.range(seen.rows.length), axis: named ? "left" : null, label: null, tickSize: 0, tickFormat: (i) => label(seen.queries, seen.rows[i]), padding: 0 },
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.cell(cells.filter((c) => c.weight), { x: "key", y: "row", fill: "var(--seq)", fillOpacity: { value: (c) => painted(c.weight / seen.scale), scale: null } }),
      Plot.cell([...new Set(cells.map((c) => c.row))].filter((row) => row === chosen).map((row) => ({ row })), {
        y: "row", fill: "none", stroke: "var(--ink)", strokeWidth: 1.25,
      }),
    ],
  });
  picture(svg);
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const top = (margin / svg.viewBox.baseVal.height) * box.height;
    const row = Math.floor(((event.clientY - box.top - top) / (box.height - top)) * seen.rows.length);
    if (row >= 0 && row < seen.rows.length) then(row);
  });
  return svg;
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The keys where they stand, each as dark as this query attends to it. */
function keys(seen, row) {
  const { grid, image, labels } = seen.keys;
  const place = made("div", "", { class: "keys" });
  const before = grid ? seen.count - grid[0] * grid[1] : seen.count;
  for (const key of d3.range(before)) {
    const weight = seen.at(row, key);
    const word = made("span", "", { class: "token", title: weight.toFixed(2) });
    const back = made("span", "", { class: "paint", "aria-hidden": "true" });
    back.style.opacity = painted(weight / seen.scale);
    word.append(back, made("span", labels[key] || " "));
    place.append(word);
  }
  if (grid) {
    const [rows, columns] = grid;
    const box = made("div", "", { class: "patches", role: "img", "aria-label": `Attention over the image's ${rows} by ${columns} patches` });
    if (image?.startsWith("data:image/png;base64,")) box.append(made("img", "", { src: image, alt: "The example" }));
    const patches = Plot.plot({
      width: columns * 20, height: rows * 20, margin: 0, axis: null, x: { type: "band", domain: d3.range(columns), padding: 0 }, y: { type: "band", domain: d3.range(rows), padding: 0 },
      marks: [Plot.cell(d3.range(rows * columns), {
        x: (i) => i % columns, y: (i) => Math.floor(i / columns), fill: "var(--patch)", fillOpacity: { value: (i) => 0.85 * painted(seen.at(row, before + i) / seen.scale), scale: null },
      })],
    });
    unlabelled(patches);
    box.append(patches);
    place.append(box);
  }
  return place;
}
