"""Which numbers of heads a stock class can have, tried on models without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from headprune.attention import AttentionLayer
from headprune.pruned import add_biases
from headprune.stock.statement import CannotStateError, Known, Statement, dense_class, meta_copy, statements
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
        self._known: Known = {}

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
            return next(statements(pruned, self._known), None)
        except CannotStateError:
            return None

    def has_place_for_biases(self) -> bool:
        """Whether the class can give W_O a bias where it has none; True also where it can state no prune anyway."""
        fewest = {a.name: [h for unit in a.units[1:] for h in unit] for a in self.layers if a.prunable}
        if self.statement(fewest) is None:
            return True
        with_biases = meta_copy(self.model)
        outputs = {a.output_projection.module for a in self.layers if a.output_projection and not a.concatenates}
        add_biases(with_biases, [n for n in outputs if getattr(with_biases.get_submodule(n), "bias", None) is None])
        return Counts(with_biases, self.layers).statement(fewest) is not None


def alike(layers: Sequence[AttentionLayer]) -> list[list[int]]:
    """Positions of the layers that have as many heads and key/value heads as each other."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, layer in enumerate(layers):
        found.setdefault((layer.num_heads, layer.num_kv_heads), []).append(i)
    return list(found.values())
