"""Several processes in a process group, which talk in messages."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.ranks.base import ALONE, Ranks, shares, using
from headprune.ranks.errors import LostRankError, lost_ranks, packed, unpacked

T = TypeVar("T")
_LOOKS = 0.5  # seconds between two looks at whether the others' processes are still there
_LINGER = 2.0  # seconds that a rank stays after another one is lost, so that it is not taken to be lost too
_LONGEST_NAP = 0.01  # seconds between two looks at whether the others have answered
_LEFT = "(left)"  # what a rank that has finished says in the place of a name


class Group(Ranks):
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
                    failed, error = (i, packed(caught)), caught
                    break
                if progress:
                    progress(min(len(tasks), len(found) * self.size), len(tasks))
        replies = self.gather(name, (len(tasks), found, failed))
        self._same(name, [f"{count} tasks" for count, _, _ in replies])
        if failures := [(*each, rank) for rank, (_, _, each) in enumerate(replies) if each is not None]:
            # With one process only the first would have failed.
            _, why, rank = min(failures, key=lambda failure: failure[0])
            raise error if rank == self.rank and error is not None else unpacked(why)
        return [replies[rank][1][i] for i, rank in sorted((i, r) for r, each in enumerate(replies) for i in each[1])]

    def first(self, name: str, make: Callable[[], T]) -> T:
        mine: tuple[Any, Any] = (None, None)
        error: Exception | None = None
        if self.main:
            with using(ALONE):
                try:
                    mine = (make(), None)
                except Exception as caught:
                    mine, error = (None, packed(caught)), caught
        value, why = self.gather(name, mine)[0]
        if why is not None:
            raise error or unpacked(why)
        found: T = mine[0] if self.main else value
        return found

    def gather(self, name: str, value: T) -> list[T]:
        if self._over:
            raise LostRankError("The ranks have parted, so they cannot continue together.", "Start the program again.")
        replies = self._exchange(name, value)
        if gone := [(rank, said) for rank, (_, what, said) in enumerate(replies) if what == _LEFT and said is not None]:
            self._over = True
            raise unpacked(gone[0][1])
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

    def cause(self, error: Exception) -> Exception:
        self._over = True
        gone = self._lost_soon()
        return self._parted(gone) if gone else error

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this one has finished, or why it cannot continue; they hear it wherever they are, and raise that.

        Raises:
            HeadPruneError: Another one has not finished.
        """
        if self._over or (error is not None and not isinstance(error, Exception)):  # the latter ends the process
            return
        self._over = True
        try:
            replies = self._exchange(_LEFT, None if error is None else packed(error))
        except LostRankError:
            if error is None:
                raise
            return
        failed = [said for _, what, said in replies if what == _LEFT and said is not None]
        if error is None and failed:
            raise unpacked(failed[0])
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
            raise self._parted(self._lost_soon()) from None

    def _lost_soon(self) -> list[int]:
        """The ranks that are lost, or about to be: a process closes its connections before it ends."""
        for _ in range(10):
            if gone := self.lost():
                return gone
            time.sleep(0.1)
        return []

    def _parted(self, gone: Sequence[int]) -> LostRankError:
        self._over, self.gone = True, tuple(gone)
        time.sleep(_LINGER)
        return lost_ranks(gone)


def _began(pid: int) -> str:
    """When a process began, in Linux's clock ticks; "" if it has ended, or on other systems."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie has ended
    return ""
