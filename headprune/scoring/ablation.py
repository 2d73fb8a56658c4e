"""Ablation scores: what the loss does when a head is taken away."""

from __future__ import annotations

import torch

from headprune.gates import gated, zero_gates
from headprune.scoring.base import Estimate, Problem, Samples, method


@method("ablation", unit="loss (nats) added when the head is removed")
def ablation(problem: Problem) -> Estimate:
    """Zero ablation: the mean over examples of ``L(without the head) - L``, signed.

    Section 3.1 of Michel et al. (2019), with the loss in place of the metric. A negative score says that
    the model is better off without the head. The standard error is that of the paired differences.
    """
    steps = 1 + sum(layer.num_heads for layer in problem.layers)

    def losses() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([problem.losses(batch).cpu().double() for batch, _ in problem.batches])

    dense = losses()
    problem.progress(1, steps)
    columns = []
    for layer in problem.layers:
        for head in range(layer.num_heads):
            with gated(problem.model, problem.layers, zero_gates({layer.name: [head]}, problem.layers)):
                columns.append(losses() - dense)
            problem.progress(1 + len(columns), steps)
    return Estimate.mean_of(Samples(torch.stack(columns, dim=1), dense))
