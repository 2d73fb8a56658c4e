"""From a model and examples to pruning plans: the orders in which heads may go, and of these the plans that hold the budgets.

What `headprune prune` and `headprune.search` do alike; nothing here knows of datasets, folders, consoles or options.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from headprune.checkpoint import StockCounts
from headprune.errors import HeadPruneError
from headprune.evaluation import measurable
from headprune.inputs import Example, check_weights, inputs_of, usable, without_labels
from headprune.losses import LossFn
from headprune.options import AUTO, SearchOptions
from headprune.planning import GROUPS, SLICES, Constraints, Order, Search, arrange, strategy_named
from headprune.planning.search import dense_looks, work_of
from headprune.planning.strategies import Work, effort_named
from headprune.plans import Keep, PruningPlan
from headprune.running import Progress
from headprune.scoring import DEFAULT_METHODS, HeadScores, maskable_of, score
from headprune.trials import ComparedPlan, Trials

if TYPE_CHECKING:
    from accelerate import Accelerator

_SET_ASIDE = 4  # every fourth batch chooses, where no others are given to choose by


class Output(Protocol):
    """Where a search tells of its progress."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


class CallbackOutput:
    """Output to a function that takes (steps done, steps in all, note), or to nobody; lines go to the log."""

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


def methods_for(strategy: str) -> tuple[str, ...]:
    """The scores that a strategy makes where there are none; by gradient is enough for `AUTO`, as it makes orders of its own."""
    if strategy == AUTO:
        return ("gradient",)
    return DEFAULT_METHODS if strategy_named(strategy).needs_scores else ()


@dataclass(frozen=True)
class OrderRequest:
    """An order to make: its name, the strategy, and the scores to make it from, if any."""

    name: str
    strategy: str
    scores: HeadScores | None = None


def orders_for(options: SearchOptions, scores: Sequence[HeadScores]) -> list[OrderRequest]:
    """The orders to make."""
    if options.strategy == AUTO:
        own = [OrderRequest(name, name) for name in ("compensated", "re-scored")]
        return [*own, *(OrderRequest(s.method, "one-shot", s) for s in scores)]
    if strategy_named(options.strategy).needs_scores:
        return [OrderRequest(s.method, options.strategy, s) for s in scores]
    return [OrderRequest(options.strategy, options.strategy)]


def constraints_of(options: SearchOptions, layers: Sequence[AttentionLayer]) -> Constraints:
    """What must stay of a model's maskable layers.

    Raises:
        HeadPruneError: A layer or head that is not there.
    """
    return Constraints.parse(options.protect, layers, options.min_heads_per_layer)


@dataclass(frozen=True)
class ComparedOrder:
    """An order of heads, and how its plans did, one a budget; one of the orders is used."""

    order: str
    used: bool
    plans: tuple[ComparedPlan, ...]


@dataclass(frozen=True)
class SearchResult:
    """What a search learnt.

    Attributes:
        fits: A plan for every budget, with what it was measured to cost.
        orders: The orders that were made, by name.
        work: What making each was counted to cost; also of one that was left out for that.
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
    output: Output,
) -> SearchResult:
    """For every budget a plan that meets it, all of the order whose plans do best on the examples that choose.

    Args:
        scores: To make orders from.
        trials: The dense model and its examples.
        subject_for: Gives what a budget is measured on.

    Raises:
        HeadPruneError: A budget that no order can meet.
    """
    start = _Start.of(options, trials)
    requests, work = _affordable(start, orders_for(options, scores), trials, output)
    if len(requests) > 1:
        trials.check_compares()
    orders = _make_orders(start, requests, trials, output)
    fits, misses = _fit_budgets(options.budgets, orders, subject_for, output)
    if not fits:
        raise misses[0]
    judged_by = trials.judged_by if len(orders) > 1 else ""
    if len(fits) == 1:
        return SearchResult(next(iter(fits.values())), orders, work, judged_by=judged_by)
    # One order serves all budgets, so that their plans are nested.
    used = max(fits, key=lambda name: _merit(fits[name], trials))
    compared = tuple(
        ComparedOrder(name, name == used, tuple(trials.judge(fit.plan) for fit in own)) for name, own in fits.items()
    )
    return SearchResult(fits[used], orders, work, compared, judged_by)


@dataclass(frozen=True)
class _Start:
    """Where every order of a search begins.

    Attributes:
        search: What strategies are given.
        counts: The numbers of kept heads that are asked for.
        levels: Those to look at.
        kinds: How heads may go (`headprune.planning.order`).
    """

    search: Search
    counts: list[int]
    levels: list[int]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, options: SearchOptions, trials: Trials) -> _Start:
        layers = trials.maskable
        total = sum(layer.num_heads for layer in layers)
        counts = [count for budget in options.budgets if (count := budget.heads(total)) is not None]
        by_groups = any(budget.by_groups for budget in options.budgets) or not has_groups(layers)
        search = Search(
            layers, constraints=constraints_of(options, layers), seed=options.seed, model=trials.model, batches=trials.batches,
            store=trials.store, effort=effort_named(options.effort), loss_fn=trials.loss_fn,
        )  # fmt: skip
        # What the curve shows below all budgets comes from the last look at the model: no one has asked for more.
        levels = [k for k in levels_of(total, counts) if not counts or k >= min(counts)]
        if len(counts) < len(options.budgets):  # some may need fewer heads than are asked for by number
            levels = sorted({*levels, *levels_of(total, [])})
        return cls(search, counts, levels, (GROUPS,) if by_groups else (GROUPS, SLICES))

    def work(self, strategy: str, trials: Trials) -> Work:
        """What an order by a strategy is counted to cost."""
        return work_of(self.search, lambda: trials.calibration, strategy, self.levels, len(self.kinds))


def passes_of(options: SearchOptions, scores: Sequence[HeadScores], trials: Trials) -> float:
    """Forward passes over the scoring examples that `find_plans` takes for its orders, about; a backward pass counts as two."""
    start = _Start.of(options, trials)
    _, work = _affordable(start, orders_for(options, scores), trials, CallbackOutput())
    passes = [each.passes for each in work.values() if each.left_out is None]
    # The dense model is measured once for all.
    return sum(passes) - max(0, len(passes) - 1) * trials.calibration.cost if passes else 0.0


def has_groups(layers: Sequence[AttentionLayer]) -> bool:
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
    start: _Start, requests: Sequence[OrderRequest], trials: Trials, output: Output
) -> tuple[list[OrderRequest], dict[str, Work]]:
    """The orders that the effort allows, never none, and what each was counted to cost. Says what they cost, and what is left out.

    Decided by counted work, so that the same seed gives the same plan on every machine, however busy.
    """
    effort = start.search.effort
    chosen: list[OrderRequest] = []
    work: dict[str, Work] = {}
    for request in requests:
        cost = start.work(request.strategy, trials)
        if request.strategy == "re-scored" and chosen and not effort.allows(cost):
            why = f"it would take about {cost}, and at effort {effort.name} an order may take {effort.limit}"
            work[request.name] = replace(cost, left_out=why)
            output.say(f"Not tried: {request.name}, since {why} (--effort high, or --strategy {request.name}).")
            continue
        if cost.passes:
            work[request.name] = cost
        chosen.append(request)
    # Statistics, and a first look, are made once for all.
    if costs := [cost for cost in work.values() if cost.left_out is None]:
        output.say(f"Planning will take about {max(costs, key=lambda cost: cost.passes)}.")
    return chosen, work


def _make_orders(start: _Start, requests: Sequence[OrderRequest], trials: Trials, output: Output) -> dict[str, Order]:
    """The orders in which heads may go, by name."""

    @cache
    def dense_search() -> Search:
        """With what is known of the dense model, measured once for all strategies that run it."""
        search = replace(start.search, calibration=trials.calibration)
        return replace(search, dense_looks=dense_looks(search, start.kinds))

    def make(request: OrderRequest, progress: Progress) -> Order:
        search = dense_search() if strategy_named(request.strategy).runs_model else start.search
        search = replace(search, scores=request.scores, progress=progress)
        return arrange(search, request.strategy, start.levels, trials.merit, start.kinds, start.counts)

    orders: dict[str, Order] = {}
    for request in requests:
        label = f"planning by {request.strategy}, {request.name}" if request.scores else f"planning by {request.name}"
        with output.track(label) as progress:
            orders[request.name] = trials.store.get(f"order {request.name}", partial(make, request, progress))
    if len(orders) > 1 and trials.passes:
        examples = trials.calibration.runner.examples
        output.say(f"All orders together took about {trials.passes:.0f} forward passes over {examples:,} examples.")
    return orders


def _fit_budgets(
    budgets: Sequence[Budget], orders: Mapping[str, Order], subject_for: Callable[[Budget], Subject], output: Output
) -> tuple[dict[str, tuple[Fit, ...]], list[HeadPruneError]]:
    """The plans of every order that meets all budgets, and why others do not."""
    fits: dict[str, tuple[Fit, ...]] = {}
    misses: list[HeadPruneError] = []
    with output.track(f"fitting {', '.join(map(str, budgets))}") as progress:
        for i, (name, order) in enumerate(orders.items()):
            try:
                fits[name] = tuple(budget.fit(order, subject_for(budget)) for budget in budgets)
            except HeadPruneError as miss:
                misses.append(miss)
                output.say(f"By {name}: {miss.args[0]}")
            progress(i + 1, len(orders))
    return fits, misses


def _merit(fits: Sequence[Fit], trials: Trials) -> tuple[float, float]:
    """How good an order's plans are on the examples that choose, over all budgets; minus infinity where an answer is NaN, which `max` would keep."""
    # Where accuracy is the budget, fewer heads are what is wanted.
    drops = [fit for fit in fits if fit.budget is not None and fit.budget.by_metric]
    merit = sum(trials.merit(fit.plan) for fit in fits)
    return (-sum(fit.plan.kept for fit in drops), -math.inf if math.isnan(merit) else merit)


def subject_of(trials: Trials, example: Example, inputs: Example) -> Subject:
    """What budgets are measured on: the dense model, with what trials know of it.

    Args:
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
    """
    biases = trials.calibration.new_biases if trials.repair else ()
    return Subject(trials.model, trials.layers, example, inputs, biases, trials.metric, trials.change_at)


def may_add_biases(strategy: str, model: nn.Module, layers: Sequence[AttentionLayer]) -> bool:
    """Whether repair may add biases: not to plans that the stock class can represent without them, and not with them."""
    counts = StockCounts.of(model, layers) if strategy == "uniform" else None
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
        effort: How much work it may be: ``"low"``, ``"normal"`` or ``"high"`` (`headprune.planning.strategies`).
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
    wanted = budgets_of(keep, budgets, maskable)
    must_stay = protect if isinstance(protect, str) else tuple(protect)
    options = SearchOptions(wanted, strategy, must_stay, min_heads_per_layer, repair, effort, seed)
    constraints_of(options, maskable)
    effort_named(effort)
    known = [scores] if isinstance(scores, HeadScores) else list(scores or ())
    methods = methods_for(strategy) if scores is None else ()
    if strategy_named(strategy).needs_scores and not (known or methods):
        raise HeadPruneError(f"The strategy {strategy} needs scores.", "Pass scores= from headprune.score.")
    by_metric = any(budget.by_metric for budget in wanted)
    compares = by_metric or strategy == AUTO or has_groups(layers) or len(known or methods) > 1
    output = CallbackOutput(progress)
    with torch.inference_mode(False), together(accelerator, model, given):
        fitted_to, others = usable(split_batches(given, choose, compares))
        inputs = without_labels(model, inputs_of(model, fitted_to[0]))
        metric = _metric(model, others, loss_fn) if by_metric else "loss"
        _check_dense(wanted, Subject(model, layers, inputs, inputs, metric=metric))
        for method in methods:
            with output.track(f"scoring by {method}") as report:
                known.append(
                    score(
                        model,
                        fitted_to,
                        method,
                        loss_fn=loss_fn,
                        distil=distil,
                        layers=layers,
                        seed=seed,
                        progress=report,
                    )
                )
        biases = may_add_biases(strategy, model, layers)
        trials = Trials(model, layers, fitted_to, others, repair=repair, biases=biases, metric=metric, loss_fn=loss_fn)
        subject = subject_of(trials, inputs, inputs)
        result = find_plans(options, candidates(known), trials, lambda budget: subject, output)
        return [fit.plan for fit in result.fits]


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
    wanted = [budget_of(f"keep {each}") for each in keeps]
    for other in given:
        wanted.append(budget_of(other) if isinstance(other, str) else other)
        wanted[-1].check()
    for budget in wanted:
        budget.heads(sum(layer.num_heads for layer in layers))
    return tuple(wanted)


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


def split_batches(batches: list[Any], choose: Iterable[Any] | None, compares: bool) -> tuple[list[Any], list[Any]]:
    """The batches to fit to, and those to choose by: those that were given, or else every fourth, if any are needed."""
    if choose is not None:
        return batches, given_to_choose(choose, batches)
    if not compares or len(batches) < 2:
        return batches, []
    aside = set(range(_SET_ASIDE - 1, len(batches), _SET_ASIDE)) or {len(batches) - 1}
    return [b for i, b in enumerate(batches) if i not in aside], [batches[i] for i in sorted(aside)]
