"""Repair without training: refit the kept heads by least squares.

Removing heads takes inputs from W_O. Kept heads hold a part of the lost information, or can read it from the same
tokens. So W_O and the kept heads' values are refitted, layer by layer, to reproduce the dense W_O's outputs, with a
ridge towards the old weights and a bias that takes up the removed heads' mean. Repair changes existing weights and adds
missing biases, nothing else, so a repaired model is pruned like any other.

A repair is a list of steps (`headprune.repairing.steps`): output projections, values, and last all linear layers
together, towards the dense model's answers. One `Calibration` serves all steps and any choice of heads. A step that
does no better on the choosing examples is left out (`checked_repair`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune import input_specs
from headprune.arguments import Plan, given_to_choose, heads_of, layers_for, listed, together
from headprune.attention import AttentionLayer, Heads, check_heads
from headprune.divergence import Fidelity, enough
from headprune.errors import HeadPruneError
from headprune.fingerprint import identity
from headprune.inputs import check_weights, inputs_of
from headprune.plans import PruningPlan, note_repaired
from headprune.repairing.calibration import Calibration, calibrate
from headprune.repairing.gauss_newton import step_multiplications
from headprune.repairing.projections import OutputProjection
from headprune.repairing.results import AnswersRepair, LayerRepair, Repair, RepairWeights, Trial
from headprune.repairing.steps import LAYER_STEPS, STEPS, checked_repair, drop_columns, fit_layers, summary
from headprune.running import Progress

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "AnswersRepair", "Calibration", "LayerRepair", "OutputProjection", "Repair", "RepairWeights", "Trial", "calibrate",
    "checked_repair", "fit_layers", "repair", "step_multiplications", "summary",
]  # fmt: skip


def repair(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    choose: Iterable[Any] | None = None,
    layers: Sequence[AttentionLayer] | None = None,
    ridge: float | None = None,
    values: bool = True,
    mixtures: bool = True,
    answers: bool = True,
    biases: bool = True,
    accelerator: Accelerator | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Refit a model's kept heads in place, before the heads of a plan are removed.

    Every W_O that loses a head is fitted by least squares, over all tokens but padding, to map the kept heads' outputs to the
    dense W_O's outputs; the kept heads' values too, where that does better on held-out examples. The removed heads' columns
    become zero, as `headprune.prune`, which you call next, removes them (not in layers that keep their weights: `Repair.notes`).
    Each step is kept only if it brings the answers nearer to the dense model's on ``choose`` (docs/planning.md).

    Args:
        model: The dense model, or one pruned before; its outputs are the target of the fit.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to remove.
        batches: Inputs of the model, or pairs ``(inputs, labels)``. Never those that results are reported on.
        choose: Other batches, which decide what steps are kept. Then the last step is fitted to them too (docs/planning.md).
        layers: From `headprune.find_attention`, to save the trace.
        ridge: Strength towards the old weights; it turns ``answers`` off. By default cross-validated for each layer.
        values: Whether value projections are refitted too: about two passes more.
        mixtures: Whether to fit to mixtures of texts with one answer too (of more than 512, alone), and the last step to those of images.
        answers: Whether all linear layers are then fitted together to the dense model's answers (docs/planning.md).
        biases: Whether a W_O without a bias gets one, for the removed heads' mean. A stock class may have no place for it.
        accelerator: To share the work out among the processes of an `accelerate.Accelerator`.
        progress: Called with (batches done, batches in all) of the longest pass.

    Returns:
        The `Repair`: `Repair.trials` say how every step did on examples that it was not fitted to.

    Raises:
        HeadPruneError: An unknown layer or head, a plan for another model, a ridge that is not above 0, no examples, a bad batch.
    """
    check_weights(model)
    if ridge is not None and not ridge > 0:
        raise HeadPruneError(f"ridge={ridge} is no strength.", "Give a number above 0, such as 0.1, or leave it out.")
    if isinstance(plan, PruningPlan):
        plan.check_model(model)
    layers = layers_for(model, layers, batches=(batches := listed(batches)))
    others = None if choose is None else given_to_choose(choose, batches)
    drop, before = check_heads(heads_of(plan), layers), (identity(model), getattr(plan, "model", ""))
    fits = ridge != math.inf
    with torch.inference_mode(False), together(accelerator, model, batches, others or ()):
        calibration = calibrate(
            model, layers, batches, values=values and fits, mixtures=mixtures and fits, biases=biases,
            others=others or (), ridge=ridge, progress=progress,
        )  # fmt: skip
        result = _repair(calibration, drop, others, answers and ridge is None)
    note_repaired(model, before, drop)
    input_specs.record(model, inputs_of(model, calibration.runner.batches[0]))
    return result


def _repair(calibration: Calibration, drop: Heads, choose: Sequence[Any] | None, answers: bool) -> Repair:
    """Measure the dense model and write the new weights into it, if a projection that can be refitted loses heads."""
    runner = calibration.runner
    if not any(projection.loses(drop) for projection in calibration.projections):
        return Repair({}, runner.examples, 0, 0, notes=calibration.notes)
    fidelity = None if choose is None else Fidelity(calibration.model, enough(calibration.model, choose))
    weights = checked_repair(calibration, drop, fidelity, STEPS if answers else LAYER_STEPS)
    # Of a layer that the answers do not depend on there are no new weights, but its heads go, too.
    calibration.write({**drop_columns(calibration, drop).by_module, **weights.by_module})
    return summary(calibration, weights, runner.passes)
