// The sizes: the slider, what it says, and the row of the table.

if (data.sizes.length) {
  const slider = by("size");
  on("size", (i) => {
    const size = data.sizes[i];
    by("size-heads").textContent = size.heads;
    for (const place of document.querySelectorAll("[data-cell]")) {
      const [figure, ...more] = (size.cells[place.dataset.cell] || "–").split(" (");
      place.replaceChildren(figure, ...(more.length ? [made("small", ` (${more.join(" (")}`)] : []));
    }
    by("size-use").textContent = size.use;
    slider.setAttribute("aria-valuetext", `${size.heads} heads: ${size.cells.slice(1, 4).join(", ")}`);
    for (const row of document.querySelectorAll("#sizes tbody tr")) row.classList.toggle("chosen", Number(row.dataset.size) === i);
  });
  slider.addEventListener("input", () => choose("size", slider.valueAsNumber));
}
