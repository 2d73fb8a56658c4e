"""Ablation scores: what the loss does when a head is taken away."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.scoring.base import Estimate, Problem, Samples, method
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import sampled


@method("ablation", unit="loss (nats) added when the head is removed")
def ablation(problem: Problem) -> Estimate:
    """Zero ablation: the mean over examples of ``L(without the head) - L``, signed.

    Section 3.1 of Michel et al. (2019), with the loss in place of the metric. A negative score says that
    the model is better off without the head. The standard error is that of the paired differences.
    Where ``settings.examples`` or ``settings.seconds`` do not allow all examples, `sampled` estimates it.
    """
    replay = Replay(problem)
    limited = problem.settings.examples is not None and problem.settings.examples < problem.examples
    if limited or problem.settings.seconds is not None:
        return sampled(problem, replay)
    return Estimate.mean_of(exact(problem, replay), replayed=replay.notes or "every layer")


def exact(problem: Problem, replay: Replay) -> Samples:
    """Every head's effect on every example."""
    found = []
    steps = len(problem.batches) * problem.heads
    for i, (batch, size) in enumerate(problem.batches):

        def compute(i: int = i, batch: object = batch, size: int = size) -> Tensor:
            with replay.of(batch, size) as recording:
                columns = [recording.dense]
                for gates in one_by_one(problem):
                    columns += list(recording.losses(gates))
                    problem.progress(i * problem.heads + len(columns) - 1, steps)
            return torch.stack(columns, dim=1)

        found.append(problem.store.get(f"{i}", compute))
    losses = torch.cat(found)
    return Samples(losses[:, 1:] - losses[:, :1], losses[:, 0])


def one_by_one(problem: Problem) -> list[Tensor]:
    """For every layer, gates ``[num_heads, heads]`` that each remove one of its heads."""
    return list(torch.split(1 - torch.eye(problem.heads), [layer.num_heads for layer in problem.layers]))
