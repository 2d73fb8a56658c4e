"""The output projections of one model, and their fits for any choice of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.inputs import call, model_device, move, tensors, usable
from headprune.loss import batch_size, inputs_of, rows_of, singles
from headprune.modules import exact_attention, uncompiled
from headprune.repair.places import Place, Values, is_transposed, places_of
from headprune.repair.probe import across, mask_of, noise, real_tokens, widened
from headprune.repair.solve import FOLDS, Fit, Moments, centred, fit_output
from headprune.repair.values import directions, fit_values, inputs_of_heads, written
from headprune.repair.weights import Repair, Weights, add_biases, remove_biases
from headprune.scoring.gradient import frozen, unlike
from headprune.trace import evaluating

Progress = Callable[[int, int, str], None]
See = Callable[[str, Tensor, Tensor], Tensor | None]
Calls = dict[str, list[Tensor]]
"""A tensor for every call of an output projection, by its name."""

_RANKS = (3, 2, 1)  # further directions that values may be made of, in widths of a head
_MOST = 2 << 30  # bytes of statistics; more directions are for models that are small enough
_REMEMBERED = 8  # fits of one W_O: what a search, its trials and the pruning that follows come back to
_MOST_AT_ONCE = 1 << 29  # bytes of widened inputs of a batch


class Refit:
    """The output projections of one model, and their fits for any choice of heads.

    Args:
        model: The dense model.
        layers: Its attention layers.
        batches: Calibration examples.
        ridge: As for `repair`.
        values: Whether values are refitted too, where they can be.
        progress: Called after every batch of a pass.

    Attributes:
        notes: What cannot be refitted, and why.
        passes: Forward passes over the calibration examples, so far.
        added: Modules that get a bias.
        looks: Effects of the removal of heads from the dense model that were measured already (`headprune.planning.effects`).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        batches: Sequence[Any],
        *,
        ridge: float | None = None,
        values: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.layers, self.ridge, self.progress = model, layers, ridge, progress
        device = model_device(model)
        with torch.inference_mode(False):
            self.batches = [usable(move(batch, device)) for batch in batches if batch_size(batch)]
        if not self.batches:
            raise HeadPruneError("There are no examples to repair on.", "Check the dataset, its split and --limit.")
        self.examples = sum(map(batch_size, self.batches))
        self.notes: list[str] = []
        self.passes = 0
        with torch.inference_mode(False):
            self.places = list(places_of(model, layers, self.notes))
        self.added = [p.name for p in self.places if p.has_bias and not p.own_bias]
        if not self._independent():
            self.batches = [row for batch in self.batches for row in singles(batch)]
        self.looks: dict[tuple[tuple[str, tuple[int, ...]], ...], Tensor] = {}
        self._with_values = values and ridge != float("inf")
        self._values: dict[str, Values] | None = None
        self._directions: dict[str, Tensor] = {}  # [in, rank], by output projection
        self._dense: dict[str, Moments] | None = None
        self._sensitivities: dict[int, dict[str, list[Tensor]]] = {}
        self._fits: dict[str, dict[tuple[int, ...], Fit]] = {}

    def fitted(self, drop: Heads, sweeps: int = 0) -> Weights:
        """New weights for the kept heads.

        Args:
            drop: ``{layer_name: [head, ...]}``.
            sweeps: 0 fits to the dense model's activations: after one pass they serve any choice of heads. Each sweep
                then takes two passes, with the inputs that W_O gets behind repaired layers; values stay as they were.
        """
        if not any(drop.values()):
            return Weights()
        with torch.inference_mode(False), torch.no_grad():
            moments = self.dense_moments()
            if not sweeps:
                return self._gathered({p.name: self._fit(p, drop) for p in self._losing(moments, drop, dense=True)})
            weights = self._outputs(moments, drop, dense=True)
            for _ in range(sweeps):
                weights = self._outputs(self._moments_behind(weights), drop, dense=False)
        return weights

    def dense_moments(self) -> dict[str, Moments]:
        """Of the dense model's activations: W_O's inputs, widened by what heads attend to along `_directions`."""
        if self._dense is None:
            with torch.inference_mode(False), torch.no_grad():
                self._find_directions()
                self._dense = self._moments_dense()
        return self._dense

    @property
    def values(self) -> dict[str, Values]:
        """The value projections that are refitted too, by output projection."""
        if self._values is None:
            possible = {p.name: p.values for p in self.places if p.values and self._with_values}
            with torch.inference_mode(False), torch.no_grad():
                self._values = self._checked(possible) if possible else {}
        return self._values

    @contextmanager
    def applied(self, weights: Weights) -> Iterator[None]:
        """The model with other weights, while the context lasts."""
        own = {p.name: (p.weight, p.bias if p.own_bias else None) for p in self.places}
        own |= {v.name: (v.weight, v.bias) for v in self.values.values()}
        self.apply(weights)
        try:
            yield
        finally:
            self._write({name: own[name] for name in weights.of})

    def apply(self, weights: Weights) -> None:
        """Write weights into the model."""
        self._write(weights.of)

    def hessian(self, place: Place, drop: Heads, weights: Weights, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of the ridge regression on the inputs that stay, widened as `slopes` widens them.

        Returns:
            The matrix ``[inputs, inputs]``, the mean that it was taken around ``[inputs]``, and which inputs they are.
        """
        kept, moments = place.kept(drop), self.dense_moments()[place.name]
        if (values := self.values.get(place.name)) is None:
            (xx, xy), index = moments.rows_of(kept), kept
        else:
            heads, rank = self._kept(place, drop), self._directions[place.name].shape[1]
            xx, xy = moments.rows_of(inputs_of_heads(place, values, heads, rank).flatten())
            index = inputs_of_heads(place, values, heads, values.head_dim)
            turn = self._turn(values, heads, rank, weights.mixes.get(place.name, {}))
            xx, xy = turn.T @ xx.cpu() @ turn, turn.T @ xy.cpu()
            index = index.flatten()
        a, _, mean, _ = centred(xx.sum(0).cpu(), xy.sum(0).cpu(), place.has_bias)
        strength = ridge * float(a.diagonal().mean()) if len(a) else 0.0
        # Inputs that never change have nothing to be fitted to.
        matrix = a + max(strength, 1e-12) * torch.eye(len(a), dtype=a.dtype)
        return matrix, mean if place.has_bias else mean * 0, index

    def _turn(self, values: Values, heads: Sequence[int], rank: int, mixes: Mapping[int, Tensor]) -> Tensor:
        """From old values and all directions to the values that there are now and the first directions, with the 1 behind."""
        width = values.head_dim
        blocks = []
        for h in heads:
            block = torch.eye(width + rank, 2 * width, dtype=torch.float64)
            if h in mixes:
                block[:, :width] = mixes[h]
            blocks.append(block)
        return _block_diagonal([*blocks, torch.ones(1, 1, dtype=torch.float64)])

    def matters(self, place: Place) -> bool:
        """Whether the model's answers depend on a W_O at all, so that there is something to fit it to."""
        return bool(self.dense_moments()[place.name].xx[:, -1, -1].sum() > 0)

    def report(self, weights: Weights) -> Repair:
        """What was done."""
        biases = tuple(name for name in self.added if name in weights.of)
        return Repair(dict(weights.facts), self.examples, self.passes, biases, tuple(self.notes))

    # -- statistics --------------------------------------------------------------------------------

    def _find_directions(self) -> None:
        """Which directions of their input values may be made of; as many as there is room for."""
        share = next((share for share in _RANKS if self._size(share) <= _MOST), 0)
        if self.values and not share:
            self.notes.append("Value projections keep their old weights: their statistics would not fit into memory.")
            self._values = {}
        if not self.values:
            return
        seen: dict[str, Tensor] = {}
        with self.calm():
            for batch in self.batches:

                def hear(name: str, x: Tensor, out: Tensor, batch: Any = batch) -> None:
                    kind = self._layer(name).kind
                    kind = "encoder" if kind == "cross" else kind  # whose tokens its values are of
                    real = real_tokens(x, mask_of(self.model, batch, kind))
                    flat = widened(x.detach()).reshape(-1, x.shape[-1])
                    flat = flat if real is None else flat[real]
                    flat = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
                    seen[name] = seen.get(name, 0.0) + (flat.T @ flat).cpu().double()

                self._run(batch, lambda name, x, y: None, hear)
        self.passes += 1
        for place in self.places:
            if values := self.values.get(place.name):
                rank = min(share * values.head_dim, values.weight.shape[0])
                self._directions[place.name] = directions(place, values, seen[place.name], rank)

    def _size(self, share: int) -> int:
        """Bytes of statistics with so many directions, in widths of a head."""
        total = 0
        for place in self.places:
            values = self.values.get(place.name)
            more = 0 if values is None else len(values.owner) * share * values.head_dim
            total += FOLDS * 8 * (len(place.weight) + more + 1) ** 2
        return total

    def _moments_dense(self) -> dict[str, Moments]:
        """Of W_O's inputs, widened, and its outputs."""
        device = model_device(self.model)
        found = {p.name: Moments(len(p.weight) + self._more(p), p.weight.shape[1], device) for p in self.places}
        with self.calm():
            for i, batch in enumerate(self.batches):
                xs, ys = self._recorded(batch)
                for names in self._at_once(xs):
                    wide = self._widened(batch, xs, ys, names)
                    for name in names:
                        for x, y, told in zip(wide[name], ys[name], self._sensitivity(i)[name], strict=True):
                            self._sum(found[name], x, y, told, i, name)
                if self.progress:
                    self.progress(i + 1, len(self.batches), "")
        self.passes += 1 + self._shares()
        return self._finite(found)

    def _moments_behind(self, weights: Weights) -> dict[str, Moments]:
        """Of W_O's inputs in the model with ``weights`` and its outputs in the dense model."""
        device = model_device(self.model)
        found = {p.name: Moments(p.weight.shape[0], p.weight.shape[1], device) for p in self.places}
        with self.calm():
            for i, batch in enumerate(self.batches):
                _, wanted = self._recorded(batch)
                with self.applied(weights):
                    xs, _ = self._recorded(batch)
                for name, calls in xs.items():
                    for x, y, told in zip(calls, wanted[name], self._sensitivity(i)[name], strict=True):
                        self._sum(found[name], x, y, told, i, name)
                if self.progress:
                    self.progress(i + 1, len(self.batches), "")
        self.passes += 2
        return self._finite(found)

    def _finite(self, found: dict[str, Moments]) -> dict[str, Moments]:
        for place in self.places:
            moments = found[place.name]
            if not all(bool(m.isfinite().all()) for m in (moments.xx, moments.xy, moments.yy)):
                raise _not_finite(place.layers[0], "the slopes of the model's answers there are")
        return found

    def _recorded(self, batch: Any) -> tuple[Calls, Calls]:
        """W_O's inputs and outputs on a batch, for every call."""
        xs: Calls = {p.name: [] for p in self.places}
        ys: Calls = {p.name: [] for p in self.places}

        def see(name: str, x: Tensor, y: Tensor) -> None:
            xs[name].append(x)
            ys[name].append(y.clone())  # a model may write into it

        self._run(batch, see)
        return xs, ys

    # -- what heads attend to ----------------------------------------------------------------------

    def _more(self, place: Place) -> int:
        """By how many features W_O's inputs are widened."""
        values = self.values.get(place.name)
        return 0 if values is None else len(values.owner) * self._directions[place.name].shape[1]

    def _shares(self) -> int:
        """Passes that it takes to see all directions."""
        return max((-(-q.shape[1] // self.values[name].head_dim) for name, q in self._directions.items()), default=0)

    def _at_once(self, xs: Calls) -> Iterator[list[str]]:
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

    def _widened(self, batch: Any, xs: Calls, ys: Calls, names: Sequence[str], shares: int | None = None) -> Calls:
        """W_O's inputs ``xs`` with what every head attends to along the directions behind them.

        With the projections of the values' input to these in the place of values, W_O's input is that; its outputs stay
        ``ys``, so that what comes later does not notice.

        Args:
            names: For which output projections.
            shares: How many of the directions, in widths of a head; all, by default.
        """
        parts: dict[str, list[list[Tensor]]] = {n: [[] for _ in xs[n]] for n in names}
        chosen = [n for n in names if n in self.values]
        for share in range(shares if shares is not None else self._shares() if chosen else 0):

            def fed(name: str, x: Tensor, out: Tensor, share: int = share) -> Tensor | None:
                values = self.values[name]
                width = values.head_dim
                q = self._directions[name][:, share * width : (share + 1) * width].to(x.device, x.dtype)
                if name not in chosen or not q.shape[1]:
                    return None
                other = torch.nn.functional.pad(x @ q, (0, width - q.shape[1]))
                return _replaced(
                    values, out, other[..., None, :].expand(*other.shape[:-1], len(values.features), width)
                )

            found, _ = self._fed(batch, ys, fed)
            for name in chosen:
                values = self.values[name]
                width = min(values.head_dim, self._directions[name].shape[1] - share * values.head_dim)
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

    def _fed(self, batch: Any, ys: Calls, hear: See) -> tuple[Calls, list[Tensor]]:
        """W_O's inputs where value projections give what ``hear`` says and W_O what it gave before; and the answers."""
        found: Calls = {name: [] for name in ys}
        before = {name: iter(calls) for name, calls in ys.items()}

        def see(name: str, x: Tensor, y: Tensor) -> Tensor:
            found[name].append(x)
            return next(before[name]).clone()

        output = self._run(batch, see, hear)
        return found, tensors(output)

    def _checked(self, values: dict[str, Values]) -> dict[str, Values]:
        """Those whose heads are linear in their values, and whose values nothing else looks at.

        Tried with every head's values turned and stretched, so that a norm would notice: W_O's input must be so alike, and
        the answers and other layers' inputs stay as they were where W_O gives what it gave.
        """
        batch = max(self.batches, key=batch_size)
        if batch_size(batch) > 2:
            batch = rows_of(batch, unlike(batch, 2))
        generator = torch.Generator().manual_seed(0)
        turns = {
            name: torch.linalg.qr(torch.randn(v.head_dim, v.head_dim, generator=generator, dtype=torch.float64))[0]
            * torch.linspace(0.5, 1.5, v.head_dim, dtype=torch.float64)
            for name, v in values.items()
        }
        with self._listening(values), self.calm():
            xs, ys = self._recorded(batch)
            _, answers = self._fed(batch, ys, lambda name, x, out: None)

            def fit(names: Sequence[str]) -> bool:
                plain = True

                def fed(name: str, x: Tensor, out: Tensor) -> Tensor | None:
                    nonlocal plain
                    v = values[name]
                    given = x @ v.weight.to(x) + (0 if v.bias is None else v.bias.to(x))
                    plain &= name not in names or _close(out[..., v.features], given[..., v.features])
                    turned = out[..., v.features.to(out.device)] @ turns[name].to(out)
                    return _replaced(v, out, turned) if name in names else None

                found, now = self._fed(batch, ys, fed)
                if not plain or not all(map(_close, now, answers)):
                    return False
                for name, calls in xs.items():
                    for after, x in zip(found[name], calls, strict=True):
                        expected = x.clone()
                        if name in names:
                            columns = values[name].columns
                            expected[..., columns] = x[..., columns] @ turns[name].to(x)
                        if not _close(after, expected):
                            return False
                    if name in names and not calls:
                        return False
                return True

            good = list(values) if fit(list(values)) else [name for name in values if fit([name])]
        for name in values.keys() - set(good):
            self.notes.append(f"{self._layer(name).name} keeps its old values: its heads are not linear in them alone.")
        return {name: values[name] for name in values if name in good}

    @contextmanager
    def _listening(self, values: dict[str, Values]) -> Iterator[None]:
        """While it is not known yet which of ``values`` can be refitted."""
        self._values = values
        try:
            yield
        finally:
            self._values = None

    def slopes(self, index: int, *, wide: bool = False) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """W_O's inputs and the slopes at its outputs, by module, for every call, on a batch.

        Slopes are of a random projection of the model's answers as it is now (`probe`).

        Args:
            wide: Behind the inputs, also what every head attends to along the first directions, a head's width of them.
        """
        batch = self.batches[index]
        found = self._slopes(batch, self._first(index))
        if wide and self.values:
            self.dense_moments()
            xs = {name: [x for x, _, _ in calls] for name, calls in found.items()}
            ys = {name: [y for _, y, _ in calls] for name, calls in found.items()}
            with torch.no_grad(), self.calm():
                xs = self._widened(batch, xs, ys, list(xs), shares=1)
            found = {
                name: [(x, y, slope) for x, (_, y, slope) in zip(xs[name], calls, strict=True)]
                for name, calls in found.items()
            }
        if index == len(self.batches) - 1:
            self.passes += 4 if wide and self.values else 3  # a backward pass costs about two
        return {name: [(x, slope) for x, _, slope in calls] for name, calls in found.items()}

    def probe(self, output: Any, index: int) -> Tensor:
        """A number whose gradient, squared, is on average the Fisher information of the answers to a batch."""
        return self._probe(output, self.batches[index], self._first(index))

    def _slopes(self, batch: Any, first: int, alone: bool = False) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
        """Inputs, outputs and slopes at these."""
        seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {p.name: [] for p in self.places}

        def add(name: str, x: Tensor, y: Tensor) -> Tensor:
            seen[name].append((x.detach(), y.detach(), torch.zeros_like(y, requires_grad=True)))
            return y + seen[name][-1][2]

        with torch.inference_mode(False), torch.enable_grad(), self.calm(), frozen(self.model):
            probe = self._probe(self._run(batch, add), batch, first, alone)
            flat = [delta for calls in seen.values() for *_, delta in calls]
            slopes = iter(torch.autograd.grad(probe, flat, allow_unused=True))
        return {
            name: [(x, y, delta if (slope := next(slopes)) is None else slope) for x, y, delta in calls]
            for name, calls in seen.items()
        }

    def _sensitivity(self, index: int) -> dict[str, list[Tensor]]:
        """How much each token of W_O's output matters for the dense model's answer: ``[rows, ...]`` by module and call.

        The norm of its slope, which is the square root of the Fisher information in expectation. The square would leave
        but a few tokens of a few examples to fit to.
        """
        if index not in self._sensitivities:
            found = self._slopes(self.batches[index], self._first(index))
            self._sensitivities[index] = {
                name: [widened(slope).norm(dim=-1) for *_, slope in calls] for name, calls in found.items()
            }
            self.passes += 3 if index == len(self.batches) - 1 else 0
        return self._sensitivities[index]

    @contextmanager
    def calm(self) -> Iterator[None]:
        """The model as it answers alike every time, with its heads apart."""
        with uncompiled(), evaluating(self.model), exact_attention(self.model):
            yield

    def _first(self, index: int) -> int:
        """The number of a batch's first example."""
        return sum(map(batch_size, self.batches[:index]))

    def _independent(self) -> bool:
        """Whether rows of one example stay together at every W_O, tried on up to three.

        A module that puts tokens before the batch would mix them up.
        """
        batch = max(self.batches, key=batch_size)
        if batch_size(batch) == 1 or not self.places:
            return True
        some = rows_of(batch, unlike(batch, batch_size(batch)))
        found = [slope for calls in self._slopes(some, 0, alone=True).values() for *_, slope in calls]
        return not any(bool(slope[-(-len(slope) // batch_size(some)) :].any()) for slope in found)

    def _run(self, batch: Any, see: See, hear: See | None = None) -> Any:
        """The model's output; ``see`` hears W_O's input and output, ``hear`` those of the values, and may give another output."""
        told = [(self._module(p.name), p.name, see) for p in self.places]
        if hear is not None:
            told += [(self._module(values.name), name, hear) for name, values in self.values.items()]
        handles = [
            module.register_forward_hook(
                lambda module, args, kwargs, out, name=name, tell=tell: tell(
                    name, args[0] if args else next(iter(kwargs.values())), out
                ),
                with_kwargs=True,
            )
            for module, name, tell in told
        ]
        try:
            return call(self.model, inputs_of(self.model, batch))
        finally:
            for handle in handles:
                handle.remove()

    # -- weights -----------------------------------------------------------------------------------

    def _losing(self, moments: Mapping[str, Moments], drop: Heads, *, dense: bool) -> Iterator[Place]:
        """The places that are to be fitted anew."""
        started = False  # what comes before the first layer that loses a head sees nothing new
        for place in self.places:
            loses = len(place.kept(drop)) < len(place.weight)
            started |= loses
            # On the dense model's own inputs a W_O that keeps them all is right as it is.
            if (loses if dense else started) and float(moments[place.name].xx[:, -1, -1].sum()):
                yield place

    def _fit(self, place: Place, drop: Heads) -> Fit:
        """To the dense model's activations: W_O alone or with the values, whichever does better on held-out examples."""
        kept, moments = place.kept(drop), self.dense_moments()[place.name]
        known, key = self._fits.setdefault(place.name, {}), tuple(kept.tolist())
        if key not in known:
            known[key] = fit_output(moments, place, kept, self.ridge)
            values, heads = self.values.get(place.name), self._kept(place, drop)
            if values and heads:
                rank = self._directions[place.name].shape[1]
                both = fit_values(moments, place, values, heads, rank, self.ridge)
                least = known[key].held_out
                if both.held_out is None or least is None or both.held_out < least:
                    known[key] = both
            if len(known) > _REMEMBERED:
                del known[next(iter(known))]
        return known[key]

    def _outputs(self, moments: Mapping[str, Moments], drop: Heads, *, dense: bool) -> Weights:
        """Fits of W_O alone."""
        losing = self._losing(moments, drop, dense=dense)
        return self._gathered({p.name: fit_output(moments[p.name], p, p.kept(drop), self.ridge) for p in losing})

    def _gathered(self, fits: Mapping[str, Fit]) -> Weights:
        weights = Weights()
        for place in self.places:
            if (fit := fits.get(place.name)) is None:
                continue
            weights.of[place.name] = fit.weight, fit.bias
            weights.ridges[place.name] = fit.facts.ridge
            weights.facts |= {layer.name: fit.facts for layer in place.layers}
            if fit.mixes:
                values = self.values[place.name]
                weights.mixes[place.name] = fit.mixes
                weights.of[values.name] = written(values, fit.mixes, self._directions[place.name])
        return weights

    def _kept(self, place: Place, drop: Heads) -> list[int]:
        """The heads of a place's only layer that stay."""
        layer = place.layers[0]
        gone = set(drop.get(layer.name, ()))
        return [h for h in range(layer.num_heads) if h not in gone]

    def _write(self, weights: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Into the model; a bias that is None goes, where there was none."""
        new = [name for name in self.added if name in weights]
        with torch.inference_mode(False), torch.no_grad(), exact_attention(self.model):
            remove_biases(self.model, [name for name in new if weights[name][1] is None])
            add_biases(self.model, [name for name in new if weights[name][1] is not None])
            for name, (weight, bias) in weights.items():
                module: Any = self._module(name)
                # In place, since stand-ins share their weights with what they stand in for.
                module.weight.copy_(weight if is_transposed(module) else weight.T)
                if bias is not None and module.bias is not None:
                    module.bias.copy_(bias)

    def _module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def _layer(self, name: str) -> AttentionLayer:
        return next(p.layers[0] for p in self.places if p.name == name)

    def _probe(self, output: Any, batch: Any, first: int, alone: bool = False) -> Tensor:
        """See `probe`; ``alone`` looks at the first example's answers only."""
        seeds = range(first, first + batch_size(batch))
        mask = mask_of(self.model, batch, "decoder")

        def drawn(like: Tensor) -> Tensor:
            found = noise(like, mask, seeds)
            if alone and len(found) == len(seeds):
                found[1:] = 0
            return found

        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.shape[-1] > 1:
            chances = widened(logits).log_softmax(-1)
            root = chances.detach().exp().sqrt()
            return (across(root, drawn(chances)) * root * chances).sum()
        found = [widened(t) for t in tensors(output) if t.is_floating_point() and t.requires_grad]
        if not found:
            raise HeadPruneError("The model's answers do not depend on any head by what can be differentiated.")
        return torch.stack([(drawn(t) * t).sum() for t in found]).sum()

    def _sum(self, moments: Moments, x: Tensor, y: Tensor, told: Tensor, index: int, name: str) -> None:
        """Add a batch's tokens without padding, by how much they matter; every other example to the other fold."""
        batch, layer = self.batches[index], self._layer(name)
        real = real_tokens(x, mask_of(self.model, batch, layer.kind))
        rows, tokens, size = x.shape[0], x.shape[:-1], batch_size(batch)
        if self.examples == 1:  # its tokens take turns
            fold = torch.arange(tokens.numel(), device=x.device) % FOLDS
        else:
            # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
            example = self._first(index) + torch.arange(rows, device=x.device) * size // rows
            fold = (example % FOLDS).view(-1, *[1] * (len(tokens) - 1)).expand(tokens).flatten()
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for i in range(FOLDS):
            chosen = (fold == i) if real is None else (fold == i) & real
            if not bool(x[chosen].isfinite().all() & y[chosen].isfinite().all()):
                raise _not_finite(layer, "what goes through its output projection is")
            moments.add(i, x[chosen], y[chosen], told.flatten()[chosen])


def _not_finite(layer: AttentionLayer, what: str) -> HeadPruneError:
    return HeadPruneError(
        f"Layer {layer.name} cannot be repaired: {what} not finite.",
        "Leave out the example that does it, use --dtype float32, or do without repair.",
    )


def _replaced(values: Values, out: Tensor, new: Tensor) -> Tensor:
    """A value projection's output with others in the place of its values, ``new`` [..., key/value heads, head_dim]."""
    out = out.clone()
    out[..., values.features.flatten().to(out.device)] = new.flatten(-2).to(out.dtype)
    return out


def _close(found: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding, of the type that they are in."""
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    most = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.05
    return bool((found - expected).abs().amax() <= most * expected.abs().amax())


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found
