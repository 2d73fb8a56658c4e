"""Gradient scores: one forward and backward pass for every head at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.gates import RowsError, gated
from headprune.loss import rows_of, singles
from headprune.scoring.base import Estimate, Problem, Samples, method


@method("gradient", unit="loss (nats) per unit of gate, mean absolute value")
def gradient(problem: Problem) -> Estimate:
    """Michel et al. (2019): the mean over examples of |dL/dxi|, xi being the head's gate at 1.

    Equation (2) of "Are Sixteen Heads Really Better than One?" (NeurIPS 2019, arXiv:1905.10650):
    ``I_h = E_x |dL(x)/dxi_h|``, the absolute value taken per example. There is one gate per example,
    so one backward pass gives every example's own gradient and the result does not depend on the batch size.
    """
    samples = gate_gradients(problem)
    return Estimate.mean_of(Samples(samples.effects.abs(), samples.losses))


@method("signed-gradient", unit="loss (nats) that first order expects the removal to add")
def signed_gradient(problem: Problem) -> Estimate:
    """First-order Taylor expansion of ablation: the mean over examples of ``-dL/dxi``, signed.

    Molchanov et al. (2017, arXiv:1611.06440), equation (6), before the absolute value, for the gate of a head. Effects
    of opposite sign in different examples cancel, as they do in ablation; in `gradient` they add up.
    """
    samples = gate_gradients(problem)
    return Estimate.mean_of(Samples(-samples.effects, samples.losses))


@method("fisher", unit="nats² per unit of gate², mean square of the gradient")
def fisher(problem: Problem) -> Estimate:
    """Diagonal of the empirical Fisher information of the gates: the mean over examples of ``(dL/dxi)^2``.

    Kwon et al. (2022, arXiv:2204.09656), equation (6) and section 4.1: half of it is the loss that second order expects
    to be added when the head goes. `HeadScores.matrix` is the whole matrix, ``mean_i g_ih g_ik``, so that pairs of heads that
    stand in for each other can be weighed (their section 4.2).
    """
    samples = gate_gradients(problem)
    squares = Estimate.mean_of(Samples(samples.effects**2, samples.losses))
    return replace(squares, matrix=samples.effects.T @ samples.effects / len(samples.effects))


def gate_gradients(problem: Problem) -> Samples:
    """Signed ``dL_i/dxi_h`` of every example ``i`` and head ``h``, with all gates at 1."""
    effects, losses = [], []
    trainable = [p for p in problem.model.parameters() if p.requires_grad]
    for p in trainable:  # only the gates' gradients are wanted: this halves the backward pass
        p.requires_grad_(False)
    try:
        batches = problem.batches if independent(problem) else in_singles(problem)
        for i, (batch, size) in enumerate(batches):
            gates = _gates(problem, size)
            with torch.enable_grad(), gated(problem.model, problem.layers, gates):
                loss = (problem.slopes or problem.losses)(batch)
                effects.append(_rows(loss.sum(), gates).double())
            losses.append(loss.detach().cpu().double())
            problem.progress(i + 1, len(batches))
    finally:
        for p in trainable:
            p.requires_grad_(True)
    result = Samples(torch.cat(effects), torch.cat(losses))
    if not result.effects.isfinite().all():
        row = int((~result.effects.isfinite()).any(dim=1).nonzero()[0])
        raise HeadPruneError(f"The gradient of example {row} is not finite.", "Leave it out, or use --dtype float32.")
    return result


def _gates(problem: Problem, size: int) -> dict[str, Tensor]:
    return {a.name: torch.ones(size, a.num_heads, requires_grad=True) for a in problem.layers}


def _rows(loss: Tensor, gates: dict[str, Tensor]) -> Tensor:
    """Derivative with respect to every gate, ``[batch, heads]``."""
    gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True)
    pairs = zip(gradients, gates.values(), strict=True)
    return torch.cat([torch.zeros_like(gate) if g is None else g for g, gate in pairs], dim=1)


def independent(problem: Problem) -> bool:
    """Whether each example's loss depends on its own gates alone, tried on a few examples.

    A module that puts tokens before the batch would mix them up.
    """
    batch, size = max(problem.batches, key=lambda pair: pair[1])
    if size == 1:
        return True
    size = min(size, 3)
    batch = rows_of(batch, range(size))
    gates = _gates(problem, size)
    try:
        with torch.enable_grad(), gated(problem.model, problem.layers, gates):
            first = _rows(problem.losses(batch)[0], gates)
    except RowsError:
        return False
    return not bool(first[1:].any())


def in_singles(problem: Problem) -> list[tuple[Any, int]]:
    return [(row, 1) for batch, _ in problem.batches for row in singles(batch)]
