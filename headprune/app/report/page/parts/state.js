// What the parts share: the data, which size and which head are chosen, and who is told when that changes.

const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const heads = data.layers.flatMap(([label, count], layer) => d3.range(count).map((head) => ({ label: `${label}.H${head}`, layer, head })));
const state = { size: null, head: null };
const told = { size: [], head: [] };

function on(what, then) {
  told[what].push(then);
}

function choose(what, value) {
  if (state[what] === value) return;
  state[what] = value;
  for (const then of told[what]) then(value);
}

/** An element with text, never markup. */
function made(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A chart as one picture for those who do not see it: its label and description are what is read. */
function picture(chart) {
  for (const svg of [chart, ...chart.querySelectorAll("svg")].filter((e) => e.tagName === "svg")) {
    svg.setAttribute("role", "img");
    unlabelled(svg);
  }
  return chart;
}

/** Without the names that Plot gives its marks: they say nothing to a reader. */
function unlabelled(svg) {
  for (const group of svg.querySelectorAll("[aria-label]:not([role])")) group.removeAttribute("aria-label");
}

/** Draw into a place now, and again whenever its width changes; returns a function that draws again. */
function drawn(place, draw) {
  let width = 0;
  const again = () => {
    if (width) place.replaceChildren(...[draw(width)].flat());
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width) return;
    width = now;
    again();
  }).observe(place);
  return again;
}

for (const element of document.querySelectorAll("[data-js]")) element.hidden = false;
