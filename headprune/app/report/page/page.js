// What only a page can do: the slider over sizes, the table of heads that sorts, and what a head attends to.
// Texts go into the page as text nodes, never as markup. Figures are those of the tables in the page and of the JSON below them.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const range = (count) => Array.from({ length: count }, (_, i) => i);

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

for (const node of document.querySelectorAll("[data-js]")) node.hidden = false;
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((node) => (node.open = true)));

// -- the table of heads: every row is a head, counted through all layers --------------------------

const table = document.querySelector("#heads table");
const rows = [...table.tBodies[0].rows];
const columns = [...table.tHead.rows[0].cells];
const labels = rows.map((row) => row.cells[0].textContent);
const methods = range(data.methods.length).map((m) => m + 1); // their columns
const heads = data.layers.flatMap(([, count], layer) => range(count).map((head) => ({ layer, head })));
const text = (i, column) => rows[i].cells[column].textContent;
const value = (i, column) => { // null where there is none
  const number = column ? parseFloat(text(i, column)) : i;
  return Number.isNaN(number) ? null : number;
};
const dense = data.kept.length - 1;
const keptColumn = (size) => methods.length + dense - size; // the table begins with the largest model
const gone = (i, size) => size < dense && text(i, keptColumn(size)) === "pruned";
for (const cell of table.tBodies[0].querySelectorAll("td")) if (cell.textContent === "pruned") cell.className = "gone";

function sort(column, up) {
  const numeric = column <= methods.length;
  const key = (i) => (numeric ? value(i, column) : text(i, column));
  const order = rows.map((row, i) => [key(i), i, row]);
  order.sort(([a, i], [b, j]) => (a === null) - (b === null) || (up ? 1 : -1) * ((a > b) - (a < b)) || i - j);
  table.tBodies[0].append(...order.map(([, , row]) => row));
  for (const [c, cell] of columns.entries()) {
    if (c === column) cell.setAttribute("aria-sort", up ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  }
}

for (const [c, column] of columns.entries()) {
  const button = element("button", { type: "button" }, column.textContent);
  button.addEventListener("click", () => {
    const now = column.getAttribute("aria-sort");
    sort(c, now ? now === "descending" : !methods.includes(c)); // the most important first
  });
  column.replaceChildren(button);
}
for (const [i, row] of rows.entries()) {
  const button = element("button", { type: "button" }, labels[i]);
  button.addEventListener("click", () => choose(i, true));
  row.cells[0].replaceChildren(button);
}

// -- the map of heads: a button each, coloured by the chosen method, crossed out where the chosen size lost it ------

let size = data.start;
let chosen = 0;
const map = by("map");
const widest = Math.max(...data.layers.map(([, count]) => count));
const cells = heads.map((_, i) => element("button", { type: "button" }));
map.style.gridTemplateColumns = `max-content repeat(${widest}, minmax(26px, 44px))`;
for (const [layer, [label, count]] of data.layers.entries()) {
  const first = heads.findIndex((head) => head.layer === layer);
  map.append(element("span", { "aria-hidden": "true" }, label), ...cells.slice(first, first + count));
  for (const _ of range(widest - count)) map.append(element("span", { "aria-hidden": "true" }));
}

by("methods").hidden = methods.length < 2;
for (const [m, name] of data.methods.entries()) {
  const radio = element("input", { type: "radio", name: "method", value: m, ...(m ? {} : { checked: "" }) });
  radio.addEventListener("change", paint);
  by("methods").append(element("label", {}, radio, name));
}

function paint() {
  const method = methods[document.querySelector("[name=method]:checked")?.value];
  const values = method === undefined ? [] : rows.map((_, i) => value(i, method));
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const most = sizes.at(-1) || 1;
  // Even in size up to the median and in ratio beyond it, so that a few large scores hide no other.
  const usual = Math.max(sizes[sizes.length >> 1] ?? most, most / 1000);
  for (const [i, cell] of cells.entries()) {
    const lost = gone(i, size);
    const score = method === undefined ? "" : `, ${data.methods[method - 1]} ${text(i, method)}`;
    const share = method === undefined ? 0.3 : Math.asinh(Math.abs(values[i] ?? 0) / usual) / Math.asinh(most / usual);
    cell.style.setProperty("--share", `${Math.round(100 * share)}%`);
    cell.className = `${lost ? "gone" : ""} ${values[i] < 0 ? "harm" : ""}`;
    cell.setAttribute("aria-label", `${labels[i]}${score}${lost ? ", pruned" : ""}`);
    cell.setAttribute("aria-pressed", i === chosen);
    cell.tabIndex = i === chosen ? 0 : -1;
  }
}

for (const [i, cell] of cells.entries()) {
  cell.addEventListener("click", () => choose(i));
  cell.addEventListener("keydown", (event) => {
    const { layer, head } = heads[i];
    const at = (l, h) => {
      const line = Math.max(0, Math.min(data.layers.length - 1, l));
      const last = data.layers[line][1] - 1;
      return heads.findIndex((one) => one.layer === line && one.head === Math.max(0, Math.min(last, h)));
    };
    const to = {
      ArrowRight: at(layer, head + 1), ArrowLeft: at(layer, head - 1), ArrowDown: at(layer + 1, head), ArrowUp: at(layer - 1, head),
      Home: at(layer, 0), End: at(layer, Infinity),
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
    cells[to].focus();
  });
}

// -- the slider ---------------------------------------------------------------------------------

const lines = [...document.querySelectorAll("section:first-of-type tbody tr")].reverse(); // the table begins with the dense model
const names = [...document.querySelectorAll("section:first-of-type thead th")].map((cell) => cell.textContent);

function resize() {
  const said = [...lines[size].cells].map((cell) => cell.textContent);
  const change = said[2] && `${said[2]}: ${said[3]}`;
  const facts = [[names[1], said[1]], [names[2], change], [names[4], said[4]]].filter(([, fact]) => fact);
  by("size-heads").textContent = `${data.kept[size]} of ${data.kept[dense]}`;
  by("size").setAttribute("aria-valuetext", `${data.kept[size]} heads: ${facts.map(([, fact]) => fact).join(", ")}`);
  const line = ([name, fact]) => element("div", {}, element("dt", {}, name), element("dd", {}, fact));
  by("size-facts").replaceChildren(...[...facts, ["to load it", element("code", {}, data.uses[size])]].map(line));
  for (const [i, row] of lines.entries()) row.classList.toggle("chosen", i === size);
  paint();
}

by("size")?.addEventListener("input", () => {
  size = by("size").valueAsNumber;
  resize();
});

// -- one head -----------------------------------------------------------------------------------

let sample = 0;
let query = 0;

function choose(i, scroll = false) {
  rows[chosen].classList.remove("chosen");
  rows[i].classList.add("chosen");
  chosen = i;
  paint();
  show();
  if (scroll) by("head").scrollIntoView({ block: "nearest" });
}

function show() {
  const parts = [element("h3", {}, labels[chosen]), ...facts(chosen)];
  if (data.samples.length) parts.push(...attention(chosen));
  by("head").replaceChildren(...parts);
}

function facts(i) {
  const found = [];
  const role = text(i, columns.length - 1);
  const reason = data.reasons[i];
  if (role) found.push(element("p", {}, element("b", {}, role), reason ? `: ${reason}` : ""));
  else if (reason) found.push(element("p", {}, `Its attention could not be seen: ${reason}`));
  const fates = range(Math.max(0, dense)).map((s) => `${gone(i, s) ? "pruned" : "kept"} with ${data.kept[s]}`).reverse();
  if (fates.length) found.push(element("p", {}, `In the pruned models: ${fates.join(", ")}.`));
  for (const method of methods) {
    const above = rows.filter((_, j) => value(j, method) > value(i, method)).length;
    const rank = value(i, method) === null ? "" : `, number ${1 + above} of ${rows.length}`;
    found.push(element("p", {}, `${data.methods[method - 1]}: ${text(i, method)}${rank}`));
  }
  return found;
}

/** A list to choose from, with its label. */
function picker(id, name, texts, now, then) {
  const select = element("select", { id }, ...texts.map((text, i) => new Option(text, i, false, i === now)));
  select.addEventListener("change", () => {
    then(Number(select.value));
    show();
    by(id).focus();
  });
  return element("label", {}, `${name} `, select);
}

/** What a head attends to in an example: one query's keys as they stand in the text or image, and every query by every key. */
function attention(i) {
  const { title: _, positions, layers } = data.samples[sample];
  const texts = data.samples.map(({ title }, s) => (title ? `${s + 1}: ${title}` : `${s + 1}`));
  const parts = [picker("sample", "Example", texts, sample, (to) => ([sample, query] = [to, 0]))];
  const index = Number(data.layers[heads[i].layer][0].slice(1));
  const held = layers.find(({ layer }) => layer === index);
  if (!held || heads[i].head >= held.shape[0]) return [...parts, element("p", {}, "Not held for this layer.")];
  const [, count, width] = held.shape;
  const bytes = Uint8Array.from(atob(held.weights), (c) => c.charCodeAt(0));
  const scale = held.scale ?? 1;
  const weight = (row, key) => (bytes[(heads[i].head * count + row) * width + key] / 255) * scale;
  const shade = (row, key) => Math.sqrt(weight(row, key) / scale); // so that small weights can be seen
  const keys = positions[held.keys];
  const asking = (held.rows ?? range(count)).map((row) => `${row}: ${positions[held.queries].labels[row]}`);
  query = Math.min(query, count - 1);
  parts.push(picker("query", "From", asking, query, (to) => (query = to)));
  const before = keys.grid ? width - keys.grid[0] * keys.grid[1] : width;
  const tokens = range(before).map((key) => {
    const back = element("span", { class: "paint", "aria-hidden": "true" });
    back.style.opacity = shade(query, key);
    return element("span", { class: "token", title: weight(query, key).toFixed(2) }, back, keys.labels[key] || " ");
  });
  parts.push(element("p", { class: "keys" }, ...tokens));
  if (keys.grid) {
    const [down, across] = keys.grid;
    const label = `Attention over the image's ${down} by ${across} patches`;
    const box = element("div", { class: "patches" }, drawn(down, across, "--patch", label, (r, c) => 0.85 * shade(query, before + r * across + c)));
    if (keys.image?.startsWith("data:image/png;base64,")) box.prepend(element("img", { src: keys.image, alt: "The example" }));
    parts.push(box);
  }
  const top = range(width).reduce((best, key) => (weight(query, key) > weight(query, best) ? key : best), 0);
  const all = drawn(count, width, "--accent", "Attention of every query (rows) to every key (columns)", shade);
  parts.push(element("p", {}, `Most to “${keys.labels[top]}” (${weight(query, top).toFixed(2)}).`), element("div", { class: "matrix" }, all));
  parts.push(element("p", { class: "muted" }, "All queries (downwards) by all keys (to the right): the stronger the colour, the larger the weight (square root)."));
  return parts;
}

/** A picture of a table of shares: a pixel each, which the style enlarges. */
function drawn(down, across, colour, label, share) {
  const canvas = element("canvas", { width: across, height: down, role: "img", "aria-label": label });
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.body).getPropertyValue(colour).trim();
  for (const r of range(down)) {
    for (const c of range(across)) {
      pen.globalAlpha = share(r, c);
      pen.fillRect(c, r, 1, 1);
    }
  }
  return canvas;
}

// What stands at first: the model that the verdict is about, and the most important head.
if (data.kept.length) resize();
const first = methods.length ? rows.reduce((best, _, i) => (value(i, 1) > value(best, 1) ? i : best), 0) : 0;
choose(first);
})();
