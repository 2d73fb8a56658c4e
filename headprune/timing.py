"""What a forward pass spends its time on, and what a plan can gain of it at most."""

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

PROJECTIONS, ATTENTION, FEED_FORWARD, ENDS, REST, LAUNCH = PARTS = (
    "attention projections", "attention itself", "feed-forward", "embeddings and head", "the rest", "launch overhead",
)  # fmt: skip
"""The parts of a forward pass. ``"the rest"`` is what stands between: norms, sums, masks, layers without attention."""

Head = tuple[str, int]
"""The name of its layer, and its number."""


@dataclass(frozen=True)
class ModuleCost:
    """What one projection, or one attention module without its projections, costs.

    Attributes:
        time: Milliseconds of its operations.
        launch: Milliseconds of launching them.
        width: Its features; of an attention module, its heads.
        users: Which heads use each feature; features of no single head are left out.
        layers: The layers that it is part of.
    """

    time: float
    launch: float
    width: int
    users: tuple[frozenset[Head], ...]
    layers: frozenset[str]

    def saved(self, gone: frozenset[Head], empty: frozenset[str]) -> float:
        """Milliseconds that are saved when some heads are gone, and with them all of some layers."""
        if self.layers <= empty:
            return self.time + self.launch
        return self.time * sum(users <= gone for users in self.users) / self.width


@dataclass(frozen=True)
class Breakdown:
    """What a forward pass on one input shape spends its time on.

    Attributes:
        batch, length: Examples, and tokens of each; 0 tokens if there are no ``input_ids``.
        total: Milliseconds.
        parts: Milliseconds of each part, which add up to ``total``: attention projections, attention itself (scores, softmax, values),
            feed-forward, embeddings and head, the rest (norms, sums, masks, layers without attention), and launch overhead. This is the time
            in which no operation runs: on the CPU what Python and PyTorch need between operations, on CUDA the device's idle time.
        costs: Of every projection and every attention module.
        layers: The model's attention layers.
        stand_ins: Whether plain operations took the place of fused ones, which cannot be looked into (`torch.nn.MultiheadAttention`).
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
        """How many times as fast the model can get by a plan at most (Amdahl's law).

        The removed heads' share of the projections and of attention itself is saved, and nothing else, as if the time were
        proportional to the features that are left. Of a layer without heads, the launch overhead is saved too.

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
    """What a forward pass spends its time on: attention, feed-forward, embeddings and head, launch overhead.

    The total is the median time of passes; its parts are in proportion to those of passes under PyTorch's profiler, which costs less
    than a microsecond an operation. So the launch overhead of models that take less than a few milliseconds is rough.

    Args:
        min_seconds: Time of all passes together, at least, but for at most 15 passes; by default 1 s.

    Raises:
        HeadPruneError: The model does not run on the example, has no attention that can be seen, or is on another device than the CPU
            or CUDA.
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
        passes: list[ProfiledPass] = []
        begin = monotonic()
        while len(passes) < MAX_PASSES and (len(passes) < MIN_PASSES or monotonic() - begin < half):
            passes.append(profiled(model, given, device))
        return breakdown_of(model, layers, latency.example_shape(given), passes, median(times[""]), stand_ins)


def breakdown_of(
    model: nn.Module, layers: Layers, shape: tuple[int, int], passes: Sequence[ProfiledPass], wall: float,
    stand_ins: bool,
) -> Breakdown:  # fmt: skip
    """The parts, from profiled passes and the milliseconds of a pass without the profiler."""
    # By module: what interrupts a pass now and then, such as another process, is in few modules' time.
    every = [p.busy for p in passes], [p.idle for p in passes]
    busy, idle = ({name: median(times[name] for times in each) for name in passes[0].busy} for each in every)
    if model_device(model).type == "cuda":  # kernels are not slowed by the profiler; what launches them is
        waiting = max(0.0, wall - sum(busy.values()))  # where kernels run at the same time, none
        scale = waiting / (sum(idle.values()) or 1.0)
        idle = {name: time * scale for name, time in idle.items()}
    scale = wall / (sum(busy.values()) + sum(idle.values()))

    places = ModulePlaces(model, layers, passes[0].started)
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
    width = next((n for n in known if isinstance(n, int)), 0) or len(features) or 1  # with the features of no head
    own = frozenset(layer.name for layer, _ in held) or frozenset(layer.name for layer in inside)
    return ModuleCost(time, launch, width, tuple(map(frozenset, features.values())), own)


# -- one pass under PyTorch's profiler -----------------------------------------------------------------

_MARK = "headprune:"
_CPU = _autograd.DeviceType.CPU
_EMPTY = 64  # ranges without content, which show what a range costs


@dataclass
class ProfiledPass:
    """A profiled forward pass, in milliseconds by module: of its own time, not of the modules in it.

    Attributes:
        busy: Operations: on CUDA the kernels that they launched, else what the CPU took.
        idle: The time between operations, on the CPU, without what the ranges cost.
        started: When each module was first called, by the profiler's clock.
    """

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    started: dict[str, float] = field(default_factory=dict)


def profiled(model: nn.Module, example: Example, device: torch.device) -> ProfiledPass:
    """A forward pass, with a range around every module's call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # some builds of PyTorch note every profile on stderr
    cuda = device.type == "cuda"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA) if cuda else (ProfilerActivity.CPU,)
    with profile(activities=activities) as result, torch.inference_mode(), uncompiled():
        call(model, example)  # what the start of a profile has driven out of the caches comes back
        with wrapped(dict(model.named_modules()), _ranged):
            call(model, example)
        for _ in range(_EMPTY):
            with record_function("empty"):
                pass
        if cuda:
            torch.cuda.synchronize(device)
    times = read(events := result.events(), on_device=cuda)
    while events:  # they refer to one another: some 100 MB a pass would wait for Python to look for such
        events.pop().__dict__.clear()
    result.action_map.clear()
    return times


def read(events: Iterable[Any], *, on_device: bool) -> ProfiledPass:
    """What a profiler's events say (`torch.autograd.profiler_util.FunctionEvent`).

    An operation counts with all that it calls, for the module in whose range it is. On a device it takes what its kernels take.
    """
    times = ProfiledPass()
    events = [event for event in events if event.device_type == _CPU]  # others are kernels, or CUDA's copies of ranges
    starts = sorted(event.time_range.start for event in events if event.name == "empty")
    half = median([b - a for a, b in pairwise(starts)] or [0.0]) / 2  # of what a range costs: in it, and around it
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


# -- which part a module is, from the traced layers and the modules' places, not from names ------------


class ModulePlaces:
    """The part of every module of a model.

    A module with a matrix of weights, but for an embedding, is *weighted*. A layer's block is the smallest module that holds its
    attention and a weighted module that is not of the attention: what is weighted there, and what is around that only, is
    feed-forward. What is outside of all blocks, and not in a list of them, is embeddings or the head.

    Args:
        layers: From the trace.
        started: When each module was first called, in any unit; modules that were not called are left out. It shows
            what comes behind an output projection in a module that does more than attention.
    """

    def __init__(self, model: nn.Module, layers: Layers, started: Mapping[str, float]) -> None:
        self._modules, self._started = dict(model.named_modules()), started
        self._attention = list(dict.fromkeys(layer.module for layer in layers))
        outputs = {a.module: a.output_projection.module for a in layers if a.output_projection and not a.concatenates}
        self._output = outputs
        # Where the attention module itself holds the weights of a projection, its time cannot be separated from attention's.
        self._projections = {part.module for a in layers for part in a.projections} | set(outputs.values())
        self._projections -= set(self._attention)
        self._matrices = {n for n, m in self._modules.items() if any(p.ndim > 1 for p in m.parameters(recurse=False))}
        self._weighted = {n for n in self._matrices if not isinstance(self._modules[n], nn.Embedding)}
        outside = [n for n in self._weighted if _innermost(n, self._projections) is None and self._around(n) is None]
        self._feeding = {n for n in outside if n in started}
        self._blocks = {b for b in map(self._block, self._attention) if b is not None}
        if "" in self._blocks:  # a model that is one block: what comes last is its head, what comes first its embedding
            first = min(started[n] for n in outputs.values() if n in started) if outputs else 0.0
            late = sorted((n for n in self._feeding if started[n] > first), key=started.__getitem__)
            inner = {n for n in self._feeding if any(b and is_inside(n, b) for b in self._blocks)}
            self._feeding = inner | set(late[:-1])
        else:
            self._feeding = {n for n in self._feeding if _innermost(n, self._blocks) is not None}

    def place(self, name: str) -> tuple[str, str | None]:
        """The part that a module's own time belongs to, what it spends outside of the modules in it; and of attention the owner.

        The owner is the projection or the attention module whose time it is; None in the other parts.
        """
        if (projection := _innermost(name, self._projections)) is not None:
            return PROJECTIONS, projection
        if (attention := self._around(name)) is not None:
            if name != attention and name in self._weighted:
                return PROJECTIONS, attention  # of no single head, such as an adapter's
            return ATTENTION, attention
        own = list(self._modules[name].parameters(recurse=False))
        if self._only_with(self._feeding, name) and not (own and all(p.ndim < 2 for p in own)):
            return FEED_FORWARD, None
        block = _innermost(name, self._blocks)
        if block or self._listed(name) or self._holds_attention(name):
            return REST, None
        return ENDS if block is None or self._only_with(self._matrices, name) else REST, None

    def _around(self, name: str) -> str | None:
        """The attention module whose attention a module is part of; None where it comes behind the output projection."""
        attention = _innermost(name, self._attention)
        if attention is None or name == attention:
            return attention
        behind = self._started.get(self._output.get(attention, ""))
        return attention if behind is None or self._started.get(name, 0.0) <= behind else None

    def _block(self, attention: str) -> str | None:
        """The block of an attention module; None if there is nothing but attention."""
        around = [*reversed(_path(attention)), ""]
        return next((b for b in around if any(is_inside(n, b) for n in self._feeding)), None)

    def _holds_attention(self, name: str) -> bool:
        return any(is_inside(a, name) for a in (*self._attention, *self._projections))

    def _only_with(self, some: set[str], name: str) -> bool:
        """Whether a module is in a part of the model that holds some of these, and no attention."""
        top = next((n for n in _path(name) if not self._holds_attention(n)), None)
        return top is not None and any(is_inside(n, top) for n in some)

    def _listed(self, name: str) -> bool:
        """Whether a module is an item of a list of blocks, or inside of one."""
        lists = (n for n in _path(name)[:-1] if isinstance(self._modules.get(n), nn.ModuleList))
        return any(map(self._holds_attention, lists))


def _path(name: str) -> list[str]:
    """A module and those that it is in, the outermost first, without the model itself."""
    names = name.split(".") if name else []
    return [".".join(names[:n]) for n in range(1, len(names) + 1)]


def _innermost(name: str, among: Iterable[str]) -> str | None:
    """The innermost of some modules that a module is, or is inside."""
    return max((n for n in among if is_inside(name, n)), key=len, default=None)
