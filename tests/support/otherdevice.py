"""A device that is not there: its tensors lie in ordinary memory, but no operation takes them together with the CPU's.

Mixing devices is the mistake that only a GPU shows. Here ``cuda:0`` is pretended: every tensor made there holds a CPU tensor, whose
numbers are real, and answers ``.device`` with ``cuda:0``. An operation runs if all its tensors lie on one device; a CPU tensor without
dimensions may go with any, as on a GPU. Otherwise it fails with the message that torch gives.

Autograd and hooks work as ever; `torch.inference_mode` becomes ``torch.no_grad``. What there is none of: speed, memory, kernels and
their rounding, streams.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda:0")
_COPIES = ("_to_copy", "copy_", "_copy_from", "set_")  # these may have tensors of two devices
_INDEXED = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")  # indices may lie on the CPU
# These take no scalars of the CPU either.
_STRICT = ("cat", "stack", "index_select", "gather", "scatter", "index_copy", "index_copy_")


# What torch.cuda says.
_ANSWERS = {
    "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": "a pretended GPU",
    "mem_get_info": (8 << 30, 16 << 30), "memory_reserved": 2 << 30, "memory_allocated": 1 << 30, "max_memory_allocated": 1 << 30,
    **dict.fromkeys(["_lazy_init", "reset_peak_memory_stats", "empty_cache", "synchronize", "set_rng_state", "manual_seed_all"]),
}  # fmt: skip


class There(Tensor):
    """A tensor on the pretended device. To torch's own code, which would ask a device for its streams, it is one of the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda, is_cpu = True, False

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool | None = None) -> There:
        if requires_grad is not None:  # accelerate makes a parameter of the type that there was
            return _parameter(held, requires_grad)
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

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> There:
        if id(self) not in memo:
            with torch.no_grad():
                made = There(self.held.detach().clone())
            memo[id(self)] = made.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                made._is_param = True  # type: ignore[attr-defined]
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return There.cuda_of, (self.detach().cpu(),)

    @staticmethod
    def cuda_of(tensor: Tensor) -> Tensor:
        """What was stored, here again."""
        return tensor.to(DEVICE)

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
        if device is not None and device.type == "meta":
            return torch.empty(self.shape, dtype=dtype or self.dtype, device=device)
        if device is not None and device.type == "cpu":
            return torch.ops.aten._to_copy(self, device=device, dtype=dtype or self.dtype)
        if copy or (dtype is not None and dtype != self.dtype):
            return torch.ops.aten._to_copy(self, dtype=dtype or self.dtype)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _parameter(held: Tensor, requires_grad: bool) -> Any:
    if not isinstance(held, There):
        return torch.nn.Parameter(held, requires_grad)
    made = There(held.held.detach()).requires_grad_(requires_grad)
    made._is_param = True  # type: ignore[attr-defined]
    return made


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
        if func in (torch.Tensor.device.__get__, torch.device):
            return func(*args, **(kwargs or {}))
        if func in (Tensor.to, Tensor.type_as):  # torch's own code would see a CPU tensor in what is named
            like = next((x for x in (*args[1:], (kwargs or {}).get("other")) if isinstance(x, There)), None)
            if like is not None:
                return args[0].to(like.device, like.dtype)
        if func in (Tensor.to, torch._C._nn._parse_to):
            args = tuple(map(_first_gpu, args))
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": _first_gpu(kwargs["device"])}
        return func(*args, **(kwargs or {}))


def _first_gpu(place: Any) -> Any:
    return DEVICE if isinstance(place, str | torch.device) and str(place) == DEVICE.type else place


class _Event:
    """A CUDA event: of a clock, since nothing is asynchronous here."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1000


@contextmanager
def pretended() -> Iterator[Pretended]:
    """A machine with a GPU, of which everything that headprune asks is answered."""
    with ExitStack() as stack:
        # A tensor of this kind that is made in inference mode cannot be viewed there: no gradients is as much as can be had.
        stack.enter_context(
            mock.patch.object(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
        )
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        for name, call in {
            "Event": _Event,
            "device": lambda *_: nullcontext(),
            "get_rng_state": lambda *_: torch.get_rng_state(),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, call))
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
    there: list[There] = []
    here: list[Tensor] = []
    drawn = False
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, list | tuple) else (value,):
            if isinstance(x, There):
                there.append(x)
            elif isinstance(x, Tensor):
                here.append(x)
            elif isinstance(x, torch.Generator):
                drawn = True
    wanted = kwargs.get("device")
    target = torch.device(wanted).type if wanted is not None else None
    if not there and target != DEVICE.type:
        return func(
            *args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
        )  # there is nothing to pin it for
    name = func.overloadpacket.__name__
    if drawn and target in (None, DEVICE.type):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    backward = torch._C._current_graph_task_id() != -1
    # To another type, that is: torch's own code takes these for the CPU's.
    if backward and there and name == "_to_copy":
        wanted = target = None
        kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    # In a backward pass torch's own code makes tensors where it thinks that the others are: on the CPU.
    if there and here and name not in _COPIES and not backward:
        _refuse_mixed(name, args, here)
    if crossings is not None and there and (target == "cpu" or name in ("_local_scalar_dense", "item", "equal")):
        crossings[name] += 1
    held = {k: _held(v) for k, v in kwargs.items()}
    if wanted is not None:
        held["device"] = torch.device("cpu") if target == DEVICE.type else wanted
    if target == "cpu" and there and name == "_to_copy":
        del held["device"]
    found = func(*map(_held, args), **held)
    if name == "copy_" and not isinstance(args[0], There):
        return args[0]
    if target not in (None, DEVICE.type):
        return found
    return _on_device(found, {id(x.held): x for x in there})  # what wrote in place gives back the tensor it was given


def _held(value: Any) -> Any:
    """What to give to the operation of the CPU."""
    if isinstance(value, There):
        return value.held
    return type(value)(map(_held, value)) if isinstance(value, list | tuple) else value


def _on_device(found: Any, known: dict[int, There]) -> Any:
    """What the operation of the CPU gave, on the device."""
    if isinstance(found, Tensor):
        made = known.get(id(found))
        return There(found) if made is None else made
    return type(found)(_on_device(x, known) for x in found) if isinstance(found, list | tuple) else found


def _refuse_mixed(name: str, args: Any, here: list[Tensor]) -> None:
    """Fail as torch does, where an operation of the device gets these tensors of the CPU."""
    index: set[int] = set()
    if name in _INDEXED and len(args) > 1:
        index = {id(x) for x in args[1] if isinstance(x, Tensor)}
    for x in here:
        if id(x) not in index and x.device.type != "meta" and (x.ndim or name in _STRICT):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and {x.device}! ({name})"
            )
