"""Losses under many gates at once, recomputed only from where the gates are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headprune.gates import gated
from headprune.scoring.base import Problem


class Replay:
    """The losses of a problem's batches under gates."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @contextmanager
    def of(self, batch: Any, size: int) -> Iterator[Recording]:
        """Run the dense model on ``batch``, and keep what later gates will not change."""
        with torch.no_grad():
            yield Recording(self, batch, self.problem.losses(batch).cpu().double())


class Recording:
    """One batch's dense pass."""

    def __init__(self, replay: Replay, batch: Any, dense: Tensor) -> None:
        self.replay, self.batch, self.dense = replay, batch, dense

    def losses(self, gates: Tensor) -> Tensor:
        """The loss of every example under every row of ``gates`` ``[rows, heads]``: ``[rows, examples]``, float64."""
        problem = self.replay.problem
        found = []
        with torch.no_grad():
            for row in gates:
                with gated(problem.model, problem.layers, problem.split(row)):
                    found.append(problem.losses(self.batch).cpu().double())
        return torch.stack(found)
