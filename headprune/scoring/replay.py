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
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.gates import Fill, RowsError, gated
from headprune.inputs import model_device
from headprune.memory import free_memory, halving
from headprune.parallel import current
from headprune.scoring import calls
from headprune.scoring.base import NotFiniteError, Problem
from headprune.scoring.calls import Call, Start
from headprune.scoring.gradient import gate_shapes

_TRIED_ROWS = 2  # examples on which every layer's replay is compared with a plain forward pass
_TRIED_LAYERS = 8  # layers compared on the first batch, evenly spread
# Rows times tokens beyond which a larger batch no longer fits a CPU's cache; on a GPU only memory limits it.
_CPU_TOKENS = 2048


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
        tokens: Modules that need to compute only one token (`calls.read_tokens`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.notes: list[str] = []
        self.budget = problem.settings.max_memory or _free_memory(problem.model) // 2
        self.stacks = False
        self.starts: dict[str, Start] = {}
        self.counts: Mapping[str, int] = {}
        self.bytes_per_row = self.recordings = 0
        self.tokens: dict[str, int] = {}
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
            two, gates = calls.observe(self.problem, take(few, [0, 1 % size]))
            three, _ = calls.observe(self.problem, take(few, [0, 1 % size, 0]))
            if not self.problem.rows.lead(few, partial(gate_shapes, self.problem)):
                raise RowsError("Rows at the output projections are not the examples', one after another.")
            starts = {name: start for name, start in calls.starts_of(gates, two, three).items() if start}
        except Exception as error:  # a model that takes only one batch size, for instance
            self.notes.append(f"every head by a plain forward ({type(error).__name__} while replaying was tried)")
            return
        self.stacks, self.counts = True, Counter(call.module for call in two)
        self.bytes_per_row = max(sum(t.nbytes for t in calls.tensors_in(call.output) or ()) for call in two) // 2
        dense = Recording(self, few, rows, starts)
        for layer in sorted(self.problem.layers, key=lambda a: gates.get(a.name, 0)):
            candidates = (starts[layer.name], {}) if layer.name in starts else ({},)
            good = next((start for start in candidates if self._agrees(layer.name, start, dense)), None)
            if good is not None:
                self.starts[layer.name] = good
            if not good:
                how = "plain forwards" if good is None else "whole forwards of stacked heads"
                self.notes.append(f"{layer.name} by {how}: a replay from there did not give the same losses")
        if self.starts:
            self.tokens = self._read_tokens(two, dense)

    def _read_tokens(self, two: Sequence[Call], few: Recording) -> dict[str, int]:
        """The modules of the last two blocks that need to compute only one token."""
        first = list(self.starts)[-2:][0]
        few.starts = self.starts
        few.record(first)
        running: list[Call] = []  # the calls that a replay runs, of modules that are called once
        until = 0
        for call in two:
            if call.entered < until:
                continue  # inside a call that is excluded
            if (call.module, call.number) in self.starts[first] or self.counts[call.module] > 1:
                until = call.left
            else:
                running.append(call)
        model, hooked = self.problem.model, [a.mask_point.module for a in self.problem.layers if a.mask_point]
        same = partial(_close, model)
        return calls.read_tokens(model, running, lambda: few.run({}, first, 1)[0], same, hooked)

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
        with gated(self.problem.model, self.problem.layers, gates, self.fill):
            return self.problem.losses(self.batch).cpu().double()

    def stacked(self, gates: Mapping[str, Tensor], first: str) -> Tensor:
        """Losses ``[rows, examples]`` under gates ``{layer: [rows, heads]}``, replayed from layer ``first`` on."""
        rows = len(next(iter(gates.values())))
        if self.replay.tokens:
            try:
                with calls.reading(self.problem.model, self.replay.tokens):
                    losses = self.run(gates, first, rows)
                if bool(losses.isfinite().all()):
                    return losses
            except NotFiniteError:  # from the model itself, or the loss does read another token
                pass
            self.replay.tokens = {}
        return self.run(gates, first, rows)

    def run(self, gates: Mapping[str, Tensor], first: str, rows: int) -> Tensor:
        """As `stacked`, without `calls.reading`: modules compute all tokens."""
        each = {k: g.repeat_interleave(self.size, 0) for k, g in gates.items()}
        batch = self.problem.rows.take(self.batch, list(range(self.size)) * rows)
        model, layers = self.problem.model, self.problem.layers
        try:
            with gated(model, layers, each, self.fill), calls.answering(model, self.starts[first], self._kept, rows):
                return self.problem.losses(batch).cpu().double().view(rows, self.size)
        except NotFiniteError as error:  # its row is one of the stack, not of the batch
            raise NotFiniteError(self.problem, self.batch, error.row % self.size, error.value) from None

    def record(self, first: str) -> Tensor:
        """Run the dense pass and return its losses; keep the outputs for replays from ``first`` and, as memory allows, later layers."""
        self._kept.clear()
        self.window.clear()
        wanted: Start = {}
        names, held = list(self.starts), 0
        for name in names[names.index(first) :] if first in names else []:
            new = {k: o for k, o in self.starts[name].items() if k not in wanted}
            held += sum(o.bytes_per_row for o in new.values()) * self.size
            if self.window and held > self.replay.budget // 2:
                break
            wanted.update(new)
            self.window.add(name)
        with calls.keeping(self.problem.model, wanted, self._kept) as counts:
            dense = self.problem.losses(self.batch).cpu().double()
        # Do not stack if this batch takes another path through the model than the tested one.
        self._stacks &= all(count == self.replay.counts.get(name) for name, count in counts.items())
        return dense


def _free_memory(model: nn.Module) -> int:
    """Free memory for this rank, in bytes: ranks on one machine share its RAM, but each has its own GPU."""
    device, ranks = model_device(model), current()
    return ranks.first("memory", lambda: free_memory(device) // (1 if device.type == "cuda" else ranks.local_size))


def _close(model: nn.Module, replayed: Tensor, plain: Tensor, dense: Tensor | None = None) -> bool:
    """Whether losses are equal up to rounding, or up to a small part of the change that the gates cause in the dense losses."""
    # Even a small loss or divergence is a difference of logarithms about as large as logits.
    scale = plain.abs().max().clamp(min=0.1)
    limits = {torch.bfloat16: (4e-3, 2e-2), torch.float16: (5e-4, 3e-3)}
    rounding, most = max((limits.get(p.dtype, (5e-6, 1e-5)) for p in model.parameters()), default=(5e-6, 1e-5))
    changed = 0.0 * scale if dense is None else 0.1 * (plain - dense).abs().max()
    return bool((replayed - plain).abs().max() <= torch.maximum(rounding * scale, torch.minimum(most * scale, changed)))


def _tokens(batch: Any) -> int:
    """Tokens per example: exact for text, a guess for other inputs."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else 16
