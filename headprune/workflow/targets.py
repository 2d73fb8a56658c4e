"""From scores and a goal to the plans that will be carried out: fitted to the budgets, chosen by measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from headprune.attention import Heads
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.fidelity import Fidelity
from headprune.gates import mask
from headprune.planning import GROUPS, SLICES, Constraints, Order, Search, arrange, strategy_named
from headprune.planning.budgets import Budget, Fit, fit, fit_drop
from headprune.planning.costs import Subject, cost_of
from headprune.planning.effort import Work, effort_named
from headprune.planning.search import work_of
from headprune.plans import PruningPlan
from headprune.repair import HeldOut, Refit, Repair
from headprune.scoring import HeadScores, score
from headprune.workflow.scene import Console, Scene
from headprune.workflow.stages import Stages
from headprune.workflow.timing import budget_input

RANDOM_DRAWS = 3
AUTO = "auto"


@dataclass(frozen=True)
class Goal:
    """What `headprune prune` is asked for: budgets of one kind, or a plan.

    Attributes:
        strategy: A name of `headprune.planning.STRATEGIES`.
        protect: What must stay, such as ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        repair: Whether the heads that stay are refitted to what the removed ones gave.
        finetune: Epochs to train afterwards; 0 for none.
        plan: Instead of budgets.
        file: Where the plan is from.
        effort: How much work planning may be, a name of `headprune.planning.effort.EFFORTS`.
    """

    budgets: tuple[Budget, ...] = ()
    strategy: str = AUTO
    protect: str = ""
    min_heads_per_layer: int = 0
    repair: bool = True
    finetune: float = 0.0
    plan: PruningPlan | None = None
    file: str = ""
    effort: str = "normal"

    @property
    def needs_scores(self) -> bool:
        return self.plan is None and strategy_named(self.strategy).needs_scores

    @property
    def uses_scores(self) -> bool:
        """Whether scores are of use, if there are any."""
        return self.needs_scores or (self.plan is None and self.strategy == AUTO)

    def searches(self, scores: Sequence[HeadScores]) -> list[tuple[str, str, HeadScores | None]]:
        """The orders to make: (name, strategy, the scores to make it from)."""
        if self.strategy == AUTO:
            own = [(name, name, None) for name in ("compensated", "re-scored")]
            return [*own, *((s.method, "one-shot", s) for s in scores)]
        if self.needs_scores:
            return [(s.method, self.strategy, s) for s in scores]
        return [(self.strategy, self.strategy, None)]

    def constraints(self, scene: Scene) -> Constraints:
        return Constraints.parse(self.protect, scene.maskable, self.min_heads_per_layer)

    def about(self) -> dict[str, Any]:
        """For the report."""
        if self.plan is not None:
            return {"plan": self.file}
        effort = effort_named(self.effort)
        return {
            "strategy": self.strategy, "about": strategy_named(self.strategy).about, "protect": self.protect,
            "min_heads_per_layer": self.min_heads_per_layer,
            "effort": {"name": effort.name, "flops": effort.flops, "examples": effort.examples},
        }  # fmt: skip


class Trials:
    """Plans tried on the choosing part: heads masked, not removed, and the others repaired. Each is measured once.

    Attributes:
        refit: The repair; None if there is to be none.
        stages: Where what is measured is kept.
        work: What making the orders was counted to cost, by name; and of those that were left out for that, why. For the report.
        compared: How the orders that met the budgets did, where there were several (`fits_of`). For the report.
    """

    def __init__(self, scene: Scene, repair: bool, stages: Stages | None = None) -> None:
        self.scene, self.stages = scene, stages or Stages()
        batches = list(scene.parts.score.batches())
        self.refit = Refit(scene.model, scene.layers, batches, store=self.stages.store) if repair else None
        self._held_out = HeldOut(self.refit) if self.refit else None
        self.batches = list(scene.parts.choose.batches())
        self.work: dict[str, dict[str, Any]] = {}
        self.compared: list[dict[str, Any]] = []
        self._known: dict[str, Measurement] = {}
        self._merits: dict[str, float] = {}

    def measure(self, drop: Heads, *, answering: bool = False) -> Measurement:
        key = repr((sorted(drop.items()), answering))
        if key not in self._known:
            self._known[key] = self.stages.measurement(f"trial {key}", lambda: self._measured(drop, answering))
        return self._known[key]

    def _measured(self, drop: Heads, answering: bool) -> Measurement:
        with self.repaired(drop, answering=answering):
            return masked(self.scene, drop, self.batches)

    @contextmanager
    def repaired(self, drop: Heads, *, answering: bool = False) -> Iterator[Repair | None]:
        """The scene's model repaired, while the context lasts; what that did.

        Args:
            answering: Whether as what is reported is: with the last step, and without those that do no better on examples that they
                were not fitted to (`headprune.repair.held_out`).
        """
        if self.refit is None or self._held_out is None:
            yield None
            return
        weights = self._held_out.checked(drop) if answering else self.refit.fitted(drop)
        if not weights and not weights.trials:
            yield None
            return
        with self.refit.applied(weights):
            yield self.refit.report(weights)

    def change_at(self, plan: PruningPlan) -> Change:
        """The paired change from the dense model to a plan, repaired as it will be."""
        return compare(self.measure({}), self.measure(plan.drop, answering=True), self.scene.metric)

    @cached_property
    def _fidelity(self) -> Fidelity:
        """First asked for while the model is the dense one, as it is outside of `repaired`."""
        return Fidelity(self.scene.model, self.batches)

    @property
    def judged_by(self) -> str:
        """What `merit` goes by, for the report."""
        return "the divergence (KL) from the dense model's answers" if self._fidelity.known else "the loss"

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        By how near its answers stay to the dense model's: minus the logarithm of the divergence, so that large and small
        budgets weigh alike. Minus the loss, where these answers are not known.
        """
        if not self._fidelity.known:
            return -self.measure(plan.drop).metrics["loss"]
        key = repr(sorted(plan.drop.items()))
        if key not in self._merits:
            self._merits[key] = self.stages.get(f"merit {key}", lambda: self._nearness(plan.drop), float)
        return self._merits[key]

    def judged(self, plan: PruningPlan) -> dict[str, float]:
        """What `merit` goes by: the divergence (nats), or where that is not known the loss; lower is better."""
        merit = -self.merit(plan)
        return {"divergence": math.exp(merit)} if self._fidelity.known else {"loss": merit}

    def _nearness(self, drop: Heads) -> float:
        with self.repaired(drop), mask(self.scene.model, drop, layers=self.scene.layers):
            return -math.log(max(self._fidelity.divergence(), 1e-12))

    def point(self, name: str, plan: PruningPlan) -> dict[str, Any]:
        """A point of the trade-off curve."""
        measured = self.measure(plan.drop)
        low, high = interval(measured, self.scene.metric)
        return {
            "method": name, "kept": plan.kept, "asked": plan.asked, "value": measured.metrics[self.scene.metric],
            "low": low, "high": high, "loss": measured.metrics["loss"],
        }  # fmt: skip


def masked(scene: Scene, drop: Heads, batches: Sequence[Any]) -> Measurement:
    """The model without some heads, on batches."""
    with mask(scene.model, drop, layers=scene.layers):
        return evaluate(scene.model, batches)


def orders_of(
    scene: Scene, goal: Goal, scores: Sequence[HeadScores], trials: Trials, console: Console
) -> dict[str, Order]:
    """The goal's strategy on every method's scores (or on none, if it needs none), by name."""
    total = sum(layer.num_heads for layer in scene.maskable)
    counts = [b.heads(total) for b in goal.budgets if b.kind == "keep"]
    kinds = (GROUPS,) if any(b.kind == "kv-cache" for b in goal.budgets) else (GROUPS, SLICES)
    base = Search(
        scene.maskable, constraints=goal.constraints(scene), seed=scene.options.seed, model=scene.model,
        batches=list(scene.parts.score.batches()), refit=trials.refit, store=trials.stages.store,
        effort=effort_named(goal.effort),
    )  # fmt: skip
    found: dict[str, Order] = {}
    # What the curve shows below all budgets comes from the last look at the model: no one has asked for more.
    levels = [k for k in _levels(total, counts) if not counts or k >= min(counts)]
    shares = any(layer.groups and layer.prunable for layer in scene.maskable)
    searches = _affordable(goal.searches(scores), base, levels, len(kinds) if shares else 1, trials, console)
    for name, strategy, given in searches:
        with console.track(f"planning by {strategy}, {name}" if given else f"planning by {name}") as progress:
            search = replace(base, scores=given, progress=progress)
            make = partial(arrange, search, strategy, levels, trials.merit, kinds, counts)
            found[name] = trials.stages.order(f"order {name}", make)
    if len(found) > 1 and trials.refit and trials.refit.passes:
        passes, examples = trials.refit.passes, trials.refit.examples
        console.say(f"All orders together took about {passes:.0f} forward passes over {examples:,} examples.")
    return found


Searches = list[tuple[str, str, HeadScores | None]]


def _affordable(
    searches: Searches, base: Search, levels: Sequence[int], times: int, trials: Trials, console: Console
) -> Searches:
    """Those orders that the effort allows; never none. Says what they will cost, and what is left out.

    Decided by counted work, so that the same seed gives the same plan on every machine, however busy.

    Args:
        times: How often every order is made.
    """
    chosen: Searches = []
    sum_of = Work(0.0, 0.0, 0)
    for name, strategy, given in searches:
        work = work_of(base, strategy, levels, times)
        if work.passes:
            trials.work[name] = work.to_json()
        if strategy == "re-scored" and chosen and not base.effort.allows(work):
            why = f"it would take about {work}, and at effort {base.effort.name} an order may take {base.effort.limit}"
            trials.work[name]["left_out"] = why
            console.say(f"Not tried: {name}, since {why} (--effort high, or --strategy {name}).")
            continue
        chosen.append((name, strategy, given))
        # Statistics, and a first look, are made once for all.
        sum_of = max(sum_of, work, key=lambda w: w.passes)
    if sum_of.passes:
        console.say(f"Planning will take about {sum_of}.")
    return chosen


def fits_of(scene: Scene, goal: Goal, orders: dict[str, Order], trials: Trials, console: Console) -> list[Fit]:
    """For every budget a plan that holds it, all of the order whose plans do best on the choosing part.

    Raises:
        HeadPruneError: A budget that no order can meet; a plan that does not fit the model.
    """
    if goal.plan is not None:
        goal.plan.check_model(scene.model)
        goal.plan.on(scene.layers)  # a layer that cannot be masked is refused by name
        return [Fit(replace(goal.plan.on(scene.maskable), budget=f"plan {goal.file}"))]
    found: dict[str, list[Fit]] = {}
    misses = []
    with console.track(f"fitting {', '.join(map(str, goal.budgets))}") as progress:
        for i, (name, order) in enumerate(orders.items()):
            try:
                found[name] = [_fitted(scene, budget, order, trials) for budget in goal.budgets]
            except HeadPruneError as miss:
                misses.append(miss)
                console.say(f"By {name}: {miss.args[0]}")
            progress(i + 1, len(orders))
    if not found:
        raise misses[0]
    # One order serves all budgets, so that their plans are nested.
    used = max(found, key=lambda name: _merit(found[name], trials)) if len(found) > 1 else next(iter(found))
    if len(found) > 1:
        trials.compared = [
            {
                "order": name, "used": name == used,
                "plans": [{"budget": f.plan.budget, "kept": f.plan.kept, **trials.judged(f.plan)} for f in fits],
            }
            for name, fits in found.items()
        ]  # fmt: skip
    return found[used]


def _merit(fits: Sequence[Fit], trials: Trials) -> tuple[float, float]:
    """How good an order's plans are on the choosing part, over all budgets."""
    # Where accuracy is the budget, fewer heads are what is wanted.
    drops = [f for f in fits if f.budget is not None and f.budget.kind == "drop"]
    return (-sum(f.plan.kept for f in drops), sum(trials.merit(f.plan) for f in fits))


def _fitted(scene: Scene, budget: Budget, order: Order, trials: Trials) -> Fit:
    if budget.kind == "keep":
        return Fit(replace(order.plan(budget.heads(order.total)), budget=str(budget)), budget)
    if budget.kind == "drop":
        return fit_drop(order, budget, trials.change_at)
    inputs = budget_input(scene) if budget.kind == "latency" else scene.typical_input()
    biases = trials.refit.added if trials.refit else ()
    subject = Subject(scene.model, scene.layers, scene.example, inputs, biases)
    return fit(order, budget, cost_of(budget, subject, scene.options.seed))


def random_orders(scene: Scene, goal: Goal, fits: Sequence[Fit]) -> list[Order]:
    """The control: heads drawn at random, under the same constraints."""
    levels = sorted({f.plan.kept for f in fits})
    batches = list(scene.parts.score.batches())[:1]
    return [
        arrange(
            Search(
                scene.maskable,
                score(scene.model, batches, "random", layers=scene.layers, seed=scene.options.seed + i),
                goal.constraints(scene),
            ),
            "one-shot",
            levels,
        )
        for i in range(RANDOM_DRAWS)
    ]


def shown(goal: Goal, orders: dict[str, Order], fits: Sequence[Fit], trials: Trials) -> dict[str, Order]:
    """The orders whose curves are drawn: of those that `auto` makes itself the one that is used, or the best one, beside the scores'."""
    own = [name for name, order in orders.items() if not order.method]
    if goal.strategy != AUTO or len(own) < 2:
        return orders
    used = fits[0].plan.strategy
    best = used if used in own else _best({name: orders[name] for name in own}, [f.plan.asked for f in fits], trials)
    return {name: order for name, order in orders.items() if name not in own or name == best}


def _best(orders: dict[str, Order], levels: Sequence[int], trials: Trials) -> str:
    """The order that reaches most of some numbers of kept heads, and has the best plans there."""

    def merit(name: str) -> tuple[int, float]:
        plans = [orders[name].plan(keep) for keep in levels if orders[name].least <= keep]
        return len(plans), sum(map(trials.merit, plans))

    return max(orders, key=merit)


def trade_off(
    orders: dict[str, Order], randoms: Sequence[Order], fits: Sequence[Fit], trials: Trials, console: Console
) -> list[dict[str, Any]]:
    """The metric on the choosing part against heads kept, by every order and by random."""
    total = fits[0].plan.total
    levels = sorted(_levels(total, [f.plan.asked for f in fits]), reverse=True)
    jobs = [("dense", PruningPlan({}, total, total, total))]
    if not orders:  # a plan of the user's
        jobs += [("plan", replace(f.plan, asked=f.plan.kept)) for f in fits]
        levels = [f.plan.kept for f in fits]
    # What is not used, and the control, would take most of the time: they are drawn where it was asked for, and at the end.
    drawn = {levels[-1], *(keep for f in fits for keep in (f.plan.asked, f.plan.kept))}
    used = fits[0].plan.strategy, fits[0].plan.method
    named = [*orders.items(), *(("random", order) for order in randoms)]
    for keep in levels:
        here = [(n, o) for n, o in named if keep in drawn or (n != "random" and (o.strategy, o.method) == used)]
        jobs += [(name, order.plan(keep)) for name, order in here if order.least <= keep]
    curve = []
    with console.track("trade-off on the choosing part") as progress:
        for i, (name, plan) in enumerate(jobs):
            curve.append(trials.point(name, plan))
            progress(i + 1, len(jobs))
    return curve


def _levels(total: int, counts: Sequence[int]) -> list[int]:
    """Numbers of kept heads to look at: those asked for, every quarter above the fewest, and the next eighth below, for the curve.

    Every eighth, if it is not known yet how many heads will stay.
    """
    grid = {k: max(1, round(k * total / 8)) for k in range(7, 0, -1)}
    if not counts:
        return sorted(set(grid.values()))
    above = [keep for k, keep in grid.items() if k % 2 == 0 and keep > min(counts)]
    below = next((keep for keep in grid.values() if keep < min(counts)), None)
    return sorted({*counts, *above, *([] if below is None else [below])})
