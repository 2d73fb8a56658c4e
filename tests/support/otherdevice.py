"""A device that is not there: its tensors lie in ordinary memory, but no operation takes them together with the CPU's.

Mixing devices is the mistake that only a GPU shows. Here ``cuda:0`` is pretended: every tensor made there holds a CPU tensor, whose
numbers are real, and answers ``.device`` with ``cuda:0``. An operation runs if all its tensors lie on one device; a CPU tensor without
dimensions may go with any, as on a GPU. Otherwise it fails with the message that torch gives.

Autograd, `torch.inference_mode` and hooks work as ever. What does not: speed, memory, kernels and their rounding, streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

DEVICE = torch.device("cuda:0")
_COPIES = ("_to_copy", "copy_", "_copy_from", "set_")  # these may have tensors of two devices
_INDEXED = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")  # indices may lie on the CPU


class There(Tensor):
    """A tensor on the pretended device. To torch's own code, which would ask a device for its streams, it is one of the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=torch.device("cpu"),
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self.held!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def get_device(self) -> int:
        return 0

    def cpu(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return torch.ops.aten._to_copy(self, device=torch.device("cpu"))

    def cuda(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return self

    def numpy(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().detach().tolist()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        copy = kwargs.pop("copy", False)
        other = kwargs.pop("other", args[0] if args and isinstance(args[0], Tensor) else None)
        if other is not None:
            device, dtype = other.device, other.dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return torch.ops.aten._to_copy(self, device=device, dtype=dtype or self.dtype)
        if copy or (dtype is not None and dtype != self.dtype):
            return torch.ops.aten._to_copy(self, dtype=dtype or self.dtype)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """While this mode is on, there is a ``cuda:0``.

    Attributes:
        crossings: How often each kind of operation took numbers from the device to the CPU (which waits for a GPU).
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.crossings)


class _Numbered(TorchFunctionMode):
    """``"cuda"`` is ``"cuda:0"``: to find that out, torch would ask a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def numbered(x: Any) -> Any:
            return DEVICE if isinstance(x, str | torch.device) and str(x) == DEVICE.type else x

        if func in (torch.Tensor.device.__get__, torch.device):
            return func(*args, **(kwargs or {}))
        args = tuple(map(numbered, args)) if func in (Tensor.to, torch._C._nn._parse_to) else args
        return func(*args, **{k: numbered(v) if k == "device" else v for k, v in (kwargs or {}).items()})


@contextmanager
def pretended() -> Iterator[Pretended]:
    """A machine with a GPU, of which everything that headprune asks is answered."""
    with ExitStack() as stack:
        for name, answer in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "mem_get_info": lambda *_: (8 << 30, 16 << 30),
            "empty_cache": lambda: None,
            "synchronize": lambda *_: None,
            "get_device_name": lambda *_: "a pretended GPU",
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda *_: None,
            "manual_seed_all": lambda *_: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        # `module.to` would put the tensor into a parameter that stays a plain one.
        stack.callback(
            torch.__future__.set_swap_module_params_on_conversion,
            torch.__future__.get_swap_module_params_on_conversion(),
        )
        torch.__future__.set_swap_module_params_on_conversion(True)
        # `torch.tensor(…, device=…)` would write the numbers on the device itself.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        stack.enter_context(_Numbered())
        yield stack.enter_context(Pretended())


def _run(func: Any, args: Any, kwargs: Any, crossings: Counter[str] | None = None) -> Any:
    flat, spec = tree_flatten((args, kwargs))
    name = func.overloadpacket.__name__
    there = [x for x in flat if isinstance(x, There)]
    wanted = kwargs.get("device")
    target = torch.device(wanted).type if wanted is not None else None
    # In a backward pass torch's own code makes tensors where it thinks that the others are: on the CPU.
    if there and name not in _COPIES and torch._C._current_graph_task_id() == -1:
        _refuse_mixed(name, args, flat)
    goes = target == DEVICE.type or (bool(there) and target is None)
    if crossings is not None and there and (target == "cpu" or name in ("_local_scalar_dense", "item", "equal")):
        crossings[name] += 1
    plain = [x.held if isinstance(x, There) else x for x in flat]
    args, kwargs = tree_unflatten(plain, spec)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu") if target == DEVICE.type else wanted}
    if target == "cpu" and there and name == "_to_copy":
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    found = func(*args, **kwargs)
    if name == "copy_" and not isinstance(flat[0], There):
        return flat[0]
    if not goes:
        return found
    known = {id(x.held): x for x in there}  # what wrote in place gives back the tensor it was given
    return tree_map(lambda x: _there(x, known) if isinstance(x, Tensor) else x, found)


def _there(held: Tensor, known: dict[int, There]) -> There:
    made = known.get(id(held))
    return There(held) if made is None else made


def _refuse_mixed(name: str, args: Any, flat: list[Any]) -> None:
    """Fail as torch does, where an operation gets tensors of both devices."""
    index: set[int] = set()
    if name in _INDEXED and len(args) > 1:
        index = {id(x) for x in args[1] if isinstance(x, Tensor)}
    for x in flat:
        if isinstance(x, Tensor) and not isinstance(x, There) and x.ndim and id(x) not in index and x.device.type != "meta":
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and {x.device}! ({name})"
            )
