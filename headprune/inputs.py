"""Example inputs: pass a batch to a model, move it between devices, and vary it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError, first_line
from headprune.offload import execution_device, replace_inference_placeholders

LABELS = ("labels", "start_positions", "end_positions")
ADDED = ("headprune_dense", "headprune_drawn")  # keys that `headprune.divergence` adds to a batch

Example = Mapping[str, Any] | Tensor | tuple[Any, ...] | list[Any]
Path = tuple[str | int, ...]
"""A value's place in a nested structure: keys and indices, from the outside in."""


def call(model: nn.Module, example: Example, **extra: Any) -> Any:
    """Call ``model`` on a dict (keyword arguments), a tensor, or a tuple (positional arguments)."""
    if isinstance(example, Mapping):
        return model(**example, **extra)
    if isinstance(example, Tensor):
        return model(example, **extra)
    return model(*example, **extra)


def does_not_run(error: Exception, name: str = "The model") -> HeadPruneError:
    """The HeadPruneError for an error that a model raised on an example."""
    message = f"{name} does not run on the example: {type(error).__name__}: {first_line(error)}."
    return HeadPruneError(message, "Pass what its forward() takes: a dict of tensors, a tensor or a tuple.")


def takes(model: nn.Module, name: str) -> bool:
    """Whether ``forward`` accepts an argument of this name."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def writes(model: nn.Module) -> bool:
    """Whether the model generates text."""
    able = getattr(model, "can_generate", None)
    return callable(able) and bool(able())


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a transformers model's config says so."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def vocabulary_size(model: nn.Module) -> int:
    """Size of a model's vocabulary; 0 if it has none, or it is not known (CLIP has two embeddings, other models have none)."""
    try:
        table = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return 0
    return table.num_embeddings if isinstance(table, nn.Embedding) else 0


def without_labels(model: nn.Module, example: Example) -> Example:
    """An example without labels, except for an encoder-decoder, which takes its decoder's tokens from them."""
    return unlabelled(example) if isinstance(example, Mapping) and not is_encoder_decoder(model) else example


def unlabelled(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without its labels."""
    return {key: value for key, value in batch.items() if key not in LABELS}


def with_decoder_input(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without its labels; an encoder-decoder, which shifts them for its decoder, gets them there as they are."""
    labels, batch = batch.get("labels"), unlabelled(batch)
    given = any(key.startswith("decoder_input") for key in batch)
    if is_encoder_decoder(model) and not given and isinstance(labels, Tensor):
        batch["decoder_input_ids"] = labels.clamp(min=0)
    return batch


def inputs_of(model: nn.Module, batch: Any) -> Any:
    """The model's inputs in a batch; without labels if the model does not accept them."""
    if not isinstance(batch, Mapping):
        return batch[0] if isinstance(batch, tuple | list) else batch
    hidden = (*ADDED, *(() if takes(model, "labels") else LABELS))
    return {k: v for k, v in batch.items() if k not in hidden}


def config_fields(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, value) of all fields of a model's config and its sub-configs; [] without a config."""
    config = getattr(model, "config", None)
    if not hasattr(config, "__dict__"):
        return []
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    return [item for part in parts for item in vars(part).items()]


def positions_of(model: nn.Module, **part: bool) -> int | None:
    """The largest number of tokens in a text, by a transformers model's config; None without such a limit.

    Args:
        part: ``decoder=True`` for the limit of a decoder, as for ``get_text_config``.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(**part) if hasattr(config, "get_text_config") else config
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    # Rows of the table that no token uses: RoBERTa starts after its padding index.
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None)
    return positions - max((index + 1 for index in padding), default=0)


def too_long(model: nn.Module, batch: Any) -> str:
    """A remark for an error message if a batch has more tokens than the model has positions; otherwise ""."""
    most = positions_of(model)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or most is None or ids.shape[-1] <= most:
        return ""
    return f": they have {ids.shape[-1]} tokens, the model has {most} positions (--max-length cuts them)"


def model_device(model: nn.Module) -> torch.device:
    """The device for a model's inputs: that of its first parameter (the CPU for a model without parameters).

    For a model that Accelerate has offloaded, it is the device that the weights are loaded onto.

    Raises:
        HeadPruneError: ``model`` is no model.
    """
    check_model(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return (execution_device(model) or device) if device.type == "meta" else device


def map_paths(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """``value`` with ``change(path, leaf)`` in place of every leaf; mappings become dicts, lists stay lists."""
    if isinstance(value, Mapping):
        return {k: map_paths(v, change, (*path, k)) for k, v in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_paths(v, change, (*path, i)) for i, v in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return change(path, value)


def by_path(value: Any) -> dict[Path, Tensor]:
    """Every tensor in a nested structure, depth first, by path; caches and other objects are ignored."""
    leaves: dict[Path, Any] = {}
    map_paths(value, leaves.setdefault)
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nested structure, as `by_path`."""
    return list(by_path(value).values())


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """As `map_paths`, for a ``change`` that does not ask for the path."""
    return map_paths(value, lambda _, leaf: change(leaf))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change(tensor)`` in place of every tensor."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def move(value: Any, device: torch.device | str) -> Any:
    """``value`` with every tensor in it on ``device``."""
    return map_tensors(value, lambda t: t.to(device))


def usable(value: Any) -> Any:
    """``value`` with copies of tensors created in inference mode, which autograd refuses."""
    return map_tensors(value, lambda t: t.clone() if t.is_inference() else t)


def first_rows(value: Any, rows: int) -> Any:
    """The first ``rows`` rows of every tensor in a nested structure."""
    return map_tensors(value, lambda t: t[:rows] if t.ndim else t)


def widened(t: Tensor) -> Tensor:
    """A tensor in float32, or in float64 if that is its type."""
    return t if t.dtype == torch.float64 else t.float()


def doubled(t: Tensor) -> Tensor:
    """A tensor in float64, on its device (a copy to the CPU would wait for a GPU); on the CPU if the device has no float64 (mps)."""
    return (t.cpu() if t.device.type == "mps" else t).double()


def is_transposed(module: nn.Module) -> bool:
    """Whether a module stores its weight as ``[in, out]``, as transformers' Conv1D does, and not nn.Linear and convolutions."""
    return not isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def gathered(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors and move the result to the CPU; one copy for all, since every copy waits for a GPU."""
    together = len({part.device for part in parts}) == 1
    return torch.cat(list(parts) if together else [part.cpu() for part in parts], dim).cpu()


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed the random number generators of the CPU and the model's CUDA device while the context lasts; then restore their states."""
    device = model_device(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def check_model(model: nn.Module) -> None:
    """Refuse an argument that is no PyTorch model, such as a path, a tokenizer or a pipeline.

    Raises:
        HeadPruneError: It is no `torch.nn.Module`.
    """
    if not isinstance(model, nn.Module):
        message = f"The model is a {type(model).__name__}, not a torch.nn.Module."
        hint = "Pass what transformers' from_pretrained or headprune.load gives; of a pipeline, pipeline.model."
        raise HeadPruneError(message, hint)


def check_weights(model: nn.Module) -> None:
    """Refuse weights that autograd refuses.

    Raises:
        HeadPruneError: A weight was created in inference mode, or ``model`` is no model.
    """
    check_model(model)
    replace_inference_placeholders(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            message = f"{name} was made in torch.inference_mode(), and what was cannot be differentiated."
            hint = "Make or load the model outside of it, or pass copy.deepcopy(model), made outside of it."
            raise HeadPruneError(message, hint)


def variants(example: Example) -> list[Example]:
    """Versions of an example with other shapes or padding, most different first.

    In this order, as far as the example allows: fewer tokens and one padded position; one padded position; one row less. A
    model with a fixed input shape may refuse some of them, so callers try them in turn.
    """
    result: list[Example] = []
    if isinstance(example, Mapping) and isinstance(ids := example.get("input_ids"), Tensor) and ids.ndim == 2:
        cut: Any = first_tokens(example, max(2, (ids.shape[1] * 3) // 5))
        if cut is not example:
            if isinstance(mask := cut.get("attention_mask"), Tensor) and mask.ndim == 2:
                cut["attention_mask"] = mask = mask.clone()
                mask[0, -1] = 0
            result.append(cut)
    if (padded := _padded(example)) is not None:
        result.append(padded)
    batch = {t.shape[0] for t in tensors(example) if t.ndim}
    if len(batch) == 1 and (rows := batch.pop()) > 1:
        result.append(first_rows(example, rows - 1))
    return result


def first_tokens(example: Example, most: int) -> Example:
    """Cut a text to its first ``most`` tokens: ``input_ids`` and all tensors of their shape but the decoder's; other examples stay unchanged."""
    if not isinstance(example, Mapping) or not isinstance(ids := example.get("input_ids"), Tensor):
        return example
    if ids.ndim != 2 or ids.shape[1] <= most:
        return example
    long = {k: v for k, v in example.items() if isinstance(v, Tensor) and v.shape[:2] == ids.shape}
    return {**example, **{k: v[:, :most] for k, v in long.items() if not k.startswith("decoder_")}}


def _padded(example: Example) -> Example | None:
    """The example with its first row's last token flipped in every mask (to padding, if it was a real token); None without a mask."""
    if isinstance(example, Tensor):
        return None
    if isinstance(example, Mapping):
        result: Example = {k: _flipped(v) if "mask" in k else v for k, v in example.items()}
    else:
        result = tuple(_flipped(v) if isinstance(v, Tensor) and not v.is_floating_point() else v for v in example)
    same = all(a is b for a, b in zip(tensors(result), tensors(example), strict=True))
    return None if same else result


def _flipped(value: Any) -> Any:
    """A mask ``[rows, tokens]`` with its first row's last token flipped; any other value unchanged."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] < 3 or value.numel() == 0:
        return value
    if value.dtype != torch.bool and bool(((value != 0) & (value != 1)).any()):
        return value
    value = value.clone()
    value[0, -1] = value[0, -1] == 0
    return value


def scrambled(example: Example, vocabulary: int) -> list[Example]:
    """The example with random content: token ids below ``vocabulary``, or noise with the same standard deviation."""
    generator = torch.Generator().manual_seed(0)

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t.device, t.dtype) * t.float().std().to(t.dtype)

    if isinstance(example, Mapping):
        changed = {}
        for key, value in example.items():
            if key == "input_ids" and isinstance(value, Tensor) and vocabulary:
                ids = torch.randint(0, vocabulary, value.shape, generator=generator).to(value.device, value.dtype)
                # Ids below 5 mostly mark padding and ends: they stay in place, and none are added.
                changed[key] = torch.where((ids >= 5) & (value >= 5), ids, value)
            elif key in ("pixel_values", "inputs_embeds", "input_features") and isinstance(value, Tensor):
                changed[key] = noise(value)
        return [{**example, **changed}] if changed else []
    if isinstance(example, Tensor):
        return [noise(example)] if example.is_floating_point() else []
    first, *rest = example
    return [(noise(first), *rest)] if isinstance(first, Tensor) and first.is_floating_point() else []
