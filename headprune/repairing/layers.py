"""Repair steps that refit every layer by itself: its output projection, then the kept heads' values along with it.

**Output projections.** Each W_O that loses heads is fitted by ridge regression: from the kept heads' outputs to the
dense W_O's outputs.

**Values.** A head outputs ``A v``: its attention weights times its values. A new W_O can only reweight the kept heads'
old values, but these heads can read other values from the same tokens. With fixed attention weights the layer's output
is bilinear in the value projection and W_O, so either one is least squares with the other fixed, from the same second
moments. New values are made of a head's old ones and ``rank`` further directions of the value projection's input: those
that W_O uses most over all heads. What a head attends to along them is measured by running the model with them in place
of values (`headprune.repairing.directions`), so repair need not know how attention is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.repairing.calibration import Calibration
from headprune.repairing.directions import inputs_of_heads
from headprune.repairing.projections import FOLDS, Moments, OutputProjection, Values, centred
from headprune.repairing.results import LayerFit, LayerRepair, LeftOut, NewWeights, RepairWeights

OUTPUTS = "output projections"
ROUNDED = 1e-7  # share of the outputs' squares, summed in float32: errors that differ by less are equal
RIDGES = (1e-4, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # of the mean variance of an input


def refit_outputs(calibration: Calibration, drop: Heads, start: RepairWeights) -> RepairWeights:
    """New weights of every output projection that loses heads."""
    moments, fits = calibration.statistics.moments, dict[str, LayerFit]()
    for p in calibration.losing(drop):
        kept = p.kept(drop)
        make = partial(fit_output, moments[p.name], p, kept, calibration.ridge)
        fits[p.name] = calibration.fit(OUTPUTS, p, kept, make)
    return RepairWeights.of(fits, moments)


def fit_output(moments: Moments, projection: OutputProjection, kept: Tensor, ridge: float | None) -> LayerFit:
    """Fit one W_O to its kept inputs by ridge regression.

    Args:
        ridge: Strength of the ridge towards the old weights; infinite: keep these; None: the best by cross-validation,
            of `RIDGES` and infinity.
    """
    xx, xy, yy = moments.rows_of(kept)
    # On the sums' device: on the CPU, this took about half of a search with a GPU (Llama of 1B).
    old = projection.weight[kept.to(projection.weight.device)].to(xx.device), projection.bias.to(xx.device)
    chosen, held_out = ridge, None
    if chosen is None:
        tried = [_held_out(xx, xy, yy, old, projection.has_bias, r) for r in RIDGES]
        stays = sum(error(xx[i], xy[i], yy[i], *old) for i in range(FOLDS))
        held_out = min(stays, *tried)
        chosen = math.inf if stays <= min(tried) + ROUNDED * float(yy.sum()) else RIDGES[tried.index(min(tried))]
    all_xx, all_xy, all_yy = xx.sum(0), xy.sum(0), yy.sum(0)
    weight, bias = old if chosen == math.inf else _solved(all_xx, all_xy, old, projection.has_bias, chosen)
    unit = moments.spread()
    before, after = error(all_xx, all_xy, all_yy, *old), error(all_xx, all_xy, all_yy, weight, bias)
    facts = LayerRepair(before / unit, after / unit, chosen)
    whole = torch.zeros_like(projection.weight, device="cpu")
    whole[kept] = weight.cpu()

    def refit(some: Moments) -> LayerFit:
        return fit_output(some, projection, kept, chosen if some.seen else math.inf)

    return LayerFit(projection, whole, bias.cpu() if projection.has_bias else None, facts, held_out, refit)


def _held_out(xx: Tensor, xy: Tensor, yy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> float:
    """Squared error, summed over folds, of weights fitted on the other folds."""
    total = 0.0
    for i in range(FOLDS):
        if float(xx.sum(0)[-1, -1] - xx[i, -1, -1]) <= 0:
            return math.inf
        fitted = _solved(xx.sum(0) - xx[i], xy.sum(0) - xy[i], old, has_bias, ridge)
        total += error(xx[i], xy[i], yy[i], *fitted)
    return total


def _solved(xx: Tensor, xy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression towards the old weights, without a penalty on the bias: ``W [in, out]``, ``b [out]``."""
    a, c, mean_x, mean_y = centred(xx, xy, has_bias)
    weight, strength = old[0], ridge * float(a.diagonal().mean())
    if strength > 0:  # some input varies
        weight = torch.linalg.solve(a + strength * torch.eye(len(a)).to(a), c + strength * old[0])
    return weight, mean_y - mean_x @ weight if has_bias else old[1]


def error(xx: Tensor, xy: Tensor, yy: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Sum over tokens of ``|y - W x - b|^2``."""
    w = torch.cat([weight, bias[None]])
    return float(yy - 2 * (w * xy).sum() + (w * (xx @ w)).sum())


def downhill(error: Callable[[float], float], strengths: Sequence[float], start: int) -> tuple[float, float]:
    """The strength of least error, and that error; from index ``start`` as long as it falls (to its only minimum)."""
    at, least = start, error(strengths[start])
    for step in (-1, 1):
        while 0 <= at + step < len(strengths) and (now := error(strengths[at + step])) < least:
            at, least = at + step, now
        if at != start:
            break
    return strengths[at], least


VALUES = "values"
VALUE_RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0)  # of the mean variance of an input
_ROUNDS, _STEPS = 3, 8  # of alternation, and of conjugate gradients in each
_TRIED_ROUNDS, _TRIED_STEPS = 1, 6  # to compare ridges


def refit_values(calibration: Calibration, drop: Heads, start: RepairWeights) -> RepairWeights | LeftOut:
    """The weights ``start``, with values refitted in the layers where that does better on held-out tokens."""
    fits, statistics = dict(start.fits), calibration.statistics
    for name, output_fit in start.fits.items():
        projection, moments = output_fit.projection, statistics.moments[name]
        values, heads = calibration.values.get(name), projection.heads(drop)
        if values and heads:
            further = statistics.directions.along[name]
            make = partial(fit_values, moments, projection, values, heads, further, calibration.ridge)
            both = calibration.fit(VALUES, projection, projection.kept(drop), make)
            rounding = ROUNDED * float(moments.yy.sum())
            if both.held_out is None or output_fit.held_out is None or both.held_out < output_fit.held_out - rounding:
                fits[name] = both
    changed = any(each.mixes for each in fits.values())
    return RepairWeights.of(fits, statistics.moments) if changed else ""


def fit_values(
    moments: Moments,
    projection: OutputProjection,
    values: Values,
    heads: Sequence[int],
    further: Tensor,
    ridge: float | None,
) -> LayerFit:
    """Fit the kept heads' values together with W_O.

    It minimises ``mean_t |y_t - sum_h z_th T_g(h) O_h - b|^2 + ridge * (v |O - O_old|^2 + u sum_g |T_g - T_old|^2)``.
    z_th is what head h attends to (its old values, then the further directions), v and u are the mean variances of O's
    and T's inputs; heads of a group share T. O and T take turns: O by elimination, T by conjugate gradients; no turn is
    a loss.
    """
    rank = further.shape[1]
    index = inputs_of_heads(projection, values, heads, rank)
    xx, xy, yy = moments.rows_of(index.flatten())  # solved on the sums' device, as in `fit_output`
    start = _ValueSolver(projection, values, heads, rank, xx.device)
    all_xx, all_xy, all_yy = xx.sum(0), xy.sum(0), yy.sum(0)
    chosen, held_out = ridge, None
    if chosen is None:
        folds = [(all_xx - xx[i], all_xy - xy[i]) for i in range(FOLDS)]
        enough = all(float(rest[0][-1, -1]) > 0 for rest in folds)
        sums = [start.sums(*rest).single() for rest in folds] if enough else []

        def held_out_error(strength: float) -> float:
            total = 0.0 if sums else math.inf
            for i, those in enumerate(sums):
                tried = (t.double() for t in start.solve(those, strength, _TRIED_ROUNDS, _TRIED_STEPS))
                total += start.error(xx[i], xy[i], yy[i], *tried)
            return total

        chosen, held_out = downhill(held_out_error, VALUE_RIDGES, len(VALUE_RIDGES) // 2)
    solution = start.solve(start.sums(all_xx, all_xy), chosen, _ROUNDS, _STEPS)
    before = start.error(all_xx, all_xy, all_yy, start.mix, start.out, start.bias)
    after = start.error(all_xx, all_xy, all_yy, *solution)
    mix, out, bias, owner = (t.cpu() for t in (*solution, start.owner))
    facts = LayerRepair(before / moments.spread(), after / moments.spread(), chosen, values=True)
    whole = torch.zeros_like(projection.weight, device="cpu")
    whole[values.columns[list(heads)].flatten()] = out.flatten(0, 1)
    mixes = {h: mix[owner[i]] for i, h in enumerate(heads)}

    def refit(some: Moments) -> LayerFit:
        if some.seen:
            return fit_values(some, projection, values, heads, further, chosen)
        kept = values.columns[list(heads)].flatten().sort().values
        return fit_output(some, projection, kept, math.inf)

    free, of_values = bias if projection.has_bias else None, partial(value_projection_weights, values, mixes, further)
    return LayerFit(projection, whole, free, facts, held_out, refit, mixes, of_values)


def value_projection_weights(values: Values, mixes: Mapping[int, Tensor], further: Tensor) -> NewWeights:
    """The value projection's new weights and bias, from its heads' `LayerFit.mixes`."""
    weight, bias = values.weight.cpu().clone(), None if values.bias is None else values.bias.cpu().clone()
    for head, mix in mixes.items():
        at = values.features[values.owner[head]]
        own, other = mix[: len(at)], mix[len(at) :]
        weight[:, at] = values.weight.cpu()[:, at] @ own + further @ other
        if bias is not None and values.bias is not None:
            bias[at] = values.bias.cpu()[at] @ own
    return {values.name: (weight, bias)}


@dataclass(frozen=True)
class _Sums:
    """The second moments that a fit of values needs.

    Attributes:
        a, c: Second moments per token, around the means, ``[heads, wide, heads, wide]`` and ``[heads, wide, out]``.
        mean_x, mean_y: Of inputs and outputs.
        var, own: Mean variance of the inputs, and of those that are old values.
        left, turn: By group, eigenvalues and eigenvectors of the mean of its heads' diagonal blocks of ``a``.
    """

    a: Tensor
    c: Tensor
    mean_x: Tensor
    mean_y: Tensor
    var: float
    own: float
    left: Tensor
    turn: Tensor

    def single(self) -> _Sums:
        """In float32, which is enough to compare strengths."""
        parts = {k: v.float() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return _Sums(**parts, var=self.var, own=self.own)


class _ValueSolver:
    """Alternating least squares for the kept heads' values and W_O, from the old ones."""

    def __init__(
        self, projection: OutputProjection, values: Values, heads: Sequence[int], rank: int, device: torch.device
    ) -> None:
        width = values.head_dim
        kept = list(dict.fromkeys(values.owner[h] for h in heads))
        self.has_bias, self.bias = projection.has_bias, projection.bias.to(device)
        self.owner = torch.tensor([kept.index(values.owner[h]) for h in heads], device=device)
        own = values.columns[list(heads)].to(projection.weight.device)
        self.out = projection.weight[own].to(device)  # [heads, head_dim, out]
        # [groups, wide, head_dim]
        self.mix = torch.eye(width + rank, width, dtype=torch.float64, device=device).repeat(len(kept), 1, 1)

    def error(self, xx: Tensor, xy: Tensor, yy: Tensor, mix: Tensor, out: Tensor, bias: Tensor) -> float:
        """Squared error summed over tokens, from sums over tokens of inputs with an appended 1."""
        each, size = mix[self.owner], out.shape[0] * out.shape[1]
        (heads, wide, _), small = each.shape, xx.new_zeros(size + 1, size + 1)
        small[:-1, :-1] = self._squared(xx[:-1, :-1].reshape(heads, wide, heads, wide), each)
        small[:-1, -1] = small[-1, :-1] = torch.einsum("adf,ad->af", each, xx[:-1, -1].view(heads, wide)).flatten()
        small[-1, -1] = xx[-1, -1]
        wanted = torch.einsum("adf,ado->afo", each, xy[:-1].view(heads, wide, -1)).flatten(0, 1)
        return error(small, torch.cat([wanted, xy[-1:]]), yy, out.flatten(0, 1), bias)

    def sums(self, xx: Tensor, xy: Tensor) -> _Sums:
        """The second moments, from sums over tokens of inputs with an appended 1."""
        a, c, mean_x, mean_y = centred(xx, xy, self.has_bias)
        heads, wide, width = len(self.owner), self.mix.shape[1], self.out.shape[1]
        a, c = a.view(heads, wide, heads, wide), c.view(heads, wide, -1)
        var = a.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1)  # [heads, wide]
        blocks = torch.stack([a[i, :, i] for i in range(heads)])
        grouped = a.new_zeros(len(self.mix), wide, wide).index_add(0, self.owner, blocks)
        left, turn = torch.linalg.eigh(grouped / torch.bincount(self.owner)[:, None, None])
        return _Sums(a, c, mean_x, mean_y, float(var.mean()), float(var[:, :width].mean()), left, turn)

    def solve(self, sums: _Sums, ridge: float, rounds: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mixes ``[groups, wide, head_dim]``, weights ``[heads, head_dim, out]`` and bias ``[out]`` after some rounds."""
        mix, out = self.mix.to(sums.a), self.out.to(sums.a)
        if sums.own > 0:
            # From the old weights: if the strength changed between turns, a turn could increase the error.
            strength = ridge * sums.var * float(self.out.square().sum(2).mean()) * len(self.owner) / len(mix)
            for _ in range(rounds):
                out = self._out(sums, mix, ridge * sums.own)
                mix = self._mix(sums, mix, out, strength, steps)
            out = self._out(sums, mix, ridge * sums.own)
        product: Tensor = mix[self.owner] @ out  # from the widened inputs to the layer's output
        bias = sums.mean_y - sums.mean_x @ product.flatten(0, 1) if self.has_bias else self.bias
        return mix, out, bias

    @staticmethod
    def _squared(a: Tensor, each: Tensor) -> Tensor:
        """Second moments of the heads' outputs, from those of what they attend to."""
        half = torch.einsum("adbe,bef->adbf", a, each)
        return torch.einsum("adg,adbf->agbf", each, half).flatten(2).flatten(0, 1)

    def _out(self, sums: _Sums, mix: Tensor, strength: float) -> Tensor:
        each = mix[self.owner]
        square = self._squared(sums.a, each)
        right = torch.einsum("adf,ado->afo", each, sums.c).flatten(0, 1) + strength * self.out.to(square).flatten(0, 1)
        solution: Tensor = torch.linalg.solve(square + strength * torch.eye(len(square)).to(square), right)
        return solution.view_as(self.out)

    def _mix(self, sums: _Sums, mix: Tensor, out: Tensor, strength: float, steps: int) -> Tensor:
        pairs = torch.einsum("afo,bgo->afbg", out, out)

        def by_group(parts: Tensor) -> Tensor:
            return torch.zeros_like(mix).index_add(0, self.owner, parts)

        def applied(x: Tensor) -> Tensor:
            mixed = torch.einsum("bef,bfag->beag", x[self.owner], pairs)
            return by_group(torch.einsum("adbe,beag->adg", sums.a, mixed)) + strength * x

        # The preconditioner is the operator for heads that are uncorrelated, within a group and between groups.
        outputs = out.new_zeros(len(mix), *(out.shape[1],) * 2).index_add(0, self.owner, out @ out.mT)
        right, spin = torch.linalg.eigh(outputs)
        turn = sums.turn
        scale = sums.left.clamp(min=0)[:, :, None] * right.clamp(min=0)[:, None, :] + max(strength, 1e-30)

        def near(x: Tensor) -> Tensor:
            scaled: Tensor = turn @ ((turn.mT @ x @ spin) / scale) @ spin.mT
            return scaled

        rest = by_group(torch.einsum("ado,afo->adf", sums.c, out)) + strength * self.mix.to(mix) - applied(mix)
        step = z = near(rest)
        size = (rest * z).sum()
        for _ in range(steps):
            if float(size) <= 1e-30 * float(mix.square().sum()):
                break
            moved = applied(step)
            along = size / (step * moved).sum()
            mix, rest = mix + along * step, rest - along * moved
            z = near(rest)
            now = (rest * z).sum()
            step, size = z + now / size * step, now
        return mix
