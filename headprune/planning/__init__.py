"""Turn importance scores into pruning plans: constraints, strategies and removal orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headprune.errors import HeadPruneError, import_files, registered
from headprune.fingerprint import has_identity, identity
from headprune.planning.order import GROUPS, SLICES, Constraints, Order, has_groups
from headprune.planning.strategies import AUTO, STRATEGIES, Search, abouts, strategy
from headprune.plans import Keep, PruningPlan, heads_to_keep
from headprune.scoring.scores import HeadScores

__all__ = [
    "AUTO", "GROUPS", "SLICES", "STRATEGIES", "Constraints", "Order", "Search", "abouts", "arrange", "check_strategy", "has_groups",
    "needs_scores", "plan", "strategy",
]  # fmt: skip

import_files(__name__, __path__)  # the strategies

Quality = Callable[[PruningPlan], float]


def plan(
    scores: HeadScores,
    keep: Keep,
    strategy: str = "one-shot",
    *,
    protect: str | Iterable[str] = (),
    min_heads_per_layer: int = 0,
) -> PruningPlan:
    """Plan from scores alone: keep the most important heads, at most ``keep`` of them.

    The unit of removal is a head. Where heads share key/value heads, it is a whole group (its importance is the mean
    over its heads) or one query head of every group: whichever keeps more of the scores at this budget.

    Args:
        scores: From `headprune.score`.
        keep: A count (36), a share (0.5) or a percentage ("50%").
        strategy: ``"one-shot"`` ranks all heads of the model, ``"per-layer"`` gives every layer its share,
            ``"uniform"`` the same number to every layer, ``"layers"`` takes whole attention layers.
        protect: Layers and heads that must stay: ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.

    Raises:
        HeadPruneError: A budget that is out of reach, below 1 or above the total; an unknown strategy or address;
            a strategy that runs the model.
    """
    if not needs_scores(strategy):
        message = f"The strategy {strategy} runs the model, which headprune.plan does not see."
        raise HeadPruneError(message, f"Use headprune.search(model, batches, keep={keep!r}, strategy={strategy!r}).")
    constraints = Constraints.parse(protect, scores.layers, min_heads_per_layer)
    heads = heads_to_keep(keep, sum(layer.num_heads for layer in scores.layers))
    order = arrange(Search(scores.layers, scores, constraints), strategy, [heads])
    return replace(order.some(heads), budget=f"keep {keep}")


def arrange(
    search: Search,
    strategy: str,
    levels: Sequence[int],
    quality: Quality | None = None,
    kinds: Sequence[str] = (GROUPS, SLICES),
    judged: Sequence[int] = (),
) -> Order:
    """Return the order in which a strategy removes heads.

    Where heads share key/value heads, the strategy runs twice: once with whole groups, once with one query head of
    every group at a time. An order wins if it is `Order.stock`, else if it reaches more budgets, else if its plans have
    the higher total quality. One kind serves all budgets, so that plans are nested.

    Args:
        levels: Numbers of kept heads at which plans will be used; the smallest may be out of reach.
        quality: How good a plan is; higher is better. A search that can run the model measures it; by default it is
            predicted, as minus the sum of the removed heads' scores.
        kinds: How heads that share key/value heads may be removed; only whole groups shrink a cache.
        judged: The levels at which the kinds are compared; all by default.

    Raises:
        HeadPruneError: An unknown strategy, scores of another model, or nothing to rank by.
    """
    check_strategy(strategy)
    scores = search.scores
    if scores and scores.model and search.model and not has_identity(search.model, scores.model):
        message = f"The scores are another model's (fingerprint {scores.model}, this one is {identity(search.model)})."
        raise HeadPruneError(message, "Score this model first.")
    levels = sorted(levels, reverse=True)
    kinds = kinds if has_groups(search.layers) else (GROUPS,)
    orders = [STRATEGIES[strategy].run(replace(search, kind=kind), levels) for kind in kinds]
    if len(orders) == 1:
        return orders[0]
    judge = quality or (lambda plan: -_score_lost(plan, scores) if scores else plan.kept)
    judged = judged or levels
    common = [k for k in judged if all(o.reaches(k) for o in orders)]

    def merit(order: Order) -> tuple[bool, int, float, int, int]:
        reached = sum(order.reaches(k) for k in judged)
        fewest = min((kept for kept in order.kept() if kept), default=0)  # for the hint, where no budget is reached
        worth = sum(judge(order.plan(k)) for k in common)
        return order.stock, reached, worth, -order.least, 0 if reached else -fewest

    return max(orders, key=merit)  # on a tie the first: groups


def _score_lost(plan: PruningPlan, scores: HeadScores) -> float:
    """Sum of the removed heads' scores. If scores are an added loss, this predicts the plan's loss up to a constant."""
    return sum(float(scores.values[name][heads].sum()) for name, heads in plan.drop.items())


def check_strategy(name: str) -> None:
    """Refuse a name that is neither a registered strategy nor `AUTO`.

    Raises:
        HeadPruneError: There is no strategy of that name.
    """
    registered(abouts(), "strategy", name)


def needs_scores(name: str) -> bool:
    """Whether a strategy ranks heads by given scores; the others, and `AUTO`, run the model.

    Raises:
        HeadPruneError: There is no strategy of that name.
    """
    check_strategy(name)
    return name != AUTO and not STRATEGIES[name].runs_model
