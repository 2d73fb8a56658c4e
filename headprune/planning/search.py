"""Strategies that run the model, or weigh pairs of heads, while they remove heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.batches import apparent_size
from headprune.errors import HeadPruneError
from headprune.losses import ExampleLoss
from headprune.planning.effects import effects
from headprune.planning.order import GROUPS, SLICES, Order, Unit, has_groups, sliced
from headprune.planning.strategies import Search, SearchState, Work, flops_of_pass, spread, strategy
from headprune.repairing import Calibration, fit_layers
from headprune.repairing.runner import Runner

_LOOKING = ("re-scored", "compensated", "greedy")  # strategies that run the model
_SHARE = 1 / 6  # of the kept heads: when so many are removed, effects are measured again
_TRIED, _TRIED_EXAMPLES = 6, 256  # units that greedy tries before it removes one, and the examples it tries them on


@strategy("re-scored", runs_model=True)
def rescored(search: Search, levels: Sequence[int]) -> Order:
    """In steps; those heads go next whose removal, with the others refitted, changes the model's answers least.

    The measure is the mean over examples of `effects`' absolute values, measured again at every level and whenever a sixth
    of the kept heads is removed.
    """
    return _in_steps(search, "re-scored", stages(SearchState(search).kept, levels))


@strategy("compensated", runs_model=True)
def compensated(search: Search, levels: Sequence[int]) -> Order:
    """At once; those heads go first whose removal, with the others refitted, changes the model's answers least.

    Uses the first measurement of `re-scored` for all budgets, at a fraction of the cost. It does better where many
    heads of small effect are removed: their interactions then matter less than the errors of `effects` far from the
    dense model.
    """
    return _in_steps(search, "compensated", [])


@strategy("greedy", runs_model=True)
def greedy(search: Search, levels: Sequence[int]) -> Order:
    """One by one; of the heads that `re-scored` would take next, the one without which the true loss is least.

    The loss is the model's own on some scoring examples, with the head masked and W_O refitted.
    """
    calibration = _calibration_of(search)
    runner, losses = calibration.runner, ExampleLoss(calibration.model, search.loss_fn)
    with runner.deterministic_eval():
        batches = losses.prepare(runner.batches)
    examples = [batches[i] for i in spread(len(batches), runner.examples, _TRIED_EXAMPLES)]

    def losses_of(batch: Any) -> Tensor:
        return losses(batch).cpu()

    def loss(drop: Heads) -> float:
        weights = fit_layers(calibration, drop)
        runner.count(sum(map(losses.rows.size, examples)))
        with torch.no_grad(), calibration.applied(weights.by_module, drop), runner.deterministic_eval():
            each = torch.cat(runner.share("losses", [partial(losses_of, batch) for batch in examples], examples))
        mean = float(each.double().mean())
        return math.inf if math.isnan(mean) else mean  # `min` may keep NaN

    def take_best(state: SearchState, ranked: Sequence[Unit], level: int) -> None:
        while state.kept > level and (able := [unit for unit in ranked if state.fits(unit)]):
            state.take(min(able[:_TRIED], key=lambda unit: loss(state.without(unit))))

    return _in_steps(search, "greedy", stages(SearchState(search).kept, levels), take_best)


def _in_steps(
    search: Search,
    strategy: str,
    looks: Sequence[int],
    remove: Callable[[SearchState, Sequence[Unit], int], None] = SearchState.remove,
) -> Order:
    """An order by effects, which are measured anew before heads are removed down to each number in ``looks``.

    Args:
        remove: Removes ranked units until no more than a number of heads are kept. After ``looks``, the remaining units
            follow in their last ranking, for later budgets.
    """
    calibration, state = _calibration_of(search), SearchState(search)
    runner, passes = calibration.runner, calibration.statistics.passes
    for i, level in enumerate(looks or [state.kept]):
        ranked, took = _ranked(calibration, state)
        before = runner.passes
        remove(state, ranked, level)
        passes += took + runner.passes - before
        search.progress(i + 1, max(1, len(looks)))
    state.remove(ranked, 0)
    note = f"This order took about {passes:.0f} forward passes over {runner.examples:,} examples."
    return search.order(state.steps, strategy, note)


@strategy("swap")
def swap(search: Search, levels: Sequence[int]) -> Order:
    """By pairs of heads: what the Fisher matrix says is least, found greedily and then by swaps.

    Kwon et al. (2022, arXiv:2204.09656, section 4.2), with the matrix over all of the model's heads instead of each
    layer's: the expected added loss of removing a set S is half the sum of the matrix over S x S. At every level, a
    head that was just removed is exchanged for a kept one, as long as that lowers the sum.
    """
    scores = search.scores
    if scores is None or scores.matrix is None:
        name = scores.method if scores else "none"
        raise HeadPruneError(f"The scores by {name} do not weigh pairs of heads.", "Score with --method fisher.")
    state = SearchState(search)
    starts = accumulate((layer.num_heads for layer in scores.layers), initial=0)
    first = {layer.name: start for layer, start in zip(scores.layers, starts, strict=False)}
    offsets = [first[layer.name] for layer in search.layers]  # which may be fewer
    for level in sorted({k for k in levels if k < state.kept}, reverse=True):
        units = [unit for layer in search.units() for unit in layer if state.fits(unit)]
        rows = torch.zeros(len(units) + 1, scores.matrix.shape[0], dtype=torch.float64)
        for i, unit in enumerate(units):
            rows[i, [offsets[unit.layer] + h for h in unit.heads]] = 1.0
        for i, layer in enumerate(search.layers):
            rows[-1, [offsets[i] + h for h in state.drop.get(layer.name, ())]] = 1.0
        pairs = rows @ scores.matrix @ rows.T
        state.take(*_least(units, pairs, state, level))
    state.remove(sorted(u for layer in search.units() for u in layer if state.fits(u)), 0)
    return search.order(state.steps, "swap")


def _least(units: Sequence[Unit], pairs: Tensor, state: SearchState, level: int) -> list[Unit]:
    """Units of least quadratic cost to remove down to ``level``: chosen greedily, then improved by swaps.

    Args:
        pairs: ``[units + 1, units + 1]``; the last row and column are of all heads removed already.
    """
    chosen: list[int] = []

    def gain(i: int, others: Sequence[int]) -> float:
        return float(pairs[i, i] + 2 * pairs[i, [*others, -1]].sum())

    while (trial := state.copy(units[i] for i in chosen)).kept > level:
        able = [i for i in range(len(units)) if i not in chosen and trial.fits(units[i])]
        if not able:
            break
        chosen.append(min(able, key=lambda i: (gain(i, chosen), i)))
    while True:
        exchanges: list[tuple[float, int, int]] = []
        for place, out in enumerate(chosen):
            others = [i for i in chosen if i != out]
            trial, now = state.copy(units[i] for i in others), gain(out, others)
            fitting = (i for i in range(len(units)) if i not in chosen and trial.fits(units[i]))
            alike = [i for i in fitting if len(units[i].heads) == len(units[out].heads)]
            exchanges += [(gain(i, others) - now, place, i) for i in alike]
        change, place, i = min(exchanges, default=(0.0, 0, 0))
        if change >= -1e-12:
            return [units[i] for i in chosen]
        chosen[place] = i


def _ranked(calibration: Calibration, state: SearchState) -> tuple[list[Unit], float]:
    """All units that may be removed, least effect first, and the forward passes that measuring takes.

    Measurements are stored: an interrupted search resumes there, and orders with the same start measure it once.
    """
    search, runner = state.search, calibration.runner
    # While no head is removed, both kinds of orders are at the same place, so one measurement serves both.
    kinds = (GROUPS, SLICES) if has_groups(search.layers) and not state.steps else (search.kind,)
    of_kinds = {kind: replace(state, search=replace(search, kind=kind)).units() for kind in kinds}
    units = of_kinds[search.kind]
    if not units:
        return [], 0.0

    def measured() -> tuple[dict[str, Tensor], float]:
        before, every = runner.passes, [unit for own in of_kinds.values() for unit in own]
        changes = effects(calibration, search.layers, state.drop, every, search.effort.examples)
        parts = torch.split(changes, [len(own) for own in of_kinds.values()], dim=1)
        return dict(zip(of_kinds, parts, strict=True)), runner.passes - before

    of_kind, passes = search.store.get(f"effects by {' and '.join(kinds)}, {sorted(state.drop.items())}", measured)
    changes = of_kind[search.kind]
    if search.kind == SLICES:
        units, changes = _in_slices(search, units, changes)
    sizes = changes.abs().mean(0).tolist()
    # Units may differ in size, so their effect counts per head.
    ranked = sorted(unit._replace(score=size / len(unit.heads)) for unit, size in zip(units, sizes, strict=True))
    return ranked, passes


def _in_slices(search: Search, units: Sequence[Unit], changes: Tensor) -> tuple[list[Unit], Tensor]:
    """Join single heads into slices (one of every group, least effects first); heads without groups stay single."""
    sizes = changes.abs().mean(0).tolist()
    slices: list[Unit] = []
    columns: list[Tensor] = []
    for i, layer in enumerate(search.layers):
        own = {unit.heads[0]: n for n, unit in enumerate(units) if unit.layer == i}
        rows = sliced(layer, {h: sizes[n] for h, n in own.items()}) if layer.groups else [(h,) for h in own]
        slices += [Unit(0.0, i, heads) for heads in rows]
        columns += [changes[:, [own[h] for h in heads]].sum(1) for heads in rows]
    return slices, torch.stack(columns, dim=1) if columns else changes[:, :0]


def stages(total: int, levels: Sequence[int]) -> list[int]:
    """Numbers of kept heads at which effects are measured again: the levels, largest first, and some in between."""
    numbers: list[int] = []
    at = total
    for level in sorted({k for k in levels if k < total}, reverse=True):
        while at - level > max(1, int(at * _SHARE)):
            at -= max(1, int(at * _SHARE))
            numbers.append(at)
        at = level
        numbers.append(at)
    return numbers


def work_of(search: Search, strategy: str, levels: Sequence[int], times: int = 1) -> Work:
    """Passes and FLOPs that making an order takes, with the dense model's statistics; 0 if it needs only scores.

    They are counted before anything is measured. Solving for weights is not counted.

    Args:
        times: How many orders are made: one for each of the kinds (groups, slices).
    """
    calibration = search.calibration
    if strategy not in _LOOKING or calibration is None:
        return Work(0.0, 0.0, sum(map(apparent_size, search.batches)))
    runner = calibration.runner
    start = SearchState(search).kept
    looks = 1 if strategy == "compensated" else max(1, len(stages(start, levels)))
    # A measurement is a forward and a backward pass, which counts as two; and one more if values are refitted.
    look = (3 + bool(calibration.values)) * _share(runner, search.effort.examples)
    passes = (looks - 1) * look
    if strategy == "greedy":
        passes += _TRIED * (start - min(levels, default=start)) * _share(runner, _TRIED_EXAMPLES)
    passes = calibration.cost + look + times * passes  # the first look serves all orders
    return Work(passes, passes * flops_of_pass(runner.model, runner.batches), runner.examples)


def _share(runner: Runner, examples: int | None) -> float:
    """The share of the scoring examples that a measurement uses."""
    chosen = spread(len(runner.batches), runner.examples, examples)
    return sum(runner.rows.size(runner.batches[i]) for i in chosen) / runner.examples


def _calibration_of(search: Search) -> Calibration:
    """The search's calibration, measured, so that passes are counted from here on."""
    if search.calibration is None:
        raise HeadPruneError("This strategy runs the model, but got none.", "Give Search a calibration.")
    _ = search.calibration.statistics
    return search.calibration
