"""Along which directions output projections are moved together: the few thousand that the answers' gradients are longest along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.inputs import doubled, gathered
from headprune.repairing.projections import at

MOST = 4096  # coordinates, of all projections together
_WIDEST = 256  # eigenvectors of a projection's inputs, and of its outputs, that products are taken of
_MOST_GRADIENTS = 1 << 28  # bytes of gradients at once

Parts = dict[str, tuple[Tensor, Tensor]]
"""By output projection, of some examples: inputs ``[examples, tokens, in]`` and slopes ``[directions, examples, tokens, out]``."""


@dataclass(frozen=True)
class Coordinates:
    """Orthonormal directions in the space of several matrices ``[in, out]``.

    Each is an outer product of a direction of inputs and a direction of outputs.

    Attributes:
        inputs: By matrix, orthonormal ``[in, some]``.
        outputs: By matrix, orthonormal ``[out, some]``.
        chosen: By matrix, the products that are taken ``[own]``: ``i * (outputs' some) + j`` is of i and j.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    chosen: Mapping[str, Tensor]

    def of(self, parts: Parts) -> Tensor:
        """The gradients ``sum_t x_t s_t^T`` along these, ``[examples * directions, coordinates]`` on the CPU; an example's stand together."""
        found = []
        for name, own in self.chosen.items():
            products = self._products(name, parts[name])
            found.append(torch.cat([some.flatten(1)[:, at(own, some.device)] for some in products]))
        return gathered(found, dim=1)

    def matrices(self, change: Tensor) -> dict[str, Tensor]:
        """What a change along them ``[coordinates]`` is of every matrix, ``[in, out]`` in float64."""
        found = {}
        for name, own in zip(self.chosen, torch.split(change, [len(c) for c in self.chosen.values()]), strict=True):
            left, right = self.inputs[name], self.outputs[name]
            core = own.new_zeros(left.shape[1] * right.shape[1])
            core[self.chosen[name]] = own
            found[name] = left.double() @ core.view(left.shape[1], right.shape[1]) @ right.double().T
        return found

    def _products(self, name: str, part: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        """All gradients of one matrix, turned ``[rows, some, some]``, as many at once as there is room for."""
        x, slopes = part
        left, right = at(self.inputs[name], x.device).to(x.dtype), at(self.outputs[name], x.device).to(x.dtype)
        each = 4 * len(slopes) * left.shape[1] * right.shape[1]
        size = max(1, _MOST_GRADIENTS // max(1, each))
        for some, own in zip(torch.split(x, size), torch.split(slopes, size, dim=1), strict=True):
            yield torch.einsum("nti,pnto->npio", some @ left, own @ right).flatten(0, 1)


def longest(parts: Sequence[Parts], most: int = MOST) -> Coordinates:
    """The coordinates that some examples' gradients are longest along.

    In the Kronecker-factored eigenbasis (George et al. 2018, arXiv:1806.03884): products of eigenvectors of the second moments
    of inputs, and of slopes. There few coordinates carry most of the gradients' length.
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
    chosen = {
        name: best[(best >= start) & (best < start + size)] - start
        for name, start, size in zip(names, first.tolist(), sizes, strict=False)
    }
    return Coordinates(inputs, outputs, chosen)


def _eigenvectors(values: Sequence[Tensor]) -> Tensor:
    """Of the second moments of values ``[..., wide]``, those of the largest eigenvalues first."""
    moments = doubled(values[0].new_zeros(values[0].shape[-1], values[0].shape[-1]))
    for each in values:
        flat = each.flatten(0, -2)
        moments += doubled(flat.T @ flat)
    moments = moments.cpu()
    # What is not finite has no axes; it shows in the gradients themselves.
    moments = moments.nan_to_num(0.0, 0.0, 0.0)
    found: Tensor = torch.linalg.eigh(moments)[1].flip(1)[:, :_WIDEST]
    return found
