"""What ranks do for one another, whatever their number; and a process alone, which does everything itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

from headprune.errors import HeadPruneError

T = TypeVar("T")


class Ranks:
    """The ranks of a computation. This is one process alone, which does everything itself.

    Attributes:
        rank: The number of this one.
        size: How many there are.
        here: How many of them are on this machine, and share its memory.
        gone: Those that were lost, as far as it is known.
    """

    rank, size, here = 0, 1, 1
    gone: tuple[int, ...] = ()

    @property
    def main(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def share(
        self,
        name: str,
        tasks: Sequence[Callable[[], T]],
        costs: Sequence[float] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        """What every task gives, in their order. Every rank does some of them.

        Args:
            name: What is done; the same on all ranks.
            tasks: Independent of one another. Results are plain values, and tensors on the CPU.
            costs: How long each takes, relative to the others; alike, by default.
            progress: Called with (tasks done by all ranks, about; tasks).

        Raises:
            Exception: What the first of the tasks that fail raises; on all ranks.
        """
        found = []
        for i, task in enumerate(tasks):
            found.append(task())
            if progress:
                progress(i + 1, len(tasks))
        return found

    def first(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0; the others wait for it. For writing, timing, and reading what rank 0 writes."""
        return make()

    def gather(self, name: str, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        return [value]

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks, the same to the bit on all."""

    def cause(self, error: Exception) -> Exception:
        """The reason for an error where others talk between the ranks (DistributedDataParallel): a lost rank, or the error itself.

        After it no message reaches the other ranks: the launcher ends them.
        """
        return error

    def agree(self, what: str, value: Callable[[], Any]) -> None:
        """Refuse ranks that were given different things; asks nothing, if there is only one.

        Args:
            what: Was given, for the message: ``"batches"``.
            value: Gives something plain, equal on all ranks if that is so.

        Raises:
            HeadPruneError: It is not.
        """
        if self.size == 1:
            return
        values = self.gather(f"agreeing on {what}", value())
        if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise HeadPruneError(
                f"Rank {odd[0]} was given {what} other than rank 0's.",
                "Give every process the same model, the same whole batches in the same order, and the same arguments: headprune "
                "shares out the work by itself.",
            )

    def lost(self) -> list[int]:
        """The ranks whose processes have ended, as far as that can be seen from this machine."""
        return []


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("headprune.ranks", default=ALONE)


def current() -> Ranks:
    """The ranks that share out the work here and now: within a task of theirs, only this one."""
    return _current.get()


def shares(count: int, size: int, costs: Sequence[float] | None = None) -> list[list[int]]:
    """Which of ``count`` tasks each of ``size`` ranks does, in order.

    In turn; or, where they cost differently, the costliest first and each to the rank that has least to do.

    >>> shares(5, 2), shares(4, 2, [1, 1, 1, 3])
    ([[0, 2, 4], [1, 3]], [[3], [0, 1, 2]])
    """
    found: list[list[int]] = [[] for _ in range(size)]
    if costs is None or len(set(costs)) < 2:
        return [list(range(rank, count, size)) for rank in range(size)]
    sums = [0.0] * size
    for i in sorted(range(count), key=lambda i: (-costs[i], i)):
        least = min(range(size), key=lambda rank: (sums[rank], rank))
        found[least].append(i)
        sums[least] += costs[i]
    return [sorted(own) for own in found]


@contextmanager
def using(ranks: Ranks) -> Iterator[None]:
    """These are the current ones while the context lasts."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)
