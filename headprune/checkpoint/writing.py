"""Write a model's folder."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune import __version__, probe
from headprune.checkpoint import remote_code
from headprune.checkpoint.card import CARD, Origin, add_tags, write_card
from headprune.checkpoint.files import checksums
from headprune.checkpoint.folders import replaced
from headprune.checkpoint.hub import upload
from headprune.checkpoint.loading import SIDECAR
from headprune.checkpoint.shards import MAX_SHARD as OFFLOADED_SHARD
from headprune.checkpoint.shards import write_shards
from headprune.checkpoint.ties import check_tied
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint, is_wrapper
from headprune.forms import remember
from headprune.inputs import Example, check_model, writes
from headprune.jsonio import read_json, write_json, write_text
from headprune.offload import Offloaded, is_offloaded, reads_from
from headprune.pruned import Structure, heads_before, removed, structure_of, was_repaired
from headprune.stock import CannotStateError, dense_class, stock_instance

_OWN = ("config.json", "generation_config.json", remote_code.FILE, probe.FILE)  # files that are always ours
MAX_SHARD = "50GB"  # as transformers has it
_COMMIT = (
    "commit_message",
    "commit_description",
    "revision",
    "create_pr",
)  # what transformers' methods pass on to the Hub


def save(
    model: nn.Module,
    path: str | Path,
    *,
    processor: Any = None,
    example: Example | None = None,
    overwrite: bool = False,
    about: dict[str, Any] | None = None,
    max_shard_size: str | int = MAX_SHARD,
) -> Path:
    """Save a model, pruned or not, to a folder that `load` reads.

    transformers loads the folder too, without headprune: ``AutoModel….from_pretrained(folder)`` where the stock class can state the
    model (the same number of heads in every layer, for many classes), else with ``trust_remote_code=True``. `loading_of` says which. Its
    README.md is a model card, with the license and languages that the card of the folder says from which the model was loaded; that card is
    kept as README-source.md.

    Args:
        model: A transformers model, or any module (`load` then needs a fresh instance of it). A PEFT model whose adapters were
            merged and that was unloaded is a transformers model.
        path: The folder; it appears complete or not at all.
        processor: A tokenizer or image processor to save beside the model.
        example: An input of the model, needed if it was never pruned and is no transformers model: its answers to a made-up
            input of the same form are saved, and `load` compares them. The contents of the example are not saved.
        overwrite: Replace what is there.
        about: More to store in the sidecar (such as the dataset).
        max_shard_size: The size from which on weights are split over several files, such as ``"5GB"``. Of a model whose weights Accelerate
            keeps elsewhere, one such file is in memory at a time, by default of 5 GB.

    Raises:
        HeadPruneError: The folder exists and is not empty; adapters (LoRA) that are not merged; quantised weights; or two tensors where
            the config says that there is one.
    """
    check_model(model)
    path = Path(path)
    check_merged(model)
    check_plain(model, model.state_dict())
    check_tied(model)
    _check_not_read(model, path)
    with replaced(path, overwrite) as folder:
        write(model, folder, example=example, about=about or {}, max_shard_size=max_shard_size)
        complete(folder, processor)
    return path


def complete(folder: Path, processor: Any) -> None:
    """Put a processor beside a model that was written into an empty folder, if there is one, note all files' checksums, and let everyone read
    them."""
    if processor is not None:
        processor.save_pretrained(folder)
        sidecar = read_json(folder / SIDECAR, "checkpoint")
        write_json(folder / SIDECAR, "checkpoint", {**sidecar, "files": checksums(folder)})
    for file in folder.iterdir():
        file.chmod(0o644)


def save_pretrained(
    model: nn.Module,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: str | int = MAX_SHARD,
    **kwargs: Any,
) -> None:
    """What takes the place of a pruned model's own ``save_pretrained`` (which Trainer calls, too): the standard one would write
    a folder that loads with random weights where a layer lost all its heads.

    Args:
        model: A pruned transformers model.
        save_directory: Files of other names there are left alone.
        is_main_process, state_dict, push_to_hub, max_shard_size: As for transformers' method. What else that takes is
            passed on to the Hub (``repo_id``, ``private``, ``token``), or has no meaning here.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers writes the adapters alone
        type(model).save_pretrained(  # type: ignore[attr-defined]
            model,
            save_directory,
            is_main_process=is_main_process,
            state_dict=state_dict,
            push_to_hub=push_to_hub,
            **kwargs,
        )
        return
    if not is_main_process:
        return
    check_merged(model)
    check_plain(model, state_dict or model.state_dict())
    folder = Path(save_directory)
    _check_not_read(model, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write(model, folder, state_dict=state_dict, max_shard_size=max_shard_size, same_tensors=True)
    if push_to_hub:
        passed = {name: kwargs[name] for name in ("private", "token", *_COMMIT) if name in kwargs}
        upload(folder, kwargs.get("repo_id") or folder.absolute().name, **passed)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    max_shard_size: str | int | None = MAX_SHARD,
    tags: Sequence[str] | None = None,
    **commit: Any,
) -> str:
    """What takes the place of a pruned model's own ``push_to_hub``, which would put another card in the place of ours.

    Args:
        model: A pruned transformers model.
        repo_id, private, token, max_shard_size, tags: As for transformers' method.
        commit: ``commit_message``, ``commit_description``, ``revision`` and ``create_pr``, as there.

    Returns:
        The commit's address.

    Raises:
        HeadPruneError: The Hub cannot be reached or refuses; or adapters that are not merged.
    """
    if unknown := commit.keys() - set(_COMMIT):
        raise TypeError(f"push_to_hub() got an unexpected keyword argument {min(unknown)!r}")
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size or MAX_SHARD)  # type: ignore[operator]
        if tags and (Path(folder) / CARD).is_file():
            add_tags(Path(folder), tags)
        return upload(Path(folder), repo_id, private=private, token=token, **commit)


def write(
    model: nn.Module,
    folder: Path,
    *,
    example: Any = None,
    about: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_size: str | int = MAX_SHARD,
    same_tensors: bool = False,
) -> None:
    """All files of a model, into a folder that exists: a folder of its stock class, where that can state it.

    Args:
        same_tensors: Only where the stock class has the very tensors that the model has, by name and shape: Trainer loads what it
            saved into the model in memory.
    """
    origin = Origin.of(model)
    if example is not None:
        remember(model, example)
    model, why = _as_stock(model, same_tensors)
    structure, cls = structure_of(model), dense_class(model)
    _write_weights(model, folder, state_dict, max_shard_size)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    config = _write_config(model, folder, structure, cls, dtype)
    probe.keep(model, folder)
    write_json(
        folder / SIDECAR,
        "checkpoint",
        {
            "version": __version__,
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "dtype": str(dtype).removeprefix("torch."),
            "attention": getattr(config, "_attn_implementation", None),
            "fingerprint": fingerprint(model),
            "heads": heads_before(model),
            "removed": removed(model),
            "repaired": was_repaired(model),
            "structure": structure,
            "why_not_stock": why,
            "files": checksums(folder, _OWN),
            "about": about or {},
        },
    )
    write_card(folder, origin)


def _write_weights(
    model: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None, max_shard_size: str | int
) -> None:
    """The files of the weights; of a model that is not all in memory, one shard after another is loaded."""
    from huggingface_hub import save_torch_state_dict

    state = state_dict or model.state_dict()
    if is_offloaded(model) and any(t.is_meta for t in state.values()):
        size = OFFLOADED_SHARD if max_shard_size == MAX_SHARD else max_shard_size
        stored = Offloaded(model)
        write_shards(model, _named_once(model, {n: stored.place(n) for n in stored}), folder, size)
        return
    save_torch_state_dict(stored_once(model, state), folder, max_shard_size=max_shard_size, metadata={"format": "pt"})


def _as_stock(model: nn.Module, same_tensors: bool) -> tuple[nn.Module, str]:
    """A pruned model as its stock class has it, and ""; or the model itself, and why the class has no such model."""
    if not structure_of(model) or not hasattr(getattr(model, "config", None), "save_pretrained"):
        return model, ""
    try:
        stock = stock_instance(model)
    except CannotStateError as error:
        return model, error.args[0]
    ours, theirs = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, stock))
    if same_tensors and ours != theirs:
        return (
            model,
            "Its stock class has tensors of other shapes than the model in memory (headprune.save writes these).",
        )
    return stock, ""


def _write_config(model: nn.Module, folder: Path, structure: Structure, cls: type, dtype: torch.dtype) -> Any:
    """A transformers model's config and code; returns the config, None for any other module."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return None
    config: Any = copy.deepcopy(model.config)
    config.architectures, config.dtype = [cls.__name__], dtype
    if structure and cls.__module__.startswith("transformers."):
        noted = {"removed": removed(model), "heads": heads_before(model), "repaired": was_repaired(model)}
        config.headprune = {**structure, **noted}
        config.auto_map = remote_code.auto_map(cls)
        write_text(folder / remote_code.FILE, remote_code.code_for(cls, __version__))
    else:
        (folder / remote_code.FILE).unlink(missing_ok=True)  # of another model that was saved there
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and writes(model):
        model.generation_config.save_pretrained(folder)  # type: ignore[union-attr,operator]
    return config


def stored_once(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict, of several names of one tensor that one which is no copy in transformers' eyes."""
    places = {
        name: (t.data_ptr(), t.shape, t.stride()) if t.numel() and not t.is_meta else name for name, t in state.items()
    }
    # Slices of one tensor share memory, which a file of weights cannot.
    return {n: state[n].clone() if _is_part(state[n]) else state[n] for n in _named_once(model, places)}


def _named_once(model: nn.Module, places: Mapping[str, object]) -> list[str]:
    """One name of every tensor: where it has several, one which is no copy in transformers' eyes.

    Args:
        places: Where each tensor is, by name.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names: dict[object, str] = {}
    for name in sorted(places, key=lambda name: name in tied):
        names.setdefault(places[name], name)
    kept = set(names.values())
    return [name for name in places if name in kept]


def _is_part(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _check_not_read(model: nn.Module, folder: Path) -> None:
    """Refuse to replace files that the model itself reads its weights from.

    Raises:
        HeadPruneError: The folder holds some.
    """
    if reads_from(model, folder):
        raise HeadPruneError(
            f"The model's own weights are read from {folder} whenever it runs.", "Save it to another folder."
        )


def check_merged(model: nn.Module) -> None:
    """Refuse adapters that are beside the weights.

    Raises:
        HeadPruneError: A module of PEFT's.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise HeadPruneError(
                f"{name or 'The model'} is PEFT's {type(module).__name__}: its adapters are not merged into the weights.",
                "Save model.merge_and_unload(), or the adapters by PEFT's own save_pretrained.",
            )


def check_plain(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse quantised weights: `load` builds the model with plain ones.

    Raises:
        HeadPruneError: Something in the state dict that is no plain tensor; of a transformers model, also a parameter of integers
            or of floats of one byte.
    """
    odd = {n: v for n, v in state.items() if not isinstance(v, Tensor) or is_wrapper(v)}
    if dense_class(model).__module__.startswith("transformers."):
        odd |= {n: p for n, p in model.named_parameters() if not p.is_floating_point() or p.element_size() == 1}
    for name, value in odd.items():
        kind = value.dtype if type(value) in (Tensor, nn.Parameter) else type(value).__name__
        raise HeadPruneError(
            f"{name} is quantised ({kind}), and headprune.save writes plain weights only.",
            "Save the model before you quantise it; from_pretrained(folder, quantization_config=…) quantises as it loads.",
        )
