"""Offloaded weights: Accelerate keeps them in CPU memory or on disk, and loads them whenever their module runs.

`accelerate.dispatch_model` (transformers' ``device_map="auto"``) replaces each such weight by a placeholder on the meta device. A hook on
the module loads the values from a mapping by name (``weights_map``) while the module runs. This file reads, changes and copies such
weights. Changed values go into a mapping in front of the original one, so the user's files and tensors are never written to, and the
original values can be restored.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from accelerate.utils import OffloadedWeightsLoader
from torch import Tensor, nn

from headprune.pruned.structure import add_biases, holder_of


def hook_of(module: nn.Module) -> Any:
    """The hook that loads a module's own weights when it runs; None if they are not offloaded."""
    offloading = (h for h in _hooks(module) if getattr(h, "offload", False) and h.weights_map is not None)
    return next(offloading, None)


def _hooks(module: nn.Module) -> Sequence[Any]:
    """Accelerate's hooks on a module."""
    hook = vars(module).get("_hf_hook")
    return getattr(hook, "hooks", (hook,))


def is_elsewhere(module: nn.Module, name: str) -> bool:
    """Whether a module's own parameter or buffer is offloaded, and not loaded at present."""
    tensor = holder_of(module, name).get(name)
    return tensor is not None and tensor.is_meta and hook_of(module) is not None


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights of a model are offloaded."""
    return any(hook_of(module) is not None for module in model.modules())


def is_dispatched(model: nn.Module) -> bool:
    """Whether Accelerate has put hooks on a model, to spread it over devices or to offload weights."""
    return any("_hf_hook" in vars(module) for module in model.modules())


def execution_device(model: nn.Module) -> torch.device | None:
    """The device for a model's inputs; None if no hook names one."""
    places = (getattr(hook, "execution_device", None) for module in model.modules() for hook in _hooks(module))
    return next((torch.device(p) for p in places if p is not None and str(p) not in ("meta", "disk")), None)


def value_of(module: nn.Module, name: str) -> Tensor:
    """The value of a module's own parameter or buffer, offloaded or not; do not modify it in place.

    Raises:
        KeyError: The module has no such tensor, or its value is not stored anywhere.
    """
    tensor: Tensor = holder_of(module, name)[name]
    if not tensor.is_meta:
        return tensor
    stored: Mapping[str, Tensor] = getattr(hook_of(module), "weights_map", {})
    with torch.no_grad():
        return stored[name].detach().to(tensor.dtype)


def place_of(module: nn.Module, name: str) -> object:
    """The storage location of a module's own tensor: equal for two names of one tensor; a tuple if it is on disk."""
    tensor: Tensor = holder_of(module, name)[name]
    hook = hook_of(module) if tensor.is_meta else None
    return _place({name: tensor} if hook is None else hook.weights_map, name)


def _place(stored: Any, name: str) -> object:
    if isinstance(stored, ChainMap):
        return _place(next(each for each in stored.maps if each is stored.maps[-1] or name in each), name)
    if hasattr(stored, "dataset"):
        return _place(stored.dataset, f"{stored.prefix}{name}")
    tensors = getattr(stored, "state_dict", stored)
    if name in tensors:
        return (0 if tensors[name].is_meta else tensors[name].data_ptr()) or id(tensors[name])
    entry = stored.index.get(name, {})
    return entry.get("safetensors_file", id(stored)), entry.get("weight_name", name)


def put(module: nn.Module, name: str, value: Tensor, *, in_memory: bool = False) -> None:
    """Replace the value of a module's offloaded tensor, perhaps by one of another shape, and its placeholder.

    Args:
        in_memory: Whether the new value may stay in CPU memory if the old one is on disk.
    """
    hook, tensors = hook_of(module), holder_of(module, name)
    stored, before = hook.weights_map, tensors.get(name)
    value = value.detach().to("cpu", before.dtype if before is not None else value.dtype).contiguous()
    changed, base = (stored.maps[0], stored.maps[-1]) if isinstance(stored, ChainMap) else ({}, stored)
    if not in_memory and before is not None and isinstance(_place(base, name), tuple):
        value = on_disk(*value.shape, dtype=value.dtype, folder=_loader(base).save_folder).copy_(value)
    hook.weights_map = ChainMap({**changed, name: value}, base)
    trained = before.requires_grad if before is not None else value.is_floating_point()
    tensors[name] = _placeholder(value, name not in module._buffers, trained)


def _placeholder(like: Tensor, is_parameter: bool, trained: bool) -> Tensor:
    empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return nn.Parameter(empty, trained) if is_parameter else empty


def _loader(stored: Any) -> Any:
    """The object that reads the weights, behind chained mappings and views that add a prefix to names."""
    while isinstance(stored, ChainMap) or hasattr(stored, "dataset"):
        stored = stored.maps[-1] if isinstance(stored, ChainMap) else stored.dataset
    return stored


def add_stored_biases(model: nn.Module, names: Sequence[str]) -> None:
    """`headprune.pruned.add_biases`, also for modules with offloaded weights."""
    add_biases(model, names)
    modules = dict(model.named_modules())
    for name in names:
        if name in modules and is_elsewhere(modules[name], "bias"):
            bias = holder_of(modules[name], "bias")["bias"]
            put(modules[name], "bias", torch.zeros(bias.shape, dtype=bias.dtype), in_memory=True)


class Offloaded(Mapping[str, Tensor]):
    """A lazy state dict of a model, which loads each offloaded tensor on access.

    `accelerate.utils.get_state_dict_offloaded_model` loads all of them into memory at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._plain: dict[str, Tensor] = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
        modules, self._own = dict(model.named_modules(remove_duplicate=False)), dict[str, tuple[nn.Module, str]]()
        for name in self._plain:
            owner, _, own = name.rpartition(".")
            # Placeholders for removed weights belong to no named module.
            if owner in modules and own in holder_of(modules[owner], own):
                self._own[name] = modules[owner], own
        self._tied = dict(getattr(model, "all_tied_weights_keys", None) or {})

    def __getitem__(self, name: str) -> Tensor:
        if self._plain[name].is_meta and name in self._own:
            return value_of(*self._own[name])
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def place(self, name: str) -> object:
        """A tensor's storage location: equal for two names of one tensor."""
        source = self._tied.get(name, name)
        name = source if source in self._own else name  # a tied tensor may be on two devices, or on disk twice
        return place_of(*self._own[name]) if name in self._own else id(self._plain[name])


def replace_inference_placeholders(model: nn.Module) -> None:
    """Replace placeholders that a hook created in `torch.inference_mode`, which cannot require gradients."""
    with torch.inference_mode(False):
        for module in model.modules():
            held: tuple[MutableMapping[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in held if hook_of(module) is not None else ():
                for name, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta and tensor.is_inference():
                        tensors[name] = _placeholder(tensor, tensors is module._parameters, tensor.requires_grad)


def trainable(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parameters that require gradients, as (module, name), since hooks replace the tensors whenever a module runs."""
    replace_inference_placeholders(model)
    every = ((module, name, p) for module in model.modules() for name, p in module._parameters.items())
    return [(module, name) for module, name, p in every if p is not None and p.requires_grad]


def copied(model: nn.Module, own: Sequence[str] = ()) -> nn.Module:
    """A copy of a dispatched model that shares its weights, except those of the modules ``own``; a deep copy of any other model.

    A model that fills a device's memory does not fit there twice. A prune replaces the copy's tensors, so the original does not change.

    Args:
        own: Modules whose weights will be modified in place, in the original or the copy.
    """
    if not is_dispatched(model):
        return copy.deepcopy(model)
    names = tuple(f"{name}." for name in own)
    maps = [hook.weights_map for hook in map(hook_of, model.modules()) if hook is not None]
    shared: dict[int, Any] = {id(each): each for each in maps}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.startswith(names):
            value, is_parameter = tensor.detach(), isinstance(tensor, nn.Parameter)
            shared[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    result = copy.deepcopy(model, shared)
    for attribute in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"):  # Accelerate's: they would move the original
        vars(result).pop(attribute, None)
    return result


def reads_from(model: nn.Module, folder: str | os.PathLike[str]) -> bool:
    """Whether some weights of a model are read from files in a folder."""
    entries = (entry for loader in _loaders(model) for entry in getattr(loader, "index", {}).values())
    files = {entry["safetensors_file"] for entry in entries if entry.get("safetensors_file")}
    return any(os.path.dirname(os.path.realpath(file)) == os.path.realpath(folder) for file in files)


def _loaders(model: nn.Module) -> list[Any]:
    """The objects that read a model's offloaded weights, each once."""
    every = [_loader(hook.weights_map) for hook in map(hook_of, model.modules()) if hook is not None]
    return list({id(loader): loader for loader in every}.values())


def with_numbers(module: nn.Module) -> nn.Module:
    """Move a module's empty placeholders for removed weights off the meta device, so that they are saved; returns the module."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and not buffer.numel():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    for child in module._modules.values():  # `modules()` leaves out the modules that hold placeholders
        if child is not None:
            with_numbers(child)
    return module


class _Aligned(OffloadedWeightsLoader):  # type: ignore[misc]
    """A loader that copies weights from safetensors files, where they may be unaligned and CPU kernels then sum in another order."""

    def __getitem__(self, key: str) -> Tensor:
        value: Tensor = super().__getitem__(key)
        return value if key in self.state_dict else value.clone()


def make_loaders_copy(model: nn.Module) -> None:
    """Make a model copy weights from files into aligned memory, so that kernels sum in the same order as for other tensors."""
    for loader in _loaders(model):
        if isinstance(loader, OffloadedWeightsLoader):
            loader.__class__ = _Aligned


def on_disk(*shape: int, dtype: torch.dtype = torch.float64, folder: str | os.PathLike[str] | None = None) -> Tensor:
    """Zeros in a memory-mapped file, which is deleted together with the tensor.

    Args:
        folder: For the file; by default the folder for temporary files.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="headprune-", dir=folder) as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
