"""What a report concludes from the documents: no text, only what is so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headprune.amounts import head_count
from headprune.app.documents import (
    MOST_APART,
    BudgetResult,
    Latency,
    Metrics,
    Planning,
    Point,
    Repaired,
    TimeParts,
)
from headprune.latency import LatencyRow, Speedup
from headprune.repairing import Trial
from headprune.scoring.agreement import Agreement
from headprune.scoring.scores import HeadScores
from headprune.searching import ComparedOrder
from headprune.timing.parts import ATTENTION, LAUNCH, PROJECTIONS
from headprune.uncertainty import FEW

_SHOWN = 8  # heads at each end of a method's list


def largest_first(metrics: Metrics) -> list[BudgetResult]:
    """The budgets, those that keep most heads first."""
    return sorted(metrics.budgets, key=lambda b: -b.kept)


def chosen_by(budget: BudgetResult) -> list[str]:
    """The method and the strategy that chose a budget's heads, each name once; none for a plan of the user's."""
    return list(dict.fromkeys(filter(None, [budget.method, budget.strategy])))


def mean_of(values: Sequence[float], metric: str) -> float:
    """The mean of a metric over several models: of perplexities exp of the mean loss (the geometric mean).

    A change of perplexity is one of the loss, so only beside this mean do the change's sign and size fit.
    """
    if metric != "perplexity" or not all(0 < value < math.inf for value in values):
        return sum(values) / len(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def trained_on_choosing(metrics: Metrics) -> float | None:
    """The dense model's value where plans were chosen, if it is far better there than where they are reported."""
    dense = metrics.dense
    chosen = next(p for p in metrics.curve if p.method == "dense")
    apart = chosen.low > dense.high if metrics.metric == "accuracy" else chosen.high < dense.low
    return chosen.value if apart else None


def rests_on_few(metrics: Metrics) -> list[BudgetResult]:
    """Budgets whose change of perplexity hangs on so few examples that its interval may be too narrow."""
    if metrics.metric == "accuracy":
        return []
    return [b for b in largest_first(metrics) if 0 < b.change.carried_by < FEW <= b.change.examples]


def stored(metrics: Metrics, budget: BudgetResult | None = None) -> tuple[int, str] | None:
    """Bytes of a model's weights as they are saved, and in which precision: of a budget's model, or of the dense one.

    Older files do not say it of the dense model: then its precision is that of the first pruned one, and its size that of as many
    numbers. None where the precision is not known at all.
    """
    model = budget or metrics.dense
    dtype = model.dtype or metrics.budgets[0].dtype
    if dtype is None:
        return None
    return model.weights or model.parameters * getattr(torch, dtype).itemsize, dtype


def precisions(metrics: Metrics) -> set[str]:
    """In which precisions models are saved, the dense one among them; none where that is not known."""
    return {found[1] for b in (None, *metrics.budgets) if (found := stored(metrics, b))}


@dataclass(frozen=True)
class Speed:
    """A pruned model's speed.

    Attributes:
        rows: Each input that was timed, with the speedup there.
        slow: On how many of them it is not measurably faster.
        most: The input on which a model without prunable heads would gain most, and that model's ratio there; None if
            it was not timed.
    """

    rows: list[tuple[LatencyRow, Speedup]]
    slow: int
    most: tuple[LatencyRow, float] | None


def speed(latency: Latency, name: str) -> Speed:
    """What the model of this name gained, and the most there was to gain."""
    rows = [(row, row.speedups[name]) for row in latency.rows]
    most, bound = None, latency.bound
    if bound:
        limits = [(row, row.speedups[bound].ratio) for row in latency.rows]
        most = max(limits, key=lambda limit: limit[1])
    return Speed(rows, sum(s.verdict != "faster" for _, s in rows), most)


@dataclass(frozen=True)
class Gain:
    """What a pruned model gained on an input, and the most that its plan can gain there (Amdahl's law)."""

    row: TimeParts
    name: str
    achieved: Speedup
    bound: float

    @property
    def share(self) -> float:
        """Achieved over bound."""
        return self.achieved.ratio / self.bound


@dataclass(frozen=True)
class WhereTimeGoes:
    """What the dense model's time says to somebody who wants it faster.

    Attributes:
        rows: By input.
        largest: The one with most tokens.
        beside: The part of it that takes most of the time, but for attention.
        most: How many times as fast it would be without the time of all heads that can go, by the breakdown.
        timed: The same, timed: the model without them; None where there was none.
        waiting: The input with the largest share of launch overhead, if it is much (`_MUCH`).
        names: Of the pruned models, those that keep most heads first.
        gains: Of every pruned model on every input; none on inputs where other work disturbed the breakdown (`TimeParts.apart`).
    """

    rows: tuple[TimeParts, ...]
    largest: TimeParts
    beside: str
    most: float
    timed: float | None
    waiting: TimeParts | None
    names: list[str]
    gains: list[Gain]

    @property
    def attention(self) -> float:
        """The share of attention in the largest input: its projections and itself."""
        return sum(self.largest.shares[part] for part in (PROJECTIONS, ATTENTION))

    @property
    def at_largest(self) -> list[Gain]:
        """The gains on the largest input."""
        return self.on(self.largest)

    def on(self, row: TimeParts) -> list[Gain]:
        """The gains on an input."""
        return [gain for gain in self.gains if gain.row is row]


_MUCH = 0.25


def where_time_goes(metrics: Metrics) -> WhereTimeGoes | None:
    """What the breakdowns of the dense model say; None where none were made."""
    if not metrics.time:
        return None
    largest = max(metrics.time, key=lambda row: (row.batch * max(1, row.length), row.total))
    others = {part: share for part, share in largest.shares.items() if part not in (PROJECTIONS, ATTENTION)}
    sound = [row for row in metrics.time if row.apart(metrics.latency.rows) <= MOST_APART]
    waiting = max(sound, key=lambda row: row.shares[LAUNCH], default=None)
    speedups = {(row.batch, row.length): row.speedups for row in metrics.latency.rows}
    gains = [
        Gain(row, b.name, speedups[row.batch, row.length][b.name], row.bounds[b.name])
        for b in largest_first(metrics) for row in sound
        if b.name in row.bounds and b.name in speedups.get((row.batch, row.length), {})
    ]  # fmt: skip
    most, bound = max(largest.bounds.values()), metrics.latency.bound
    emptied = speedups.get((largest.batch, largest.length), {}).get(bound or "")
    return WhereTimeGoes(
        metrics.time, largest, max(others, key=others.__getitem__), most, emptied.ratio if emptied else None,
        waiting if waiting and waiting.shares[LAUNCH] >= _MUCH else None,
        [b.name for b in largest_first(metrics) if b.name in largest.bounds], gains,
    )  # fmt: skip


@dataclass(frozen=True)
class Ranking:
    """A method's heads from the most important down, each as (label, score, standard error).

    Attributes:
        harmful: Heads whose score is below 0 beyond its standard error; None where that means nothing.
        unsure: Heads that cannot be told from 0.
    """

    scores: HeadScores
    heads: list[tuple[str, float, float]]
    harmful: int | None
    unsure: int

    @property
    def highest(self) -> list[tuple[str, float, float]]:
        """The most important, at most half of all."""
        return self.heads[: min(_SHOWN, len(self.heads) // 2)]

    @property
    def lowest(self) -> list[tuple[str, float, float]]:
        """The least important first, at most half of all."""
        return self.heads[::-1][: min(_SHOWN, len(self.heads) // 2)]


def ranking(scores: HeadScores) -> Ranking:
    """The order of a method's heads, and which of them are surely harmful."""
    flat, error = scores.flat(), scores.flat_stderr()
    heads = scores.top(len(flat))
    harmful = None
    if scores.signed and float(flat.min()) < 0 and bool(error.isfinite().all()):
        harmful = int(((flat + 1.96 * error) < 0).sum())
    return Ranking(scores, heads, harmful, int((flat.abs() < 1.96 * error).sum()))


@dataclass(frozen=True)
class TradeOff:
    """The table of the curves: the mean of every method's values at every number of heads that was asked for."""

    methods: list[str]
    rows: list[tuple[int, list[float | None]]]


def trade_off(curve: Sequence[Point], metric: str) -> TradeOff:
    """The curve's points by heads kept and method."""
    points = [p for p in curve if p.method != "dense"]
    methods = list(dict.fromkeys(p.method for p in points))
    rows = []
    for keep in sorted({p.asked for p in points}, reverse=True):
        found = ([p.value for p in points if p.method == m and p.asked == keep] for m in methods)
        rows.append((keep, [mean_of(values, metric) if values else None for values in found]))
    return TradeOff(methods, rows)


@dataclass(frozen=True)
class Refit:
    """What the refits of a budget's layers did, on average."""

    before: float
    after: float
    least: float
    most: float
    new_values: int
    layers: int


def refit(repair: Repaired | None) -> Refit | None:
    """W_O's mean error without and with the repair, and the range of its ridges; None if no layer was refitted."""
    fits = list(repair.layers.values()) if repair else []
    if not fits:
        return None
    before, after = (sum(errors) / len(fits) for errors in zip(*((f.before, f.after) for f in fits), strict=True))
    ridges = sorted(f.ridge for f in fits)
    return Refit(before, after, ridges[0], ridges[-1], sum(f.values for f in fits), len(fits))


def tried_steps(budgets: Sequence[BudgetResult]) -> list[tuple[BudgetResult, Trial]]:
    """How the steps of all repairs did on the examples that choose, in their order."""
    return [(budget, trial) for budget in budgets if budget.repair for trial in budget.repair.trials]


def compared(planning: Planning) -> tuple[list[str], list[tuple[ComparedOrder, list[str]]]]:
    """The orders that were compared: the budgets, those that keep most heads first, and for each order how its plans did there.

    How many heads a plan keeps is said where the budget does not say it.
    """
    first = planning.compared[0].plans
    places = sorted(range(len(first)), key=lambda i: -first[i].kept)
    rows = []
    for order in planning.compared:
        cells = []
        for plan in (order.plans[i] for i in places):
            told = (
                "–" if (value := plan.loss if plan.divergence is None else plan.divergence) is None else f"{value:.3g}"
            )
            cells.append(told if plan.budget == f"keep {plan.kept}" else f"{told} ({head_count(plan.kept)})")
        rows.append((order, cells))
    return [first[i].budget for i in places], rows


def shared_notes(budgets: Sequence[BudgetResult]) -> list[tuple[str, list[int] | None]]:
    """The repairs' notes, each once, with the heads kept by the budgets that it is of; None if it is of all."""
    repairs = [(b.kept, b.repair) for b in budgets if b.repair]
    kept: dict[str, list[int]] = {}
    for heads, repair in repairs:
        for note in repair.notes:
            kept.setdefault(note, []).append(heads)
    return [(note, None if len(of) == len(repairs) else of) for note, of in kept.items()]


def kept_though_low(scores: HeadScores, budget: BudgetResult) -> list[str]:
    """Heads that stay although as many heads went as score lower or equally: by label, the lowest first."""
    gone = {(name, h) for name, heads in budget.drop.items() for h in heads}
    heads = [(layer.name, h) for layer in scores.layers for h in range(layer.num_heads)]
    flat, labels = scores.flat(), scores.labels()
    lowest = flat.argsort(stable=True).tolist()[: len(gone)]
    return [labels[i] for i in lowest if heads[i] not in gone]


def notes_in_common(budgets: Sequence[BudgetResult]) -> list[str]:
    """Notes on how plans were made that are of several budgets, and of all."""
    return [n for n in budgets[0].notes if len(budgets) > 1 and all(n in b.notes for b in budgets)]


def limits_metric(budgets: Sequence[BudgetResult]) -> bool:
    """Whether what was asked for is a bound on what is lost, so that fewer heads are better."""
    return any(b.budget and b.budget.parsed and b.budget.parsed.by_metric for b in budgets)


def changed_weights(metrics: Metrics) -> list[BudgetResult]:
    """The budgets whose models were repaired or fine-tuned, those that keep most heads first."""
    return [b for b in largest_first(metrics) if b.repair or b.finetune]


def fewest_rounds(latency: Latency) -> int:
    """The rounds that every model was timed in, at least."""
    return min(timing.runs for row in latency.rows for timing in row.timings.values())


def closest_first(pairs: Sequence[Agreement]) -> list[Agreement]:
    """Pairs of methods from the most alike down; those that cannot be compared last."""
    return sorted(pairs, key=lambda p: -(p.spearman if p.spearman == p.spearman else -2))
