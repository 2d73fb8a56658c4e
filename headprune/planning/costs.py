"""What a plan costs: parameters, operations, key/value cache and time, on a copy that was really pruned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from headprune import latency
from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.inputs import Example
from headprune.planning.budgets import Budget, Cost, Reading
from headprune.plans import PruningPlan
from headprune.reference import add_biases
from headprune.surgery import prune


@dataclass(frozen=True)
class Subject:
    """The dense model that plans are for, which is never changed.

    Attributes:
        layers: From `headprune.find_attention`.
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
        biases: Modules that the repair may give a bias, which costs something too.
    """

    model: nn.Module
    layers: Sequence[AttentionLayer]
    example: Example
    inputs: Example
    biases: Sequence[str] = ()

    def pruned(self, plan: PruningPlan) -> nn.Module:
        """A copy without the plan's heads."""
        model = copy.deepcopy(self.model)
        if plan.drop:
            add_biases(model, self.biases)
        prune(model, plan.drop, self.example, layers=self.layers)  # the fingerprint was checked: this is a copy
        return model


def cost_of(budget: Budget, subject: Subject, seed: int = 0) -> Cost:
    """How to tell what a plan costs, in the terms of a budget.

    Raises:
        HeadPruneError: A budget for a cache that the model has not, or that its heads do not explain.
    """
    if budget.kind == "latency":
        return _timed(budget, subject, seed)
    if budget.kind == "kv-cache":
        return _cached(budget, subject)
    counts: dict[str, Callable[[nn.Module], float]] = {
        "params": latency.parameters,
        "flops": lambda model: latency.flops(model, subject.inputs),
    }
    count = counts[budget.kind]
    dense = count(subject.model) if budget.relative else 1.0

    def counted(plan: PruningPlan) -> Reading:
        return Reading.exact(count(subject.pruned(plan)) / dense)

    return Cost(counted, counted)


def _timed(budget: Budget, subject: Subject, seed: int) -> Cost:
    """End-to-end time of a forward pass, the dense model's turn and the pruned one's alternating."""
    batch, length = latency.example_shape(subject.inputs)

    def timed(plan: PruningPlan, runs: int, seconds: float) -> Reading:
        if not plan.drop and budget.relative:
            return Reading.exact(1.0)
        models = {"dense": subject.model, "pruned": subject.pruned(plan)}
        inputs = [(batch, length, subject.inputs)]
        (row,) = latency.bench(models, inputs, seed=seed, min_runs=runs, min_seconds=seconds)
        if budget.relative:
            speedup = row.speedups["pruned"]
            return Reading(1 / speedup.ratio, 1 / speedup.high, 1 / speedup.low)
        timing = row.timings["pruned"]
        return Reading(timing.median, timing.low, timing.high)

    # The search may err: what it finds is timed again, for as long as what is reported.
    return Cost(
        lambda plan: timed(plan, latency.MIN_RUNS // 2, latency.MIN_SECONDS / 4),
        lambda plan: timed(plan, latency.MIN_RUNS, latency.MIN_SECONDS),
    )


def _cached(budget: Budget, subject: Subject) -> Cost:
    """Computed for the search, but measured on a real cache: of the dense model first, and of what is chosen."""
    dense = latency.cache_bytes(subject.model, subject.inputs)
    size = next(subject.model.parameters()).element_size()
    expected = kv_cache_bytes(subject.layers, {}, size)
    if not dense or not expected:
        raise HeadPruneError(
            f"{type(subject.model).__name__} has no key/value cache.",
            "Give a budget of another kind: only decoders have one.",
        )
    if dense != expected:
        raise HeadPruneError(
            f"The cache of {type(subject.model).__name__} holds {dense:,g} bytes per token, where its key/value heads "
            f"would make {expected:,}.",
            "Give a budget of another kind: this cache does not hold heads.",
        )
    unit = dense if budget.relative else 1.0

    def measured(plan: PruningPlan) -> Reading:
        return Reading.exact((latency.cache_bytes(subject.pruned(plan), subject.inputs) or 0.0) / unit)

    return Cost(lambda plan: Reading.exact(kv_cache_bytes(subject.layers, plan.drop, size) / unit), measured)


def kv_cache_bytes(layers: Sequence[AttentionLayer], drop: Mapping[str, Sequence[int]], size: int) -> int:
    """Bytes per token in the key/value cache of a decoder's self-attention, once heads are gone.

    A key/value head stays as long as a query head of its group does. A layer without heads keeps one of them, where
    the cache needs it (`AttentionLayer.bypass`).

    Args:
        size: Bytes of a number.

    >>> layer = AttentionLayer("a", 0, "decoder", 4, 2, 8, groups=((0, 1), (2, 3)))
    >>> kv_cache_bytes([layer], {}, 4), kv_cache_bytes([layer], {"a": [0, 2]}, 4), kv_cache_bytes([layer], {"a": [0, 1]}, 4)
    (128, 128, 64)
    """
    total = 0
    for layer in layers:
        if layer.kind != "decoder":
            continue
        gone = set(drop.get(layer.name, ()))
        if len(gone) == layer.num_heads:
            left = int(layer.bypass == "ghost")
        elif layer.num_kv_heads == 1:
            left = 1
        else:
            left = sum(not set(unit) <= gone for unit in layer.units)
        total += 2 * left * layer.head_dim * size
    return total
