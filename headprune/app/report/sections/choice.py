"""How the heads were chosen: the orders of removal, what decided between them, and what each would give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from headprune.amounts import head_count
from headprune.app.documents import Metrics, Run
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Block, Bullets, Figure, Section, Strong, Table, capital, code
from headprune.app.report.drawing import COLOURS, curves
from headprune.options import AUTO
from headprune.planning import STRATEGIES


def choice(run: Run, metrics: Metrics) -> Section | None:
    """Which order of removal was used, and why."""
    if metrics.planning.plan is not None:
        return None
    blocks: list[Block] = [
        "An order ranks the heads for removal, so that every number of heads to keep gives a plan.",
        Bullets([*_orders(metrics), *_settings(metrics)]),
        *(_comparison(metrics) if metrics.planning.compared else ()),
    ]
    return Section("How the heads were chosen", (), "The orders of removal, and what decided between them", blocks)


def _orders(metrics: Metrics) -> Iterator[Strong]:
    """What the names of orders mean that a report uses: each with what its strategy says of itself."""
    planning = metrics.planning
    names = [*(p.method for p in metrics.curve), *(order.order for order in planning.compared)]
    names += [*(b.strategy for b in metrics.budgets), planning.strategy]
    by_scores = STRATEGIES.get("one-shot" if planning.strategy == AUTO else planning.strategy)
    abouts = {name: strategy.about for name, strategy in STRATEGIES.items()} | {
        "random": "Heads drawn at random, the control."
    }
    for name in dict.fromkeys(names):
        if name in abouts:
            yield Strong(f"{name}:", abouts[name])
        elif name and name != "dense" and by_scores is not None:
            about = f"{by_scores.about[:1].lower()}{by_scores.about[1:]}"
            yield Strong(f"{name}:", f"By the scores of that name ({by_scores.name}): {about}")


def _settings(metrics: Metrics) -> Iterator[str]:
    planning = metrics.planning
    if planning.strategy:
        yield f"The strategy of this run: {planning.strategy}."
    if planning.protect:
        yield f"Protected heads: {planning.protect}."
    if planning.min_heads_per_layer:
        yield f"Every layer keeps at least {planning.min_heads_per_layer} query heads."
    for name, work in planning.work.items():
        if work.left_out:
            yield f"{name} was not tried: {work.left_out}. `--effort high` tries it."


def _comparison(metrics: Metrics) -> Iterator[Block]:
    """Every order's plans, those that keep most heads first. How many heads a plan keeps is said where the budget does not say it."""
    planning, orders = metrics.planning, metrics.planning.compared
    first = orders[0].plans
    what = "loss" if first[0].divergence is None else "mean divergence (KL) from the dense model's answers"
    repairs = " and the kept heads repaired layer by layer" if any(b.repair for b in metrics.budgets) else ""
    drop = " Where budgets are drops, an order that needs fewer heads comes first." * verdict.limits_metric(
        metrics.budgets
    )
    yield (
        f"The run uses one order for all budgets, the best by {planning.judged_by or what}. Below: each plan's {what}, in nats, on the choosing "
        f"part, heads masked{repairs}; lower is better.{drop}"
    )
    places = sorted(range(len(first)), key=lambda i: -first[i].kept)
    rows = []
    for order in orders:
        cells = []
        for plan in (order.plans[i] for i in places):
            value = plan.loss if plan.divergence is None else plan.divergence
            heads = "" if plan.budget == f"keep {plan.kept}" else head_count(plan.kept)
            cells.append(numbers.with_more("–" if value is None else f"{value:.3g}", heads))
        rows.append((f"{order.order}{' (used)' * order.used}", *cells))
    strong = next((i for i, order in enumerate(orders) if order.used), None)
    yield Table(("order", *(first[i].budget for i in places)), rows, strong)


def trade_off(run: Run, metrics: Metrics) -> Section:
    """What every order gives at every number of heads, on the choosing part."""
    metric, choose = metrics.metric, run.parts.choose
    values: dict[str, dict[int, list[float]]] = {}
    random: dict[int, list[float]] = {}
    for p in metrics.curve:
        if p.method != "dense":
            values.setdefault(p.method, {}).setdefault(p.asked, []).append(p.value)
        if p.method in ("dense", "random"):
            random.setdefault(p.kept, []).append(p.value)
    rows = []
    for keep in sorted({keep for of_method in values.values() for keep in of_method}, reverse=True):
        draws = (of_method.get(keep) for of_method in values.values())
        rows.append((str(keep), *(numbers.value(numbers.mean_of(d, metric), metric) if d else "–" for d in draws)))
    repairs = [b.repair for b in metrics.budgets if b.repair]
    last = ", but without the last step of repair" if any(r.answers for r in repairs) else ""
    sentence = (
        f"{capital(metric)} with heads masked{f' and the kept heads repaired{last}' if repairs else ''}, on the {choose.examples:,} choosing "
        f"examples ({code(choose.split)}), so do not compare these values with the first table. Shaded in the picture: the 95 % interval of each "
        "value (not of its difference from the dense model's), and the range of the random draws."
    )
    alt = f"{metric} against heads kept, by every order"
    picture = Figure("orders.png", alt, lambda: curves(partial(_draw, metrics), random, metric, "choosing"))
    summary = "Every order of removal that was tried, on the choosing part"
    return Section("Trade-off", (), summary, [picture, sentence, Table(("heads kept", *values), rows)])


def _draw(metrics: Metrics, axis: Any) -> None:
    """A line for every order, down from the dense model."""
    methods = dict.fromkeys(p.method for p in metrics.curve if p.method not in ("dense", "random"))
    for i, method in enumerate(methods):
        points = sorted((p for p in metrics.curve if p.method in (method, "dense")), key=lambda p: p.kept)
        kept, colour = [p.kept for p in points], COLOURS[i % len(COLOURS)]
        style = "o-" if i < len(COLOURS) else "s-."
        axis.plot(kept, [p.value for p in points], style, markersize=4, color=colour, label=method)
        axis.fill_between(kept, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.12, lw=0)
