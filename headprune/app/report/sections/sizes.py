"""What each size costs: the report's first table, and its picture."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from headprune import amounts
from headprune.app.documents import BudgetResult, Dense, Metrics
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Figure, Table
from headprune.app.report.drawing import COLOURS, curves


def table(metrics: Metrics) -> Table:
    """The dense model, then the pruned ones by size; the recommended one stands out."""
    metric, dense, first = metrics.metric, metrics.dense, verdict.headline_row(metrics.latency)
    of_all = precisions(metrics)
    saved = f"size in {next(iter(of_all))}" if len(of_all) == 1 else "size as saved" if of_all else ""

    def size(model: Dense | BudgetResult) -> str:
        precision = f" in {model.dtype}" if len(of_all) > 1 else ""
        return f"{amounts.size(model.weights, 3)}{precision}" if model.weights else ""

    head = (
        "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", control(metrics),
        f"speed at {numbers.shape(first)} (95 %)", "speed verdict", numbers.with_more("parameters", saved),
    )  # fmt: skip
    parameters = numbers.with_more(f"{dense.parameters:,}", size(dense))
    total = f"{metrics.budgets[0].total} (dense)"
    rows = [(total, numbers.interval(dense, metric), "", "", "", "", "", parameters)]
    for b in verdict.largest_first(metrics):
        share = numbers.share_of(b.parameters, dense.parameters)
        speed = first.speedups[b.name]
        rows.append((
            str(b.kept), numbers.interval(b.pruned, metric), numbers.change(b.change, metric), b.change.verdict,
            _random(metrics, b), numbers.ratio(speed), speed.verdict,
            numbers.with_more(f"{b.parameters:,}", share, size(b)),
        ))  # fmt: skip
    result = verdict.judge(metrics)
    return Table(head, rows, 1 + verdict.largest_first(metrics).index(result.budget) if result.recommended else None)


def _random(metrics: Metrics, budget: BudgetResult) -> str:
    pair, metric = verdict.against_random(metrics, budget), metrics.metric
    low, high = (numbers.value(extreme(budget.random), metric) for extreme in (min, max))
    draws = f"{numbers.value(pair.mean, metric)} ({low} to {high})"
    return f"{numbers.value(pair.value, metric)} against {draws}" if _treatment(metrics) else draws


def control(metrics: Metrics) -> str:
    """The head of the column of random heads."""
    mean = "geometric mean" if metrics.metric == "perplexity" else "mean"
    draws = f"random heads: {mean} of {len(metrics.budgets[0].random)} draws (range)"
    treatment = _treatment(metrics)
    return f"chosen against {draws}, both {treatment}" if treatment else draws


def _treatment(metrics: Metrics) -> str:
    """How chosen heads were compared with random ones, where the saved models had more done to them."""
    cheaper = any(map(verdict.by_cheaper_repair, metrics.budgets))
    return " and ".join(["repaired layer by layer"] * cheaper + ["before training"] * verdict.trained(metrics))


def precisions(metrics: Metrics) -> set[str]:
    """In which precisions models are saved, the dense one among them; none where older files do not say it."""
    models: list[Dense | BudgetResult] = [metrics.dense, *metrics.budgets]
    return {model.dtype for model in models if model.dtype and model.weights}


def picture(metrics: Metrics) -> Figure:
    """The metric against heads kept."""
    metric, dense = metrics.metric, metrics.dense
    random = {b.kept: b.random for b in metrics.budgets} | {metrics.budgets[0].total: (dense.metrics[metric],)}
    alt = f"{metric} against heads kept, with random heads and 95 % intervals"
    return Figure("tradeoff.png", alt, lambda: curves(partial(_draw, metrics), random, metric, "reported"))


def _draw(metrics: Metrics, axis: Any) -> None:
    """The saved models on the reported examples, and what they are compared with random heads by."""
    metric, dense, budgets = metrics.metric, metrics.dense, verdict.largest_first(metrics)
    kept, models = [budgets[0].total, *(b.kept for b in budgets)], [dense, *(b.pruned for b in budgets)]
    value, low, high = np.array([(m.metrics[metric], m.low, m.high) for m in models]).T
    ends = np.maximum([value - low, high - value], 0)
    style: dict[str, Any] = {"fmt": "D-", "color": COLOURS[0], "markersize": 6, "capsize": 3, "zorder": 5}
    axis.errorbar(kept, value, ends, **style, label="chosen heads (95 % interval)")
    if treatment := _treatment(metrics):
        alike = [value[0], *(verdict.against_random(metrics, b).value for b in budgets)]
        name = f"chosen heads, {treatment} like the random ones"
        axis.plot(kept, alike, "D:", color=COLOURS[0], markersize=5, markerfacecolor="white", zorder=4, label=name)
    axis.set_xticks(kept)
