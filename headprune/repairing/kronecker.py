"""The last step of a repair where an example has many answers, such as one for every token: a natural-gradient step.

As in `headprune.repairing.gauss_newton`, all linear layers move together towards the dense model's answers, but there are far
too many answers for a system of equations. So the direction is K-FAC's (Martens and Grosse 2015, arXiv:1503.05671): the Fisher
information of a layer is taken for the Kronecker product of the second moments of its inputs and of the slopes at its outputs, and
that of two layers for zero. That makes the step far too long, so `headprune.repairing.steps` searches its length by the divergence itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.batches import is_out_of_memory
from headprune.divergence import Divergence, logits_of, real_tokens
from headprune.errors import HeadPruneError
from headprune.inputs import model_device
from headprune.offload import is_offloaded, on_disk
from headprune.parallel import current
from headprune.repairing.calibration import WEIGHTS_OF_TOKEN, Calibration, folds_of
from headprune.repairing.examples import probe_of
from headprune.repairing.gauss_newton import Places, weights_of
from headprune.repairing.projections import FOLDS
from headprune.repairing.results import AnswersRepair, AnswersStep, Changes, RepairWeights
from headprune.repairing.runner import Runner

_DAMPING = 0.1  # of the mean variance of an input, and of a slope
_TOKENS = 8  # per kept input of the widest W_O: so many at least are looked at, and so many
_MANY = 2048  # in any case


class _Factors:
    """Sums over the tokens of a linear layer's calls, by fold.

    A side wider than `wide` has the diagonal of its second moments alone: its matrix would be larger than the weights.

    Args:
        inputs: Number of kept inputs.
        outputs: Number of outputs.
        has_bias: Whether the bias changes too: then inputs have an appended 1.
        wide: The widest side of an output projection.
        folds: How many folds are told apart.
        zeros: Makes the sums.

    Attributes:
        xx: Second moments of the inputs.
        xg: Of the inputs with the slopes of the divergence at the outputs ``[folds, in (+ 1), out]``.
        ss: Second moments of the slopes there of a random projection of the answers (`probe_of`).
        tokens, drawn: Numbers of tokens in the first two sums, and in the last one ``[folds]``.
    """

    def __init__(
        self, inputs: int, outputs: int, has_bias: bool, wide: int, folds: int, zeros: Callable[..., Tensor]
    ) -> None:
        self.has_bias, rows = has_bias, inputs + has_bias
        self.xx, self.ss = (zeros(folds, side, *([side] if side <= wide + 1 else [])) for side in (rows, outputs))
        self.xg = zeros(folds, rows, outputs)
        self.tokens, self.drawn = torch.zeros(folds), torch.zeros(folds)

    def add(self, fold: int, x: Tensor, slope: Tensor, random: Sequence[Tensor]) -> None:
        """Add tokens: inputs ``[tokens, in]``, slopes of the divergence ``[tokens, out]``, and those of a random projection, or none."""
        fold %= len(self.tokens)
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, slope = x.to(kind), slope.to(kind)
        if self.has_bias:
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        self.xg[fold] += (x.T @ slope).to(self.xg)
        self.tokens[fold] += len(x)
        _add_moments(self.xx[fold], x)
        for each in random:
            _add_moments(self.ss[fold], each.to(kind))
            self.drawn[fold] += len(each)

    @property
    def all(self) -> list[Tensor]:
        return [self.xx, self.xg, self.ss, self.tokens, self.drawn]

    def slope_and_curvature(self, step: Tensor) -> tuple[float, float]:
        """The slope of the divergence along a step, and K-FAC's curvature along it, per token."""
        xx, xg, ss, tokens, drawn = (each.sum(0) for each in self.all)
        along = _times(xx / tokens.clamp(min=1), _times(ss / drawn.clamp(min=1), step.T).T)
        return float((step * xg).sum() / tokens.clamp(min=1)), float((step * along).sum())


def _add_moments(sums: Tensor, x: Tensor) -> None:
    sums += (x.T @ x if sums.ndim == 2 else x.square().sum(0)).to(sums)


def _times(moments: Tensor, matrix: Tensor) -> Tensor:
    return torch.mm(moments, matrix) if moments.ndim == 2 else moments[:, None] * matrix


def _solve(moments: Tensor, matrix: Tensor) -> Tensor:
    """``moments⁻¹ matrix``, with `_DAMPING`."""
    if moments.ndim == 1:
        return matrix / (moments + _DAMPING * moments.mean())[:, None]
    damped = moments + _DAMPING * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)
    result: Tensor = torch.linalg.solve(damped, matrix)
    return result


def _step(factors: Sequence[_Factors], fold: int | None = None) -> Tensor:
    """K-FAC's change of weights ``[kept inputs (+ 1 for the bias), out]``, from the sums over several sets of examples."""
    part = slice(None) if fold is None else slice(fold, fold + 1)
    sums = zip(*(own.all for own in factors), strict=True)
    xx, xg, ss, tokens, drawn = (torch.stack([own[part].sum(0) for own in each]).sum(0) for each in sums)
    if not bool(xx.any() & ss.any()):
        return torch.zeros_like(xg)
    # Outputs may be of fewer sets of examples (`_Look._sums`).
    left, right = xx / tokens.clamp(min=1), ss / drawn.clamp(min=1)
    return -_solve(right, _solve(left, xg / tokens.clamp(min=1)).T).T


Sums = Mapping[str, _Factors]
"""By linear layer."""


def natural_gradient(calibration: Calibration, drop: Heads, start: RepairWeights, places: Places) -> AnswersStep | None:
    """One step from the weights ``start`` towards the dense model's answers, however many an example has.

    Its length is a guess: K-FAC's own, as if all layers moved the answers alike.

    Returns:
        None if the divergence has no slope.
    """
    return _Look(calibration, drop, start, places, calibration.runner).step()


class _Look:
    """A look at some of a runner's examples with the weights ``start``."""

    def __init__(
        self, calibration: Calibration, drop: Heads, start: RepairWeights, places: Places, runner: Runner
    ) -> None:
        self.calibration, self.drop, self.start, self.places = calibration, drop, start, places
        self.runner, self.divergence = runner, Divergence(calibration.model, seed=0)
        self.divergence.rows = runner.rows

    def step(self) -> AnswersStep | None:
        """The step. If the calibration has others, it is fitted to them too."""
        sums, examples = self._sums(self._some())
        more, others = self._sums_of_others()
        alone = {name: _step([each]) for name, each in sums.items()}
        both = {name: _step([each, more[name]]) for name, each in sums.items()} if others else alone
        facts = AnswersRepair(math.nan, math.nan, _DAMPING, examples + others)  # the search of its length measures both

        @cache
        def on_half(fold: int) -> Mapping[str, Tensor]:
            return {name: _step([each], fold) for name, each in sums.items()}

        def step_of(names: Collection[str]) -> AnswersStep | None:
            slopes, curvatures = zip(*(sums[name].slope_and_curvature(alone[name]) for name in names), strict=True)
            length = -sum(slopes) / (len(names) * sum(curvatures)) if sum(curvatures) else 0.0
            if not 0 < length < math.inf:
                return None

            def changes(steps: Mapping[str, Tensor]) -> Changes:
                places = {name: self.places[name] for name in names}
                return weights_of({name: length * steps[name].cpu() for name in names}, places)

            def on_fold(fold: int) -> Changes:
                return changes(alone if others else on_half(fold))  # judged without the others

            return AnswersStep(changes(both), facts, on_fold, others)

        step, losing = step_of(sums), [p.name for p in self.calibration.losing(self.drop)]
        return step and replace(step, careful=partial(step_of, losing) if len(losing) < len(sums) else None)

    def _sums(self, some: Sequence[int], outputs: bool = True) -> tuple[Sums, int]:
        """The sums over the tokens of some batches, with outputs' slopes or without; and the number of their examples."""
        model = self.calibration.model
        exact = any(p.dtype == torch.float64 for p in model.parameters())
        kind = torch.float64 if exact else torch.float32
        zeros = partial(
            on_disk if is_offloaded(model) else partial(torch.zeros, device=model_device(model)), dtype=kind
        )
        wide = max(max(p.weight.shape) for p in self.calibration.projections)
        # Fits to one fold are only needed where there are no others to judge a step by.
        folds = 1 if self.calibration.others else FOLDS
        sums = {
            name: _Factors(len(kept), p.weight.shape[1], p.has_bias, wide, folds, zeros)
            for name, (p, kept) in self.places.items()
        }
        batches = [self.runner.batches[i] for i in some]
        examples = sum(self.runner.share("slopes", [partial(self._add, sums, outputs, i) for i in some], batches))
        for name, own in sums.items():
            current().add(f"slopes of {name}", own.all)
        return sums, examples

    def _sums_of_others(self) -> tuple[Sums, int]:
        """The sums over the calibration's others, and how many were looked at: none where they cannot be fitted to."""
        if not self.calibration.others:
            return {}, 0
        try:
            runner = self.calibration.runner_of_others
            before = runner.seen
            look = _Look(self.calibration, self.drop, self.start, self.places, runner)
            sums, examples = look._sums(look._some(), outputs=False)
        except Exception as error:  # others may have another form, and a model may raise anything about it
            if is_out_of_memory(error):
                raise
            return {}, 0
        self.runner.count(runner.seen - before)
        return sums, examples

    def _some(self) -> list[int]:
        """The batches that are looked at, evenly spaced, because batches often come sorted by length; a second step takes others."""
        every = range(len(self.runner.batches))
        inputs = max(len(p.kept(self.drop)) for p in self.calibration.losing(self.drop))
        weights = sum(p.weight.numel() for p, _ in self.places.values())
        enough = max(_MANY, _TOKENS * inputs, weights // WEIGHTS_OF_TOKEN)
        apart = max(1, min(self.runner.tokens // enough, len(every) // FOLDS))
        apart -= apart % 2 == 0  # batches of one example alternate between folds
        return list(every[bool(self.start.answers) * (apart // 2) :: apart])

    def _add(self, sums: Sums, outputs: bool, index: int) -> int:
        """Add the tokens of a batch to the sums; returns the number of its examples."""
        runner, model = self.runner, self.calibration.model
        batch, size = runner.batches[index], runner.size(index)
        dense = 0 if runner.dense.skips(index) else size
        known = logits_of(runner.dense(index, batch), batch)

        def sums_of(output: Any) -> list[Tensor]:
            now = logits_of(output, batch)
            each = self.divergence.between(known, now, batch)
            real = real_tokens(model, batch, "decoder", runner.rows, now.shape[1]) if now.ndim > 2 else None
            tokens = now.shape[1] if real is None else real.sum(1).to(each.device)
            if len(each) != size:
                raise HeadPruneError("tokens cannot be told apart by example.")
            random = [probe_of(model, output, batch, runner.first(index), runner.rows)] if outputs else []
            return [(each * tokens).sum(), *random]

        with self.calibration.applied(self.start.by_module, self.drop):
            seen = runner.slopes_of(batch, self.places, sums_of)
        runner.count((5 if outputs else 3) * size + dense)
        for name, calls in seen.items():
            for x, _, (slope, *random) in calls:
                place, kept = self.places[name]
                for fold, own in enumerate(folds_of(x, runner, index, place.layers[0].kind, slope)):
                    x_, g, *rest = (t.reshape(-1, t.shape[-1])[own] for t in (x, slope, *random))
                    sums[name].add(fold, x_[:, kept.to(x.device)], g, rest)
        return size
