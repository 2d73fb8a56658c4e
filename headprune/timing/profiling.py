"""One forward pass under PyTorch's profiler: which operations ran in which module, and for how long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from headprune.inputs import Example, call
from headprune.modules import uncompiled, wrapped

_MARK = "headprune:"
_CPU = _autograd.DeviceType.CPU
_EMPTY = 64  # ranges without content, to find what a range costs


@dataclass
class Pass:
    """A profiled forward pass.

    Attributes:
        busy: Milliseconds of operations by the module in which they ran: of the device's kernels on CUDA, else of the CPU.
        launches: Operations by module.
        started: When each module was first called, in microseconds of the profiler's clock.
        wall: Milliseconds of the pass, without those that its ranges took; of no use on CUDA, where the profiler slows what
            launches the kernels.
    """

    busy: dict[str, float] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0


def profiled(model: nn.Module, example: Example, device: torch.device) -> Pass:
    """A forward pass, with a range around every module's call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of PyTorch note every profile on stderr
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # What a range costs is measured beside the pass: the ranges' own time is not the model's.
    with profile(activities=activities) as found, torch.inference_mode(), uncompiled():
        with wrapped(dict(model.named_modules()), _ranged):
            begin = time.perf_counter()
            call(model, example)
            wall = time.perf_counter() - begin
        if cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(_EMPTY):
            with record_function("empty"):
                pass
        range_cost = (time.perf_counter() - begin) / _EMPTY
    made, ranges = read(found.events(), on_device=cuda)
    made.wall = max((wall - ranges * range_cost) * 1000, sum(made.busy.values()))
    return made


def read(events: Iterable[Any], *, on_device: bool) -> tuple[Pass, int]:
    """What a profiler's events say, and how many ranges there are.

    An operation counts with all that it calls, for the module in whose range it is. What a device does for it is its kernels.
    """
    made, ranges = Pass(), 0
    for event in events:
        parent = event.cpu_parent
        if event.name.startswith(_MARK):
            if event.device_type == _CPU:  # CUDA has a copy of every range
                ranges += 1
                name, start = event.name.removeprefix(_MARK), event.time_range.start
                made.started[name] = min(start, made.started.get(name, start))
        elif event.device_type == _CPU and parent is not None and parent.name.startswith(_MARK):
            name = parent.name.removeprefix(_MARK)
            took = event.device_time_total if on_device else event.time_range.elapsed_us()
            made.busy[name] = made.busy.get(name, 0.0) + took / 1000
            made.launches[name] = made.launches.get(name, 0) + 1
    return made, ranges


def _ranged(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"{_MARK}{name}"):
            return method(*args, **kwargs)

    return within
