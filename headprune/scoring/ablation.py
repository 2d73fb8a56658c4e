"""Ablation scores: how the loss changes when a head is removed, or when its output is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.batches import cost_of
from headprune.gates import Fill, gated
from headprune.parallel import current, shares
from headprune.scoring.base import Estimate, Problem, method
from headprune.scoring.gradient import separate
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import sampled
from headprune.scoring.statistics import real_queries

_EVEN = 1.15  # a rank's load may be this many times the mean load

FillsOf = Callable[[int, int, Any], Mapping[str, Fill]]
"""(number of the first example, examples, batch) -> the replacement for the heads' output, by layer."""


@method(
    "ablation",
    unit="loss (nats) added when the head is removed",
    settings=("examples", "seconds", "max_memory", "keep"),
)
def ablation(problem: Problem) -> Estimate:
    """Zero ablation: the mean over examples of ``L(without the head) - L``, signed.

    Section 3.2 of Michel et al. (2019), with the loss in place of the metric. A negative score says that
    the model is better off without the head. The standard error is that of the paired differences.
    Where ``settings.examples`` or ``settings.seconds`` do not allow all examples, `sampled` estimates it.
    """
    replay = Replay(problem)
    limited = problem.settings.examples is not None and problem.settings.examples < problem.examples
    if limited or problem.settings.seconds is not None:
        return sampled(problem, replay)
    return _ablated(problem, replay)


@method("mean-ablation", unit="loss (nats) added when the head gives its mean", settings=("max_memory",))
def mean_ablation(problem: Problem) -> Estimate:
    """The head's output is replaced by its mean over the tokens of all examples, as Wang et al. (2022) do.

    Section 2.1 of "Interpretability in the Wild" (arXiv:2211.00593). A constant that a head adds to every token, such as a
    bias, does not count: after pruning, W_O's bias could add it.
    """

    def count_and_sum(tokens: Tensor, example: int) -> Tensor:
        return torch.cat([tokens.new_tensor([len(tokens)]), tokens.sum(0)])

    problem = replace(problem, batches=separate(problem))
    totals = _head_outputs(problem, "mean", count_and_sum)
    means = {name: each[:, 1:].sum(0) / each[:, 0].sum() for name, each in totals.items()}

    constant: dict[str, Fill] = {name: partial(_constant, mean) for name, mean in means.items()}
    return _ablated(problem, Replay(problem), lambda start, size, batch: constant)


@method(
    "resample-ablation", unit="loss (nats) added when the head says what it said elsewhere", settings=("max_memory",)
)
def resample_ablation(problem: Problem) -> Estimate:
    """The head's output at each token is replaced by its output at a random token of a random example.

    Resample ablation of Chan et al. (2022), "Causal Scrubbing", per token: the replacement comes from the same distribution
    as the original, so the model only sees activations that occur on the data. The seed gives one draw per token; the pool
    holds one token of every example.
    """

    def one_token(tokens: Tensor, example: int) -> Tensor:
        return tokens[int(_draws(problem.seed, example, 1, len(tokens)))]

    problem = replace(problem, batches=separate(problem))
    pools = _head_outputs(problem, "pool", one_token)

    def fills(start: int, size: int, batch: Any) -> dict[str, Fill]:
        real = {layer.name: partial(real_queries, problem, layer, batch) for layer in problem.layers}
        return {name: _resampled(pools[name], problem.seed + 1, start, size, own) for name, own in real.items()}

    return _ablated(problem, Replay(problem), fills)


def _ablated(problem: Problem, replay: Replay, fills: FillsOf | None = None) -> Estimate:
    """The mean over examples of the loss without each head minus the dense loss."""
    every = torch.split(1 - torch.eye(problem.heads), [layer.num_heads for layer in problem.layers])

    def without(i: int, examples: tuple[int, Any, int], some: Sequence[int]) -> Tensor:
        """The dense losses, then the losses without each head of some consecutive layers: ``[examples, 1 + heads]``."""
        start, batch, size = examples
        done = i * problem.heads + sum(map(len, every[: some[0]]))
        recording = replay.of(batch, size, fills(start, size, batch) if fills else None)
        columns = [recording.dense]
        for n in some:
            columns += recording.losses(every[n])
            done += len(every[n])
            problem.progress(done, len(problem.batches) * problem.heads)
        return torch.stack(columns, dim=1)

    costs, layers = [cost_of(batch) for batch, _ in problem.batches], range(len(every))
    parts = [[n] for n in layers] if _uneven(costs, current().size) else [list(layers)]
    # Cost: one dense pass, and for every head a pass from its layer on.
    again = [1 + sum(len(every[n]) * (len(every) - n) for n in some) / len(every) for some in parts]
    numbered = enumerate(problem.numbered())
    tasks = {f"{i}-{some[0]}-{len(some)}": partial(without, i, batch, some) for i, batch in numbered for some in parts}
    tables = problem.store.share("ablation", tasks, [cost * more for cost in costs for more in again])
    by_batch = [tables[i : i + len(parts)] for i in range(0, len(tables), len(parts))]
    losses = torch.cat([torch.cat([own[0], *(t[:, 1:] for t in own[1:])], dim=1) for own in by_batch])
    return Estimate.mean_of(losses[:, 1:] - losses[:, :1], losses[:, 0], replayed=replay.about)


def _uneven(costs: Sequence[float], size: int) -> bool:
    """Whether whole batches would load the ranks unevenly, so that ranks should share out layers as well."""
    loads = [sum(costs[i] for i in own) for own in shares(len(costs), size, costs)]
    return size > 1 and max(loads) > _EVEN * sum(loads) / size


# -- replacements for a head's output ----------------------------------------------------------------


def _constant(value: Tensor, hidden: Tensor, gates: int) -> Tensor:
    return value.to(hidden).expand_as(hidden)


def _resampled(pool: Tensor, seed: int, start: int, size: int, real: Callable[[int], Tensor | None]) -> Fill:
    """A fill that replaces the heads' output at every token of ``size`` examples by that of a random token of the pool.

    Args:
        pool: ``[tokens, features]``.
        start: Number of the first example.
        real: From the number of tokens to a mask of the real (non-padding) ones, ``[examples, 1, tokens]``; None if unknown.
    """

    @cache  # an example's draws do not depend on its batch or padding
    def drawn(tokens: int) -> Tensor:
        rows = torch.stack([_draws(seed, i, tokens, len(pool)) for i in range(start, start + size)])
        if (mask := real(tokens)) is not None:
            rows = rows.gather(1, (mask[:, 0].cpu().cumsum(1) - 1).clamp(min=0).expand(size, -1))
        return rows

    def fill(hidden: Tensor, gates: int) -> Tensor:
        copies = (gates or size) // size
        tokens = hidden.numel() // (hidden.shape[-1] * copies * size)
        return pool[drawn(tokens)].to(hidden).repeat(copies, 1, 1).reshape(hidden.shape)

    return fill


def _draws(seed: int, example: int, count: int, below: int) -> Tensor:
    """``count`` random integers from 0 to ``below`` - 1, fixed by the seed and the example's number."""
    return torch.from_numpy(np.random.default_rng((seed, example)).integers(below, size=count))


def _head_outputs(problem: Problem, key: str, summarize: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    """A summary of every example's heads' outputs, by layer: ``{layer_name: [examples, width]}``.

    Args:
        summarize: Takes W_O's input at an example's real tokens ``[tokens, features]``, and the example's number.
    """
    ones = {layer.name: torch.ones(layer.num_heads) for layer in problem.layers}

    def compute(start: int, batch: Any, size: int) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}

        def note(layer: AttentionLayer, hidden: Tensor, gates: int) -> Tensor:
            if layer.name not in rows:  # if a layer runs several times, only its first call counts
                each = list(hidden.detach().reshape(size, -1, hidden.shape[-1]).cpu().double())
                real = real_queries(problem, layer, batch, len(each[0]))
                if real is not None:
                    masks = real[:, 0].cpu().expand(size, -1)
                    each = [e[mask] if mask.any() else e for e, mask in zip(each, masks, strict=True)]
                rows[layer.name] = torch.stack([summarize(tokens, start + r) for r, tokens in enumerate(each)])
            return torch.zeros_like(hidden)

        notes: dict[str, Fill] = {layer.name: partial(note, layer) for layer in problem.layers}
        with torch.no_grad(), gated(problem.model, problem.layers, ones, notes):
            problem.losses(batch)
        return {layer.name: rows[layer.name] for layer in problem.layers}

    tasks = {f"{key}-{i}": partial(compute, *batch) for i, batch in enumerate(problem.numbered())}
    parts = problem.store.share(key, tasks, [cost_of(batch) for batch, _ in problem.batches])
    return {layer.name: torch.cat([part[layer.name] for part in parts]) for layer in problem.layers}
