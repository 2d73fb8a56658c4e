"""Fits of a model's projections, for any choice of heads, to one dense reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headprune.attention import Heads
from headprune.gates import mask
from headprune.reference import DenseReference, OutputProjection
from headprune.repairing.step import LeftOut, Step
from headprune.repairing.steps import STEPS
from headprune.repairing.weights import Fit, Repair, Weights

REMEMBERED = 8  # fits of one W_O by one step: what a search, its trials and the pruning that follows come back to


class Refit:
    """Fits of a model's projections, for any choice of heads, to one dense reference.

    Args:
        reference: What the dense model is like. With its answers, if `headprune.repairing.checked` is to try the last step.
        ridge: Strength of the pull towards the old weights; by default what is best by cross-validation. With an infinite one
            nothing is refitted.
    """

    def __init__(self, reference: DenseReference, ridge: float | None = None) -> None:
        self.reference, self.ridge = reference, ridge
        self._fits: dict[tuple[str, str], dict[tuple[int, ...], Fit]] = {}

    def with_answers(self) -> Refit:
        """The same, with the dense model's answers."""
        found = copy.copy(self)
        found.reference = self.reference.with_answers()
        return found

    @property
    def model(self) -> nn.Module:
        """The model: dense but in a context of `applied`."""
        return self.reference.model

    def fitted(self, drop: Heads) -> Weights:
        """New weights for the kept heads: every layer fitted for itself, to the dense model's activations.

        The model is not run: the reference serves any choice of heads.

        Args:
            drop: ``{layer_name: [head, ...]}``.
        """
        weights = Weights()
        with torch.inference_mode(False), torch.no_grad():
            for step in STEPS:
                if step.by_layer and not isinstance(found := step.fit(self, drop, weights), LeftOut):
                    weights = found
        return weights

    def unrepaired(self, drop: Heads, biases: bool = False) -> Weights:
        """The old weights of every W_O that loses heads, without the columns of these.

        Args:
            biases: Whether modules that have none get a bias of zeros, if they can have one.
        """
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for projection in (p for p in self.reference.projections if p.loses(drop)):
            kept, whole = projection.kept(drop), torch.zeros_like(projection.weight, device="cpu")
            whole[kept] = projection.weight.cpu()[kept]
            bias = projection.own_bias or (biases and projection.has_bias)
            found[projection.name] = whole, projection.bias.cpu() if bias else None
        return Weights(found)

    @contextmanager
    def applied(self, weights: Weights, drop: Heads | None = None) -> Iterator[None]:
        """The dense model with these weights, while the context lasts; then with those that it had before.

        Args:
            drop: Heads to mask.
        """
        with self.reference.weights.replaced(weights.by_module):
            if drop is None:
                yield
                return
            layers = self.reference.layers
            masked = {layer.name: drop[layer.name] for layer in layers if layer.maskable and layer.name in drop}
            with mask(self.model, masked, layers=layers):
                yield

    def remembered(self, step: Step, projection: OutputProjection, kept: Tensor, make: Callable[[], Fit]) -> Fit:
        """The fit of one W_O, which depends on nothing but its kept inputs: made once for several choices of heads."""
        known, key = self._fits.setdefault((step.name, projection.name), {}), tuple(kept.tolist())
        if key not in known:
            known[key] = make()
            if len(known) > REMEMBERED:
                del known[next(iter(known))]
        return known[key]

    def report(self, weights: Weights, passes: float = 0.0) -> Repair:
        """What was done, in so many passes beside those that the reference took."""
        reference = self.reference
        new = reference.weights.new_biases
        return Repair(
            weights.facts,
            reference.runner.examples,
            sum(len(mixed.firsts) for mixed in reference.runner.mixtures),
            round(reference.passes + passes),
            tuple(name for name in new if weights.by_module.get(name, (None, None))[1] is not None),
            (*reference.notes, *([weights.note] if weights.note else [])),
            weights.answers,
            weights.trials,
        )
