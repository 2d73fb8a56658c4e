"""Results of a repair: new weights, and how well they fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from headprune.repairing.projections import Moments, OutputProjection

LeftOut = str
"""Why a step of a repair is left out: it gains nothing, or cannot be made; "" if users need not know."""
NewWeights = Mapping[str, tuple[Tensor, Tensor | None]]
"""``{module: (W [in, out], b [out] or None)}``; modules that keep their dense weights are not in it."""


@dataclass(frozen=True)
class LayerRepair:
    """How well one layer's refit fits.

    Attributes:
        before: Mean squared error per token (weighted as in the fit) of W_O's output with the old weights and without
            the removed heads, divided by the variance of the dense model's output.
        after: The same with the new weights.
        ridge: The strength that was best on held-out examples; infinite if the old weights were.
        values: Whether the value projection was refitted as well.
    """

    before: float
    after: float
    ridge: float
    values: bool = False


@dataclass(frozen=True)
class AnswersRepair:
    """The step towards the dense answers (`headprune.repairing.gauss_newton` or `kronecker`); the last one, if it was repeated.

    Attributes:
        before: Root mean squared difference of the answers (logits, along the differences between classes) from the dense
            model's, on the examples that are fitted to, without it.
        held_out: The same with the step, on left-out examples, to first order. Where an example has many answers, both are
            roots of mean divergences as `Trial` has them.
        strength: The strength of the ridge, by ``held_out``; K-FAC's damping, where an example has many answers.
        examples: How many were fitted to.
        part: How much of the step was taken; above 1 where its length was searched for and a longer one did better; 1 where an example has
            many answers, since there its own length is a guess.
    """

    before: float
    held_out: float
    strength: float
    examples: int
    part: float = 1.0

    def better_part(self, before: float, after: float) -> float:
        """The part of the step with least error, if the error is ``before`` without the step and ``after`` with it.

        The error is taken to be a parabola. The step's own prediction (``self.before`` and ``held_out``) gives its
        slope at 0.
        """
        promised = before * (1 - (self.held_out / self.before) ** 2)
        return promised / max(after - before + 2 * promised, 1e-30)


Changes = Mapping[str, tuple[Tensor, Tensor]]
"""Changes of weights ``W [in, out]`` and biases ``b [out]``, by module; on the CPU, in the dtype of `LinearLayer.weight`."""


@dataclass(frozen=True)
class AnswersStep:
    """A step towards the dense answers.

    Attributes:
        changes: Of weights and biases.
        facts: How well they fit.
        on_fold: The changes fitted to one fold alone. If others are fitted to as well, fold 0 is the calibration examples.
        others: How many of the examples that are fitted to are `Calibration.others`.
        careful: Makes another step that does less, where there is one: with a stronger ridge, or of the layers that lose heads alone.
    """

    changes: Changes
    facts: AnswersRepair
    on_fold: Callable[[int], Changes]
    others: int = 0
    careful: Callable[[], AnswersStep | None] | None = None


@dataclass(frozen=True)
class Trial:
    """How one step of a repair did on examples that it was not fitted to (`headprune.repairing.steps`).

    Where a last step is repeated, the weights that it starts from were fitted to these examples too.

    Attributes:
        step: ``"output projections"``, ``"values"`` or ``"answers"`` (the last step, towards the dense model's answers).
        before, after: Mean divergence from the dense model's answers, in nats (of answers that are no logits, the mean squared
            difference), without this step and with it; heads masked.
        examples: How many it was tried on.
        kept: Whether it did better there. If not, it was left out.
    """

    step: str
    before: float
    after: float
    examples: int
    kept: bool

    @property
    def gain(self) -> float:
        """How much the step lowered the divergence: ``before - after``; below 0 if it raised it."""
        return self.before - self.after

    def to_json(self) -> dict[str, Any]:
        """The fields, with None for numbers that are not finite, as when answers overflow."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}


@dataclass(frozen=True)
class Repair:
    """What `repair` did.

    Attributes:
        layers: How well each layer fits, on the calibration examples before the step towards the answers.
        examples: Number of calibration examples.
        mixtures: Number of mixtures of them that were fitted to as well, or of many in their place (`headprune.repairing.mixtures`).
        passes: Forward passes over them.
        biases: Output projections that had no bias, and have one now.
        notes: Which weights could not be refitted, and why.
        answers: The step towards the dense model's answers; None where none was taken.
        trials: How every step did on examples that it was not fitted to, and whether it was kept. The step towards the
            answers may be listed several times.
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
        weight: ``[in, out]``, with rows of zeros for removed inputs.
        bias: ``[out]``; None if there can be none.
        facts: How well it fits.
        held_out: Cross-validated squared error, summed over folds; None if the ridge was given.
        refit: Makes the same fit, with the same strength, from other sums over tokens.
        mixes: For every kept head, the matrix from its old values and the further directions to its new values,
            ``[head_dim + rank, head_dim]``; empty if values were not refitted.
        values: Returns the new weights of the value projection by its name; none if values were not refitted.
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
        by_module: ``{module: (W [in, out], b [out] or None)}``; without modules that do not change.
        fits: The fits that they come from, by output projection; none for old weights.
        answers: The step towards the dense model's answers, if they include it.
        note: What a reader should know about steps that were left out.
        trials: How every step did on examples that it was not fitted to (`headprune.repairing.steps`).
        others: How many of `Calibration.others` a last step was fitted to.
        last_steps: How many last steps led to these weights.
        on_fold: ``on_fold(i)``: the weights if the last step is fitted to fold i alone, with the same strength; see `AnswersStep`.
        with_part: ``with_part(part)``: the weights with only a part of the last step, if that can be taken in part.
        careful: Makes the weights with `AnswersStep.careful` in place of the last step.
    """

    by_module: NewWeights = field(default_factory=dict)
    fits: Mapping[str, LayerFit] = field(default_factory=dict)
    answers: AnswersRepair | None = None
    note: str = ""
    trials: tuple[Trial, ...] = ()
    others: int = 0
    last_steps: int = 0
    on_fold: Callable[[int], RepairWeights] | None = None
    with_part: Callable[[float], RepairWeights] | None = None
    careful: Callable[[], RepairWeights | None] | None = None

    @classmethod
    def of(cls, fits: Mapping[str, LayerFit], moments: Mapping[str, Moments]) -> RepairWeights:
        """The weights of several output projections' fits, which were made from these sums."""
        weights: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, fit in fits.items():
            weights |= {name: (fit.weight, fit.bias), **fit.values()}

        def on_fold(fold: int) -> RepairWeights:
            return cls.of({name: fit.refit(moments[name].of_fold(fold)) for name, fit in fits.items()}, moments)

        return cls(weights, fits, on_fold=on_fold)

    @property
    def ridges(self) -> dict[str, float]:
        """The ridge strengths of the fits, by output projection."""
        return {name: fit.facts.ridge for name, fit in self.fits.items()}

    @property
    def mixes(self) -> dict[str, Mapping[int, Tensor]]:
        """`LayerFit.mixes` of the refitted values, by output projection."""
        return {name: fit.mixes for name, fit in self.fits.items() if fit.mixes}

    @property
    def facts(self) -> dict[str, LayerRepair]:
        """How well the weights fit, by layer."""
        return {layer.name: fit.facts for fit in self.fits.values() for layer in fit.projection.layers}

    def __bool__(self) -> bool:
        return bool(self.by_module)

    def moved(self, step: AnswersStep, part: float = 1.0) -> RepairWeights:
        """These weights plus a part of a step towards the answers."""
        # No closure that refers to itself: it would keep gradients in memory.
        return replace(
            self._plus(step.changes, part),
            answers=replace(step.facts, part=part),
            others=step.others,
            on_fold=lambda fold: self._plus(step.on_fold(fold), part),
            with_part=partial(self.moved, step),
        )

    def _plus(self, changes: Changes, part: float) -> RepairWeights:
        """These weights plus a part of some changes; a bias that is None stays None."""
        moved = dict(self.by_module)
        for name, (weight, bias) in changes.items():
            old, own = self.by_module[name]
            moved[name] = old + part * weight.to(old), None if own is None else own + part * bias.to(own)
        return replace(self, by_module=moved)
