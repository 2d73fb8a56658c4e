"""Load a model that `save` wrote, and prove that it is the saved one."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoint import probe
from headprune.checkpoint.remote_code import SIDECAR, configs_in, own_class, read_config
from headprune.checkpoint.saving import file_digests, install_save_methods
from headprune.checkpoint.stock import empty_model
from headprune.errors import HeadPruneError, first_line
from headprune.files import read_json, recover_folder
from headprune.fingerprint import has_identity
from headprune.offload import make_loaders_copy, with_numbers
from headprune.pruned import EmptyAttention, add_biases, add_record, restructure, structure_of, unwrapped
from headprune.surgery import Removal, remove

_WEIGHTS = ("model.safetensors", "pruned.safetensors")  # version 0.1 used the latter for pruned models

DeviceMap = str | Mapping[str, Any]


def load(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    device: torch.device | str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | Path | None = None,
    as_saved: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode, and check that it gives the saved model's answers.

    No code from the folder runs, unless ``trust_remote_code`` allows it.

    Args:
        path: The folder.
        model: For a class outside transformers: a fresh, dense instance to prune and fill.
        device: The device to put the model on.
        device_map, max_memory, offload_folder: For a model that is larger than a device: as for transformers' ``from_pretrained``, such as
            ``device_map="auto"``. Then ``device`` is ignored, and weights on disk are read from the folder, which must stay in place.
        as_saved: Refuse a folder in which any file (except README.md) was changed. By default a warning names changed files that
            are not part of the model, such as a tokenizer's, since such an edit may be intended; answers are compared anyway.
        trust_remote_code: Whether code that came with the dense model may run, if it defines the model's class. For transformers'
            own classes no code runs either way.

    Raises:
        HeadPruneError: `save` did not write this folder, the weights do not fit, or the answers differ from the saved model's, because
            of an edited config, another class or another library version. The error names what differs.
    """
    path = Path(path)
    recover_folder(path)
    _check_saved_here(path)
    sidecar = _sidecar(path)
    _check_files(path, sidecar, as_saved)
    if model is not None and not str(sidecar.get("class")).endswith(".OptimizedModule"):  # as older versions saved it
        model = unwrapped(model)
    loaded = _dense_model(path, sidecar, trust_remote_code) if model is None else model
    places, on_disk = _fill_as_saved(loaded, path, sidecar, device_map, max_memory)
    if device_map is None:
        loaded.to(device)
    else:
        from accelerate import dispatch_model

        skip = getattr(loaded, "_skip_keys_device_placement", None)
        dispatch_model(loaded, places, offload_index=on_disk or None, offload_dir=offload_folder, skip_keys=skip)
        make_loaders_copy(loaded)
    loaded.eval()
    # Version 0.1 saved other empty tensors for layers without heads.
    other = "structure" not in sidecar and any(isinstance(m, EmptyAttention) for m in loaded.modules())
    if not other and not has_identity(loaded, sidecar["fingerprint"]):
        raise HeadPruneError(f"The weights in {path} are not those that were saved.", "Save it again.")
    add_record(loaded, sidecar)
    if structure_of(loaded):
        install_save_methods(loaded)
    probe.check_answers(loaded, path)
    return loaded


def is_checkpoint(path: str | Path) -> bool:
    """Whether `save` wrote this folder."""
    return (Path(path) / SIDECAR).is_file()


def about(path: str | Path) -> dict[str, Any]:
    """The ``about`` dict that `save` stored."""
    return dict(_sidecar(Path(path)).get("about", {}))


def damaged(path: str | Path, error: BaseException) -> HeadPruneError | None:
    """The error to raise if ``error`` says that a weights file is not a complete safetensors file; otherwise None."""
    if type(error).__name__ != "SafetensorError":
        return None
    message = f"The weights in {path} are damaged or cut short ({first_line(error)})."
    return HeadPruneError(message, "Copy, download or save it again.")


def check_attention(source: str | Path, config: Any) -> None:
    """Refuse a config that names an attention kernel from the Hub, since loading it runs code."""
    names = {getattr(c, "_attn_implementation", None) for c in configs_in(config)}
    if kernels := sorted(n for n in names if isinstance(n, str) and "/" in n):
        message = f"{source} asks for the attention kernel {kernels[0]} from the Hub: code that would run here."
        hint = "Look at it first; --trust-remote-code allows it for a dense model. Or take it out of the folder's JSON files."
        raise HeadPruneError(message, hint)


# -- the folder's metadata and config -------------------------------------------------------------


def _check_saved_here(path: Path) -> None:
    """Refuse a missing folder, and one that transformers saved; the hint says which call loads the latter."""
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that headprune saved.")
    if not is_checkpoint(path) and (config := read_config(path)):
        name = next(iter(config.get("architectures") or ()), "AutoModel")
        code = ", trust_remote_code=True" if "headprune" in config else ""
        message = f"{path} was saved by transformers, not by headprune.save, so it holds nothing to prove a load by."
        raise HeadPruneError(message, f"Load it by transformers' {name}.from_pretrained(folder{code}).")


def _sidecar(path: Path) -> dict[str, Any]:
    """Read and check the folder's headprune.json; the entry ``structure`` is checked later, when it is applied.

    Raises:
        HeadPruneError: It is damaged.
    """
    sidecar = read_json(path / SIDECAR, "checkpoint")
    counts, steps, files = sidecar.get("heads", {}), sidecar.get("removed", []), sidecar.get("files", {})
    right = {
        "about": isinstance(sidecar.get("about", {}), dict),
        "fingerprint": isinstance(sidecar.get("fingerprint"), str),
        "heads": isinstance(counts, dict) and all(type(n) is int and n > 0 for n in counts.values()),
        "removed": isinstance(steps, list)
        and all(isinstance(s, dict) and all(map(_are_heads, s.values())) for s in steps),
        "files": isinstance(files, dict) and all(isinstance(text, str) for text in files.values()),
    }
    for name, fine in right.items():
        if not fine:
            raise HeadPruneError(f"{path / SIDECAR} is damaged: {name} is {sidecar.get(name)!r:.60}.", "Save it again.")
    return sidecar


def _are_heads(value: Any) -> bool:
    return isinstance(value, list) and all(type(h) is int and h >= 0 for h in value) and len(set(value)) == len(value)


def _check_files(path: Path, sidecar: Mapping[str, Any], as_saved: bool) -> None:
    """Compare the digests of the files beside the weights with the saved ones; ignores missing files.

    Raises:
        HeadPruneError: The probe has changed; or, with ``as_saved``, any of them.
    """
    names = sidecar.get("files", {})
    saved = {n: names[n] for n in names if not {"..", ""} & {*n.split("/")}}  # no paths outside the folder
    other = [name for name, now in file_digests(path, saved).items() if now != saved[name]]
    if probe.FILE in other or (other and as_saved):
        name = probe.FILE if probe.FILE in other else other[0]
        raise HeadPruneError(f"{path / name} is damaged: it is not what was saved.", "Copy, download or save it again.")
    # `probe.check_answers` reports edits of the config, entry by entry; nothing here runs code from the folder.
    if beside := [name for name in other if name != "config.json"]:
        text = f"not as saved: {', '.join(beside[:3])}. If that is no edit of yours, copy, download or save it again."
        warnings.warn(f"headprune: {path}: {text}", stacklevel=3)


def _dense_model(path: Path, sidecar: Mapping[str, Any], trusted: bool) -> Any:
    """Build the dense model that a folder describes, with its weights on the meta device."""
    import transformers

    qualified, attention = str(sidecar.get("class")), sidecar.get("attention")
    own = not qualified.startswith("transformers.models.")  # nothing else that a folder names is imported
    cls, file = _class_in(path, qualified, trusted) if own else _stock_class(qualified), path / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=own and trusted)
    except Exception as error:
        raise HeadPruneError(f"{file} does not load: {first_line(error)}.", "Save the model again.") from error
    config._attn_implementation = attention = attention or getattr(config, "_attn_implementation", None)
    check_attention(path, config)
    try:
        model = empty_model(cls, config, attention)
        model.tie_weights()
    except Exception as error:
        message = f"{qualified} cannot be built from {file}: {first_line(error)}{probe.config_edits(path)}."
        hint = "Put config.json back as it was, or use the transformers version that saved the model."
        raise HeadPruneError(message, hint) from error
    return model


def _stock_class(qualified: str) -> Any:
    """A transformers model class, imported from its own module, since transformers does not export every class."""
    import transformers

    module, _, name = qualified.rpartition(".")
    with suppress(ImportError):
        cls = getattr(importlib.import_module(module), name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    version = transformers.__version__
    raise HeadPruneError(f"This transformers ({version}) has no {qualified}.", "Use the version that saved the model.")


def _class_in(path: Path, qualified: str, trusted: bool) -> Any:
    """The dense model's custom class, from the code in ``auto_map`` of its config; HeadPruneError if there is none, or it may not run."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = qualified.rpartition(".")[2]
    instance = "Pass a fresh dense instance: headprune.load(path, model=YourModel(...))."
    if (reference := own_class(read_config(path), name)) is None:
        raise HeadPruneError(f"{path} holds a {qualified}, which headprune cannot build.", instance)
    if not trusted:
        hint = "Read that code; if you trust it, add --trust-remote-code (in Python trust_remote_code=True)."
        message = f"{path} holds a {name}, a class that comes with the model, as code that was not run."
        raise HeadPruneError(message, f"{hint} Or: {instance}")
    try:
        return get_class_from_dynamic_module(reference, str(path))
    except Exception as error:  # code of any kind
        message = f"The code that comes with {path} does not run: {type(error).__name__}: {first_line(error)}."
        hint = "Put back the files that were saved with it, or install what it imports."
        raise HeadPruneError(message, hint) from error


# -- the weights ----------------------------------------------------------------------------------


def _fill_as_saved(
    model: nn.Module, path: Path, sidecar: Mapping[str, Any], device_map: DeviceMap | None, max_memory: Any
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Change a dense model's modules to the saved model's structure, and load the saved weights and buffers.

    Returns:
        The device of every module, by name; and Accelerate's index of the weights that stay on disk.

    Raises:
        HeadPruneError: The weights do not fit.
    """
    try:
        if "structure" in sidecar:
            restructure(model, sidecar["structure"])
        else:  # version 0.1 saved the list of prunes instead
            add_biases(model, biases := sidecar.get("biases", []))
            for data in sidecar["removals"]:
                remove(model, Removal.from_json(data))
                add_biases(model, biases)
        with_numbers(model)
        places = {"": "cpu"} if device_map is None else _places(model, device_map, max_memory)
        # One file, or shards. No index is read, since it could name files elsewhere.
        whole = [path / name for name in _WEIGHTS if (path / name).exists()]
        files = whole or sorted(path.glob("model-?????-of-?????.safetensors")) or [path / _WEIGHTS[0]]
        on_disk = _fill(model, files, places)
    except HeadPruneError:
        raise
    except Exception as error:
        why = f"{first_line(error)}{probe.config_edits(path)}"
        hint = "Load with the transformers version that saved it, or pass an instance: headprune.load(path, model=…)."
        message = f"The weights in {path} do not fit {type(model).__name__}: {why}."
        raise damaged(path, error) or HeadPruneError(message, hint) from error
    probe.restore_buffers(model, path)
    return places, on_disk


def _fill(model: nn.Module, files: Sequence[Path], places: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Load the saved values and dtype of every parameter and persistent buffer.

    It never casts the whole model: that would also round non-persistent buffers, such as rotary frequencies.

    Args:
        places: The device of every module, by name.

    Returns:
        Accelerate's index of the weights that stay on disk.

    Raises:
        KeyError, ValueError: Names or shapes of the weights do not match the model's.
    """
    from safetensors import safe_open

    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    tied: dict[int, list[str]] = {}  # all names of each tensor, which is saved once
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    state: dict[str, Tensor] = {}
    on_disk: dict[str, dict[str, str]] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                value, place = content.get_tensor(name), _place(places, name)
                shape = own[name].shape if name in own else None
                if not value.numel() and (shape is None or (not shape.numel() and shape != value.shape)):
                    continue  # an empty tensor in place of removed weights
                if shape != value.shape:
                    raise ValueError(f"{name} is {[*value.shape]} in the file, {shape and [*shape]} in the model")
                if place == "disk" and name in parameters:
                    where = {"safetensors_file": str(file.absolute()), "weight_name": name}
                    entry = {**where, "dtype": str(value.dtype).removeprefix("torch.")}
                    on_disk |= dict.fromkeys(tied[id(own[name])], entry)
                    value = torch.empty_like(value, device="meta")
                else:  # a copy: in the file a tensor may be unaligned, and kernels then sum in another order
                    value = value.to("cpu" if place == "disk" else place, copy=True)
                if name in parameters:
                    value = nn.Parameter(value, own[name].requires_grad and value.is_floating_point())
                state |= dict.fromkeys(tied[id(own[name])], value)
    for name, tensor in model.state_dict().items():
        if tensor.numel() and name not in state:
            raise KeyError(f"{name} is not in the file")
    for name, value in state.items():
        if own[name].is_meta or value.is_meta:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, value)
        else:  # keep the tensor object: a user's module may hold other references to it
            own[name].data = value
    return on_disk


def _places(model: Any, device_map: DeviceMap, max_memory: Any) -> dict[str, Any]:
    """Resolve a device map: the device of every module, by name."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import check_device_map, get_balanced_memory

    memory = None if max_memory is None else dict(max_memory)
    whole = list(getattr(model, "_no_split_modules", None) or ())
    try:
        if not isinstance(device_map, str):
            check_device_map(model, dict(device_map))
            return dict(device_map)
        if device_map != "sequential":
            low = device_map == "balanced_low_0"
            memory = get_balanced_memory(model, memory, no_split_module_classes=whole, low_zero=low)
        return dict(infer_auto_device_map(model, memory, no_split_module_classes=whole))
    except (ValueError, RuntimeError, KeyError) as error:
        raise HeadPruneError(f"The device map does not work: {first_line(error)}.", "Try auto.") from error


def _place(places: Mapping[str, Any], name: str) -> Any:
    """The device of a tensor: that of the innermost module that the map names."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, "cpu")
