"""The search itself: orders of removal, and from these the plans that meet the budgets.

`headprune.search`, ``headprune prune`` and its ``--dry-run`` all call `find_plans`; nothing here knows of datasets,
folders, consoles or options of the command line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from torch import nn

from headprune.amounts import flops
from headprune.attention import Layers
from headprune.budgets import Budget, Fit, SearchOptions, Subject
from headprune.checkpoint import StockCounts
from headprune.errors import HeadPruneError
from headprune.inputs import Example
from headprune.planning import AUTO, GROUPS, SLICES, Constraints, Order, Search, arrange, needs_scores, strategy_named
from headprune.planning.search import work_of
from headprune.planning.strategies import Work, effort_named
from headprune.running import Progress, tracked
from headprune.scoring import HeadScores
from headprune.trials import ComparedPlan, Trials


class SearchConsole(Protocol):
    """Receives a search's lines and its progress."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


class CallbackConsole:
    """Passes progress to a function that takes (steps done, steps in all, note), if there is one; lines go to the log."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        logging.getLogger("headprune").info(text)

    @contextmanager
    def track(self, label: str) -> Iterator[Progress]:
        def report(done: int, total: int, note: str = "") -> None:
            if self._progress:
                self._progress(done, total, f"{label} ({note})" if note else label)

        yield report


Sources = dict[str, tuple[str, HeadScores | None]]
"""Orders by their names: the strategy that makes each, and the scores it is made from, if any."""


def orders_for(options: SearchOptions, scores: Sequence[HeadScores]) -> Sources:
    """The orders to make: several for `AUTO`; for a strategy that needs scores, one for each of them."""
    if options.strategy == AUTO:
        own: Sources = {name: (name, None) for name in ("compensated", "re-scored")}
        return own | {s.method: ("one-shot", s) for s in scores}
    if needs_scores(options.strategy):
        return {s.method: (options.strategy, s) for s in scores}
    return {options.strategy: (options.strategy, None)}


def constraints_of(options: SearchOptions, layers: Layers) -> Constraints:
    """The constraints for a model's maskable layers.

    Raises:
        HeadPruneError: A layer or head that is not there.
    """
    return Constraints.parse(options.protect, layers, options.min_heads_per_layer)


@dataclass(frozen=True)
class ComparedOrder:
    """How the plans of an order did, one for each budget, and whether this is the order that is used."""

    order: str
    used: bool
    plans: tuple[ComparedPlan, ...]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        fits: A plan for every budget, with its measured cost.
        orders: The orders that were made, by name.
        work: The counted cost of making each order, also of one that was left out for it.
        compared: How the orders' plans did on the choosing examples; () where only one order meets the budgets.
        judged_by: What orders were compared by; "" where there was only one.
    """

    fits: tuple[Fit, ...]
    orders: Mapping[str, Order] = field(default_factory=dict)
    work: Mapping[str, Work] = field(default_factory=dict)
    compared: tuple[ComparedOrder, ...] = ()
    judged_by: str = ""


def find_plans(
    options: SearchOptions,
    scores: Sequence[HeadScores],
    trials: Trials,
    subject_for: Callable[[Budget], Subject],
    console: SearchConsole,
) -> SearchResult:
    """Find a plan for every budget, all from the order whose plans do best on the choosing examples.

    Args:
        scores: To make orders from.
        trials: The dense model and its examples.
        subject_for: Returns the `Subject` that a budget is measured on.

    Raises:
        HeadPruneError: A budget that no order can meet.
    """
    start = SearchStart.of(options, trials)
    sources, work = _affordable(start, orders_for(options, scores), trials, console)
    if len(sources) > 1:
        trials.check_compares()
    orders = _make_orders(start, sources, trials, console)
    fits = _fit_budgets(options.budgets, orders, subject_for, console)
    judged_by = trials.judged_by if len(orders) > 1 else ""
    if len(fits) == 1:
        return SearchResult(next(iter(fits.values())), orders, work, judged_by=judged_by)
    # One order serves all budgets, so that their plans are nested.
    used = max(fits, key=lambda name: _merit(fits[name], trials))
    judged = {name: tuple(trials.judge(fit.plan) for fit in own) for name, own in fits.items()}
    compared = tuple(ComparedOrder(name, name == used, plans) for name, plans in judged.items())
    return SearchResult(fits[used], orders, work, compared, judged_by)


@dataclass(frozen=True)
class SearchStart:
    """The common start of all orders of a search.

    Attributes:
        search: The strategies' input, without scores.
        counts: The numbers of kept heads that are asked for.
        levels: The numbers of kept heads that orders are made for.
        kinds: How heads that share key/value heads may be removed (`headprune.planning.order`).
    """

    search: Search
    counts: list[int]
    levels: list[int]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, options: SearchOptions, trials: Trials) -> SearchStart:
        layers = trials.maskable
        total = sum(layer.num_heads for layer in layers)
        counts = [count for budget in options.budgets if (count := budget.heads(total)) is not None]
        by_groups = any(budget.by_groups for budget in options.budgets) or not has_groups(layers)
        search = Search(
            layers, constraints=constraints_of(options, layers), model=trials.model, batches=trials.batches,
            store=trials.store, effort=effort_named(options.effort), loss_fn=trials.loss_fn,
        )  # fmt: skip
        # Below all budgets, the curve's plans come from the last measurement of the model: no budget needs more.
        levels = [k for k in levels_of(total, counts) if not counts or k >= min(counts)]
        if len(counts) < len(options.budgets):  # some may need fewer heads than are asked for by number
            levels = sorted({*levels, *levels_of(total, [])})
        return cls(search, counts, levels, (GROUPS,) if by_groups else (GROUPS, SLICES))


def passes_of(options: SearchOptions, scores: Sequence[HeadScores], trials: Trials) -> float:
    """About how many passes over the scoring examples `find_plans` takes for its orders (a backward pass is two)."""
    start = SearchStart.of(options, trials)
    _, work = _affordable(start, orders_for(options, scores), trials, CallbackConsole())
    passes = [each.passes for each in work.values() if each.left_out is None]
    # The dense model is measured once for all.
    return sum(passes) - max(0, len(passes) - 1) * trials.calibration.cost if passes else 0.0


def has_groups(layers: Layers) -> bool:
    """Whether heads share key/value heads, so that groups or slices of them may be removed."""
    return any(layer.groups and layer.prunable for layer in layers)


def levels_of(total: int, counts: Sequence[int]) -> list[int]:
    """Numbers of kept heads to make orders for: ``counts``, every quarter above the fewest, the next eighth below.

    The last is for the curve. Without ``counts``, every eighth.
    """
    grid = {k: max(1, round(k * total / 8)) for k in range(7, 0, -1)}
    if not counts:
        return sorted(set(grid.values()))
    above = [keep for k, keep in grid.items() if k % 2 == 0 and keep > min(counts)]
    below = next((keep for keep in grid.values() if keep < min(counts)), None)
    return sorted({*counts, *above, *([] if below is None else [below])})


def _affordable(
    start: SearchStart, sources: Sources, trials: Trials, console: SearchConsole
) -> tuple[Sources, dict[str, Work]]:
    """The orders that the effort allows (at least one), and each one's counted cost; says what is left out.

    Counted work decides, so that the same seed gives the same plan on every machine, however busy.
    """
    effort = start.search.effort
    chosen: Sources = {}
    work: dict[str, Work] = {}
    for name, (strategy, scores) in sources.items():
        cost = work_of(start.search, lambda: trials.calibration, strategy, start.levels, len(start.kinds))
        if strategy == "re-scored" and chosen and effort.flops is not None and cost.flops > effort.flops:
            why = f"it would take about {cost}, and at effort {effort.name} an order may take {flops(effort.flops, 3)}"
            work[name] = replace(cost, left_out=why)
            console.say(f"Not tried: {name}, since {why} (--effort high, or --strategy {name}).")
            continue
        if cost.passes:
            work[name] = cost
        chosen[name] = strategy, scores
    # Statistics, and the first measurement of effects, are made once for all.
    made = [name for name in chosen if trials.store.known(f"order {name}") is not None]
    if costs := [cost for name, cost in work.items() if cost.left_out is None and name not in made]:
        console.say(f"Planning will take about {max(costs, key=lambda cost: cost.passes)}.")
    return chosen, work


def _make_orders(start: SearchStart, sources: Sources, trials: Trials, console: SearchConsole) -> dict[str, Order]:
    """Make the orders, by name."""

    def make(strategy: str, scores: HeadScores | None, progress: Progress) -> Order:
        search = replace(start.search, scores=scores, progress=progress)
        if strategy_named(strategy).runs_model:
            search = replace(search, calibration=trials.calibration)
        return arrange(search, strategy, start.levels, trials.merit, start.kinds, start.counts)

    orders: dict[str, Order] = {}
    for name, (strategy, scores) in sources.items():
        with console.track(f"planning by {strategy}, {name}" if scores else f"planning by {name}") as progress:
            orders[name] = trials.store.get(f"order {name}", partial(make, strategy, scores, progress))
    if len(orders) > 1 and trials.passes:
        examples = trials.calibration.runner.examples
        console.say(f"All orders together took about {trials.passes:.0f} forward passes over {examples:,} examples.")
    return orders


def _fit_budgets(
    budgets: Sequence[Budget],
    orders: Mapping[str, Order],
    subject_for: Callable[[Budget], Subject],
    console: SearchConsole,
) -> dict[str, tuple[Fit, ...]]:
    """The plans of every order that meets all budgets; tells the console why others do not.

    Raises:
        HeadPruneError: No order does; the first order's error.
    """
    fits: dict[str, tuple[Fit, ...]] = {}
    misses: list[HeadPruneError] = []
    with console.track(f"fitting {', '.join(map(str, budgets))}") as progress:
        for name, order in tracked(orders.items(), progress):
            try:
                fits[name] = tuple(budget.fit(order, subject_for(budget)) for budget in budgets)
            except HeadPruneError as miss:
                misses.append(miss)
                console.say(f"By {name}: {miss.args[0]}")
    if not fits:
        raise misses[0]
    return fits


def _merit(fits: Sequence[Fit], trials: Trials) -> tuple[float, float]:
    """How good an order's plans are on the choosing examples, over all budgets; -inf for NaN, as `max` may keep NaN."""
    # For a budget of lost accuracy, fewer heads are better.
    drops = [fit for fit in fits if fit.budget is not None and fit.budget.by_metric]
    merit = sum(trials.merit(fit.plan) for fit in fits)
    return (-sum(fit.plan.kept for fit in drops), -math.inf if math.isnan(merit) else merit)


def subject_of(trials: Trials, example: Example, inputs: Example) -> Subject:
    """The `Subject` that budgets are measured on: the dense model, with its new biases and changes of the metric.

    Args:
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
    """
    biases = trials.calibration.new_biases if trials.repair else ()
    return Subject(trials.model, trials.layers, example, inputs, biases, trials.change_at)


def may_add_biases(strategy: str, model: nn.Module, layers: Layers) -> bool:
    """Whether repair may add biases: not to ``uniform`` plans of a stock class that has no place for them."""
    counts = StockCounts.of(model, layers) if strategy == "uniform" else None
    return counts is None or counts.has_place_for_biases()


def candidates(scores: Sequence[HeadScores]) -> list[HeadScores]:
    """The scores to plan by: random ones only if there is nothing else."""
    return [s for s in scores if s.method != "random"] or list(scores)
