"""Attributions: the loss without any heads minus the dense loss, divided among the heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.batches import cost_of
from headprune.parallel import current
from headprune.running import frozen
from headprune.scoring.base import Estimate, Problem, method
from headprune.scoring.gradient import finite, separate, slopes
from headprune.scoring.replay import Replay

_PERMUTATIONS = 128
_PRECISE = 0.05  # sampling stops at this standard error, as a share of the values' range
_BELIEVED = 8  # pairs needed before the standard error may stop the sampling
_FEWEST, _MOST = 4, 64  # points of integration
_GAP = 0.01


@method(
    "shapley",
    unit="loss (nats) added when the head is removed, averaged over orders of removal",
    settings=("permutations", "max_memory"),
)
def shapley(problem: Problem) -> Estimate:
    """Held and Yang (2022): the mean loss that a head's removal adds, over random orders of removing all heads.

    "Shapley Head Pruning" (arXiv:2210.05709), sampled as by Castro et al. (2009), in antithetic pairs: an order and
    its reverse (Mitchell et al. 2022, arXiv:2104.12199). Each pair sees one batch, and every batch gets equally many
    pairs, so that the values sum exactly to ``L(no heads) - L`` on all the data (efficiency).

    After each round over all batches, sampling stops if the largest standard error is under 5 % of the values' range,
    and in any case after ``settings.permutations`` (by default 128; at least one round). The standard error is that of
    the mean over pairs. It slightly overestimates the noise of the orders, as pairs also differ by their batches.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    count, replay, note = len(problem.batches), Replay(problem), ""
    most = max(1, (problem.settings.permutations or _PERMUTATIONS) // 2 // count) * count
    sizes = torch.tensor([size for _, size in problem.batches], dtype=torch.float64)
    costs = [cost_of(batch) for batch, _ in problem.batches]
    pairs: list[Tensor] = []
    for first in range(0, most, count):
        orders = [torch.randperm(problem.heads, generator=generator) for _ in problem.batches]
        tasks = [partial(_pair, replay, *batch, order) for batch, order in zip(problem.batches, orders, strict=True)]
        turn = {f"shapley-{first + i}": task for i, task in enumerate(tasks)}

        def report(done: int, total: int, first: int = first, note: str = note) -> None:
            problem.progress(first + done, most, note)

        pairs += problem.store.share(f"shapley {first}", turn, costs, report)
        rows, weights = torch.stack(pairs), sizes.repeat(len(pairs) // count)
        weights = weights / weights.sum()
        mean = weights @ rows
        error = (weights**2 @ (rows - mean) ** 2 / (1 - weights @ weights)).sqrt()  # NaN for a single pair
        values, stderr = mean[:-1], error[:-1]
        note = f"widest interval ±{1.96 * stderr.max():.2g}"
        if len(pairs) >= _BELIEVED and stderr.max() < _PRECISE * (values.max() - values.min()):
            break
    details: dict[str, Any] = {"mean_loss": mean[-1].item(), "pairs": len(pairs), "stopped_early": len(pairs) < most}
    if len(pairs) == 1:
        details["stderr"] = "none from a single pair of orders"
    return Estimate(values, stderr, problem.examples, details)


def _pair(replay: Replay, batch: Any, size: int, order: Tensor) -> Tensor:
    """The mean loss that each head's removal adds, over an order and its reverse, then the dense loss: ``[heads + 1]``.

    After k removals in order, the removed heads are those that the reverse order still keeps: swap 0 and 1 in the gates.
    """
    heads = len(order)
    ahead = torch.arange(1, heads)[:, None] <= order.argsort()  # the heads kept after 1, 2, … removals
    recording = replay.of(batch, size)
    dense = recording.dense.mean().reshape(1)
    gates = torch.cat([ahead, ~ahead, torch.zeros(1, heads, dtype=torch.bool)]).double()
    left, taken, none = torch.split(recording.losses(gates).mean(dim=1), [heads - 1, heads - 1, 1])
    there, back = torch.cat([dense, left, none]), torch.cat([none, taken, dense])
    added = torch.empty(heads, dtype=torch.float64)
    added[order] = (there.diff() - back.diff()) / 2
    return torch.cat([added, dense])


@method(
    "integrated-gradients", unit="loss (nats) added on the way from all heads to none", settings=("steps", "max_memory")
)
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
    replay, tables, errors = Replay(problem), [], torch.zeros(2, dtype=torch.float64)
    with frozen(problem.model):
        batches = separate(problem)
        for i, (batch, size) in enumerate(batches):
            make = partial(_integrated, replay, batch, size, steps, most, errors)
            tables.append(problem.store.get(f"path-{i}", make))
            steps, errors = int(tables[-1][0, -1]), errors + _sum_errors(tables[-1])
            problem.progress(i + 1, len(batches), f"{steps} points, gap {_gap(errors):.2%}")
    table = torch.cat(tables)
    return Estimate.mean_of(finite(table[:, :heads]), table[:, heads], steps=steps, gap=_gap(errors))


def _integrated(replay: Replay, batch: Any, size: int, steps: int, most: int, errors: Tensor) -> Tensor:
    """``[size, heads + 3]``: effects, the losses with all heads and without any, the number of integration points.

    Args:
        steps: Points to begin with; they double, up to ``most``, until the gap over all batches so far is small.
        errors: `_sum_errors` of the earlier batches, summed.
    """
    problem = replay.problem
    recording = replay.of(batch, size)
    none = recording.losses(torch.zeros(1, problem.heads, dtype=torch.float64))[0]
    ends = torch.stack([recording.dense, none], dim=1)
    while True:
        points, weights = np.polynomial.legendre.leggauss(steps)
        # ranks share out the points
        tasks = [partial(slopes, problem, batch, size, (point + 1) / 2) for point in points]
        effects = torch.zeros(size, problem.heads, dtype=torch.float64)
        for weight, table in zip(weights / 2, current().share(f"{steps} points", tasks), strict=True):
            effects -= weight * table[:, :-1]
        part = torch.cat([effects, ends, ends.new_full((size, 1), steps)], dim=1)
        if 2 * steps > most or _gap(errors + _sum_errors(part)) <= _GAP:
            return part
        steps *= 2


def _sum_errors(table: Tensor) -> Tensor:
    """``[2]``: ``|sum of effects - (L(no heads) - L)|`` and ``|L(no heads) - L|``, each summed over examples."""
    effects, added = table[:, :-3], table[:, -2] - table[:, -3]
    return torch.stack([effects.sum(dim=1) - added, added]).abs().sum(dim=1)


def _gap(errors: Tensor) -> float:
    """The first of `_sum_errors` relative to the second."""
    off, added = errors.tolist()
    return off / added if added else 0.0
