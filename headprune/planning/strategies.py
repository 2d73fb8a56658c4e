"""How heads are picked by their scores: the register of strategies, and those that need nothing but scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.fingerprint import identity
from headprune.losses import LossFn
from headprune.planning.effects import Look
from headprune.planning.effort import NORMAL, Effort
from headprune.planning.order import Order
from headprune.planning.units import GROUPS, Constraints, Unit, units_of, why_stay
from headprune.repairing import Calibration
from headprune.running import Progress
from headprune.scoring.scores import HeadScores
from headprune.store import Store


def _unheard(done: int, total: int, note: str = "") -> None:
    """Progress that no one follows."""


@dataclass(frozen=True)
class Search:
    """What every strategy gets.

    Attributes:
        layers: The model's attention layers.
        scores: Importance by head; None for a strategy that makes its own.
        constraints: What must stay.
        kind: How heads that share key/value heads go: ``"groups"`` or ``"slices"`` (`units_of`).
        seed: For strategies that draw.
        progress: Called as work goes on.
        model: For strategies that run it: in evaluation mode, on its device, never changed.
        batches: Labelled batches to score or to compare on (the scoring part of the data).
        calibration: Of the repair that will follow, if any: strategies that run the model see it repaired.
        dense_looks: What strategies that look at the model begin with, where it was measured already, by kind.
        store: Keeps what strategies measure, so that an interrupted search goes on where it was.
        effort: How much work it may be.
        loss_fn: As for `headprune.score`: for batches that are pairs ``(inputs, labels)``.
    """

    layers: Sequence[AttentionLayer]
    scores: HeadScores | None = None
    constraints: Constraints = field(default_factory=Constraints)
    kind: str = GROUPS
    seed: int = 0
    progress: Progress = _unheard
    model: nn.Module | None = None
    batches: Sequence[Any] = ()
    calibration: Calibration | None = None
    dense_looks: Mapping[str, Look] = field(default_factory=dict)
    store: Store | None = None
    effort: Effort = NORMAL
    loss_fn: LossFn | None = None

    def units(self, scores: HeadScores | None = None) -> list[list[Unit]]:
        """The units of every layer that may go, those with the least score first.

        Raises:
            HeadPruneError: There are no scores, or some are not finite.
        """
        given = scores or self.scores
        if given is None:
            raise HeadPruneError("This strategy needs scores.", "Score the model first.")
        if not given.flat().isfinite().all():
            raise HeadPruneError("Some scores are not finite, so heads cannot be ranked.", "Score the model again.")
        return units_of(self.layers, given.values, self.constraints, self.kind)

    def order(self, steps: Sequence[Heads], strategy: str, *notes: str, stays: Sequence[str] = ()) -> Order:
        """The `Order` of these steps, with all that is known about the search."""
        scores = self.scores
        own = scores.model if scores else identity(self.model) if self.model else ""
        return Order.of(
            self.layers, steps, strategy=strategy, method=scores.method if scores else "",
            model=own, stays=(*why_stay(self.layers, self.constraints), *stays), notes=notes,
        )  # fmt: skip

    def step(self, *units: Unit) -> Heads:
        """Units that go together, as a step of an order."""
        step: Heads = {}
        for unit in units:
            step.setdefault(self.layers[unit.layer].name, []).extend(unit.heads)
        return step


@dataclass(frozen=True)
class Strategy:
    """A way to make an order.

    Attributes:
        name: As ``--strategy`` takes it.
        run: Makes the order; it must be good at the numbers of kept heads it is given (descending), and decent between.
        about: What it does, in a line.
        needs_scores: Whether it takes scores.
        runs_model: Whether it needs the model and batches.
    """

    name: str
    run: Callable[[Search, Sequence[int]], Order]
    about: str
    needs_scores: bool
    runs_model: bool


STRATEGIES: dict[str, Strategy] = {}
_Run = Callable[[Search, Sequence[int]], Order]


def strategy(name: str, *, needs_scores: bool = True, runs_model: bool = False) -> Callable[[_Run], _Run]:
    """Register a strategy under a name; the first line of its docstring describes it."""

    def register(run: _Run) -> _Run:
        about = (run.__doc__ or "").strip().partition("\n")[0]
        STRATEGIES[name] = Strategy(name, run, about, needs_scores, runs_model)
        return run

    return register


@strategy("one-shot")
def one_shot(search: Search, levels: Sequence[int]) -> Order:
    """The least important heads of the whole model go first.

    Ties go by position, so equal scores give equal plans.
    """
    units = sorted(unit for layer in search.units() for unit in layer)
    return search.order([search.step(unit) for unit in units], "one-shot")


@strategy("per-layer")
def per_layer(search: Search, levels: Sequence[int]) -> Order:
    """Every layer keeps its share of the heads; in it, the most important ones.

    The next unit goes from the layer that has lost the smallest share so far, counted to the middle of that unit
    (Sainte-Laguë's method). Largest remainders would round a single plan as well, but their plans are not nested: a
    layer's share can grow as the whole shrinks (the Alabama paradox).
    """
    queue = []
    for layer, units in zip(search.layers, search.units(), strict=True):
        gone = 0
        for unit in units:
            queue.append(((gone + len(unit.heads) / 2) / layer.num_heads, unit))
            gone += len(unit.heads)
    return search.order([search.step(unit) for _, unit in sorted(queue)], "per-layer")


@strategy("layers")
def whole_layers(search: Search, levels: Sequence[int]) -> Order:
    """Whole attention layers go, the one with the least mean score first."""
    queue = []
    for i, (layer, units) in enumerate(zip(search.layers, search.units(), strict=True)):
        heads = tuple(sorted(h for unit in units for h in unit.heads))
        if len(heads) == layer.num_heads:  # nothing in it must stay
            queue.append(Unit(sum(u.score * len(u.heads) for u in units) / len(heads), i, heads))
    return search.order([search.step(unit) for unit in sorted(queue)], "layers")
