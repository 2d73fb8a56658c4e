"""Which numbers of heads a stock class can have, tried on models without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from headprune.attention import AttentionLayer
from headprune.stock.statement import CannotStateError, Statement, dense_class, meta_copy, pattern, statements
from headprune.surgery import remove
from headprune.surgery.removal import ways


class Counts:
    """What a model's class can state, by prunes of copies without weights.

    Args:
        model: A transformers model, pruned before or not.
        layers: Its attention layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[AttentionLayer]) -> None:
        self.model, self.layers = model, layers
        self.name = dense_class(model).__name__

    @classmethod
    def of(cls, model: nn.Module | None, layers: Sequence[AttentionLayer]) -> Counts | None:
        """For a transformers model; None for any other module, and for none."""
        known = model is not None and dense_class(model).__module__.startswith("transformers.models.")
        return cls(model, layers) if model is not None and known else None

    def statement(self, drop: Mapping[str, Sequence[int]]) -> Statement | None:
        """How the class states the model without these heads; None if it cannot. Answers are not compared."""
        touched = [layer for layer in self.layers if drop.get(layer.name)]
        pruned = meta_copy(self.model)
        remove(pruned, ways(touched, {n: list(h) for n, h in drop.items() if h})[0])
        try:
            return next(statements(pruned), None)
        except CannotStateError:
            return None


def alike(layers: Sequence[AttentionLayer]) -> list[list[int]]:
    """Positions of the layers that have as many heads and key/value heads as each other."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, layer in enumerate(layers):
        found.setdefault((layer.num_heads, layer.num_kv_heads), []).append(i)
    return list(found.values())


__all__ = ["Counts", "alike", "pattern"]
