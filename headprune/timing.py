"""Break down the time of a forward pass by parts of the model, and bound the speed-up of a plan."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch._C import _autograd
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from headprune import latency
from headprune.arguments import Plan, heads_of, layers_for
from headprune.attention import AttentionLayer, Layers, check_heads, is_inside
from headprune.errors import HeadPruneError
from headprune.inputs import Example, call, model_device, move, without_labels
from headprune.pruned import convert
from headprune.running import evaluating, exact_attention, uncompiled, wrapped

MIN_PASSES, MAX_PASSES = 5, 15
_SLOW, _SLOW_PASSES = 500.0, 3  # of passes that take so many milliseconds, so few are enough: little disturbs them

PROJECTIONS, ATTENTION, FEED_FORWARD, ENDS, REST, LAUNCH = PARTS = (
    "attention projections", "attention itself", "feed-forward", "embeddings and head", "the rest", "launch overhead",
)  # fmt: skip
"""The parts of a forward pass. ``"the rest"`` is everything else: norms, sums, masks, layers without attention."""

Head = tuple[str, int]
"""(layer name, head number)."""


@dataclass(frozen=True)
class ModuleCost:
    """The time of one projection, or of one attention module without its projections.

    Attributes:
        time: Milliseconds of its operations.
        launch: Milliseconds of launch overhead.
        width: Number of features; for an attention module, of heads.
        users: The heads that use each feature; without features that belong to no single head.
        layers: The layers that it is part of.
    """

    time: float
    launch: float
    width: int
    users: tuple[frozenset[Head], ...]
    layers: frozenset[str]

    def saved(self, gone: frozenset[Head], empty: frozenset[str]) -> float:
        """Milliseconds saved without the heads ``gone``; ``empty``: the layers that lose all their heads."""
        if self.layers <= empty:
            return self.time + self.launch
        return self.time * sum(users <= gone for users in self.users) / self.width


@dataclass(frozen=True)
class Breakdown:
    """How the time of a forward pass on one input shape divides among the parts of the model.

    Attributes:
        batch, length: Batch size, and tokens per example; 0 tokens without ``input_ids``.
        total: Milliseconds.
        parts: Milliseconds of each part, which add up to ``total``: attention projections, attention itself (scores, softmax, values),
            feed-forward, embeddings and head, the rest (norms, sums, masks, layers without attention), and launch overhead. The last is the
            time in which no operation runs: on the CPU the time of Python and PyTorch between operations, on CUDA the device's idle time.
        costs: The `ModuleCost` of every projection and every attention module.
        layers: The model's attention layers.
        stand_ins: Whether plain operations replaced fused ones, which cannot be profiled inside (`torch.nn.MultiheadAttention`).
    """

    batch: int
    length: int
    total: float
    parts: dict[str, float]
    costs: tuple[ModuleCost, ...]
    layers: tuple[AttentionLayer, ...]
    stand_ins: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """Every part's share of the total."""
        return {name: time / self.total for name, time in self.parts.items()}

    def bound(self, plan: Plan) -> float:
        """The largest speed-up that a plan can give, as a factor (Amdahl's law).

        It assumes that the time of projections and of attention itself is proportional to the remaining features, and that
        nothing else gets faster, except that a layer without heads also saves its launch overhead.

        Raises:
            HeadPruneError: The plan is not for these layers.
        """
        drop = check_heads(heads_of(plan), self.layers)
        gone = frozenset((name, head) for name, heads in drop.items() for head in heads)
        empty = frozenset(a.name for a in self.layers if len(drop.get(a.name, ())) == a.num_heads)
        return self.total / (self.total - sum(cost.saved(gone, empty) for cost in self.costs))


def breakdown(
    model: nn.Module,
    example: Example,
    *,
    layers: Sequence[AttentionLayer] | None = None,
    min_seconds: float | None = None,
) -> Breakdown:
    """Break down the time of a forward pass: attention, feed-forward, embeddings and head, launch overhead.

    The total is the median time of unprofiled passes, divided in proportion to the parts of passes under PyTorch's profiler. The
    profiler costs less than a microsecond per operation, so the launch overhead of models that take only a few milliseconds is rough.

    Args:
        min_seconds: Minimum time of all passes together, with at most 15 profiled passes; by default 1 s.

    Raises:
        HeadPruneError: The model does not run on the example, has no attention that headprune can trace, or is neither on the CPU nor on
            CUDA.
    """
    device = model_device(model)
    if device.type not in ("cpu", "cuda"):
        message = f"What a forward pass spends its time on is not known on {device}."
        raise HeadPruneError(message, "Move the model to the CPU or a CUDA device.")
    layers = layers_for(model, layers, example)
    given = move(without_labels(model, example), device)
    half = (latency.MIN_SECONDS if min_seconds is None else min_seconds) / 2
    stand_ins = any(convert(m) is not None for m in model.modules())
    with evaluating(model), exact_attention(model):
        latency.check_runs(model, given)
        times = latency.in_turn({"": latency.timer(model, given)}, MIN_PASSES, half)
        wall = median(times[""])
        slow = wall > _SLOW
        passes: list[ProfiledPass] = []
        begin, least = monotonic(), min(MIN_PASSES, _SLOW_PASSES) if slow else MIN_PASSES
        while len(passes) < MAX_PASSES and (len(passes) < least or monotonic() - begin < half):
            passes.append(profiled(model, given, device, refill=not slow))
        return breakdown_of(model, layers, latency.example_shape(given), passes, wall, stand_ins)


def breakdown_of(
    model: nn.Module, layers: Layers, shape: tuple[int, int], passes: Sequence[ProfiledPass], wall: float,
    stand_ins: bool,
) -> Breakdown:  # fmt: skip
    """The `Breakdown`, from profiled passes and ``wall``, the milliseconds of a pass without the profiler."""
    # Medians by module: an occasional interruption, such as another process, affects only few modules of a pass.
    every = [p.busy for p in passes], [p.idle for p in passes]
    names = dict.fromkeys(name for p in passes for name in p.busy)  # some may run in some passes only
    busy, idle = ({name: median(times.get(name, 0.0) for times in each) for name in names} for each in every)
    if model_device(model).type == "cuda":  # the profiler slows launches, but not kernels
        waiting = max(0.0, wall - sum(busy.values()))  # 0 if kernels overlap
        scale = waiting / (sum(idle.values()) or 1.0)
        idle = {name: time * scale for name, time in idle.items()}
    scale = wall / (sum(busy.values()) + sum(idle.values()))

    places = ModulePlaces(model, layers, {n: start for p in reversed(passes) for n, start in p.started.items()})
    parts = dict.fromkeys(PARTS, 0.0)
    owned: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name in busy:
        (part, owner), time, launch = places.place(name), scale * busy[name], scale * idle[name]
        parts[part] += time
        parts[LAUNCH] += launch
        if owner is not None:
            owned[part, owner][0] += time
            owned[part, owner][1] += launch
    costs = tuple(_cost(model, layers, part, name, *took) for (part, name), took in owned.items())
    return Breakdown(*shape, wall, parts, costs, tuple(layers), stand_ins)


def _cost(model: nn.Module, layers: Layers, part: str, name: str, time: float, launch: float) -> ModuleCost:
    """The cost of one projection or attention module, with the heads that use it."""
    inside = [layer for layer in layers if layer.module == name]
    if part == ATTENTION:
        heads = [(layer.name, h) for layer in inside for h in range(layer.num_heads)]
        users = tuple(frozenset({head}) for head in heads)
        return ModuleCost(time, launch, len(heads), users, frozenset(layer.name for layer in inside))
    features: dict[int, set[Head]] = defaultdict(set)
    held = [(a, p) for a in layers for p in (*a.projections, a.output_projection) if p and p.module == name]
    for layer, place in held:
        for head, of_head in enumerate(place.features):
            for feature in of_head:
                features[feature].add((layer.name, head))
    is_output = any(place is layer.output_projection for layer, place in held)
    sizes = ("in_features", "in_channels", "nx") if is_output else ("out_features", "out_channels", "nf")
    known = (getattr(model.get_submodule(name), size, None) for size in sizes)
    width = next((n for n in known if isinstance(n, int)), 0) or len(features) or 1  # with features of no single head
    own = frozenset(layer.name for layer, _ in held) or frozenset(layer.name for layer in inside)
    return ModuleCost(time, launch, width, tuple(map(frozenset, features.values())), own)


# -- one pass under PyTorch's profiler -----------------------------------------------------------------

_MARK = "headprune:"
_CPU = _autograd.DeviceType.CPU
_EMPTY = 64  # empty ranges, to measure the cost of a range


@dataclass
class ProfiledPass:
    """A profiled forward pass, in milliseconds by module, without the time of its submodules.

    Attributes:
        busy: Time of operations: on CUDA of the kernels that they launch, otherwise on the CPU.
        idle: CPU time between operations, without the cost of the ranges.
        started: Time of each module's first call, on the profiler's clock.
    """

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started: dict[str, float] = field(default_factory=dict)


def profiled(model: nn.Module, example: Example, device: torch.device, *, refill: bool = True) -> ProfiledPass:
    """Profile a forward pass, with a profiler range around every module's call.

    Args:
        refill: Run the model once before, since the start of the profiler empties the caches.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of PyTorch log every profile on stderr
    cuda = device.type == "cuda"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA) if cuda else (ProfilerActivity.CPU,)
    with profile(activities=activities) as result, torch.inference_mode(), uncompiled():
        if refill:
            call(model, example)
        with wrapped(dict(model.named_modules()), _ranged):
            call(model, example)
        for _ in range(_EMPTY):
            with record_function("empty"):
                pass
        if cuda:
            torch.cuda.synchronize(device)
    times = read(events := result.events(), on_device=cuda)
    while events:  # cyclic references: some 100 MB per pass would wait for the garbage collector
        events.pop().__dict__.clear()
    result.action_map.clear()
    return times


def read(events: Iterable[Any], *, on_device: bool) -> ProfiledPass:
    """A `ProfiledPass` from a profiler's events (`torch.autograd.profiler_util.FunctionEvent`).

    An operation, with all that it calls, counts for the module in whose range it runs. On CUDA its time is that of its kernels.
    """
    times = ProfiledPass()
    events = [event for event in events if event.device_type == _CPU]  # others are kernels, or CUDA's copies of ranges
    starts = sorted(event.time_range.start for event in events if event.name == "empty")
    half = median([b - a for a, b in pairwise(starts)] or [0.0]) / 2  # a range's cost falls half inside it, half around
    for event in events:
        parent, took = event.cpu_parent, event.time_range.elapsed_us()
        around = parent.name.removeprefix(_MARK) if parent is not None and parent.name.startswith(_MARK) else None
        if event.name.startswith(_MARK):
            name, start = event.name.removeprefix(_MARK), event.time_range.start
            times.started[name] = min(start, times.started.get(name, start))
            times.idle[name] += (took - half) / 1000
            times.busy[name] += 0.0
            took += half
        elif around is not None:
            times.busy[around] += (event.device_time_total if on_device else took) / 1000
        if around is not None:
            times.idle[around] -= took / 1000
    times.idle = {name: max(0.0, idle) for name, idle in times.idle.items()}
    return times


def _ranged(name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with record_function(f"{_MARK}{name}"):
        return method(*args, **kwargs)


# -- the part that a module belongs to, from the traced layers and the module tree, not from names -----


class ModulePlaces:
    """Assigns every module of a model to a part (`PARTS`).

    A *weighted* module has a weight matrix and is no embedding. A layer's block is the smallest module that contains its attention
    and a weighted module outside the attention. Such weighted modules, and modules that contain only them, are feed-forward. A
    module outside all blocks, and not in a list of blocks, belongs to the embeddings or the head.

    Args:
        layers: From the trace.
        started: Time of each module's first call, in any unit; without modules that were not called. It shows which modules
            run after the output projection inside a module that does more than attention.
    """

    def __init__(self, model: nn.Module, layers: Layers, started: Mapping[str, float]) -> None:
        self._modules, self._started = dict(model.named_modules()), started
        self._attention = list(dict.fromkeys(layer.module for layer in layers))
        self._output = {a.module: out.module for a in layers if (out := a.output_projection) and not a.concatenates}
        # If the attention module itself holds a projection's weights, their times cannot be separated.
        self._projections = {part.module for a in layers for part in a.projections} | {*self._output.values()}
        self._projections -= set(self._attention)
        self._matrices = {n for n, m in self._modules.items() if any(p.ndim > 1 for p in m.parameters(recurse=False))}
        self._weighted = {n for n in self._matrices if not isinstance(self._modules[n], nn.Embedding)}
        outside = [n for n in self._weighted if _innermost(n, self._projections) is None and self._around(n) is None]
        self._feeding = {n for n in outside if n in started}
        self._blocks = {b for b in map(self._block, self._attention) if b is not None}
        if "" in self._blocks:  # the model is one block: its last module is the head, the first ones are embeddings
            first = min((started[n] for n in self._output.values() if n in started), default=0.0)
            late = sorted((n for n in self._feeding if started[n] > first), key=started.__getitem__)
            inner = {n for n in self._feeding if any(b and is_inside(n, b) for b in self._blocks)}
            self._feeding = inner | set(late[:-1])
        else:
            self._feeding = {n for n in self._feeding if _innermost(n, self._blocks) is not None}

    def place(self, name: str) -> tuple[str, str | None]:
        """(part, owner) of a module's own time, which excludes its submodules.

        The owner is the projection or attention module that the time counts for; None in the other parts.
        """
        if (projection := _innermost(name, self._projections)) is not None:
            return PROJECTIONS, projection
        if (attention := self._around(name)) is not None:
            if name != attention and name in self._weighted:
                return PROJECTIONS, attention  # belongs to no single head, such as an adapter
            return ATTENTION, attention
        own = list(self._modules[name].parameters(recurse=False))
        if self._only_with(self._feeding, name) and not (own and all(p.ndim < 2 for p in own)):
            return FEED_FORWARD, None
        block = _innermost(name, self._blocks)
        if block or self._listed(name) or self._holds_attention(name):
            return REST, None
        return ENDS if block is None or self._only_with(self._matrices, name) else REST, None

    def _around(self, name: str) -> str | None:
        """The attention module that contains a module; None if the module first runs after the output projection."""
        attention = _innermost(name, self._attention)
        if attention is None or name == attention:
            return attention
        behind = self._started.get(self._output.get(attention, ""))
        return attention if behind is None or self._started.get(name, 0.0) <= behind else None

    def _block(self, attention: str) -> str | None:
        """The block of an attention module; None if no module around it has feed-forward weights."""
        around = [*reversed(_path(attention)), ""]
        return next((b for b in around if any(is_inside(n, b) for n in self._feeding)), None)

    def _holds_attention(self, name: str) -> bool:
        return any(is_inside(a, name) for a in (*self._attention, *self._projections))

    def _only_with(self, some: set[str], name: str) -> bool:
        """Whether the outermost module without attention that contains ``name`` also contains one of ``some``."""
        top = next((n for n in _path(name) if not self._holds_attention(n)), None)
        return top is not None and any(is_inside(n, top) for n in some)

    def _listed(self, name: str) -> bool:
        """Whether a module is in, or inside an item of, a ModuleList that holds attention."""
        lists = (n for n in _path(name)[:-1] if isinstance(self._modules.get(n), nn.ModuleList))
        return any(map(self._holds_attention, lists))


def _path(name: str) -> list[str]:
    """A module's name and those of the modules around it, outermost first, without the model itself."""
    names = name.split(".") if name else []
    return [".".join(names[:n]) for n in range(1, len(names) + 1)]


def _innermost(name: str, among: Iterable[str]) -> str | None:
    """The innermost of ``among`` that is, or contains, the module ``name``; None if there is none."""
    return max((n for n in among if is_inside(name, n)), key=len, default=None)
