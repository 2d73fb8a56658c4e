"""The module calls of one forward, in time: which are over before a layer's gate, and which of their outputs hold examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.attention import AttentionLayer
from headprune.inputs import tensors
from headprune.running import wrapped
from headprune.scoring.base import Problem
from headprune.scoring.kept import Output, tensors_in

Key = tuple[str, int]
"""A module, and the number of its call."""
Start = dict[Key, Output]
"""The calls that a replay does not run, and what their outputs look like."""


@dataclass
class Call:
    """One call of a module."""

    module: str
    number: int
    entered: int
    left: int
    output: Any
    versions: list[int]
    inside: list[Call]
    writes: bool = False  # into its arguments: a replay that skips it would differ


class Observed:
    """Every module call of one forward, as a tree in time."""

    def __init__(self) -> None:
        self.clock = 0
        self.roots: list[Call] = []
        self.gates: dict[str, int] = {}  # layer -> when its gate came first
        self.counts: dict[str, int] = {}
        self.open: list[Call] = []
        self.largest = 0  # bytes of the largest output

    def tick(self) -> int:
        self.clock += 1
        return self.clock


def observe(problem: Problem, batch: Any) -> Observed:
    """Watch one dense forward."""
    seen = Observed()
    places: dict[str, list[AttentionLayer]] = {}
    for layer in problem.layers:
        if layer.mask_point is not None:
            places.setdefault(layer.mask_point.module, []).append(layer)

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            number = seen.counts.get(name, 0)
            seen.counts[name] = number + 1
            call = Call(name, number, seen.tick(), 0, None, [], [])
            (seen.open[-1].inside if seen.open else seen.roots).append(call)
            for layer in places.get(name, ()):
                if not layer.concatenates:
                    seen.gates.setdefault(layer.name, seen.tick())
            seen.open.append(call)
            given = tensors((args, kwargs))
            before = [t._version for t in given]
            try:
                call.output = original(*args, **kwargs)
            finally:
                seen.open.pop()
            call.writes = before != [t._version for t in given]
            for layer in places.get(name, ()):
                if layer.concatenates:
                    seen.gates.setdefault(layer.name, seen.tick())
            call.left = seen.tick()
            found = tensors_in(call.output)
            call.versions = [t._version for t in found or ()]
            seen.largest = max(seen.largest, sum(t.numel() * t.element_size() for t in found or ()))
            return call.output

        return run

    with wrapped(dict(problem.model.named_modules()), around):
        problem.losses(batch)
    return seen


def starts_of(problem: Problem, two: Observed, three: Observed) -> dict[str, Start]:
    """For every layer, the outermost calls that had returned before its gate came."""
    other = {(c.module, c.number): c for c in all_calls(three.roots)}
    outputs: dict[Key, Output | None] = {}
    for call in all_calls(two.roots):
        twin = other.get((call.module, call.number))
        outputs[call.module, call.number] = _compared(call, twin) if twin is not None else None
    # If one output of a module cannot be kept, the module always runs: then the numbers of its calls stay right.
    opaque = {name for (name, _), output in outputs.items() if output is None}
    opaque |= {name for name, count in two.counts.items() if three.counts.get(name) != count}
    return {
        layer.name: dict(_finished(two.roots, two.gates[layer.name], outputs, opaque))
        for layer in problem.layers
        if layer.name in two.gates
    }


def _finished(
    calls: Sequence[Call], gate: int, outputs: Mapping[Key, Output | None], opaque: set[str]
) -> Iterator[tuple[Key, Output]]:
    for call in calls:
        if call.entered > gate:
            return
        key = (call.module, call.number)
        output = outputs[key]
        if call.left < gate and call.module not in opaque and output is not None:
            yield key, output
        else:
            yield from _finished(call.inside, gate, outputs, opaque)


def _compared(call: Call, twin: Call) -> Output | None:
    """How an output depends on the batch size, by calls with 2 and with 3 examples; None if it cannot be kept."""
    a, b = tensors_in(call.output), tensors_in(twin.output)
    if a is None or b is None or len(a) != len(b) or call.writes:
        return None
    dims: list[int | None] = []
    for x, y in zip(a, b, strict=True):
        differing = [d for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=False)) if m != n]
        if x.ndim != y.ndim or len(differing) > 1:
            return None
        if differing and 3 * x.shape[differing[0]] != 2 * y.shape[differing[0]]:
            return None
        dims.append(differing[0] if differing else None)
    changed = any(t._version != v for t, v in zip(a, call.versions, strict=True))
    own = sum(t.numel() * t.element_size() for t, d in zip(a, dims, strict=True) if d is not None)
    return Output(tuple(dims), changed, own // 2)


def all_calls(calls: Sequence[Call]) -> Iterator[Call]:
    """These calls and those inside them, in their order."""
    for call in calls:
        yield call
        yield from all_calls(call.inside)
