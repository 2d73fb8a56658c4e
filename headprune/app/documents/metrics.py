"""metrics.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from headprune.app.documents.run import Environment, Examples, Measured, Training
from headprune.app.options import FinetuneOptions
from headprune.budgets import Budget, Fit, Reading, kind_named
from headprune.documents import Beside, Count, File
from headprune.evaluation import Change
from headprune.latency import GenerationRow, LatencyRow
from headprune.plan_search import ComparedOrder
from headprune.planning.strategies import Effort, Work
from headprune.repairing import Repair
from headprune.surgery import Proof


@dataclass(frozen=True, kw_only=True)
class Dense(Measured):
    """The dense model on the reporting part.

    Attributes:
        flops: Of one forward pass on an example of median length.
        guessing: The metric of a model that knows nothing: the share of the most frequent label (of several labels at once each one's,
            of answers the start's and the end's), or as a perplexity the number of tokens in the vocabulary; None where that is not known.
        weights, dtype: As `BudgetResult`'s, of the checkpoint that it was loaded from.
    """

    parameters: Count
    flops: Count
    guessing: float | None = None
    weights: Count | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How plans were made.

    Attributes:
        plan: The file of the user's plan; the other fields are then not there.
        about: What the strategy does.
        protect: Heads that had to stay, as the user wrote them.
        work: By order.
        judged_by: What orders were compared by.
    """

    plan: str | None = None
    strategy: str = ""
    about: str = ""
    protect: str = ""
    min_heads_per_layer: Count = 0
    effort: Effort | None = None
    work: dict[str, Work] = field(default_factory=dict)
    judged_by: str = ""
    compared: tuple[ComparedOrder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BudgetRecord:
    """A budget.

    Attributes:
        asked: As the user wrote it.
        kind: Its name in the register (`headprune.budgets`); this and what follows are not there for a number of heads.
        limit: The most that is allowed: a share of the dense model's, if ``relative``, else in ``unit``.
        measured: On the pruned model, with its 95 % interval (``low`` to ``high``).
        batch, length: The input that was timed, for a latency; ``length`` in tokens, 0 where there are none.
    """

    asked: str
    kind: str | None = None
    limit: float | None = None
    relative: bool | None = None
    unit: str | None = None
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    batch: Count | None = None
    length: Count | None = None

    @classmethod
    def of(cls, fit: Fit, batch: int | None = None, length: int | None = None) -> BudgetRecord:
        """The budget as it was asked for, and what the plan was measured to cost."""
        budget, reading = fit.budget, fit.reading
        if budget is None or reading is None:
            return cls(asked=fit.plan.budget)
        return cls(
            asked=str(budget), kind=budget.kind, limit=budget.amount, relative=budget.relative, unit=budget.amount_unit,
            measured=reading.value, low=reading.low, high=reading.high, batch=batch, length=length,
        )  # fmt: skip

    @property
    def parsed(self) -> Budget | None:
        """The budget itself; None where only heads were counted."""
        if self.kind is None or self.limit is None:
            return None
        return kind_named(self.kind)(self.asked.partition(" ")[2], self.limit, bool(self.relative))

    @property
    def reading(self) -> Reading | None:
        """What was measured; None where only heads were counted."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return Reading(self.measured, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Repaired(Repair):
    """A repair, and what it was worth on the reporting part.

    Attributes:
        without: The pruned model without the repair.
        layers_alone: The same heads repaired layer by layer alone, as the random control is; None where that is the repair.
        gain: The change by repair (and training, if there was any), paired by example.
    """

    without: Measured
    layers_alone: Measured | None = None
    gain: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Trained(Training):
    """A fine-tuning, and what was measured on the reporting part before it."""

    options: FinetuneOptions
    before: Measured


@dataclass(frozen=True, kw_only=True)
class Proved(Proof):
    """The proof of a prune, and of its folder.

    Attributes:
        reload_difference: Largest difference between the saved folder's outputs and those of the model in memory, as a share of
            their largest value.
    """

    reload_difference: float


@dataclass(frozen=True, kw_only=True)
class AlsoMeasured:
    """A pruned model on a second dataset.

    Attributes:
        change: From the dense model, paired by example.
        gain: The change by repair (and training, if there was any); None where no weight was changed.
    """

    pruned: Measured
    change: Change
    gain: Change | None = None


@dataclass(frozen=True, kw_only=True)
class AlsoData:
    """A second dataset, that nothing was fitted to, and the dense model on it.

    Attributes:
        name: The dataset as the user named it, or the file of headprune's own text.
    """

    name: str
    data: Examples
    dense: Measured


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """A pruned model.

    Attributes:
        name: In the table of latencies.
        asked, kept, total: Heads: of the budget, of the model, of the dense model.
        method, strategy: That chose the heads; "" for a plan of the user's.
        drop: The heads that went, by layer.
        pruned: On the reporting part, as it was saved and loaded again.
        change: From the dense model, paired by example.
        random: The metric with as many heads drawn at random, of each draw.
        over_random: The change from random heads (the mean of the draws) to the chosen ones, both repaired alike, paired by example.
        also: On every dataset of `Metrics.also`.
        flops: As of `Dense`.
        checkpoint: The folder beside metrics.json that it was saved to.
        size: Of that folder's files, in bytes.
        weights: Bytes of its weights as they are saved, shared ones once; None in older files.
        dtype: That its weights are saved in.
        loads: The call that loads the folder where headprune is not installed; "" in older files.
    """

    name: str
    asked: Count
    kept: Count
    total: Count
    method: str
    strategy: str = ""
    budget: BudgetRecord | None = None
    notes: tuple[str, ...]
    drop: dict[str, tuple[Count, ...]]
    pruned: Measured
    change: Change
    random: tuple[float, ...]
    over_random: Change | None = None
    also: tuple[AlsoMeasured, ...] = ()
    repair: Repaired | None = None
    finetune: Trained | None = None
    proof: Proved
    parameters: Count
    flops: Count
    checkpoint: Beside
    size: Count | None = None
    weights: Count | None = None
    dtype: str | None = None
    loads: str = ""

    def __post_init__(self) -> None:
        if any(len(set(heads)) < len(heads) for heads in self.drop.values()):
            raise ValueError("a head is listed twice")
        if self.kept > self.total:
            raise ValueError("more heads are kept than there are")

    @property
    def runs_code(self) -> bool:
        """Whether loading the folder runs code that came with the dense model."""
        return self.loads.startswith("headprune.") and "trust_remote_code" in self.loads


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the trade-off curve: a plan's metric on the choosing part, with its 95 % interval.

    Attributes:
        method: The order's name; ``"dense"``, ``"random"`` or ``"plan"`` (the user's) beside.
        loss: Nats.
    """

    method: str
    kept: Count
    asked: Count
    value: float
    low: float
    high: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Times of forward passes, in milliseconds.

    Attributes:
        bound: The name of the model without prunable heads; None if it was not timed.
        bound_ghosts: Layers of it that keep one head with zero output.
        typical_length: The median length, in tokens.
    """

    rows: tuple[LatencyRow, ...]
    bound: str | None
    bound_ghosts: Count = 0
    typical_length: Count


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A pruned model for another engine, as it was asked for (``--export``).

    Attributes:
        format: Its name in `headprune.exporting.FORMATS`.
        name: In the tables of times, as `BudgetResult.name`.
        checkpoint: The folder that it was made from.
        file: The file or folder beside metrics.json; None if the format cannot express the model.
        summary: The file, and how it was tried, in a line; or why there is none.
    """

    format: str
    name: str
    checkpoint: Beside
    file: Beside | None
    proved: bool
    summary: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineLatency:
    """Times of exported models in the engine that they are for, the dense one first, as `Latencies`."""

    format: str
    rows: tuple[LatencyRow, ...]


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """What the dense model's forward pass on one input spends its time on; see `headprune.Breakdown`.

    Attributes:
        total: Milliseconds.
        parts: Milliseconds of each part; they add up to the total.
        bounds: By the names of the pruned models in the table of latencies: how many times as fast its plan can be at most.
        stand_ins: Whether plain operations took the place of fused ones.
    """

    batch: Count
    length: Count
    total: float
    parts: dict[str, float]
    bounds: dict[str, float]
    stand_ins: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """Every part's share of the total."""
        return {name: time / self.total for name, time in self.parts.items()}

    def timed(self, rows: Sequence[LatencyRow]) -> float | None:
        """Milliseconds of the dense model's pass on this input where the models were timed in turn; None if it was not timed."""
        timings_here = (row.timings for row in rows if (row.batch, row.length) == (self.batch, self.length))
        return next((next(iter(timings.values())).median for timings in timings_here if timings), None)

    def factor_from(self, rows: Sequence[LatencyRow]) -> float:
        """How many times as long, or as short, these passes took as those of `timed`; 1 where both cannot be compared.

        It is the same model on the same input: if this is more than `DISTURBED`, something else kept the machine busy.
        """
        timed = self.timed(rows)
        return 1.0 if self.stand_ins or not timed else max(self.total / timed, timed / self.total)


DISTURBED = 1.5
"""The factor between two timings of one model beyond which one of them was disturbed; undisturbed ones differ by less."""


@dataclass(frozen=True, kw_only=True)
class Metrics(File):
    """What was measured of the dense model and of the pruned ones.

    Attributes:
        environment: Where they were measured; scores may have been made elsewhere.
        curve: The trade-off between heads and the metric.
        time: For each input of ``latency.rows``; none where the device's time cannot be looked into.
        generation: For models that write text.
        also: Second datasets.
    """

    kind: ClassVar[str] = "metrics"

    metric: str
    environment: Environment | None = None
    planning: Planning = Planning()
    dense: Dense
    budgets: tuple[BudgetResult, ...]
    curve: tuple[Point, ...]
    latency: Latencies
    time: tuple[TimeParts, ...] = ()
    generation: tuple[GenerationRow, ...] = ()
    also: tuple[AlsoData, ...] = ()
    exports: tuple[ExportedModel, ...] = ()
    engines: tuple[EngineLatency, ...] = ()
