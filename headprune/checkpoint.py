"""Save a pruned model so that it reloads, and load it back.

Stock classes hold one head count per model, so a pruned model's weights do not fit them. The folder
therefore holds, beside the weights and the model's config, a sidecar that says which heads went; loading
builds the dense architecture without weights, repeats the removal, and fills in the weights.
"""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import __version__
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import fingerprint
from headprune.jsonio import read_json, write_json
from headprune.repair import add_biases, added_biases
from headprune.surgery import Removal, record, remove

WEIGHTS = "model.safetensors"
# A name that from_pretrained does not look for: a stock class would fill what is missing with random weights.
PRUNED_WEIGHTS = "pruned.safetensors"
SIDECAR = "headprune.json"


def save(
    model: nn.Module,
    path: str | Path,
    *,
    processor: Any = None,
    overwrite: bool = False,
    about: dict[str, Any] | None = None,
) -> Path:
    """Save a model, pruned or not, to a folder that `load` reads.

    Args:
        model: A transformers model, or any module (its ``load`` then needs a fresh instance).
        path: The folder; it appears complete or not at all.
        processor: A tokenizer or image processor to save beside the model.
        overwrite: Replace what is there.
        about: More to remember in the sidecar (such as the dataset).

    Raises:
        HeadPruneError: The folder exists and is not empty.
    """
    from safetensors.torch import save_model

    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
        raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)
        weights = PRUNED_WEIGHTS if record(model) else WEIGHTS
        save_model(model, str(temporary / weights), metadata={"format": "pt"})
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        config = copy.deepcopy(getattr(model, "config", None))
        if config is not None and hasattr(config, "save_pretrained"):
            config.architectures = [type(model).__name__]
            config.dtype = dtype
            config.save_pretrained(temporary)
            if getattr(model, "generation_config", None) is not None and model.can_generate():  # type: ignore[operator]
                model.generation_config.save_pretrained(temporary)  # type: ignore[union-attr,operator]
        if processor is not None:
            processor.save_pretrained(temporary)
        sidecar = {
            "version": __version__,
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "dtype": str(dtype).removeprefix("torch."),
            "weights": weights,
            "attention": getattr(config, "_attn_implementation", None),
            "fingerprint": fingerprint(model),
            "biases": added_biases(model),
            "removals": [removal.to_json() for removal in record(model)],
            "about": about or {},
        }
        write_json(temporary / SIDECAR, "checkpoint", sidecar)
        for file in temporary.iterdir():
            file.chmod(0o644)
        swap_in(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load(path: str | Path, model: nn.Module | None = None, *, device: torch.device | str = "cpu") -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode.

    Args:
        path: The folder.
        model: For a class outside transformers: a fresh, dense instance to prune and fill.
        device: Where to put it.

    Raises:
        HeadPruneError: Not such a folder, or its weights do not fit.
    """
    path = Path(path)
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that headprune saved.")
    sidecar = read_json(path / SIDECAR, "checkpoint")
    skeleton = model if model is not None else _skeleton(path, sidecar)
    try:
        biases = sidecar.get("biases", [])
        add_biases(skeleton, biases)
        for data in sidecar["removals"]:
            remove(skeleton, Removal.from_json(data))
            add_biases(skeleton, biases)
        _fill(skeleton, path / sidecar["weights"])
    except Exception as error:
        raise HeadPruneError(
            f"The weights in {path} do not fit {type(skeleton).__name__}: {first_line(error)}.",
            "Load with the transformers version that saved it, or pass an instance as it was built: "
            "headprune.load(path, model=…).",
        ) from error
    skeleton.to(device).eval()
    if (now := fingerprint(skeleton)) != sidecar["fingerprint"]:
        raise HeadPruneError(f"The weights in {path} are not those that were saved ({now}).", "Save it again.")
    return skeleton


def _fill(model: nn.Module, file: Path) -> None:
    """Give every parameter and persistent buffer its saved values and type; all else stays as it was built.

    A cast of the whole model would be shorter, and wrong: it would round buffers that are not saved, such as the
    frequencies of rotary embeddings.
    """
    from safetensors.torch import load_file

    state = load_file(str(file))
    filled: set[int] = set()
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if unknown := set(state) - set(own):
        raise KeyError(f"there is no place for {sorted(unknown)[0]}")
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(own[name].shape)}, the file {tuple(value.shape)}")
        own[name].data = value
        filled.add(id(own[name]))
    for name in model.state_dict():
        if id(own[name]) not in filled:  # tied weights are saved once
            raise KeyError(f"{name} is not in the file")


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is one that `save` wrote."""
    return (Path(path) / SIDECAR).is_file()


def about(path: str | Path) -> dict[str, Any]:
    """What `save` was asked to remember."""
    data = read_json(Path(path) / SIDECAR, "checkpoint")
    found: dict[str, Any] = data.get("about", {})
    return found


def _skeleton(path: Path, sidecar: dict[str, Any]) -> nn.Module:
    """The dense architecture, weights not yet meaningful."""
    qualified = sidecar["class"]
    import transformers
    from transformers.initialization import no_init_weights

    module, _, name = qualified.rpartition(".")
    if not module.startswith("transformers."):
        raise HeadPruneError(
            f"{path} holds a {qualified}, which headprune cannot build.",
            "Pass a fresh dense instance: headprune.load(path, model=YourModel(...)).",
        )
    try:
        # By module first: not every class is exported at the top.
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise HeadPruneError(
            f"This transformers ({transformers.__version__}) has no {qualified}.",
            "Use the version that saved the model.",
        ) from None
    config = transformers.AutoConfig.from_pretrained(path)
    # Weight initialisation costs more than everything else here, and every weight is overwritten.
    with no_init_weights():
        instance: nn.Module = cls._from_config(config, attn_implementation=sidecar["attention"])
    instance.tie_weights()  # type: ignore[operator]
    return instance


def swap_in(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; what was there goes only after the new folder is complete."""
    if not path.exists():
        os.replace(new, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    os.replace(path, old / "was")
    try:
        os.replace(new, path)
    except OSError:
        os.replace(old / "was", path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
