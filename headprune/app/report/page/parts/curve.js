// The metric against heads kept: a line for every order of removal, and the models that were measured.

if (data.curve) {
  const { label, change, share, log, points, total } = data.curve;
  const methods = [...new Set(points.map((p) => p.method))].filter((m) => m !== "random");
  const names = [...methods, ...(points.some((p) => p.method === "random") ? ["random"] : [])];
  const colour = (method) => (method === "random" ? "var(--grey)" : `var(--c${methods.indexOf(method) % 6})`);
  const dash = (method) => (method === "random" ? "6 4" : ["", "8 3", "2 3", "10 3 2 3", "5 5", "1 4"][methods.indexOf(method) % 6]);
  const measured = data.curve.measured.filter((m) => m.value !== null);
  const pruned = measured.filter((m) => data.sizes[m.size].file);
  const dense = measured.filter((m) => !data.sizes[m.size].file);
  const tick = share ? (change ? (v) => d3.format("+.0f")(100 * v) : d3.format(".0%")) : change && d3.max(points, (p) => Math.abs(p.value)) < 50 ? d3.format("+.0%") : undefined;
  const fine = points.filter((p) => p.value !== null);

  const draw = drawn(by("curve"), (width) => {
    const at = measured.filter((m) => m.size === state.size);
    return picture(Plot.plot({
      width, height: Math.max(260, Math.min(520, width * 0.95)), marginLeft: 54, marginBottom: 40, style: { fontSize: "12px" },
      ariaLabel: `${label} against heads kept`,
      ariaDescription: "The table under this chart has the same figures.",
      x: { label: `heads kept, of ${total}`, domain: [0, total * 1.02], labelArrow: "none" },
      y: { label: share && change ? `${label}, points` : label, type: log ? "log" : "linear", tickFormat: tick, ticks: 6, nice: !log, labelArrow: "none" },
      marks: [
        Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1 }),
        Plot.areaY(fine, { x: "kept", y1: "low", y2: "high", z: "method", fill: { value: (p) => colour(p.method), scale: null }, fillOpacity: 0.1 }),
        ...names.map((name) => Plot.lineY(fine.filter((p) => p.method === name), { x: "kept", y: "value", stroke: colour(name), strokeWidth: 1.75, strokeDasharray: dash(name) })),
        Plot.dot(fine.filter((p) => p.kept < total), { x: "kept", y: "value", r: 3, fill: { value: (p) => colour(p.method), scale: null } }),
        Plot.ruleY(dense, { y: "value", stroke: "var(--ink)", strokeDasharray: "1 4" }),
        Plot.ruleX(at, { x: "kept", stroke: "var(--ink)", strokeDasharray: "2 3" }),
        Plot.ruleX(pruned, { x: "kept", y1: "low", y2: "high", stroke: "var(--ink)", strokeWidth: 1.5 }),
        Plot.dot(pruned, { x: "kept", y: "value", symbol: "diamond", r: 5, fill: "var(--ink)", stroke: "var(--panel)" }),
        Plot.dot(at, { x: "kept", y: "value", r: 10, stroke: "var(--accent)", strokeWidth: 2.5 }),
        Plot.tip(fine, Plot.pointer({ x: "kept", y: "value", title: (p) => `${p.method}, ${p.kept} heads: ${p.said}`, fill: "var(--panel)", stroke: "var(--line)" })),
      ],
    }));
  });
  on("size", draw);

  by("curve-legend").append(...names.map((name) => {
    const item = made("span", "", { class: "key" });
    const line = Plot.plot({
      width: 26, height: 10, margin: 0, axis: null, x: { domain: [0, 1] }, y: { domain: [0, 1] }, ariaHidden: "true",
      marks: [Plot.ruleY([0.5], { stroke: colour(name), strokeWidth: 2.5, strokeDasharray: dash(name) })],
    });
    line.setAttribute("aria-hidden", "true");
    item.append(line, name);
    return item;
  }));
}
