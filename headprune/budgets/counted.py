"""Budgets of what can be counted: heads, operations, parameters, and the bytes of a decoder's key/value cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Budget, Fit, Limit, PlanCost, Reading, budget
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from torch import nn

    from headprune.attention import Layers
    from headprune.budgets.subject import Subject
    from headprune.inputs import Example
    from headprune.planning import Order
    from headprune.plans import PruningPlan


@budget("keep")
class Keep(Budget):
    """Heads, as a count or as a share of all; `heads` reads the text, since what it comes to depends on the model."""

    flag = "--keep"
    short = "-k"
    help = "Heads to keep: 36, 50% or 0.5."
    example = "36, 50% or 0.5"
    limits = "heads"
    unit = "heads"

    @classmethod
    def parse(cls, text: str) -> Budget:
        from headprune.plans import keep_of

        keep_of(text)
        return cls(text.strip())

    def heads(self, total: int) -> int:
        from headprune.plans import heads_to_keep

        return heads_to_keep(self.text, total)

    def check(self) -> None:
        from headprune.plans import keep_of

        share = keep_of(self.text)
        if isinstance(share, float) and share >= 1:
            message = f"keep {self.text} keeps all heads, so there is nothing to prune."
            raise HeadPruneError(message, "Ask for less, for instance 50%.")

    def check_dense(self, subject: Subject) -> None:
        total = sum(layer.num_heads for layer in subject.layers if layer.maskable)
        if self.heads(total) == total:
            message = f"keep {self.text} keeps all {total} heads, so there is nothing to prune."
            raise HeadPruneError(message, f"Keep fewer, for instance {max(total // 2, 1)}.")

    def fit(self, order: Order, subject: Subject) -> Fit:
        return Fit(replace(order.some(self.heads(order.total)), budget=str(self)), self)


class Counted(Limit):
    """A budget of a count on a pruned copy, which is the same each time."""

    @abstractmethod
    def count(self, model: nn.Module, inputs: Example) -> float:
        """The count, for a dense or a pruned model on one input."""

    def cost(self, subject: Subject) -> PlanCost:
        dense = self.count(subject.model, subject.inputs) if self.relative else 1.0

        return lambda plan, _: Reading.exact(self.count(subject.pruned(plan), subject.inputs) / dense)


@budget("flops")
class Flops(Counted):
    """Floating-point operations of a forward pass (`headprune.latency.flops`)."""

    flag = "--target-flops"
    help = "Of a forward pass: 1.2G or 80%."
    example = "1.2G or 80%"
    limits = "FLOPs"
    unit = "FLOPs"
    suffixes: ClassVar = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

    def count(self, model: nn.Module, inputs: Example) -> float:
        from headprune import latency

        return latency.flops(model, inputs)


@budget("params")
class Parameters(Counted):
    """Parameters of the whole model, shared ones once."""

    flag = "--target-params"
    help = "Parameters of the model: 60M or 80%."
    example = "60M or 80%"
    limits = "parameters"
    unit = "parameters"
    suffixes: ClassVar = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}

    def count(self, model: nn.Module, inputs: Example) -> float:
        from headprune import latency

        return latency.parameters(model)


@budget("kv-cache")
class KeyValueCache(Limit):
    """Bytes per token of the cache: computed for the search, but measured on a real cache, of the dense model first, and of
    what is chosen."""

    flag = "--target-kv-cache"
    help = "A decoder's cache, bytes per token: 20K or 50%."
    example = "20K or 50%"
    limits = "key/value cache"
    unit = "bytes per token"
    suffixes: ClassVar = {"": 1, "b": 1, "k": 1024, "kb": 1024, "m": 1024**2, "mb": 1024**2}
    by_groups = True

    def cost(self, subject: Subject) -> PlanCost:
        from headprune import latency

        dense = latency.cache_bytes(subject.model, subject.inputs)
        size = next(subject.model.parameters()).element_size()
        expected = kv_cache_bytes(subject.layers, {}, size)
        if not dense or not expected:
            message = f"{type(subject.model).__name__} has no key/value cache."
            raise HeadPruneError(message, "Give a budget of another kind: only decoders have one.")
        if dense != expected:
            raise HeadPruneError(
                f"The cache of {type(subject.model).__name__} holds {dense:,g} bytes per token, where its key/value heads "
                f"would make {expected:,}.",
                "Give a budget of another kind: this cache does not hold heads.",
            )
        unit = dense if self.relative else 1.0

        def held(plan: PruningPlan, measured: bool) -> Reading:
            if not measured:
                return Reading.exact(kv_cache_bytes(subject.layers, plan.drop, size) / unit)
            return Reading.exact((latency.cache_bytes(subject.pruned(plan), subject.inputs) or 0.0) / unit)

        return held


def kv_cache_bytes(layers: Layers, drop: Mapping[str, Sequence[int]], size: int) -> int:
    """Bytes per token in the key/value cache of a decoder's self-attention, once heads are gone.

    A key/value head stays as long as a query head of its group does. A layer without heads keeps one of them, where
    the cache needs it (`AttentionLayer.bypass`).

    Args:
        size: Bytes of a number.

    >>> from headprune.attention import AttentionLayer
    >>> layer = AttentionLayer("a", 0, "decoder", 4, 2, 8, groups=((0, 1), (2, 3)))
    >>> kv_cache_bytes([layer], {}, 4), kv_cache_bytes([layer], {"a": [0, 2]}, 4), kv_cache_bytes([layer], {"a": [0, 1]}, 4)
    (128, 128, 64)
    """
    total = 0
    for layer in layers:
        if layer.kind != "decoder":
            continue
        gone = set(drop.get(layer.name, ()))
        kept = 1 if layer.num_kv_heads == 1 else sum(not set(unit) <= gone for unit in layer.units)
        left = kept if len(gone) < layer.num_heads else int(layer.bypass == "ghost")
        total += 2 * left * layer.head_dim * size
    return total
