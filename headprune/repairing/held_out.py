"""Whether a repair does better on examples that it was not fitted to: what does not, is left out.

Every fit of a repair looks at its own error: W_O's and the values' at the layer's output, the last step's to first order. What
a user asks is whether the model's answers come nearer to the dense model's, on other examples. So each step is tried there:

- W_O, and then the values: fitted to every other example, tried on those between, and the other way round where there
  are few (the repair that is given is fitted to all of them);
- the last step towards the dense model's answers: made from all examples but some that are set apart for this.

A step is kept if it lowers the mean divergence from the dense model's answers, and the mean of its roots; with few examples, by
more than is likely by chance (`better`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.gates import mask
from headprune.inputs import tensors
from headprune.repairing.answers import Answers
from headprune.repairing.runner import Mixed, Runner
from headprune.repairing.solve import FOLDS, Moments
from headprune.repairing.weights import Trial, Weights
from headprune.uncertainty import p_value, spread

if TYPE_CHECKING:
    from headprune.repairing.refit import Refit

_LEAST = 4  # examples: two or three may agree by accident
_FEW = 128  # examples: up to here both halves are tried
_MOST = 256  # examples that are looked at for W_O and values
_APART = 0.25  # of the examples, set apart for the last step …
_MOST_APART = 128  # … and no more than these
_CHUNK = 8  # rows of a batch that are mixed with one another only (`headprune.repairing.crossed`): set apart together

OUTPUTS, VALUES, ANSWERS = "output projections", "values", "answers"

Rows = dict[int, list[int]]
"""Examples, by batch."""


_ENOUGH = 100  # examples: with so many, whatever does better on average is kept


class HeldOut:
    """Examples to compare repairs of a model on that they were not fitted to.

    Args:
        refit: The model and its calibration examples.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit, self.runner = refit, refit.runner
        self._divergence = Divergence(refit.model, seed=0)

    def checked(self, drop: Heads, *, sweeps: int = 0, answers: bool = True) -> Weights:
        """The repair for heads that go, without the steps that do no better than none.

        Where every step is left out, that is the old weights without the columns of removed heads.

        Args:
            drop: ``{layer_name: [head, ...]}``.
            sweeps: As for `Refit.fitted`.
            answers: Whether the last step is to be tried (`Refit.fit_logits`).
        """
        steps, moments = self.refit.by_step(drop, sweeps)
        if not steps:
            return Weights()
        old = self.refit.unrepaired(drop)
        if self.runner.examples < _LEAST:
            return _with(
                old, (), f"Nothing was repaired: fewer than {_LEAST} examples cannot show whether that does better."
            )
        found = self._layers(drop, steps, moments)
        if not answers:
            return found if found.facts else _with(old, found.trials, "")
        stepped = self._answered(drop, found if found.facts else self.refit.unrepaired(drop, biases=True), found.trials)
        return stepped if stepped.facts or stepped.answers else _with(old, stepped.trials, stepped.note)

    def _layers(self, drop: Heads, steps: Sequence[Weights], moments: Mapping[str, Moments]) -> Weights:
        """W_O, and W_O with values, as far as they do better; no weights where neither does."""
        names = (OUTPUTS, VALUES)[: len(steps)]
        folds = range(FOLDS) if self.runner.examples <= _FEW else (0,)
        parts = []
        for fold in folds:
            fitted = [self.refit.halved(weights, moments, drop, fold) for weights in steps]
            parts.append(self._distances(drop, [Weights(), *fitted], self._others(fold)))
        each = torch.cat(parts, dim=1)
        best, kept, trials = 0, Weights(), []
        for i, (name, weights) in enumerate(zip(names, steps, strict=True), start=1):
            good = better(each[best], each[i])
            trials.append(_trial(name, each[best], each[i], good))
            if good:
                best, kept = i, weights
        return _with(kept, trials, kept.note)

    def _answered(self, drop: Heads, base: Weights, trials: Sequence[Trial]) -> Weights:
        """A repair and the last step, if that does better; with the trials so far and its own."""
        rows, known = self._apart
        if known is None:
            return _with(
                base, trials, "The answers are not fitted as a whole: there are too few examples to try that on."
            )
        passes = known.runner.passes
        moved = self.refit.fit_logits(drop, base, known)
        self.runner.passes += (known.runner.passes - passes) * known.runner.examples / self.runner.examples
        if moved.answers is None:
            return _with(base, trials, moved.note)
        before, after = self._distances(drop, [base, moved], rows)
        good = better(before, after)
        return _with(moved if good else base, [*trials, _trial(ANSWERS, before, after, good)], base.note)

    # -- examples ----------------------------------------------------------------------------------

    def _others(self, fold: int) -> Rows:
        """Examples that are not in a fold; not all of them where there are many."""
        found = [
            (index, row)
            for index in range(len(self.runner.batches))
            for row, own in enumerate(self.runner.fold(index).tolist())
            if own != fold
        ]
        return _by_batch(_spread_out(found, min(_MOST, len(found))))

    @cached_property
    def _apart(self) -> tuple[Rows, Answers | None]:
        """Examples that the last step is not made from, and the dense model's answers to the others; None if there are too few.

        Whole chunks, where there are mixtures: none of those that are left must have a half in common with what is set apart.
        """
        runner, size = self.runner, _CHUNK if self.runner.further else 1
        chunks = [
            [(index, row) for row in range(start, min(start + size, runner.rows.size(batch)))]
            for index, batch in enumerate(runner.batches)
            for start in range(0, runner.rows.size(batch), size)
        ]
        wanted = min(_MOST_APART, int(_APART * runner.examples))
        count = wanted // size if wanted >= size else int(2 * size <= runner.examples)
        rows = _by_batch([one for chunk in _spread_out(chunks, count) for one in chunk])
        held = sum(map(len, rows.values()))
        if held < 2 or 2 * held > runner.examples:
            return rows, None
        rest = _without(runner, rows)
        with torch.inference_mode(False), self.refit.applied(Weights()):
            return rows, Answers(rest)

    # -- comparing ---------------------------------------------------------------------------------

    def _distances(self, drop: Heads, candidates: Sequence[Weights], rows: Rows) -> Tensor:
        """Divergence from the dense model's answers, ``[candidates, examples]``, float64: without the heads, with new weights."""
        refit, runner = self.refit, self.runner
        masked = {layer.name: drop[layer.name] for layer in refit.layers if layer.maskable and layer.name in drop}
        found = []
        for index, own in rows.items():
            batch = runner.rows.take(runner.batches[index], own)
            with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
                with refit.applied(Weights()):
                    dense = runner.run(batch, _deaf)
                each = []
                for weights in candidates:
                    with refit.applied(weights), mask(refit.model, masked, layers=refit.layers):
                        each.append(self._between(dense, runner.run(batch, _deaf), batch))
            found.append(torch.stack(each))
            runner.passes += (1 + len(candidates)) * len(own) / runner.examples
        return torch.cat(found, dim=1)

    def _between(self, dense: Any, now: Any, batch: Any) -> Tensor:
        """Of two outputs, ``[examples]``: of their logits, or else the squared difference of all that they hold."""
        named, size = batch if isinstance(batch, Mapping) else {}, self.runner.rows.size(batch)
        try:
            each = self._divergence.between(logits_of(dense, named), logits_of(now, named), named)
        except HeadPruneError:
            each = torch.zeros(size)
            for a, b in zip(tensors(dense), tensors(now), strict=True):
                if a.is_floating_point() and a.ndim and len(a) == size:
                    each = each + (a.double() - b.double()).square().reshape(size, -1).mean(1).cpu()
        each = each.detach().cpu().double().flatten()
        if len(each) % size:  # what it gives is not per example: they count alike
            return each.mean().expand(size)
        return each.view(size, -1).mean(1)


def better(before: Tensor, after: Tensor) -> bool:
    """Whether divergences ``[examples]`` of the same examples have become less; with few of them, by more than chance.

    The mean must fall, which a few bad examples decide. What chance does is asked of the roots: divergences grow with the square of
    what an answer is off by, so that one example in a hundred can be most of their mean and hide what all others say. Of steps that
    in truth change nothing, ``examples / 200`` are kept (one-sided test): 4 % with eight examples, half of them with a hundred and
    more. A stricter rule gives up more than it saves there, since a step that is kept by chance does little harm.
    """
    if not bool(after.mean() < before.mean()):
        return False
    gain = (before.clamp(min=0).sqrt() - after.clamp(min=0).sqrt()).numpy()
    mean = float(gain.mean())
    error = float(spread(gain - mean)) / len(gain)
    return mean > 0 and p_value(mean, error, len(gain)) < min(1.0, len(gain) / _ENOUGH)


def _trial(name: str, before: Tensor, after: Tensor, good: bool) -> Trial:
    return Trial(name, float(before.mean()), float(after.mean()), len(before), good)


def _with(weights: Weights, trials: Sequence[Trial], note: str) -> Weights:
    return replace(weights, trials=tuple(trials), note=note)


def _spread_out(those: Sequence[Any], count: int) -> list[Any]:
    """Some of them, from everywhere: batches often come sorted by length."""
    return [those[(2 * i + 1) * len(those) // (2 * count)] for i in range(count)]


def _by_batch(found: Sequence[tuple[int, int]]) -> Rows:
    rows: Rows = {}
    for index, row in found:
        rows.setdefault(index, []).append(row)
    return rows


def _without(runner: Runner, rows: Rows) -> Runner:
    """The same model on the other examples, and on those mixtures that begin with them."""
    rest = copy.copy(runner)
    rest.batches, rest.further, numbers = [], [], {}
    for index, batch in enumerate(runner.batches):
        stay = [row for row in range(runner.rows.size(batch)) if row not in rows.get(index, ())]
        if stay:
            numbers[index] = len(rest.batches), {row: i for i, row in enumerate(stay)}
            rest.batches.append(runner.rows.take(batch, stay))
    rest.examples = sum(map(runner.rows.size, rest.batches))
    for mixed in runner.further:
        if mixed.batch not in numbers:
            continue
        number, places = numbers[mixed.batch]
        own = [i for i, row in enumerate(mixed.rows.tolist()) if row in places]
        if own:
            starts = torch.tensor([places[int(mixed.rows[i])] for i in own])
            rest.further.append(Mixed(number, mixed.shift, runner.rows.take(mixed.inputs, own), starts))
    return rest


def _deaf(name: str, x: Tensor, y: Tensor) -> None:
    """Hears nothing."""
