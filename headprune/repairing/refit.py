"""The output projections of one model, and their fits for any choice of heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.gates import mask
from headprune.modules import exact_attention
from headprune.pruned import add_biases, remove_biases
from headprune.repairing.answers import Answers
from headprune.repairing.places import OutputProjection, Values, is_transposed, places_of
from headprune.repairing.runner import Runner
from headprune.repairing.solve import Fit, Moments, fit_output
from headprune.repairing.statistics import Statistics
from headprune.repairing.values import fit_values, written
from headprune.repairing.weights import Repair, Weights
from headprune.scoring.base import Progress, Store

_REMEMBERED = 8  # fits of one W_O: what a search, its trials and the pruning that follows come back to
_NO_GAIN = "No step towards the dense model's answers did better on examples left out, so none was taken."
_PARTS = (1.0, 0.5, 0.25)  # of the step towards the answers, which is right to first order only


class Refit:
    """The output projections of one model, and their fits for any choice of heads.

    Args:
        model: The dense model.
        layers: Its attention layers.
        batches: Calibration examples.
        ridge: As for `repair`.
        values: Whether values are refitted too, where they can be.
        mixtures: Whether mixtures of the examples are fitted to as well, where they can be (`headprune.repairing.crossed`).
        progress: Called after every batch of a pass.
        store: For what is measured with it.

    Attributes:
        places: The output projections that can be refitted.
        notes: What cannot be refitted, and why.
        runner: The model on its calibration examples.
        statistics: Sums over their tokens.
        added: Modules that get a bias.
        dense_effects: Effects of the removal of heads from the dense model that were measured already (`headprune.planning.effects`).
        store: Keeps all that are measured, so that an interrupted search goes on where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        batches: Sequence[Any],
        *,
        ridge: float | None = None,
        values: bool = True,
        mixtures: bool = True,
        progress: Progress | None = None,
        store: Store | None = None,
    ) -> None:
        self.model, self.layers, self.ridge, self.store = model, layers, ridge, store or Store()
        self.notes: list[str] = []
        with torch.inference_mode(False):
            self.places = list(places_of(model, layers, self.notes))
        self.runner = Runner(model, self.places, batches)
        fits = ridge != float("inf")
        self.statistics = Statistics(self.runner, values and fits, mixtures and fits, self.notes, progress)
        self.added = [p.name for p in self.places if p.has_bias and not p.own_bias]
        self.dense_effects: dict[object, Tensor] = {}
        self._fits: dict[str, dict[tuple[int, ...], Fit]] = {}
        self._applied = Weights()

    @property
    def batches(self) -> list[Any]:
        """Calibration examples."""
        return self.runner.batches

    @property
    def examples(self) -> int:
        """How many there are."""
        return self.runner.examples

    @property
    def passes(self) -> float:
        """Forward passes over them, so far."""
        return self.runner.passes

    @property
    def values(self) -> dict[str, Values]:
        """The value projections that are refitted too, by output projection."""
        return self.statistics.values

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
            if sweeps:
                return self._swept(drop, sweeps)[0]
            return self._refitted(drop)

    def by_step(self, drop: Heads, sweeps: int = 0) -> tuple[list[Weights], Mapping[str, Moments]]:
        """As `fitted`, and what comes before it: W_O alone, and then with values, where any are refitted.

        Returns:
            The weights after every step (none if nothing is to be fitted), and what they were fitted to.
        """
        if not any(drop.values()):
            return [], {}
        with torch.inference_mode(False), torch.no_grad():
            if sweeps:
                weights, moments = self._swept(drop, sweeps)
                return [weights] if weights else [], moments
            moments, both = self.statistics.dense, self._refitted(drop)
            alone = [self._outputs(moments, drop, dense=True)] if both.mixes else []
            return [*alone, *([both] if both else [])], moments

    def halved(self, weights: Weights, moments: Mapping[str, Moments], drop: Heads, fold: int) -> Weights:
        """Weights that `by_step` gave, fitted with the same strengths to one fold of the examples alone."""
        fits = {}
        with torch.inference_mode(False), torch.no_grad():
            for place in (p for p in self.places if p.name in weights.by_module):
                some, kept, ridge = moments[place.name].only(fold), place.kept(drop), weights.ridges[place.name]
                if not float(some.xx[0, -1, -1]):  # nothing was seen there
                    fits[place.name] = fit_output(some, place, kept, float("inf"))
                elif place.name in weights.mixes:
                    rank = self.statistics.directions[place.name].shape[1]
                    heads = place.heads(drop)
                    fits[place.name] = fit_values(some, place, self.values[place.name], heads, rank, ridge)
                else:
                    fits[place.name] = fit_output(some, place, kept, ridge)
            return self._gathered(fits)

    def unrepaired(self, drop: Heads, biases: bool = False) -> Weights:
        """The old weights of every W_O that loses heads, without the columns of these.

        Args:
            biases: Whether modules that have none get a bias of zeros, if they can have one.
        """
        found = Weights()
        for place in self.places:
            kept = place.kept(drop)
            if len(kept) < len(place.weight):
                whole = torch.zeros_like(place.weight, device="cpu")
                whole[kept] = place.weight.cpu()[kept]
                bias = place.own_bias or (biases and place.has_bias)
                found.by_module[place.name] = whole, place.bias.cpu() if bias else None
        return found

    def fit_logits(self, drop: Heads, start: Weights | None = None, answers: Answers | None = None) -> Weights:
        """As `fitted`, and then all W_O that lose heads moved together towards the dense model's answers.

        A layer's fit does not know what the other layers' errors add up to; this does (`headprune.repairing.answers`). It takes
        three passes or more, so plans are compared without.

        Args:
            start: In the place of what `fitted` gives.
            answers: Those to come nearer to; by default, to all calibration examples.
        """
        weights = self.fitted(drop) if start is None else start
        places = {p.name: (p, p.kept(drop)) for p in self.places if p.name in weights.by_module}
        if not places:
            return weights
        answers = answers or self._answers
        if answers.note:
            weights.note = answers.note
            return weights
        masked = {layer.name: drop[layer.name] for layer in self.layers if layer.maskable and layer.name in drop}
        with torch.inference_mode(False), self.applied(weights), mask(self.model, masked, layers=self.layers):
            step = answers.step(places)
        if step is not None:
            for part in _PARTS:
                moved = weights.moved(step.by_module, part)
                with torch.inference_mode(False), self.applied(moved), mask(self.model, masked, layers=self.layers):
                    after = answers.distance()
                if after < step.facts.before:
                    moved.answers = replace(step.facts, after=after, part=part)
                    return moved
        weights.note = answers.note or _NO_GAIN
        return weights

    @cached_property
    def _answers(self) -> Answers:
        with torch.inference_mode(False), self.applied(Weights()):
            return Answers(self.runner)

    @contextmanager
    def applied(self, weights: Weights) -> Iterator[None]:
        """The dense model with these weights, while the context lasts; then with those that it had before."""
        before = self._applied
        self.apply(weights)
        try:
            yield
        finally:
            self.apply(before)

    def apply(self, weights: Weights) -> None:
        """Write weights into the model, and the dense model's where these say nothing."""
        dense = {p.name: (p.weight, p.bias if p.own_bias else None) for p in self.places}
        dense |= {v.name: (v.weight, v.bias) for v in self.values.values()}
        self._write({**{name: dense[name] for name in self._applied.by_module}, **weights.by_module})
        self._applied = weights

    def hessian(
        self, place: OutputProjection, drop: Heads, weights: Weights, ridge: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the regression that gives a W_O its weights without the heads in ``drop``; see `Statistics.hessian`."""
        mixes = weights.mixes.get(place.name, {})
        return self.statistics.hessian(place, place.heads(drop), place.kept(drop), mixes, ridge)

    def slopes(self, index: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """W_O's inputs and the slopes at its outputs, by module, for every call, on a batch of the model as it is now.

        Behind the inputs is what every head attends to along the first directions, a head's width of them.
        """
        found = self.runner.slopes(index)
        xs = {name: [x for x, _, _ in calls] for name, calls in found.items()}
        if self.values:
            ys = {name: [y for _, y, _ in calls] for name, calls in found.items()}
            with torch.no_grad(), self.runner.deterministic_eval():
                xs = self.statistics.widened(self.batches[index], xs, ys, list(xs), shares=1)
            self.runner.passes += self.runner.rows.size(self.batches[index]) / self.examples
        return {
            name: [(x, slope) for x, (_, _, slope) in zip(xs[name], calls, strict=True)]
            for name, calls in found.items()
        }

    @property
    def look(self) -> int:
        """Forward passes, over the examples looked at, that `slopes` take: a backward pass counts as two."""
        return 3 + bool(self.values)

    def matters(self, place: OutputProjection) -> bool:
        """Whether the model's answers depend on a W_O at all, so that there is something to fit it to."""
        return bool(self.statistics.dense[place.name].xx[:, -1, -1].sum() > 0)

    def report(self, weights: Weights) -> Repair:
        """What was done."""
        biases = tuple(name for name in self.added if weights.by_module.get(name, (None, None))[1] is not None)
        notes = (*self.notes, *([weights.note] if weights.note else []))
        mixtures = sum(len(mixed.rows) for mixed in self.runner.further)
        return Repair(
            dict(weights.facts),
            self.examples,
            mixtures,
            round(self.passes),
            biases,
            notes,
            weights.answers,
            weights.trials,
        )

    def _losing(self, moments: Mapping[str, Moments], drop: Heads, *, dense: bool) -> Iterator[OutputProjection]:
        """The places that are to be fitted anew."""
        started = False  # what comes before the first layer that loses a head sees nothing new
        for place in self.places:
            loses = len(place.kept(drop)) < len(place.weight)
            started |= loses
            # On the dense model's own inputs a W_O that keeps them all is right as it is.
            if (loses if dense else started) and float(moments[place.name].xx[:, -1, -1].sum()):
                yield place

    def _fit(self, place: OutputProjection, drop: Heads) -> Fit:
        """To the dense model's activations: W_O alone or with the values, whichever does better on held-out examples."""
        kept, moments = place.kept(drop), self.statistics.dense[place.name]
        known, key = self._fits.setdefault(place.name, {}), tuple(kept.tolist())
        if key not in known:
            known[key] = fit_output(moments, place, kept, self.ridge)
            values, heads = self.values.get(place.name), place.heads(drop)
            if values and heads:
                rank = self.statistics.directions[place.name].shape[1]
                both = fit_values(moments, place, values, heads, rank, self.ridge)
                least = known[key].held_out
                if both.held_out is None or least is None or both.held_out < least:
                    known[key] = both
            if len(known) > _REMEMBERED:
                del known[next(iter(known))]
        return known[key]

    def _refitted(self, drop: Heads) -> Weights:
        """Of W_O and values, to the dense model's activations."""
        return self._gathered(
            {p.name: self._fit(p, drop) for p in self._losing(self.statistics.dense, drop, dense=True)}
        )

    def _swept(self, drop: Heads, sweeps: int) -> tuple[Weights, Mapping[str, Moments]]:
        """After some sweeps: the weights, and what they were fitted to."""
        moments: Mapping[str, Moments] = self.statistics.dense
        weights = self._outputs(moments, drop, dense=True)
        for _ in range(sweeps):
            moments = self.statistics.behind(partial(self.applied, weights))
            weights = self._outputs(moments, drop, dense=False)
        return weights, moments

    def _outputs(self, moments: Mapping[str, Moments], drop: Heads, *, dense: bool) -> Weights:
        """Fits of W_O alone."""
        losing = self._losing(moments, drop, dense=dense)
        return self._gathered({p.name: fit_output(moments[p.name], p, p.kept(drop), self.ridge) for p in losing})

    def _gathered(self, fits: Mapping[str, Fit]) -> Weights:
        weights = Weights()
        for place in self.places:
            if (fit := fits.get(place.name)) is None:
                continue
            weights.by_module[place.name] = fit.weight, fit.bias
            weights.ridges[place.name] = fit.facts.ridge
            weights.facts |= {layer.name: fit.facts for layer in place.layers}
            if fit.mixes:
                values = self.values[place.name]
                weights.mixes[place.name] = fit.mixes
                weights.by_module[values.name] = written(values, fit.mixes, self.statistics.directions[place.name])
        return weights

    def _write(self, weights: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Into the model; a bias that is None goes, where there was none."""
        new = [name for name in self.added if name in weights]
        with torch.inference_mode(False), torch.no_grad(), exact_attention(self.model):
            remove_biases(self.model, [name for name in new if weights[name][1] is None])
            add_biases(self.model, [name for name in new if weights[name][1] is not None])
            for name, (weight, bias) in weights.items():
                module: Any = self.model.get_submodule(name)
                # In place, since stand-ins share their weights with what they stand in for.
                module.weight.copy_(weight if is_transposed(module) else weight.T)
                if bias is not None and module.bias is not None:
                    module.bias.copy_(bias)
