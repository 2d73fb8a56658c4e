"""One forward pass under PyTorch's profiler: in which module operations ran, for how long, and how long nothing ran."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from headprune.inputs import Example, call
from headprune.running import uncompiled, wrapped

_MARK = "headprune:"
_CPU = _autograd.DeviceType.CPU
_EMPTY = 64  # ranges without content, to find what a range costs


@dataclass
class Pass:
    """A profiled forward pass, in milliseconds by module: of its own time, not of the modules in it.

    Attributes:
        busy: Operations: on CUDA the kernels that they launched, else what the CPU took.
        idle: The time between operations, on the CPU, without what the ranges cost.
        started: When each module was first called, by the profiler's clock.
    """

    busy: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)


def profiled(model: nn.Module, example: Example, device: torch.device) -> Pass:
    """A forward pass, with a range around every module's call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of PyTorch note every profile on stderr
    cuda = device.type == "cuda"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA) if cuda else (ProfilerActivity.CPU,)
    _begun(activities)
    with profile(activities=activities) as found, torch.inference_mode(), uncompiled():
        call(model, example)  # what the start of a profile has driven out of the caches comes back
        with wrapped(dict(model.named_modules()), _ranged):
            call(model, example)
        for _ in range(_EMPTY):
            with record_function("empty"):
                pass
        if cuda:
            torch.cuda.synchronize(device)
    made = read(found.events(), on_device=cuda)
    del found
    gc.collect()  # its events refer to one another: some 100 MB a pass would wait for Python to look for such
    return made


@functools.cache
def _begun(activities: tuple[ProfilerActivity, ...]) -> None:
    """Make the first profile of a process, which takes longer."""
    with profile(activities=activities), record_function("empty"):
        pass


def read(events: Iterable[Any], *, on_device: bool) -> Pass:
    """What a profiler's events say (`torch.autograd.profiler_util.FunctionEvent`).

    An operation counts with all that it calls, for the module in whose range it is. On a device it takes what its kernels take.
    """
    made = Pass()
    events = [event for event in events if event.device_type == _CPU]  # others are kernels, or CUDA's copies of ranges
    starts = sorted(event.time_range.start for event in events if event.name == "empty")
    half = median([b - a for a, b in pairwise(starts)] or [0.0]) / 2  # of what a range costs: in it, and around it
    for event in events:
        parent, took = event.cpu_parent, event.time_range.elapsed_us()
        around = parent.name.removeprefix(_MARK) if parent is not None and parent.name.startswith(_MARK) else None
        if event.name.startswith(_MARK):
            name, start = event.name.removeprefix(_MARK), event.time_range.start
            made.started[name] = min(start, made.started.get(name, start))
            _add(made.idle, name, took - half)
            _add(made.busy, name, 0.0)
            took += half
        elif around is not None:
            _add(made.busy, around, event.device_time_total if on_device else took)
        if around is not None:
            _add(made.idle, around, -took)
    made.idle = {name: max(0.0, idle) for name, idle in made.idle.items()}
    return made


def _add(times: dict[str, float], name: str, microseconds: float) -> None:
    times[name] = times.get(name, 0.0) + microseconds / 1000


def _ranged(name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with record_function(f"{_MARK}{name}"):
        return method(*args, **kwargs)
