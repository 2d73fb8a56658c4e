"""Whether the steps of a repair do better on examples that they were not fitted to: what does not, is left out.

Every fit of a repair looks at its own error: W_O's and the values' at the layer's output, the last step's to first order. What
a user asks is whether the model's answers come nearer to the dense model's, on other examples. So each step is tried there, on
the examples that it names (`Step.splits`).

A step is kept if it lowers the mean divergence from the dense model's answers, and the mean of its roots; with few examples, by
more than is likely by chance (`better`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import tensors
from headprune.reference.runner import Examples, unwatched
from headprune.repairing.refit import Refit
from headprune.repairing.step import Step, on_fold
from headprune.repairing.steps import STEPS
from headprune.repairing.weights import Trial, Weights
from headprune.uncertainty import p_value, spread

_LEAST = 4  # examples: two or three may agree by accident
_ENOUGH = 100  # examples: with so many, whatever does better on average is kept


def checked(refit: Refit, drop: Heads, steps: Sequence[Step] = STEPS) -> Weights:
    """The repair for heads that go, without the steps that do no better than none.

    Where every step is left out, that is the old weights without the columns of removed heads.

    Args:
        drop: ``{layer_name: [head, ...]}``.
        steps: In the order in which they are made.
    """
    if not refit.reference.losing(drop):
        return Weights()
    if refit.reference.runner.examples < _LEAST:
        note = f"Nothing was repaired: fewer than {_LEAST} examples cannot show whether that does better."
        return replace(refit.unrepaired(drop), note=note)
    weights = old = refit.unrepaired(drop, biases=True)
    trials: list[Trial] = []
    notes: list[str] = []
    for _, together in groupby(steps, key=lambda step: step.splits):
        weights, tried, left_out = _tried(refit, drop, list(together), weights)
        trials += tried
        notes += left_out
    weights = refit.unrepaired(drop) if weights is old else weights
    return replace(weights, trials=tuple(trials), note=" ".join(notes))


def _tried(refit: Refit, drop: Heads, steps: Sequence[Step], start: Weights) -> tuple[Weights, list[Trial], list[str]]:
    """Steps that are tried on the same examples: the weights after the last one that did better, the trials, and notes."""
    made: list[tuple[Step, Weights]] = []
    notes = []
    with torch.inference_mode(False), torch.no_grad():
        for step in steps:
            found = step.fit(refit, drop, made[-1][1] if made else start)
            if isinstance(found, Weights):
                made.append((step, found))
            elif found.note:
                notes.append(found.note)
        if not made:
            return start, [], notes
        parts = []
        for split in steps[0].splits(refit):
            fitted = [weights if split.fold is None else on_fold(refit, weights, split.fold) for _, weights in made]
            parts.append(distances(refit, drop, [start, *fitted], split.examples))
    each = torch.cat(parts, dim=1)
    best, kept, trials = 0, start, []
    for i, (step, weights) in enumerate(made, start=1):
        good = better(each[best], each[i])
        trials.append(Trial(step.name, float(each[best].mean()), float(each[i].mean()), each.shape[1], good))
        if good:
            best, kept = i, weights
    return kept, trials, notes


def distances(refit: Refit, drop: Heads, candidates: Sequence[Weights], examples: Examples) -> Tensor:
    """Divergence from the dense model's answers, ``[candidates, examples]``, float64: without the heads, with new weights."""
    runner, divergence = refit.reference.runner, Divergence(refit.model, seed=0)

    def tried(index: int, own: Sequence[int]) -> Tensor:
        batch = runner.rows.take(runner.batches[index], own)
        with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
            with refit.reference.weights.dense():
                dense = runner.run(batch, unwatched)
            each = []
            for weights in candidates:
                with refit.applied(weights, drop):
                    each.append(_between(divergence, dense, runner.run(batch, unwatched), batch, len(own)))
        runner.count((1 + len(candidates)) * len(own))
        return torch.stack(each)

    return torch.cat(runner.share("distances", [partial(tried, *each) for each in examples.items()]), dim=1)


def _between(divergence: Divergence, dense: Any, now: Any, batch: Any, size: int) -> Tensor:
    """Of two outputs, ``[examples]``: of their logits, or else the squared difference of all that they hold."""
    named = batch if isinstance(batch, Mapping) else {}
    try:
        each = divergence.between(logits_of(dense, named), logits_of(now, named), named).clamp(min=0)  # rounding
    except HeadPruneError:
        each = torch.zeros(size)
        for a, b in zip(tensors(dense), tensors(now), strict=True):
            # A model that says itself how long its answer is (of speech, say) may give another length now.
            if a.is_floating_point() and a.ndim and len(a) % size == 0 and a.shape == b.shape:
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
