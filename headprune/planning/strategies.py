"""The register of strategies, their input (`Search`), and the strategies that need only scores.

The work of a search is counted before it begins, in forward passes and floating-point operations, and never timed. A
count is the same on every machine, so the same seed gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from headprune import latency
from headprune.amounts import flops
from headprune.attention import Heads, Layers
from headprune.batches import apparent_size
from headprune.errors import HeadPruneError, registered
from headprune.fingerprint import identity
from headprune.inputs import inputs_of, tensors
from headprune.losses import LossFn
from headprune.planning.order import GROUPS, SLICES, Constraints, Order, Unit, grouped, units_of, why_stay
from headprune.repairing import Calibration
from headprune.running import Progress, no_progress
from headprune.scoring.scores import HeadScores
from headprune.store import Store


@dataclass(frozen=True)
class Effort:
    """How much work a search may do.

    Attributes:
        name: As ``--effort`` takes it.
        examples: Most scoring examples per measurement of the model; None: all.
        flops: Most floating-point operations that `auto` spends on an order that measures repeatedly; None: no limit.
    """

    name: str
    examples: int | None
    flops: float | None


EFFORTS = {
    "low": Effort("low", 128, 5e13),  # at 100 GFLOPs a second 8 minutes
    "normal": Effort("normal", 512, 5e14),  # 83 minutes
    "high": Effort("high", None, None),
}


def effort_named(name: str) -> Effort:
    """An effort by its name.

    Raises:
        HeadPruneError: There is none of that name.
    """
    return registered(EFFORTS, "effort", name)


@dataclass(frozen=True)
class Work:
    """What a search costs.

    Attributes:
        passes: Forward passes over all scoring examples; a backward pass counts as two.
        flops: Floating-point operations of these.
        examples: How many scoring examples there are.
        left_out: Why this work was not done; None if it was.
    """

    passes: float
    flops: float
    examples: int
    left_out: str | None = None

    def __str__(self) -> str:
        return f"{self.passes:,.0f} forward passes over {self.examples:,} examples ({flops(self.flops, 3)})"


def flops_of_pass(model: nn.Module, batches: Sequence[Any]) -> float:
    """Floating-point operations of one forward pass over all batches, counted on the batch of median size."""
    sized = sorted(batches, key=lambda batch: sum(t.numel() for t in tensors(batch)))
    batch = sized[len(sized) // 2]
    return latency.flops(model, inputs_of(model, batch)) / apparent_size(batch) * sum(map(apparent_size, batches))


def spread(count: int, examples: int, most: int | None) -> list[int]:
    """Indices of evenly spaced batches of ``count``, so many that they hold about ``most`` of all ``examples``.

    Evenly spaced, because batches often come sorted by length.

    >>> spread(4, 128, None), spread(4, 128, 64), spread(4, 128, 1)
    ([0, 1, 2, 3], [0, 2], [0])
    """
    taken = count if most is None else min(count, max(1, math.floor(count * most / examples)))
    return [i * count // taken for i in range(taken)]


@dataclass(frozen=True)
class Search:
    """The input of every strategy.

    Attributes:
        layers: The model's attention layers.
        scores: Importance by head; None for a strategy that measures its own.
        constraints: Heads that must stay.
        kind: How heads that share key/value heads are removed: ``"groups"`` or ``"slices"`` (`units_of`).
        progress: Called as work goes on.
        model: For strategies that run it: in evaluation mode, on its device, never changed.
        batches: Labelled batches to score or to compare on (the scoring part of the data).
        calibration: Of the repair that will follow, for strategies that run the model: they measure it repaired.
        store: Keeps what strategies measure.
        effort: How much work it may do.
        loss_fn: As for `headprune.score`: for batches that are pairs ``(inputs, labels)``.
    """

    layers: Layers
    scores: HeadScores | None = None
    constraints: Constraints = field(default_factory=Constraints)
    kind: str = GROUPS
    progress: Progress = no_progress
    model: nn.Module | None = None
    batches: Sequence[Any] = ()
    calibration: Calibration | None = None
    store: Store = field(default_factory=Store)
    effort: Effort = EFFORTS["normal"]
    loss_fn: LossFn | None = None

    def units(self, scores: HeadScores | None = None) -> list[list[Unit]]:
        """The units that may be removed from every layer, lowest score first.

        Args:
            scores: By default those of the search; a strategy that scores again while it removes heads passes its own.

        Raises:
            HeadPruneError: There are no scores, or some are not finite.
        """
        scores = self.scores if scores is None else scores
        if scores is None:
            raise HeadPruneError("This strategy needs scores.", "Score the model first.")
        if not scores.flat().isfinite().all():
            raise HeadPruneError("Some scores are not finite, so heads cannot be ranked.", "Score the model again.")
        return units_of(self.layers, scores.values, self.constraints, self.kind)

    def order(self, steps: Sequence[Heads], strategy: str, *notes: str, stays: Sequence[str] = ()) -> Order:
        """The `Order` of these steps, with the search's layers, method, fingerprint and reasons why heads stay."""
        scores, heads = self.scores, {layer.name: layer.num_heads for layer in self.layers}
        model = scores.model if scores else identity(self.model) if self.model else ""
        stays = (*why_stay(self.layers, self.constraints), *stays)
        return Order(heads, tuple(steps), strategy, scores.method if scores else "", model, stays, notes)

    def step(self, *units: Unit) -> Heads:
        """A step of an order, in which these units are removed together: ``{layer_name: [head, ...]}``."""
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
        runs_model: Whether it runs the model on batches; else it ranks by scores.
    """

    name: str
    run: Callable[[Search, Sequence[int]], Order]
    about: str
    runs_model: bool


STRATEGIES: dict[str, Strategy] = {}
AUTO = "auto"
"""The default of a search. It is no strategy: it makes several orders and takes the best (`headprune.plan_search`)."""
_ABOUT = "Several orders (re-scored, compensated, one-shot and per-layer by each score); the choosing part decides which one is used."


def abouts() -> dict[str, str]:
    """One-line descriptions of `AUTO` and all strategies, by name."""
    return {AUTO: _ABOUT, **{strategy.name: strategy.about for strategy in STRATEGIES.values()}}


_Run = Callable[[Search, Sequence[int]], Order]


def strategy(name: str, *, runs_model: bool = False) -> Callable[[_Run], _Run]:
    """Register a strategy under a name; the first line of its docstring describes it."""

    def register(run: _Run) -> _Run:
        about = (run.__doc__ or "").strip().partition("\n")[0]
        STRATEGIES[name] = Strategy(name, run, about, runs_model)
        return run

    return register


@strategy("one-shot")
def one_shot(search: Search, levels: Sequence[int]) -> Order:
    """The least important heads of the whole model go first.

    Ties are broken by position, so equal scores give equal plans.
    """
    units = sorted(unit for layer in search.units() for unit in layer)
    return search.order([search.step(unit) for unit in units], "one-shot")


@strategy("per-layer")
def per_layer(search: Search, levels: Sequence[int]) -> Order:
    """Every layer keeps its share of the heads; in it, the most important ones.

    The next unit is taken from the layer that has lost the smallest share so far, counted to the middle of that unit
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


@dataclass
class SearchState:
    """The heads that a search has removed so far.

    Attributes:
        drop: ``{layer_name: [head, ...]}``.
        steps: The same, in the order of removal.
    """

    search: Search
    drop: Heads = field(default_factory=dict)
    steps: list[Heads] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(layer.num_heads for layer in self.search.layers) - sum(map(len, self.drop.values()))

    def fits(self, unit: Unit) -> bool:
        """Whether a unit is not removed yet and its layer may lose it."""
        layer = self.search.layers[unit.layer]
        gone = self.drop.get(layer.name, [])
        room = self.search.constraints.room(layer) - len(gone)
        return len(unit.heads) <= room and not set(unit.heads) & set(gone)

    def take(self, *units: Unit) -> None:
        for unit in units:
            self.steps.append(self.search.step(unit))
            self.drop = self.without(unit)

    def without(self, unit: Unit) -> Heads:
        name = self.search.layers[unit.layer].name
        return {**self.drop, name: sorted([*self.drop.get(name, []), *unit.heads])}

    def remove(self, ranked: Sequence[Unit], level: int) -> None:
        """Remove units in the given order until no more than ``level`` heads are kept."""
        for unit in ranked:
            if self.kept <= level:
                return
            if self.fits(unit):
                self.take(unit)

    def copy(self, units: Iterable[Unit] = ()) -> SearchState:
        """An independent copy with some more units removed."""
        other = SearchState(self.search, dict(self.drop), list(self.steps))
        other.take(*units)
        return other

    def units(self) -> list[Unit]:
        """The units that may still be removed: heads or key/value groups; single heads, if slices will be made."""
        candidates = []
        for i, layer in enumerate(self.search.layers):
            if self.search.kind == SLICES and layer.groups:
                protected = self.search.constraints.protected(layer)
                candidates += [Unit(0.0, i, (h,)) for group in layer.groups for h in group if h not in protected]
            else:
                candidates += [Unit(0.0, i, heads) for heads in grouped(layer, self.search.constraints)]
        return [unit for unit in candidates if self.fits(unit)]
