// The metric against heads kept: the reported models and random heads; and below, every order of removal.

if (data.curve) {
  const { metric, share, points, random, alike, total, names: said } = data.curve;
  const fine = (found) => found.filter((p) => p.value !== null);
  const frame = (width, y, marks) => Plot.plot({
    width, height: Math.max(250, Math.min(460, width * 0.8)), marginLeft: 54, marginBottom: 40, style: { fontSize: "12px" },
    ariaLabel: `${y.label} against heads kept`,
    ariaDescription: "A table on this page has the same figures.",
    x: { label: `heads kept, of ${total}`, domain: [0, total * 1.02], labelArrow: "none" },
    y: { ticks: 6, labelArrow: "none", nice: y.type !== "log", ...y },
    marks: [Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1 }), ...marks],
  });
  // d3 labels a logarithmic axis at powers of ten: where all values lie between two of them, that would be nowhere.
  const logarithmic = (found) => {
    const [low, high] = [d3.min(found, (p) => p.low ?? p.value), d3.max(found, (p) => p.high ?? p.value)];
    return { type: "log", ...(high < 10 * low ? { ticks: d3.ticks(low, high, 5), tickFormat: String } : {}) };
  };
  const tip = (found, title) => Plot.tip(found, Plot.pointer({ x: "kept", y: "value", title, fill: "var(--panel)", stroke: "var(--line)" }));
  const band = (found, fill, opacity) => Plot.areaY(found, { x: "kept", y1: "low", y2: "high", fill, fillOpacity: opacity });
  const key = (place, entries) => by(place).append(...entries.map(([name, stroke, strokeDasharray]) => {
    const item = made("span", "", { class: "key" });
    const line = Plot.plot({
      width: 26, height: 10, margin: 0, axis: null, x: { domain: [0, 1] }, y: { domain: [0, 1] },
      marks: [Plot.ruleY([0.5], { stroke, strokeWidth: 2.5, strokeDasharray })],
    });
    line.setAttribute("aria-hidden", "true");
    item.append(line, name);
    return item;
  }));

  // The reported models.
  const reported = fine(data.sizes.map((s, size) => ({ size, kept: s.kept, value: s.figure[0], low: s.figure[1], high: s.figure[2], said: s.cells[1] })));
  const others = fine(random);
  const same = fine(alike);
  const named = (found, name) => found.map((p) => ({ ...p, name }));
  const scale = (found) => (metric === "perplexity" ? logarithmic(found) : { tickFormat: share ? d3.format(".0%") : undefined });
  on("size", drawn(by("curve"), (width) => {
    const at = reported.filter((m) => m.size === state.size);
    return picture(frame(width, { label: metric, ...scale([...reported, ...others]) }, [
      band(others, "var(--grey)", 0.18),
      Plot.lineY(others, { x: "kept", y: "value", stroke: "var(--grey)", strokeWidth: 1.75, strokeDasharray: "6 4" }),
      Plot.dot(others.filter((p) => p.kept < total), { x: "kept", y: "value", r: 3, fill: "var(--grey)" }),
      Plot.ruleY(reported.slice(-1).filter((m) => m.kept === total), { y: "value", stroke: "var(--ink)", strokeDasharray: "1 4" }),
      Plot.ruleX(at, { x: "kept", stroke: "var(--ink)", strokeDasharray: "2 3" }),
      Plot.lineY(same, { x: "kept", y: "value", stroke: "var(--c0)", strokeWidth: 1.5, strokeDasharray: "2 3" }),
      Plot.dot(same.filter((p) => p.kept < total), { x: "kept", y: "value", symbol: "diamond", r: 4, fill: "var(--panel)", stroke: "var(--c0)" }),
      Plot.lineY(reported, { x: "kept", y: "value", stroke: "var(--c0)", strokeWidth: 2 }),
      Plot.ruleX(reported, { x: "kept", y1: "low", y2: "high", stroke: "var(--c0)", strokeWidth: 1.75 }),
      Plot.dot(reported, { x: "kept", y: "value", symbol: "diamond", r: 5, fill: "var(--c0)", stroke: "var(--panel)" }),
      Plot.dot(at, { x: "kept", y: "value", r: 10, stroke: "var(--ink)", strokeWidth: 2 }),
      tip([...named(reported, "chosen heads"), ...named(same, said.alike), ...named(others, "random heads")], (p) => `${p.kept === total ? "dense" : p.name}, ${p.kept} kept: ${p.said}`),
    ]));
  }));
  key("curve-legend", [[said.chosen, "var(--c0)", ""], ...(said.alike ? [[said.alike, "var(--c0)", "2 3"]] : []), [said.random, "var(--grey)", "6 4"]]);

  // Every order, where plans were chosen.
  const methods = [...new Set(points.map((p) => p.method))].filter((m) => m !== "random");
  const names = [...methods, ...(points.some((p) => p.method === "random") ? ["random"] : [])];
  const colour = (method) => (method === "random" ? "var(--grey)" : `var(--c${methods.indexOf(method) % 6})`);
  const dash = (method) => (method === "random" ? "6 4" : ["", "8 3", "2 3", "10 3 2 3", "5 5", "1 4"][methods.indexOf(method) % 6]);
  drawn(by("orders"), (width) => picture(frame(width, { label: metric, ...scale(fine(points)) }, [
    ...names.flatMap((name) => {
      const line = fine(points).filter((p) => p.method === name);
      return [
        band(line, colour(name), 0.1),
        Plot.lineY(line, { x: "kept", y: "value", stroke: colour(name), strokeWidth: 1.75, strokeDasharray: dash(name) }),
        Plot.dot(line.filter((p) => p.kept < total), { x: "kept", y: "value", r: 3, fill: colour(name) }),
      ];
    }),
    tip(fine(points), (p) => `${p.method}, ${p.kept} heads: ${p.said}`),
  ])));
  key("orders-legend", names.map((name) => [name, colour(name), dash(name)]));
}
