"""Resolves what the user typed for a model: its source, the devices of its weights, and its precision.

A weight that came from half precision does not change when it is rounded to it again. So a checkpoint that was stored in
half precision can be saved in it again: only refitted weights lose precision.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from headprune import checkpoint
from headprune.errors import HeadPruneError, check_text, first_line, registered
from headprune.files import recover_folder
from headprune.fingerprint import HALVES
from headprune.inputs import model_device
from headprune.offload import Offloaded


def check_source(source: str) -> None:
    """Refuse a source that cannot be a model, before anything is loaded.

    Raises:
        HeadPruneError: Neither a folder nor a name that a model on the Hub can have.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not source.strip():
        raise HeadPruneError("No model was named.", "Pass a Hub id, a local folder, or a folder headprune saved.")
    check_text(Path(source))
    try:
        recover_folder(Path(source))
        if Path(source).is_file():
            raise HeadPruneError(f"{source} is a file.", "Pass the folder that it lies in, or a Hub id.")
        if not Path(source).is_dir():
            validate_repo_id(split_revision(source)[0])
    except (OSError, HFValidationError) as error:
        nowhere = "no such folder, and on the Hugging Face Hub no model can have this name"
        why = error.strerror if isinstance(error, OSError) else nowhere
        raise HeadPruneError(f"There is no model {source!r:.200}: {why}.", "Check the spelling, or the path.") from None


def split_revision(source: str) -> tuple[str, str | None]:
    """A model's id and revision, from ``ID@REVISION``; a folder has no revision."""
    if Path(source).exists() or "@" not in source:
        return source, None
    name, _, revision = source.rpartition("@")
    return name, revision


def resolved(source: str) -> str:
    """The source that the user named; for a run folder, the pruned model in it.

    Raises:
        HeadPruneError: The run folder holds none or several.
    """
    path = Path(source)
    is_run = (path / "run.json").is_file() and not (path / "config.json").exists()
    return str(pruned_in(path)) if is_run else source


def pruned_in(path: Path) -> Path:
    """The folder itself, or the pruned model that a run folder holds.

    Raises:
        HeadPruneError: It holds none or several.
    """
    recover_folder(path)
    if checkpoint.is_checkpoint(path):
        return path
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that `headprune prune` saved.")
    numbered = [p for p in path.glob("pruned-*") if p.name.removeprefix("pruned-").isdecimal()]
    models = sorted(filter(checkpoint.is_checkpoint, numbered), key=lambda p: int(p.name.removeprefix("pruned-")))
    if len(models) != 1:
        held = f"{len(models)} pruned models ({', '.join(p.name for p in models)})" if models else "no pruned model"
        hint = f"Name one, such as {models[0]}." if models else "Pass a folder that `headprune prune` saved."
        raise HeadPruneError(f"{path} holds {held}.", hint)
    return models[0]


def pick_device(device: str) -> torch.device:
    """A device by its name; ``"auto"`` is CUDA, then MPS, then CPU.

    Raises:
        HeadPruneError: There is no such device.
    """
    if device == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        place = torch.device(device)
        if place.type not in ("cpu", "cuda", "mps"):
            raise ValueError(f"headprune does not run on {place.type}")
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, ValueError) as error:
        hint = "Use --device auto, cpu, cuda or mps."
        raise HeadPruneError(f"There is no device {device!r} here: {first_line(error)}.", hint) from None
    return place


def dtype_named(dtype: str, device: torch.device) -> torch.dtype | str:
    # Half precision is slow on most CPUs, and rounding there hides small scores.
    known: dict[str, torch.dtype | str] = {"auto": torch.float32 if device.type == "cpu" else "auto"}
    known |= {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
    return registered(known, "dtype", dtype)


NAMED = ("auto", "balanced", "balanced_low_0", "sequential")


def placed(model: nn.Module) -> str:
    """The devices that hold a model's weights, with MiB if there are several, as text."""
    from accelerate.utils import compute_module_sizes

    sizes, places = compute_module_sizes(model), Counter[Any]()
    for name, place in getattr(model, "hf_device_map", {}).items():  # a module's name, or a parameter's
        places[place] += sizes[name]
    if len(places) < 2 and "disk" not in places:
        return str(model_device(model))
    named = {place: f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    return ", ".join(f"{named[place]} ({size / 2**20:,.0f} MiB)" for place, size in places.items())


def placing_of(device_map: str | None, memory: str | None) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that spread weights over devices; {} without a device map.

    Raises:
        HeadPruneError: An invalid map or amount; an amount without a map.
    """
    if device_map is None:
        if memory is not None:
            raise HeadPruneError("--device-memory has no use without --device-map.", "Add --device-map auto.")
        return {}
    try:
        file = TypeAdapter(dict[str, int | str])
        places = device_map if device_map in NAMED else file.validate_json(Path(device_map).read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        hint = f'Use {", ".join(NAMED)}, or a JSON file such as {{"model.embed_tokens": 0, "model.layers": "cpu", …}}.'
        raise HeadPruneError(f"There is no device map {device_map!r}: {first_line(error)}.", hint) from error
    return {"device_map": places, "max_memory": None if memory is None else _memory(memory)}


def _memory(text: str) -> dict[int | str, int]:
    """The memory limit of each device, in bytes."""
    from accelerate.utils import convert_file_size_to_int

    try:
        amounts = [[word.strip() for word in part.split("=")] for part in text.split(",")]
        most = {device.lower(): convert_file_size_to_int(size.upper()) for device, size in amounts}
        if not all(device.isdecimal() or device in ("cpu", "mps") for device in most):
            raise ValueError
    except (ValueError, OverflowError):
        hint = "Write it as 0=20GB,1=20GB,cpu=60GB."
        raise HeadPruneError(f"--device-memory {text!r} is no amount for each device.", hint) from None
    return {int(device) if device.isdecimal() else device: size for device, size in most.items()}


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def half_of(config: Any) -> torch.dtype | None:
    """The half precision that a config says its weights are stored in; None for any other dtype."""
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return next((half for half in HALVES if dtype in (half, name_of(half))), None)


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's weights to a half precision, except those that transformers keeps in float32.

    Buffers stay as they are: rotary frequencies must not be rounded.
    """
    for _, parameter in _narrowable_weights(model, dtype):
        parameter.data = parameter.data.to(dtype)


def widen(model: nn.Module) -> None:
    """Convert weights, and buffers that are saved, from half precision to float32."""
    saved = model.state_dict(keep_vars=True).values()
    for tensor in (*model.parameters(), *saved):
        if tensor.dtype in HALVES:
            tensor.data = tensor.data.float()


def holds(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a half precision can represent a model's weights exactly."""
    stored = Offloaded(model)
    values = (stored.get(name, parameter) for name, parameter in _narrowable_weights(model, dtype))
    return all(bool((p.to(dtype).to(p.dtype) == p).all()) for p in values)


def stored_size(model: nn.Module, half: torch.dtype | None = None) -> int:
    """Bytes of a model's weights and saved buffers, shared ones counted once; with ``half``, as after `narrow`."""
    narrowed = {id(p) for _, p in _narrowable_weights(model, half)} if half else set()
    saved = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    return sum(t.numel() * (half.itemsize if half and i in narrowed else t.element_size()) for i, t in saved.items())


def _narrowable_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    pattern = re.compile("|".join(rf"(?:(?:^|\.){name}(?:\.|$))" for name in kept)) if kept else None
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not (pattern and pattern.search(name)):
            yield name, parameter
