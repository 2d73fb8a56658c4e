"""From a model and examples to pruning plans: the orders in which heads may go, and of these the plans that hold the budgets.

What `headprune prune` and `headprune.search` do alike; nothing here knows of datasets, folders, consoles or options.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from torch import nn

from headprune.arguments import layers_for, listed
from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.fidelity import Fidelity
from headprune.gates import mask
from headprune.inputs import check_weights
from headprune.loss import LossFn
from headprune.planning import GROUPS, SLICES, Constraints, Order, Search, arrange, strategy_named
from headprune.planning.budgets import Budget, Cost, Fit, fit, fit_drop
from headprune.planning.effort import Work, effort_named
from headprune.planning.search import work_of
from headprune.plans import Keep, PruningPlan
from headprune.repairing import HeldOut, Refit, Repair
from headprune.rows import is_empty
from headprune.scoring import HeadScores, score
from headprune.scoring.base import Progress, Store

T = TypeVar("T")

AUTO = "auto"
METHODS_FOR_AUTO, METHODS_FOR_OTHERS = ("gradient",), ("ablation", "gradient")
_SET_ASIDE = 4  # every fourth batch chooses, where no others are given to choose by


class Listener(Protocol):
    """Hears what a search does."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


class _Calls:
    """A listener that calls a function with how far the work is, and logs what is said."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def say(self, text: str) -> None:
        logging.getLogger("headprune").info(text)

    @contextmanager
    def track(self, label: str) -> Iterator[Progress]:
        def heard(done: int, total: int, note: str = "") -> None:
            if self._progress:
                self._progress(done, total, f"{label} ({note})" if note else label)

        yield heard


class Results:
    """Where a search keeps what it has made, by name. This one forgets; `headprune.workflow.stages` has one on disk."""

    @property
    def store(self) -> Store | None:
        """For tensors that are made on the way."""
        return None

    def get(self, name: str, make: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """A result: what ``read`` understands what ``make`` gives (as JSON can hold it) to be."""
        return read(make())

    def measurement(self, name: str, make: Callable[[], Measurement]) -> Measurement:
        """A result that was measured."""
        return make()

    def order(self, name: str, make: Callable[[], Order]) -> Order:
        """A result that was planned."""
        return make()


@dataclass(frozen=True)
class Request:
    """What is searched for.

    Attributes:
        budgets: What every plan must hold, a plan each.
        strategy: A name of `headprune.planning.STRATEGIES`.
        constraints: What must stay.
        effort: How much work it may be, a name of `headprune.planning.effort.EFFORTS`.
        seed: For what is drawn.
    """

    budgets: tuple[Budget, ...]
    strategy: str = AUTO
    constraints: Constraints = field(default_factory=Constraints)
    effort: str = "normal"
    seed: int = 0

    def searches(self, scores: Sequence[HeadScores]) -> Searches:
        """The orders to make."""
        if self.strategy == AUTO:
            own = [(name, name, None) for name in ("compensated", "re-scored")]
            return [*own, *((s.method, "one-shot", s) for s in scores)]
        if strategy_named(self.strategy).needs_scores:
            return [(s.method, self.strategy, s) for s in scores]
        return [(self.strategy, self.strategy, None)]


Searches = list[tuple[str, str, HeadScores | None]]
"""Orders to make: (name, strategy, the scores to make it from)."""


class Trials:
    """Plans tried on the examples that choose: heads masked, not removed, and the others repaired. Each is measured once.

    Args:
        model: The dense model. It changes only while a context of `repaired` lasts.
        layers: Its attention layers.
        batches: Examples that repair is fitted to, and that heads are ranked by.
        choose: Others, that plans are compared on.
        repair: Whether the heads that stay are refitted.
        metric: Of a point of the trade-off curve, and of a budget of lost accuracy.
        loss_fn: As for `headprune.evaluate`.
        results: Where what is measured is kept.

    Attributes:
        refit: The repair; None if there is to be none.
        work: What making the orders was counted to cost, by name; and of those that were left out for that, why. For the report.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        batches: Sequence[Any],
        choose: Sequence[Any],
        *,
        repair: bool = True,
        metric: str = "loss",
        loss_fn: LossFn | None = None,
        results: Results | None = None,
    ) -> None:
        self.model, self.layers, self.batches, self.choose = model, layers, list(batches), list(choose)
        self.metric, self.loss_fn, self.results = metric, loss_fn, results or Results()
        self.refit = Refit(model, layers, self.batches, store=self.results.store) if repair else None
        self._held_out = HeldOut(self.refit) if self.refit else None
        self.work: dict[str, dict[str, Any]] = {}
        self._known: dict[str, Measurement] = {}
        self._merits: dict[str, float] = {}

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers that plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def masked(self, drop: Heads, batches: Sequence[Any]) -> Measurement:
        """The model as it is now, without some heads, on batches."""
        with mask(self.model, drop, layers=self.layers):
            return evaluate(self.model, batches, loss_fn=self.loss_fn)

    def measure(self, drop: Heads, *, answering: bool = False) -> Measurement:
        """The model without some heads, repaired, on the examples that choose; ``answering`` as for `repaired`."""
        key = repr((sorted(drop.items()), answering))
        if key not in self._known:
            self._known[key] = self.results.measurement(f"trial {key}", lambda: self._measured(drop, answering))
        return self._known[key]

    def _measured(self, drop: Heads, answering: bool) -> Measurement:
        with self.repaired(drop, answering=answering):
            return self.masked(drop, self.choose)

    @contextmanager
    def repaired(self, drop: Heads, *, answering: bool = False) -> Iterator[Repair | None]:
        """The model repaired, while the context lasts; what that did.

        Args:
            answering: Whether as what is reported is: with the last step, and without those that do no better on examples that they
                were not fitted to (`headprune.repairing.held_out`).
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
        return compare(self.measure({}), self.measure(plan.drop, answering=True), self.metric)

    @cached_property
    def _fidelity(self) -> Fidelity:
        """First asked for while the model is the dense one, as it is outside of `repaired`."""
        return Fidelity(self.model, self.choose)

    @property
    def judged_by(self) -> str:
        """What `merit` goes by, for the report."""
        return "the divergence (KL) from the dense model's answers" if self._fidelity.known else "the loss"

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        By how near its answers stay to the dense model's: minus the logarithm of the divergence, so that large and small
        budgets weigh alike. Minus the loss, where these answers are not known.

        Raises:
            HeadPruneError: There are no examples that choose.
        """
        if not self.choose:
            raise HeadPruneError(
                "There are no examples to choose between plans by: one batch was given, and no others.",
                "Pass choose=[batch, …] with other examples.",
            )
        if not self._fidelity.known:
            return -self.measure(plan.drop).metrics["loss"]
        key = repr(sorted(plan.drop.items()))
        if key not in self._merits:
            self._merits[key] = self.results.get(f"merit {key}", lambda: self._nearness(plan.drop), float)
        return self._merits[key]

    def _nearness(self, drop: Heads) -> float:
        with self.repaired(drop), mask(self.model, drop, layers=self.layers):
            return -math.log(max(self._fidelity.divergence(), 1e-12))

    def point(self, name: str, plan: PruningPlan) -> dict[str, Any]:
        """A point of the trade-off curve."""
        measured = self.measure(plan.drop)
        low, high = interval(measured, self.metric)
        return {
            "method": name, "kept": plan.kept, "asked": plan.asked, "value": measured.metrics[self.metric],
            "low": low, "high": high, "loss": measured.metrics["loss"],
        }  # fmt: skip


def orders_of(request: Request, scores: Sequence[HeadScores], trials: Trials, listener: Listener) -> dict[str, Order]:
    """The request's strategy on every method's scores (or on none, if it needs none), by name."""
    total = sum(layer.num_heads for layer in trials.maskable)
    counts = [b.heads(total) for b in request.budgets if b.kind == "keep"]
    kinds = (GROUPS,) if any(b.kind == "kv-cache" for b in request.budgets) else (GROUPS, SLICES)
    base = Search(
        trials.maskable, constraints=request.constraints, seed=request.seed, model=trials.model, batches=trials.batches,
        refit=trials.refit, store=trials.results.store, effort=effort_named(request.effort), loss_fn=trials.loss_fn,
    )  # fmt: skip
    found: dict[str, Order] = {}
    # What the curve shows below all budgets comes from the last look at the model: no one has asked for more.
    levels = [k for k in levels_of(total, counts) if not counts or k >= min(counts)]
    times = len(kinds) if _shares(trials.maskable) else 1
    for name, strategy, given in _affordable(request.searches(scores), base, levels, times, trials, listener):
        with listener.track(f"planning by {strategy}, {name}" if given else f"planning by {name}") as progress:
            search = replace(base, scores=given, progress=progress)
            make = partial(arrange, search, strategy, levels, trials.merit, kinds, counts)
            found[name] = trials.results.order(f"order {name}", make)
    if len(found) > 1 and trials.refit and trials.refit.passes:
        passes, examples = trials.refit.passes, trials.refit.examples
        listener.say(f"All orders together took about {passes:.0f} forward passes over {examples:,} examples.")
    return found


def _shares(layers: Sequence[AttentionLayer]) -> bool:
    """Whether heads share key/value heads, so that they may go by groups or by slices."""
    return any(layer.groups and layer.prunable for layer in layers)


def levels_of(total: int, counts: Sequence[int]) -> list[int]:
    """Numbers of kept heads to look at: those asked for, every quarter above the fewest, and the next eighth below, for the curve.

    Every eighth, if it is not known yet how many heads will stay.
    """
    grid = {k: max(1, round(k * total / 8)) for k in range(7, 0, -1)}
    if not counts:
        return sorted(set(grid.values()))
    above = [keep for k, keep in grid.items() if k % 2 == 0 and keep > min(counts)]
    below = next((keep for keep in grid.values() if keep < min(counts)), None)
    return sorted({*counts, *above, *([] if below is None else [below])})


def _affordable(
    searches: Searches, base: Search, levels: Sequence[int], times: int, trials: Trials, listener: Listener
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
            listener.say(f"Not tried: {name}, since {why} (--effort high, or --strategy {name}).")
            continue
        chosen.append((name, strategy, given))
        # Statistics, and a first look, are made once for all.
        sum_of = max(sum_of, work, key=lambda w: w.passes)
    if sum_of.passes:
        listener.say(f"Planning will take about {sum_of}.")
    return chosen


def fits_of(
    request: Request,
    orders: dict[str, Order],
    trials: Trials,
    listener: Listener,
    cost_of: Callable[[Budget], Cost] | None = None,
) -> list[Fit]:
    """For every budget a plan that holds it, all of the order whose plans do best on the examples that choose.

    Args:
        cost_of: What plans cost in the terms of a budget that is no number of heads and no loss of accuracy.

    Raises:
        HeadPruneError: A budget that no order can meet.
    """
    found: dict[str, list[Fit]] = {}
    misses = []
    with listener.track(f"fitting {', '.join(map(str, request.budgets))}") as progress:
        for i, (name, order) in enumerate(orders.items()):
            try:
                found[name] = [_fitted(budget, order, trials, cost_of) for budget in request.budgets]
            except HeadPruneError as miss:
                misses.append(miss)
                listener.say(f"By {name}: {miss.args[0]}")
            progress(i + 1, len(orders))
    if not found:
        raise misses[0]
    # One order serves all budgets, so that their plans are nested.
    return (
        max(found.values(), key=lambda fits: merit_of(fits, trials)) if len(found) > 1 else next(iter(found.values()))
    )


def merit_of(fits: Sequence[Fit], trials: Trials) -> tuple[float, float]:
    """How good an order's plans are on the examples that choose, over all budgets."""
    # Where accuracy is the budget, fewer heads are what is wanted.
    drops = [f for f in fits if f.budget is not None and f.budget.kind == "drop"]
    return (-sum(f.plan.kept for f in drops), sum(trials.merit(f.plan) for f in fits))


def _fitted(budget: Budget, order: Order, trials: Trials, cost_of: Callable[[Budget], Cost] | None) -> Fit:
    if budget.kind == "keep":
        return Fit(replace(order.plan(budget.heads(order.total)), budget=str(budget)), budget)
    if budget.kind == "drop":
        return fit_drop(order, budget, trials.change_at)
    if cost_of is None:
        raise HeadPruneError(f"It is not known here what plans cost ({budget}).", "Give a number of heads to keep.")
    return fit(order, budget, cost_of(budget))


def candidates(scores: Sequence[HeadScores]) -> list[HeadScores]:
    """The scores to plan by: random ones only if there is nothing else."""
    return [s for s in scores if s.method != "random"] or list(scores)


def search(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep | Sequence[Keep],
    *,
    choose: Iterable[Any] | None = None,
    strategy: str = AUTO,
    scores: HeadScores | Sequence[HeadScores] | None = None,
    repair: bool = True,
    protect: str | Iterable[str] = (),
    min_heads_per_layer: int = 0,
    effort: str = "normal",
    loss_fn: LossFn | None = None,
    distil: bool = False,
    layers: Sequence[AttentionLayer] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[PruningPlan]:
    """Find the heads that can go: what `headprune prune` finds with the same examples.

    By ``auto`` several orders are made in which heads may go: by how much the model's answers change when a head goes and the
    others are refitted (once, and anew while heads go), and by scores. Of each the plans that keep as many heads as asked are
    repaired and compared on other examples, and the order is taken whose plans stay nearest to the dense model's answers.

    Args:
        model: The dense model; its mode and weights are left as they were.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``. Never those that
            results are reported on.
        keep: How many heads to keep: a count (36), a share (0.5) or a percentage ("50%"), or several of these.
        choose: Other batches, that plans are compared on. By default every fourth of ``batches`` is set aside for this.
        strategy: How heads are picked, a name of `headprune.planning.STRATEGIES`.
        scores: From `headprune.score`, of this model. By default ``auto`` scores by gradient, and a strategy that needs scores
            by ablation and by gradient; ``()`` makes no order by scores.
        repair: Whether the model will be repaired, so that plans are made for and compared on repaired models.
        protect: What must stay: ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        effort: How much work it may be: ``"low"``, ``"normal"`` or ``"high"`` (`headprune.planning.effort`).
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts with labels.
        distil: Score by the divergence from the dense model's answers (KL, nats) instead of a loss.
        layers: From `headprune.find_attention`, to save the trace.
        seed: For what is drawn.
        progress: Called with (steps done, steps in all, note).

    Returns:
        A plan for each of ``keep``, in that order. They are nested: heads that go from a larger model go from a smaller one too.

    Raises:
        HeadPruneError: A budget out of reach, an unknown strategy, layer or head, scores of another model, or no examples.
    """
    check_weights(model)
    given = [batch for batch in listed(batches) if not is_empty(batch)]
    if not given:
        raise HeadPruneError("There are no examples to search with.", "Give batches of at least one example.")
    known = None if scores is None else [scores] if isinstance(scores, HeadScores) else list(scores)
    layers = layers_for(model, layers, batches=given)
    keeps: list[Any] = [keep] if isinstance(keep, str | int | float) else list(keep)
    if not keeps:
        raise HeadPruneError("keep= names no number of heads.", 'Pass keep=36, keep="50%" or keep=[36, "25%"].')
    total = sum(layer.num_heads for layer in layers if layer.maskable)
    budgets = tuple(Budget.parse("keep", str(each)) for each in keeps)
    for budget in budgets:
        budget.heads(total)  # refused before the long work
    constraints = Constraints.parse(protect, [a for a in layers if a.maskable], min_heads_per_layer)
    request = Request(budgets, strategy, constraints, effort, seed)
    needs_scores = strategy_named(strategy).needs_scores
    compares = strategy == AUTO or _shares(layers) or (needs_scores and (known is None or len(known) > 1))
    fitted_to, chooses = _parted(given, choose, compares)
    listener = _Calls(progress)
    if known is None:
        methods = METHODS_FOR_AUTO if strategy == AUTO else METHODS_FOR_OTHERS if needs_scores else ()
        known = []
        for method in methods:
            with listener.track(f"scoring by {method}") as tell:
                known.append(
                    score(
                        model,
                        fitted_to,
                        method,
                        loss_fn=loss_fn,
                        distil=distil,
                        layers=layers,
                        seed=seed,
                        progress=tell,
                    )
                )
    if needs_scores and not known:
        raise HeadPruneError(f"The strategy {strategy} needs scores.", "Pass scores= from headprune.score.")
    trials = Trials(model, layers, fitted_to, chooses, repair=repair, loss_fn=loss_fn)
    orders = orders_of(request, candidates(known), trials, listener)
    return [fitted.plan for fitted in fits_of(request, orders, trials, listener)]


def _parted(batches: list[Any], choose: Iterable[Any] | None, compares: bool) -> tuple[list[Any], list[Any]]:
    """The batches to fit to, and those to choose by: those that were given, or else every fourth, if any are needed."""
    if choose is not None:
        chosen = [batch for batch in listed(choose, "choose") if not is_empty(batch)]
        if not chosen:
            raise HeadPruneError(
                "choose= holds no examples.",
                "Pass other batches than batches=; a generator gives its batches only once, so not the same one twice.",
            )
        return batches, chosen
    if not compares or len(batches) < 2:
        return batches, []
    aside = set(range(_SET_ASIDE - 1, len(batches), _SET_ASIDE)) or {len(batches) - 1}
    return [b for i, b in enumerate(batches) if i not in aside], [batches[i] for i in sorted(aside)]
