// The time of a forward pass: a small chart for every input, since their times are far apart.

if (data.latency.length) {
  on("size", drawn(by("latency"), (width) => data.latency.flatMap(({ input, models }) => {
    const fine = models.filter((m) => m.median !== null);
    if (!fine.length) return [];
    const now = data.sizes[state.size].name;
    const strong = (m) => m.name === now;
    const chart = Plot.plot({
      width, height: 22 * fine.length + 8, marginLeft: 78, marginRight: 112, marginTop: 2, marginBottom: 6, style: { fontSize: "12px" },
      ariaLabel: `Milliseconds of a forward pass, ${input}`,
      ariaDescription: fine.map((m) => `${m.name}: ${m.said}`).join("; "),
      x: { axis: null, domain: [0, d3.max(fine, (m) => Math.max(m.p95 ?? 0, m.median))] },
      y: { label: null, domain: fine.map((m) => m.name), tickSize: 0, padding: 0.25 },
      marks: [
        Plot.barX(fine, {
          x: "median", y: "name", rx: 2, stroke: "var(--bar)", strokeWidth: 1,
          fill: { value: (m) => (strong(m) ? "var(--accent)" : m.bound ? "transparent" : "var(--bar)"), scale: null },
          strokeDasharray: { value: (m) => (m.bound ? "4 3" : "none"), scale: null },
        }),
        Plot.ruleY(fine, { x1: "median", x2: "p95", y: "name", stroke: "var(--ink)", strokeWidth: 1.25 }),
        Plot.text(fine, {
          x: (m) => Math.max(m.p95 ?? 0, m.median), y: "name", text: "said", textAnchor: "start", dx: 6, fill: "var(--ink)",
          fontWeight: { value: (m) => (strong(m) ? 700 : 400), scale: null },
        }),
      ],
    });
    return [made("h3", input), picture(chart)];
  })));
}
