"""Coordinates of a change of several matrices: the few along which gradients are longest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.inputs import doubled, gathered
from headprune.repairing.projections import at

_WIDEST = 256  # eigenvectors of a layer's inputs, and of its outputs; coordinates are their products
_MOST_SOLVED = 512  # inputs, or outputs: of more, the eigenvectors are found by `_ITERATIONS`
_ITERATIONS = 3
_MOST_GRADIENTS = 1 << 28  # bytes of gradients at once

Parts = dict[str, tuple[Tensor, Tensor]]
"""By linear layer: inputs ``[examples, tokens, in]`` and slopes ``[directions, examples, tokens, out]``."""


@dataclass(frozen=True)
class Coordinates:
    """Orthonormal directions in the space of several matrices ``[in, out]``.

    Each is an outer product of a direction of inputs and a direction of outputs.

    Attributes:
        inputs: By matrix, orthonormal ``[in, some]``.
        outputs: By matrix, orthonormal ``[out, some]``.
        chosen: By matrix, indices of the products in use ``[own]``: ``i * (outputs' some) + j`` is of i and j.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    chosen: Mapping[str, Tensor]

    def of(self, parts: Parts) -> Tensor:
        """Gradients ``sum_t x_t s_t^T`` in these coordinates, ``[examples * directions, coordinates]`` on the CPU."""
        gradients = []
        for name, own in self.chosen.items():
            products = self._products(name, parts[name])
            gradients.append(torch.cat([some.flatten(1)[:, at(own, some.device)] for some in products]))
        return gathered(gradients, dim=1)

    def matrices(self, change: Tensor) -> dict[str, Tensor]:
        """A change in these coordinates ``[coordinates]`` as a change of every matrix, ``[in, out]`` in float64."""
        result = {}
        for name, own in zip(self.chosen, torch.split(change, [len(c) for c in self.chosen.values()]), strict=True):
            left, right = self.inputs[name], self.outputs[name]
            core = own.new_zeros(left.shape[1] * right.shape[1])
            core[self.chosen[name]] = own
            result[name] = left @ core.view(left.shape[1], right.shape[1]) @ right.T
        return result

    def without_unused(self) -> Coordinates:
        """The same, without directions that are in no product."""
        inputs, outputs, chosen = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for name, own in self.chosen.items():
            wide = self.outputs[name].shape[1]
            (left, i), (right, j) = _numbered(own // wide), _numbered(own % wide)
            inputs[name], outputs[name] = self.inputs[name][:, left], self.outputs[name][:, right]
            chosen[name] = i * len(right) + j
        return Coordinates(inputs, outputs, chosen)

    def _products(self, name: str, part: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        """One matrix's gradients in its eigenvector bases, ``[rows, some, some]``, in parts that fit into memory."""
        x, slopes = part
        left, right = (at(bases[name], x.device, x.dtype) for bases in (self.inputs, self.outputs))
        each = 4 * len(slopes) * left.shape[1] * right.shape[1]
        size = max(1, _MOST_GRADIENTS // max(1, each))
        for some, own in zip(torch.split(x, size), torch.split(slopes, size, dim=1), strict=True):
            yield torch.einsum("nti,pnto->npio", some @ left, own @ right).flatten(0, 1)


def _numbered(values: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones of some numbers in order, and the place of each number among them."""
    used = values.bincount() > 0
    return used.nonzero().flatten(), (used.cumsum(0) - 1)[values]


def choose_coordinates(parts: Sequence[Parts], most: int) -> Coordinates:
    """The ``most`` coordinates along which some examples' gradients are longest.

    They are chosen in the Kronecker-factored eigenbasis (George et al. 2018, arXiv:1806.03884): products of
    eigenvectors of the second moments of inputs and of slopes. There, few coordinates carry most of the gradients'
    length.
    """
    names = list(parts[0])
    inputs = {name: _eigenvectors([p[name][0] for p in parts]) for name in names}
    outputs = {name: _eigenvectors([p[name][1] for p in parts]) for name in names}
    every = Coordinates(inputs, outputs, {name: torch.arange(0) for name in names})
    lengths = []
    for name in names:
        total = torch.zeros(inputs[name].shape[1], outputs[name].shape[1], device=parts[0][name][0].device)
        for part in parts:
            for some in every._products(name, part[name]):
                total += some.square().sum(0)
        lengths.append(total.flatten())
    sizes = [len(own) for own in lengths]
    first = torch.tensor([0, *sizes]).cumsum(0)
    best = gathered(lengths).topk(min(most, sum(sizes))).indices.sort().values
    spans = zip(names, first.tolist(), sizes, strict=False)
    chosen = {name: best[(best >= start) & (best < start + size)] - start for name, start, size in spans}
    return Coordinates(inputs, outputs, chosen).without_unused()


def _eigenvectors(values: Sequence[Tensor]) -> Tensor:
    """Eigenvectors of the second moments of values ``[..., wide]``, largest eigenvalues first."""
    moments = doubled(values[0].new_zeros(values[0].shape[-1], values[0].shape[-1]))
    for each in values:
        flat = each.flatten(0, -2)
        moments += doubled(flat.T @ flat)
    # Values that are not finite have no eigenvectors; `gauss_newton` refuses their gradients.
    moments = moments.nan_to_num(0.0, 0.0, 0.0)
    if len(moments) > _MOST_SOLVED:
        # The first ones nearly, by subspace iteration (Halko et al. 2011, SIAM Review 53:217): all of them would take minutes.
        found = torch.randn(len(moments), _WIDEST, generator=torch.Generator().manual_seed(0), dtype=moments.dtype)
        for _ in range(_ITERATIONS):
            found = torch.linalg.qr(moments @ found.to(moments))[0]
        return found.cpu()
    vectors: Tensor = torch.linalg.eigh(moments)[1].flip(1)[:, :_WIDEST]
    return vectors.cpu()
