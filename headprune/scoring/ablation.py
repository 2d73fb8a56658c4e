"""Ablation scores: how the loss changes when a head is removed, or when its output is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.batches import cost_of
from headprune.gates import Fill, gated
from headprune.parallel import current, shares
from headprune.scoring.base import Estimate, Problem, Samples, method, standard_error
from headprune.scoring.gradient import separate
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import sampled
from headprune.scoring.statistics import real_queries

_EVEN = 1.15  # times the mean: how much more than others a rank may have to do

FillsOf = Callable[[int, int, Any], Mapping[str, Fill]]
"""(number of the first example, examples, batch) to what replaces the heads' output, by layer."""


@method("ablation", unit="loss (nats) added when the head is removed")
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
    return Estimate.mean_of(exact(problem, replay), replayed=replay.about)


@method("mean-ablation", unit="loss (nats) added when the head gives its mean")
def mean_ablation(problem: Problem) -> Estimate:
    """The head's output is replaced by its mean over the tokens of all examples, as Wang et al. (2022) do.

    Section 2.1 of "Interpretability in the Wild" (arXiv:2211.00593). What a head adds to all tokens alike, such as a bias,
    does not count: after pruning, W_O's bias could add it.
    """
    problem = replace(problem, batches=separate(problem))
    totals = _read(
        problem, "mean", lambda tokens, example: torch.cat([tokens.new_tensor([len(tokens)]), tokens.sum(0)])
    )
    means = {name: each[:, 1:].sum(0) / each[:, 0].sum() for name, each in totals.items()}

    def fills(start: int, size: int, batch: Any) -> dict[str, Fill]:
        return {name: partial(_constant, mean) for name, mean in means.items()}

    replay = Replay(problem)
    return Estimate.mean_of(exact(problem, replay, fills), replayed=replay.about)


@method("resample-ablation", unit="loss (nats) added when the head says what it said elsewhere")
def resample_ablation(problem: Problem) -> Estimate:
    """The head's output at each token is replaced by its output at a random token of a random example.

    Resample ablation of Chan et al. (2022), "Causal Scrubbing", at the level of tokens: the new output is as likely as the
    old one, so the model only sees activations that it knows. One draw for each token, from the seed; the pool has one
    token of every example.
    """

    def one(tokens: Tensor, example: int) -> Tensor:
        return tokens[int(_draws(problem.seed, example, 1, len(tokens)))]

    problem = replace(problem, batches=separate(problem))
    pools = _read(problem, "pool", one)

    def fills(start: int, size: int, batch: Any) -> dict[str, Fill]:
        def real(layer: AttentionLayer, tokens: int) -> Tensor | None:
            return real_queries(problem, layer, batch, tokens)

        return {
            layer.name: _Elsewhere(pools[layer.name], problem.seed + 1, start, size, partial(real, layer))
            for layer in problem.layers
        }

    replay = Replay(problem)
    return Estimate.mean_of(exact(problem, replay, fills), replayed=replay.about)


def exact(problem: Problem, replay: Replay, fills: FillsOf | None = None) -> Samples:
    """Every head's effect on every example."""
    done: list[Tensor] = []  # for the interval that a waiting person is shown
    steps, store, every = len(problem.batches) * problem.heads, problem.store, one_by_one(problem)
    starts = [0, *np.cumsum([layer.num_heads for layer in problem.layers]).tolist()]
    costs = [cost_of(batch) for batch, _ in problem.batches]

    def compute(i: int, start: int, batch: Any, size: int, layers: Sequence[int]) -> Tensor:
        """The losses without each head of some layers in a row ``[examples, 1 + heads]``, the dense ones in the first column."""
        with replay.of(batch, size, fills(start, size, batch) if fills else None) as recording:
            columns = [recording.dense]
            for layer in layers:
                columns += list(recording.losses(every[layer]))
                count = starts[layers[0]] + len(columns) - 1
                problem.progress(i * problem.heads + count, steps, _widest(done))
        return torch.stack(columns, dim=1)

    def whole(i: int, start: int, batch: Any, size: int) -> Tensor:
        # More ranks than now may have been at it, by layers.
        known = (
            [store.known(f"{i}-{layer}") for layer in range(len(every))] if store.known(f"{i}-0") is not None else []
        )
        if known and all(part is not None for part in known):
            found = _joined([part for part in known if part is not None])
        else:
            found = compute(i, start, batch, size, range(len(every)))
        done.append(found)
        return found

    def layer(i: int, start: int, batch: Any, size: int, number: int) -> Tensor:
        if (known := store.known(f"{i}")) is not None:
            return torch.cat([known[:, :1], known[:, 1 + starts[number] : 1 + starts[number + 1]]], dim=1)
        return compute(i, start, batch, size, [number])

    batches = [(i, *each) for i, each in enumerate(problem.numbered())]
    if not _uneven(costs, current().size):
        losses = torch.cat(store.share("ablation", {f"{each[0]}": partial(whole, *each) for each in batches}, costs))
    else:
        numbers = range(len(every))
        # From its layer on the model is run again, for every head; and once as it is.
        again = [1 + len(every[n]) * (len(every) - n) / len(every) for n in numbers]
        parts = store.share(
            "ablation by layers",
            {f"{each[0]}-{n}": partial(layer, *each, n) for each in batches for n in numbers},
            [cost * more for cost in costs for more in again],
        )
        losses = torch.cat([_joined(parts[i * len(every) : (i + 1) * len(every)]) for i in range(len(batches))])
    return Samples(losses[:, 1:] - losses[:, :1], losses[:, 0])


def _uneven(costs: Sequence[float], size: int) -> bool:
    """Whether whole batches would leave some of several ranks with little to do, so that layers are shared out as well."""
    loads = [sum(costs[i] for i in own) for own in shares(len(costs), size, costs)]
    return size > 1 and max(loads) > _EVEN * sum(loads) / size


def _joined(layers: Sequence[Tensor]) -> Tensor:
    """The losses without each head of all layers, from those of every layer, each behind the dense losses."""
    return torch.cat([layers[0][:, :1], *(part[:, 1:] for part in layers)], dim=1)


def one_by_one(problem: Problem) -> list[Tensor]:
    """For every layer, gates ``[num_heads, heads]`` that each remove one of its heads."""
    return list(torch.split(1 - torch.eye(problem.heads), [layer.num_heads for layer in problem.layers]))


def _widest(found: list[Tensor]) -> str:
    """The width of the widest confidence interval so far; "" before the first batch is done."""
    if sum(map(len, found)) < 2:
        return ""
    effects = torch.cat(found)
    error = standard_error(effects[:, 1:] - effects[:, :1]).max()
    return f"widest interval ±{1.96 * error.item():.2g}"


def _constant(value: Tensor, hidden: Tensor, gates: int) -> Tensor:
    return value[: hidden.shape[-1]].to(hidden).expand_as(hidden)


class _Elsewhere:
    """For every token of ``size`` examples, the heads' output at a random token of the pool.

    Args:
        pool: ``[tokens, features]``.
        start: Number of the first example.
        real: From the number of tokens to which of them are no padding, ``[examples, 1, tokens]``; None if not known.
    """

    def __init__(self, pool: Tensor, seed: int, start: int, size: int, real: Callable[[int], Tensor | None]) -> None:
        self.pool, self.seed, self.start, self.size, self.real = pool, seed, start, size, real
        self.drawn = torch.empty(0, 0, dtype=torch.long)

    def __call__(self, hidden: Tensor, gates: int) -> Tensor:
        copies = (gates or self.size) // self.size
        tokens = hidden.numel() // (hidden.shape[-1] * copies * self.size)
        if self.drawn.shape[1] != tokens:  # the same draws for an example in whatever batch, with whatever padding
            examples = range(self.start, self.start + self.size)
            drawn = torch.stack([_draws(self.seed, i, tokens, len(self.pool)) for i in examples])
            real = self.real(tokens)
            if real is not None:
                drawn = drawn.gather(1, (real[:, 0].cpu().cumsum(1) - 1).clamp(min=0).expand(self.size, -1))
            self.drawn = drawn
        values = self.pool[self.drawn, : hidden.shape[-1]].to(hidden)
        return values.repeat(copies, 1, 1).reshape(hidden.shape)


def _draws(seed: int, example: int, count: int, below: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, example)).integers(below, size=count))


def _read(problem: Problem, key: str, take: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    """What ``take(tokens [tokens, features], example)`` makes of the input of every layer's W_O.

    Returns:
        ``{layer_name: [examples, width]}``, with zeros behind what a narrower layer gives.
    """
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in problem.layers}
    ones = {layer.name: torch.ones(layer.num_heads) for layer in problem.layers}

    def compute(start: int, batch: Any, size: int) -> Tensor:
        rows: dict[str, Tensor] = {}

        def reading(layer: AttentionLayer, hidden: Tensor, gates: int) -> Tensor:
            if layer.name not in rows:  # of a layer that runs several times, the first call
                each = hidden.detach().reshape(size, -1, hidden.shape[-1]).cpu().double()
                real = real_queries(problem, layer, batch, each.shape[1])
                seen = [None if real is None else real[r, 0].cpu() for r in range(size)]
                kept = [e if s is None or not s.any() else e[s] for e, s in zip(each, seen, strict=True)]
                rows[layer.name] = torch.stack([take(k, start + r) for r, k in enumerate(kept)])
            return torch.zeros_like(hidden)

        reader: dict[str, Fill] = {layer.name: partial(reading, layer) for layer in problem.layers}
        with torch.no_grad(), gated(problem.model, problem.layers, ones, reader):
            problem.losses(batch)
        width = max(r.shape[1] for r in rows.values())
        return torch.stack([F.pad(rows[a.name], (0, width - rows[a.name].shape[1])) for a in problem.layers])

    parts = {f"{key}-{i}": partial(compute, *each) for i, each in enumerate(problem.numbered())}
    for part in problem.store.share(key, parts, [cost_of(batch) for batch, _ in problem.batches]):
        for name, own in zip(found, part, strict=True):
            found[name].append(own)
    return {name: torch.cat(parts) for name, parts in found.items()}
