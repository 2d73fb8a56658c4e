"""What a step of a repair is: new weights from the dense reference, and whether they help on examples that it was not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.attention import Heads
from headprune.reference.answers import DenseAnswers, by_batch, spread_out
from headprune.reference.moments import FOLDS
from headprune.reference.runner import Examples
from headprune.repairing.weights import Weights

if TYPE_CHECKING:
    from headprune.repairing.refit import Refit

_FEW = 128  # examples: up to here both halves are tried
_MOST = 256  # examples that are looked at at most


@dataclass(frozen=True)
class LeftOut:
    """A step that has nothing to gain, or cannot be made.

    Attributes:
        note: Why, for a reader; "" if that is of no interest.
    """

    note: str = ""


@dataclass(frozen=True)
class Split:
    """Examples that a step is tried on.

    Attributes:
        examples: To try it on.
        fold: The half of the examples that it is fitted to for that, if it is fitted to all in the end; None, if it is not
            fitted to these examples anyway.
    """

    examples: Examples
    fold: int | None = None


@dataclass(frozen=True)
class Step:
    """A step of a repair. To add one: a file in `headprune.repairing.steps`, and a line in its ``STEPS``.

    Attributes:
        name: As `Trial.step` has it.
        about: What it changes, for a reader.
        fit: ``fit(refit, drop, start)`` gives the weights after this step, from those before it, or why it is left out.
            ``drop`` are the heads that go. The model is the dense one, and must be so afterwards.
        splits: ``splits(refit)``: the examples to try it on. Steps in a row with the same function are tried together.
        in_search: Whether plans are compared with this step done: for steps that fit every layer for itself, from the sums
            of the reference, without running the model.
    """

    name: str
    fit: Callable[[Refit, Heads, Weights], Weights | LeftOut]
    splits: Callable[[Refit], Sequence[Split]]
    in_search: bool = False
    about: str = ""


def halves(refit: Refit) -> list[Split]:
    """Fitted to every other example, and tried on those between; the other way round too, where there are few."""
    runner, found = refit.reference.runner, []
    for fold in range(FOLDS) if runner.examples <= _FEW else (0,):
        others = [
            (index, row)
            for index in range(len(runner.batches))
            for row, own in enumerate(runner.fold(index).tolist())
            if own != fold
        ]
        found.append(Split(by_batch(spread_out(others, min(_MOST, len(others)))), fold))
    return found


def apart(refit: Refit) -> list[Split]:
    """Tried on the examples that the answers' step is not made from."""
    answers = refit.reference.answers
    return [Split(answers.apart)] if isinstance(answers, DenseAnswers) else []


def on_fold(refit: Refit, weights: Weights, fold: int) -> Weights:
    """Weights that were fitted layer by layer, fitted with the same strengths to one fold of the examples alone."""
    moments = refit.reference.moments
    return Weights.of({name: fit.again(moments[name].only(fold)) for name, fit in weights.fits.items()})
