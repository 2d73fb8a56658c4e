"""The steps of a repair, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.repairing import gauss_newton, outputs, values
from headprune.repairing.calibration import Calibration
from headprune.repairing.results import LeftOut, Repair, RepairWeights


@dataclass(frozen=True)
class Step:
    """A step of a repair. To add one: a file with its ``fit``, and a line in `STEPS`.

    Attributes:
        name: As `Trial.step` has it.
        about: What it changes, for a reader.
        fit: ``fit(calibration, drop, start)`` gives the weights after this step, from those before it, or why it is left out.
            ``drop`` are the heads that go. The model is the dense one, and must be so afterwards.
        by_layer: Whether it fits every layer for itself, from the sums of the calibration, without running the model. Plans are
            compared with such steps done. They are made one after another, whether those before were kept or not.
    """

    name: str
    fit: Callable[[Calibration, Heads, RepairWeights], RepairWeights | LeftOut]
    about: str
    by_layer: bool = False


STEPS = (
    Step(outputs.NAME, outputs.fit, "every layer's W_O, each by itself", by_layer=True),
    Step(values.NAME, values.fit, "every layer's W_O and the kept heads' values, each layer by itself", by_layer=True),
    Step("answers", gauss_newton.fit, "the last step: all W_O together, towards the dense model's answers"),
)


def fit_layers(calibration: Calibration, drop: Heads) -> RepairWeights:
    """New weights for the kept heads: every layer fitted for itself, to the dense model's activations.

    The model is not run: the calibration's statistics serve any choice of heads.

    Args:
        drop: ``{layer_name: [head, ...]}``.
    """
    weights = RepairWeights()
    with torch.inference_mode(False), torch.no_grad():
        for step in STEPS:
            if step.by_layer and not isinstance(fitted := step.fit(calibration, drop, weights), LeftOut):
                weights = fitted
    return weights


def drop_columns(calibration: Calibration, drop: Heads, biases: bool = False) -> RepairWeights:
    """The old weights of every W_O that loses heads, without the columns of these.

    Args:
        biases: Whether modules that have none get a bias of zeros, if they can have one.
    """
    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    for projection in (p for p in calibration.projections if p.loses(drop)):
        kept, whole = projection.kept(drop), torch.zeros_like(projection.weight, device="cpu")
        whole[kept] = projection.weight.cpu()[kept]
        bias = projection.own_bias or (biases and projection.has_bias)
        weights[projection.name] = whole, projection.bias.cpu() if bias else None
    return RepairWeights(weights)


def summary(calibration: Calibration, weights: RepairWeights, passes: float) -> Repair:
    """What a repair did, in so many passes, with those that the calibration took."""
    runner = calibration.statistics.runner
    return Repair(
        weights.facts,
        runner.examples,
        sum(len(mixed.firsts) for mixed in runner.mixtures),
        round(passes),
        tuple(name for name in calibration.new_biases if weights.by_module.get(name, (None, None))[1] is not None),
        (*calibration.notes, *([weights.note] if weights.note else [])),
        weights.answers,
        weights.trials,
    )
