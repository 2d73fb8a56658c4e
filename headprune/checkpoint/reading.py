"""Load a model's folder, and prove that the model is the one that was saved."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import probe
from headprune.checkpoint.files import changed
from headprune.checkpoint.folders import recovered
from headprune.checkpoint.loading import SIDECAR, own_class
from headprune.checkpoint.shards import Placing, dispatch, fill_placed
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint
from headprune.jsonio import read_json
from headprune.pruned import (
    EmptyAttention,
    add_biases,
    note_heads,
    note_removed,
    note_was_repaired,
    restructure,
    save_by_headprune,
)
from headprune.stock import built, configs_in
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
    placing = None if device_map is None else Placing(device_map, max_memory, offload_folder)
    return _loaded(Path(path), model, device, placing=placing, as_saved=as_saved, trusted=trust_remote_code)


def _loaded(
    path: Path,
    model: nn.Module | None,
    device: torch.device | str,
    *,
    placing: Placing | None = None,
    as_saved: bool = False,
    trusted: bool = False,
) -> nn.Module:
    recovered(path)
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that headprune saved.")
    if not is_checkpoint(path) and "headprune" in probe.config_of(path):
        raise HeadPruneError(
            f"{path} was saved by transformers' save_pretrained, so it holds nothing to prove a load by.",
            "Load it by from_pretrained(folder, trust_remote_code=True), and save that by headprune.save.",
        )
    if not is_checkpoint(path) and (config := probe.config_of(path)):
        name = next(iter(config.get("architectures") or ()), "AutoModel")
        raise HeadPruneError(
            f"{path} was not saved by headprune, but holds a config of transformers.",
            f"Load it by transformers.{name}.from_pretrained(folder): all functions take such models.",
        )
    sidecar = _sidecar(path)
    _check_files(path, sidecar, as_saved)
    files = weight_files(path, sidecar)
    places: dict[str, Any] = {}
    skeleton = model if model is not None else _skeleton(path, sidecar, meta=placing is not None, trusted=trusted)
    try:
        if "structure" in sidecar:
            restructure(skeleton, sidecar["structure"])
        else:
            _repeat(skeleton, sidecar)
        if placing is None:
            _fill(skeleton, files)
        else:
            places = fill_placed(skeleton, files, placing)
    except HeadPruneError:
        raise
    except Exception as error:
        raise damaged(path, error) or HeadPruneError(
            f"The weights in {path} do not fit {type(skeleton).__name__}: {first_line(error)}{probe.edits(path)}.",
            "Load with the transformers version that saved it, or pass an instance as it was built: "
            "headprune.load(path, model=…).",
        ) from error
    probe.restore_buffers(skeleton, path)
    if placing is None:
        skeleton.to(device)
    else:
        dispatch(skeleton, places)
    skeleton.eval()
    # Folders of 0.1 held other empty tensors for layers without heads.
    other = "structure" not in sidecar and any(isinstance(m, EmptyAttention) for m in skeleton.modules())
    if not other and (now := fingerprint(skeleton)) != sidecar["fingerprint"]:
        raise HeadPruneError(f"The weights in {path} are not those that were saved ({now}).", "Save it again.")
    note_heads(skeleton, sidecar.get("heads", {}))
    note_removed(skeleton, sidecar.get("removed", []))
    if sidecar.get("repaired"):
        note_was_repaired(skeleton)
    if sidecar.get("structure"):
        save_by_headprune(skeleton)
    probe.check(skeleton, path)
    return skeleton


def _check_files(path: Path, sidecar: dict[str, Any], as_saved: bool) -> None:
    """Compare the files beside the weights with what was saved.

    Raises:
        HeadPruneError: The probe is another one; or, with ``as_saved``, any of them.
    """
    saved = sidecar.get("files", {})  # folders of older versions have none
    if not isinstance(saved, dict) or not all(isinstance(text, str) for text in saved.values()):
        raise HeadPruneError(f"{path / SIDECAR} is damaged: files is {saved!r:.60}.", "Save the model again.")
    other = changed(path, saved)
    if probe.FILE in other or (other and as_saved):
        name = probe.FILE if probe.FILE in other else other[0]
        raise HeadPruneError(f"{path / name} is damaged: it is not what was saved.", "Copy, download or save it again.")
    # An edited config is told with what was edited (`probe.check`), and nothing here runs code from the folder.
    if beside := [name for name in other if name != "config.json"]:
        warnings.warn(
            f"headprune: {path}: not as saved: {', '.join(beside[:3])}. If that is no edit of yours, copy, download or save it again.",
            stacklevel=4,
        )


def _sidecar(path: Path) -> dict[str, Any]:
    """What headprune noted of a folder; the structure is looked at when it is applied.

    Raises:
        HeadPruneError: It is damaged.
    """
    found = read_json(path / SIDECAR, "checkpoint")
    counts, steps = found.get("heads", {}), found.get("removed", [])
    right = {
        "about": isinstance(found.get("about", {}), dict),
        "fingerprint": isinstance(found.get("fingerprint"), str),
        "heads": isinstance(counts, dict) and all(type(n) is int and n > 0 for n in counts.values()),
        "removed": isinstance(steps, list)
        and all(isinstance(s, dict) and all(map(_are_heads, s.values())) for s in steps),
    }
    for name, fine in right.items():
        if not fine:
            raise HeadPruneError(f"{path / SIDECAR} is damaged: {name} is {found.get(name)!r:.60}.", "Save it again.")
    return found


def _are_heads(listed: Any) -> bool:
    return (
        isinstance(listed, list) and all(type(h) is int and h >= 0 for h in listed) and len(set(listed)) == len(listed)
    )


def _repeat(skeleton: nn.Module, sidecar: dict[str, Any]) -> None:
    """What folders of 0.1 say of a pruned model: the prunes that it has been through."""
    biases = sidecar.get("biases", [])
    add_biases(skeleton, biases)
    for data in sidecar["removals"]:
        remove(skeleton, Removal.from_json(data))
        add_biases(skeleton, biases)


def weight_files(path: Path, sidecar: dict[str, Any]) -> list[Path]:
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


def _fill(model: nn.Module, files: list[Path]) -> None:
    """Give every parameter and persistent buffer its saved values and type; everything else stays as it was built.

    A cast of the whole model would be wrong: it would also round buffers that are not saved, such as the frequencies of
    rotary embeddings.
    """
    from safetensors.torch import load_file

    filled: set[int] = set()
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for file in files:
        state = load_file(str(file))
        for name in list(state):
            value = state.pop(name)
            if not value.numel() and (name not in own or not own[name].numel()):
                continue  # it stands for weights that are gone
            if name not in own:
                raise KeyError(f"there is no place for {name}")
            if own[name].shape != value.shape:
                raise ValueError(f"{name} has shape {tuple(own[name].shape)}, the file {tuple(value.shape)}")
            # A copy, because a tensor may start at any byte of the file, and kernels then sum in another order.
            own[name].data = value.clone()
            filled.add(id(own[name]))
    for name, tensor in model.state_dict().items():
        if tensor.numel() and id(own[name]) not in filled:  # tied weights are saved once
            raise KeyError(f"{name} is not in the file")


def damaged(path: str | Path, error: BaseException) -> HeadPruneError | None:
    """The error for weights whose file is not a complete safetensors file; None for any other reason."""
    if type(error).__name__ != "SafetensorError":
        return None
    return HeadPruneError(
        f"The weights in {path} are damaged or cut short ({first_line(error)}).", "Copy, download or save it again."
    )


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is one that `save` wrote."""
    return (Path(path) / SIDECAR).is_file()


def about(path: str | Path) -> dict[str, Any]:
    """The ``about`` that `save` stored."""
    found: dict[str, Any] = _sidecar(Path(path)).get("about", {})
    return found


def _skeleton(path: Path, sidecar: dict[str, Any], *, meta: bool, trusted: bool) -> nn.Module:
    """The dense architecture, with weights that mean nothing yet; with ``meta`` they take no memory."""
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
    # Weight initialisation costs more than everything else here, and every weight is overwritten.
    try:
        with no_init_weights(), init_empty_weights() if meta else nullcontext():
            instance: Any = built(cls, config, attention)
        instance.tie_weights()
    except Exception as error:
        raise HeadPruneError(
            f"{qualified} cannot be built from {path / 'config.json'}: {first_line(error)}{probe.edits(path)}.",
            "Put config.json back as it was, or use the transformers version that saved the model.",
        ) from error
    made: nn.Module = instance
    return made


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
    name = qualified.rpartition(".")[2]
    if (reference := own_class(probe.config_of(path), name)) is None:
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
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(reference, str(path))
    except Exception as error:  # code of any kind
        raise HeadPruneError(
            f"The code that comes with {path} does not run: {type(error).__name__}: {first_line(error)}.",
            "Put back the files that were saved with it, or install what it imports.",
        ) from error


def check_attention(source: str | Path, config: Any) -> None:
    """Refuse a config that lets a kernel from the Hub compute attention: that is code, too."""
    names = {getattr(c, "_attn_implementation", None) for c in configs_in(config)}
    if kernels := sorted(n for n in names if isinstance(n, str) and "/" in n):
        raise HeadPruneError(
            f"{source} asks for the attention kernel {kernels[0]} from the Hub, which is code that would run here.",
            "Look at it first; --trust-remote-code allows it for a dense model. Or take it out of the folder's JSON files.",
        )
