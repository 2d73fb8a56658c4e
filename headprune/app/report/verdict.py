"""What a run comes to: which of its pruned models to take, by what rule, and whether choosing the heads was worth it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headprune.app.documents import BudgetResult, Latency, Measured, Metrics
from headprune.app.report.findings import mean_of
from headprune.evaluation import Change
from headprune.latency import LatencyRow

# A loss of this size must be ruled out before a model is recommended: points of accuracy, or a share of the dense model's value.
TOLERATED = {"accuracy": 0.025}
TOLERATED_SHARE = 0.05


class Kind(Enum):
    """What can be said of a run's heads."""

    CAN_GO = "a loss above the margin is ruled out"
    UNSURE = "no loss was measured, but there are too few examples to rule out one above the margin"
    COSTS = "every plan loses something measurable, and a loss above the margin is not ruled out"
    GUESSING = "the dense model is no better than guessing"


@dataclass(frozen=True)
class Verdict:
    """What a run comes to.

    Attributes:
        budget: The pruned model that this is about: the recommended one, or the one that loses least.
        recommended: Whether it is recommended.
        tolerated: The loss that a recommendation must rule out, in the unit of `loss_within`.
    """

    kind: Kind
    budget: BudgetResult
    recommended: bool
    tolerated: float


def verdict(metrics: Metrics) -> Verdict:
    """The fewest heads with which a loss above the margin is ruled out; else the plan that loses least.

    Only the margin decides: more examples make an interval narrower, and a small loss measurable, but never a model worse. Where a
    budget was itself a limit of what is lost, that limit is the margin, on the reporting part.
    """
    known = {b.name: _kind(metrics, b) for b in metrics.budgets}
    if is_guessing(metrics):
        return Verdict(Kind.GUESSING, _mildest(metrics, metrics.budgets), False, tolerated(metrics))
    for kind in (Kind.CAN_GO, Kind.UNSURE, Kind.COSTS):
        if found := [b for b in metrics.budgets if known[b.name] is kind]:
            recommended = kind is Kind.CAN_GO
            budget = min(found, key=lambda b: b.kept) if recommended else _mildest(metrics, found)
            return Verdict(kind, budget, recommended, _limit(metrics, budget))
    raise ValueError("no budgets")


def loss_within(metrics: Metrics, change: Change) -> float:
    """The largest loss that a change's interval leaves possible: of accuracy in parts of 1, else as a share of the dense value."""
    return _as_share(metrics, -change.low if change.metric == "accuracy" else change.high)


def tolerated(metrics: Metrics) -> float:
    """The loss that must be ruled out where the user named none."""
    return TOLERATED.get(metrics.metric, TOLERATED_SHARE)


def is_guessing(metrics: Metrics) -> bool:
    """Whether the dense model cannot be told from one that knows nothing."""
    dense, level = metrics.dense, metrics.dense.guessing
    if level is None:
        return False
    return dense.high >= level if metrics.metric == "perplexity" else dense.low <= level


@dataclass(frozen=True)
class AgainstRandom:
    """Chosen heads beside random ones in the same number, repaired alike.

    Attributes:
        value: The metric with the chosen heads, before any training.
        mean, low, high: The random ones': mean (`headprune.app.report.findings.mean_of`), and the range over the draws.
        change: From the random ones' mean to the chosen ones, paired by example; None in older files.
        verdict: ``"better"`` or ``"worse"`` (than the mean beyond chance, and than every draw), or ``"no measurable difference"``.
    """

    budget: BudgetResult
    value: float
    mean: float
    low: float
    high: float
    change: Change | None
    verdict: str


def against_random(metrics: Metrics, budget: BudgetResult) -> AgainstRandom:
    """Whether the heads were chosen better than by chance."""
    # As the random ones are: with the cheaper repair, and never trained.
    alike = budget.repair.layers_alone if budget.repair and budget.repair.layers_alone else untrained(budget)
    value, draws = alike.metrics[metrics.metric], budget.random
    small = metrics.metric != "accuracy"  # the smaller, the better
    best, worst = (min(draws), max(draws)) if small else (max(draws), min(draws))
    beyond = {"better": value < best if small else value > best, "worse": value > worst if small else value < worst}
    found = next((word for word, is_so in beyond.items() if is_so), "")
    if not found or (budget.over_random is not None and budget.over_random.verdict != found):
        found = "no measurable difference"
    mean = mean_of(draws, metrics.metric)
    return AgainstRandom(budget, value, mean, min(draws), max(draws), budget.over_random, found)


def by_cheaper_repair(budget: BudgetResult) -> bool:
    """Whether chosen heads were compared with random ones by a cheaper repair than the model's."""
    return budget.repair is not None and budget.repair.layers_alone is not None


def untrained(budget: BudgetResult) -> Measured:
    """The pruned model on the reporting part, before it was trained if it was."""
    return budget.finetune.before if budget.finetune else budget.pruned


def headline_row(latency: Latency) -> LatencyRow:
    """The input whose speed is told first: the largest batch, of the length that is nearest to the median."""
    largest = max(row.batch for row in latency.rows)
    rows = [row for row in latency.rows if row.batch == largest]
    return min(rows, key=lambda row: abs(row.length - latency.typical_length))


@dataclass(frozen=True)
class Elsewhere:
    """What is wrong with a pruned model on a second dataset.

    Attributes:
        repair_hurt: Repair made it measurably worse there, and no worse on the first data.
        worse: It is measurably worse than the dense model there, and was not on the first data.
    """

    name: str
    budget: BudgetResult
    change: Change
    gain: Change | None
    repair_hurt: bool
    worse: bool


def elsewhere(metrics: Metrics) -> list[Elsewhere]:
    """Every pruned model that does worse on second data than the first data lets expect."""
    found = []
    for budget in sorted(metrics.budgets, key=lambda b: -b.kept):
        first = budget.repair.gain if budget.repair else None
        for data, there in zip(metrics.also, budget.also, strict=True):
            hurt = there.gain is not None and there.gain.verdict == "worse"
            hurt = hurt and (first is None or first.verdict != "worse")
            worse = there.change.verdict == "worse" and budget.change.verdict != "worse"
            if hurt or worse:
                found.append(Elsewhere(data.name, budget, there.change, there.gain, hurt, worse))
    return found


def _kind(metrics: Metrics, budget: BudgetResult) -> Kind:
    if loss_within(metrics, budget.change) <= _limit(metrics, budget):
        return Kind.CAN_GO
    return Kind.COSTS if budget.change.verdict == "worse" else Kind.UNSURE


def _limit(metrics: Metrics, budget: BudgetResult) -> float:
    """The loss that must be ruled out: what the user allowed, or what is tolerated."""
    asked = budget.budget
    if _is_limit(budget) and asked is not None and asked.limit is not None:
        return asked.limit if metrics.metric != "loss" else _as_share(metrics, asked.limit)
    return tolerated(metrics)


def _is_limit(budget: BudgetResult) -> bool:
    return bool(budget.budget and budget.budget.parsed and budget.budget.parsed.by_metric)


def _as_share(metrics: Metrics, amount: float) -> float:
    dense = metrics.dense.metrics[metrics.metric]
    return amount / abs(dense) if metrics.metric == "loss" and dense else amount


def _mildest(metrics: Metrics, budgets: tuple[BudgetResult, ...] | list[BudgetResult]) -> BudgetResult:
    return min(budgets, key=lambda b: (loss_within(metrics, b.change), -b.kept))
