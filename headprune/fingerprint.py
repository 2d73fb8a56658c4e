"""Short hashes of a model's weights and of the code, so that results are used only with the model and code that made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headprune.offload import Offloaded, is_dispatched

HALVES = (torch.bfloat16, torch.float16)
_LEFT_OUT = ("transformers_version", "dtype", "torch_dtype", "use_cache")  # of a config, for its hash


def identity(model: nn.Module) -> str:
    """What scores and plans note of a model: its `fingerprint` once half precision is widened to float32, as it is on a CPU.

    So what was found on one device serves the same checkpoint on another one, in whatever precision it is computed there.
    """
    return fingerprint(model, widened=True)


def known_as(model: nn.Module) -> tuple[str, ...]:
    """What scores and plans of a model may have noted of it: its `identity`, or before there was that, its `fingerprint`."""
    halves = any(t.dtype in HALVES for _, t in _plain(model.state_dict()))
    return (identity(model), fingerprint(model)) if halves else (fingerprint(model),)


def is_same(model: nn.Module, noted: str) -> bool:
    """Whether scores or a plan are of this model, by what they noted."""
    return noted in known_as(model)


def fingerprint(model: nn.Module, *, widened: bool = False) -> str:
    """Hash of every parameter and persistent buffer: name, shape, type and all of its bytes.

    A sample of the bytes would be quicker, but an even stride over a weight matrix can miss every column but one.

    Args:
        widened: Whether half precision counts as the float32 that it is computed with on a CPU; one tensor at a time is widened.
    """
    digest = hashlib.sha256()
    seen: set[object] = set()
    stored = Offloaded(model) if is_dispatched(model) else None
    for name, tensor in _plain(model.state_dict()):
        if not tensor.numel():
            continue  # it stands for weights that are gone
        half = widened and tensor.dtype in HALVES
        digest.update(f"{name}:{tuple(tensor.shape)}:{torch.float32 if half else tensor.dtype};".encode())
        where: object = tensor.data_ptr(), tensor.nbytes  # a part of another tensor may begin where that does
        if stored is not None and name in stored:
            where, tensor = stored.place(name), _numbers(stored, name)
        if tensor.device.type == "meta" or where in seen:
            continue  # no bytes, or those of a weight that is tied to this one
        seen.add(where)
        plain = tensor.detach().float() if half else tensor.detach()
        digest.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _numbers(stored: Offloaded, name: str) -> Tensor:
    """A tensor of a dispatched model; one without numbers if they are nowhere."""
    try:
        return stored[name]
    except KeyError:
        return stored.placeholder(name)


def config_hash(model: nn.Module) -> str:
    """Hash of a transformers model's config, which decides as much as its weights what it computes; "" for any other model.

    Left out is what differs between equal models: where it was loaded from, by which version, and in which precision.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return ""
    text = json.dumps(_told(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def processor_hash(processor: Any) -> str:
    """Hash of a tokenizer or of an image processor, which decides what a model is given; "" for one that cannot be read."""
    raw = getattr(processor, "backend_tokenizer", None)
    if raw is not None:
        told = json.loads(raw.to_str())
        for use in ("truncation", "padding"):  # of the last call
            told.pop(use, None)
        told["more"] = [str(processor.special_tokens_map), getattr(processor, "model_max_length", None)]
    elif hasattr(processor, "to_dict"):
        told = _told(processor.to_dict())
    else:
        return ""
    return hashlib.sha256(
        json.dumps(told, sort_keys=True, default=str).encode("utf-8", "backslashreplace")
    ).hexdigest()[:16]


def _told(value: Any) -> Any:
    if isinstance(value, Mapping):
        told = {str(k): _told(v) for k, v in value.items() if not str(k).startswith("_") and k not in _LEFT_OUT}
        if (
            told.get("problem_type") == "single_label_classification"
        ):  # classifiers note it when they first compute a loss
            told["problem_type"] = None
        return told
    return [_told(v) for v in value] if isinstance(value, list | tuple) else value


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor only passes for one of its shape and type, as quantised weights do; one spread over devices does not count."""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements")


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a state dict; a quantised one is made of several."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue  # what a module notes beside its weights
        if is_wrapper(value):
            parts, _ = cast(Any, value).__tensor_flatten__()
            yield from _plain({f"{name}.{part}": getattr(value, part) for part in parts})
        else:
            yield name, value


@cache
def versions() -> tuple[str, ...]:
    """The versions that unfinished work depends on; of headprune also a hash of its code, which changes between releases."""
    import transformers

    from headprune import __version__

    code = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root)}:".encode() + path.read_bytes())
    return __version__, code.hexdigest()[:16], torch.__version__, transformers.__version__
