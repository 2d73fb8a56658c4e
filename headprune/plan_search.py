"""The search itself: orders of removal, and from these the plans that meet the budgets.

`headprune.search`, ``headprune prune`` and its ``--dry-run`` all call `find_plans`, which compares plans by `Trials`.
Nothing here knows of datasets, folders or options of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from headprune.amounts import flops
from headprune.attention import AttentionLayer, Heads, Layers
from headprune.budgets import Budget, Fit, SearchOptions, Subject
from headprune.divergence import Context, Fidelity, enough
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate
from headprune.gates import mask
from headprune.inputs import Example
from headprune.losses import LossFn
from headprune.planning import AUTO, GROUPS, SLICES, Constraints, Order, Search, arrange, has_groups, needs_scores
from headprune.planning.search import work_of
from headprune.planning.strategies import Work, effort_named
from headprune.plans import PruningPlan
from headprune.repairing import Calibration, Repair, calibrate, checked_repair, fit_layers, summary
from headprune.running import CallbackConsole, SearchConsole, tracked
from headprune.scoring import HeadScores
from headprune.store import Store


@dataclass(frozen=True)
class ComparedPlan:
    """How a plan did on the choosing examples, in nats: divergence from the dense answers, or if these are no logits, the loss.

    A divergence is never below the rounding error of equal answers (`headprune.divergence.Divergence.rounding`).
    """

    budget: str
    kept: int
    divergence: float | None = None
    loss: float | None = None


@dataclass(eq=False)
class Trials:
    """Trials of plans on the choosing examples: heads masked, not removed, the others repaired. Each is measured once.

    Attributes:
        model: The dense model. It changes only while a context of `repaired` lasts, or a plan is measured.
        layers: Its attention layers.
        batches: Examples that repair is fitted to, and that heads are ranked by.
        choose: Other examples, on which plans are compared.
        repair: Whether the kept heads are refitted in a trial.
        biases: Whether repair may give a bias to output projections without one.
        fit_choose: Whether the last step of a whole repair is fitted to ``choose`` as well; not where they decide on it.
        metric: The metric of the trade-off curve, and of a budget of lost accuracy.
        loss_fn: As for `headprune.evaluate`.
        store: Keeps the measurements.
    """

    model: nn.Module
    layers: Layers
    batches: Sequence[Any]
    choose: Sequence[Any]
    repair: bool = True
    biases: bool = True
    fit_choose: bool = False
    metric: str = "loss"
    loss_fn: LossFn | None = None
    store: Store = field(default_factory=Store)

    @cached_property
    def calibration(self) -> Calibration:
        """The calibration for repair, on ``batches``; without repair, one that refits nothing."""
        others = self.choose if self.fit_choose else ()
        return calibrate(self.model, self.layers, self.batches, repair=self.repair, biases=self.biases, others=others)

    @cached_property
    def _fidelity(self) -> Fidelity:
        return Fidelity(self.model, enough(self.model, self.choose))

    @property
    def changed_modules(self) -> Sequence[str]:
        """The modules whose weights `repaired` may change."""
        if not self.repair or "calibration" not in vars(self):
            return ()
        known = self.calibration
        # Whole attention modules: a stand-in's projections are parts of tensors with other names in the original.
        around = [layer.module for layer in self.layers]
        others = [linear.name for linear in vars(known).get("linears", ())]
        return [*around, *others, *(p.name for p in known.projections), *(v.name for v in known.values.values())]

    @property
    def passes(self) -> float:
        """Forward passes over the examples that repair is fitted to, so far."""
        return self.calibration.runner.passes if "calibration" in vars(self) else 0.0

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers whose heads plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def measure(self, drop: Heads, *, whole: bool = False) -> Measurement:
        """Evaluate the repaired model on the choosing examples, with some heads masked; ``whole`` as for `repaired`."""

        def measured() -> Measurement:
            with self.repaired(drop, whole=whole), mask(self.model, drop, layers=self.layers):
                return evaluate(self.model, self.choose, metrics=[self.metric], loss_fn=self.loss_fn)

        return self.store.get(f"trial {sorted(drop.items())}, {whole}", measured)

    @contextmanager
    def repaired(self, drop: Heads, *, whole: bool = False) -> Iterator[Repair | None]:
        """Repair the model while the context lasts; gives the `Repair`, or None if nothing was refitted.

        Args:
            whole: Whether to repair as for the report: with the last step, and without steps that do no better on the
                choosing examples (`headprune.repairing.steps`).
        """
        if not self.repair or not any(drop.values()):
            yield None
            return
        calibration = self.calibration
        measured = calibration.statistics.passes + (calibration.answers[1] if whole else 0.0)  # once for all plans
        before = self.passes
        choose = self._fidelity if whole and self.choose else None
        weights = checked_repair(calibration, drop, choose) if whole else fit_layers(calibration, drop)
        with calibration.applied(weights.by_module):
            yield summary(calibration, weights, measured + self.passes - before) if weights else None

    def subject(self, example: Example, inputs: Example) -> Subject:
        """What budgets are measured on: the dense model, with its new biases and changes of the metric.

        Args:
            example: For the proof of every prune.
            inputs: What is timed, and what operations are counted on.
        """

        def change(plan: PruningPlan) -> Change:
            return compare(self.measure({}), self.measure(plan.drop, whole=True), self.metric)

        biases = self.calibration.new_biases if self.repair else ()
        return Subject(self.model, self.layers, example, inputs, biases, change)

    @property
    def judged_by(self) -> str:
        """What `merit` measures, for the report."""
        return f"the {self._fidelity.about}" if self._fidelity.about else "the loss"

    def check_compares(self) -> None:
        """Refuse to compare plans without choosing examples.

        Raises:
            HeadPruneError: There are none.
        """
        if not self.choose:
            message = "There are no examples to choose between plans by: one batch was given, and no others."
            raise HeadPruneError(message, "Pass choose=[batch, …] with other examples.")

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        Minus the logarithm of the divergence from the dense model's answers, so that large and small budgets weigh
        alike; minus the loss, if the model gives no logits. -inf for NaN, as `max` may keep NaN.

        Raises:
            HeadPruneError: There are no choosing examples.
        """
        self.check_compares()

        def nearness() -> float:
            changed: Context = partial(mask, self.model, plan.drop, layers=self.layers)
            if self.repair:
                weights = fit_layers(self.calibration, plan.drop).by_module
                changed = partial(self.calibration.applied, weights, plan.drop)
            return -self._fidelity.log_divergence(changed)

        name = f"merit {sorted(plan.drop.items())}"
        merit = self.store.get(name, nearness) if self._fidelity.about else -self.measure(plan.drop).metrics["loss"]
        return -math.inf if math.isnan(merit) else merit

    def judge(self, plan: PruningPlan) -> ComparedPlan:
        """The divergence or loss that `merit` measures, in nats."""
        cost = -self.merit(plan)
        if self._fidelity.about:
            return ComparedPlan(plan.budget, plan.kept, divergence=math.exp(cost))
        return ComparedPlan(plan.budget, plan.kept, loss=cost)


Sources = dict[str, tuple[str, HeadScores | None]]
"""Orders by their names: the strategy that makes each, and the scores it is made from, if any."""


def orders_for(options: SearchOptions, scores: Mapping[str, HeadScores | None]) -> Sources:
    """The orders to make: several for `AUTO`; for a strategy that needs scores, one for each of them.

    Args:
        scores: By method; None where the orders are only counted.
    """
    if options.strategy == AUTO:
        own: Sources = {name: (name, None) for name in ("compensated", "re-scored")}
        own |= {method: ("one-shot", s) for method, s in scores.items()}
        # Of few heads, a share for every layer is often nearer once the last step of repair is made.
        return own | {f"{method}, per-layer": ("per-layer", s) for method, s in scores.items()}
    if needs_scores(options.strategy):
        return {method: (options.strategy, s) for method, s in scores.items()}
    return {options.strategy: (options.strategy, None)}


def constraints_of(options: SearchOptions, layers: Layers) -> Constraints:
    """The constraints for a model's maskable layers; raises HeadPruneError for heads that do not exist, or too few to keep."""
    constraints = Constraints.parse(options.protect, layers, options.min_heads_per_layer)
    total = sum(layer.num_heads for layer in layers)
    for budget in options.budgets:
        if (keep := budget.heads(total)) is not None:
            constraints.check(keep, layers)
    return constraints


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
    sources, work = _affordable(start, orders_for(options, {s.method: s for s in scores}), console)
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
            calibration=None if needs_scores(options.strategy) else trials.calibration, store=trials.store,
            effort=effort_named(options.effort), loss_fn=trials.loss_fn,
        )  # fmt: skip
        # Below all budgets, the curve's plans come from the last measurement of the model: no budget needs more.
        levels = [k for k in levels_of(total, counts) if not counts or k >= min(counts)]
        if len(counts) < len(options.budgets):  # some may need fewer heads than are asked for by number
            levels = sorted({*levels, *levels_of(total, [])})
        return cls(search, counts, levels, (GROUPS,) if by_groups else (GROUPS, SLICES))


def passes_of(options: SearchOptions, scores: Sequence[HeadScores], trials: Trials) -> float:
    """About how many passes over the scoring examples `find_plans` takes for its orders (a backward pass is two)."""
    start = SearchStart.of(options, trials)
    _, work = _affordable(start, orders_for(options, {s.method: s for s in scores}), CallbackConsole())
    passes = [each.passes for each in work.values() if each.left_out is None]
    # The dense model is measured once for all.
    return sum(passes) - max(0, len(passes) - 1) * trials.calibration.cost if passes else 0.0


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


def _affordable(start: SearchStart, sources: Sources, console: SearchConsole) -> tuple[Sources, dict[str, Work]]:
    """The orders that the effort allows (at least one), and each one's counted cost; says what is left out.

    Counted work decides, so that the same seed gives the same plan on every machine, however busy.
    """
    effort = start.search.effort
    chosen: Sources = {}
    work: dict[str, Work] = {}
    for name, (strategy, scores) in sources.items():
        cost = work_of(start.search, strategy, start.levels, len(start.kinds))
        if strategy == "re-scored" and chosen and effort.flops is not None and cost.flops > effort.flops:
            why = f"it would take about {cost}, and at effort {effort.name} it may take {flops(effort.flops, 3)}"
            work[name] = replace(cost, left_out=why)
            console.say(f"Not tried: {name}, since {why} (--effort high, or --strategy {name}).")
            continue
        if cost.passes:
            work[name] = cost
        chosen[name] = strategy, scores
    # Statistics, and the first measurement of effects, are made once for all.
    made = [name for name in chosen if start.search.store.known(f"order {name}") is not None]
    if costs := [cost for name, cost in work.items() if cost.left_out is None and name not in made]:
        console.say(f"Planning will take about {max(costs, key=lambda cost: cost.passes)}.")
    return chosen, work


def _make_orders(start: SearchStart, sources: Sources, trials: Trials, console: SearchConsole) -> dict[str, Order]:
    """Make the orders, by name."""
    orders: dict[str, Order] = {}
    for name, (strategy, scores) in sources.items():
        with console.track(f"planning by {name}") as progress:
            search = replace(start.search, scores=scores, progress=progress)
            make = partial(arrange, search, strategy, start.levels, trials.merit, start.kinds, start.counts)
            orders[name] = trials.store.get(f"order {name}", make)
    if len(orders) > 1 and (passes := trials.passes):
        over = f"{passes:.0f} forward passes over {trials.calibration.runner.examples:,} examples"
        console.say(f"All orders together took about {over}.")
    return orders


def _fit_budgets(
    budgets: Sequence[Budget], orders: Mapping[str, Order], subject_for: Callable[[Budget], Subject],
    console: SearchConsole,
) -> dict[str, tuple[Fit, ...]]:  # fmt: skip
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


def _merit(fits: Sequence[Fit], trials: Trials) -> tuple[float, float, float]:
    """How good an order's plans are on the choosing examples, over all budgets."""
    # For a budget of lost accuracy, fewer heads are better.
    drops = [fit for fit in fits if fit.budget is not None and fit.budget.by_metric]
    merits = [trials.merit(fit.plan) for fit in fits]
    finite = [
        merit for merit in merits if merit > -math.inf
    ]  # a plan without a merit must not hide how the others differ
    return -sum(fit.plan.kept for fit in drops), len(finite), sum(finite)
