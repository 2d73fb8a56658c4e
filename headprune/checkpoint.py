"""Save a pruned model so that it reloads, and load it back.

Standard classes have one head count per model, so a pruned model's weights do not fit them. Beside the weights and the
model's config, the folder therefore holds a sidecar that names the removed heads. Loading builds the dense architecture
without weights, repeats the removal, and fills in the weights. Then the loaded model must give the answers of the saved one
(`headprune.probe`).
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import __version__, probe
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint
from headprune.inputs import Example
from headprune.jsonio import read_json, write_json
from headprune.locks import Lock
from headprune.reference import add_biases, added_biases
from headprune.surgery import Removal, record, remove

WEIGHTS = "model.safetensors"
# from_pretrained does not look for this name: a standard class would fill missing weights with random numbers.
PRUNED_WEIGHTS = "pruned.safetensors"
SIDECAR = "headprune.json"


def save(
    model: nn.Module,
    path: str | Path,
    *,
    processor: Any = None,
    example: Example | None = None,
    overwrite: bool = False,
    about: dict[str, Any] | None = None,
) -> Path:
    """Save a model, pruned or not, to a folder that `load` reads.

    Args:
        model: A transformers model, or any module (`load` then needs a fresh instance of it).
        path: The folder; it appears complete or not at all.
        processor: A tokenizer or image processor to save beside the model.
        example: An input of the model, needed if it was never pruned and is no transformers model: its answers to a made-up
            input of the same form are saved, and `load` compares them. The contents of the example are not saved.
        overwrite: Replace what is there.
        about: More to store in the sidecar (such as the dataset).

    Raises:
        HeadPruneError: The folder exists and is not empty.
    """
    path = Path(path)
    with _locked(path):
        _recover(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
            raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
        temporary = path.with_name(f".{path.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed while it wrote
        temporary.mkdir()
        try:
            _write(model, temporary, processor, example, about or {})
            _swap_in(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def _write(model: nn.Module, folder: Path, processor: Any, example: Any, about: dict[str, Any]) -> None:
    """All files of a checkpoint."""
    from safetensors.torch import save_model

    weights = PRUNED_WEIGHTS if record(model) else WEIGHTS
    save_model(model, str(folder / weights), metadata={"format": "pt"})
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None and hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr,operator]
    if processor is not None:
        processor.save_pretrained(folder)
    sidecar = {
        "version": __version__,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "dtype": str(dtype).removeprefix("torch."),
        "weights": weights,
        "attention": getattr(config, "_attn_implementation", None),
        "fingerprint": fingerprint(model),
        "biases": added_biases(model),
        "removals": [removal.to_json() for removal in record(model)],
        "about": about,
    }
    probe.keep(model, folder, example)
    write_json(folder / SIDECAR, "checkpoint", sidecar)
    for file in folder.iterdir():
        file.chmod(0o644)


def load(path: str | Path, model: nn.Module | None = None, *, device: torch.device | str = "cpu") -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode, and check that it gives the answers of the saved one.

    Nothing in the folder is run as code.

    Args:
        path: The folder.
        model: For a class outside transformers: a fresh, dense instance to prune and fill.
        device: Where to put it.

    Raises:
        HeadPruneError: Not such a folder, weights that do not fit, or other answers than the saved model's: after an
            edit of the config, with another class or another version. The error names what differs.
    """
    path = Path(path)
    if not path.exists() and _old(path).exists():
        with _locked(path):
            _recover(path)
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that headprune saved.")
    sidecar = read_json(path / SIDECAR, "checkpoint")
    weights = _weights(sidecar)
    skeleton = model if model is not None else _skeleton(path, sidecar)
    try:
        biases = sidecar.get("biases", [])
        add_biases(skeleton, biases)
        for data in sidecar["removals"]:
            remove(skeleton, Removal.from_json(data))
            add_biases(skeleton, biases)
        _fill(skeleton, path / weights)
    except Exception as error:
        raise damaged(path, error) or HeadPruneError(
            f"The weights in {path} do not fit {type(skeleton).__name__}: {first_line(error)}{probe.edits(path)}.",
            "Load with the transformers version that saved it, or pass an instance as it was built: "
            "headprune.load(path, model=…).",
        ) from error
    probe.restore_buffers(skeleton, path)
    skeleton.to(device).eval()
    if (now := fingerprint(skeleton)) != sidecar["fingerprint"]:
        raise HeadPruneError(f"The weights in {path} are not those that were saved ({now}).", "Save it again.")
    probe.check(skeleton, path)
    return skeleton


def _weights(sidecar: dict[str, Any]) -> str:
    """The name of the file with the weights; any other name, such as a path to another folder, is refused."""
    name = sidecar.get("weights")
    if name not in (WEIGHTS, PRUNED_WEIGHTS):
        raise HeadPruneError(f"{SIDECAR} names {name!r} as its weights, which headprune never does.", "Save it again.")
    return str(name)


def _fill(model: nn.Module, file: Path) -> None:
    """Give every parameter and persistent buffer its saved values and type; everything else stays as it was built.

    A cast of the whole model would be wrong: it would also round buffers that are not saved, such as the frequencies of
    rotary embeddings.
    """
    from safetensors.torch import load_file

    state = load_file(str(file))
    filled: set[int] = set()
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if unknown := set(state) - set(own):
        raise KeyError(f"there is no place for {sorted(unknown)[0]}")
    for name in list(state):
        value = state.pop(name)
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(own[name].shape)}, the file {tuple(value.shape)}")
        # A copy, because a tensor may start at any byte of the file, and kernels then sum in another order.
        own[name].data = value.clone()
        filled.add(id(own[name]))
    for name in model.state_dict():
        if id(own[name]) not in filled:  # tied weights are saved once
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
    data = read_json(Path(path) / SIDECAR, "checkpoint")
    found: dict[str, Any] = data.get("about", {})
    return found


def _skeleton(path: Path, sidecar: dict[str, Any]) -> nn.Module:
    """The dense architecture, with weights that mean nothing yet."""
    import transformers
    from transformers.initialization import no_init_weights

    qualified, attention = str(sidecar.get("class")), sidecar.get("attention")
    module, _, name = qualified.rpartition(".")
    if not module.startswith("transformers.models."):  # whatever else a folder names is not imported
        raise HeadPruneError(
            f"{path} holds a {qualified}, which headprune cannot build.",
            "Pass a fresh dense instance: headprune.load(path, model=YourModel(...)).",
        )
    try:
        # By module first: not every class is exported at the top.
        cls: Any = getattr(importlib.import_module(module), name)
        if not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError
    except (ImportError, AttributeError, TypeError):
        raise HeadPruneError(
            f"This transformers ({transformers.__version__}) has no {qualified}.",
            "Use the version that saved the model.",
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise HeadPruneError(
            f"{path / 'config.json'} does not load: {first_line(error)}.", "Save the model again."
        ) from error
    config._attn_implementation = attention = attention or getattr(config, "_attn_implementation", None)
    check_attention(path, config)
    # Weight initialisation costs more than everything else here, and every weight is overwritten.
    try:
        with no_init_weights():
            instance: nn.Module = cls._from_config(config, attn_implementation=attention)
        instance.tie_weights()  # type: ignore[operator]
    except Exception as error:
        raise HeadPruneError(
            f"{qualified} cannot be built from {path / 'config.json'}: {first_line(error)}{probe.edits(path)}.",
            "Put config.json back as it was, or use the transformers version that saved the model.",
        ) from error
    return instance


def check_attention(source: str | Path, config: Any) -> None:
    """Refuse a config that lets a kernel from the Hub compute attention: that is code, too."""
    names = {getattr(c, "_attn_implementation", None) for c in _configs(config)}
    if kernels := sorted(n for n in names if isinstance(n, str) and "/" in n):
        raise HeadPruneError(
            f"{source} asks for the attention kernel {kernels[0]} from the Hub, which is code that would run here.",
            "Look at it first; --trust-remote-code allows it for a dense model. Or take it out of the folder's JSON files.",
        )


def _configs(config: Any) -> list[Any]:
    """A config and those in it."""
    below = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return [config, *(c for sub in below if sub is not None for c in _configs(sub))]


def _locked(path: Path) -> AbstractContextManager[None]:
    """One process at a time writes a folder, so half-written files in it are left from a process that was killed."""
    return Lock(path.with_name(f".{path.name}.lock")).holding(f"The folder {path}", "headprune.save")


def _old(path: Path) -> Path:
    """Where a folder is while another takes its place."""
    return path.with_name(f".{path.name}.old")


def _swap_in(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; what was there goes only after the new folder is complete."""
    if path.exists():
        os.replace(path, _old(path))
    try:
        os.replace(new, path)
    finally:
        _recover(path)


def _recover(path: Path) -> None:
    """Finish a swap, also one that was killed: remove the old folder, or put it back if there is no new one."""
    old = _old(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        if old.is_file():
            old.unlink()
    elif old.exists():
        os.replace(old, path)
