"""The public functions that join several rooms: `prune`, `repair` and `search`.

After `prune` and `repair`, the model's own ``save_pretrained`` and ``push_to_hub`` are headprune's. `search` finds plans as
``headprune prune`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn

from headprune import repairing, surgery
from headprune.arguments import given_to_choose, layers_for, listed, together
from headprune.attention import AttentionLayer, Layers
from headprune.batches import nonempty
from headprune.budgets import Budget, SearchOptions, Subject, budget_of
from headprune.checkpoint import StockCounts, install_save_methods
from headprune.errors import HeadPruneError
from headprune.evaluation import measurable
from headprune.inputs import check_weights, inputs_of, usable, without_labels
from headprune.losses import LossFn
from headprune.plan_search import SearchResult, Trials, constraints_of, find_plans
from headprune.planning import AUTO, has_groups, needs_scores
from headprune.planning.strategies import effort_named
from headprune.plans import Keep, PruningPlan
from headprune.running import CallbackConsole, Progress, SearchConsole
from headprune.scoring import DEFAULT_METHODS, HeadScores, maskable_of, score

if TYPE_CHECKING:
    from accelerate import Accelerator

P = ParamSpec("P")
R = TypeVar("R")


def _saves_itself(change: Callable[P, R]) -> Callable[P, R]:
    """Decorator: after ``change(model, …)``, the model's ``save_pretrained`` writes a folder that `load` reads."""

    @functools.wraps(change)
    def changed(*args: P.args, **kwargs: P.kwargs) -> R:
        result = change(*args, **kwargs)
        model: Any = args[0] if args else kwargs["model"]
        install_save_methods(model)
        return result

    return changed


prune = _saves_itself(surgery.prune)
repair = _saves_itself(repairing.repair)


# -- search ------------------------------------------------------------------------------------------------

_SET_ASIDE = 4  # every fourth batch is set aside for choosing, if no others are given


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
    """Find pruning plans, one for each budget, as `headprune prune` does with the same examples.

    ``auto`` makes several orders of removal, and takes the one whose repaired plans stay nearest to the dense model's answers.

    Args:
        model: The dense model; its mode and weights are left as they were.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``; never reported ones.
        keep: How many heads to keep: a count (36), a share (0.5) or a percentage ("50%"), or several of these.
        budgets: Other budgets, one or several: ``"latency 80%"``, ``"flops 1.2G"``, ``"params 60M"``, ``"kv-cache 50%"`` (of the
            dense model's, or in the unit; all on the first batch), or ``"drop 0.01"``: the fewest heads whose loss of accuracy (else of
            perplexity) on ``choose`` is below this with 95 % confidence.
        choose: Other batches, on which plans are compared. By default every fourth of ``batches`` is set aside.
        strategy: How heads are picked: ``"auto"``, or a name of `headprune.planning.STRATEGIES`.
        scores: From `headprune.score`. By default ``auto`` scores by gradient, others that need scores also by ablation; ``()``: none.
        repair: Whether the model will be repaired, so that plans are made for and compared on repaired models.
        protect: Layers and heads that must stay: ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        effort: How much work it may do: ``"low"``, ``"normal"`` or ``"high"`` (`headprune.planning.strategies`).
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts with labels.
        distil: Score by the divergence from the dense model's answers (KL, nats) instead of a loss.
        layers: From `headprune.find_attention`, to save the trace.
        seed: For random numbers.
        accelerator: To share the work out among the processes of an `accelerate.Accelerator`.
        progress: Called with (steps done, steps in all, note).

    Returns:
        A plan for each of ``keep``, then for each of ``budgets``. They are nested: one with fewer heads has no others.

    Raises:
        HeadPruneError: A budget out of reach, an unknown strategy, layer or head, scores of another model, no examples, a bad batch.
    """
    check_weights(model)
    given, choose = nonempty(listed(batches), "search with"), None if choose is None else listed(choose, "choose")
    layers = layers_for(model, layers, batches=given)
    wanted = budgets_of(keep, budgets, maskable_of(model, layers))
    protect = protect if isinstance(protect, str) else ",".join(protect)
    options = SearchOptions(wanted, strategy, protect, min_heads_per_layer, repair, effort, seed)
    with torch.inference_mode(False), together(accelerator, model, given, choose or ()):
        result = _search(model, layers, given, choose, options, scores, loss_fn, distil, CallbackConsole(progress))
    return [fit.plan for fit in result.fits]


def _search(
    model: nn.Module,
    layers: Layers,
    batches: list[Any],
    choose: Iterable[Any] | None,
    options: SearchOptions,
    scores: HeadScores | Sequence[HeadScores] | None,
    loss_fn: LossFn | None,
    distil: bool,
    console: SearchConsole,
) -> SearchResult:
    """The result of `find_plans`, with scores and choosing batches as given, or else scored and set aside here."""
    constraints_of(options, maskable_of(model, layers))
    effort_named(options.effort)
    known = [scores] if isinstance(scores, HeadScores) else list(scores or ())
    methods = methods_for(options.strategy) if scores is None else ()
    if needs_scores(options.strategy) and not (known or methods):
        raise HeadPruneError(f"The strategy {options.strategy} needs scores.", "Pass scores= from headprune.score.")
    by_metric = any(budget.by_metric for budget in options.budgets)
    compares = by_metric or options.strategy == AUTO or has_groups(layers) or len(known or methods) > 1
    fitted, others = usable(split_batches(batches, choose, compares))
    inputs = without_labels(model, inputs_of(model, fitted[0]))
    metric = _metric(model, others, loss_fn) if by_metric else "loss"
    for budget in options.budgets:
        if budget.kind != "keep":  # to keep all heads is a plan, too
            budget.check_dense(Subject(model, layers, inputs, inputs))
    settings: dict[str, Any] = {"loss_fn": loss_fn, "distil": distil, "layers": layers, "seed": options.seed}
    for method in methods:
        with console.track(f"scoring by {method}") as report:
            known.append(score(model, fitted, method, progress=report, **settings))
    biases = may_add_biases(options.strategy, model, layers)
    trials = Trials(model, layers, fitted, others, repair=options.repair, biases=biases, metric=metric, loss_fn=loss_fn)
    subject = trials.subject(inputs, inputs)
    return find_plans(options, candidates(known), trials, lambda budget: subject, console)


def methods_for(strategy: str) -> tuple[str, ...]:
    """Scoring methods for a strategy if no scores are given; one is enough for `AUTO`, which makes other orders too."""
    if strategy == AUTO:
        return ("gradient",)
    return DEFAULT_METHODS if needs_scores(strategy) else ()


def budgets_of(
    keep: Keep | Sequence[Keep], others: str | Budget | Sequence[str | Budget], layers: Layers
) -> tuple[Budget, ...]:
    """A budget for every number of heads, then the others; refuses numbers of heads that these layers cannot keep."""
    keeps = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else keep
    wanted = [budget_of(f"keep {each}") for each in keeps]
    for other in [others] if isinstance(others, str | Budget) else others:
        wanted.append(budget_of(other) if isinstance(other, str) else other)
        wanted[-1].check()
    if not wanted:
        message = "keep= names no number of heads, and budgets= nothing else."
        raise HeadPruneError(message, 'Pass keep=36, keep="50%" or keep=[36, "25%"], or budgets="flops 80%".')
    for budget in wanted:
        budget.heads(sum(layer.num_heads for layer in layers))
    return tuple(wanted)


def _metric(model: nn.Module, chooses: Sequence[Any], loss_fn: LossFn | None) -> str:
    """The metric for a budget of lost accuracy: the first that `headprune.compare` would choose, but never the loss."""
    if not chooses:
        message = "What is lost is measured on other examples than heads are chosen by, and one batch was given."
        raise HeadPruneError(message, "Pass choose=[batch, …] with other examples.")
    known = measurable(model, chooses) if loss_fn is None else ()
    for metric in ("accuracy", "perplexity"):
        if metric in known:
            return metric
    message = "The budget of lost accuracy needs an accuracy or a perplexity, and these examples give neither."
    raise HeadPruneError(message, "Give dicts with labels and no loss_fn, or a budget of another kind.")


def split_batches(batches: list[Any], choose: Iterable[Any] | None, compares: bool) -> tuple[list[Any], list[Any]]:
    """The batches to fit to, and those to choose by: the given ones, or else every fourth batch, if any are needed."""
    if choose is not None:
        return batches, given_to_choose(choose, batches)
    if not compares or len(batches) < 2:
        return batches, []
    aside = set(range(_SET_ASIDE - 1, len(batches), _SET_ASIDE)) or {len(batches) - 1}
    return [b for i, b in enumerate(batches) if i not in aside], [batches[i] for i in sorted(aside)]


def may_add_biases(strategy: str, model: nn.Module, layers: Layers) -> bool:
    """Whether repair may add biases: not to ``uniform`` plans of a stock class that has no place for them."""
    counts = StockCounts.of(model, layers) if strategy == "uniform" else None
    return counts is None or counts.has_place_for_biases()


def candidates(scores: Sequence[HeadScores]) -> list[HeadScores]:
    """The scores to plan by: random ones only if there is nothing else."""
    return [s for s in scores if s.method != "random"] or list(scores)
