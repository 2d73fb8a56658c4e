"""Example inputs: how a batch is passed to a model, moved, and varied."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError

LABELS = ("labels", "start_positions", "end_positions")
KNOWN, DRAWN = "headprune_dense", "headprune_drawn"  # what `headprune.divergence` adds to a batch
ADDED = (KNOWN, DRAWN)

Example = Mapping[str, Any] | Tensor | tuple[Any, ...] | list[Any]


def call(model: nn.Module, example: Example, **extra: Any) -> Any:
    """Call ``model`` on a dict (keyword arguments), a tensor, or a tuple (positional arguments)."""
    if isinstance(example, Mapping):
        return model(**example, **extra)
    if isinstance(example, Tensor):
        return model(example, **extra)
    return model(*example, **extra)


def takes(model: nn.Module, name: str) -> bool:
    """Whether ``forward`` has such an argument."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def too_long(model: nn.Module, batch: Any) -> str:
    """That a batch has more tokens than the model has positions, if it has."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or not isinstance(most, int) or ids.shape[-1] <= most:
        return ""
    return f": they have {ids.shape[-1]} tokens, the model has {most} positions (--max-length cuts them)"


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter (CPU for a model without any)."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def move(value: Any, device: torch.device | str) -> Any:
    """``value`` with every tensor in it on ``device``; structure is kept."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: move(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(move(v, device) for v in value)
    return value


def usable(value: Any) -> Any:
    """``value`` with copies of tensors that were made in inference mode, which autograd refuses."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, Mapping):
        return {k: usable(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(usable(v) for v in value)
    return value


def check_weights(model: nn.Module) -> None:
    """Refuse weights that autograd refuses.

    Raises:
        HeadPruneError: Some were made in inference mode.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise HeadPruneError(
                f"{name} was made in torch.inference_mode(), and what was cannot be differentiated.",
                "Make or load the model outside of it, or pass copy.deepcopy(model), made outside of it.",
            )


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nested structure, depth first. Caches and other objects are left out."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors(v)]
    return []


def variants(example: Example) -> list[Example]:
    """Differently shaped versions of an example, most different first.

    The first has fewer tokens and one padded position (where there is an ``attention_mask``), the
    second one row less. A model that fixes its input's shape may refuse some: the caller tries them in turn.
    """
    found: list[Example] = []
    batch = {t.shape[0] for t in tensors(example) if t.ndim}
    if isinstance(example, Mapping) and isinstance(ids := example.get("input_ids"), Tensor) and ids.ndim == 2:
        length = ids.shape[1]
        shorter = max(2, (length * 3) // 5)
        if shorter < length:
            cut: dict[str, Any] = {}
            for key, value in example.items():
                own = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == ids.shape
                cut[key] = value[:, :shorter].clone() if own and not key.startswith("decoder_") else value
            mask = cut.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                mask[0, -1] = 0
            if isinstance(labels := cut.get("labels"), Tensor) and labels.shape[:2] == (ids.shape[0], length):
                cut["labels"] = labels[:, :shorter]
            found.append(cut)
    if (padded := _padded(example)) is not None:
        found.append(padded)
    if len(batch) == 1 and (rows := batch.pop()) > 1:
        found.append(first_rows(example, rows - 1))
    return found


def _padded(example: Example) -> Example | None:
    """The example with the last token of its first row the other way in every mask of it: padding, or none."""
    changed = False

    def other(value: Any) -> Any:
        nonlocal changed
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] < 3 or value.numel() == 0:
            return value
        if value.dtype != torch.bool and bool(((value != 0) & (value != 1)).any()):
            return value
        changed = True
        value = value.clone()
        value[0, -1] = value[0, -1] == 0
        return value

    if isinstance(example, Mapping):
        made: Example = {k: other(v) if "mask" in k else v for k, v in example.items()}
    elif isinstance(example, tuple | list):
        made = tuple(other(v) if isinstance(v, Tensor) and not v.is_floating_point() else v for v in example)
    else:
        return None
    return made if changed else None


def scrambled(example: Example, vocabulary: int) -> list[Example]:
    """The example with random content: token ids below ``vocabulary``, or noise of the same spread."""
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t.device, t.dtype) * t.float().std().to(t.dtype)

    if isinstance(example, Mapping):
        changed = {}
        for key, value in example.items():
            if key == "input_ids" and isinstance(value, Tensor) and vocabulary:
                ids = torch.randint(0, vocabulary, value.shape, generator=generator).to(value.device, value.dtype)
                # The first few ids mostly mark padding and ends: they stay where they are, and stay away elsewhere.
                changed[key] = torch.where((ids >= 5) & (value >= 5), ids, value)
            elif key in ("pixel_values", "inputs_embeds", "input_features") and isinstance(value, Tensor):
                changed[key] = noise(value)
        return [{**example, **changed}] if changed else []
    if isinstance(example, Tensor):
        return [noise(example)] if example.is_floating_point() else []
    first, *rest = example
    return [(noise(first), *rest)] if isinstance(first, Tensor) and first.is_floating_point() else []


def first_rows(value: Any, rows: int) -> Any:
    """The first ``rows`` rows of every tensor in a nested structure."""
    if isinstance(value, Tensor):
        return value[:rows] if value.ndim else value
    if isinstance(value, Mapping):
        return {k: first_rows(v, rows) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(first_rows(v, rows) for v in value)
    return value
