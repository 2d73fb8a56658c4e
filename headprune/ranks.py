"""Processes that share out the work of one computation (ranks): the same program on the same examples in each.

Every rank does all of the program but for loops over independent items: of these each rank does its share, and all ranks get
all results, in the order of the items. So all ranks know the same at every line, and what a run gives does not depend on
how many there are. A process that was not told of others (`joined`, `launched`) is alone, even if the program around it has
a process group.

    from headprune.ranks import current
    losses = current().share("losses", [partial(loss, batch) for batch in batches])

Ranks talk by torch.distributed, over gloo, in messages that carry a number and a name. So ranks that are not at the same place
find that out instead of waiting for ever; an error in one of them is raised in all; and one that is gone ends the others.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headprune.errors import HeadPruneError, first_line
from headprune.places import number, place

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
_PATIENCE = timedelta(hours=24)  # a rank whose machine is silent; one whose process has ended is noticed at once
_LOOKS = 0.5  # seconds between two looks at whether the others' processes are still there
_LINGER = 2.0  # seconds that a rank stays after another one is lost, so that it is not taken to be lost too
_LONGEST_NAP = 0.01  # seconds between two looks at whether the others have answered
_LEFT = "(left)"  # what a rank that is through says in the place of a name


class LostRankError(HeadPruneError):
    """Another rank's process has ended, or cannot be reached any more."""


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


class _Group(Ranks):
    """Several processes in a process group.

    Args:
        group: Of gloo, for messages; None for the default one.
    """

    def __init__(self, group: Any) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._number, self._over = group, 0, False
        self._pending: list[Any] = []  # kept alive: threads of gloo's may still write into them
        self._processes: list[tuple[str, int, str]] = []
        self._processes = self.gather("meeting", (socket.gethostname(), os.getpid(), _began(os.getpid())))
        self.here = sum(host == socket.gethostname() for host, _, _ in self._processes)

    def share(
        self,
        name: str,
        tasks: Sequence[Callable[[], T]],
        costs: Sequence[float] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        own = shares(len(tasks), self.size, costs)[self.rank]
        found: dict[int, T] = {}
        failed: tuple[int, Any] | None = None
        error: Exception | None = None
        with using(ALONE):
            for i in own:
                try:
                    found[i] = tasks[i]()
                except Exception as caught:
                    failed, error = (i, _packed(caught)), caught
                    break
                if progress:
                    progress(min(len(tasks), len(found) * self.size), len(tasks))
        replies = self.gather(name, (len(tasks), found, failed))
        self._same(name, [f"{count} tasks" for count, _, _ in replies])
        if failures := [(*each, rank) for rank, (_, _, each) in enumerate(replies) if each is not None]:
            # With one process only the first would have failed.
            _, packed, rank = min(failures, key=lambda failure: failure[0])
            raise error if rank == self.rank and error is not None else _unpacked(packed)
        return [replies[rank][1][i] for i, rank in sorted((i, r) for r, each in enumerate(replies) for i in each[1])]

    def first(self, name: str, make: Callable[[], T]) -> T:
        mine: tuple[Any, Any] = (None, None)
        error: Exception | None = None
        if self.main:
            with using(ALONE):
                try:
                    mine = (make(), None)
                except Exception as caught:
                    mine, error = (None, _packed(caught)), caught
        value, packed = self.gather(name, mine)[0]
        if packed is not None:
            raise error or _unpacked(packed)
        found: T = mine[0] if self.main else value
        return found

    def gather(self, name: str, value: T) -> list[T]:
        if self._over:
            raise LostRankError("The ranks have parted, so they cannot go on together.", "Start the program again.")
        replies = self._exchange(name, value)
        if gone := [(rank, said) for rank, (_, what, said) in enumerate(replies) if what == _LEFT and said is not None]:
            self._over = True
            raise _unpacked(gone[0][1])
        self._same(name, [f"“{what}” ({number})" for number, what, _ in replies])
        return [said for _, _, said in replies]

    def _same(self, name: str, places: Sequence[str]) -> None:
        """Refuse ranks that are not at the same place of the program."""
        if odd := [rank for rank, place in enumerate(places) if place != places[0]]:
            self._over = True
            raise HeadPruneError(
                f"The ranks are out of step: rank 0 is at {places[0]}, rank {odd[0]} at {places[odd[0]]}.",
                "Every process must make the same calls with the same arguments; if it does, please report this.",
            )

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        self._same(name, [f"“{name}” of {each}" for each in self.gather(name, shapes)])
        for tensor in tensors:
            on_device = tensor.is_cuda and self._reaches_devices()
            whole = tensor.detach().contiguous() if on_device else tensor.detach().cpu().contiguous().clone()
            self._wait(dist.all_reduce(whole, group=None if on_device else self._group, async_op=True), whole)
            with torch.no_grad():
                tensor.copy_(whole)

    def _reaches_devices(self) -> bool:
        """Whether the default group sums tensors on GPUs by itself."""
        return "nccl" in str(dist.get_backend_config())

    def lost(self) -> list[int]:
        name = socket.gethostname()
        return [
            rank
            for rank, (host, pid, began) in enumerate(self._processes)
            if rank != self.rank and host == name and began and _began(pid) != began
        ]

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this one is through, or why it cannot go on; they are told, wherever they are, and raise that.

        Raises:
            HeadPruneError: Another one is not through.
        """
        if self._over or (error is not None and not isinstance(error, Exception)):  # the latter ends the process
            return
        self._over = True
        try:
            replies = self._exchange(_LEFT, None if error is None else _packed(error))
        except LostRankError:
            if error is None:
                raise
            return
        failed = [said for _, what, said in replies if what == _LEFT and said is not None]
        if error is None and failed:
            raise _unpacked(failed[0])
        if error is None:
            self._same(_LEFT, [what for _, what, _ in replies])

    # -- messages ----------------------------------------------------------------------------------

    def _exchange(self, name: str, value: Any) -> list[tuple[int, str, Any]]:
        """(Number, name, value) of every rank's message."""
        self._number += 1
        raw = pickle.dumps((self._number, name, value), protocol=5)
        own = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        size = torch.tensor([len(own)], dtype=torch.int64)
        self._wait(dist.all_gather(sizes, size, group=self._group, async_op=True), sizes, size)
        longest = max(int(each) for each in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(dist.all_gather(every, padded, group=self._group, async_op=True), every, padded)
        return [
            (self._number, name, value) if rank == self.rank else pickle.loads(each[: int(n)].numpy().tobytes())
            for rank, (each, n) in enumerate(zip(every, sizes, strict=True))
        ]

    def _wait(self, work: Any, *held: Any) -> None:
        """Until an operation of all ranks is done. In short naps, so that signals are heard, and lost ranks noticed.

        Raises:
            LostRankError: A rank is gone.
        """
        self._pending = [work, held]
        nap, looked = 1e-5, time.monotonic()
        while not work.is_completed():
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
            if time.monotonic() - looked > _LOOKS:
                looked = time.monotonic()
                if gone := self.lost():
                    raise self._parted(gone)
        try:
            work.wait()
        except RuntimeError:  # a connection was closed, or nothing was heard for too long
            for _ in range(10):  # the process that closed it may be about to end
                if gone := self.lost():
                    break
                time.sleep(0.1)
            raise self._parted(gone) from None

    def _parted(self, gone: Sequence[int]) -> LostRankError:
        self._over, self.gone = True, tuple(gone)
        time.sleep(_LINGER)
        return lost_ranks(gone)


def lost_ranks(gone: Sequence[int]) -> LostRankError:
    """The error where some ranks are gone; it is not known which ones, if none are given."""
    those = " and ".join(str(rank) for rank in gone)
    who = f"Rank {those} is" if len(gone) == 1 else f"Ranks {those} are" if gone else "Another rank is"
    return LostRankError(
        f"{who} gone, so the others cannot go on.",
        "What was finished is kept: run the same command again, with as many processes as you like.",
    )


@contextmanager
def using(ranks: Ranks) -> Iterator[None]:
    """These are the current ones while the context lasts."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def _together(group: _Group) -> Iterator[Ranks]:
    """Work is shared out while the context lasts. Whoever leaves it by an error says so to the others."""
    try:
        with using(group):
            yield group
    except BaseException as error:
        group.leave(error)
        raise
    group.leave()


_known: dict[Any, Any] = {}
"""Groups for messages, by the program's own default group."""


@contextmanager
def joined(accelerator: Accelerator | None) -> Iterator[Ranks]:
    """Share out the work among an Accelerator's processes while the context lasts; with None, as it was before.

    Raises:
        HeadPruneError: It is no Accelerator, or its processes have no process group.
    """
    if accelerator is None or current().size > 1:
        yield current()
        return
    size = getattr(accelerator, "num_processes", None)
    if not isinstance(size, int) or not hasattr(accelerator, "process_index"):
        raise HeadPruneError(
            f"accelerator= is a {type(accelerator).__name__}.", "Pass an accelerate.Accelerator, or nothing."
        )
    if size == 1:
        yield ALONE
        return
    if not dist.is_initialized():
        raise HeadPruneError(
            f"The Accelerator has {size} processes, but there is no process group of torch.distributed.",
            "Start the program by torchrun or accelerate launch.",
        )
    world = dist.group.WORLD
    if world not in _known:
        _known[world] = dist.new_group(backend="gloo", timeout=_PATIENCE)
    with _together(_Group(_known[world])) as ranks:
        yield ranks


@contextmanager
def launched() -> Iterator[Ranks]:
    """Share out the work among the processes that a launcher started, while the context lasts; alone, if there are no others.

    Each takes a GPU of its own, where there are some.

    Raises:
        HeadPruneError: The processes do not find each other.
    """
    found = place()
    if found is None:
        yield current()
        return
    rank, size, local = found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = "gloo"
    if count:
        torch.cuda.set_device(local % count)
        if number("LOCAL_WORLD_SIZE", size) <= count:  # NCCL wants a device each
            backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=_PATIENCE)
        group = _Group(None)
    except (RuntimeError, ValueError) as error:
        raise HeadPruneError(
            f"The {size} processes do not find each other: {first_line(error)}.",
            "Check MASTER_ADDR and MASTER_PORT, or start by torchrun.",
        ) from error
    with _together(group) as ranks:
        yield ranks
    dist.destroy_process_group()  # not after an error: it would wait for the others


# -- errors in messages ------------------------------------------------------------------------


def _packed(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]:
    """An error as another process can read it."""
    plain = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | bool | None)}
    found = (type(error), error.args, plain)
    try:
        pickle.loads(pickle.dumps(found))
    except Exception:  # of a class that others do not know, say
        return (RuntimeError, (f"{type(error).__name__}: {first_line(error)}",), {})
    return found


def _unpacked(packed: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]) -> BaseException:
    kind, arguments, state = packed
    error = kind.__new__(kind, *arguments)  # what `__init__` makes of its arguments is in them
    error.__dict__.update(state)
    return error


def _began(pid: int) -> str:
    """When a process began, in Linux's clock ticks; "" if it has ended, or on other systems."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
    return ""
