"""From a model and examples to pruning plans: the orders in which heads may go, and of these the plans that hold the budgets.

What `headprune prune` and `headprune.search` do alike; nothing here knows of datasets, folders, consoles or options.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from headprune.arguments import given_to_choose, layers_for, listed, together
from headprune.attention import AttentionLayer
from headprune.batches import is_empty
from headprune.budgets import Budget, Fit, budget_of
from headprune.budgets.subject import Subject
from headprune.errors import HeadPruneError
from headprune.evaluation import measurable
from headprune.inputs import Example, check_weights, inputs_of, usable, without_labels
from headprune.losses import LossFn
from headprune.planning import GROUPS, SLICES, Constraints, Order, Search, arrange, strategy_named
from headprune.planning.effort import Work, effort_named
from headprune.planning.search import dense_looks, work_of
from headprune.plans import Keep, PruningPlan
from headprune.running import Progress
from headprune.scoring import DEFAULT_METHODS, HeadScores, maskable_of, score
from headprune.stock import Counts
from headprune.trials import Trials

if TYPE_CHECKING:
    from accelerate import Accelerator

AUTO = "auto"
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


def methods_for(strategy: str) -> tuple[str, ...]:
    """The scores that a strategy makes where there are none; by gradient is enough for `AUTO`, as it makes orders of its own."""
    if strategy == AUTO:
        return ("gradient",)
    return DEFAULT_METHODS if strategy_named(strategy).needs_scores else ()


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

    @property
    def methods(self) -> tuple[str, ...]:
        """The scores to make where there are none."""
        return methods_for(self.strategy)

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


def orders_of(request: Request, scores: Sequence[HeadScores], trials: Trials, listener: Listener) -> dict[str, Order]:
    """The request's strategy on every method's scores (or on none, if it needs none), by name."""
    base, counts, levels, kinds = _set_up(request, trials)

    @cache
    def looking() -> Search:
        """With what is known of the dense model, for all orders that are not known from an interrupted run."""
        search = replace(base, refit=trials.refit)
        return replace(search, dense_looks=dense_looks(search, kinds))

    def made(strategy: str, scores: HeadScores | None, progress: Progress) -> Order:
        start = looking() if strategy_named(strategy).runs_model else base
        search = replace(start, scores=scores, progress=progress)
        return arrange(search, strategy, levels, trials.merit, kinds, counts)

    found: dict[str, Order] = {}
    for name, strategy, given in _affordable(request.searches(scores), base, levels, len(kinds), trials, listener):
        with listener.track(f"planning by {strategy}, {name}" if given else f"planning by {name}") as progress:
            found[name] = trials.results.order(f"order {name}", partial(made, strategy, given, progress))
    if len(found) > 1 and trials.passes:
        examples = trials.calibration.runner.examples
        listener.say(f"All orders together took about {trials.passes:.0f} forward passes over {examples:,} examples.")
    return found


def _set_up(request: Request, trials: Trials) -> tuple[Search, list[int], list[int], tuple[str, ...]]:
    """Where every order starts; the numbers of heads that are asked for, and those to look at; the kinds in which heads go."""
    total = sum(layer.num_heads for layer in trials.maskable)
    counts = [count for budget in request.budgets if (count := budget.heads(total)) is not None]
    by_groups = any(budget.by_groups for budget in request.budgets) or not _shares(trials.maskable)
    kinds = (GROUPS,) if by_groups else (GROUPS, SLICES)
    base = Search(
        trials.maskable, constraints=request.constraints, seed=request.seed, model=trials.model, batches=trials.batches,
        store=trials.results.store, effort=effort_named(request.effort), loss_fn=trials.loss_fn,
    )  # fmt: skip
    # What the curve shows below all budgets comes from the last look at the model: no one has asked for more.
    levels = [k for k in levels_of(total, counts) if not counts or k >= min(counts)]
    if len(counts) < len(request.budgets):  # some may need fewer heads than are asked for by number
        levels = sorted({*levels, *levels_of(total, [])})
    return base, counts, levels, kinds


def passes_of(request: Request, scores: Sequence[HeadScores], trials: Trials) -> float:
    """Forward passes over the scoring examples that `orders_of` takes, about; a backward pass counts as two."""
    base, _, levels, kinds = _set_up(request, trials)
    searches = _affordable(request.searches(scores), base, levels, len(kinds), trials, _Calls(None))
    works = [work_of(base, lambda: trials.calibration, strategy, levels, len(kinds)) for _, strategy, _ in searches]
    looking = [work.passes for work in works if work.passes]
    # The dense model is measured once for all.
    return sum(looking) - max(0, len(looking) - 1) * trials.calibration.cost if looking else 0.0


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
        work = work_of(base, lambda: trials.calibration, strategy, levels, times)
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
    subject_for: Callable[[Budget], Subject],
) -> list[Fit]:
    """For every budget a plan that holds it, all of the order whose plans do best on the examples that choose.

    Args:
        subject_for: What a budget is measured on.

    Raises:
        HeadPruneError: A budget that no order can meet.
    """
    found: dict[str, list[Fit]] = {}
    misses = []
    with listener.track(f"fitting {', '.join(map(str, request.budgets))}") as progress:
        for i, (name, order) in enumerate(orders.items()):
            try:
                found[name] = [budget.fit(order, subject_for(budget)) for budget in request.budgets]
            except HeadPruneError as miss:
                misses.append(miss)
                listener.say(f"By {name}: {miss.args[0]}")
            progress(i + 1, len(orders))
    if not found:
        raise misses[0]
    # One order serves all budgets, so that their plans are nested.
    if len(found) == 1:
        return next(iter(found.values()))
    used = max(found, key=lambda name: merit_of(found[name], trials))
    trials.compared = [
        {
            "order": name, "used": name == used,
            "plans": [{"budget": f.plan.budget, "kept": f.plan.kept, **trials.judged(f.plan)} for f in fits],
        }
        for name, fits in found.items()
    ]  # fmt: skip
    return found[used]


def merit_of(fits: Sequence[Fit], trials: Trials) -> tuple[float, float]:
    """How good an order's plans are on the examples that choose, over all budgets; minus infinity where an answer is NaN, which `max` would keep."""
    # Where accuracy is the budget, fewer heads are what is wanted.
    drops = [f for f in fits if f.budget is not None and f.budget.by_metric]
    merit = sum(trials.merit(f.plan) for f in fits)
    return (-sum(f.plan.kept for f in drops), -math.inf if math.isnan(merit) else merit)


def subject_of(trials: Trials, example: Example, inputs: Example) -> Subject:
    """What budgets are measured on: the dense model, with what trials know of it.

    Args:
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
    """
    biases = trials.calibration.weights.new_biases if trials.repair else ()
    return Subject(trials.model, trials.layers, example, inputs, biases, trials.metric, trials.change_at)


def may_add_biases(strategy: str, model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
    """Whether repair may add biases: not to plans that the stock class can state without them, and not with them."""
    counts = Counts.of(model, layers) if strategy == "uniform" else None
    return counts is None or counts.has_place_for_biases()


def candidates(scores: Sequence[HeadScores]) -> list[HeadScores]:
    """The scores to plan by: random ones only if there is nothing else."""
    return [s for s in scores if s.method != "random"] or list(scores)


def search(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep | Sequence[Keep] = (),
    *,
    budgets: str | Budget | Sequence[str | Budget] = (),
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
    accelerator: Accelerator | None = None,
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
        budgets: What else a plan must hold, or several of these: ``"latency 80%"``, ``"flops 1.2G"``, ``"params 60M"``,
            ``"kv-cache 50%"`` (of the dense model's, or in the unit; all on the first batch), or ``"drop 0.01"``: the fewest
            heads whose loss of accuracy on ``choose`` is below this with 95 % confidence (of perplexity where there is no
            accuracy; for language models `headprune prune` goes by perplexity, this by the accuracy of tokens).
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
        accelerator: To share the work out among the processes of an `accelerate.Accelerator`.
        progress: Called with (steps done, steps in all, note).

    Returns:
        A plan for each of ``keep``, then for each of ``budgets``, in that order. They are nested: heads that go from a larger model go from a smaller one too.

    Raises:
        HeadPruneError: A budget out of reach, an unknown strategy, layer or head, scores of another model, or no examples.
    """
    check_weights(model)
    given = [batch for batch in listed(batches) if not is_empty(batch)]
    if not given:
        raise HeadPruneError("There are no examples to search with.", "Give batches of at least one example.")
    layers = layers_for(model, layers, batches=given)
    maskable = maskable_of(model, layers)
    constraints = Constraints.parse(protect, maskable, min_heads_per_layer)
    asked = budgets_of(keep, budgets, maskable)
    request = Request(asked, strategy, constraints, effort, seed)
    effort_named(effort)
    by = [scores] if isinstance(scores, HeadScores) else None if scores is None else list(scores)
    methods = request.methods if by is None else ()
    if strategy_named(strategy).needs_scores and not (by or methods):
        raise HeadPruneError(f"The strategy {strategy} needs scores.", "Pass scores= from headprune.score.")
    by_metric = any(budget.by_metric for budget in asked)
    compares = by_metric or strategy == AUTO or _shares(layers) or len(by or methods) > 1
    listener = _Calls(progress)
    with torch.inference_mode(False), together(accelerator, model, given):
        fitted_to, chooses = usable(parted(given, choose, compares))
        inputs = without_labels(model, inputs_of(model, fitted_to[0]))
        metric = _metric(model, chooses, loss_fn) if by_metric else "loss"
        _check_dense(asked, Subject(model, layers, inputs, inputs, metric=metric))
        for method in methods:
            with listener.track(f"scoring by {method}") as heard:
                made = score(
                    model, fitted_to, method, loss_fn=loss_fn, distil=distil, layers=layers, seed=seed, progress=heard
                )
            by = [*(by or ()), made]
        trials = Trials(
            model,
            layers,
            fitted_to,
            chooses,
            repair=repair,
            metric=metric,
            loss_fn=loss_fn,
            biases=may_add_biases(strategy, model, layers),
        )
        orders = orders_of(request, candidates(by or ()), trials, listener)
        subject = subject_of(trials, inputs, inputs)
        return [fitted.plan for fitted in fits_of(request, orders, trials, listener, lambda budget: subject)]


def budgets_of(
    keep: Keep | Sequence[Keep], others: str | Budget | Sequence[str | Budget], layers: Sequence[AttentionLayer]
) -> tuple[Budget, ...]:
    """A budget for every number of heads, and the others; what no model of these layers can keep is refused."""
    keeps = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else list(keep)
    given = [others] if isinstance(others, str | Budget) else list(others)
    if not keeps and not given:
        raise HeadPruneError(
            "keep= names no number of heads, and budgets= nothing else.",
            'Pass keep=36, keep="50%" or keep=[36, "25%"], or budgets="flops 80%".',
        )
    found = [budget_of(f"keep {each}") for each in keeps]
    for other in given:
        found.append(budget_of(other) if isinstance(other, str) else other)
        found[-1].check()
    for budget in found:
        budget.heads(sum(layer.num_heads for layer in layers))
    return tuple(found)


def _check_dense(budgets: Sequence[Budget], subject: Subject) -> None:
    """Refuse budgets that the dense model holds; to keep all heads is a plan, too."""
    total = sum(layer.num_heads for layer in subject.layers if layer.maskable)
    for budget in budgets:
        if budget.heads(total) is None:
            budget.check_dense(subject)


def _metric(model: nn.Module, chooses: Sequence[Any], loss_fn: LossFn | None) -> str:
    """What a budget of lost accuracy is about: as `headprune.compare` chooses it, but never the loss."""
    if not chooses:
        raise HeadPruneError(
            "What is lost is measured on other examples than heads are chosen by, and one batch was given.",
            "Pass choose=[batch, …] with other examples.",
        )
    known = measurable(model, chooses) if loss_fn is None else ()
    for metric in ("accuracy", "perplexity"):
        if metric in known:
            return metric
    raise HeadPruneError(
        "The budget of lost accuracy needs an accuracy or a perplexity, and these examples give neither.",
        "Give dicts with labels and no loss_fn, or a budget of another kind.",
    )


def parted(batches: list[Any], choose: Iterable[Any] | None, compares: bool) -> tuple[list[Any], list[Any]]:
    """The batches to fit to, and those to choose by: those that were given, or else every fourth, if any are needed."""
    if choose is not None:
        return batches, given_to_choose(choose, batches)
    if not compares or len(batches) < 2:
        return batches, []
    aside = set(range(_SET_ASIDE - 1, len(batches), _SET_ASIDE)) or {len(batches) - 1}
    return [b for i, b in enumerate(batches) if i not in aside], [batches[i] for i in sorted(aside)]
