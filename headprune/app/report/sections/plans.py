"""Tables and pictures of what each size costs, and of how the heads were chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from headprune import amounts
from headprune.app.documents import BudgetResult, Dense, Metrics
from headprune.app.pictures import Drawing, new_figure
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Figure, Markdown, Strong, Table, bullets
from headprune.planning import AUTO, STRATEGIES, abouts

_BLUE, _GREY = "#0072B2", "#7f7f7f"  # Okabe and Ito's blue, and grey for the random control


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
    cheaper = any(map(verdict.layers_alone, metrics.budgets))
    return " and ".join(["repaired layer by layer"] * cheaper + ["before training"] * verdict.trained(metrics))


def precisions(metrics: Metrics) -> set[str]:
    """In which precisions models are saved, the dense one among them; none where older files do not say it."""
    models: list[Dense | BudgetResult] = [metrics.dense, *metrics.budgets]
    return {model.dtype for model in models if model.dtype and model.weights}


def picture(metrics: Metrics) -> Figure:
    """The metric against heads kept."""
    alt = f"{metrics.metric} against heads kept, with random heads and 95 % intervals"
    return Figure("tradeoff.png", alt, partial(_draw, metrics))


def _draw(metrics: Metrics) -> Drawing:
    """The saved models on the reported examples, beside random heads: the mean of their draws as a line, the range as a band."""
    metric, dense, budgets = metrics.metric, metrics.dense, verdict.largest_first(metrics)
    kept, models = [budgets[0].total, *(b.kept for b in budgets)], [dense, *(b.pruned for b in budgets)]
    value, low, high = np.array([(m.metrics[metric], m.low, m.high) for m in models]).T
    draws = [(dense.metrics[metric],), *(b.random for b in budgets)]
    figure, (axis,) = new_figure(7.2, 4.0)
    style: dict[str, Any] = {"fmt": "D-", "color": _BLUE, "markersize": 6, "capsize": 3, "zorder": 5}
    spread, name = np.maximum([value - low, high - value], 0), "chosen heads (95 % interval)"
    axis.errorbar(kept, value, spread, **style, label=name)
    if treatment := _treatment(metrics):
        alike = [value[0], *(verdict.against_random(metrics, b).value for b in budgets)]
        name = f"chosen heads, {treatment} like the random ones"
        axis.plot(kept, alike, "D:", color=_BLUE, markersize=5, markerfacecolor="white", zorder=4, label=name)
    axis.set_xticks(kept)
    means = [numbers.mean_of(of_size, metric) for of_size in draws[::-1]]
    lows, highs = ([extreme(of_size) for of_size in draws[::-1]] for extreme in (min, max))
    label = f"random heads: mean and range of {max(map(len, draws))} draws"
    axis.plot(kept[::-1], means, "--", color=_GREY, label=label)
    axis.fill_between(kept[::-1], lows, highs, color=_GREY, alpha=0.2, lw=0)
    axis.axhline(value[0], color="black", lw=0.8, ls=":", label="dense model")
    axis.set(xlabel=f"heads kept, of {kept[0]}", ylabel=f"{metric}, on the reported examples")
    axis.set_yscale("log" if metric == "perplexity" else "linear")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)
    return figure


def orders(metrics: Metrics) -> Markdown:
    """What the names of orders mean that a report uses: each with what its strategy says of itself."""
    planning = metrics.planning
    names = [*(p.method for p in metrics.curve), *(order.order for order in planning.compared)]
    names += [*(b.strategy for b in metrics.budgets), planning.strategy]
    by_scores = STRATEGIES.get("one-shot" if planning.strategy == AUTO else planning.strategy)
    known = {**abouts(), "random": "Heads drawn at random, the control."}
    about = f"{by_scores.about[:1].lower()}{by_scores.about[1:]}" if by_scores else ""
    other = f"By the scores of that name ({by_scores.name}): {about}" if by_scores else ""
    texts = {name: known.get(name, other) for name in names if name not in ("", "dense")}
    return bullets(Strong(f"{name}:", text) for name, text in texts.items() if text)


def comparison(metrics: Metrics) -> Table:
    """Every order's plans, those that keep most heads first. How many heads a plan keeps is said where the budget does not say it."""
    orders = metrics.planning.compared
    first = orders[0].plans
    places = sorted(range(len(first)), key=lambda i: -first[i].kept)
    rows = []
    for order in orders:
        cells = []
        for plan in (order.plans[i] for i in places):
            value = plan.loss if plan.divergence is None else plan.divergence
            heads = "" if plan.budget == f"keep {plan.kept}" else amounts.head_count(plan.kept)
            cells.append(numbers.with_more("–" if value is None else f"{value:.3g}", heads))
        rows.append((f"{order.order}{' (used)' * order.used}", *cells))
    strong = next((i for i, order in enumerate(orders) if order.used), None)
    return Table(("order", *(first[i].budget for i in places)), rows, strong)


def curve_table(metrics: Metrics) -> Table:
    """What every order gives at every number of heads, on the choosing part."""
    metric = metrics.metric
    points = [p for p in metrics.curve if p.method != "dense"]
    methods, rows = [*dict.fromkeys(p.method for p in points)], []
    for asked in sorted({p.asked for p in points}, reverse=True):
        draws = ([p.value for p in points if (p.method, p.asked) == (method, asked)] for method in methods)
        rows.append((str(asked), *(numbers.value(numbers.mean_of(d, metric), metric) if d else "–" for d in draws)))
    return Table(("heads kept", *methods), rows)
