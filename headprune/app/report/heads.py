"""Tables and pictures of heads: how important each is, how far the methods agree, what the heads do, and which ones went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headprune import amounts
from headprune.app.documents import BudgetResult, Heads, Metrics, Run
from headprune.app.pictures import figure_of_all, new_figure
from headprune.app.report import verdict
from headprune.app.report.content import Block, Documents, Figure, Table, capital, notes_by_size
from headprune.app.seeing import by_role
from headprune.scoring import METHODS
from headprune.scoring.scores import HeadScores, agreements, chance


def method_line(method: str) -> str:
    """What a scoring method says of itself."""
    return METHODS[method].about if method in METHODS else "Your own method."


def basis(scores: HeadScores) -> str:
    """What a method's scores mean, and what they rest on."""
    details = scores.details
    error = f"no standard error: {details['stderr']}" if "stderr" in details else "± is the standard error"
    facts = [capital(scores.unit), scores.basis, error, details.get("estimated"), scores.caution, scores.stability]
    return f"{method_line(scores.method)} {'; '.join(str(fact) for fact in facts if fact)}."


def harmful(s: HeadScores) -> str:
    """How many heads the model would be better without; "" where that is not known, or there are none."""
    values, errors = s.flat(), s.flat_stderr()
    if not (s.signed and float(values.min()) < 0 and bool(errors.isfinite().all())):
        return ""
    harmful, unsure = (int(mask.sum()) for mask in (values + 1.96 * errors < 0, values.abs() < 1.96 * errors))
    return f" Harmful (more than 1.96 standard errors below 0): {harmful} of {len(values)}; within 1.96 standard errors of 0: {unsure}."


def scores_figure(documents: Documents) -> Figure:
    """A heat map per method, layers by heads; crosses mark the heads that the plan removes which the verdict is about."""
    metrics, scores = documents.metrics, documents.rankings or documents.scores
    budget = verdict.judge(metrics).budget if metrics is not None else None
    layers = scores[0].layers
    columns = min(len(scores), 3)
    rows = -(-len(scores) // columns)
    width, height = 1.6 + 0.42 * max(6, *(layer.num_heads for layer in layers)), 1.35 + 0.36 * max(len(layers), 4)
    figure, axes = new_figure(width * columns, height * rows, columns, rows)
    for axis in axes[len(scores) :]:
        axis.set_visible(False)
    for axis, s in zip(axes, scores, strict=False):
        _heat_map(axis, s, {} if budget is None else budget.drop)
    if budget is not None:
        figure.supxlabel(f"×: removed to keep {budget.kept} of {budget.total} heads", fontsize=9)
    crosses = "; crosses mark the heads that went" * (budget is not None)
    return Figure("importance.png", f"importance of every head{crosses}", figure)


def _heat_map(axis: Any, scores: HeadScores, drop: Mapping[str, Sequence[int]]) -> None:
    """One method's scores. Colours are even in size up to the median and in ratio beyond it, so that a large score hides no other."""
    from matplotlib.colors import AsinhNorm

    layers = scores.layers
    grid = np.full((len(layers), max(layer.num_heads for layer in layers)), np.nan)
    for i, layer in enumerate(layers):
        grid[i, : layer.num_heads] = scores.values[layer.name].numpy()
    sizes = np.abs(grid[np.isfinite(grid)])
    most = float(sizes.max(initial=0.0)) or 1.0
    usual = max(float(np.median(sizes)) if len(sizes) else most, most / 1000)
    both = scores.signed and np.nanmin(grid, initial=0.0) < 0
    norm = AsinhNorm(linear_width=usual, vmin=-most if both else 0, vmax=most)
    image = axis.imshow(grid, cmap="RdBu" if both else "Blues", norm=norm, aspect="auto")
    for i, layer in enumerate(layers):
        for h in drop.get(layer.name, ()):
            axis.plot(h, i, "x", color="white" if norm(abs(grid[i, h])) > 0.75 else "black", markersize=4.5)
    axis.set(title=scores.method, xlabel="head", ylabel="layer")
    step = max(1, len(layers) // 16)
    axis.set_yticks(range(0, len(layers), step), [f"L{layer.index}" for layer in layers[::step]])
    ticks = [-most, 0, most] if both else [0, usual, most]
    bar = axis.figure.colorbar(image, ax=axis, shrink=0.9, ticks=ticks, format="{x:.2g}")
    bar.ax.minorticks_off()
    bar.set_label(scores.unit.split(",")[0].split(" when ")[0], fontsize=8)


def agreement_table(scores: Sequence[HeadScores]) -> Table | None:
    """Every pair of methods, from the most alike down; those that cannot be compared last. None with a single method."""
    pairs = agreements(scores)
    if not pairs:
        return None
    random = chance(len(scores[0].flat()))
    pairs = sorted(pairs, key=lambda p: -2 if p.spearman != p.spearman else p.spearman, reverse=True)
    rows = [(f"{p.first}, {p.second}", _rank(p.spearman), _rank(p.kendall), f"{p.top_half:.0%}") for p in pairs]
    limits = (f"±{random.spearman:.2f}", f"±{random.kendall:.2f}", f"{random.top_half:.0%}")
    rows.append(("random orders, 95 % within", *limits))
    return Table(("methods", "Spearman", "Kendall", "upper half in common"), rows)


def _rank(correlation: float) -> str:
    """A rank correlation; – where one of the methods gives every head the same score."""
    return "–" if correlation != correlation else f"{correlation:.2f}"


def attention_figure(heads: Heads, budget: BudgetResult | None) -> Figure:
    """What every head attends to in the last sample; crosses mark the heads that the budget's plan removes."""
    figure = figure_of_all(heads, heads.samples[-1], budget.drop if budget else None)
    return Figure("heads.png", "attention of every head on one example", figure)


def role_table(metrics: Metrics | None, heads: Heads) -> Table:
    """The roles, those of most heads first."""
    budgets = verdict.largest_first(metrics) if metrics is not None else []
    rows = []
    for role, addresses, example in by_role(heads):
        gone = (sum(h in b.drop.get(name, ()) for name, h in addresses) for b in budgets)
        rows.append((role, str(len(addresses)), *map(str, gone), example))
    return Table(("role", "heads", *(f"removed to keep {b.kept}" for b in budgets), "clearest example"), rows)


def removed(run: Run, metrics: Metrics) -> list[Block]:
    """The heads that went, by layer, and the folders of the models without them."""
    budgets = verdict.largest_first(metrics)
    layers = []
    for layer in run.model.layers:
        gone = [", ".join(f"H{h}" for h in b.drop.get(layer.name, ())) for b in budgets]
        if any(gone):
            layers.append((f"L{layer.index} ({amounts.code(layer.name)})", *(heads or "–" for heads in gone)))
    folders = []
    for b in budgets:
        by = ", ".join(dict.fromkeys(filter(None, [b.method, b.strategy]))) or amounts.code(metrics.planning.plan)
        size, loads = amounts.size(b.size, 3) if b.size else "", amounts.code(b.loads) if b.loads else ""
        folders.append((str(b.kept), by, amounts.code(f"{b.checkpoint}/"), size, loads))
    emptied = "These layers lost all their heads, but keep one head (or group) with zero output for the cache: "
    ghosts = [[f"{emptied}{', '.join(map(amounts.code, b.proof.ghosts))}."] * bool(b.proof.ghosts) for b in budgets]
    notes = [(b.kept, [*empty, *b.notes]) for b, empty in zip(budgets, ghosts, strict=True)]
    return [
        Table(("layer", *(f"removed to keep {b.kept}" for b in budgets)), layers),
        Table(("heads kept", "chosen by", "saved in", "size in all", "loads with"), folders),
        *notes_by_size(notes),
    ]  # fmt: skip
