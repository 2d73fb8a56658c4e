"""Saving: a pruned model as its checkpoint was stored.

On a CPU a checkpoint in half precision is computed with in float32, which is faster and rounds no small score. Its pruned model is
saved in half precision all the same: weights that were not refitted lose nothing by it, and the folder is not larger than
the dense one. What is measured is the saved folder, its weights widened again, as the dense model's are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import checkpoint
from headprune.app.sources import narrow, placing_of, stored_size, widen
from headprune.app.workflow.scene import Scene
from headprune.errors import HeadPruneError, PruneError, first_line
from headprune.inputs import call, model_device, move
from headprune.memory import is_out_of_memory
from headprune.offload import copied
from headprune.surgery import answers


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        dtype: What its weights are stored in, such as ``"bfloat16"``.
        difference: Of its answers when it is loaded from the model's in memory, as a share of their largest value.
        weights: Bytes that its weights take there.
        note: What a reader should know; "" for nothing.
    """

    dtype: str
    difference: float
    weights: int
    note: str = ""


def save(scene: Scene, model: nn.Module, path: Path, tolerance: float, **about: Any) -> Saved:
    """Save a pruned model, and see that the folder answers as the model does.

    Args:
        tolerance: How much its answers may differ, as a share of their largest value.
        about: What the folder says of the model, beside its task and which model it was made from.

    Raises:
        PruneError: It does not.
    """
    half, note = scene.loaded.stored, ""
    if half is not None:
        try:
            return _saved(scene, halved(model, half, _example(scene, half)), path, tolerance, about)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, OSError):
                raise
            note = f"Saved in float32: in {_name(half)}, as it was stored, the model does not work here ({first_line(error)})."
    return replace(_saved(scene, model, path, tolerance, about), note=note)


def load(scene: Scene, path: Path) -> nn.Module:
    """A saved model, for the run to measure."""
    loading = scene.options.loading
    places = placing_of(loading.device_map, loading.device_memory) or {"device": model_device(scene.model)}
    # What is in the folder came with the dense model.
    model = checkpoint.load(path, **places, as_saved=True, trust_remote_code=loading.trust_remote_code)
    if scene.loaded.stored is not None:
        widen(model)
    return model


def halved(model: nn.Module, half: torch.dtype, example: dict[str, torch.Tensor]) -> nn.Module:
    """A copy of a model with its weights in half precision, that runs so.

    Args:
        example: For a model in half precision.

    Raises:
        HeadPruneError: Its answers are not finite.
    """
    narrowed = copied(model)
    narrow(narrowed, half)
    with torch.inference_mode():
        outputs = answers(call(narrowed, example))
    if not all(bool(t.isfinite().all()) for t in outputs):
        raise HeadPruneError("its answers are not finite")
    return narrowed


def _saved(scene: Scene, model: nn.Module, path: Path, tolerance: float, about: dict[str, Any]) -> Saved:
    dtype, weights = next(model.parameters()).dtype, stored_size(model)
    half = scene.loaded.stored if any(p.dtype == scene.loaded.stored for p in model.parameters()) else None
    checkpoint.save(
        model, path, processor=scene.loaded.processor, overwrite=True, example=_example(scene, half) if half else None,
        about={"task": scene.loaded.task.name, "from": scene.loaded.source, **about},
    )  # fmt: skip
    reloaded = load(scene, path)
    if half:
        widen(model)
    example = move(scene.example, model_device(model))
    with torch.inference_mode():
        pairs = zip(answers(call(model, example)), answers(call(reloaded, example)), strict=True)
        difference = max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)
    if not difference <= tolerance:
        hint = "Please report this."
        raise PruneError(f"The saved model answers differently after loading (by {difference:.2g}).", hint)
    return Saved(_name(half or dtype), difference, weights)


def dense_weights(scene: Scene) -> tuple[int, str]:
    """Bytes of the dense model's weights, and their type, in the precision in which pruned ones are saved."""
    half = scene.loaded.stored
    return stored_size(scene.model, half), _name(half or next(scene.model.parameters()).dtype)


def _example(scene: Scene, half: torch.dtype) -> dict[str, torch.Tensor]:
    """The scene's example for a model in half precision, which takes pixels and sounds so, too."""
    example = move(scene.example, model_device(scene.model))
    return {k: v.to(half) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in example.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
