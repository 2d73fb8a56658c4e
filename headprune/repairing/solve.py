"""Sums over tokens, and the ridge regressions that are solved from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headprune.repairing.places import OutputProjection
from headprune.repairing.weights import LayerRepair

RIDGES = (1e-4, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # of the mean variance of an input
FOLDS = 2
_ROUNDED = 1e-12  # of a square: a variance below it is rounding


class Moments:
    """Sums over tokens, by fold: of W_O's inputs with a 1 behind them, and of the outputs that are wanted."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        place = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
        self.xx = torch.zeros(FOLDS, inputs + 1, inputs + 1, dtype=torch.float64, device=place)
        self.xy = torch.zeros(FOLDS, inputs + 1, outputs, dtype=torch.float64, device=place)
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

    def rows_of(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """What concerns the inputs that stay, and the 1 behind them."""
        both = torch.cat([kept, torch.tensor([self.xx.shape[-1] - 1])]).to(self.xx.device)
        return self.xx[:, both][:, :, both], self.xy[:, both]

    def only(self, fold: int) -> Moments:
        """Of one fold's tokens: for fits of a strength that is given."""
        found = copy.copy(self)
        found.xx, found.xy, found.yy = (m[fold : fold + 1] for m in (self.xx, self.xy, self.yy))
        return found

    def spread(self) -> float:
        """Variance of the outputs, summed over tokens; of outputs that never change, their square."""
        xy, tokens = self.xy.sum(0), self.xx[:, -1, -1].sum()
        square = float(self.yy.sum())
        around = square - float(tokens * (xy[-1] / tokens).square().sum())
        return around if around > _ROUNDED * square else max(square, 1e-30)


@dataclass(frozen=True)
class Fit:
    """New weights of one W_O.

    Attributes:
        weight: ``[in, out]``, with rows of zeros for inputs that go.
        bias: ``[out]``; None where there can be none.
        facts: How well it fits.
        held_out: Squared error on every fold of what was fitted to the others; None where the ridge was given.
        mixes: Of every kept head, its new values' make (`Weights.mixes`); empty where values stay as they are.
    """

    weight: Tensor
    bias: Tensor | None
    facts: LayerRepair
    held_out: float | None
    mixes: dict[int, Tensor] = field(default_factory=dict)


def fit_output(moments: Moments, place: OutputProjection, kept: Tensor, ridge: float | None) -> Fit:
    """The best weights for the inputs that stay."""
    xx, xy = (m.cpu() for m in moments.rows_of(kept))
    yy = moments.yy.cpu()
    old = place.weight.cpu()[kept], place.bias.cpu()
    chosen, held_out = ridge, None
    if chosen is None:
        tried = [_held_out(xx, xy, yy, old, place.has_bias, r) for r in RIDGES]
        stays = sum(error(xx[i], xy[i], yy[i], *old) for i in range(FOLDS))
        held_out = min(stays, *tried)
        chosen = float("inf") if stays <= min(tried) else RIDGES[tried.index(min(tried))]
    all_xx, all_xy, all_yy = xx.sum(0), xy.sum(0), yy.sum(0)
    weight, bias = old if chosen == float("inf") else _solved(all_xx, all_xy, old, place.has_bias, chosen)
    unit = moments.spread()
    facts = LayerRepair(
        error(all_xx, all_xy, all_yy, *old) / unit, error(all_xx, all_xy, all_yy, weight, bias) / unit, chosen
    )
    whole = torch.zeros_like(place.weight, device="cpu")
    whole[kept] = weight
    return Fit(whole, bias if place.has_bias else None, facts, held_out)


def _held_out(xx: Tensor, xy: Tensor, yy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> float:
    """Squared error on every fold of what was fitted on the others."""
    found = 0.0
    for i in range(FOLDS):
        if float(xx.sum(0)[-1, -1] - xx[i, -1, -1]) <= 0:
            return float("inf")
        fitted = _solved(xx.sum(0) - xx[i], xy.sum(0) - xy[i], old, has_bias, ridge)
        found += error(xx[i], xy[i], yy[i], *fitted)
    return found


def _solved(xx: Tensor, xy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression towards the old weights, the bias free: ``W [in, out]``, ``b [out]``."""
    a, c, mean_x, mean_y = centred(xx, xy, has_bias)
    if not len(a):
        return old[0], mean_y if has_bias else old[1]
    strength = ridge * float(a.diagonal().mean())
    if strength <= 0:  # inputs that never change
        return old[0], mean_y - mean_x @ old[0] if has_bias else old[1]
    weight = torch.linalg.solve(a + strength * torch.eye(len(a), dtype=a.dtype), c + strength * old[0])
    return weight, mean_y - mean_x @ weight if has_bias else old[1]


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


def error(xx: Tensor, xy: Tensor, yy: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Sum over tokens of ``|y - W x - b|^2``."""
    w = torch.cat([weight, bias[None]])
    return float(yy - 2 * (w * xy).sum() + (w * (xx @ w)).sum())


def downhill(error: Callable[[float], float], strengths: Sequence[float], start: int) -> tuple[float, float]:
    """The strength of least error, and that error: from number ``start`` on as long as it falls, since there is one valley."""
    at, least = start, error(strengths[start])
    for step in (-1, 1):
        while 0 <= at + step < len(strengths) and (now := error(strengths[at + step])) < least:
            at, least = at + step, now
        if at != start:
            break
    return strengths[at], least
