"""Load a model's folder, and prove that the model is the one that was saved."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.checkpoint import probe
from headprune.checkpoint.remote_code import SIDECAR, own_class
from headprune.checkpoint.saving import file_digests, install_save_methods
from headprune.checkpoint.stock_config import configs_in
from headprune.checkpoint.stock_model import from_config
from headprune.errors import HeadPruneError, first_line
from headprune.files import read_json, recover_folder
from headprune.fingerprint import fingerprint
from headprune.offload import aligned, with_numbers
from headprune.pruned import (
    EmptyAttention,
    add_biases,
    note_heads,
    note_removed,
    note_was_repaired,
    restructure,
    structure_of,
)
from headprune.surgery import Removal, remove

_WEIGHTS, _OLD_WEIGHTS = "model.safetensors", "pruned.safetensors"  # the latter of pruned models, of 0.1


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
    """Load a model that `save` wrote, in evaluation mode, and check that it gives the answers of the saved one.

    Nothing in the folder is run as code, unless ``trust_remote_code`` allows it.

    Args:
        path: The folder.
        model: For a class outside transformers: a fresh, dense instance to prune and fill.
        device: Where to put it.
        device_map, max_memory, offload_folder: For a model that is larger than a device: as for transformers' ``from_pretrained``, such as
            ``device_map="auto"``. Then ``device`` is not looked at, and weights on disk are read from the folder, which has to stay.
        as_saved: Refuse a folder in which any file (but its README.md) was changed. By default a warning names files beside the
            model's own, such as a tokenizer's: they may be meant to be edited, and the answers are compared anyway.
        trust_remote_code: Whether code that came with the dense model may run, if it defines the model's class. For classes of
            transformers no code is run either way.

    Raises:
        HeadPruneError: Not such a folder, weights that do not fit, or other answers than the saved model's: after an
            edit of the config, with another class or another version. The error names what differs.
    """
    path = Path(path)
    recover_folder(path)
    _check_saved_here(path)
    sidecar = _sidecar(path)
    _check_files(path, sidecar, as_saved)
    files = _weight_files(path, sidecar)
    loaded = _skeleton(path, sidecar, trust_remote_code) if model is None else model
    try:
        if "structure" in sidecar:
            restructure(loaded, sidecar["structure"])
        else:
            _repeat_prunes(loaded, sidecar)
        with_numbers(loaded)
        places = {"": "cpu"} if device_map is None else _places(loaded, device_map, max_memory)
        on_disk = _fill(loaded, files, places)
    except HeadPruneError:
        raise
    except Exception as error:
        raise damaged(path, error) or HeadPruneError(
            f"The weights in {path} do not fit {type(loaded).__name__}: {first_line(error)}{probe.config_edits(path)}.",
            "Load with the transformers version that saved it, or pass an instance as it was built: "
            "headprune.load(path, model=…).",
        ) from error
    probe.restore_buffers(loaded, path)
    if device_map is None:
        loaded.to(device)
    else:
        _dispatch(loaded, places, on_disk, offload_folder)
    loaded.eval()
    # Folders of 0.1 held other empty tensors for layers without heads.
    other = "structure" not in sidecar and any(isinstance(m, EmptyAttention) for m in loaded.modules())
    if not other and (now := fingerprint(loaded)) != sidecar["fingerprint"]:
        raise HeadPruneError(f"The weights in {path} are not those that were saved ({now}).", "Save it again.")
    note_heads(loaded, sidecar.get("heads", {}))
    note_removed(loaded, sidecar.get("removed", []))
    if sidecar.get("repaired"):
        note_was_repaired(loaded)
    if structure_of(loaded):
        install_save_methods(loaded)
    probe.check_answers(loaded, path)
    return loaded


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is one that `save` wrote."""
    return (Path(path) / SIDECAR).is_file()


def about(path: str | Path) -> dict[str, Any]:
    """The ``about`` that `save` stored."""
    found: dict[str, Any] = _sidecar(Path(path)).get("about", {})
    return found


def damaged(path: str | Path, error: BaseException) -> HeadPruneError | None:
    """The error for weights whose file is not a complete safetensors file; None for any other reason."""
    if type(error).__name__ != "SafetensorError":
        return None
    return HeadPruneError(
        f"The weights in {path} are damaged or cut short ({first_line(error)}).", "Copy, download or save it again."
    )


def check_attention(source: str | Path, config: Any) -> None:
    """Refuse a config that lets a kernel from the Hub compute attention: that is code, too."""
    names = {getattr(c, "_attn_implementation", None) for c in configs_in(config)}
    if kernels := sorted(n for n in names if isinstance(n, str) and "/" in n):
        raise HeadPruneError(
            f"{source} asks for the attention kernel {kernels[0]} from the Hub, which is code that would run here.",
            "Look at it first; --trust-remote-code allows it for a dense model. Or take it out of the folder's JSON files.",
        )


# -- what the folder says -------------------------------------------------------------------------


def _check_saved_here(path: Path) -> None:
    """Refuse what `save` did not write; the hint says what loads it."""
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that headprune saved.")
    if not is_checkpoint(path) and (config := probe.read_config(path)):
        name = next(iter(config.get("architectures") or ()), "AutoModel")
        code = ", trust_remote_code=True" if "headprune" in config else ""
        raise HeadPruneError(
            f"{path} was saved by transformers, not by headprune.save, so it holds nothing to prove a load by.",
            f"Load it by transformers' {name}.from_pretrained(folder{code}): all functions take such models.",
        )


def _sidecar(path: Path) -> dict[str, Any]:
    """The folder's headprune.json; its structure is checked when it is applied.

    Raises:
        HeadPruneError: It is damaged.
    """
    found = read_json(path / SIDECAR, "checkpoint")
    counts, steps, files = found.get("heads", {}), found.get("removed", []), found.get("files", {})
    right = {
        "about": isinstance(found.get("about", {}), dict),
        "fingerprint": isinstance(found.get("fingerprint"), str),
        "heads": isinstance(counts, dict) and all(type(n) is int and n > 0 for n in counts.values()),
        "removed": isinstance(steps, list)
        and all(isinstance(s, dict) and all(map(_are_heads, s.values())) for s in steps),
        "files": isinstance(files, dict) and all(isinstance(text, str) for text in files.values()),
    }
    for name, fine in right.items():
        if not fine:
            raise HeadPruneError(f"{path / SIDECAR} is damaged: {name} is {found.get(name)!r:.60}.", "Save it again.")
    return found


def _are_heads(value: Any) -> bool:
    return isinstance(value, list) and all(type(h) is int and h >= 0 for h in value) and len(set(value)) == len(value)


def _check_files(path: Path, sidecar: Mapping[str, Any], as_saved: bool) -> None:
    """Compare the files beside the weights with what was saved; those that are gone do not count.

    Raises:
        HeadPruneError: The probe is another one; or, with ``as_saved``, any of them.
    """
    saved = {
        n: text for n, text in sidecar.get("files", {}).items() if not {"..", ""} & {*n.split("/")}
    }  # none elsewhere
    other = [name for name, now in file_digests(path, saved).items() if now != saved[name]]
    if probe.FILE in other or (other and as_saved):
        name = probe.FILE if probe.FILE in other else other[0]
        raise HeadPruneError(f"{path / name} is damaged: it is not what was saved.", "Copy, download or save it again.")
    # An edited config is told with what was edited (`probe.check_answers`), and nothing here runs code from the folder.
    if beside := [name for name in other if name != "config.json"]:
        warnings.warn(
            f"headprune: {path}: not as saved: {', '.join(beside[:3])}. If that is no edit of yours, copy, download or save it again.",
            stacklevel=3,
        )


def _weight_files(path: Path, sidecar: Mapping[str, Any]) -> list[Path]:
    """The files that hold the weights; a name that leads elsewhere is refused."""
    name = sidecar.get("weights", _WEIGHTS)  # a key of folders of 0.1
    if name not in (_WEIGHTS, _OLD_WEIGHTS):
        raise HeadPruneError(f"{SIDECAR} names {name!r} as its weights, which headprune never does.", "Save it again.")
    index = path / f"{name}.index.json"
    if (path / name).exists() or not index.is_file():
        return [path / name]
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(shard, str) and Path(shard).name == shard for shard in shards):
            raise ValueError("it names a file in another folder")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise HeadPruneError(f"{index} is damaged: {first_line(error)}.", "Copy, download or save it again.") from error
    return [path / shard for shard in shards]


# -- the model without its weights ----------------------------------------------------------------


def _skeleton(path: Path, sidecar: Mapping[str, Any], trusted: bool) -> nn.Module:
    """The dense architecture without its weights, which are on the meta device."""
    import transformers
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    qualified, attention = str(sidecar.get("class")), sidecar.get("attention")
    own = not qualified.startswith("transformers.models.")  # whatever else a folder names is not imported
    cls = _class_in(path, qualified, trusted) if own else _stock_class(qualified)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=own and trusted)
    except Exception as error:
        raise HeadPruneError(
            f"{path / 'config.json'} does not load: {first_line(error)}.", "Save the model again."
        ) from error
    config._attn_implementation = attention = attention or getattr(config, "_attn_implementation", None)
    check_attention(path, config)
    try:
        with no_init_weights(), init_empty_weights():
            skeleton: Any = from_config(cls, config, attention)
        skeleton.tie_weights()
    except Exception as error:
        raise HeadPruneError(
            f"{qualified} cannot be built from {path / 'config.json'}: {first_line(error)}{probe.config_edits(path)}.",
            "Put config.json back as it was, or use the transformers version that saved the model.",
        ) from error
    model: nn.Module = skeleton
    return model


def _stock_class(qualified: str) -> Any:
    """A model class of transformers, by its module: not every one is exported at the top."""
    import transformers

    module, _, name = qualified.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), name)
        if not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError
    except (ImportError, AttributeError, TypeError):
        raise HeadPruneError(
            f"This transformers ({transformers.__version__}) has no {qualified}.",
            "Use the version that saved the model.",
        ) from None
    return cls


def _class_in(path: Path, qualified: str, trusted: bool) -> Any:
    """The class that came with the dense model, from the code that its config names.

    Raises:
        HeadPruneError: The config names none, or the code may not or does not run.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = qualified.rpartition(".")[2]
    if (reference := own_class(probe.read_config(path), name)) is None:
        raise HeadPruneError(
            f"{path} holds a {qualified}, which headprune cannot build.",
            "Pass a fresh dense instance: headprune.load(path, model=YourModel(...)).",
        )
    if not trusted:
        raise HeadPruneError(
            f"{path} holds a {name}, a class that comes with the model, as code that was not run.",
            "Read that code; if you trust it, add --trust-remote-code (in Python trust_remote_code=True). Or pass a fresh dense "
            "instance: headprune.load(path, model=YourModel(...)).",
        )
    try:
        return get_class_from_dynamic_module(reference, str(path))
    except Exception as error:  # code of any kind
        raise HeadPruneError(
            f"The code that comes with {path} does not run: {type(error).__name__}: {first_line(error)}.",
            "Put back the files that were saved with it, or install what it imports.",
        ) from error


def _repeat_prunes(model: nn.Module, sidecar: Mapping[str, Any]) -> None:
    """What folders of 0.1 say of a pruned model: the prunes that it has been through."""
    biases = sidecar.get("biases", [])
    add_biases(model, biases)
    for data in sidecar["removals"]:
        remove(model, Removal.from_json(data))
        add_biases(model, biases)


# -- its weights ----------------------------------------------------------------------------------


def _fill(model: nn.Module, files: Sequence[Path], places: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Give every parameter and persistent buffer its saved values and type; everything else stays as it was built.

    A cast of the whole model would be wrong: it would also round buffers that are not saved, such as the frequencies of
    rotary embeddings.

    Args:
        places: The device of every module, by name.

    Returns:
        Of the weights that stay on disk, where they are: Accelerate's index.

    Raises:
        KeyError, ValueError: The weights are not the model's.
    """
    from safetensors import safe_open

    parameters = dict(model.named_parameters(remove_duplicate=False))
    own: dict[str, Tensor] = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    tied: dict[int, list[str]] = {}  # names of one tensor, which is saved once
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    state: dict[str, Tensor] = {}
    on_disk: dict[str, dict[str, str]] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                value, place = content.get_tensor(name), _place(places, name)
                if not value.numel() and (name not in own or not own[name].numel()):
                    continue  # it stands for weights that are gone
                if name not in own:
                    raise KeyError(f"there is no place for {name}")
                if own[name].shape != value.shape:
                    raise ValueError(f"{name} has shape {tuple(own[name].shape)}, the file {tuple(value.shape)}")
                if place == "disk" and name in parameters:
                    entry = {"safetensors_file": str(file.absolute()), "weight_name": name}
                    entry["dtype"] = str(value.dtype).removeprefix("torch.")
                    on_disk |= dict.fromkeys(tied[id(own[name])], entry)
                    value = torch.empty_like(value, device="meta")
                else:  # a copy, because a tensor may start at any byte of the file, and kernels then sum in another order
                    value = value.to("cpu" if place == "disk" else place, copy=True)
                if name in parameters:
                    trained = own[name].requires_grad and value.is_floating_point()
                    value = nn.Parameter(value, requires_grad=trained)
                state |= dict.fromkeys(tied[id(own[name])], value)
    for name, tensor in model.state_dict().items():
        if tensor.numel() and name not in state:
            raise KeyError(f"{name} is not in the file")
    for name, value in state.items():
        if own[name].is_meta or value.is_meta:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, value)
        else:  # the tensor stays the same object: a user's module may refer to it in other ways, too
            own[name].data = value
    return on_disk


def _places(model: Any, device_map: str | Mapping[str, Any], max_memory: Any) -> dict[str, Any]:
    """The device of every module, by name."""
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
        found: dict[str, Any] = infer_auto_device_map(model, memory, no_split_module_classes=whole)
    except (ValueError, RuntimeError, KeyError) as error:
        raise HeadPruneError(f"The device map does not work: {first_line(error)}.", "Try auto.") from error
    return found


def _place(places: Mapping[str, Any], name: str) -> Any:
    """The device of a tensor: of the innermost module that the map names."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, "cpu")


def _dispatch(
    model: Any, places: dict[str, Any], on_disk: dict[str, dict[str, str]], folder: str | Path | None
) -> None:
    """Put Accelerate's hooks on a model that `_fill` has filled."""
    from accelerate import dispatch_model

    skip = getattr(model, "_skip_keys_device_placement", None)
    dispatch_model(model, places, offload_index=on_disk or None, offload_dir=folder, skip_keys=skip)
    aligned(model)
