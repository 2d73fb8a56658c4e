"""What a repair gives: new weights, and the facts of how they fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from headprune.repairing.projections import Moments, OutputProjection

LeftOut = str
"""Why a step of a repair is left out: it has nothing to gain, or cannot be made; "" if the reason is of no interest."""
NewWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""``{module: (W [in, out], b [out] or None)}``; modules that keep their dense weights are not in it."""


@dataclass(frozen=True)
class LayerRepair:
    """One layer's refit.

    Attributes:
        before: Mean squared error per token (weighted as in the fit: `headprune.repair`) of W_O's output with the old weights and without the removed heads, divided
            by the variance of the dense model's output.
        after: The same with the new weights.
        ridge: The strength that was best on held-out examples; infinite where the old weights were.
        values: Whether the value projection was refitted as well.
    """

    before: float
    after: float
    ridge: float
    values: bool = False


@dataclass(frozen=True)
class AnswersRepair:
    """The step towards the dense model's answers (`headprune.repairing.gauss_newton`), the last one where it was taken again.

    Attributes:
        before: Root mean squared difference of the answers (logits, along the differences between classes) from the dense
            model's, on the calibration examples, without it.
        held_out: What it should be on an example that is left out, to first order.
        strength: The ridge's, with which that is least.
        examples: How many were fitted to.
        part: How much of the step was taken, from 0 to 1.
    """

    before: float
    held_out: float
    strength: float
    examples: int
    part: float = 1.0

    def better_part(self, before: float, after: float) -> float:
        """The part of the step at which an error is least that was ``before`` and with the whole step is ``after``.

        It is taken to be a parabola, which falls at first as the step promises: to ``held_out`` squared of ``before`` squared.
        """
        promised = before * (1 - (self.held_out / self.before) ** 2)
        return promised / max(after - before + 2 * promised, 1e-30)


@dataclass(frozen=True)
class Trial:
    """How one step of a repair did on examples that it was not fitted to (`headprune.repairing.steps`).

    Attributes:
        step: ``"output projections"``, ``"values"`` or ``"answers"`` (the last step, towards the dense model's answers).
        before, after: Mean divergence from the dense model's answers, in nats (of answers that are no logits, the mean squared
            difference), without this step and with it; heads masked.
        examples: How many it was tried on.
        kept: Whether it did better there. What did not, was left out.
    """

    step: str
    before: float
    after: float
    examples: int
    kept: bool

    @property
    def gain(self) -> float:
        """How much nearer to the dense model's answers the step came there: ``before - after``; below 0 it came no nearer."""
        return self.before - self.after

    def to_json(self) -> dict[str, Any]:
        """With None for what is no number, as where answers overflow."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class Repair:
    """What `repair` did.

    Attributes:
        layers: By layer; on the calibration examples, before the step towards the answers.
        examples: Calibration examples.
        mixtures: Mixtures of them that were fitted to as well (`headprune.repairing.examples`).
        passes: Forward passes over them.
        biases: Output projections that had no bias, and have one now.
        notes: Which weights could not be refitted, and why.
        answers: The step towards the dense model's answers; None where none was taken.
        trials: How every step did on examples that it was not fitted to, and whether it was kept; the step towards the answers may be in
            it several times.
    """

    layers: dict[str, LayerRepair]
    examples: int
    mixtures: int
    passes: int
    biases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    answers: AnswersRepair | None = None
    trials: tuple[Trial, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "trials": [trial.to_json() for trial in self.trials]}


@dataclass(frozen=True)
class LayerFit:
    """New weights of one W_O.

    Attributes:
        projection: W_O.
        weight: ``[in, out]``, with rows of zeros for inputs that go.
        bias: ``[out]``; None where there can be none.
        facts: How well it fits.
        held_out: Squared error on every fold of what was fitted to the others; None where the ridge was given.
        refit: The same fit, with the same strength, to other sums over tokens.
        mixes: Of every kept head, its new values from its old ones and the further directions, ``[head_dim + rank, head_dim]``;
            empty where values stay as they are.
        values: Where values were refitted too, gives the new weights of their projection, by its name.
    """

    projection: OutputProjection
    weight: Tensor
    bias: Tensor | None
    facts: LayerRepair
    held_out: float | None
    refit: Callable[[Moments], LayerFit]
    mixes: Mapping[int, Tensor] = field(default_factory=dict)
    values: Callable[[], NewWeights] = dict


@dataclass(frozen=True)
class RepairWeights:
    """New weights by module.

    Attributes:
        by_module: ``{module: (W [in, out], b [out] or None)}``; modules that stay as they are, are not in it.
        fits: What they were made of, by output projection; none for old weights.
        answers: The step towards the dense model's answers, if they have it in them.
        note: What a reader should know of what was left out.
        trials: How every step did on examples that it was not fitted to (`headprune.repairing.steps`).
        on_fold: ``on_fold(i)``: what the last step gives if it is fitted to the examples of fold i alone, with the same strength.
        taken: ``taken(part)``: with a part of the last step, where that can be taken in part.
    """

    by_module: NewWeights = field(default_factory=dict)
    fits: Mapping[str, LayerFit] = field(default_factory=dict)
    answers: AnswersRepair | None = None
    note: str = ""
    trials: tuple[Trial, ...] = ()
    on_fold: Callable[[int], RepairWeights] | None = None
    taken: Callable[[float], RepairWeights] | None = None

    @classmethod
    def of(cls, fits: Mapping[str, LayerFit], moments: Mapping[str, Moments]) -> RepairWeights:
        """The weights that fits of several output projections give, made from these sums."""
        weights: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, fit in fits.items():
            weights |= {name: (fit.weight, fit.bias), **fit.values()}

        def on_fold(fold: int) -> RepairWeights:
            return cls.of({name: fit.refit(moments[name].of_fold(fold)) for name, fit in fits.items()}, moments)

        return cls(weights, fits, on_fold=on_fold)

    @property
    def ridges(self) -> dict[str, float]:
        """The strengths they were fitted with, by output projection."""
        return {name: fit.facts.ridge for name, fit in self.fits.items()}

    @property
    def mixes(self) -> dict[str, Mapping[int, Tensor]]:
        """What values are made of where they were refitted, by output projection (`LayerFit.mixes`)."""
        return {name: fit.mixes for name, fit in self.fits.items() if fit.mixes}

    @property
    def facts(self) -> dict[str, LayerRepair]:
        """What the fits were like, by layer."""
        return {layer.name: fit.facts for fit in self.fits.values() for layer in fit.projection.layers}

    def __bool__(self) -> bool:
        return bool(self.by_module)

    def moved(self, step: Mapping[str, tuple[Tensor, Tensor]], part: float) -> RepairWeights:
        """With a part of changes ``{module: (W [in, out], b [out])}`` added; a bias that is None stays so."""
        moved = dict(self.by_module)
        for name, (weight, bias) in step.items():
            old, own = self.by_module[name]
            moved[name] = old + part * weight.to(old), None if own is None else own + part * bias.to(own)
        return replace(self, by_module=moved)
