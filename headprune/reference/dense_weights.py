"""The dense model's weights, and others in their place for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.offload import add_stored_biases, is_elsewhere, put
from headprune.pruned import remove_biases
from headprune.reference.projections import OutputProjection, Values, is_transposed
from headprune.running import exact_attention

NewWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""``{module: (W [in, out], b [out] or None)}``; modules that keep their dense weights are not in it."""


class DenseWeights:
    """The dense weights of a model's projections. What is written into the model can be taken back to the bit.

    Args:
        projections: The output projections that may get other weights.
        values: The value projections that may, too.
    """

    def __init__(
        self, model: nn.Module, projections: Sequence[OutputProjection], values: Mapping[str, Values] | None = None
    ) -> None:
        self.model = model
        self._dense: dict[str, tuple[Tensor, Tensor | None]] = {
            p.name: (p.weight, p.bias if p.own_bias else None) for p in projections
        } | {v.name: (v.weight, v.bias) for v in (values or {}).values()}
        self.new_biases = [p.name for p in projections if p.has_bias and not p.own_bias]
        self._written: NewWeights = {}

    @contextmanager
    def replaced(self, weights: NewWeights) -> Iterator[None]:
        """The dense model with these weights, while the context lasts; then with those that it had before."""
        before = self._written
        self.write(weights)
        try:
            yield
        finally:
            self.write(before)

    def dense(self) -> Any:
        """A context in which the model is the dense one, whatever was written into it before."""
        return self.replaced({})

    def write(self, weights: NewWeights) -> None:
        """Write weights into the model, and the dense ones where these say nothing."""
        self._write({**{name: self._dense[name] for name in self._written}, **weights})
        self._written = dict(weights)

    def _write(self, weights: NewWeights) -> None:
        """Into the model; a bias that is None is removed, if the dense model has none."""
        new = [name for name in self.new_biases if name in weights]
        with torch.inference_mode(False), torch.no_grad(), exact_attention(self.model):
            remove_biases(self.model, [name for name in new if weights[name][1] is None])
            add_stored_biases(self.model, [name for name in new if weights[name][1] is not None])
            for name, (weight, bias) in weights.items():
                module: Any = self.model.get_submodule(name)
                _set(module, "weight", weight if is_transposed(module) else weight.T)
                if bias is not None and module.bias is not None:
                    _set(module, "bias", bias)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    if is_elsewhere(module, name):
        put(module, name, value, in_memory=True)  # there may be many such changes
    else:  # in place, since stand-ins share their weights with what they stand in for
        getattr(module, name).copy_(value)
