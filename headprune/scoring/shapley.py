"""Shapley values: what a head's removal adds to the loss, averaged over the orders in which heads go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headprune.batches import cost_of
from headprune.scoring.base import Estimate, Problem, method
from headprune.scoring.replay import Replay

_PERMUTATIONS = 128
_ENOUGH = 0.05  # of the values' spread
_BELIEVED = 8  # pairs before a standard error decides anything


@method("shapley", unit="loss (nats) added when the head is removed, averaged over orders of removal")
def shapley(problem: Problem) -> Estimate:
    """Held and Yang (2022): the mean loss that a head's removal adds, over random orders of removing all heads.

    "Shapley Head Pruning" (arXiv:2210.05709), sampled as by Castro et al. (2009), in antithetic pairs: an order and
    its reverse (Mitchell et al. 2022, arXiv:2104.12199). Each pair sees one batch, and all batches take equally many
    turns, so that the values sum exactly to ``L(no heads) - L`` of all the data (efficiency).

    Stops after a turn of all batches once the largest standard error is under 5 % of the values' spread, at the
    latest after ``settings.permutations`` (128, but never less than one turn). The standard error is that of the mean
    over pairs: the orders' noise, a little overestimated, since pairs on different batches differ by these, too.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    turns = max(1, (problem.settings.permutations or _PERMUTATIONS) // 2 // len(problem.batches))
    most = turns * len(problem.batches)
    replay, note = Replay(problem), ""
    pairs: list[Tensor] = []
    sizes = torch.tensor([size for _, size in problem.batches], dtype=torch.float64)
    while len(pairs) < most:
        before = len(pairs)
        turn: dict[str, Callable[[], Tensor]] = {}
        for batch, size in problem.batches:
            order = torch.randperm(problem.heads, generator=generator)
            turn[f"shapley-{before + len(turn)}"] = partial(_pair, replay, batch, size, order)

        def told(done: int, total: int, before: int = before, note: str = note) -> None:
            problem.progress(before + done, most, note)

        pairs += problem.store.share(f"shapley {before}", turn, [cost_of(batch) for batch, _ in problem.batches], told)
        weights = sizes.repeat(len(pairs) // len(sizes))
        mean, error = _weighted(torch.stack(pairs), weights / weights.sum())
        values, stderr = mean[:-1], error[:-1]
        note = f"widest interval ±{1.96 * stderr.max():.2g}"
        if len(pairs) >= _BELIEVED and stderr.max() < _ENOUGH * (values.max() - values.min()):
            break
    details: dict[str, Any] = {"mean_loss": mean[-1].item(), "pairs": len(pairs), "stopped_early": len(pairs) < most}
    if len(pairs) == 1:
        details["stderr"] = "none from a single pair of orders"
    return Estimate(values, stderr, problem.examples, details)


def _pair(replay: Replay, batch: Any, size: int, order: Tensor) -> Tensor:
    """``[heads + 1]``: what each removal adds to the batch's mean loss, in an order and its reverse; the dense loss.

    Removing in reverse leaves what removing in order has taken: the same rows of gates, with 0 and 1 exchanged.
    """
    heads = len(order)
    ahead = torch.arange(1, heads)[:, None] <= order.argsort()  # the heads that are left after 1, 2, … removals
    with replay.of(batch, size) as recording:
        dense = recording.dense.mean().reshape(1)
        gates = torch.cat([ahead, ~ahead, torch.zeros(1, heads, dtype=torch.bool)]).double()
        left, taken, none = torch.split(recording.losses(gates).mean(dim=1), [heads - 1, heads - 1, 1])
    there, back = torch.cat([dense, left, none]), torch.cat([none, taken, dense])
    added = torch.empty(heads, dtype=torch.float64)
    added[order] = (there.diff() - back.diff()) / 2
    return torch.cat([added, dense])


def _weighted(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of rows, and its standard error (NaN for a single row)."""
    mean = weights @ rows
    return mean, (weights**2 @ (rows - mean) ** 2 / (1 - weights @ weights)).sqrt()
