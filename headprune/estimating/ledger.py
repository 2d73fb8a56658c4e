"""What a run is going to do, as entries of a ledger, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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


_UNITS = ((86400.0, "day"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def duration(seconds: float) -> str:
    """For people, to two digits.

    >>> duration(0.4), duration(42), duration(200), duration(9000), duration(900000)
    ('1 s', '42 s', '3.3 min', '2.5 h', '10 days')
    """
    for length, unit in _UNITS:
        if seconds >= 1.5 * length or unit == "s":
            count = max(seconds / length, 1.0 if unit == "s" else 0.0)
            number = f"{count:.0f}" if count >= 10 or unit == "s" else f"{count:.2g}"
            return f"{number} {unit}{'s' if unit == 'day' and number != '1' else ''}"
    raise AssertionError


def flops(count: float) -> str:
    """For people.

    >>> flops(2.1e12), flops(5e9), flops(3e18), flops(5e8), flops(9.99e8)
    ('2.1 TFLOPs', '5 GFLOPs', '3 EFLOPs', '500 MFLOPs', '1 GFLOPs')
    """
    return _two_digits(count, ((1e18, "EFLOPs"), (1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs")))


def size(count: float) -> str:
    """Bytes for people.

    >>> size(6.4e8), size(1.24e9), size(9.99e10), size(8.1e11)
    ('640 MB', '1.2 GB', '100 GB', '810 GB')
    """
    return _two_digits(count, ((1e9, "GB"), (1e6, "MB")))


def _two_digits(count: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit that it reaches once it is rounded. Never as a power of ten, as ``.2g`` alone writes three digits."""
    rounded = float(f"{count:.2g}")
    unit, name = next((pair for pair in units if rounded >= pair[0]), units[-1])
    return f"{float(f'{rounded / unit:.2g}'):,g} {name}"
