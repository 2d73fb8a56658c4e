"""Further directions of the value projections' input, which heads could read instead of their old values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import is_inside
from headprune.batches import is_out_of_memory
from headprune.inputs import doubled, widened
from headprune.parallel import current
from headprune.repairing.examples import probe_of
from headprune.repairing.projections import FOLDS, OutputProjection, Values, at
from headprune.repairing.runner import Calls, OnCall, Runner, replaced
from headprune.running import recomputing

_RANKS = (3, 2, 1)  # numbers of further directions to try, in multiples of head_dim
_MOST = 2 << 30  # bytes of statistics: larger models get fewer directions
_MOST_AT_ONCE = 1 << 29  # bytes of widened inputs of a batch
_MOST_RECORDED = 1 << 29  # bytes of a batch's outputs of modules that do not run again


@dataclass(frozen=True)
class Directions:
    """Further directions of the values' input, from which new values may be made.

    Attributes:
        runner: The model.
        along: The directions ``[in, rank]``, by output projection.
        apart: Names of modules that need not run again to read them: while W_O's outputs are held, theirs stay the same.
        calls: Calls of output projections in a pass.
    """

    runner: Runner
    along: Mapping[str, Tensor]
    apart: Sequence[str] = ()
    calls: int = 0

    def rank(self, name: str) -> int:
        """How many directions there are for the values of an output projection."""
        return self.along[name].shape[1]

    @property
    def shares(self) -> int:
        """Number of passes that read all directions: each reads head_dim of them."""
        return max((-(-q.shape[1] // self.runner.values[name].head_dim) for name, q in self.along.items()), default=0)

    def more(self, projection: OutputProjection) -> int:
        """Number of features by which W_O's inputs are widened."""
        return 0 if projection.values is None else len(projection.values.owner) * self.rank(projection.name)

    def widened(
        self, batch: Any, xs: Calls, ys: Calls, names: Sequence[str], rest: Calls, shares: int | None = None
    ) -> Calls:
        """W_O's inputs ``xs``, widened by what every head attends to along the directions.

        The model runs with values replaced by their input's projections onto the directions: W_O's input is then what
        heads attend to along them. W_O's outputs are held at ``ys``, so later layers do not change.

        Args:
            names: The output projections.
            rest: What the modules `apart` gave (`recording`). Emptied if the model cannot run without them on this batch.
            shares: How many of the directions to read, in multiples of head_dim; all by default.
        """
        parts: dict[str, list[list[Tensor]]] = {n: [[] for _ in xs[n]] for n in names}
        every = self.runner.values
        chosen = [n for n in names if n in every]
        for share in range(shares if shares is not None else self.shares if chosen else 0):

            def on_value(name: str, x: Tensor, out: Tensor, share: int = share) -> Tensor | None:
                values = every[name]
                width = values.head_dim
                q = at(self.along[name], x.device, x.dtype)[:, share * width : (share + 1) * width]
                if name not in chosen or not q.shape[1]:
                    return None
                other = torch.nn.functional.pad(x @ q, (0, width - q.shape[1]))
                return replaced(values, out, other[..., None, :].expand(*other.shape[:-1], len(values.features), width))

            calls = self._run(batch, ys, on_value, rest)
            for name in chosen:
                values = every[name]
                width = min(values.head_dim, self.rank(name) - share * values.head_dim)
                for call_, x in zip(parts[name], calls[name], strict=True):
                    if width > 0:
                        call_.append(x[..., at(values.columns, x.device)][..., :width])

        def joined(x: Tensor, more: list[Tensor]) -> Tensor:
            return torch.cat([x, torch.cat(more, dim=-1).flatten(-2)], dim=-1) if more else x

        return {n: list(map(joined, xs[n], parts[n])) for n in names}

    def _run(self, batch: Any, ys: Calls, on_value: OnCall, rest: Calls) -> Calls:
        try:
            return self.runner.run_with_values(batch, ys, on_value, rest)[0]
        except Exception as error:
            if not rest or is_out_of_memory(error):
                raise
            rest.clear()
            return self.runner.run_with_values(batch, ys, on_value)[0]

    @contextmanager
    def recording(self, rest: Calls) -> Iterator[None]:
        """Record the outputs of the modules `apart` while the model runs once, as far as there is room.

        Behind the last W_O only their shapes are kept: nothing but the answers depends on them.
        """
        seen: dict[str, list[tuple[Tensor, int]]] = {}  # outputs, and how often they were written to
        left_out: set[str] = set()
        passed, room = 0, _MOST_RECORDED

        def see(name: str, module: nn.Module, args: Any, output: Any) -> None:
            nonlocal room
            if recomputing() or name in left_out:
                return
            if isinstance(output, Tensor) and not output.is_inference():
                last = passed == self.calls
                room -= 0 if last else output.nbytes
                kept = output.new_zeros(()).expand(output.shape) if last else output.detach()
                seen.setdefault(name, []).append((kept, kept._version))
            if not isinstance(output, Tensor) or output.is_inference() or room < 0:
                left_out.add(name)
                seen.pop(name, None)

        def count(name: str, module: nn.Module, args: Any, output: Any) -> None:
            nonlocal passed
            passed += not recomputing()

        model = self.runner.model
        with ExitStack() as stack:
            for names, hook in (([p.name for p in self.runner.projections], count), (self.apart, see)):
                for name in names if self.apart else ():
                    handle = model.get_submodule(name).register_forward_hook(partial(hook, name))
                    stack.callback(handle.remove)
            yield
        if passed == self.calls:
            written = {name for name, calls in seen.items() if any(t._version > before for t, before in calls)}
            rest |= {name: [t for t, _ in calls] for name, calls in seen.items() if name not in written}

    def in_parts(self, xs: Calls) -> Iterator[list[str]]:
        """Names of output projections in parts, so that a batch's widened inputs fit into memory."""
        part: list[str] = []
        size = 0
        for projection in self.runner.projections:
            wide = len(projection.weight) + self.more(projection)
            more = sum(x.numel() for x in xs[projection.name]) * 4 * wide // max(len(projection.weight), 1)
            if part and size + more > _MOST_AT_ONCE:
                yield part
                part, size = [], 0
            part, size = [*part, projection.name], size + more
        yield part


def find_directions(runner: Runner) -> Directions:
    """Find the best directions, as many as fit into memory, in one pass over the examples."""
    if not runner.values:
        return Directions(runner, {})
    seen: dict[str, Tensor] = {}

    def see(batch: Any) -> None:
        known: dict[Any, Tensor | None] = {}

        def on_value(name: str, x: Tensor, out: Tensor) -> None:
            kind = runner.layer(name).kind
            # A cross-attention's values are of the encoder's tokens.
            kind = "encoder" if kind == "cross" else kind
            key = kind, x.shape[:-1], x.device
            if key not in known:  # once for all layers with the same tokens, since it waits for the GPU
                real = runner.real(x, batch, kind)
                known[key] = None if real is None else real.nonzero().flatten()
            flat = widened(x.detach()).reshape(-1, x.shape[-1])
            flat = flat if known[key] is None else flat[known[key]]
            flat = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
            seen[name] = seen.get(name, 0.0) + doubled(flat.T @ flat)

        runner.run(batch, None, on_value)

    runner.share("directions", [partial(see, batch) for batch in runner.batches], runner.batches)
    for name, value in runner.values.items():  # a rank may have had no batch
        width = value.weight.shape[0] + 1
        empty = torch.zeros(width, width, dtype=torch.float64, device=value.weight.device)
        seen[name] = seen.get(name, empty).to(empty.device)
        current().add(f"directions of {name}", [seen[name]])
    runner.count(runner.examples)
    share, along = room(runner.projections), {}
    for projection in runner.projections:
        if own := projection.values:
            rank = min(share * own.head_dim, own.weight.shape[0])
            along[projection.name] = best_directions(projection, own, seen[projection.name], rank)
    return _sparing(Directions(runner, along))


def _sparing(directions: Directions) -> Directions:
    """The same directions, with the modules `Directions.apart`, unless a test on a few examples fails.

    The test reads the directions with these modules and without.
    """
    runner = directions.runner
    batch = few_of(runner)
    names, rest = [p.name for p in runner.projections], dict[str, list[Tensor]]()
    _, calls = runner.recorded(batch)
    sparing = replace(directions, apart=_apart(runner), calls=sum(map(len, calls.values())))
    try:
        seen = runner.slopes_of(
            batch, names, lambda out: [probe_of(runner.model, out, batch, 0, runner.rows)], sparing.recording(rest)
        )
        xs = {name: [x for x, _, _ in own] for name, own in seen.items()}
        ys = {name: [y for _, y, _ in own] for name, own in seen.items()}
        spared = sparing.widened(batch, xs, ys, names, rest)
        whole = sparing.widened(batch, xs, ys, names, {})
    except Exception as error:  # such as a model that collects what a module inside of one of these gives
        if is_out_of_memory(error):
            raise
        return directions
    equal = all(close(a, b) for name in names for a, b in zip(spared[name], whole[name], strict=True))
    return sparing if rest and equal else directions


def _apart(runner: Runner) -> Sequence[str]:
    """The other projections of refitted attention layers, and the largest modules with matrices outside of these layers."""
    layers = [layer for projection in runner.projections for layer in projection.layers]
    changing = {p.name for p in runner.projections} | {values.name for values in runner.values.values()}
    found = sorted({place.module for layer in layers for place in layer.projections} - changing)
    attention = changing | {layer.module for layer in layers}
    for name, module in runner.model.named_modules():
        around = any(is_inside(own, name) for own in attention)
        inside = any(is_inside(name, own) for own in (*attention, *found))
        if name and not (around or inside) and any(p.ndim > 1 for p in module.parameters()):
            found.append(name)
    return found


def room(projections: Sequence[OutputProjection]) -> int:
    """How many directions fit into memory, in multiples of head_dim."""
    for share in _RANKS:
        size = 0
        for projection in projections:
            own = projection.values
            more = 0 if own is None else len(own.owner) * share * own.head_dim
            size += FOLDS * 8 * (len(projection.weight) + more + 1) ** 2
        if size <= _MOST:
            return share
    return 0


def best_directions(projection: OutputProjection, values: Values, xx: Tensor, rank: int) -> Tensor:
    """Directions of the values' input that W_O uses most, ``[in, rank]``, scaled to the mean length of the old columns.

    They would be the best of rank ``rank`` if every token attended to itself alone: with S the input's covariance and
    ``L L^T = sum_h V_h O_h O_h^T V_h^T``, they are ``L w`` for the first eigenvectors w of ``L^T S L``.

    Args:
        xx: Sums over tokens of products of the input with an appended 1, ``[in + 1, in + 1]``.
    """
    mean = xx[-1, :-1] / xx[-1, -1]
    spread = xx[:-1, :-1] / xx[-1, -1] - torch.outer(mean, mean)
    weight, output = values.weight, projection.weight.to(values.weight.device)
    parts = []
    for h, own in enumerate(values.owner):
        out = output[values.columns[h]]
        sizes, axes = torch.linalg.eigh(out @ out.T)
        parts.append(weight[:, values.features[own]] @ (axes * sizes.clamp(min=0).sqrt()))
    left = torch.cat(parts, dim=1)
    # What is not finite has no eigenvectors; `_sum_moments` refuses it.
    sizes, turned = torch.linalg.eigh((left.T @ spread @ left).nan_to_num(0.0, 0.0, 0.0))
    rank = min(rank, int((sizes > 1e-12 * sizes[-1]).sum()))  # what is beyond is rounding
    directions = left @ turned.flip(1)[:, :rank]
    length = weight[:, values.features.flatten()].square().sum(0).mean().sqrt()
    scaled: Tensor = directions * (length / directions.norm(dim=0, keepdim=True).clamp(min=1e-30))
    # `Calibration.slopes` needs head_dim directions at least: zeros, if the input is narrower.
    return torch.nn.functional.pad(scaled, (0, max(0, values.head_dim - scaled.shape[1]))).cpu()


def inputs_of_heads(projection: OutputProjection, values: Values, heads: Sequence[int], rank: int) -> Tensor:
    """Indices of the heads' old values and further directions in W_O's widened inputs, ``[heads, head_dim + rank]``."""
    own = values.columns[list(heads)]
    start = len(projection.weight) + torch.tensor(heads, dtype=torch.long)[:, None] * rank
    return torch.cat([own, start + torch.arange(rank)], dim=1)


def few_of(runner: Runner) -> Any:
    """A batch of two examples, if there are as many in one."""
    batch = max(runner.batches, key=runner.rows.size)
    return runner.rows.take(batch, [0, 1]) if runner.rows.size(batch) > 2 else batch


def refittable_outputs(runner: Runner) -> set[str]:
    """The output projections that give ``x W + b``, tested on a few examples.

    A class of the user's own may scale that, or store W the other way round than `is_transposed` says.
    """
    linear = {p.name: p for p in runner.projections}

    def on_output(name: str, x: Tensor, y: Any) -> None:
        own, is_tensor = linear.get(name), isinstance(y, Tensor)
        if own and not (is_tensor and (not y.isfinite().all() or close(x @ own.weight.to(x) + own.bias.to(x), y))):
            del linear[name]  # what is not finite is told later

    with runner.deterministic_eval():
        runner.run(few_of(runner), on_output)
    return set(linear)


def refittable_values(runner: Runner) -> list[str]:
    """The output projections whose heads are linear in their values, and whose values nothing else reads.

    Tested by rotating and stretching every head's values (stretching shows a norm): W_O's input must change in the same
    way, and with W_O's outputs held fixed, the answers and the other layers' inputs must not change.
    """
    values, batch = runner.values, few_of(runner)
    generator = torch.Generator().manual_seed(0)
    turns = {
        name: torch.linalg.qr(torch.randn(v.head_dim, v.head_dim, generator=generator, dtype=torch.float64))[0]
        * torch.linspace(0.5, 1.5, v.head_dim, dtype=torch.float64)
        for name, v in values.items()
    }
    with runner.deterministic_eval():
        xs, ys = runner.recorded(batch)
        _, answers = runner.run_with_values(batch, ys, lambda name, x, out: None)

        def fit(names: Sequence[str]) -> bool:
            plain = True

            def on_value(name: str, x: Tensor, out: Tensor) -> Tensor | None:
                nonlocal plain
                v = values[name]
                given = x @ v.weight.to(x) + (0 if v.bias is None else v.bias.to(x))
                plain &= name not in names or close(out[..., v.features], given[..., v.features])
                turned = out[..., v.features.to(out.device)] @ turns[name].to(out)
                return replaced(v, out, turned) if name in names else None

            changed, now = runner.run_with_values(batch, ys, on_value)
            if not plain or not all(map(close, now, answers)):
                return False
            for name, calls in xs.items():
                for after, x in zip(changed[name], calls, strict=True):
                    expected = x.clone()
                    if name in names:
                        columns = values[name].columns
                        expected[..., columns] = x[..., columns] @ turns[name].to(x)
                    if not close(after, expected):
                        return False
                if name in names and not calls:
                    return False
            return True

        return list(values) if fit(list(values)) else [name for name in values if fit([name])]


def close(result: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal up to the rounding of their dtype."""
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(result, expected)
    most = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
    return bool((result - expected).abs().amax() <= most * expected.abs().amax())
