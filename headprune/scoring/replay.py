"""Losses under many gates at once; the forward pass is replayed only from the first gate on.

A gate in layer l changes nothing that is computed before it. So a dense pass keeps the outputs of modules, and a replay
reuses them: a module that returns before the first gate does not run again, but returns its kept output. All heads of a
layer start from the same state, so they run as one batch: row ``k * batch + i`` is example ``i`` under gate vector ``k``.

This works for any architecture: one run shows which modules return before a gate, and a second run with another batch size
shows the batch dimension of each output. Replays are checked: if a layer's replay does not give a plain forward pass's
losses on two examples, plain forward passes compute that layer, and `Replay.notes` says so. On the first batch, one gate
vector for each of several layers is computed both ways; on every later batch, one gate vector for one layer, in turn. If
they differ, `DisagreementError` makes `headprune.score` start again with plain forward passes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from headprune.batches import free_memory, halving
from headprune.gates import Fill, RowsError
from headprune.inputs import model_device, tensors
from headprune.parallel import current
from headprune.running import wrapped
from headprune.scoring.base import NotFiniteError, Problem
from headprune.scoring.gradient import gate_shapes

_TRIED_ROWS = 2  # examples on which every layer's replay is compared with a plain forward pass
_TRIED_LAYERS = 8  # layers compared on the first batch, evenly spread
# Rows times tokens beyond which a larger batch no longer fits a CPU's cache; on a GPU only memory limits it.
_CPU_TOKENS = 2048


Key = tuple[str, int]
"""(module name, how many calls of it came before)."""
Start = dict[Key, "KeptOutput"]
"""The calls that a replay skips, and the layout of their outputs."""


@dataclass
class Call:
    """One call of a module.

    Attributes:
        entered, left: Times of entry and return, on a clock that counts events of the forward pass.
        writes: Whether it modifies its arguments in place; a replay must not skip such a call.
    """

    module: str
    number: int
    entered: int
    left: int = 0
    output: Any = None
    writes: bool = False


@dataclass(frozen=True)
class KeptOutput:
    """The batch dimensions of one call's output.

    Attributes:
        dims: The batch dimension of every tensor; None if it has none.
        bytes_per_row: Size of the output for one example.
    """

    dims: tuple[int | None, ...]
    bytes_per_row: int


class DisagreementError(Exception):
    """A replay and a plain forward pass gave different losses on a batch of the data."""


class Replay:
    """The losses of a problem's batches under gates.

    Attributes:
        notes: For a report: which layers are computed by plain forward passes, and why.
        budget: Bytes that kept outputs and stacked batches may use.
        stacks: Whether several rows of gates can run as one batch.
        starts: For every layer that can be replayed, the calls to skip; in the order of the gates.
        counts: Number of calls of each module in a forward pass.
        bytes_per_row: Size of one example's part of the largest output.
        recordings: Number of batches recorded so far.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.notes: list[str] = []
        self.budget = problem.settings.max_memory or _free_memory(problem.model) // 2
        self.stacks = False
        self.starts: dict[str, Start] = {}
        self.counts: Mapping[str, int] = {}
        self.bytes_per_row = self.recordings = 0
        if problem.replays:
            self._study()
        else:
            self.notes += ["every head by a plain forward, since a replay did not give the same losses on some batch"]

    @property
    def about(self) -> list[str] | str:
        """Which layers were replayed, for a report."""
        return self.notes or "every layer"

    def of(self, batch: Any, size: int, fill: Mapping[str, Fill] | None = None) -> Recording:
        """Run the dense model on ``batch``, and keep the outputs that gates do not change.

        Args:
            batch: One of the problem's batches, or some of its rows.
            size: Number of examples in it.
            fill: Replacements for the heads' output, as in `gated`; their rows are (gates * examples).
        """
        names = list(self.starts)
        # The first batch compares several layers with a plain forward pass, each later batch one layer.
        many = names[:: max(1, len(names) // _TRIED_LAYERS)]
        doubtful = {names[self.recordings % len(names)]} if names and self.recordings else set(many)
        self.recordings += 1
        return Recording(self, batch, size, self.starts, doubtful, fill)

    @torch.no_grad()
    def _study(self) -> None:
        """Test which layers can be replayed; sets the attributes and notes."""
        batch, size = max(self.problem.batches, key=lambda pair: pair[1])
        rows, take = min(size, _TRIED_ROWS), self.problem.rows.take
        few = take(batch, range(rows))
        try:
            two, gates = observe(self.problem, take(few, [0, 1 % size]))
            three, _ = observe(self.problem, take(few, [0, 1 % size, 0]))
            if not self.problem.rows.lead(few, partial(gate_shapes, self.problem)):
                raise RowsError("Rows at the output projections are not the examples', one after another.")
            starts = {name: start for name, start in starts_of(gates, two, three).items() if start}
        except Exception as error:  # a model that takes only one batch size, for instance
            self.notes.append(f"every head by a plain forward ({type(error).__name__} while replaying was tried)")
            return
        self.stacks, self.counts = True, Counter(call.module for call in two)
        self.bytes_per_row = max(sum(t.nbytes for t in tensors_in(call.output) or ()) for call in two) // 2
        dense = Recording(self, few, rows, starts)
        for layer in sorted(self.problem.layers, key=lambda a: gates.get(a.name, 0)):
            candidates = (starts[layer.name], {}) if layer.name in starts else ({},)
            good = next((start for start in candidates if self._agrees(layer.name, start, dense)), None)
            if good is not None:
                self.starts[layer.name] = good
            if not good:
                how = "plain forwards" if good is None else "whole forwards of stacked heads"
                self.notes.append(f"{layer.name} by {how}: a replay from there did not give the same losses")

    def _agrees(self, name: str, start: Start, few: Recording) -> bool:
        """Whether a replay from ``start`` gives the losses of plain forward passes, for two of the layer's heads."""
        heads = next(layer.num_heads for layer in self.problem.layers if layer.name == name)
        gates = torch.ones(2, heads)
        gates[0, -1] = gates[1, heads // 2] = 0.0
        try:
            few.starts = {**few.starts, name: start}
            if start and name not in few.window:
                few.record(name)
            replayed = few.stacked({name: gates}, name)
            plain = torch.stack([few.plain({name: gate}) for gate in gates])
        except Exception:  # if the model is at fault, a plain forward pass fails later, with its error
            return False
        return _close(self.problem.model, replayed, plain, few.dense)


class Recording:
    """One batch's dense pass, with the module outputs that replays reuse.

    Args:
        replay: The `Replay` of the model.
        batch, size: The batch, and its number of examples.
        starts: As `Replay.starts`.
        doubtful: Layers whose first replay is compared with a plain forward pass.
        fill: As in `Replay.of`.

    Attributes:
        dense: The dense losses, ``[examples]``, float64.
        window: Layers that can be replayed from the outputs kept at present.
    """

    @torch.no_grad()
    def __init__(
        self, replay: Replay, batch: Any, size: int, starts: Mapping[str, Start], doubtful: Collection[str] = (),
        fill: Mapping[str, Fill] | None = None,
    ) -> None:  # fmt: skip
        self.replay, self.batch, self.size, self.starts, self.fill = replay, batch, size, starts, fill
        self.problem, self.doubtful = replay.problem, set(doubtful)
        self._kept: dict[tuple[str, int], Any] = {}
        self.window: set[str] = set()
        self._stacks = replay.stacks
        self.dense = self.record(next(iter(self.starts), ""))

    @torch.no_grad()
    def losses(self, gates: Tensor) -> Tensor:
        """The loss of every example under every row of ``gates`` ``[rows, heads]``: ``[rows, examples]``, float64."""
        by_layer = {k: g for k, g in self.problem.split(gates).items() if bool((g != 1).any())}
        if not by_layer:
            return self.dense.expand(len(gates), -1)
        if not self._stacks or any(name not in self.starts for name in by_layer):
            return torch.stack([self.plain({k: g[i] for k, g in by_layer.items()}) for i in range(len(gates))])
        first = next(name for name in self.starts if name in by_layer)
        if first not in self.window:
            self.record(first)
        stacks: list[Tensor] = []
        for part in halving(range(len(gates)), self._rows_at_once()):
            with part as index:
                try:
                    stacks.append(self.stacked({k: g[list(index)] for k, g in by_layer.items()}, first))
                except RowsError:  # this batch's rows do not split by example, unlike those of the tested batch
                    raise DisagreementError from None
        losses = torch.cat(stacks)
        if first in self.doubtful:
            self.doubtful.discard(first)
            row = self.replay.recordings % len(losses)
            plain = self.plain({k: g[row] for k, g in by_layer.items()})
            if not _close(self.problem.model, losses[row], plain, self.dense):
                raise DisagreementError
        return losses

    def _rows_at_once(self) -> int:
        """How many rows of gates to stack: as many as fit in memory and run faster together."""
        # Room for the largest output and its copies: logits are cast, and their log-softmax is taken.
        limit = self.replay.budget // max(1, 4 * self.replay.bytes_per_row * self.size)
        if model_device(self.problem.model).type == "cpu":
            limit = min(limit, _CPU_TOKENS // max(1, self.size * _tokens(self.batch)))
        return max(1, limit)

    def plain(self, gates: Mapping[str, Tensor]) -> Tensor:
        """Losses ``[examples]`` under gates ``{layer: [heads]}``, by a plain forward pass."""
        with self.problem.gated(gates, self.fill):
            return self.problem.losses(self.batch).cpu().double()

    def stacked(self, gates: Mapping[str, Tensor], first: str) -> Tensor:
        """Losses ``[rows, examples]`` under gates ``{layer: [rows, heads]}``, replayed from layer ``first`` on."""
        rows = len(next(iter(gates.values())))
        each = {k: g.repeat_interleave(self.size, 0) for k, g in gates.items()}
        batch = self.problem.rows.take(self.batch, list(range(self.size)) * rows)
        skipping = answering(self.problem.model, self.starts[first], self._kept, rows)
        try:
            with self.problem.gated(each, self.fill), skipping:
                return self.problem.losses(batch).cpu().double().view(rows, self.size)
        except NotFiniteError as error:  # its row is one of the stack, not of the batch
            raise NotFiniteError(self.problem, self.batch, error.row % self.size, error.value) from None

    def record(self, first: str) -> Tensor:
        """Run the dense pass and return its losses; keep the outputs for replays from ``first`` and, as memory allows, later layers."""
        self._kept.clear()
        self.window.clear()
        wanted: Start = {}
        for name in dropwhile(lambda name: name != first, self.starts):
            more = wanted | self.starts[name]
            if self.window and self.size * sum(o.bytes_per_row for o in more.values()) > self.replay.budget // 2:
                break
            wanted = more
            self.window.add(name)
        with keeping(self.problem.model, wanted, self._kept) as counts:
            dense = self.problem.losses(self.batch).cpu().double()
        # Do not stack if this batch takes another path through the model than the tested one.
        self._stacks &= all(number == self.replay.counts.get(name) for name, number in counts.items())
        return dense


def _free_memory(model: nn.Module) -> int:
    """Free memory for this rank, in bytes: ranks on one machine share its RAM, but each has its own GPU."""
    device, ranks = model_device(model), current()
    return ranks.first("memory", lambda: free_memory(device) // (1 if device.type == "cuda" else ranks.local_size))


def _close(model: nn.Module, replayed: Tensor, plain: Tensor, dense: Tensor) -> bool:
    """Whether losses are equal up to rounding, or up to a small part of the change that the gates cause in the dense losses."""
    # Even a small loss or divergence is a difference of logarithms about as large as logits.
    scale = plain.abs().max().clamp(min=0.1)
    limits = {torch.bfloat16: (4e-3, 2e-2), torch.float16: (5e-4, 3e-3)}
    rounding, most = max((limits.get(p.dtype, (5e-6, 1e-5)) for p in model.parameters()), default=(5e-6, 1e-5))
    changed = 0.1 * (plain - dense).abs().max()
    return bool((replayed - plain).abs().max() <= torch.maximum(rounding * scale, torch.minimum(most * scale, changed)))


def _tokens(batch: Any) -> int:
    """Tokens per example: exact for text, a guess for other inputs."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else 16


# -- the module calls of a forward pass, which a replay skips or runs -----------------------------------


def observe(problem: Problem, batch: Any) -> tuple[list[Call], dict[str, int]]:
    """The module calls of one dense forward pass, by time of entry, and the time at which each layer's gate is first reached."""
    clock, counts = count(1), Counter[str]()
    calls: list[Call] = []
    gates: dict[str, int] = {}

    def pass_gates(name: str, concatenates: bool) -> None:
        for layer in problem.layers:
            at = layer.mask_point
            if at is not None and at.module == name and layer.concatenates == concatenates:
                gates.setdefault(layer.name, next(clock))

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        call = Call(name, counts[name], next(clock))
        counts[name] += 1
        calls.append(call)
        pass_gates(name, concatenates=False)
        given = tensors((args, kwargs))
        before = [t._version for t in given]
        call.output = original(*args, **kwargs)
        call.writes = before != [t._version for t in given]
        pass_gates(name, concatenates=True)
        call.left = next(clock)
        return call.output

    with wrapped(dict(problem.model.named_modules()), around):
        problem.losses(batch)
    return calls, gates


def starts_of(gates: Mapping[str, int], two: Sequence[Call], three: Sequence[Call]) -> dict[str, Start]:
    """For every layer, the outermost skippable calls that return before its gate; ``two``, ``three``: the calls with 2 and 3 examples."""
    twins = {(call.module, call.number): call for call in three}
    outputs = {(c.module, c.number): _kept_output(c, twins.pop((c.module, c.number), None)) for c in two}
    # If one output of a module cannot be kept, all its calls run, so that call numbers stay right.
    running = {name for (name, _), output in outputs.items() if output is None} | {name for name, _ in twins}
    starts: dict[str, Start] = {}
    for layer, gate in gates.items():
        start, until = starts.setdefault(layer, {}), 0
        for call in two:
            output = outputs[call.module, call.number]
            if until < call.entered and call.left < gate and call.module not in running and output is not None:
                start[call.module, call.number] = output
                until = call.left  # skips the calls inside it
    return starts


def _kept_output(call: Call, twin: Call | None) -> KeptOutput | None:
    """An output's batch dimensions, from the same call with 2 and with 3 examples; None if it cannot be kept."""
    a, b = (tensors_in(each.output) if each else None for each in (call, twin))
    if a is None or b is None or len(a) != len(b) or call.writes:
        return None
    dims: list[int | None] = []
    for x, y in zip(a, b, strict=True):
        differing = [d for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=False)) if m != n]
        if x.ndim != y.ndim or len(differing) > 1 or any(3 * x.shape[d] != 2 * y.shape[d] for d in differing):
            return None
        dims.append(differing[0] if differing else None)
    own = sum(t.nbytes for t, d in zip(a, dims, strict=True) if d is not None)
    return KeptOutput(tuple(dims), own // 2)


@contextmanager
def keeping(model: nn.Module, wanted: Start, kept: dict[Key, Any]) -> Iterator[Counter[str]]:
    """Store the outputs of the wanted calls in ``kept``; yields a counter of calls per module."""
    counts: Counter[str] = Counter()

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        key = (name, counts[name])
        counts[name] += 1
        output = original(*args, **kwargs)
        if key in wanted:
            kept[key] = tree_map_only(Tensor, Tensor.clone, output)  # a copy: later modules may modify it in place
        return output

    with wrapped({name: model.get_submodule(name) for name, _ in wanted}, around):
        yield counts


@contextmanager
def answering(model: nn.Module, skipped: Start, kept: Mapping[Key, Any], rows: int) -> Iterator[None]:
    """Make the skipped calls return their kept outputs, repeated for every row of gates, instead of running."""

    left = {name: iter(sorted(key for key in skipped if key[0] == name)) for name, _ in skipped}

    def around(name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if (key := next(left[name], None)) is None:
            return original(*args, **kwargs)
        dims = iter(skipped[key].dims)

        def repeated(t: Tensor) -> Tensor:
            dim = next(dims)
            # Always a copy: the next module may modify it in place.
            return t.clone() if dim is None else torch.cat([t] * rows, dim)

        return tree_map_only(Tensor, repeated, kept[key])

    with wrapped({name: model.get_submodule(name) for name in left}, around):
        yield


def tensors_in(value: Any) -> list[Tensor] | None:
    """The tensors of an output; None if it holds anything but tensors and plain values, such as a cache."""
    leaves = tree_leaves(value)
    plain = all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] if plain else None
