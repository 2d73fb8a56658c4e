"""Mask heads, or remove them for real and prove it: the pruned model must give the masked model's answers.

A prune that cannot be proved is undone, and the model is exactly as before: the replaced tensors are kept until then,
so no copy of the model is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from headprune import gates, input_specs
from headprune.arguments import Plan, heads_of, layers_for
from headprune.attention import AttentionLayer, check_heads, check_possible
from headprune.errors import PruneError
from headprune.inputs import Example, check_model, model_device, move, usable
from headprune.offload import replace_inference_placeholders
from headprune.plans import PruningPlan
from headprune.pruned import add_record, record_of, structure_of
from headprune.running import evaluating, forget_compiled, full_precision, uncompiled
from headprune.surgery.evidence import inputs_for
from headprune.surgery.proof import DOES_NOT_RUN, Proof, answers, prove
from headprune.surgery.removal import Removal, check_present, cut
from headprune.trace import example_for

__all__ = ["Proof", "Removal", "answers", "layers_that_run", "mask", "prune", "remove"]

_FAR = 100  # times a proof's tolerance


@contextmanager
def mask(
    model: nn.Module, plan: Plan, example: Example | None = None, *, layers: Sequence[AttentionLayer] | None = None
) -> Iterator[None]:
    """Switch heads off while the context lasts: their output is 0.

    Args:
        model: Any model with attention.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to switch off.
        example: A batch without labels, to trace the model with. Not needed if ``layers`` are given, or if the model is one
            for which an input can be made up, such as those of transformers.
        layers: From `headprune.find_attention`, to save the trace.

    Raises:
        HeadPruneError: An unknown layer or head, or a layer that cannot be masked.
    """
    layers = layers_for(model, layers, example)
    with gates.mask(model, heads_of(plan), layers=layers):
        yield


def prune(
    model: nn.Module, plan: Plan, example: Example | None = None, *, layers: Sequence[AttentionLayer] | None = None
) -> Proof:
    """Remove heads in place, and prove that the model gives the same answers as with these heads masked.

    Args:
        model: Any model with attention. May have been pruned before.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to remove.
        example: A batch without labels, for the trace and for the proof; inputs with other shapes are derived from it. By
            default an input is made up: possible for transformers models, and for others that were repaired or pruned before.
        layers: From `headprune.find_attention`, to save the trace.

    Returns:
        The `Proof`.

    Raises:
        HeadPruneError: An unknown layer or head, heads that cannot go alone, or a plan for another model; no example, and
            it is not known what the model takes.
        PruneError: The pruned model would not give the masked model's answers; the model is unchanged.
    """
    check_model(model)
    if example is None:
        example = example_for(model)
    layers = layers_for(model, layers, example)
    drop = check_heads(heads_of(plan), layers)
    if isinstance(plan, PruningPlan):
        plan.check_model(model, repaired_for=drop)
    replace_inference_placeholders(model)
    touched = [layer for layer in layers if layer.name in drop]
    whole = not record_of(model)["removed"] and not structure_of(model).get("modules")  # else it once had more heads
    modes = {name: module.training for name, module in model.named_modules()}
    for layer in touched:
        check_possible(layer, drop[layer.name])
        check_present(model, layer)

    with torch.inference_mode(False), full_precision(), uncompiled(), evaluating(model), torch.no_grad():
        inputs = inputs_for(model, usable(move(example, model_device(model))))
        removal, proof, failure = prove(model, touched, drop, inputs, layers)
        if failure:
            fails = [a.name for a in touched if prove(model, [a], drop, inputs, layers, keep=False)[2]]
            names = ", ".join(fails[:3]) or "these layers together"
            message = f"The heads of {names} cannot be removed exactly: {failure}. The model is unchanged."
            raise PruneError(message, "Mask them instead (headprune.mask), or leave that layer out of the plan.")
    heads = {"heads": {layer.name: layer.num_heads for layer in layers}} if whole else {}
    add_record(model, {"removed": [removal.drop], **heads}, proof.ghosts)
    forget_compiled()
    for name, module in model.named_modules():  # a new one takes the mode of the one it replaces, or is inside of
        module.training = modes.setdefault(name, modes[name.rpartition(".")[0]])
    input_specs.record(model, example)
    return proof


def layers_that_run(model: nn.Module, layers: Sequence[AttentionLayer], example: Example) -> list[AttentionLayer]:
    """The layers, with ``prunable=False`` where the model does not run without heads of them, or not as the masked one does.

    `prune` finds that too, but only when all is scored and searched. The model is unchanged.
    """

    def failure(those: Sequence[AttentionLayer]) -> str:
        drop = {layer.name: list(layer.units[0]) for layer in those}
        _, proof, why = prove(model, those, drop, inputs, layers, keep=False)
        # What differs by less may do so by rounding, which `prune` looks into.
        return why if why.startswith(DOES_NOT_RUN) or proof.difference > _FAR * proof.tolerance else ""

    able = [layer for layer in layers if layer.prunable and len(layer.units) > 1]
    # Layers that read another one's keys and values, so have fewer projections, only run together with it. Of any two layers,
    # one of these parts holds one alone.
    bits = len(able).bit_length() if len({len(a.projections) for a in able}) > 1 else 0
    parts = [able, *([a for i, a in enumerate(able) if i >> bit & 1] for bit in range(bits))]
    with torch.inference_mode(False), full_precision(), uncompiled(), evaluating(model), torch.no_grad():
        inputs = inputs_for(model, usable(move(example, model_device(model))))
        if not any(failure(those) for those in parts if those):
            return list(layers)
        reasons = {layer.name: failure([layer]) for layer in able}
    return [replace(a, prunable=False, reason=reasons[a.name]) if reasons.get(a.name) else a for a in layers]


def remove(model: nn.Module, removal: Removal) -> None:
    """Repeat a removal without a proof: for a skeleton whose weights are loaded afterwards."""
    cut(model, removal)
    add_record(model, {"removed": [removal.drop]}, removal.ghosts)
