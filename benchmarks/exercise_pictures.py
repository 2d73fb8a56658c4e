"""The pictures of docs/exercise.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, RED, GREY, GREEN, ORANGE = "#0072B2", "#D55E00", "#999999", "#009E73", "#E69F00"
ROLES = {
    "previous token": BLUE, "next token": "#56B4E9", "relative position": "#56B4E9", "itself": "#F0E442", "first token": RED,
    "separator": RED, "same token": "#F0E442", "rare words": "#CC79A7", "broad": ORANGE, "near": "#332288", "mixed": "#bbbbbb",
}  # fmt: skip
_CELL, _FRAME, _GAP = 44, 3, 6  # pixels
Rows = Sequence[tuple[str, Sequence[np.ndarray], Sequence[str]]]
"""Of each layer: its name, the weights ``[queries, keys]`` of every head, and every head's role."""


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def all_heads(path: Path, layers: Rows) -> None:
    """All heads as small multiples: a row for each layer, queries down and keys to the right, a frame for each role."""
    from matplotlib import colormaps

    widest, step = max(len(heads) for _, heads, _ in layers), _CELL + 2 * _FRAME + _GAP
    canvas = np.ones((len(layers) * step, widest * step, 3))
    for i, (_, heads, roles) in enumerate(layers):
        for h, (weights, role) in enumerate(zip(heads, roles, strict=True)):
            top, left, size = i * step, h * step, _CELL + 2 * _FRAME
            colour = ROLES.get(role, ROLES["mixed"])
            canvas[top : top + size, left : left + size] = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
            rows, columns = (np.arange(_CELL) * n // _CELL for n in weights.shape)
            shades = colormaps["Blues"](np.sqrt(weights[rows][:, columns].clip(0, 1)))[..., :3]
            canvas[top + _FRAME : top + _FRAME + _CELL, left + _FRAME : left + _FRAME + _CELL] = shades
    longest = max(len(name) for name, _, _ in layers)
    figure, axis = _figure(0.6 + 0.07 * longest + widest * 0.55, 1.1 + len(layers) * 0.55)
    axis.imshow(canvas, interpolation="nearest")
    middles = (np.arange(max(widest, len(layers))) + 0.5) * step - _GAP / 2
    axis.set_xticks(middles[:widest], [f"H{h}" for h in range(widest)], fontsize=7)
    axis.set_yticks(middles[: len(layers)], [name for name, _, _ in layers], fontsize=7)
    axis.tick_params(length=0)
    axis.xaxis.tick_top()
    axis.spines[:].set_visible(False)
    used = [role for _, _, roles in layers for role in roles]
    patches = [Patch(color=ROLES[r], label=f"{r} ({used.count(r)})") for r in ROLES if r in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 4), fontsize=7, frameon=False)
    _save(figure, path)


def one_head(
    path: Path, weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], title: str, down: str
) -> None:
    """One head, large."""
    figure, axis = _figure(1.9 + 0.33 * len(keys), 1.3 + 0.3 * len(queries))
    image = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(range(len(keys)), keys, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_yticks(range(len(queries)), queries, fontsize=8)
    axis.set_xlabel("attends to", fontsize=8)
    axis.set_ylabel(down, fontsize=8)
    axis.set_title(title, fontsize=8, loc="left")
    figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
    _save(figure, path)


def importance(path: Path, panels: Mapping[str, tuple[Sequence[str], Sequence[float], Sequence[float]]]) -> None:
    """Scores of all heads in order, with 95 % intervals; coloured where the interval excludes 0."""
    figure, axes = _figure(9, 3.2, 1, len(panels))
    for axis, (title, (labels, values, errors)) in zip(axes, panels.items(), strict=True):
        order = np.argsort(values)[::-1]
        value, error = np.asarray(values)[order], 1.96 * np.asarray(errors)[order]
        colours = np.where(np.abs(value) <= error, "#cccccc", np.where(value > 0, BLUE, RED))
        axis.bar(np.arange(len(order)), value, color=colours, width=0.85)
        axis.errorbar(np.arange(len(order)), value, error, fmt="none", ecolor="#444444", elinewidth=0.7)
        every = max(1, len(order) // 24)
        axis.set_xticks(np.arange(len(order))[::every], [labels[i] for i in order][::every], rotation=90, fontsize=6)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_title(title, fontsize=8, loc="left")
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_ylabel("loss added (nats)", fontsize=8)
    handles = [
        Patch(color=BLUE, label="removal raises the loss (95 %)"),
        Patch(color=RED, label="removal lowers the loss (95 %)"),
        Patch(color="#cccccc", label="not distinguishable from 0"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    _save(figure, path)


def reliability(path: Path, panels: Mapping[str, Mapping[str, Mapping[str, Any]]], names: Mapping[str, str]) -> None:
    """Rank correlation between the scores of two samples, by the examples in each; bands of one standard deviation over draws."""
    figure, axes = _figure(9, 3.1, 1, len(panels))
    for axis, (title, methods) in zip(axes, panels.items(), strict=True):
        for (method, name), colour, marker in zip(names.items(), (ORANGE, BLUE, GREEN), "sov", strict=False):
            row = methods[method]
            n, middle, sd = (np.asarray(row[k]) for k in ("examples", "mean", "sd"))
            axis.plot(n, middle, f"{marker}-", color=colour, markersize=4, label=name)
            axis.fill_between(n, middle - sd, np.minimum(middle + sd, 1), color=colour, alpha=0.15, linewidth=0)
        axis.axhline(0.8, color="black", linewidth=0.6, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(n, [f"{x:,}" for x in n])
        axis.set_ylim(-0.25, 1.02)
        axis.set_title(title, fontsize=8, loc="left")
        axis.set_xlabel("examples in each of two samples", fontsize=8)
        axis.set_ylabel("rank correlation of their scores", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[-1].legend(fontsize=7, frameon=False, loc="lower right")
    _save(figure, path)


def together(path: Path, panels: Mapping[str, tuple[Sequence[int], Sequence[float], Sequence[float]]]) -> None:
    """What the removal of many heads adds to the loss, beside the sum of single removals."""
    figure, axes = _figure(9, 2.9, 1, len(panels))
    for axis, (title, (removed, alone, real)) in zip(axes, panels.items(), strict=True):
        axis.plot(removed, real, "o-", color=BLUE, markersize=3, label="measured: all of them removed")
        axis.plot(removed, alone, "s--", color=ORANGE, markersize=3, label="sum of single removals")
        axis.set_title(title, fontsize=8, loc="left")
        axis.set_xlabel("heads removed, lowest ablation score first", fontsize=8)
        axis.set_ylabel("loss added (nats)", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7, frameon=False)
    _save(figure, path)


def times(path: Path, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Shares of a forward pass."""
    figure, axis = _figure(8, 0.9 + 0.45 * len(bars))
    colours = [BLUE, "#56B4E9", ORANGE, "#F0E442", "#CC79A7", GREY]
    names = list(next(iter(bars.values())))
    for row, shares in enumerate(bars.values()):
        left = 0.0
        for name, colour in zip(names, colours, strict=False):
            axis.barh(row, shares[name], left=left, color=colour, label=name if not row else None)
            if shares[name] > 0.04:
                dark = colour in (BLUE, "#CC79A7", GREY)
                axis.text(
                    left + shares[name] / 2, row, f"{100 * shares[name]:.0f} %", ha="center", va="center", fontsize=7,
                    color="white" if dark else "black",
                )  # fmt: skip
            left += shares[name]
    axis.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([])
    axis.spines[:].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    _save(figure, path)
