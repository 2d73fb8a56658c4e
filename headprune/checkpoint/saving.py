"""Write a model's folder."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune import __version__
from headprune.checkpoint import probe, remote_code
from headprune.checkpoint.card import CARD, add_tags, origin_of, upload, write_card
from headprune.checkpoint.remote_code import SIDECAR, NotStockError, dense_class, is_stock
from headprune.checkpoint.stock import to_stock
from headprune.errors import HeadPruneError
from headprune.files import atomic_folder, digest, write_file, write_json
from headprune.fingerprint import fingerprint, is_wrapper
from headprune.input_specs import record
from headprune.inputs import Example, check_model, writes
from headprune.offload import Offloaded, is_offloaded, reads_from
from headprune.pruned import home, record_of, structure_of, unwrapped

MAX_SHARD = "50GB"  # transformers' default
OFFLOADED_SHARD = "5GB"  # for offloaded models: one shard at a time is in memory
_WEIGHTS = "model{suffix}.safetensors"
_COMMIT = ("private", "token", "commit_message", "commit_description", "revision", "create_pr")  # arguments of `upload`


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

    transformers loads the folder too, without headprune: by ``AutoModel….from_pretrained(folder)`` if the stock class can represent the
    model (for many classes: the same number of heads in every layer), otherwise with ``trust_remote_code=True``. The folder's README.md
    says which. That file is a model card; it takes license and languages from the source model's card, which is kept as README-source.md.

    Args:
        model: A transformers model, or any module (`load` then needs a fresh instance of it). A PEFT model whose adapters were
            merged and that was unloaded is a transformers model.
        path: The folder; it appears complete or not at all.
        processor: A tokenizer or image processor to save beside the model.
        example: An input of the model, needed if the model was never pruned and is no transformers model: `save` stores the answers to a
            made-up input of the same form, and `load` compares them. The contents of the example are not saved.
        overwrite: Replace an existing folder.
        about: More to store in headprune.json (such as the dataset).
        max_shard_size: The largest file of weights, such as ``"5GB"``; larger weights are split into shards. For a model that Accelerate
            has offloaded, one shard at a time is in memory, by default of 5 GB.

    Raises:
        HeadPruneError: The folder exists and is not empty; adapters (LoRA) that are not merged; quantised weights; or two different
            tensors that the config ties.
    """
    check_model(model)
    model, path = unwrapped(model), Path(path)
    _check_savable(model, model.state_dict(), path)
    check_tied(model)
    with atomic_folder(path, overwrite) as folder:
        if example is not None:
            record(model, example)
        if processor is not None:
            processor.save_pretrained(folder)
        beside = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        _write(model, folder, about=about, max_shard_size=max_shard_size, beside=beside)
        for file in folder.iterdir():
            file.chmod(0o644)
    return path


def install_save_methods(model: nn.Module) -> None:
    """Replace ``save_pretrained`` and ``push_to_hub`` of this one model, if it has them, by the functions below.

    The standard methods, which Trainer and others call, write a folder that loads with random weights in a layer without heads, and
    without biases that a repair added. Copies and pickles of the model keep the replaced methods.
    """
    inner, _ = home(model)  # PEFT's wrapper still saves its adapters
    for method in (save_pretrained, push_to_hub):
        if hasattr(type(inner), method.__name__):
            vars(inner)[method.__name__] = partial(method, inner)


def save_pretrained(
    model: nn.Module,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: str | int = MAX_SHARD,
    **kwargs: Any,
) -> None:
    """Replaces ``save_pretrained`` of a pruned transformers model; Trainer calls it, too.

    Args:
        save_directory: The folder; other files in it stay.
        kwargs: Arguments for the Hub (``repo_id``, ``private``, ``token`` …); other arguments of transformers' method are ignored.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers then writes only the adapters
        kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict, "push_to_hub": push_to_hub}
        type(model).save_pretrained(model, save_directory, **kwargs)  # type: ignore[attr-defined]
        return
    if not is_main_process:
        return
    folder = Path(save_directory)
    _check_savable(model, state_dict or model.state_dict(), folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(model, folder, state_dict=state_dict, max_shard_size=max_shard_size, same_tensors=True)
    if push_to_hub:
        passed = {name: kwargs[name] for name in _COMMIT if name in kwargs}
        upload(folder, kwargs.get("repo_id") or folder.absolute().name, **passed)


def push_to_hub(
    model: Any, repo_id: str, *, max_shard_size: str | int | None = None, tags: Sequence[str] = (), **commit: Any
) -> str:
    """Replaces ``push_to_hub`` of a pruned model, which would overwrite the model card.

    Args:
        commit: ``private``, ``token``, ``commit_message``, ``commit_description``, ``revision`` and ``create_pr``.

    Returns:
        The URL of the commit or pull request.

    Raises:
        HeadPruneError: The Hub cannot be reached or refuses; or adapters are not merged.
    """
    if unknown := sorted(commit.keys() - set(_COMMIT)):
        raise TypeError(f"push_to_hub() got an unexpected keyword argument {unknown[0]!r}")
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size or MAX_SHARD)
        if tags and (Path(folder) / CARD).is_file():
            add_tags(Path(folder), tags)
        return upload(Path(folder), repo_id, **commit)


def unite_tied(model: nn.Module) -> None:
    """Tie equal tensors that the config ties: transformers 5.0 leaves them untied if a checkpoint stores both."""
    for name, other, one, two in _separate(model):
        if not (one.is_meta or two.is_meta) and torch.equal(one, two):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, two)
            tied_names(model)[name] = other


def check_tied(model: nn.Module, source: str = "The model") -> None:
    """Refuse a model with different weights in tensors that its config ties.

    transformers loads such a checkpoint as it is stored, with a warning. But a model built from the config has only one of the
    tensors, so a folder saved from it would not hold the measured model.

    Args:
        source: Where the model is from, for the message.

    Raises:
        HeadPruneError: The config ties two tensors that differ.
    """
    for name, other, one, two in _separate(model):
        compared = not (one.is_meta or two.is_meta)  # offloaded weights cannot be compared
        if name not in tied_names(model) or compared:
            message = f"{source} has weights of its own for {name}, but by its config (tie_word_embeddings) these are those of {other}."
            hint = "If both are meant, set tie_word_embeddings to false in config.json (in Python in model.config)"
            raise HeadPruneError(message, f"{hint}; if not, take {name} out of the checkpoint.")


def tied_names(model: nn.Module) -> dict[str, str]:
    """Tensors that transformers tied: name -> name under which the tensor is saved."""
    names: dict[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    return {} if names is None else names


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Digests of a folder's existing files among ``names``: relative path with slashes -> digest.

    A flipped bit in the probe's buffers may change answers at positions that the probe does not reach, and one in a tokenizer
    changes every measurement, but not the model. Weights are left out: the fingerprint covers them.
    """
    chosen = sorted(name for name in names if name == probe.FILE or not name.endswith(".safetensors"))
    return {name: digest(folder / name) for name in chosen if (folder / name).is_file()}


def _write(
    model: nn.Module,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    max_shard_size: str | int = MAX_SHARD,
    same_tensors: bool = False,
    beside: Sequence[str] = (),
) -> None:
    """Write all files of a model into an existing folder; as the stock class, if that can represent the model.

    Args:
        beside: Names of other files in the folder that belong to the model, such as a tokenizer's.
        same_tensors: Use the stock class only if its tensors have the model's names and shapes: Trainer loads the saved state dict
            into the model in memory.
    """
    origin = origin_of(model)
    model, why = _as_stock(model, same_tensors)
    structure, cls = structure_of(model), dense_class(model)
    _write_weights(model, folder, state_dict, max_shard_size)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    config = _write_config(model, folder, cls, dtype, {**structure, **record_of(model)} if structure else {})
    probe.write_probe(model, folder)
    names = ("config.json", "generation_config.json", remote_code.FILE, probe.FILE, *beside)
    sidecar = {
        "version": __version__,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "dtype": str(dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "fingerprint": fingerprint(model),
        **record_of(model),
        "structure": structure,
        "why_not_stock": why,
        "files": file_digests(folder, names),
        "about": about or {},
    }
    write_json(folder / SIDECAR, "checkpoint", sidecar)
    write_card(folder, origin)


def _as_stock(model: nn.Module, same_tensors: bool) -> tuple[nn.Module, str]:
    """(The pruned model as an instance of its stock class, ""); or (the model itself, why the class cannot represent it)."""
    if not structure_of(model) or not hasattr(getattr(model, "config", None), "save_pretrained"):
        return model, ""
    try:
        stock = to_stock(model)
    except NotStockError as error:
        return model, error.args[0]
    ours, theirs = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, stock))
    if same_tensors and ours != theirs:
        why = "Its stock class has tensors of other shapes than the model in memory (headprune.save writes these)."
        return model, why
    return stock, ""


def _write_config(model: Any, folder: Path, cls: type, dtype: torch.dtype, structure: Mapping[str, Any]) -> Any:
    """Write a transformers model's config and, if needed, modeling_headprune.py; returns the config, None for any other module."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return None
    config: Any = copy.deepcopy(model.config)
    # BigBird turns to full attention at its first short text, for good, and its config never learns.
    for module in model.modules():
        if isinstance(turned := vars(module).get("attention_type"), str) and hasattr(config, "attention_type"):
            config.attention_type = turned
    config.architectures, config.dtype = [cls.__name__], dtype
    if structure and is_stock(cls):
        config.headprune, classes = structure, remote_code.auto_classes(cls)
        config.auto_map = {auto: f"{remote_code.MODULE}.{name}" for auto, name in classes.items()}
        write_file(folder / remote_code.FILE, remote_code.code_for(cls, __version__))
    else:
        (folder / remote_code.FILE).unlink(missing_ok=True)  # from another model saved there before
        if not is_stock(cls):
            remote_code.copy_code(cls, folder, config)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and writes(model):
        model.generation_config.save_pretrained(folder)
    return config


def _write_weights(
    model: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None, max_shard_size: str | int
) -> None:
    """Write the weights; shards of an offloaded model are loaded one at a time."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    state: Mapping[str, Tensor] = state_dict or model.state_dict()
    stored, size = state, max_shard_size
    places: dict[str, object] = {}  # equal for two names of one tensor
    for name, t in state.items():
        places[name] = (t.data_ptr(), t.shape, t.stride()) if t.numel() and not t.is_meta else name
    if is_offloaded(model) and any(t.is_meta for t in state.values()):
        stored = offloaded = Offloaded(model)
        places = {name: offloaded.place(name) for name in offloaded}
        size = OFFLOADED_SHARD if max_shard_size == MAX_SHARD else max_shard_size
    tied, names = tied_names(model), dict[object, str]()
    for name in sorted(places, key=lambda name: name in tied):  # prefer a name that is not tied to another
        names.setdefault(places[name], name)
    once = {name: state[name] for name in places if names[places[name]] == name}
    split = split_torch_state_dict_into_shards(once, filename_pattern=_WEIGHTS, max_shard_size=size)
    for file in folder.iterdir():  # from another model saved there before
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", file.name):
            file.unlink()
    for file_name, own in split.filename_to_tensors.items():
        save_file({n: _whole(stored[n]) for n in own}, str(folder / file_name), metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": {**split.metadata, "format": "pt"}, "weight_map": split.tensor_to_filename}
        write_file(folder / f"{_WEIGHTS.format(suffix='')}.index.json", json.dumps(index, indent=2))


def _whole(tensor: Tensor) -> Tensor:
    """A contiguous tensor that owns its memory; slices share theirs, which safetensors does not allow."""
    tensor = tensor.detach()
    is_slice = not tensor.is_meta and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if is_slice else tensor.contiguous()


def _separate(model: nn.Module) -> Iterator[tuple[str, str, Any, Any]]:
    """Pairs of tensors that the config ties but the model does not: (name, name of the other, tensor, the other).

    Leaves out pruned tensors: tied layers may have lost different heads, and a saved folder records which pruned tensors are still tied
    (`headprune.pruned.structure_of`).
    """
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    if expanded is None:
        return
    own: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    modules = structure_of(model).get("modules", {})
    pruned = {f"{name}.{tensor}" for name, entry in modules.items() for tensor in entry.get("tensors", ())}
    for name, other in expanded(all_submodels=True).items():
        one, two = own.get(name), own.get(other)
        if one is not None and two is not None and one is not two and not {name, other} & pruned:
            yield name, other, one, two


def _check_savable(model: nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Refuse a model or folder that `save` cannot write.

    Raises:
        HeadPruneError: Unmerged adapters; a part of a transformers model that torch.compile wraps; quantised weights (any entry of
            the state dict that is no plain tensor and, in a transformers model, any parameter of integers or one-byte floats), since
            `load` builds the model with plain ones; or a folder that an offloaded model reads its weights from.
    """
    stock = is_stock(dense_class(model))
    for name, module in model.named_modules():
        if stock and unwrapped(module) is not module:
            message = f"{name} is wrapped by torch.compile, so its weights have names that no class has."
            hint = f"Put {name}._orig_mod in its place; {name}.compile() compiles without a wrapper."
            raise HeadPruneError(message, hint)
        if type(module).__module__.startswith("peft."):
            kind = type(module).__name__
            message = f"{name or 'The model'} is PEFT's {kind}: its adapters are not merged into the weights."
            raise HeadPruneError(message, "Save model.merge_and_unload(), or adapters by PEFT's own save_pretrained.")
    odd = {n: v for n, v in state.items() if not isinstance(v, Tensor) or is_wrapper(v)}
    if stock:
        odd |= {n: p for n, p in model.named_parameters() if not p.is_floating_point() or p.element_size() == 1}
    for name, value in odd.items():
        kind = value.dtype if type(value) in (Tensor, nn.Parameter) else type(value).__name__
        hint = "Save the model before you quantise it; from_pretrained(folder, quantization_config=…) quantises as it loads."
        raise HeadPruneError(f"{name} is quantised ({kind}), and headprune.save writes plain weights only.", hint)
    if reads_from(model, folder):
        message = f"The model's own weights are read from {folder} whenever it runs."
        raise HeadPruneError(message, "Save it to another folder.")
