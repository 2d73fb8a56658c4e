"""Weights that Accelerate keeps elsewhere: in the CPU's memory or on disk, loaded whenever their module runs.

`accelerate.dispatch_model` (transformers' ``device_map="auto"``) puts a placeholder without numbers (on the meta device) in the place of
each such weight, and a hook on the module that puts the numbers there while the module runs. Here they are read, changed and named;
the placeholder says of what shape and type they are. What is written never changes a file or a tensor of the user's: new numbers get a
file of their own, which goes when nobody refers to it any more.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from headprune.pruned import add_biases

Undo = Callable[[], None]


def hook_of(module: nn.Module) -> Any:
    """The hook that loads a module's own weights when it runs; None where they are not kept elsewhere."""
    hook = vars(module).get("_hf_hook")
    each = getattr(hook, "hooks", (hook,))
    return next((h for h in each if getattr(h, "offload", False) and getattr(h, "weights_map", None) is not None), None)


def is_elsewhere(module: nn.Module, name: str) -> bool:
    """Whether a module's own parameter or buffer is kept elsewhere, and not just loaded."""
    held = _held(module, name).get(name)
    return held is not None and held.is_meta and hook_of(module) is not None


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights of a model are kept elsewhere."""
    return any(hook_of(module) is not None for module in model.modules())


def is_dispatched(model: nn.Module) -> bool:
    """Whether Accelerate has put hooks on a model, to spread it over devices or to keep weights elsewhere."""
    return any("_hf_hook" in vars(module) for module in model.modules())


def execution_device(model: nn.Module) -> torch.device | None:
    """The device that inputs go to; None where no hook names one."""
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            place = getattr(each, "execution_device", None)
            if place is not None and str(place) not in ("meta", "disk"):
                return torch.device(place)
    return None


def value_of(module: nn.Module, name: str) -> Tensor:
    """A module's own parameter or buffer, wherever its numbers are; not to be written into.

    Raises:
        KeyError: It has no such tensor, or its numbers are nowhere.
    """
    held = _held(module, name)[name]
    assert isinstance(held, Tensor)
    if not held.is_meta:
        return held
    if (hook := hook_of(module)) is None:
        raise KeyError(name)
    with torch.no_grad():
        found: Tensor = hook.weights_map[name].detach().to(held.dtype)
    return found


def place_of(module: nn.Module, name: str) -> object:
    """Where the numbers of a module's own tensor are: equal for two names of one tensor."""
    held = _held(module, name)[name]
    assert held is not None
    if not held.is_meta:
        return held.data_ptr() or id(held)
    if (hook := hook_of(module)) is None:
        return id(held)
    store, key = _root(hook.weights_map, name)
    known = store if isinstance(store, Mapping) and not hasattr(store, "index") else store.state_dict
    if key in known:
        return known[key].data_ptr() or id(known[key])
    entry = store.index.get(key, {})
    return entry.get("safetensors_file", id(store)), entry.get("weight_name", key)


def put(module: nn.Module, name: str, value: Tensor, *, in_memory: bool = False) -> Undo:
    """Give a module's own tensor that is kept elsewhere other numbers, of any shape; the placeholder becomes one of that shape.

    Args:
        in_memory: Whether they may stay in the CPU's memory where the old ones were on disk.

    Returns:
        What takes it back, placeholder and all.
    """
    hook, held = hook_of(module), _held(module, name)
    before = held.get(name)
    value = value.detach().to("cpu", before.dtype if before is not None else value.dtype).contiguous()
    undo = _store(hook.weights_map, name, value, in_memory)
    shape = torch.empty_like(value, device="meta")
    trainable = before.requires_grad if before is not None else value.is_floating_point()
    is_parameter = name not in module._buffers
    held[name] = nn.Parameter(shape, requires_grad=trainable) if is_parameter else shape

    def back() -> None:
        undo()
        held[name] = before

    return back


def add_stored_biases(model: nn.Module, names: Sequence[str]) -> None:
    """`headprune.pruned.add_biases`, also for modules whose weights are kept elsewhere."""
    add_biases(model, names)
    modules = dict(model.named_modules())
    for name in names:
        if name in modules and is_elsewhere(modules[name], "bias"):
            bias = modules[name].bias
            assert isinstance(bias, Tensor)
            put(modules[name], "bias", torch.zeros(bias.shape, dtype=bias.dtype), in_memory=True)


def state_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and the own name of every tensor of a model's state dict."""
    found = {}
    for name in model.state_dict():
        owner, _, own = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            continue  # what stands for weights that are gone is in no module that has a name
        if own in module._parameters or own in module._buffers:
            found[name] = module, own
    return found


class Offloaded(Mapping[str, Tensor]):
    """A model's state dict whose tensors are loaded when they are asked for, one at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._plain: dict[str, Tensor] = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
        self._own = state_of(model)
        self._tied = dict(getattr(model, "all_tied_weights_keys", None) or {})

    def __getitem__(self, name: str) -> Tensor:
        if self._plain[name].is_meta and name in self._own:
            return value_of(*self._own[name])
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def placeholder(self, name: str) -> Tensor:
        """Of the same shape and type, perhaps without numbers."""
        return self._plain[name]

    def place(self, name: str) -> object:
        """Where a tensor's numbers are: equal for two names of one tensor."""
        source = self._tied.get(name)
        if source in self._own and source != name:  # one that is on two devices, or on disk twice
            name = source
        return place_of(*self._own[name]) if name in self._own else id(self._plain[name])


def renewed(model: nn.Module) -> None:
    """Replace placeholders that a hook left in `torch.inference_mode`: they could not be given gradients afterwards."""
    with torch.inference_mode(False):
        for module in model.modules():
            if hook_of(module) is None:
                continue
            for name, held in module._parameters.items():
                if held is not None and held.is_meta and held.is_inference():
                    empty = torch.empty(held.shape, dtype=held.dtype, device="meta")
                    module._parameters[name] = nn.Parameter(empty, requires_grad=held.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and buffer.is_inference():
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


def trainable(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parameters that want gradients, by module and own name: a hook puts others in their place whenever a module runs."""
    renewed(model)
    return [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]


def copied(model: nn.Module, own: Sequence[str] = ()) -> nn.Module:
    """A copy that shares its weights with a dispatched model, but for those of some modules; a whole copy of any other model.

    A model that takes all of a device's memory cannot be there twice. Heads are cut out of the copy by giving it other tensors, so that the
    original does not change.

    Args:
        own: Modules whose weights will be written into in place, in the original or the copy.
    """
    if not is_dispatched(model):
        return copy.deepcopy(model)
    names = tuple(f"{name}." for name in own)
    shared: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if not name.startswith(names):
            shared[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if not name.startswith(names):
            shared[id(buffer)] = buffer.detach()
    for store in _stores(model):
        for tensor in getattr(store, "state_dict", store).values() if _in_memory(store) else ():
            shared[id(tensor)] = tensor
    found = copy.deepcopy(model, shared)
    for attribute in ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"):  # Accelerate's, which would move the original
        vars(found).pop(attribute, None)
    return found


def reads_from(model: nn.Module, folder: str | os.PathLike[str]) -> bool:
    """Whether some weights of a model are read from files in a folder."""
    stores = {id(store): store for store in _stores(model) if hasattr(store, "index")}
    places = {entry.get("safetensors_file") for store in stores.values() for entry in store.index.values()}
    there = os.path.realpath(folder)
    return any(os.path.dirname(os.path.realpath(place)) == there for place in places if place)


def with_numbers(module: nn.Module) -> nn.Module:
    """A module whose tensors without entries, which stand for weights that are gone, are not on the meta device: they are saved, too."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and not buffer.numel():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    for child in module._modules.values():
        if child is not None:
            with_numbers(child)
    return module


def aligned(model: nn.Module) -> None:
    """Let what is read from files of many weights be copied to memory that starts where any tensor starts.

    In such a file a weight may start at any byte, and the kernels of a CPU then sum in another order.
    """
    for module in model.modules():
        if (hook := hook_of(module)) is not None and hasattr(view := hook.weights_map, "dataset"):
            while hasattr(view.dataset, "dataset"):
                view = view.dataset
            if hasattr(view.dataset, "index") and not isinstance(view.dataset, _Copied):
                view.dataset = _Copied(view.dataset)


def on_disk(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Zeros in a file of their own, which the system reads and writes as there is memory, and which goes with the tensor."""
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    number, path = tempfile.mkstemp(prefix="headprune-")
    try:
        os.ftruncate(number, count * dtype.itemsize)
        return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        os.close(number)
        _unlink(path)


# -- stores ----------------------------------------------------------------------------------------


class _Copied:
    """An `accelerate.utils.OffloadedWeightsLoader` that gives copies."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getitem__(self, key: str) -> Tensor:
        found: Tensor = self.loader[key]
        return found if key in self.loader.state_dict else found.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __contains__(self, key: object) -> bool:
        return key in self.loader


class _Entry(dict[str, str]):
    """What an index of Accelerate says of one tensor, which is in a file of its own; the file goes with the last copy of the entry."""

    def __deepcopy__(self, memo: Any) -> _Entry:
        return self


def _held(module: nn.Module, name: str) -> MutableMapping[str, Any]:
    return module._buffers if name in module._buffers else module._parameters


def _root(store: Any, name: str) -> tuple[Any, str]:
    """The store behind views of it that put a prefix before every name, and the whole name."""
    while hasattr(store, "prefix") and hasattr(store, "dataset"):
        store, name = store.dataset, f"{store.prefix}{name}"
    return store.loader if isinstance(store, _Copied) else store, name


def _stores(model: nn.Module) -> Iterator[Any]:
    """Where a model's hooks keep weights; each once for every hook."""
    for module in model.modules():
        if (hook := hook_of(module)) is not None:
            yield _root(hook.weights_map, "")[0]


def _in_memory(store: Any) -> bool:
    return hasattr(store, "state_dict") or isinstance(store, dict)


def _store(view: Any, name: str, value: Tensor, in_memory: bool) -> Undo:
    """Store a tensor; returns what takes it back."""
    store, key = _root(view, name)
    if not hasattr(store, "index"):
        return _set(store, key, value)
    state, index, keys = store.state_dict, store.index, store.all_keys
    # New mappings: these may be the user's own.
    if in_memory or (key not in index and key in state) or not index:
        store.state_dict = {**state, key: value}
    else:
        store.state_dict = {k: v for k, v in state.items() if k != key}
        store.index = {**index, key: _written(value, store.save_folder)}
    store.all_keys = keys if key in keys else [*keys, key]

    def back() -> None:
        store.state_dict, store.index, store.all_keys = state, index, keys

    return back


def _set(store: MutableMapping[str, Tensor], key: str, value: Tensor) -> Undo:
    before = store.get(key)
    store[key] = value

    def back() -> None:
        if before is None:
            store.pop(key, None)
        else:
            store[key] = before

    return back


def _written(value: Tensor, folder: str | os.PathLike[str] | None) -> _Entry:
    """A tensor in a file of its own."""
    from safetensors.torch import save_file

    number, path = tempfile.mkstemp(".safetensors", "headprune-", folder)
    os.close(number)
    save_file({"weight": value}, path)
    entry = _Entry(safetensors_file=path, weight_name="weight", dtype=str(value.dtype).removeprefix("torch."))
    weakref.finalize(entry, _unlink, path)
    return entry


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
