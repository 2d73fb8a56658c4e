"""Ranks: several processes that share the work of one computation. All run the same program on the same examples.

Every rank runs the whole program, except loops over independent items: there each rank does its share, and all ranks get all results,
in the order of the items. So all ranks have the same state at every line, and results do not depend on the number of ranks. Ranks share
work only inside `accelerator_ranks` or `launcher_ranks`; otherwise a process works alone, even if a process group exists.

    from headprune.parallel import current
    losses = current().share("losses", [partial(loss, batch) for batch in batches])

Ranks exchange objects by torch.distributed (`all_gather_object`) over gloo. accelerate's `gather_object` does the same on the program's own
group, which on GPUs is NCCL's and does not notice that a process has ended. Every message has a name, which shows if ranks are out of step.
An error on one rank is raised on all, and a lost rank ends the others.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from accelerate.utils.environment import get_cpu_distributed_information
from torch import Tensor

from headprune.errors import HeadPruneError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
_LOOK = 0.5  # seconds between two checks that the other ranks' processes still exist
_LINGER = 2.0  # seconds that a rank waits after it lost another, so that the others do not take it for lost too
_PATIENCE = timedelta(hours=24)  # timeout for a machine that does not answer; an ended process is noticed at once
_LEAVING = "(leaving)"  # the name of a rank's last message


class LostRankError(HeadPruneError):
    """Another rank's process has ended, or cannot be reached any more.

    Args:
        gone: The lost ranks; empty if unknown.
    """

    def __init__(self, gone: Sequence[int] = ()) -> None:
        names = " and ".join(f"rank {rank}" for rank in gone) or "a rank"
        super().__init__(
            f"{names.capitalize()} {'are' if gone[1:] else 'is'} gone, so the others cannot continue.",
            "What was finished is kept: run the same command again, with as many processes as you like.",
        )


class Ranks:
    """The ranks of a computation, as seen by one of them; by default a single process that does all the work.

    Args:
        rank: The number of this rank.
        size: The number of ranks.
        group: A gloo process group for messages; None for the default group.

    Attributes:
        local_size: Number of ranks on this machine, which share its memory.
        gone: The lost ranks, as far as known.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self.gone: tuple[int, ...] = ()
        self._group, self._over = group, False
        self._processes: list[tuple[str, int]] = []
        self._processes = self.gather("meeting", (socket.gethostname(), os.getpid()))
        self.local_size = sum(host == socket.gethostname() for host, _ in self._processes)

    @property
    def main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def share(
        self,
        name: str,
        tasks: Sequence[Callable[[], T]],
        costs: Sequence[float] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        """Run tasks, each on one rank; returns all results on all ranks, in the tasks' order.

        Args:
            name: A description of the work; the same on all ranks.
            tasks: Independent functions. Their results are plain values, and tensors on the CPU.
            costs: Relative running times; by default equal.
            progress: Called with (approximate number of tasks done by all ranks, number of tasks).

        Raises:
            Exception: The error of the first failing task, on all ranks.
        """
        own: dict[int, Any] = {}
        with _use(ALONE):
            for i in shares(len(tasks), self.size, costs)[self.rank]:
                try:
                    own[i] = tasks[i]()
                except Exception as error:
                    own[i] = _Failure(error)
                    break
                if progress:
                    progress(min(len(tasks), len(own) * self.size), len(tasks))
        results = {i: result for each in self.gather(f"{name}, {len(tasks)} tasks", own) for i, result in each.items()}
        for i in sorted(results):  # a single process would stop at the first failing task
            if isinstance(results[i], _Failure):
                raise results[i].error
        return [results[i] for i in range(len(tasks))]

    def first(self, name: str, make: Callable[[], T]) -> T:
        """Run ``make`` on rank 0 only, and return its result on all ranks. For file access, timing and the like."""
        return self.share(name, [make])[0]

    def gather(self, name: str, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks.

        Raises:
            LostRankError: A rank is lost.
            HeadPruneError: The ranks are out of step.
            Exception: The error with which another rank left.
        """
        if self.size == 1:
            return [value]
        if self._over:
            raise HeadPruneError("The ranks have parted, so they cannot continue together.", "Start the program again.")
        replies = self._exchange(name, value)
        self._over = any(said != name for said, _ in replies)
        if failures := [failure for said, failure in replies if said == _LEAVING and failure is not None]:
            raise failures[0].error
        if self._over:
            odd = next(rank for rank, reply in enumerate(replies) if reply[0] != replies[0][0])
            message = f"The ranks are out of step: rank 0 is at “{replies[0][0]}”, rank {odd} at “{replies[odd][0]}”."
            hint = "Every process must make the same calls with the same arguments; if it does, please report this."
            raise HeadPruneError(message, hint)
        return [each for _, each in replies]

    def add(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks (all-reduce); bitwise equal on all ranks."""
        if self.size == 1:
            return
        self.gather(f"adding {name}", None)
        for tensor in tensors:
            whole = tensor.detach().cpu().contiguous().clone()
            try:
                dist.all_reduce(whole, group=self._group)
            except RuntimeError:
                raise self._lost_rank_error() from None
            with torch.no_grad():
                tensor.copy_(whole)

    def cause(self, error: Exception) -> Exception:
        """The cause of an error in code with its own communication (DistributedDataParallel): a lost rank, or the error itself.

        After such an error, ranks can no longer exchange messages, and the launcher ends them; except after a HeadPruneError, which all
        ranks raise.
        """
        if self.size == 1 or isinstance(error, HeadPruneError):
            return error
        lost = self._lost_rank_error()
        return lost if self.gone else error

    def agree(self, what: str, value: Callable[[], Any]) -> None:
        """Check that all ranks were given the same argument; does nothing with a single rank.

        Args:
            what: The argument, for the message: ``"batches"``.
            value: Returns a plain value to compare, such as a digest of the argument.

        Raises:
            HeadPruneError: The values differ.
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

    def find_lost(self) -> list[int]:
        """The ranks on this machine whose processes have ended."""
        here = socket.gethostname()
        every = enumerate(self._processes)
        return [rank for rank, (host, pid) in every if rank != self.rank and host == here and not _is_alive(pid)]

    @contextmanager
    def run_together(self) -> Iterator[Ranks]:
        """Share work while the context lasts. A rank that leaves it by an error sends the error to the others, which raise it too.

        Raises:
            HeadPruneError: Another rank has not reached the end of the context.
        """
        try:
            with _use(self):
                yield self
        except Exception as error:  # any other BaseException ends the process
            if not self._over:
                with suppress(HeadPruneError):
                    self._exchange(_LEAVING, _Failure(error))
            raise
        if not self._over:
            self.gather(_LEAVING, None)

    def _exchange(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Every rank's (name, value). The exchange runs in a thread, so that this rank can handle signals and notice lost ranks."""
        replies: list[Any] = [None] * self.size

        def meet() -> None:
            with suppress(RuntimeError):  # a connection was closed, or timed out
                dist.all_gather_object(replies, (name, value), group=self._group)

        meeting = Thread(target=meet, daemon=True)
        meeting.start()
        meeting.join(_LOOK)
        while meeting.is_alive() and not self.find_lost():
            meeting.join(_LOOK)
        if None in replies:
            raise self._lost_rank_error()
        replies[self.rank] = name, value
        return replies

    def _lost_rank_error(self) -> LostRankError:
        """The error to raise when a rank is lost; finds out which."""
        until = time.monotonic() + 1.0  # a process that closed a connection may be about to end
        while not (gone := self.find_lost()) and time.monotonic() < until:
            time.sleep(0.1)
        self._over, self.gone = True, tuple(gone)
        time.sleep(_LINGER)
        return LostRankError(gone)


class _Failure:
    """An error to send to other ranks; only its text if it cannot be unpickled in another process."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        error = self.error
        # Other ranks may not know its class, or the class may not unpickle its errors, as pydantic's.
        with suppress(Exception):
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return _Failure, (error,)
        if isinstance(error, HeadPruneError):
            return _Failure, (HeadPruneError(str(error.args[0]), error.hint),)
        return _Failure, (RuntimeError(f"{type(error).__name__}: {first_line(error)}"),)


def _is_alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)  # a zombie has ended
    return False


def shares(count: int, size: int, costs: Sequence[float] | None = None) -> list[list[int]]:
    """Assign ``count`` tasks to ``size`` ranks: each rank's task numbers, in order.

    Round-robin; with different costs, greedily: the costliest task first, each to the rank with the least load.

    >>> shares(5, 2), shares(4, 2, [1, 1, 1, 3])
    ([[0, 2, 4], [1, 3]], [[3], [0, 1, 2]])
    """
    if costs is None or len(set(costs)) < 2:
        return [list(range(rank, count, size)) for rank in range(size)]
    parts: list[list[int]] = [[] for _ in range(size)]
    sums = [0.0] * size
    for i in sorted(range(count), key=lambda i: (-costs[i], i)):
        least = min(range(size), key=lambda rank: (sums[rank], rank))
        parts[least].append(i)
        sums[least] += costs[i]
    return [sorted(own) for own in parts]


ALONE = Ranks()
_current: ContextVar[Ranks] = ContextVar("headprune.parallel", default=ALONE)


def current() -> Ranks:
    """The ranks that currently share work; inside a task of `Ranks.share`, this process alone."""
    return _current.get()


@contextmanager
def _use(ranks: Ranks) -> Iterator[None]:
    """Make ``ranks`` the current ranks while the context lasts."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


# -- setting up ranks --------------------------------------------------------------------------------


@contextmanager
def accelerator_ranks(accelerator: Accelerator | None) -> Iterator[Ranks]:
    """Share work among an Accelerator's processes while the context lasts; None changes nothing.

    Raises:
        HeadPruneError: ``accelerator`` is no Accelerator, or its processes have no process group.
    """
    size = 1 if accelerator is None else getattr(accelerator, "num_processes", 0)
    if size < 1 or (size > 1 and not dist.is_initialized()):
        message = f"accelerator= is a {type(accelerator).__name__} without processes that torch.distributed can reach."
        hint = "Pass an accelerate.Accelerator in a program that torchrun or accelerate launch started, or nothing."
        raise HeadPruneError(message, hint)
    if size == 1 or current().size > 1:
        yield current()
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    with Ranks(dist.get_rank(), size, group).run_together() as ranks:
        yield ranks
    dist.destroy_process_group(group)  # as below


@contextmanager
def launcher_ranks() -> Iterator[Ranks]:
    """Share work among the processes of a launcher (torchrun …) while the context lasts; does nothing without a launcher.

    Each process takes a GPU, in turn, if there are any.

    Raises:
        HeadPruneError: The processes cannot connect.
    """
    numbers = place()
    if numbers is None:
        yield current()
        return
    rank, size, local = numbers
    devices = torch.cuda.device_count()
    if devices:
        torch.cuda.set_device(local % devices)
    # Functions of this module take the default group as a default argument. If transformers imported it later, with a model, it would
    # hold the group for ever.
    import_module("torch.distributed.nn.functional")
    # For training: NCCL sums gradients if every process has its own device.
    backend = "cpu:gloo,cuda:nccl" if int(os.environ.get("LOCAL_WORLD_SIZE", size)) <= devices else "gloo"
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=_PATIENCE)
        ranks = Ranks(rank, size)
    except (RuntimeError, ValueError) as error:
        message = f"The {size} processes do not find each other: {first_line(error)}."
        raise HeadPruneError(message, "Check MASTER_ADDR and MASTER_PORT, or start by torchrun.") from error
    with ranks.run_together():
        yield ranks
    # A gloo thread that still runs at interpreter exit may release the last message's tensors, which needs the interpreter: the process
    # would abort. Dropping the last reference to a group ends its threads. Not after an error, when it would wait for the other ranks.
    dist.destroy_process_group()
    gc.collect()  # DistributedDataParallel holds references to the group


def place() -> tuple[int, int, int] | None:
    """(rank, world size, local rank) from a launcher's environment; None for a single process.

    Raises:
        HeadPruneError: The launcher's environment is incomplete.
    """
    launcher = get_cpu_distributed_information()
    if launcher.world_size < 2:
        return None
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        message = f"There are {launcher.world_size} processes, as WORLD_SIZE or MPI says, but MASTER_ADDR or MASTER_PORT is missing."
        hint = f"Start by torchrun --nproc-per-node {launcher.world_size} -m headprune …, or unset WORLD_SIZE."
        raise HeadPruneError(message, hint)
    return launcher.rank, launcher.world_size, launcher.local_rank
