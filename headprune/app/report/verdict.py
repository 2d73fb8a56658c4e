"""A run's verdict: which pruned model is recommended, by what rule, and whether the chosen heads beat random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headprune.app.documents import BudgetResult, Latencies, Measured, Metrics
from headprune.evaluation import Change
from headprune.latency import LatencyRow
from headprune.metrics import metric_named

# A loss of this size must be ruled out before a model is recommended: a share of the metric's scale (points of accuracy), or of the dense
# model's value, whichever is less.
TOLERATED, TOLERATED_SHARE = 0.025, 0.05


# What can be said of a run's heads: a loss above the margin is ruled out; or none was measured, but there are too few examples to rule one
# out; or every plan loses something measurable; or the dense model is no better than guessing.
CAN_GO, UNSURE, COSTS, GUESSING = "can go", "unsure", "costs", "guessing"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Attributes:
        conclusion: ``CAN_GO``, ``UNSURE``, ``COSTS`` or ``GUESSING``.
        budget: The pruned model that the verdict is about: the recommended one, or the one that loses least.
        recommended: Whether it is recommended.
        tolerated: The loss that a recommendation must rule out, in the unit of `loss_within`.
    """

    conclusion: str
    budget: BudgetResult
    recommended: bool
    tolerated: float


def judge(metrics: Metrics) -> Verdict:
    """The verdict: the fewest heads with which a loss above the margin is ruled out; else the plan that loses least.

    Only the margin decides, not whether a loss is measurable: more examples make small losses so, but no model worse.
    If a budget itself limits the loss, its limit is the margin, on the reporting part.
    """
    if not metrics.budgets:
        raise ValueError("no budgets")
    conclusions = [_conclusion(metrics, b) for b in metrics.budgets]
    best = min(conclusions, key=(GUESSING, CAN_GO, UNSURE, COSTS).index)
    budgets = [b for b, conclusion in zip(metrics.budgets, conclusions, strict=True) if conclusion == best]
    recommended = best == CAN_GO
    budget = min(budgets, key=lambda b: (0, b.kept) if recommended else (loss_within(metrics, b.change), -b.kept))
    return Verdict(best, budget, recommended, _limit(metrics, budget))


def largest_first(metrics: Metrics) -> list[BudgetResult]:
    """The budgets, those that keep most heads first."""
    return sorted(metrics.budgets, key=lambda b: -b.kept)


def loss_within(metrics: Metrics, change: Change) -> float:
    """The largest loss that a change's interval allows: as a share of the metric's scale, or of the dense value if it has none."""
    return _as_share(metrics, -change.low if metric_named(change.metric).higher else change.high)


def limits_metric(budgets: Sequence[BudgetResult]) -> bool:
    """Whether a budget limits the loss of the metric, so that fewer heads are better."""
    return any(b.budget and b.budget.parsed and b.budget.parsed.by_metric for b in budgets)


def against_random(metrics: Metrics, budget: BudgetResult) -> str:
    """Whether heads were chosen better than by chance: ``"better"`` or ``"worse"`` (than the mean of the random draws beyond chance,
    and than every draw), or ``"no measurable difference"``.
    """
    value, draws = like_random(budget).metrics[metrics.metric], budget.random
    sign = 1 if metric_named(metrics.metric).higher else -1
    better, worse = (all(way * sign * (value - draw) > 0 for draw in draws) for way in (1, -1))
    word = "better" if better else "worse" if worse else ""
    if not word or (budget.over_random is not None and budget.over_random.verdict != word):
        return "no measurable difference"
    return word


def like_random(budget: BudgetResult) -> Measured:
    """The chosen heads, treated like the random ones: with the cheaper repair, and not trained."""
    return layers_alone(budget) or untrained(budget)


def layers_alone(budget: BudgetResult) -> Measured | None:
    """The chosen heads with layer-by-layer repair only, like random ones; None if the model's repair did no more."""
    return budget.repair.layers_alone if budget.repair else None


def trained(metrics: Metrics) -> bool:
    """Whether a pruned model was trained again."""
    return any(b.finetune for b in metrics.budgets)


def untrained(budget: BudgetResult) -> Measured:
    """The pruned model's metrics on the reporting part, before any training."""
    return budget.finetune.before if budget.finetune else budget.pruned


def headline_row(latency: Latencies) -> LatencyRow:
    """The input whose speed is reported first: the largest batch, of the length that is nearest to the median."""
    return min(latency.rows, key=lambda row: (-row.batch, abs(row.length - latency.typical_length)))


def _conclusion(metrics: Metrics, budget: BudgetResult) -> str:
    dense, level = metrics.dense, metrics.dense.guessing  # of a model that only guesses
    if level is not None and (dense.low <= level if metric_named(metrics.metric).higher else dense.high >= level):
        return GUESSING
    if loss_within(metrics, budget.change) <= _limit(metrics, budget):
        return CAN_GO
    return COSTS if budget.change.verdict == "worse" else UNSURE


def _limit(metrics: Metrics, budget: BudgetResult) -> float:
    """The loss that must be ruled out: the user's limit, or the default margin."""
    asked = budget.budget.parsed if budget.budget else None
    if asked and asked.by_metric:
        return _as_share(metrics, asked.amount)
    kind, dense = metric_named(metrics.metric), metrics.dense.metrics[metrics.metric]
    return min(TOLERATED, TOLERATED_SHARE * abs(dense) / kind.width) if kind.width else TOLERATED_SHARE


def _as_share(metrics: Metrics, amount: float) -> float:
    kind, dense = metric_named(metrics.metric), metrics.dense.metrics[metrics.metric]
    scale = 1.0 if kind.relative else kind.width or abs(dense)
    return amount / (scale or 1.0)
