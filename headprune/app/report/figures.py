"""The report's pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headprune.app.documents import Latency, Metrics, TimeParts
from headprune.app.report import sentences
from headprune.app.report.findings import mean_of
from headprune.app.report.verdict import against_random, verdict
from headprune.files import atomic_file
from headprune.scoring.agreement import agreements, chance
from headprune.scoring.scores import HeadScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers (Okabe and Ito); grey is always the random control.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#7f7f7f"
_COLUMNS = 3  # heat maps side by side
_WRITTEN = 160  # heads up to which every cell has its value


def importance(path: Path, scores: Sequence[HeadScores], metrics: Metrics | None) -> None:
    """A heat map per method, layers by heads; crosses mark the heads that went from the model that the report is about.

    Colours are even in size near 0 and in ratio beyond the median, so that a layer with large scores hides no other. With few heads,
    every cell has its value.
    """
    shown = [s for s in scores if s.method != "random"] or list(scores)
    layers = shown[0].layers
    widest = max(layer.num_heads for layer in layers)
    written = sum(layer.num_heads for layer in layers) <= _WRITTEN
    cell = (0.5, 0.42) if written else (0.42, 0.36)
    size = (1.6 + cell[0] * max(widest, 6), 1.35 + cell[1] * max(len(layers), 4))
    columns = min(len(shown), 2 if written else _COLUMNS)
    rows = -(-len(shown) // columns)
    figure, axes = _figure(size[0] * columns, size[1] * rows, columns, rows)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    budget = verdict(metrics).budget if metrics else None
    for axis, s in zip(axes, shown, strict=False):
        grid = np.full((len(layers), widest), np.nan)
        for i, layer in enumerate(layers):
            grid[i, : layer.num_heads] = s.values[layer.name].numpy()
        both = s.signed and np.nanmin(grid) < 0
        norm, power = colours(grid, both)
        image = axis.imshow(grid, cmap="RdBu" if both else "Blues", norm=norm, aspect="auto")
        for i, layer in enumerate(layers):
            for h in range(layer.num_heads):
                shade = float(norm(grid[i, h]))
                dark = abs(shade - 0.5) > 0.33 if both else shade > 0.6
                colour = "white" if dark else "black"
                if written:
                    axis.text(h, i, _short(grid[i, h] / 10**power), ha="center", va="center", fontsize=7, color=colour)
                if budget is not None and h in budget.drop.get(layer.name, ()):
                    place = (h - 0.34, i - 0.3) if written else (h, i)
                    axis.plot(*place, marker="x", color=colour, markersize=4.5, markeredgewidth=1)
        axis.set_title(s.method)
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
        axis.set_xticks(range(0, widest, max(1, widest // 12)))
        step = max(1, len(layers) // 16)
        axis.set_yticks(range(0, len(layers), step), [f"L{a.index}" for a in layers[::step]])
        unit = s.unit.split(",")[0].split(" when ")[0]
        scale = f", times 1e{power}" if power else ""
        bar = figure.colorbar(image, ax=axis, shrink=0.9)
        usual = norm.linear_width
        ticks = [
            t for t in (-5 * usual, -usual, 0, usual, 5 * usual, norm.vmax, norm.vmin) if norm.vmin <= t <= norm.vmax
        ]
        ticks = [
            t
            for t in ticks
            if t in (norm.vmin, norm.vmax) or all(abs(norm(t) - norm(e)) > 0.07 for e in (norm.vmin, norm.vmax))
        ]
        bar.set_ticks(ticks, labels=[_short(t / 10**power) for t in ticks])
        bar.ax.minorticks_off()
        bar.set_label(f"{unit}{scale}", fontsize=8)
    if budget is not None:
        figure.supxlabel(f"×: removed to keep {budget.kept} of {budget.total} heads", fontsize=9)
    _save(figure, path)


def _short(value: float) -> str:
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"
    return "0.0" if text == "-0.0" else text


def colours(grid: np.ndarray, both: bool) -> tuple[Any, int]:
    """What makes scores ``[layers, heads]`` colours, and the power of ten to write them in: a middling one has a digit before the point.

    Args:
        both: Whether 0 is the middle of the colours, and not their end.
    """
    from matplotlib.colors import AsinhNorm

    found = grid[np.isfinite(grid)]
    sizes = np.abs(found)
    most = float(sizes.max(initial=0.0)) or 1.0
    usual = max(float(np.median(sizes)) if len(sizes) else most, most / 1000)
    low = -most if both else float(found.min(initial=0.0))
    return AsinhNorm(linear_width=usual, vmin=low, vmax=most), 0 if 1 <= usual < 100 else int(np.floor(np.log10(usual)))


def agreement(path: Path, scores: Sequence[HeadScores]) -> None:
    """Spearman's rho of every pair of methods, with how far random orders go in the title."""
    shown = [s for s in scores if s.method != "random"]
    names = [s.method for s in shown]
    grid = np.eye(len(shown))
    for a in agreements(shown):
        i, j = names.index(a.first), names.index(a.second)
        grid[i, j] = grid[j, i] = a.spearman
    figure, (axis,) = _figure(2.6 + 0.62 * len(shown), 2.0 + 0.55 * len(shown), 1)
    image = axis.imshow(grid, cmap="RdBu", vmin=-1, vmax=1)
    for i, j in np.ndindex(*grid.shape):
        dark = abs(grid[i, j]) > 0.6
        text = "–" if np.isnan(grid[i, j]) else f"{grid[i, j]:.2f}"
        axis.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    heads = len(shown[0].flat())
    axis.set_title(
        f"Spearman's rho over {heads} heads\n(random orders: within ±{chance(heads).spearman:.2f})", fontsize=9
    )
    figure.colorbar(image, ax=axis, shrink=0.8)
    _save(figure, path)


def trade_off(path: Path, metrics: Metrics) -> None:
    """The metric on the reported examples against heads kept: the saved models, and random heads beside chosen ones repaired alike."""
    metric, dense = metrics.metric, metrics.dense
    _, (axis,) = _figure(7.2, 4.0, 1)
    budgets = sorted(metrics.budgets, key=lambda b: b.kept)
    total, level = budgets[0].total, dense.metrics[metric]
    models = [(b.kept, b.pruned) for b in budgets] + [(total, dense)]
    x = [kept for kept, _ in models]
    values = np.array([(m.metrics[metric], m.low, m.high) for _, m in models]).T
    ends = np.maximum([values[0] - values[1], values[2] - values[0]], 0)
    style: dict[str, Any] = {"fmt": "D-", "color": _COLOURS[0], "markersize": 6, "capsize": 3, "zorder": 5}
    axis.errorbar(x, values[0], ends, **style, label=sentences.CHOSEN)
    if told := sentences.alike(metrics):
        same = [*(against_random(metrics, b).value for b in budgets), level]
        axis.plot(x, same, "D:", color=_COLOURS[0], markersize=5, markerfacecolor="white", zorder=4, label=told)
    draws = [b.random for b in budgets]
    middle, low, high = ([*map(make, draws), level] for make in (partial(mean_of, metric=metric), min, max))
    axis.plot(x, middle, "--", color=_GREY, label=sentences.random_draws(len(draws[0])))
    axis.fill_between(x, low, high, color=_GREY, alpha=0.2, lw=0)
    axis.axhline(level, color="black", lw=0.8, ls=":", label="dense model")
    axis.set_xticks(x)
    _finish(axis, path, metric, total, "reported")


def orders(path: Path, metrics: Metrics) -> None:
    """The metric on the choosing part against heads kept, by every order, with random as control."""
    metric, curve = metrics.metric, metrics.curve
    _, (axis,) = _figure(7.2, 4.0, 1)
    dense = next(p for p in curve if p.method == "dense")
    methods = [m for m in dict.fromkeys(p.method for p in curve) if m not in ("dense", "random")]
    for colour, method in zip(_COLOURS, methods, strict=False):
        points = sorted((p for p in (*curve, dense) if p.method in (method, "dense")), key=lambda p: p.kept)
        x = [p.kept for p in points]
        axis.plot(x, [p.value for p in points], marker="o", markersize=4, color=colour, label=method)
        axis.fill_between(x, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.12, lw=0)
    draws: dict[int, list[float]] = {}
    for p in curve:
        if p.method == "random":
            draws.setdefault(p.kept, []).append(p.value)
    x = [*sorted(draws), dense.kept]
    middle, low, high = (
        [*(make(draws[k]) for k in x[:-1]), dense.value] for make in (partial(mean_of, metric=metric), min, max)
    )
    axis.plot(x, middle, "--", color=_GREY, label=sentences.random_draws(max(map(len, draws.values()), default=0)))
    axis.fill_between(x, low, high, color=_GREY, alpha=0.2, lw=0)
    axis.axhline(dense.value, color="black", lw=0.8, ls=":", label="dense model")
    _finish(axis, path, metric, dense.kept, "choosing")


def _finish(axis: Any, path: Path, metric: str, total: int, part: str) -> None:
    """Labels, legend and grid of a metric against heads kept."""
    axis.set_xlabel(f"heads kept, of {total}")
    axis.set_ylabel(f"{metric}, on the {part} examples")
    if metric == "perplexity":
        axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    _save(axis.figure, path)


def latency(path: Path, times: Latency) -> None:
    """Median forward time of every model on every shape, with the 95th percentile as a whisker."""
    rows = times.rows
    figure, axes = _figure(2.6 * len(rows) + 0.6, 3.6, len(rows))
    for axis, row in zip(axes, rows, strict=True):
        for i, (name, t) in enumerate(row.timings.items()):
            colour = "black" if name == "dense" else _GREY if name == times.bound else _COLOURS[0]
            axis.bar(i, t.median, color=colour, alpha=0.85)
            axis.plot([i, i], [t.median, t.p95], color="#444444", lw=1.2)
        axis.set_xticks(range(len(row.timings)), list(row.timings), rotation=35, ha="right", fontsize=8)
        tokens = f", {row.length} tokens" if row.length else ""
        axis.set_title(f"batch {row.batch}{tokens}", fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("ms per forward pass\n(bar: median, line: to the 95th percentile)", fontsize=8)
    _save(figure, path)


# What pruning heads can save is blue.
_PARTS = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#bfbfbf", "#595959")


def time_parts(path: Path, rows: Sequence[TimeParts]) -> None:
    """The shares of the dense model's time: a bar for each input."""
    figure, (axis,) = _figure(7.2, 1.2 + 0.42 * len(rows), 1)
    for i, row in enumerate(rows):
        left = 0.0
        for colour, (part, share) in zip(_PARTS, row.shares.items(), strict=True):
            axis.barh(i, share, left=left, color=colour, height=0.72, label=part if i == 0 else None)
            if share >= 0.05:
                light = colour in ("#56B4E9", "#E69F00", "#bfbfbf")
                axis.text(
                    left + share / 2, i, f"{100 * share:.0f} %", ha="center", va="center", fontsize=8,
                    color="black" if light else "white",
                )  # fmt: skip
            left += share
    tokens = (f" x {row.length} tokens" if row.length else "" for row in rows)
    axis.set_yticks(
        range(len(rows)), [f"batch {row.batch}{t}" for row, t in zip(rows, tokens, strict=True)], fontsize=8
    )
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([])
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _save(figure, path)


def _figure(width: float, height: float, columns: int, rows: int = 1) -> tuple[Figure, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    return figure, list(np.atleast_1d(figure.subplots(rows, columns)).flat)


def _save(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
