"""The steps of a repair, and which of them are kept: those that do better on examples that they were not fitted to.

Every fit minimises an error of its own: the fits of W_O and values that of the layer's output, the last step a
first-order error. Users care whether the model's answers to other examples come nearer to the dense model's. So each
step is fitted to all examples and judged on others: the choosing examples, which also decide between plans. Without
these, its error on other examples is estimated by cross-fitting (`_Crossed`).

A step is kept if it lowers the mean divergence from the dense model's answers; with few examples, by more than chance
(`better`). How much of the last one is taken is decided likewise. It is repeated as long as it takes away a tenth of
the divergence (of few texts, a twentieth: `_leads_on`), each time for other mixtures, where there are any. It is
fitted to the choosing examples too, if the calibration has them, but judged by the same step fitted without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.batches import is_out_of_memory
from headprune.divergence import ENOUGH, Fidelity
from headprune.errors import HeadPruneError
from headprune.repairing.calibration import Calibration
from headprune.repairing.examples import NOT_FITTED
from headprune.repairing.gauss_newton import gauss_newton
from headprune.repairing.kronecker import natural_gradient
from headprune.repairing.layers import OUTPUTS, VALUES, refit_outputs, refit_values
from headprune.repairing.mixtures import mixes_only
from headprune.repairing.projections import FOLDS
from headprune.repairing.results import AnswersStep, LeftOut, Repair, RepairWeights, Trial
from headprune.uncertainty import p_value, spread

_LEAST = 4  # examples: two or three may agree by accident
_ENOUGH = 100  # examples: with so many, every step that lowers the mean is kept
_AGAIN = 0.9  # of the divergence: after a step that leaves less than this, a further one is tried
_AGAIN_OF_FEW = 0.95  # likewise of few texts, of which other mixtures teach more, and cost little
_NEAR = 1e-6  # nats: nearer, differences are mostly rounding
NO_GAIN = "No step towards the dense model's answers did better on examples left out, so none was taken."
ALL_FITTED = "The last step was fitted to the choosing examples too."
BLENDED = "The last step was fitted to mixtures of images too: four fifths of one, a fifth of another."
_FARTHEST = 4.0**6  # of the lengths that are searched, the longest, and 1 / the shortest
_GREAT_HARM = 2  # times the divergence: a whole step that leaves more goes so far that no parabola tells its best part
_LEAST_PART, _MOST_PART = 0.02, 0.8  # parts of a step that are tried: less gains nothing, more is as good as all


@dataclass(frozen=True)
class Step:
    """A step of a repair. To add one: a file with its ``fit``, and a line in `STEPS`.

    Attributes:
        name: As `Trial.step` has it.
        fit: ``fit(calibration, drop, start)`` returns the weights after this step, from those before it, or why it is
            left out. ``drop``: the removed heads. The model is the dense one before and after the call.
        by_layer: Whether it fits every layer by itself from the calibration's sums, without running the model. Plans
            are compared after these steps. Each is made once, from the one before, kept or not; others may be repeated
            (`_leads_on`).
    """

    name: str
    fit: Callable[[Calibration, Heads, RepairWeights], RepairWeights | LeftOut]
    by_layer: bool = False


def refit_answers(calibration: Calibration, drop: Heads, start: RepairWeights) -> RepairWeights | LeftOut:
    """Move all linear layers (or if that fails or gains nothing, the output projections that lose heads) towards the dense model's answers,
    from the weights ``start``."""
    answers = calibration.answers_to_mixtures(start.last_steps)
    if isinstance(answers, str) and not calibration.several:
        return answers
    outputs = {p.name: (p, p.kept(drop)) for p in calibration.projections if p.name in start.by_module}
    # The smaller system is left for where the larger one fails, or gains nothing.
    others = {p.name: (p, p.kept(drop)) for p in calibration.linears}
    systems = ({**others, **outputs}, outputs) if others else (outputs,)
    result: RepairWeights | LeftOut = NO_GAIN
    for places in systems:
        missing = {name: place.dense for name, (place, _) in places.items() if name not in start.by_module}
        wide = replace(start, by_module={**start.by_module, **missing})
        try:
            with torch.inference_mode(False):
                if isinstance(answers, str):
                    step = natural_gradient(calibration, drop, wide, places)
                else:
                    with calibration.applied(wide.by_module, drop):
                        step = gauss_newton(answers, places)
            if step is not None:
                return replace(wide.moved(step), careful=partial(_careful, step, start, wide))
            result = NO_GAIN
        except HeadPruneError as error:
            result = f"{NOT_FITTED}: {error.args[0]}"
        except (RuntimeError, MemoryError) as error:
            # Where an example has several answers, there are several copies of a batch's.
            if not is_out_of_memory(error) or not (calibration.several or places is not outputs):
                raise
            result = f"{NOT_FITTED}: memory ran out. Smaller batches need less."
    return result


def _careful(step: AnswersStep, start: RepairWeights, wide: RepairWeights) -> RepairWeights | None:
    """The weights with `AnswersStep.careful`, of which ``start`` has some modules and ``wide`` all."""
    other = step.careful() if step.careful else None
    if other is None:
        return None
    own = {name: new for name, new in wide.by_module.items() if name in start.by_module or name in other.changes}
    return replace(wide, by_module=own).moved(other)


STEPS = (
    Step(OUTPUTS, refit_outputs, by_layer=True),  # every layer's W_O, each by itself
    Step(VALUES, refit_values, by_layer=True),  # every layer's W_O and the kept heads' values, each layer by itself
    Step("answers", refit_answers),  # the last step: all linear layers together, towards the dense model's answers
)
LAYER_STEPS = tuple(step for step in STEPS if step.by_layer)
"""All steps but the last one, towards the answers."""


def fit_layers(calibration: Calibration, drop: Heads) -> RepairWeights:
    """New weights for the kept heads: every layer fitted by itself to the dense model's activations.

    The model is not run: the calibration's statistics serve any choice of heads.

    Args:
        drop: ``{layer_name: [head, ...]}``.
    """
    weights = RepairWeights()
    with torch.inference_mode(False), torch.no_grad():
        for step in LAYER_STEPS:
            if not isinstance(fitted := step.fit(calibration, drop, weights), LeftOut):
                weights = fitted
    return weights


def drop_columns(calibration: Calibration, drop: Heads, biases: bool = False) -> RepairWeights:
    """The old weights of every W_O that loses heads, with zeros for these heads.

    Args:
        biases: Whether modules without a bias get one of zeros, if they can have one.
    """
    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    for projection in (p for p in calibration.projections if p.loses(drop)):
        kept, whole = projection.kept(drop), torch.zeros_like(projection.weight, device="cpu")
        whole[kept] = projection.weight.cpu()[kept]
        bias = projection.own_bias or (biases and projection.has_bias)
        weights[projection.name] = whole, projection.bias.cpu() if bias else None
    return RepairWeights(weights)


def summary(calibration: Calibration, weights: RepairWeights, passes: float) -> Repair:
    """The `Repair` that these weights amount to; ``passes`` include the calibration's."""
    runner, new = calibration.runner, weights.by_module
    biases = tuple(name for name in calibration.new_biases if new.get(name, (None, None))[1] is not None)
    attention = {p.name for p in calibration.projections} | {v.name for v in calibration.values.values()}
    # Of a layer without any head left, queries, keys and values stay.
    moved = [name for name in new if calibration.changes(name, new[name])]
    wide = f"The last step moved {len(moved)} linear layers." if new.keys() - attention else ""
    notes = (*calibration.notes, *filter(None, (wide, weights.note)))
    counts = runner.examples, calibration.statistics.mixtures, round(passes)
    return Repair(weights.facts, *counts, biases, notes, weights.answers, weights.trials)


def checked_repair(
    calibration: Calibration, drop: Heads, choose: Fidelity | None = None, steps: Sequence[Step] = STEPS
) -> RepairWeights:
    """Repair for the removal of ``drop``, without steps that do no better on other examples.

    If every step is left out, these are the old weights with zeros for the removed heads.

    Args:
        drop: ``{layer_name: [head, ...]}``.
        choose: On other examples than the fit's. A decision takes one pass, or two if a part of a step is tried, and one more if the step is
            kept and was fitted to these too; some six for each form of the step where its length is searched for (`best_length`).
        steps: In the order in which they are made.
    """
    if not calibration.losing(drop):
        return RepairWeights()
    if calibration.runner.examples < _LEAST:
        note = f"Nothing was repaired: fewer than {_LEAST} examples cannot show whether that does better."
        return replace(drop_columns(calibration, drop), note=note)
    judge = _Crossed(calibration, drop) if choose is None else _OnOthers(calibration, drop, choose)
    best = latest = old = drop_columns(calibration, drop, biases=True)
    _, fitted, estimated = judge(old)
    trials: list[Trial] = []
    notes: list[str] = []
    ahead = list(steps)
    while ahead:
        step = ahead.pop(0)
        with torch.inference_mode(False), torch.no_grad():
            weights = step.fit(calibration, drop, latest if step.by_layer else best)
        before = estimated if step.by_layer else fitted
        if isinstance(weights, LeftOut):
            notes += [weights] if weights and step.name not in [trial.step for trial in trials] else []
            continue
        latest = weights if step.by_layer else latest
        tried = _taken(calibration, weights, judge, before)
        after, kept = tried.estimate, better(before, tried.estimate)
        trials.append(Trial(step.name, float(before.mean()), float(after.mean()), len(after), kept))
        if kept:
            new, fitted, estimated = judge.settled(tried)
            others, last_steps = max(new.others, best.others), best.last_steps + (not step.by_layer)
            best = replace(new, others=others, last_steps=last_steps, on_fold=None, with_part=None, careful=None)
            if choose is not None and not step.by_layer and _leads_on(calibration, trials[-1].before, trials[-1].after):
                ahead.insert(0, step)
        del weights, tried  # and the gradients that their functions hold
    best = drop_columns(calibration, drop) if best is old else best
    notes += [ALL_FITTED] if best.others else []
    notes += [BLENDED] if best.answers and calibration.runner.images else []
    return replace(best, trials=tuple(trials), note=" ".join(notes), on_fold=None, with_part=None, careful=None)


def _taken(calibration: Calibration, weights: RepairWeights, judge: _Judge, before: Tensor) -> Tried:
    """A step as far as it is taken: whole; in part, if it promises more than it gains; by the best length, if it does great harm.

    If it does not lead on, the more careful one is tried too.

    Args:
        before: The divergences of the same examples without it.
    """
    if not (weights.with_part and weights.answers):
        return judge(weights)
    if calibration.several:  # its length is a guess
        return _of_best_length(weights, judge, before)
    tried = whole = judge(weights)
    part = weights.answers.better_part(float(before.mean()), _mean(whole))
    if _LEAST_PART < part < _MOST_PART:
        tried = min(whole, judge(weights.with_part(part)), key=_mean)
    if better(before, tried.estimate) and _leads_on(calibration, float(before.mean()), _mean(tried)):
        return tried
    if not _mean(whole) <= _GREAT_HARM * float(before.mean()):  # also of NaN
        return _of_best_length(weights, judge, before)
    with torch.inference_mode(False), torch.no_grad():
        other = weights.careful() if weights.careful else None
    return min(tried, _taken(calibration, other, judge, before), key=_mean) if other else tried


def _of_best_length(found: RepairWeights, judge: _Judge, before: Tensor) -> Tried:
    """So many times a step (or the more careful one) as does best on examples that it was not fitted to, by more than chance if any does.

    Args:
        before: The divergences of these examples without it.
    """
    # Without the weights, which are large.
    tried: dict[tuple[Callable[[float], RepairWeights], float], tuple[Tensor, Tensor]] = {}

    @cache
    def divergence(with_part: Callable[[float], RepairWeights], part: float) -> float:
        with torch.inference_mode(False), torch.no_grad():
            weights = with_part(part)
        _, fitted, estimate = judge(weights)
        tried[with_part, part] = fitted, estimate
        return float(estimate.mean())

    with torch.inference_mode(False), torch.no_grad():
        careful = found.careful() if found.careful else None
    ways = [each.with_part for each in (found, careful) if each and each.with_part]
    best = min(
        ((way, best_length(partial(divergence, way), float(before.mean()))) for way in ways),
        key=lambda at: divergence(*at),
    )
    if not better(before, tried[best][1]):  # a shorter one may gain less, but surely
        best = min((at for at in tried if better(before, tried[at][1])), key=lambda at: divergence(*at), default=best)
    way, part = best
    with torch.inference_mode(False), torch.no_grad():
        weights = way(part)
    facts = weights.answers
    if facts and math.isnan(facts.before):  # of many answers, known by their divergence alone
        facts = replace(
            facts, before=math.sqrt(before.mean()), held_out=math.sqrt(max(0.0, divergence(*best))), part=1.0
        )
    return Tried(replace(weights, answers=facts, with_part=None, careful=None), *tried[best])


def best_length(error: Callable[[float], float], before: float) -> float:
    """The length of a step with about the least error, by some five looks; ``before``: the error at 0.

    Lengths are tried by factors of 4, from 1, then where a parabola through the errors at 0, at the best one and at the next
    longer one (if that is finite) has its least value.
    """

    def at(length: float) -> float:
        found = error(length)
        return found if math.isfinite(found) else math.inf

    best = 1.0
    while best > 1 / _FARTHEST and at(best) > min(before, at(best / 4)):
        best /= 4
    while 1 <= best < _FARTHEST and at(4 * best) < at(best):
        best *= 4
    if at(best) == math.inf:
        return best
    near = best if at(4 * best) < math.inf else best / 4
    low, high = at(near) - before, at(4 * near) - before
    if low < 0 and 4 * low < high < math.inf:
        best = min(best, near * (high - 16 * low) / (2 * high - 8 * low), key=at)
    return best


def _leads_on(calibration: Calibration, before: float, after: float) -> bool:
    """Whether to repeat a step towards the answers, from its end: it gained enough to change the slopes."""
    runner = calibration.runner
    few = runner.mixtures and not runner.images and not mixes_only(runner.examples)
    return _NEAR <= after < (_AGAIN_OF_FEW if few else _AGAIN) * before


class Tried(NamedTuple):
    """Weights; their divergence on examples, which they may have been fitted to; and what it would be on others: ``[examples]``."""

    weights: RepairWeights
    fitted: Tensor
    estimate: Tensor


class _Judge(Protocol):
    def __call__(self, weights: RepairWeights) -> Tried:
        """Try weights; ``fitted`` holds once they are settled."""

    def settled(self, tried: Tried) -> Tried:
        """The weights that are kept."""


class _OnOthers:
    """Tries weights on the choosing examples; a last step that is fitted to these too, as it is without them."""

    def __init__(self, calibration: Calibration, drop: Heads, choose: Fidelity) -> None:
        self._calibration, self._drop, self._choose = calibration, drop, choose

    def __call__(self, weights: RepairWeights) -> Tried:
        estimate = self._measured(self._without(weights) or weights)
        return Tried(weights, estimate, estimate)

    def settled(self, tried: Tried) -> Tried:
        without = self._without(tried.weights)
        if without is None:
            return tried
        fitted = self._measured(tried.weights)
        if fitted.mean() < tried.estimate.mean():
            return tried._replace(fitted=fitted)
        return tried._replace(weights=without)  # to do worse on what it was fitted to, it must have gone too far

    def _measured(self, weights: RepairWeights) -> Tensor:
        with torch.inference_mode(False):
            return self._choose.each(partial(self._calibration.applied, weights.by_module, self._drop))

    @staticmethod
    def _without(weights: RepairWeights) -> RepairWeights | None:
        """Weights whose last step is not fitted to the choosing examples; None if it was not anyway."""
        if not weights.others or weights.on_fold is None or weights.answers is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            facts = replace(weights.answers, examples=weights.answers.examples - weights.others)
            return replace(weights.on_fold(0), answers=facts, others=0)


class _Crossed:
    """Estimate of the divergence on other examples, by cross-fitting on those that were fitted to.

    To first order in 1/n, a fit to n examples has the error ``e - c/n`` on these and ``e + c/n`` on others; a fit to
    half of them has ``e + 2 c/n`` on the other half. So the error on others is a third of the first and two thirds of
    the last (much like the .632 estimator of Efron 1983, J. Am. Stat. Assoc. 78:316, whose samples hold 63.2 % of the
    examples).
    """

    def __init__(self, calibration: Calibration, drop: Heads) -> None:
        self._calibration, self._drop = calibration, drop
        runner = calibration.runner
        self._folds = []
        for fold in range(FOLDS):
            of_fold = [torch.nonzero(runner.fold(index) == fold).flatten() for index in range(len(runner.batches))]
            rows = [(index, row) for index, own in enumerate(of_fold) for row in own.tolist()]
            batches = runner.rows.take_evenly(runner.batches, rows, ENOUGH // FOLDS)
            self._folds.append((Fidelity(calibration.model, batches), min(ENOUGH // FOLDS, len(rows))))

    def __call__(self, weights: RepairWeights) -> Tried:
        fitted = self._on([weights] * FOLDS)
        if weights.on_fold is None:
            return Tried(weights, fitted, fitted)
        with torch.inference_mode(False), torch.no_grad():
            halves = [weights.on_fold(fold) for fold in reversed(range(FOLDS))]
        return Tried(weights, fitted, (fitted + 2 * self._on(halves)) / 3)

    def settled(self, tried: Tried) -> Tried:
        return tried

    def _on(self, of_folds: Sequence[RepairWeights]) -> Tensor:
        """Divergence ``[examples]``, each fold's with its own weights."""
        divergences = []
        for (fidelity, count), weights in zip(self._folds, of_folds, strict=True):
            with torch.inference_mode(False):
                changed = partial(self._calibration.applied, weights.by_module, self._drop)
                divergences.append(fidelity.each(changed))
            self._calibration.runner.count(count)
        return torch.cat(divergences)


def _mean(tried: Tried) -> float:
    return float(tried.estimate.mean())


def better(before: Tensor, after: Tensor) -> bool:
    """Whether divergences ``[examples]`` of the same examples fell; with few examples, by more than chance.

    The mean must fall: of the statistics compared in benchmarks/repair_steps.py, it best predicts the mean on thousands
    of other examples. With fewer than 100 examples, a test of the square roots must agree: divergences grow with the
    square of an answer's error, so one example could outweigh all others in their mean. Of steps that in truth change
    nothing, ``(examples / 100)^1.5 / 2`` are kept (one-sided test): one in 90 with eight examples, one in six with 50.
    """
    if not bool(after.mean() < before.mean()) or len(after) < 2:  # one alone says nothing about chance
        return False
    if len(after) >= _ENOUGH:
        return True
    gain = (before.sqrt() - after.sqrt()).numpy()
    mean = float(gain.mean())
    error = float(spread(gain - mean)) / len(gain)
    return mean > 0 and p_value(mean, error, len(gain)) < (len(gain) / _ENOUGH) ** 1.5
