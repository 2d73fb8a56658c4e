"""Gradient scores: one forward and backward pass for every head at once."""

from __future__ import annotations

import torch

from headprune.errors import HeadPruneError
from headprune.gates import gated
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


def gate_gradients(problem: Problem) -> Samples:
    """Signed ``dL_i/dxi_h`` of every example ``i`` and head ``h``, with all gates at 1."""
    effects, losses = [], []
    trainable = [p for p in problem.model.parameters() if p.requires_grad]
    for p in trainable:  # only the gates' gradients are wanted: this halves the backward pass
        p.requires_grad_(False)
    try:
        for i, (batch, size) in enumerate(problem.batches):
            gates = {
                layer.name: torch.ones(size, layer.num_heads, dtype=torch.float32, requires_grad=True)
                for layer in problem.layers
            }
            with torch.enable_grad(), gated(problem.model, problem.layers, gates):
                loss = problem.losses(batch)
                gradients = torch.autograd.grad(loss.sum(), list(gates.values()), allow_unused=True)
            rows = [
                torch.zeros_like(gate) if g is None else g for g, gate in zip(gradients, gates.values(), strict=True)
            ]
            effects.append(torch.cat(rows, dim=1).double())
            losses.append(loss.detach().cpu().double())
            problem.progress(i + 1, len(problem.batches))
    finally:
        for p in trainable:
            p.requires_grad_(True)
    result = Samples(torch.cat(effects), torch.cat(losses))
    if not result.effects.isfinite().all():
        row = int((~result.effects.isfinite()).any(dim=1).nonzero()[0])
        raise HeadPruneError(f"The gradient of example {row} is not finite.", "Leave it out, or use --dtype float32.")
    return result
