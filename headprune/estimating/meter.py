"""What a piece of work takes: passes of a model, time, and memory, by the loops that it consists of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headprune.inputs import model_device, tensors
from headprune.ranks import Ranks, using
from headprune.rows import apparent_size

T = TypeVar("T")
CLOCK: Callable[[], float] = time.perf_counter
"""What time goes by; a benchmark on a busy machine takes `time.process_time`."""


@dataclass
class Spent:
    """What a loop took.

    Attributes:
        seconds: Of its tasks.
        tasks: How many.
        forward, backward: Examples that the model was run on.
    """

    seconds: float = 0.0
    tasks: int = 0
    forward: float = 0.0
    backward: float = 0.0


@dataclass
class Meter:
    """All that was seen.

    Attributes:
        forward, backward: Examples that the model was run on, and from which gradients went back.
        seconds: In all.
        loops: By name of `headprune.ranks.Ranks.share`.
        peak: Bytes held more than at the beginning, at most; 0 where the system does not say.
    """

    forward: float = 0.0
    backward: float = 0.0
    seconds: float = 0.0
    loops: dict[str, Spent] = field(default_factory=dict)
    peak: int = 0

    def loop(self, *names: str) -> Spent:
        """The sum of some loops."""
        found = [self.loops[name] for name in names if name in self.loops]
        return Spent(
            sum(s.seconds for s in found), sum(s.tasks for s in found), sum(s.forward for s in found),
            sum(s.backward for s in found),
        )  # fmt: skip

    def rest(self, *names: str) -> float:
        """Seconds outside of some loops."""
        return max(0.0, self.seconds - self.loop(*names).seconds)


class _Clocked(Ranks):
    """One process alone, which times its loops."""

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter, self._device = meter, device

    def share(
        self,
        name: str,
        tasks: Sequence[Callable[[], T]],
        costs: Sequence[float] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        meter, began = self._meter, clock(self._device)
        forward, backward = meter.forward, meter.backward
        try:
            return super().share(name, tasks, costs, progress)
        finally:
            spent = meter.loops.setdefault(name, Spent())
            spent.seconds += clock(self._device) - began
            spent.tasks += len(tasks)
            spent.forward += meter.forward - forward
            spent.backward += meter.backward - backward


def clock(device: torch.device) -> float:
    """Seconds, when all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return CLOCK()


@contextmanager
def metered(model: nn.Module) -> Iterator[Meter]:
    """Meter what is done with a model while the context lasts."""
    meter, device = Meter(), model_device(model)
    began, held = clock(device), _held(device)
    with counting(model, meter), using(_Clocked(meter, device)):
        yield meter
        meter.seconds = clock(device) - began
    meter.peak = max(0, _most(device) - held) if held else 0


@contextmanager
def counting(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Count the examples that a model is run on, and from which gradients go back."""

    def count(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        size = apparent_size((*args, kwargs) if args else kwargs)
        meter.forward += size
        answer = getattr(output, "logits", None)
        found = [answer] if isinstance(answer, Tensor) else [t for t in tensors(output) if t.requires_grad]
        if found and found[0].requires_grad:
            found[0].register_hook(lambda gradient: back(size))  # type: ignore[no-untyped-call]

    def back(size: int) -> None:
        meter.backward += size

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# -- memory ------------------------------------------------------------------------------------


def _held(device: torch.device) -> int:
    """Bytes that are held now; from here on `_most` counts. 0 where it is not known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    return resident() if clear_peak() else 0


def clear_peak() -> bool:
    """Let `peak` begin anew; False where the system does not say it, or does not allow that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def peak() -> int:
    """The most bytes of this process that were in memory."""
    return _status("VmHWM")


def _most(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak()


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    return _status("VmRSS")


def _status(name: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
