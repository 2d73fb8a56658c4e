// The table of heads: sorted by any column, and its rows say which head is meant.

{
  const table = by("heads");
  const body = table.tBodies[0];
  const columns = [...table.tHead.rows[0].cells];

  function sort(column, up) {
    const number = columns[column].dataset.sort === "number";
    const key = (row) => {
      const cell = row.cells[column];
      const text = cell.dataset.value ?? cell.textContent;
      return number ? (text === "" ? null : Number(text)) : text;
    };
    const rows = [...body.rows].map((row) => [key(row), Number(row.dataset.head), row]);
    const way = up ? 1 : -1;
    rows.sort(([a, i], [b, j]) => (a === null) - (b === null) || way * d3.ascending(a, b) || i - j);
    body.append(...rows.map(([, , row]) => row));
    for (const [i, cell] of columns.entries()) {
      if (i === column) cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
    }
  }

  for (const [i, cell] of columns.entries()) {
    const button = made("button", cell.textContent, { type: "button", class: "sort" });
    button.addEventListener("click", () => {
      const now = cell.getAttribute("aria-sort");
      sort(i, now ? now === "descending" : !("down" in cell.dataset));
    });
    cell.replaceChildren(button);
  }

  const of = (event) => event.target.closest?.("tr[data-head]");
  body.addEventListener("pointerover", (event) => {
    if (of(event)) hover(event, Number(of(event).dataset.head));
  });
  body.addEventListener("focusin", (event) => reach(Number(of(event).dataset.head)));
  body.addEventListener("click", (event) => of(event) && hold(Number(of(event).dataset.head)));

  let chosen = null;
  on("head", (i) => {
    chosen?.classList.remove("chosen");
    chosen = i === null ? null : body.querySelector(`[data-head="${i}"]`);
    chosen?.classList.add("chosen");
  });
}

// Everything is listening: what stands at first.
if (data.sizes.length) choose("size", by("size").valueAsNumber);
choose("head", d3.greatestIndex(data.methods[0]?.values ?? [0], (value) => value ?? -Infinity));
