"""Which of several processes this is, as the launcher that started them says. No torch is imported here."""

from __future__ import annotations

import os
from contextlib import suppress

from headprune.errors import HeadPruneError

# What launchers call a process's number, and how many there are: torchrun and Accelerate, Open MPI, MPICH and Intel MPI.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def place() -> tuple[int, int, int] | None:
    """This process's number, how many there are, and its number on this machine, as a launcher says; None for one process.

    Raises:
        HeadPruneError: A launcher says only a part of it.
    """
    for rank, size, local in _LAUNCHERS:
        if (count := number(size)) > 1:
            if number(rank, -1) < 0 or not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
                raise HeadPruneError(
                    f"{size} is {count}, but {rank}, MASTER_ADDR or MASTER_PORT is missing.",
                    f"Start by torchrun --nproc-per-node {count} -m headprune …, or unset {size}.",
                )
            return number(rank), count, number(local)
    return None


def number(name: str, default: int = 0) -> int:
    """What an environment variable says."""
    with suppress(ValueError):
        return int(os.environ.get(name, ""))
    return default
