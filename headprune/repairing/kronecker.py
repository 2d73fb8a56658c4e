"""The last step of a repair where an example has many answers, such as one for every token: a natural-gradient step.

As in `headprune.repairing.gauss_newton`, all output projections move together towards the dense model's answers, but there are far
too many answers for a system of equations. So the direction is K-FAC's (Martens and Grosse 2015, arXiv:1503.05671): the Fisher
information of a W_O is taken for the Kronecker product of the second moments of its inputs and of the slopes at its outputs, and
that of two W_O's for zero. That makes the step far too long, so `headprune.repairing.steps` searches its length by the divergence itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.batches import is_out_of_memory
from headprune.divergence import Divergence, logits_of, real_tokens
from headprune.errors import HeadPruneError
from headprune.inputs import model_device, tensors
from headprune.offload import is_offloaded
from headprune.parallel import current
from headprune.repairing.calibration import Calibration, folds_of
from headprune.repairing.examples import probe_of
from headprune.repairing.gauss_newton import Places, weights_of
from headprune.repairing.projections import FOLDS, Moments
from headprune.repairing.results import AnswersRepair, AnswersStep, Changes, RepairWeights
from headprune.repairing.runner import Runner, Seen

T = TypeVar("T")
_DAMPING = 0.1  # of the mean variance of an input, and of a slope
_TOKENS = 8  # per kept input of the widest W_O: so many at least are looked at, and so many
_MANY = 2048  # in any case


@dataclass(frozen=True)
class _Factors:
    """Sums over the tokens of a W_O's calls, by fold.

    Attributes:
        inputs: Of its kept inputs; and of these with the slopes of the divergence at its outputs.
        outputs: Of the slopes there of a random projection of the answers (`probe_of`).
        has_bias: Whether its bias changes too.
    """

    inputs: Moments
    outputs: Moments
    has_bias: bool

    def total(self, fold: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """The second moments of inputs, of these with the divergence's slopes, and of the outputs' slopes; of one fold, or of all.

        Each has a last row of the sums alone, for the number of tokens.
        """
        part = slice(None) if fold is None else slice(fold, fold + 1)
        return self.inputs.xx[part].sum(0), self.inputs.xy[part].sum(0), self.outputs.xx[part].sum(0)

    def slope_and_curvature(self, step: Tensor) -> tuple[float, float]:
        """The slope of the divergence along a step, and K-FAC's curvature along it, per token."""
        xx, xg, ss = self.total(None)
        of_inputs, of_outputs = (m / m[-1, -1].clamp(min=1) for m in (xx, ss))
        if not self.has_bias:
            of_inputs, xg = of_inputs[:-1, :-1], xg[:-1]
        slope = (step * xg).sum() / xx[-1, -1].clamp(min=1)
        return float(slope), float((step * (of_inputs @ step @ of_outputs[:-1, :-1])).sum())


def _step(factors: Sequence[_Factors], fold: int | None = None) -> Tensor:
    """K-FAC's change of W_O ``[kept inputs (+ 1 for the bias), out]``, from the sums over several sets of examples."""
    xx, xg, ss = (torch.stack(each).sum(0) for each in zip(*(own.total(fold) for own in factors), strict=True))
    # Outputs may be of fewer sets of examples (`_Look._sums`).
    tokens, of_outputs, ss = xx[-1, -1].clamp(min=1), ss[-1, -1].clamp(min=1), ss[:-1, :-1]
    if not factors[0].has_bias:
        xx, xg = xx[:-1, :-1], xg[:-1]
    if not bool(xx.diagonal().any() & ss.diagonal().any()):
        return torch.zeros_like(xg)
    left, right = (
        (m + _DAMPING * m.diagonal().mean() * torch.eye(len(m)).to(m)) / n for m, n in ((xx, tokens), (ss, of_outputs))
    )
    step: Tensor = -torch.linalg.solve(right, torch.linalg.solve(left, xg / tokens).mT).mT
    return step


Sums = Mapping[str, _Factors]
"""By output projection."""


def natural_gradient(calibration: Calibration, drop: Heads, start: RepairWeights, places: Places) -> AnswersStep | None:
    """One step from the weights ``start`` towards the dense model's answers, however many an example has.

    Its length is a guess: K-FAC's own, as if all W_O's moved the answers alike.

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
        sums, divergences = self._sums(self._some())
        slopes, curvatures = zip(*(own.slope_and_curvature(_step([own])) for own in sums.values()), strict=True)
        length = -sum(slopes) / (len(sums) * sum(curvatures)) if sum(curvatures) else 0.0
        if not 0 < length < math.inf:
            return None

        more, others = self._sums_of_others()
        parts = (sums, more) if others else (sums,)

        @cache
        def changes(which: tuple[int, ...], fold: int | None = None) -> Changes:
            steps = {name: length * _step([parts[i][name] for i in which], fold) for name in self.places}
            return weights_of({name: step.cpu() for name, step in steps.items()}, self.places)

        error = math.sqrt(divergences.mean())
        facts = AnswersRepair(error, error, _DAMPING, len(divergences) + others)
        if others:
            return AnswersStep(changes((0, 1)), facts, lambda part: changes((part,)), others)
        return AnswersStep(changes((0,)), facts, lambda fold: changes((0,), fold))

    def _sums(self, some: Sequence[int], outputs: bool = True) -> tuple[Sums, Tensor]:
        """The sums over the tokens of some batches, with outputs' slopes or without; and the divergence of every example ``[examples]``,
        summed over tokens."""
        device = None if is_offloaded(self.calibration.model) else model_device(self.calibration.model)
        sums = {
            name: _Factors(Moments(len(kept), out := p.weight.shape[1], device), Moments(out, 1, device), p.has_bias)
            for name, (p, kept) in self.places.items()
        }
        divergences = torch.cat(self._share("slopes", partial(self._add, sums, outputs), some))
        for name, own in sums.items():
            current().add(f"slopes of {name}", [own.inputs.xx, own.inputs.xy, own.outputs.xx])
            own.inputs.complete()
            own.outputs.complete()
        return sums, divergences

    def _sums_of_others(self) -> tuple[Sums, int]:
        """The sums over the calibration's others, and how many were looked at: none where they cannot be fitted to."""
        if not self.calibration.others:
            return {}, 0
        try:
            runner = self.calibration.runner_of_others(self.runner.examples)
            look = _Look(self.calibration, self.drop, self.start, self.places, runner)
            sums, divergences = look._sums(look._some(), outputs=False)
        except Exception as error:  # others may have another form, and a model may raise anything about it
            if is_out_of_memory(error):
                raise
            return {}, 0
        self.runner.count(runner.passes * runner.examples)
        return sums, len(divergences)

    def _share(self, name: str, task: Callable[[int], T], some: Sequence[int]) -> list[T]:
        return self.runner.share(name, [partial(task, i) for i in some], [self.runner.batches[i] for i in some])

    def _some(self) -> list[int]:
        """The batches that are looked at, evenly spaced, because batches often come sorted by length; a second step takes others."""
        every = range(len(self.runner.batches))
        enough = max(_MANY, _TOKENS * max(len(kept) for _, kept in self.places.values()))
        apart = max(1, min(self._tokens(every) // enough, len(every) // FOLDS))
        apart -= apart % 2 == 0  # batches of one example alternate between folds
        return list(every[bool(self.start.answers) * (apart // 2) :: apart])

    def _tokens(self, some: Sequence[int]) -> int:
        """About how many tokens these batches have."""
        return sum(max(t.shape[:2].numel() for t in tensors(self.runner.batches[i])) for i in some)

    def _random(self, index: int, output: Any) -> Tensor:
        runner = self.runner
        return probe_of(self.calibration.model, output, runner.batches[index], runner.first(index), runner.rows)

    def _seen(self, index: int, sums_of: Callable[[Any], Sequence[Tensor]]) -> Seen:
        with self.calibration.applied(self.start.by_module, self.drop):
            return self.runner.slopes_of(self.runner.batches[index], self.places, sums_of)

    def _add(self, sums: Sums, outputs: bool, index: int) -> Tensor:
        """Add the tokens of a batch to the sums; returns the divergence of its examples ``[examples]``, summed over tokens."""
        runner, model, divergences = self.runner, self.calibration.model, list[Tensor]()
        batch = runner.batches[index]
        with torch.no_grad(), runner.deterministic_eval():
            known = logits_of(runner.run(batch), batch)

        def sums_of(output: Any) -> list[Tensor]:
            now = logits_of(output, batch)
            each = self.divergence.between(known, now, batch)
            real = real_tokens(model, batch, "decoder", runner.rows, now.shape[1]) if now.ndim > 2 else None
            tokens = now.shape[1] if real is None else real.sum(1).to(each.device)
            divergences.append((each.detach() * tokens).double().cpu())
            return [(each * tokens).sum(), *([self._random(index, output)] if outputs else [])]

        seen = self._seen(index, sums_of)
        runner.count((6 if outputs else 4) * runner.rows.size(batch))
        if len(divergences[0]) != runner.rows.size(batch):
            raise HeadPruneError("tokens cannot be told apart by example.")
        for name, calls in seen.items():
            for x, _, (slope, *random) in calls:
                for fold, own in enumerate(folds_of(x, self.runner, index, self.runner.layer(name).kind)):
                    x_, g, *rest = (t.reshape(-1, t.shape[-1])[own] for t in (x, slope, *random))
                    one = torch.ones(len(own), device=x.device)
                    sums[name].inputs.add(fold, x_[:, self.places[name][1].to(x.device)], g, one)
                    for s in rest:
                        sums[name].outputs.add(fold, s, s[:, :1], one)
        return divergences[0]
