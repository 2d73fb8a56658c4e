"""Digests of a model's weights, config and processor, and of the code, to check that stored results belong to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from xxhash import xxh3_128

from headprune.files import digest
from headprune.offload import Offloaded, is_dispatched

HALVES = (torch.bfloat16, torch.float16)
_AT_ONCE = 1 << 26  # bytes of a tensor that are copied from a GPU to be hashed
_LEFT_OUT = ("transformers_version", "dtype", "torch_dtype", "use_cache")  # config fields that its digest ignores


def identity(model: nn.Module) -> str:
    """The digest that scores and plans store of their model: its `fingerprint`, with half precision widened to float32.

    So scores and plans fit the same checkpoint on every device and in every precision that it is computed in there.
    """
    return fingerprint(model, widened=True)


def has_identity(model: nn.Module, stored: str) -> bool:
    """Whether a stored digest is of this model: its `identity` or `fingerprint` or, from older versions, a SHA-256 of all bytes."""
    older = (digest(_named_bytes(model, widened, tensor_bytes)) for widened in (True, False))
    return stored == identity(model) or stored == fingerprint(model) or stored in older


def fingerprint(model: nn.Module, *, widened: bool = False) -> str:
    """The digest of every parameter and persistent buffer: name, shape, type and all of its bytes.

    A sample of the bytes would be quicker, but an even stride over a weight matrix can miss every column but one. Each tensor is hashed
    to 128 bits by xxHash, ten times as fast as SHA-256, since a run hashes a model of perhaps 8 billion parameters several times.

    Args:
        widened: Hash half precision as float32, in which a CPU computes it; widens one tensor at a time.
    """
    return digest(_named_bytes(model, widened, _hashed))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order, for `headprune.files.digest`."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _hashed(tensor: Tensor) -> bytes:
    """xxHash's 128 bits of a tensor's bytes."""
    result = xxh3_128()
    if tensor.device.type == "cpu":
        result.update(tensor_bytes(tensor))
        return result.digest()
    # Through a part of memory that stays in place: copies into new memory were most of a run's time for a Llama of 8B on an H200.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    held = torch.empty(min(_AT_ONCE, len(flat)), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for some in torch.split(flat, _AT_ONCE):
        result.update(held[: len(some)].copy_(some).numpy().data)
    return result.digest()


def config_hash(model: nn.Module) -> str:
    """The digest of a transformers model's config, on which its answers depend as on its weights; "" for any other model.

    It ignores fields that differ between equal models: the source, the library version and the precision.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return ""
    return _digest_of(_comparable(config.to_dict()))


def processor_hash(processor: Any) -> str:
    """The digest of a tokenizer or image processor, which determines a model's inputs; "" if its settings cannot be read."""
    tokenizer = getattr(processor, "backend_tokenizer", None)
    if tokenizer is not None:
        settings = json.loads(tokenizer.to_str())
        for use in ("truncation", "padding"):  # settings of the last call
            settings.pop(use, None)
        settings["more"] = [str(processor.special_tokens_map), getattr(processor, "model_max_length", None)]
    elif hasattr(processor, "to_dict"):
        settings = _comparable(processor.to_dict())
    else:
        return ""
    return _digest_of(settings)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is a wrapper subclass around other tensors, as quantised weights are; distributed tensors do not count."""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements")


@cache
def versions() -> tuple[str, ...]:
    """The versions that unfinished work depends on; for headprune also a digest of its code, which changes between releases."""
    import transformers

    from headprune import __version__

    root = Path(__file__).parent
    code = digest(part for path in sorted(root.rglob("*.py")) for part in (f"{path.relative_to(root)}:", path))
    return __version__, code, torch.__version__, transformers.__version__


def _named_bytes(
    model: nn.Module, widened: bool, content: Callable[[Tensor], bytes | memoryview]
) -> Iterator[str | bytes | memoryview]:
    """The input of `fingerprint`'s digest; ``content`` stands for a tensor's values."""
    read: set[object] = set()
    stored = Offloaded(model) if is_dispatched(model) else None
    for name, tensor in _plain_tensors(model.state_dict()):
        if not tensor.numel():
            continue  # an empty placeholder for removed weights
        half = widened and tensor.dtype in HALVES
        yield f"{name}:{tuple(tensor.shape)}:{torch.float32 if half else tensor.dtype};"
        where: object = tensor.data_ptr(), tensor.nbytes  # with the size: a slice may begin where its base does
        if stored is not None and name in stored:
            where = stored.place(name)
            with suppress(KeyError):  # its value is stored nowhere
                tensor = stored[name]
        if tensor.device.type == "meta" or where in read:
            continue  # no bytes, or those of a tied weight that was already hashed
        read.add(where)
        yield content(tensor.float() if half else tensor)


def _plain_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a state dict; a quantised tensor yields its several parts."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue  # extra state of a module
        if is_wrapper(value):
            parts, _ = cast(Any, value).__tensor_flatten__()
            yield from _plain_tensors({f"{name}.{part}": getattr(value, part) for part in parts})
        else:
            yield name, value


def _digest_of(settings: Any) -> str:
    return digest(json.dumps(settings, sort_keys=True, default=str))


def _comparable(value: Any) -> Any:
    """A config without fields that differ between equal models."""
    if isinstance(value, Mapping):
        fields = {str(k): _comparable(v) for k, v in value.items() if not str(k).startswith("_") and k not in _LEFT_OUT}
        if fields.get("problem_type") == "single_label_classification":  # set by a classifier's first loss
            fields["problem_type"] = None
        return fields
    return [_comparable(v) for v in value] if isinstance(value, list | tuple) else value
