"""What a run is going to do, as entries of a ledger, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headprune.amounts import duration, flops, size
from headprune.rows import apparent_size
from headprune.scoring.base import cost_of


@dataclass(frozen=True)
class Load:
    """Examples that something is done with.

    Attributes:
        examples: How many.
        units: Numbers in their batches, padding included: what the time goes by (`headprune.scoring.base.cost_of`).
    """

    examples: float
    units: float

    @classmethod
    def of(cls, batches: Iterable[Any]) -> Load:
        """Of whole batches."""
        pairs = [(apparent_size(batch), cost_of(batch)) for batch in batches]
        return cls(sum(n for n, _ in pairs), sum(c for _, c in pairs))

    def times(self, factor: float) -> Load:
        return Load(self.examples * factor, self.units * factor)

    def first(self, examples: float) -> Load:
        """So many of them, of mean size."""
        return self.times(min(1.0, examples / self.examples) if self.examples else 0.0)


NOTHING = Load(0, 0)


@dataclass(frozen=True)
class Rate:
    """What a kind of work costs on this device, measured on a few batches.

    Attributes:
        seconds: Per unit of load.
        fixed: Seconds each time, whatever the load.
        forward, backward: Passes of the model over the load.
        flops: Floating-point operations of these, per unit of load.
    """

    seconds: float
    fixed: float
    forward: float
    backward: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Entry:
    """Some work, done some times.

    Attributes:
        phase: What a waiting person is told.
        kind: Which `Rate` it has.
        load: Examples each time.
        times: How often, typically.
        low, high: How often at least and at most, where that depends on what is found.
    """

    phase: str
    kind: str
    load: Load
    times: float = 1.0
    low: float | None = None
    high: float | None = None


@dataclass
class Ledger:
    """Entries in the order of the work; ``unknown`` says what is not counted."""

    entries: list[Entry] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(
        self, phase: str, kind: str, load: Load = NOTHING, times: float = 1.0, low: float | None = None,
        high: float | None = None,
    ) -> None:  # fmt: skip
        if times or high:
            self.entries.append(Entry(phase, kind, load, times, low, high))


@dataclass(frozen=True)
class Phase:
    """What one phase of a run costs; passes are over ``examples`` of `CostEstimate`."""

    name: str
    forward: float
    backward: float
    flops: float
    seconds: float
    seconds_low: float
    seconds_high: float
    forward_low: float
    forward_high: float


@dataclass(frozen=True)
class CostEstimate:
    """What a computation is going to cost, before it begins.

    Attributes:
        examples: Scoring examples: what passes are over. A pass over other examples counts by how many they are.
        forward, backward: Passes of the model, typically.
        forward_low, forward_high: At least and at most, where that depends on what is found on the way.
        flops: Floating-point operations of these passes (`torch.utils.flop_counter`, on examples of several lengths). Least squares
            and the like take time, but are not counted here.
        seconds: On this device, typically; without loading the model.
        seconds_low, seconds_high: With the fewest and the most passes. No interval of confidence: what was measured may be off, too.
        memory: Bytes that this process will hold at most, with the model and what it holds now.
        memory_parts: What they are for.
        phases: By phase, in order.
        batches: How many batches of the examples it was measured on.
        took: Seconds that estimating took.
        notes: What is not counted, and what varies.
    """

    examples: int
    forward: float
    backward: float
    forward_low: float
    forward_high: float
    flops: float
    seconds: float
    seconds_low: float
    seconds_high: float
    memory: int
    memory_parts: dict[str, int]
    phases: tuple[Phase, ...]
    batches: int
    took: float
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """All of it in one line, for people."""
        passes = self.forward + self.backward
        return (
            f"About {duration(self.seconds)}: {passes:,.0f} passes over {self.examples:,} examples ({self.forward:,.0f} forward, "
            f"{self.backward:,.0f} backward), {flops(self.flops)}, {size(self.memory)} (estimated from {counted(self.batches)})."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def counted(batches: int) -> str:
    return "1 calibration batch" if batches == 1 else f"{batches} calibration batches"


def summed(ledger: Ledger, rates: dict[str, Rate]) -> tuple[tuple[Phase, ...], tuple[str, ...]]:
    """The phases of a ledger, of ``examples`` 1 each; and notes."""
    found: dict[str, list[float]] = {}
    for entry in ledger.entries:
        rate = rates[entry.kind]
        each = rate.fixed + rate.seconds * entry.load.units
        low = entry.times if entry.low is None else entry.low
        high = entry.times if entry.high is None else entry.high
        one = entry.load.examples
        row = [
            entry.times * rate.forward * one, entry.times * rate.backward * one, entry.times * rate.flops * entry.load.units,
            entry.times * each, low * each, high * each, low * rate.forward * one, high * rate.forward * one,
        ]  # fmt: skip
        sums = found.setdefault(entry.phase, [0.0] * len(row))
        found[entry.phase] = [a + b for a, b in zip(sums, row, strict=True)]
    return tuple(Phase(name, *row) for name, row in found.items()), tuple(ledger.unknown)


def total(phases: Sequence[Phase], name: str) -> float:
    return float(sum(getattr(phase, name) for phase in phases))
