"""The second moments that repair is fitted from: of what goes through W_O, and of what its heads could hand on instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.inputs import model_device
from headprune.repairing.crossed import crossed
from headprune.repairing.linearity import linear
from headprune.repairing.places import OutputProjection, Values
from headprune.repairing.probe import widened
from headprune.repairing.runner import Calls, Runner, replaced
from headprune.repairing.solve import FOLDS, Moments, centred
from headprune.repairing.values import directions, inputs_of_heads
from headprune.scoring.base import Progress

_RANKS = (3, 2, 1)  # further directions that values may be made of, in widths of a head
_MOST = 2 << 30  # bytes of statistics; more directions are for models that are small enough
_MIXTURES, _MOST_EXAMPLES = 2, 4096  # of every example, where there are not many anyway
_MOST_AT_ONCE = 1 << 29  # bytes of widened inputs of a batch


class Statistics:
    """Sums over the tokens of the calibration examples, of the dense model's activations.

    Args:
        runner: The dense model.
        with_values: Whether values are to be refitted, where they can be.
        with_mixtures: Whether there are to be mixtures of the examples too (`Runner.mix`).
        notes: Gets what cannot be done, and why.
        progress: Called after every batch of a pass.
    """

    def __init__(
        self,
        runner: Runner,
        with_values: bool,
        with_mixtures: bool,
        notes: list[str],
        progress: Progress | None = None,
    ) -> None:
        self.runner, self.places = runner, runner.places
        self._with_values, self._with_mixtures = with_values, with_mixtures
        self._notes, self._progress = notes, progress

    @cached_property
    def values(self) -> dict[str, Values]:
        """The value projections that can be refitted, by output projection."""
        possible = {p.name: p.values for p in self.places if p.values and self._with_values}
        if not possible:
            return {}
        with torch.inference_mode(False), torch.no_grad():
            found = linear(self.runner, possible)
        for name in possible.keys() - found.keys():
            layer = self.runner.layer(name).name
            self._notes.append(f"{layer} keeps its old values: its heads are not linear in them alone.")
        if found and not self._share(found):
            self._notes.append("Value projections keep their old weights: their statistics would not fit into memory.")
            return {}
        return found

    @cached_property
    def directions(self) -> dict[str, Tensor]:
        """Of the values' input, those that values may be made of ``[in, rank]``, by output projection: as many as there is room for."""
        if not self.values:
            return {}
        seen: dict[str, Tensor] = {}
        with torch.inference_mode(False), torch.no_grad(), self.runner.deterministic_eval():
            for batch in self.runner.batches:

                def on_value(name: str, x: Tensor, out: Tensor, batch: Any = batch) -> None:
                    kind = self.runner.layer(name).kind
                    # A cross-attention's values are of the encoder's tokens.
                    real = self.runner.real(x, batch, "encoder" if kind == "cross" else kind)
                    flat = widened(x.detach()).reshape(-1, x.shape[-1])
                    flat = flat if real is None else flat[real]
                    flat = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
                    seen[name] = seen.get(name, 0.0) + (flat.T @ flat).cpu().double()

                self.runner.run(batch, lambda name, x, y: None, on_value, self.values)
        self.runner.passes += 1
        share, found = self._share(self.values), {}
        for place in self.places:
            if values := self.values.get(place.name):
                rank = min(share * values.head_dim, values.weight.shape[0])
                found[place.name] = directions(place, values, seen[place.name], rank)
        return found

    @cached_property
    def dense(self) -> dict[str, Moments]:
        """Of W_O's inputs, widened by what heads attend to along `directions`, and of its outputs."""
        if not self.runner.places:
            return {}
        with torch.inference_mode(False), torch.no_grad(), self.runner.deterministic_eval():
            if self._with_mixtures:
                self.runner.mix(self._times)
            found = self._moments(widened=True)
            batches = self.runner.everything
            for i, batch in enumerate(batches):
                xs, ys = self.runner.recorded_with_slopes(i)
                for names in self.at_once(xs):
                    wide = self.widened(batch, xs, ys, names)
                    self._add(found, i, {n: wide[n] for n in names}, ys)
                self._tell(i)
        self.runner.passes += self._shares() * sum(map(self.runner.rows.size, batches)) / self.runner.examples
        return self._finite(found)

    @property
    def cost(self) -> float:
        """Forward passes over the calibration examples that `dense` will take, about; a backward pass counts as two."""
        if "dense" in vars(self):
            return 0.0
        share = self._share(self.values) if self.values else 0
        shifts = range(1, self._times + 1) if self._with_mixtures else ()
        mixtures = [crossed(batch, shift, self.runner.rows) for batch in self.runner.batches for shift in shifts]
        times = sum(len(mixed[1]) for mixed in mixtures if mixed) / self.runner.examples
        return bool(share) + times + (3 + share) * (1 + times)

    @property
    def _times(self) -> int:
        """How many mixtures of every example are wanted."""
        return min(_MIXTURES, _MOST_EXAMPLES // self.runner.examples - 1)

    def behind(self, changed: Callable[[], AbstractContextManager[None]]) -> dict[str, Moments]:
        """Of W_O's inputs in a changed model, and of its outputs in the dense model.

        Args:
            changed: The model is changed while its context lasts.
        """
        with torch.inference_mode(False), torch.no_grad(), self.runner.deterministic_eval():
            found = self._moments(widened=False)
            for i, batch in enumerate(self.runner.batches):
                _, wanted = self.runner.recorded(batch)
                with changed():
                    xs, _ = self.runner.recorded(batch)
                self._add(found, i, xs, wanted)
                self._tell(i)
        self.runner.passes += 2
        return self._finite(found)

    def hessian(
        self, place: OutputProjection, heads: Sequence[int], kept: Tensor, mixes: Mapping[int, Tensor], ridge: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the ridge regression on the dense inputs that stay, widened by a head's width of directions.

        Args:
            heads: That stay.
            kept: The inputs that stay.
            mixes: What heads' values are made of now (`Weights.mixes`).

        Returns:
            The matrix ``[inputs, inputs]``, the mean that it was taken around ``[inputs]``, and which inputs they are.
        """
        moments = self.dense[place.name]
        if (values := self.values.get(place.name)) is None:
            (xx, xy), index = moments.rows_of(kept), kept
        else:
            rank = self.directions[place.name].shape[1]
            xx, xy = moments.rows_of(inputs_of_heads(place, values, heads, rank).flatten())
            index = inputs_of_heads(place, values, heads, values.head_dim).flatten()
            turn = _turn(values, heads, rank, mixes)
            xx, xy = turn.T @ xx.cpu() @ turn, turn.T @ xy.cpu()
        a, _, mean, _ = centred(xx.sum(0).cpu(), xy.sum(0).cpu(), place.has_bias)
        strength = ridge * float(a.diagonal().mean()) if len(a) else 0.0
        # Inputs that never change have nothing to be fitted to.
        matrix = a + max(strength, 1e-12) * torch.eye(len(a), dtype=a.dtype)
        return matrix, mean if place.has_bias else mean * 0, index

    # -- what heads attend to ----------------------------------------------------------------------

    def widened(self, batch: Any, xs: Calls, ys: Calls, names: Sequence[str], shares: int | None = None) -> Calls:
        """W_O's inputs ``xs`` with what every head attends to along the directions behind them.

        With the projections of the values' input to these in the place of values, W_O's input is that; its outputs stay
        ``ys``, so that what comes later does not notice.

        Args:
            names: For which output projections.
            shares: How many of the directions, in widths of a head; all, by default.
        """
        parts: dict[str, list[list[Tensor]]] = {n: [[] for _ in xs[n]] for n in names}
        chosen = [n for n in names if n in self.values]
        all_directions = self.directions  # found before the model is run here, since finding them runs it
        for share in range(shares if shares is not None else self._shares() if chosen else 0):

            def on_value(name: str, x: Tensor, out: Tensor, share: int = share) -> Tensor | None:
                values = self.values[name]
                width = values.head_dim
                q = all_directions[name][:, share * width : (share + 1) * width].to(x.device, x.dtype)
                if name not in chosen or not q.shape[1]:
                    return None
                other = torch.nn.functional.pad(x @ q, (0, width - q.shape[1]))
                return replaced(values, out, other[..., None, :].expand(*other.shape[:-1], len(values.features), width))

            found, _ = self.runner.run_with_values(batch, ys, on_value, self.values)
            for name in chosen:
                values = self.values[name]
                width = min(values.head_dim, self.directions[name].shape[1] - share * values.head_dim)
                for call_, x in zip(parts[name], found[name], strict=True):
                    if width > 0:
                        call_.append(x[..., values.columns.to(x.device)][..., :width])
        return {
            n: [
                torch.cat([x, torch.cat(more, dim=-1).flatten(-2)], dim=-1) if more else x
                for x, more in zip(xs[n], parts[n], strict=True)
            ]
            for n in names
        }

    def at_once(self, xs: Calls) -> Iterator[list[str]]:
        """Names in parts, so that a batch's widened inputs fit into memory."""
        part: list[str] = []
        size = 0
        for place in self.places:
            wide = len(place.weight) + self._more(place)
            more = sum(x.numel() for x in xs[place.name]) * 4 * wide // max(len(place.weight), 1)
            if part and size + more > _MOST_AT_ONCE:
                yield part
                part, size = [], 0
            part, size = [*part, place.name], size + more
        yield part

    def _more(self, place: OutputProjection) -> int:
        """By how many features W_O's inputs are widened."""
        values = self.values.get(place.name)
        return 0 if values is None else len(values.owner) * self.directions[place.name].shape[1]

    def _shares(self) -> int:
        """Passes that it takes to see all directions."""
        return max((-(-q.shape[1] // self.values[name].head_dim) for name, q in self.directions.items()), default=0)

    def _share(self, values: Mapping[str, Values]) -> int:
        """How many directions there is room for, in widths of a head."""
        for share in _RANKS:
            size = 0
            for place in self.places:
                own = values.get(place.name)
                more = 0 if own is None else len(own.owner) * share * own.head_dim
                size += FOLDS * 8 * (len(place.weight) + more + 1) ** 2
            if size <= _MOST:
                return share
        return 0

    # -- sums --------------------------------------------------------------------------------------

    def _moments(self, *, widened: bool) -> dict[str, Moments]:
        device = model_device(self.runner.model)
        return {
            p.name: Moments(len(p.weight) + (self._more(p) if widened else 0), p.weight.shape[1], device)
            for p in self.places
        }

    def _add(self, found: Mapping[str, Moments], index: int, xs: Calls, ys: Calls) -> None:
        """A batch's tokens without padding, by how much they matter; every other example to the other fold."""
        token_weights = self.runner.sensitivity(index) if xs else {}
        for name, calls in xs.items():
            for x, y, weight in zip(calls, ys[name], token_weights[name], strict=True):
                self._sum(found[name], x, y, weight, index, self.runner.layer(name))

    def _sum(
        self, moments: Moments, x: Tensor, y: Tensor, token_weights: Tensor, index: int, layer: AttentionLayer
    ) -> None:
        batch = self.runner.everything[index]
        real = self.runner.real(x, batch, layer.kind)
        rows, tokens, size = x.shape[0], x.shape[:-1], self.runner.rows.size(batch)
        if self.runner.examples == 1:  # its tokens take turns
            fold = torch.arange(tokens.numel(), device=x.device) % FOLDS
        else:
            # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
            example = self.runner.fold(index)[torch.arange(rows) * size // rows].to(x.device)
            fold = example.view(-1, *[1] * (len(tokens) - 1)).expand(tokens).flatten()
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for i in range(FOLDS):
            chosen = (fold == i) if real is None else (fold == i) & real
            if not bool(x[chosen].isfinite().all() & y[chosen].isfinite().all()):
                raise _not_finite(layer, "what goes through its output projection is")
            moments.add(i, x[chosen], y[chosen], token_weights.flatten()[chosen])

    def _finite(self, found: dict[str, Moments]) -> dict[str, Moments]:
        for place in self.places:
            moments = found[place.name]
            if not all(bool(m.isfinite().all()) for m in (moments.xx, moments.xy, moments.yy)):
                raise _not_finite(place.layers[0], "the slopes of the model's answers there are")
        return found

    def _tell(self, index: int) -> None:
        if self._progress:
            self._progress(index + 1, len(self.runner.everything), "")


def _turn(values: Values, heads: Sequence[int], rank: int, mixes: Mapping[int, Tensor]) -> Tensor:
    """From old values and all directions to the values that there are now and the first directions, with the 1 behind."""
    width = values.head_dim
    blocks = []
    for h in heads:
        block = torch.eye(width + rank, 2 * width, dtype=torch.float64)
        if h in mixes:
            block[:, :width] = mixes[h]
        blocks.append(block)
    found: Tensor = torch.block_diag(*blocks, torch.ones(1, 1, dtype=torch.float64))  # type: ignore[no-untyped-call]
    return found


def _not_finite(layer: AttentionLayer, what: str) -> HeadPruneError:
    return HeadPruneError(
        f"Layer {layer.name} cannot be repaired: {what} not finite.",
        "Leave out the example that does it, use --dtype float32, or do without repair.",
    )
