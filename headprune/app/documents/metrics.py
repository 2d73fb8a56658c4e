"""The document metrics.json: what was measured of the dense and the pruned models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from headprune.app.documents.run import Environment, Examples, Measured, Training
from headprune.app.documents.values import ValueTable
from headprune.app.options import FinetuneOptions
from headprune.budgets import Budget, Reading, budget_of
from headprune.documents import Beside, Count, File
from headprune.evaluation import Change
from headprune.latency import GenerationRow, LatencyRow
from headprune.plan_search import ComparedOrder
from headprune.planning import Order
from headprune.planning.strategies import Effort, Work
from headprune.repairing import Repair
from headprune.surgery import Proof


@dataclass(frozen=True, kw_only=True)
class Dense(Measured):
    """The dense model on the reporting part.

    Attributes:
        flops: FLOPs of one forward pass on an example of median length.
        guessing: The metric of a model that only guesses: the share of the most frequent label (for several labels at once, of each;
            for answers, of start and end), by other metrics what that constant answer gives (`Metric.guess`), for the loss the labels'
            entropy (the variance of numbers), for perplexity its exponential; where tokens are predicted, as if all of the vocabulary were
            as likely. None if unknown.
        weights, dtype: As in `BudgetResult`, of the checkpoint that the model was loaded from.
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
        plan: The file of the user's plan; the other fields are then not set.
        protect: Heads that had to stay, as the user wrote them.
        work: What each order cost to make, by its name.
        judged_by: The quantity that orders were compared by; "" for a single order.
    """

    plan: str | None = None
    strategy: str = ""
    protect: str = ""
    min_heads_per_layer: Count = 0
    effort: Effort | None = None
    work: dict[str, Work] = field(default_factory=dict)
    judged_by: str = ""
    compared: tuple[ComparedOrder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BudgetRecord:
    """A budget, and the pruned model's measured value.

    Attributes:
        asked: As the user wrote it, after its name in `headprune.budgets.BUDGETS`; or the file of a user's plan.
        reading: Measured on the pruned model: a share of the dense model's, or in the budget's unit. None, like the fields below,
            for a number of heads and a user's plan.
        batch, length: The input that was timed, for a latency; ``length`` in tokens, 0 where there are none.
    """

    asked: str
    reading: Reading | None = None
    batch: Count | None = None
    length: Count | None = None

    @property
    def parsed(self) -> Budget | None:
        """The `Budget` itself; None where only heads were counted."""
        return budget_of(self.asked) if self.reading else None


@dataclass(frozen=True, kw_only=True)
class Repaired(Repair):
    """A repair, and its effect on the reporting part.

    Attributes:
        without: The pruned model without the repair.
        layers_alone: The same heads repaired layer by layer only, like the random control; None if that is the whole repair.
        gain: The change due to repair (and training, if any), paired by example.
    """

    without: Measured
    layers_alone: Measured | None = None
    gain: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Trained(Training):
    """A fine-tuning, with the pruned model's metrics on the reporting part before it."""

    options: FinetuneOptions
    before: Measured


@dataclass(frozen=True, kw_only=True)
class Proved(Proof):
    """The proof of a prune and of its saved folder.

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
        gain: The change due to repair (and training, if any); None where no weight was changed.
    """

    pruned: Measured
    change: Change
    gain: Change | None = None


@dataclass(frozen=True, kw_only=True)
class AlsoData:
    """A second dataset, to which nothing was fitted, with the dense model's metrics on it.

    Attributes:
        name: The dataset as the user named it, or the file of headprune's own text.
    """

    name: str
    data: Examples
    dense: Measured


@dataclass(frozen=True, kw_only=True)
class ChangedAnswer:
    """Both models' texts for one example, with the run's metric on it alone.

    Attributes:
        row: The example's row in its split, from 0.
    """

    row: Count
    reference: tuple[str, ...]
    dense: str
    pruned: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """A pruned model, and what was measured of it.

    Attributes:
        name: Its name in the tables of times.
        asked, kept, total: Numbers of heads: of the budget, of this model, of the dense model.
        method, strategy: The scoring method and the strategy that chose the heads; "" for a user's plan.
        drop: The removed heads, by layer.
        pruned: Its metrics on the reporting part, measured on the saved and reloaded model.
        change: From the dense model, paired by example.
        changes: The same for the other metrics that were asked for.
        answers: The twenty answers in texts that changed most, the greatest change first; () where answers are no texts.
        random: The metric with as many heads kept at random, for each draw.
        over_random: The change from random heads (the mean of the draws) to the chosen ones, both repaired alike, paired by example.
        also: Its metrics on each dataset of `Metrics.also`.
        flops: As in `Dense`.
        checkpoint: The folder beside metrics.json that it was saved to.
        size: Bytes of that folder's files.
        weights: Bytes of its weights as they are saved, shared ones counted once; None in older files.
        dtype: The dtype that its weights are saved in.
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
    changes: tuple[Change, ...] = ()
    answers: tuple[ChangedAnswer, ...] = ()
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

    @property
    def runs_code(self) -> bool:
        """Whether loading the folder runs code that came with the dense model."""
        return self.loads.startswith("headprune.") and "trust_remote_code" in self.loads


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the trade-off curve: a plan's metric on the choosing part, with its 95 % interval.

    Attributes:
        method: The order's name; or ``"dense"``, ``"random"`` or ``"plan"`` (the user's).
        loss: The loss, in nats.
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
        bound_ghosts: How many of its layers keep one head with zero output.
        typical_length: The median length, in tokens.
    """

    rows: tuple[LatencyRow, ...]
    bound: str | None
    bound_ghosts: Count = 0
    typical_length: Count


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A pruned model that was exported for another engine (``--export``).

    Attributes:
        format: The format's name in `headprune.exporting.FORMATS`.
        name: The model's name in the tables of times, as in `BudgetResult`.
        checkpoint: The folder that it was made from.
        file: The file or folder beside metrics.json; None if the format cannot express the model.
        summary: One line on the file and how it was tried, or on why there is none.
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
    """Times of exported models in their engine, the dense model first, as in `Latencies`."""

    format: str
    rows: tuple[LatencyRow, ...]


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """What the dense model's forward pass on one input spends its time on; see `headprune.Breakdown`.

    Attributes:
        total: Milliseconds.
        parts: Milliseconds of each part; they add up to the total.
        bounds: The largest possible speed-up of each plan, by the pruned model's name in the table of latencies.
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
        """The ratio (1 or more) between the time of these passes and that of `timed`; 1 if they cannot be compared.

        Both time the same model on the same input: above `DISTURBED`, other work kept the machine busy.
        """
        timed = self.timed(rows)
        return 1.0 if self.stand_ins or not timed else max(self.total / timed, timed / self.total)


DISTURBED = 1.5
"""The factor between two timings of one model beyond which one of them was disturbed; undisturbed ones differ by less."""


@dataclass(frozen=True, kw_only=True)
class Orders(File):
    """The orders of removal that a search made: each holds a plan for any number of heads, so later budgets need no search.

    Attributes:
        made_from: A digest of everything that they depend on.
        fewest: The smallest number of kept heads that they were made for.
        orders: By name.
    """

    kind: ClassVar[str] = "orders"

    made_from: str
    fewest: Count
    orders: dict[str, Order]


@dataclass(frozen=True, kw_only=True)
class Metrics(File):
    """What was measured of the dense model and of the pruned ones.

    Attributes:
        environment: Where they were measured; scores may have been made elsewhere.
        curve: The trade-off between heads and ``curve_metric``.
        curve_metric: ``metric``, unless that is of generated texts; "" in older files.
        time: The parts of the dense model's time, for each input of ``latency.rows``; () if they could not be measured.
        generation: Times of models that generate text; () for others.
        also: The second datasets.
        tasks: Metrics of the dense and the pruned models on tasks of lm-evaluation-harness, by the names in `BudgetResult`.
    """

    kind: ClassVar[str] = "metrics"

    metric: str
    curve_metric: str = ""
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
    tasks: tuple[ValueTable, ...] = ()
