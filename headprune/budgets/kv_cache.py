"""A budget of a decoder's key/value cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Reading, budget
from headprune.budgets.limit import Cost, Limit
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.attention import AttentionLayer
    from headprune.budgets.subject import Subject
    from headprune.plans import PruningPlan


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

    def cost(self, subject: Subject) -> Cost:
        from headprune import latency

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
        unit = dense if self.relative else 1.0

        def measured(plan: PruningPlan) -> Reading:
            return Reading.exact((latency.cache_bytes(subject.pruned(plan), subject.inputs) or 0.0) / unit)

        return Cost(lambda plan: Reading.exact(kv_cache_bytes(subject.layers, plan.drop, size) / unit), measured)


def kv_cache_bytes(layers: Sequence[AttentionLayer], drop: Mapping[str, Sequence[int]], size: int) -> int:
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
        if len(gone) == layer.num_heads:
            left = int(layer.bypass == "ghost")
        elif layer.num_kv_heads == 1:
            left = 1
        else:
            left = sum(not set(unit) <= gone for unit in layer.units)
        total += 2 * left * layer.head_dim * size
    return total
