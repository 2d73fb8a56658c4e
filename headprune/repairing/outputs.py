"""The first step of a repair: every output projection that loses heads fitted for itself, by ridge regression.

It is fitted to give what the dense model's gives, on what the kept heads hand on there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.repairing.calibration import Calibration
from headprune.repairing.moments import FOLDS, Moments, centred
from headprune.repairing.projections import OutputProjection
from headprune.repairing.results import LayerFit, LayerRepair, RepairWeights

NAME = "output projections"
ROUNDED = 1e-7  # of the outputs' squares, which are summed in float32: errors that differ by less are equal
RIDGES = (1e-4, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # of the mean variance of an input


def fit(calibration: Calibration, drop: Heads, start: RepairWeights) -> RepairWeights:
    """RepairWeights of every output projection that loses heads."""
    fits = {p.name: fit_of(calibration, p, drop) for p in calibration.losing(drop)}
    return RepairWeights.of(fits, calibration.statistics.moments)


def fit_of(calibration: Calibration, projection: OutputProjection, drop: Heads) -> LayerFit:
    """The fit of one output projection."""
    kept, moments = projection.kept(drop), calibration.statistics.moments[projection.name]
    return calibration.fit(NAME, projection, kept, lambda: fit_output(moments, projection, kept, calibration.ridge))


def fit_output(moments: Moments, projection: OutputProjection, kept: Tensor, ridge: float | None) -> LayerFit:
    """The best weights for the inputs that stay.

    Args:
        ridge: Strength of the pull towards the old weights; infinite for the old weights; by default the best one of `RIDGES`
            by cross-validation, or the old weights.
    """
    xx, xy = (m.cpu() for m in moments.rows_of(kept))
    yy = moments.yy.cpu()
    old = projection.weight.cpu()[kept], projection.bias.cpu()
    chosen, held_out = ridge, None
    if chosen is None:
        tried = [_held_out(xx, xy, yy, old, projection.has_bias, r) for r in RIDGES]
        stays = sum(error(xx[i], xy[i], yy[i], *old) for i in range(FOLDS))
        held_out = min(stays, *tried)
        chosen = math.inf if stays <= min(tried) + ROUNDED * float(yy.sum()) else RIDGES[tried.index(min(tried))]
    all_xx, all_xy, all_yy = xx.sum(0), xy.sum(0), yy.sum(0)
    weight, bias = old if chosen == math.inf else _solved(all_xx, all_xy, old, projection.has_bias, chosen)
    unit = moments.spread()
    facts = LayerRepair(
        error(all_xx, all_xy, all_yy, *old) / unit, error(all_xx, all_xy, all_yy, weight, bias) / unit, chosen
    )
    whole = torch.zeros_like(projection.weight, device="cpu")
    whole[kept] = weight

    def again(some: Moments) -> LayerFit:
        return fit_output(some, projection, kept, chosen if some.seen else math.inf)

    return LayerFit(projection, whole, bias if projection.has_bias else None, facts, held_out, again)


def _held_out(xx: Tensor, xy: Tensor, yy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> float:
    """Squared error on every fold of what was fitted on the others."""
    found = 0.0
    for i in range(FOLDS):
        if float(xx.sum(0)[-1, -1] - xx[i, -1, -1]) <= 0:
            return math.inf
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
