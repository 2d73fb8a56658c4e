"""How much work a search may be: counted before it begins, in forward passes and floating-point operations, never timed.

A count is the same on every machine, however fast or busy, so the same seed gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headprune import latency
from headprune.amounts import flops
from headprune.batches import apparent_size
from headprune.errors import HeadPruneError
from headprune.inputs import inputs_of, tensors


@dataclass(frozen=True)
class Effort:
    """How much work a search may be.

    Attributes:
        name: As ``--effort`` takes it.
        examples: On how many of the scoring examples a search looks at the model each time, at most; None: on all.
        flops: Floating-point operations that a search of many looks may cost, for `auto` to make it; None: as many as it takes.
    """

    name: str
    examples: int | None
    flops: float | None

    def allows(self, work: Work) -> bool:
        """Whether `auto` makes an order that is so much work."""
        return self.flops is None or work.flops <= self.flops

    @property
    def limit(self) -> str:
        """For people."""
        return "any number of FLOPs" if self.flops is None else flops(self.flops, 3)


EFFORTS = {
    e.name: e
    for e in (
        Effort("low", 128, 5e13),  # at 100 GFLOPs a second 8 minutes
        Effort("normal", 512, 5e14),  # 83 minutes
        Effort("high", None, None),
    )
}
NORMAL = EFFORTS["normal"]


def effort_named(name: str) -> Effort:
    """An effort by its name.

    Raises:
        HeadPruneError: There is none of that name.
    """
    if name not in EFFORTS:
        raise HeadPruneError(f"There is no effort {name!r}.", f"Choose from {', '.join(EFFORTS)}.")
    return EFFORTS[name]


@dataclass(frozen=True)
class Work:
    """What a search costs.

    Attributes:
        passes: Forward passes over all scoring examples; a backward pass counts as two.
        flops: Floating-point operations of these.
        examples: How many scoring examples there are.
        left_out: Why this work was not done; None if it was.
    """

    passes: float
    flops: float
    examples: int
    left_out: str | None = None

    def __str__(self) -> str:
        return f"{self.passes:,.0f} forward passes over {self.examples:,} examples ({flops(self.flops, 3)})"


def flops_of_pass(model: nn.Module, batches: Sequence[Any]) -> float:
    """Floating-point operations of one forward pass over all batches, counted on the one of median size."""
    sized = sorted(batches, key=lambda batch: sum(t.numel() for t in tensors(batch)))
    batch = sized[len(sized) // 2]
    return latency.flops(model, inputs_of(model, batch)) / apparent_size(batch) * sum(map(apparent_size, batches))


def spread(count: int, examples: int, most: int | None) -> list[int]:
    """Which of ``count`` batches to take, to have about ``most`` of ``examples``: some from everywhere.

    Batches often come sorted by length.

    >>> spread(4, 128, None), spread(4, 128, 64), spread(4, 128, 1)
    ([0, 1, 2, 3], [0, 2], [0])
    """
    taken = count if most is None else min(count, max(1, math.floor(count * most / examples)))
    return [i * count // taken for i in range(taken)]
