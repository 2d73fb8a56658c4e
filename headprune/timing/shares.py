"""What a forward pass spends its time on, and what a plan can gain of it at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

from torch import nn

from headprune import latency
from headprune.arguments import Plan, heads_of, layers_for
from headprune.attention import AttentionLayer, check_heads
from headprune.errors import HeadPruneError
from headprune.inputs import Example, model_device, move, without_labels
from headprune.pruned import convert
from headprune.running import evaluating, exact_attention
from headprune.timing.parts import ATTENTION, LAUNCH, PARTS, PROJECTIONS, Parts
from headprune.timing.profiling import Pass, profiled

MIN_PASSES, MAX_PASSES = 5, 15


@dataclass(frozen=True)
class Cost:
    """What one projection, or one attention module without its projections, costs.

    Attributes:
        time: Milliseconds of its operations.
        launch: Milliseconds of launching them.
        width: Its features; of an attention module, its heads.
        users: Which heads use each feature, as (name of the layer, head); features that are no head's alone are left out.
        layers: The layers that it is part of.
    """

    time: float
    launch: float
    width: int
    users: tuple[frozenset[tuple[str, int]], ...]
    layers: frozenset[str]

    def saved(self, gone: frozenset[tuple[str, int]], empty: frozenset[str]) -> float:
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
    costs: tuple[Cost, ...]
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
        raise HeadPruneError(
            f"What a forward pass spends its time on is not known on {device}.",
            "Move the model to the CPU or a CUDA device.",
        )
    layers = layers_for(model, layers, example)
    given = move(without_labels(model, example), device)
    least = latency.MIN_SECONDS if min_seconds is None else min_seconds
    stand_ins = any(convert(m) is not None for m in model.modules())
    with evaluating(model), exact_attention(model):
        latency.check_runs(model, given)
        times = latency.in_turn({"": latency.timer(model, given)}, MIN_PASSES, least / 2)
        passes: list[Pass] = []
        begin = monotonic()
        while len(passes) < MAX_PASSES and (len(passes) < MIN_PASSES or monotonic() - begin < least / 2):
            passes.append(profiled(model, given, device))
        return _broken_down(model, layers, latency.example_shape(given), passes, median(times[""]), stand_ins)


def _broken_down(
    model: nn.Module, layers: Sequence[AttentionLayer], shape: tuple[int, int], passes: Sequence[Pass], wall: float,
    stand_ins: bool,
) -> Breakdown:  # fmt: skip
    """The parts, from passes and the milliseconds of a pass without the profiler."""
    # By module: what interrupts a pass now and then, such as another process, is in few modules' time.
    busy, idle = (
        {name: median(getattr(p, what)[name] for p in passes) for name in passes[0].busy} for what in ("busy", "idle")
    )
    if model_device(model).type == "cuda":  # kernels are not slowed by the profiler; what launches them is
        waiting = max(0.0, wall - sum(busy.values()))  # where kernels run at the same time, none
        scale = waiting / (sum(idle.values()) or 1.0)
        idle = {name: time * scale for name, time in idle.items()}
    scale = wall / (sum(busy.values()) + sum(idle.values()))

    places = Parts(model, layers, passes[0].started)
    parts = dict.fromkeys(PARTS, 0.0)
    owned: dict[tuple[str, str], tuple[float, float]] = {}
    for name in busy:
        place = places.place(name)
        parts[place.part] += scale * busy[name]
        parts[LAUNCH] += scale * idle[name]
        if place.part in (PROJECTIONS, ATTENTION):
            time, launch = owned.get(place, (0.0, 0.0))
            owned[place] = time + scale * busy[name], launch + scale * idle[name]
    costs = tuple(_cost(model, layers, part, name, *took) for (part, name), took in owned.items())
    return Breakdown(*shape, wall, parts, costs, tuple(layers), stand_ins)


def _cost(model: nn.Module, layers: Sequence[AttentionLayer], part: str, name: str, time: float, launch: float) -> Cost:
    """The cost of one projection or attention module, with the heads that use it."""
    if part == ATTENTION:
        heads = [(a.name, h) for a in layers if a.module == name for h in range(a.num_heads)]
        return Cost(
            time, launch, len(heads), tuple(frozenset({head}) for head in heads), frozenset(a for a, _ in heads)
        )
    found: dict[int, set[tuple[str, int]]] = {}
    own, is_output = set(), False
    for layer in layers:
        for held in (*layer.projections, layer.output_projection):
            if held is not None and held.module == name:
                own.add(layer.name)
                is_output = is_output or held is layer.output_projection
                for head, features in enumerate(held.features):
                    for feature in features:
                        found.setdefault(feature, set()).add((layer.name, head))
    users = tuple(frozenset(heads) for heads in found.values())
    width = _width(model.get_submodule(name), is_output) or len(users) or 1
    return Cost(time, launch, width, users, frozenset(own) or frozenset(a.name for a in layers if a.module == name))


def _width(projection: nn.Module, is_output: bool) -> int:
    """The features of a linear module that heads may own; 0 where it does not say."""
    names = ("in_features", "in_channels", "nx") if is_output else ("out_features", "out_channels", "nf")
    return next((size for name in names if isinstance(size := getattr(projection, name, None), int)), 0)
