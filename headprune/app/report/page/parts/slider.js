// The sizes: the slider, what it says, and the row of the table.

if (data.sizes.length) {
  const slider = by("budget");
  on("size", (i) => {
    const size = data.sizes[i];
    const use = size.file ? `headprune.load("${size.file}")` : "the model as it was";
    by("budget-heads").textContent = size.heads;
    for (const place of document.querySelectorAll("[data-said]")) {
      const what = place.dataset.said;
      place.textContent = what === "use" ? use : what === "file" ? (size.file ? `${size.file}/` : "–") : size[what] || "–";
    }
    slider.setAttribute("aria-valuetext", `${size.heads} heads: ${size.value}${size.verdict && `, ${size.verdict}`}`);
    for (const row of document.querySelectorAll("#budgets tbody tr")) row.classList.toggle("chosen", Number(row.dataset.budget) === i);
  });
  slider.addEventListener("input", () => choose("size", slider.valueAsNumber));
}
