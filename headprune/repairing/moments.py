"""Sums over tokens that layers are refitted from: second moments of an output projection's inputs, and of its outputs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from headprune.offload import on_disk
from headprune.parallel import current

FOLDS = 2
_ROUNDED = 1e-12  # of a square: a variance below it is rounding


class Moments:
    """Sums over tokens, by fold: of W_O's inputs with a 1 behind them, and of the outputs that are wanted.

    Args:
        device: Where they are; None keeps them in files, for models whose weights are not all in memory either.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | None) -> None:
        place = torch.device("cpu") if device is None or device.type == "mps" else device  # mps has no float64

        def zeros(*shape: int) -> Tensor:
            return on_disk(*shape) if device is None else torch.zeros(shape, dtype=torch.float64, device=place)

        self.xx, self.xy = zeros(FOLDS, inputs + 1, inputs + 1), zeros(FOLDS, inputs + 1, outputs)
        self.yy = torch.zeros(FOLDS, dtype=torch.float64, device=place)

    def add(self, fold: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Tokens ``x`` [tokens, in] and ``y`` [tokens, out], with a weight each."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = torch.cat([x.to(wide), x.new_ones(len(x), 1, dtype=wide)], dim=1)
        y, weight = y.to(wide), weight.to(wide)[:, None]
        weighted = (x * weight).T
        self.xx[fold] += (weighted @ x).to(self.xx)
        self.xy[fold] += (weighted @ y).to(self.xy)
        self.yy[fold] += (y**2 * weight).sum().to(self.yy)

    def add_ranks(self, name: str) -> None:
        """Add what other ranks have seen (`headprune.parallel`); ``name`` is these sums'."""
        current().add(f"statistics of {name}", [self.xx, self.xy, self.yy])

    def rows_of(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """What concerns the inputs that stay, and the 1 behind them."""
        both = torch.cat([kept, torch.tensor([self.xx.shape[-1] - 1])]).to(self.xx.device)
        return self.xx[:, both][:, :, both], self.xy[:, both]

    def only(self, fold: int) -> Moments:
        """Of one fold's tokens: for fits of a strength that is given."""
        found = copy.copy(self)
        found.xx, found.xy, found.yy = (m[fold : fold + 1] for m in (self.xx, self.xy, self.yy))
        return found

    @property
    def seen(self) -> bool:
        """Whether there were tokens that matter."""
        return bool(self.xx[:, -1, -1].sum() > 0)

    def spread(self) -> float:
        """Variance of the outputs, summed over tokens; of outputs that never change, their square."""
        xy, tokens = self.xy.sum(0), self.xx[:, -1, -1].sum()
        square = float(self.yy.sum())
        around = square - float(tokens * (xy[-1] / tokens).square().sum())
        return around if around > _ROUNDED * square else max(square, 1e-30)


def centred(xx: Tensor, xy: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Second moments ``[in, in]`` and ``[in, out]`` per token, and the means of inputs and outputs."""
    tokens = xx[-1, -1]
    mean_x, mean_y = (xx[-1, :-1] / tokens, xy[-1] / tokens)
    if not has_bias:  # nothing may be taken out that nothing can put back
        return xx[:-1, :-1] / tokens, xy[:-1] / tokens, mean_x, mean_y
    a, c = xx[:-1, :-1] / tokens - torch.outer(mean_x, mean_x), xy[:-1] / tokens - torch.outer(mean_x, mean_y)
    if float(a.diagonal().sum()) <= _ROUNDED * float(xx[:-1, :-1].diagonal().sum() / tokens):
        a, c = torch.zeros_like(a), torch.zeros_like(c)  # inputs that never change: what is left is rounding
    return a, c, mean_x, mean_y
