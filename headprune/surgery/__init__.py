"""Remove heads for real, and prove it: the pruned model must answer as the masked one did.

Every change goes through a journal, so a prune that cannot be proved is undone and the model is bit
for bit what it was. The journal keeps the replaced tensors, so no whole-model copy is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headprune.arguments import Plan, heads_of, layers_for
from headprune.attention import AttentionLayer, check_heads, check_possible, ghosts
from headprune.errors import PruneError
from headprune.forms import remember
from headprune.inputs import Example, model_device, move, usable
from headprune.modules import forget_compiled, uncompiled
from headprune.plans import PruningPlan
from headprune.surgery.journal import Journal
from headprune.surgery.proof import TOLERANCE, TRIED, Proof, answers, attempt, failing_alone, inputs_for, references
from headprune.surgery.removal import Removal, check_present, left_as_ghosts, ways
from headprune.trace import evaluating, example_for

__all__ = ["Proof", "Removal", "answers", "prune", "record", "remove"]

_RECORD = "_headprune_record"


def prune(
    model: nn.Module,
    plan: Plan,
    example: Example | None = None,
    *,
    layers: Sequence[AttentionLayer] | None = None,
) -> Proof:
    """Remove heads in place, and prove that the model answers as if they were masked.

    Args:
        model: Any model with attention. May have been pruned before.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to remove.
        example: A batch for the trace and for the proof, without labels; others, differently shaped, are derived from it. By
            default an input is made up, for transformers models and for others that were repaired or pruned before.
        layers: From `headprune.find_attention`, to save the trace.

    Returns:
        The `Proof`.

    Raises:
        HeadPruneError: An unknown layer or head, heads that cannot go alone, a plan for another model; no example, where
            it is not known what the model takes.
        PruneError: The pruned model would not have been the masked one; the model is unchanged.
    """
    if example is None:
        example = example_for(model)
    layers = layers_for(model, layers, example)
    drop = check_heads(heads_of(plan), layers)
    if isinstance(plan, PruningPlan):
        plan.check_model(model, repaired_for=drop)
    touched = [layer for layer in layers if layer.name in drop]
    modes = {layer.name: model.get_submodule(layer.module).training for layer in touched if layer.prunable}
    for layer in touched:
        check_possible(layer, drop[layer.name])
        check_present(model, layer)

    tolerance = max((TOLERANCE.get(p.dtype, 0.0) for p in model.parameters()), default=TOLERANCE[torch.float32])
    with torch.inference_mode(False), uncompiled(), evaluating(model), torch.no_grad():
        inputs = inputs_for(model, usable(move(example, model_device(model))))
        reference = references(model, inputs, drop, layers)
        failures, tried = [], set[tuple[str, ...]]()
        for removal in ways(touched, drop):
            journal = Journal()
            try:
                difference, why = attempt(model, journal, removal, reference, tolerance, tried)
            except BaseException:  # an interrupt must not leave half a prune either
                journal.undo()
                raise
            if not why:
                break
            journal.undo()
            failures += [why] if why != TRIED else []
        else:
            guilty = failing_alone(model, touched, drop, inputs, layers, tolerance)
            names = ", ".join(c.name for c in guilty[:3]) or "these layers together"
            raise PruneError(
                f"The heads of {names} cannot be removed exactly: {failures[-1]}. The model is unchanged.",
                "Mask them instead (headprune.mask), or leave that layer out of the plan.",
            )
    forget_compiled()
    for name, training in modes.items():  # a stand-in or stub is new: it takes the mode of what it replaced
        model.get_submodule(name.partition("#")[0]).train(training)
    _remember(model, removal)
    remember(model, example)
    return Proof(difference, tolerance, len(reference), left_as_ghosts(touched, drop))


def remove(model: nn.Module, removal: Removal) -> None:
    """Repeat a removal without a proof: for a skeleton whose weights are loaded afterwards."""
    Journal().remove(model, removal)
    _remember(model, removal)


def _remember(model: nn.Module, removal: Removal) -> None:
    record(model).append(removal)
    ghosts(model).update(left_as_ghosts(removal.layers, removal.drop))


def record(model: nn.Module) -> list[Removal]:
    """The removals that ``model`` has been through, oldest first."""
    if _RECORD not in model.__dict__:
        model.__dict__[_RECORD] = []
    removals: list[Removal] = model.__dict__[_RECORD]
    return removals
