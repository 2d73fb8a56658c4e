"""What a step of a repair is: new weights from the dense reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.attention import Heads
from headprune.repairing.weights import Weights

if TYPE_CHECKING:
    from headprune.repairing.refit import Refit


@dataclass(frozen=True)
class LeftOut:
    """A step that has nothing to gain, or cannot be made.

    Attributes:
        note: Why, for a reader; "" if that is of no interest.
    """

    note: str = ""


@dataclass(frozen=True)
class Step:
    """A step of a repair. To add one: a file in `headprune.repairing.steps`, and a line in its ``STEPS``.

    Attributes:
        name: As `Trial.step` has it.
        about: What it changes, for a reader.
        fit: ``fit(refit, drop, start)`` gives the weights after this step, from those before it, or why it is left out.
            ``drop`` are the heads that go. The model is the dense one, and must be so afterwards.
        by_layer: Whether it fits every layer for itself, from the sums of the reference, without running the model. Plans are
            compared with such steps done. They are made one after another, whether those before were kept or not.
    """

    name: str
    fit: Callable[[Refit, Heads, Weights], Weights | LeftOut]
    by_layer: bool = False
    about: str = ""
