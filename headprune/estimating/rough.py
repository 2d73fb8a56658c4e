"""How much work a ledger is, in forward passes, before anything of it was measured: to decide how much may be measured."""

from __future__ import annotations

from headprune.estimating.ledger import Entry, Ledger

SECONDS = "seconds"
"""The kind of an entry whose load is a time, not examples."""


def gradients(directions: int) -> str:
    """The kind of a pass with gradients along so many directions."""
    return f"gradients along {directions}"


def directions_of(kind: str) -> int | None:
    """What `gradients` was given; None for another kind."""
    name, _, count = kind.rpartition(" ")
    return int(count) if name == "gradients along" else None


def scoring(method: str) -> str:
    """The kind of a scoring method's turn through the examples."""
    return f"scoring by {method}"


def method_of(kind: str) -> str | None:
    """What `scoring` was given; None for another kind."""
    return kind.removeprefix("scoring by ") if kind.startswith("scoring by ") else None


def equivalents(kind: str, heads: int) -> float:
    """Forward passes that a kind of work is about as long as."""
    if (count := directions_of(kind)) is not None:
        return 1 + 1.5 * count
    if (method := method_of(kind)) is not None:
        return heads / 2 if "ablation" in method or method == "shapley" else 3.0
    return {"statistics": 6.0, "a look": 4.0, "training": 4.0}.get(kind, 1.0)


def passes(ledger: Ledger, heads: int) -> float:
    """Of all entries, times units of load."""
    return sum(entry.times * equivalents(entry.kind, heads) * entry.load.units for entry in _counted(ledger))


def once(ledger: Ledger, heads: int) -> float:
    """Of every kind once, over one unit of load."""
    return sum(equivalents(kind, heads) for kind in {entry.kind for entry in _counted(ledger)})


def _counted(ledger: Ledger) -> list[Entry]:
    return [entry for entry in ledger.entries if entry.kind != SECONDS]
