"""Path scores: the loss that every head adds on the way from all heads to none."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.parallel import current
from headprune.running import frozen
from headprune.scoring.base import Estimate, Problem, Samples, method
from headprune.scoring.gradient import finite, separate, slopes
from headprune.scoring.replay import Replay

_FEWEST, _MOST = 4, 64  # points of integration
_GAP = 0.01


@method("integrated-gradients", unit="loss (nats) added on the way from all heads to none")
def integrated_gradients(problem: Problem) -> Estimate:
    """Hao et al. (2021): gradients integrated while all gates go from 1 to 0 together, signed.

    "Self-Attention Attribution" (AAAI 2021, arXiv:2004.11207) with the gate in place of the attention matrix:
    ``-E_x int_0^1 dL(x)/dxi_h (all gates at a) da``, by Gauss and Legendre's rule. By completeness (Sundararajan
    et al. 2017, arXiv:1703.01365) an example's effects sum to ``L(no heads) - L``.

    Without ``settings.steps`` the points of integration double, from 4 to at most 64, whenever ``gap``, the mean
    absolute error of that sum relative to the mean absolute ``L(no heads) - L``, exceeds 1 %. ``details`` has both.
    """
    heads, steps = problem.heads, problem.settings.steps or _FEWEST
    most = problem.settings.steps or _MOST
    replay, parts, missed = Replay(problem), [], torch.zeros(2, dtype=torch.float64)
    with frozen(problem.model):
        batches = separate(problem)
        for i, (batch, size) in enumerate(batches):
            parts.append(problem.store.get(f"path-{i}", partial(_part, replay, batch, size, steps, most, missed)))
            steps, missed = int(parts[-1][0, -1]), missed + _missed(parts[-1])
            problem.progress(i + 1, len(batches), f"{steps} points, gap {_gap(missed):.2%}")
    found = torch.cat(parts)
    samples = Samples(finite(found[:, :heads]), found[:, heads])
    return Estimate.mean_of(samples, steps=steps, gap=_gap(missed))


def _part(replay: Replay, batch: Any, size: int, steps: int, most: int, missed: Tensor) -> Tensor:
    """``[size, heads + 3]``: effects, the losses with all heads and with none, the points it took."""
    with replay.of(batch, size) as recording:
        none = recording.losses(torch.zeros(1, replay.problem.heads, dtype=torch.float64))[0]
        ends = torch.stack([recording.dense, none], dim=1)
    while True:
        part = torch.cat([_effects(replay.problem, batch, size, steps), ends, ends.new_full((size, 1), steps)], dim=1)
        if 2 * steps > most or _gap(missed + _missed(part)) <= _GAP:
            return part
        steps *= 2


def _effects(problem: Problem, batch: Any, size: int, steps: int) -> Tensor:
    """``[size, heads]``: minus the integral of the gates' gradients, all gates going from 0 to 1. Ranks share out the points."""
    points, weights = np.polynomial.legendre.leggauss(steps)

    def at(point: float) -> Tensor:
        return slopes(problem, batch, size, point).effects

    found = current().share(f"{steps} points", [partial(at, (point + 1) / 2) for point in points])
    total = torch.zeros(size, problem.heads, dtype=torch.float64)
    for weight, effects in zip(weights / 2, found, strict=True):
        total -= weight * effects
    return total


def _missed(part: Tensor) -> Tensor:
    """Summed over examples, how far effects are from adding up, and what they should add up to: ``[2]``."""
    effects, dense, none = part[:, :-3], part[:, -3], part[:, -2]
    return torch.stack([effects.sum(dim=1) - (none - dense), none - dense]).abs().sum(dim=1)


def _gap(missed: Tensor) -> float:
    off, way = missed.tolist()
    return off / way if way else 0.0
