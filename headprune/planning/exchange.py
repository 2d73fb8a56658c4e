"""Heads that go exchanged for heads that stay, as long as the model's answers then stay nearer to the dense one's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.fidelity import Fidelity
from headprune.gates import mask
from headprune.loss import batch_size, rows_of
from headprune.planning.effects import effects
from headprune.planning.order import Order
from headprune.planning.state import State
from headprune.planning.strategies import Search
from headprune.planning.units import Unit
from headprune.repair import FOLDS, Refit, Weights

_CANDIDATES = 12  # those next to go; those that went last; those that went and matter most to the dense model
_BEST = 8  # of either side, that are looked at more closely
_TRIED, _TRIED_EACH, _PROVED = (
    16,
    4,
    4,
)  # exchanges that are tried in a round; those of one unit; those tried on all examples
_ROUNDS = 2
_SOME = 4  # of so many batches one is looked at first
_SURE = 0.5  # standard errors by which an exchange must be better


def exchanged(search: Search, order: Order, levels: Sequence[int]) -> Order | None:
    """An order whose plans at some levels are another's with heads exchanged.

    At each level, largest first, units that go at it change places with units that stay: those next to go with those that
    went last, or that mattered most at first. What an exchange is worth is measured: the divergence from the dense model's
    answers on each half of the scoring examples, of the model repaired on the other half. (On what it was repaired on, the
    repair of more heads looks better than it is.) Candidates are tried alone, on ever more examples; then the exchanges that
    should gain most by the sum, on some; then the best of these on all. So nothing comes out that is not better, as far as
    the scoring examples tell.

    Args:
        search: With a refit.
        order: One unit at a step.
        levels: Numbers of kept heads.

    Returns:
        None where there is no such level, a step is no unit, or the dense model's answers are too many to keep.
    """
    units = [_unit(search, step) for step in order.steps]
    levels = sorted({k for k in levels if order.least <= k < order.total}, reverse=True)
    if search.refit is None or not levels or any(unit is None for unit in units):
        return None
    halves = Halves(search.refit)
    if not halves.known:
        return None
    protected = {i: search.constraints.protected(layer) for i, layer in enumerate(search.layers)}
    left = [unit for unit in units if unit and not protected[unit.layer] & set(unit.heads)]
    state, before = State(search), search.refit.passes
    every = state.units()
    found = effects(search.refit, search.layers, {}, every)  # a search's first look, as a rule: known
    matters = dict(zip(every, found.abs().mean(0).tolist(), strict=True))
    for i, level in enumerate(levels):
        gone = _next(state, left, level)
        stay = [unit for unit in left if unit not in gone]
        gone, left = _Exchange(halves, state, gone, stay, matters).run()
        state.take(*gone)
        search.progress(i + 1, len(levels))
    state.remove(left, 0)
    cost = f"Exchanging heads took about {search.refit.passes - before:.0f} forward passes over {search.refit.examples:,} examples."
    return search.order(state.steps, "exchanged", *order.notes, cost)


def _unit(search: Search, step: Heads) -> Unit | None:
    """A step of one layer."""
    if len(step) != 1:
        return None
    ((name, heads),) = step.items()
    return Unit(0.0, next(i for i, layer in enumerate(search.layers) if layer.name == name), tuple(heads))


def _next(state: State, units: Sequence[Unit], level: int) -> list[Unit]:
    """The units that go until no more than ``level`` heads are kept."""
    trial, found = state.copy(), []
    for unit in units:
        if trial.kept <= level:
            break
        if trial.fits(unit):
            trial.take(unit)
            found.append(unit)
    return found


class Halves:
    """Divergences from the dense model's answers, each half of the examples judging repairs by the other.

    Args:
        refit: Its model must be the dense one now.

    Attributes:
        known: Whether there are such answers, and examples enough.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit = refit
        self._of: list[Fidelity] = []
        for fold in range(FOLDS if refit.examples >= 2 * FOLDS else 0):
            batches = []
            for index, batch in enumerate(refit.batches):
                start = refit.runner.first(index)
                if rows := [i for i in range(batch_size(batch)) if (start + i) % FOLDS == fold]:
                    batches.append(rows_of(batch, rows))
            self._of.append(Fidelity(refit.model, batches))
        self.known = bool(self._of) and all(fidelity.known for fidelity in self._of)

    def divergences(self, drop: Heads, like: Weights, every: int = 1) -> Tensor:
        """Without the heads in ``drop``, ``[examples]``, those of the first half first.

        Args:
            like: Repairs of much the same heads (`Refit.fitted_to`).
            every: Of so many batches one is looked at.
        """
        refit, found = self.refit, []
        for fold, fidelity in enumerate(self._of):
            weights = refit.fitted_to(1 - fold, drop, like)
            with refit.applied(weights), mask(refit.model, drop, layers=refit.layers):
                found.append(fidelity.divergences(every))
        refit.runner.passes += 1 / every
        return torch.cat(found)


class _Exchange:
    """At one level.

    Args:
        base: What has gone before, and is not touched.
        gone: What goes, in its order.
        stay: What would go next, in its order.
        matters: How much the dense model's answers change without a unit.
    """

    def __init__(
        self, halves: Halves, base: State, gone: Sequence[Unit], stay: Sequence[Unit], matters: Mapping[Unit, float]
    ) -> None:
        self.halves, self.base, self.matters = halves, base, matters
        self.gone, self.stay = list(gone), list(stay)
        self.like = halves.refit.fitted(self._drop(gone))
        self.now, self._some = self._divergences(gone), self._divergences(gone, _SOME)

    def run(self) -> tuple[list[Unit], list[Unit]]:
        """What goes and what stays after the exchanges."""
        last = self.gone[::-1][:_CANDIDATES]
        most = sorted(self.gone, key=lambda unit: -self.matters.get(unit, 0.0))[:_CANDIDATES]
        # A glance tells most of the many candidates.
        glance = self._alone(dict.fromkeys([*self.stay[:_CANDIDATES], *last, *most]), 2 * _SOME)
        ranked = sorted(glance, key=lambda unit: glance[unit])
        near = [unit for side in (self.stay, self.gone) for unit in [u for u in ranked if u in side][:_BEST]]
        for _ in range(_ROUNDS):
            worth = self._alone(near, _SOME)
            outs, backs = ([u for u in near if u in side] for side in (self.stay, self.gone))
            pairs = [(worth[o] + worth[b], o, b) for o in outs for b in backs if len(o.heads) == len(b.heads)]
            if not self._exchange([(out, back) for _, out, back in sorted(pairs)]):
                break
        return self.gone, self.stay

    def _alone(self, units: Iterable[Unit], every: int) -> dict[Unit, float]:
        """How much farther away the answers are with a unit on the other side, on one of so many batches."""
        now = self._some if every == _SOME else self._divergences(self.gone, every)
        return {unit: float((self._divergences(self._moved(unit), every) - now).mean()) for unit in units}

    def _exchange(self, pairs: Sequence[tuple[Unit, Unit]]) -> bool:
        """Make those exchanges that prove better; whether there was one.

        What both units do alone says little of what they do together, and some examples little of all of them: so many are
        tried on some, of those the best on all, and the best of these is made; then the others, as far as they still help.
        """
        tries: Counter[Unit] = Counter()
        tried: list[tuple[float, Unit, Unit]] = []
        for out, back in pairs:
            if len(tried) == _TRIED:
                break
            if max(tries[out], tries[back]) < _TRIED_EACH and self._fits(trial := self._with(out, back)):
                tries.update((out, back))
                tried.append((float((self._divergences(trial, _SOME) - self._some).mean()), out, back))
        best = [(out, back) for worth, out, back in sorted(tried)[:_PROVED] if worth < 0]
        found = {pair: self._divergences(self._with(*pair)) for pair in best}
        changed: set[Unit] = set()
        for out, back in sorted(best, key=lambda pair: float(found[pair].mean())):
            if {out, back} & changed or not self._fits(trial := self._with(out, back)):
                continue
            then = self._divergences(trial) if changed else found[out, back]
            gain = self.now - then
            if float(gain.mean()) > _SURE * float(gain.std()) / math.sqrt(len(gain)):
                self.now, self.gone = then, trial
                self.stay = [*(unit for unit in self.stay if unit != out), back]
                changed |= {out, back}
        if changed:
            self._some = self._divergences(self.gone, _SOME)
        return bool(changed)

    def _with(self, out: Unit, back: Unit) -> list[Unit]:
        """What goes after an exchange."""
        return [*(unit for unit in self.gone if unit != back), out]

    def _moved(self, unit: Unit) -> list[Unit]:
        """What goes if a unit is on the other side."""
        return [u for u in self.gone if u != unit] if unit in self.gone else [*self.gone, unit]

    def _fits(self, gone: Sequence[Unit]) -> bool:
        """Whether all that may go at once."""
        state = self.base.copy()
        for unit in gone:
            if not state.fits(unit):
                return False
            state.take(unit)
        return True

    def _drop(self, gone: Sequence[Unit]) -> Heads:
        return self.base.copy(gone).drop

    def _divergences(self, gone: Sequence[Unit], every: int = 1) -> Tensor:
        """``[examples]``, of one of so many batches."""
        return self.halves.divergences(self._drop(gone), self.like, every)
