"""How processes come together: those of an Accelerator, or those that a launcher started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headprune.errors import HeadPruneError, first_line
from headprune.places import number, place
from headprune.ranks.base import ALONE, Ranks, current, using
from headprune.ranks.group import Group

if TYPE_CHECKING:
    from accelerate import Accelerator

_PATIENCE = timedelta(hours=24)  # a rank whose machine is silent; one whose process has ended is noticed at once


@contextmanager
def _together(group: Group) -> Iterator[Ranks]:
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
    with _together(Group(_known[world])) as ranks:
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
        group = Group(None)
    except (RuntimeError, ValueError) as error:
        raise HeadPruneError(
            f"The {size} processes do not find each other: {first_line(error)}.",
            "Check MASTER_ADDR and MASTER_PORT, or start by torchrun.",
        ) from error
    with _together(group) as ranks:
        yield ranks
    dist.destroy_process_group()  # not after an error: it would wait for the others
