"""Strategies that look at the model, or at pairs of heads, while heads go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headprune.attention import Heads
from headprune.batches import apparent_size
from headprune.errors import HeadPruneError
from headprune.gates import mask
from headprune.losses import ExampleLoss
from headprune.planning.effects import effects
from headprune.planning.order import SLICES, Order, Unit
from headprune.planning.strategies import Search, SearchState, Work, flops_of_pass, spread, strategy
from headprune.repairing import Calibration, calibrate, fit_layers
from headprune.repairing.runner import Runner

_LOOKING = ("re-scored", "compensated", "greedy")  # strategies that look at the model
_SHARE = 1 / 6  # of the kept heads that go before they are looked at again
_TRIED, _TRIED_EXAMPLES = 6, 256  # units that greedy tries before one goes, and the examples it tries them on


@strategy("re-scored", needs_scores=False, runs_model=True)
def rescored(search: Search, levels: Sequence[int]) -> Order:
    """In steps; those heads go next whose removal, with the others refitted, changes the model's answers least.

    The measure is the mean over examples of `effects`' absolute values, measured again at every level and whenever a sixth
    of the heads has gone.
    """
    calibration, state = _calibration_of(search), SearchState(search)
    before = calibration.runner.passes
    looks = stages(state.kept, levels)
    ranked = [] if looks else _ranked(calibration, state)
    for i, level in enumerate(looks):
        ranked = _ranked(calibration, state)
        state.remove(ranked, level)
        search.progress(i + 1, len(looks))
    state.remove(ranked, 0)  # the rest in the last order, for budgets that no one has asked for yet
    return search.order(state.steps, "re-scored", _cost(search, calibration, before))


@strategy("compensated", needs_scores=False, runs_model=True)
def compensated(search: Search, levels: Sequence[int]) -> Order:
    """At once; those heads go first whose removal, with the others refitted, changes the model's answers least.

    The first look of `re-scored`, for all budgets. It costs a fraction, and is better where so many heads of small effect
    go that their effects on one another matter less than what `effects` does not see of a model far from the dense one.
    """
    calibration, state = _calibration_of(search), SearchState(search)
    before = calibration.runner.passes
    state.remove(_ranked(calibration, state), 0)
    return search.order(state.steps, "compensated", _cost(search, calibration, before))


@strategy("auto", needs_scores=False, runs_model=True)
def auto(search: Search, levels: Sequence[int]) -> Order:
    """Several orders (re-scored, compensated, one-shot by each score); the choosing part decides which one is used.

    So it is no order of its own: `headprune.plan_search` makes those orders and compares them. See docs/benchmarks.md, Quality by
    heads kept.

    Raises:
        HeadPruneError: Always.
    """
    raise HeadPruneError(
        "auto makes several orders and compares them, which one order's search cannot.",
        "Use headprune.search, or a single strategy such as re-scored.",
    )


@strategy("greedy", needs_scores=False, runs_model=True)
def greedy(search: Search, levels: Sequence[int]) -> Order:
    """One by one; of the heads that `re-scored` would take next, the one without which the true loss is least.

    The loss is the model's own on some scoring examples, the head masked and W_O refitted.
    """
    calibration, state = _calibration_of(search), SearchState(search)
    runner, before = calibration.runner, calibration.runner.passes
    looks = stages(state.kept, levels)
    losses = ExampleLoss(calibration.model, search.loss_fn)
    with runner.deterministic_eval():
        batches = losses.prepare(runner.batches)
    examples = [batches[i] for i in spread(len(batches), runner.examples, _TRIED_EXAMPLES)]
    tries = 0

    def losses_of(batch: Any) -> Tensor:
        return losses(batch).cpu()

    def loss(drop: Heads) -> float:
        nonlocal tries
        tries += 1
        weights = fit_layers(calibration, drop)
        with (
            torch.no_grad(),
            calibration.applied(weights.by_module),
            runner.deterministic_eval(),
            mask(calibration.model, drop, layers=calibration.layers),
        ):
            each = torch.cat(runner.share("losses", [partial(losses_of, batch) for batch in examples], examples))
        return float(each.double().mean())

    ranked = [] if looks else _ranked(calibration, state)
    for i, level in enumerate(looks):
        ranked = _ranked(calibration, state)
        while state.kept > level and (able := [u for u in ranked if state.fits(u)]):
            tried = able[:_TRIED]
            best = min(tried, key=lambda u: loss(state.without(u)))
            state.take(best)
            ranked = [u for u in ranked if u.heads != best.heads or u.layer != best.layer]
        search.progress(i + 1, len(looks))
    state.remove(ranked, 0)
    runner.count(tries * sum(map(losses.rows.size, examples)))
    return search.order(state.steps, "greedy", _cost(search, calibration, before))


@strategy("swap")
def swap(search: Search, levels: Sequence[int]) -> Order:
    """By pairs of heads: what the Fisher matrix says is least, found greedily and then by swaps.

    Kwon et al. (2022, arXiv:2204.09656, section 4.2), with the matrix over all of the model's heads instead of each
    layer's: the loss expected to be added when a set S goes is half the sum of the matrix over S x S. At every level a head
    of those that have just gone is exchanged for one that stays, as long as that lowers the sum.
    """
    scores = search.scores
    if scores is None or scores.matrix is None:
        name = scores.method if scores else "none"
        raise HeadPruneError(f"The scores by {name} do not weigh pairs of heads.", "Score with --method fisher.")
    state = SearchState(search)
    offsets = torch.tensor([0, *(layer.num_heads for layer in search.layers)]).cumsum(0).tolist()
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
    """Units of the least quadratic cost, in the order in which they were found.

    Args:
        pairs: ``[units + 1, units + 1]``; the last is what is gone already.
    """
    chosen: list[int] = []

    def gain(i: int, others: Sequence[int]) -> float:
        return float(pairs[i, i] + 2 * pairs[i, [*others, -1]].sum())

    while True:
        trial = state.copy(units[i] for i in chosen)
        if trial.kept <= level:
            break
        able = [i for i in range(len(units)) if i not in chosen and trial.fits(units[i])]
        if not able:
            break
        chosen.append(min(able, key=lambda i: (gain(i, chosen), i)))
    while True:
        best: tuple[float, int, int] | None = None
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            now, size = gain(chosen[place], others), len(units[chosen[place]].heads)
            trial = state.copy(units[i] for i in others)
            for i in range(len(units)):
                if i not in chosen and len(units[i].heads) == size and trial.fits(units[i]):
                    change = gain(i, others) - now
                    if change < -1e-12 and (best is None or change < best[0]):
                        best = change, place, i
        if best is None:
            return [units[i] for i in chosen]
        chosen[best[1]] = best[2]


def _ranked(calibration: Calibration, state: SearchState) -> list[Unit]:
    """All units that may go, those with the least effect first."""
    search, units = state.search, state.units()
    if not units:
        return []
    if (look := search.dense_looks.get(search.kind)) and not state.drop:
        changes, _ = look
    else:
        changes = effects(calibration, search.layers, state.drop, units, search.effort.examples, search.store)
    if search.kind == SLICES:
        units, changes = _sliced(search, units, changes)
    sizes = changes.abs().mean(0).tolist()
    # What a unit costs counts by head, where units are of different size.
    return sorted(unit._replace(score=size / len(unit.heads)) for unit, size in zip(units, sizes, strict=True))


def _sliced(search: Search, units: Sequence[Unit], changes: Tensor) -> tuple[list[Unit], Tensor]:
    """A head of every group, those with the least effect of each group together."""
    sizes = changes.abs().mean(0).tolist()
    at = {(u.layer, u.heads[0]): n for n, u in enumerate(units) if len(u.heads) == 1}
    slices: list[Unit] = []
    columns: list[Tensor] = []
    for i, layer in enumerate(search.layers):
        if not layer.groups:
            those = [n for n, u in enumerate(units) if u.layer == i]
            slices += [units[n] for n in those]
            columns += [changes[:, n] for n in those]
            continue
        queues = [
            sorted((at[i, h] for h in group if (i, h) in at), key=lambda n: (sizes[n], n)) for group in layer.groups
        ]
        for row in zip(*queues, strict=False):
            slices.append(Unit(0.0, i, tuple(sorted(units[n].heads[0] for n in row))))
            columns.append(changes[:, list(row)].sum(1))
    return slices, torch.stack(columns, dim=1) if columns else changes[:, :0]


def stages(total: int, levels: Sequence[int]) -> list[int]:
    """Numbers of kept heads at which the model is looked at again: the levels, largest first, and others between."""
    numbers: list[int] = []
    at = total
    for level in sorted({k for k in levels if k < total}, reverse=True):
        while at - level > max(1, int(at * _SHARE)):
            at -= max(1, int(at * _SHARE))
            numbers.append(at)
        at = level
        numbers.append(at)
    return numbers


def dense_looks(search: Search, kinds: Sequence[str]) -> dict[str, tuple[Tensor, float]]:
    """The look at the dense model that every search begins with, made once for several: for every kind in which heads go."""
    calibration, looks = _calibration_of(search), {}
    for kind in kinds:
        before = calibration.runner.passes
        units = SearchState(replace(search, kind=kind)).units()
        if units:
            each = effects(calibration, search.layers, {}, units, search.effort.examples, search.store)
            looks[kind] = each, calibration.runner.passes - before
    return looks


def work_of(
    search: Search, calibrated: Callable[[], Calibration], strategy: str, levels: Sequence[int], times: int = 1
) -> Work:
    """The passes and operations that making an order takes, with measuring the dense model; none, if it needs only scores.

    Counted before anything is measured; solving for weights is not counted.

    Args:
        calibrated: Gives what will be measured, for a strategy that looks at the model.
        times: How often it is made: for every kind in which heads go.
    """
    if strategy not in _LOOKING:
        return Work(0.0, 0.0, sum(map(apparent_size, search.batches)))
    calibration = calibrated()
    runner = calibration.runner
    start = SearchState(search).kept
    looks = 1 if strategy == "compensated" else max(1, len(stages(start, levels)))
    # A look is a forward and a backward pass, which counts as two; and one more for what heads could read instead.
    passes = looks * (3 + bool(calibration.values)) * _share(runner, search.effort.examples)
    if strategy == "greedy":
        passes += _TRIED * (start - min(levels, default=start)) * _share(runner, _TRIED_EXAMPLES)
    passes = calibration.cost + times * passes
    return Work(passes, passes * flops_of_pass(runner.model, runner.batches), runner.examples)


def _share(runner: Runner, examples: int | None) -> float:
    """Of the scoring examples that are looked at."""
    chosen = spread(len(runner.batches), runner.examples, examples)
    return sum(runner.rows.size(runner.batches[i]) for i in chosen) / runner.examples


def _calibration_of(search: Search) -> Calibration:
    """The dense model as the repair that will follow sees it; where none will, the same model with its old weights. Measured."""
    calibration = search.calibration
    if calibration is None:
        if search.model is None or not search.batches:
            raise HeadPruneError("This strategy runs the model, but got none.", "Give Search a model and batches.")
        calibration = calibrate(search.model, search.layers, search.batches, repair=False)
    assert calibration.statistics is not None  # measured before passes are counted
    return calibration


def _cost(search: Search, calibration: Calibration, before: float) -> str:
    """A note on the passes of a search, of which there were ``before`` when it began."""
    runner, look = calibration.runner, search.dense_looks.get(search.kind)
    passes = calibration.statistics.passes + runner.passes - before + (look[1] if look else 0)
    return f"This order took about {passes:.0f} forward passes over {runner.examples:,} examples."
