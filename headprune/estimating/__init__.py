"""What a computation will cost, before it begins: passes, operations, memory, and time on this device.

`rehearsal` runs the code that searches and measures, on a model that is not run, and so gets a `ledger` of what it would run. `rates`
does each kind of this work on a few batches of the user's data. `made` multiplies the two.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headprune import searching
from headprune.arguments import layers_for, listed
from headprune.attention import AttentionLayer, Heads
from headprune.budgets import Budget, budget_of
from headprune.budgets.subject import Subject
from headprune.errors import HeadPruneError
from headprune.estimating import rough
from headprune.estimating.ledger import CostEstimate, Ledger, Load, Phase
from headprune.estimating.made import Limits, TooShortError, estimated, worth, worth_rehearsing
from headprune.estimating.rates import PARTS, Sampler, traits
from headprune.estimating.rehearsal import Rehearsal
from headprune.inputs import check_weights, usable, without_labels
from headprune.loss import LossFn, inputs_of
from headprune.modules import config_kept
from headprune.planning import Constraints
from headprune.plans import Keep
from headprune.rows import is_empty
from headprune.scoring import HeadScores, Settings, maskable_of, method_named
from headprune.scoring.base import Progress

__all__ = [
    "SILENT", "CostEstimate", "Ledger", "Limits", "Load", "Phase", "Rehearsal", "Sampler", "TooShortError", "add_scoring", "bisected",
    "estimate", "estimated", "made_up_scores", "rough", "traits", "worth", "worth_rehearsing",
]  # fmt: skip


def add_scoring(
    ledger: Ledger, methods: Iterable[str], batches: Sequence[Any], settings: Settings | None = None
) -> None:
    """Note the scoring by some methods."""
    load, settings = Load.of(batches), settings or Settings()
    for name in methods:
        method_named(name)
        phase = f"scoring by {name}"
        if name == "ablation" and settings.seconds is not None and math.isfinite(settings.seconds):
            ledger.add(phase, rough.SECONDS, Load(0, settings.seconds))
            ledger.unknown.append("Ablation ends when its time is over, so its passes are not counted.")
            continue
        if name == "ablation" and (settings.examples or load.examples) < load.examples:
            ledger.add(phase, rough.scoring("gradient"), load)  # says what the examples that are left out would give
        turns = PARTS[name].turns(settings, len(batches), int(load.examples)) if name in PARTS else (1.0, 1.0, 1.0)
        ledger.add(phase, rough.scoring(name), load, *turns)


def made_up_scores(layers: Sequence[AttentionLayer], methods: Iterable[str]) -> list[HeadScores]:
    """Scores by methods that were not run."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for name in methods:
        values = {a.name: torch.rand(a.num_heads, generator=generator, dtype=torch.float64) for a in layers}
        found.append(HeadScores(name, "", values, {k: v * 0 for k, v in values.items()}, 1, tuple(layers)))
    return found


def bisected(budgets: Sequence[Budget], ledger: Ledger, total: int, orders: int, seconds: float) -> tuple[Budget, ...]:
    """The budgets, with a number of heads in the place of those that are found by pruning copies and timing or counting on them.

    One becomes half of the heads; several become different numbers, evenly spread from there up: each will have a plan of its own.

    Args:
        total: Heads there are.
        orders: For how many orders it is done.
        seconds: Of a pass over what is timed.
    """
    found = []
    unknown = [b for b in dict.fromkeys(budgets) if not b.by_metric and b.heads(total) is None]
    for budget in budgets:
        if budget not in unknown:
            found.append(budget)
            continue
        from headprune import latency

        kept = max(1, round(total * (1 - (unknown.index(budget) + 1) / (2 * len(unknown)))))
        tried = math.ceil(math.log2(max(2, total))) + 1
        once = (
            max(latency.MIN_RUNS / 2 * seconds, latency.MIN_SECONDS / 4) + latency.WARM_UP * seconds
            if budget.timed
            else 0.0
        )
        last = max(latency.MIN_RUNS * seconds, latency.MIN_SECONDS) if budget.timed else 0.0
        ledger.add(f"fitting {budget}", rough.SECONDS, Load(0, orders * 2 * (tried * once + last)), 1.0, 0.5, 1.5)
        ledger.unknown.append(
            f"How many heads meet “{budget}” is only found in the run; this estimate assumes {kept} of {total}."
        )
        found.append(budget_of(f"keep {kept}"))
    return tuple(dict.fromkeys(found))


class _Silent:
    """A listener that tells nobody."""

    def say(self, text: str) -> None:
        logging.getLogger("headprune").debug(text)

    @contextmanager
    def track(self, label: str) -> Iterator[Progress]:
        yield lambda done, total, note="": None


SILENT = _Silent()


def estimate(
    model: nn.Module,
    batches: Iterable[Any],
    keep: Keep | Sequence[Keep] = (),
    *,
    budgets: str | Budget | Sequence[str | Budget] = (),
    methods: str | Sequence[str] = (),
    choose: Iterable[Any] | None = None,
    strategy: str = searching.AUTO,
    repair: bool = True,
    protect: str | Iterable[str] = (),
    min_heads_per_layer: int = 0,
    effort: str = "normal",
    loss_fn: LossFn | None = None,
    distil: bool = False,
    layers: Sequence[AttentionLayer] | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    calibrate_on: int = 4,
) -> CostEstimate:
    """What `score`, `search` and `repair` will cost with the same arguments, before they are called.

    The search is rehearsed: its own code runs, but the model does not, and what would be run is counted. Then every kind of work is done on a few
    batches, to time it on this device. How often some of it is done depends on what is found; then there is a range.

    Args:
        model: The dense model; its mode and weights are left as they were.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``.
        keep: How many heads to keep, as for `headprune.search`. Nothing, and no ``budgets``: only ``methods`` are estimated.
        budgets: What else a plan must hold, as for `headprune.search`.
        methods: Scoring methods. By default those that `headprune.search` takes.
        choose: Other batches, that plans are compared on. By default every fourth of ``batches`` is set aside for this.
        strategy: How heads are picked, a name of `headprune.planning.STRATEGIES`.
        repair: Whether plans are made for repaired models, and each is repaired in the end.
        protect: What must stay: ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        effort: How much work the search may be: ``"low"``, ``"normal"`` or ``"high"``.
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts with labels.
        distil: Score by the divergence from the dense model's answers.
        layers: From `headprune.find_attention`, to save the trace.
        settings: Of the scoring methods.
        seed: For what is drawn.
        calibrate_on: On how many batches to measure, at most; never more than a tenth of them (one at least).

    Returns:
        A `CostEstimate`: ``.line`` for people; passes, operations, seconds, bytes, and all of these by phase.

    Raises:
        HeadPruneError: As `headprune.search`, for what can be seen before the work.
    """
    began = time.monotonic()
    check_weights(model)
    given = [usable(batch) for batch in listed(batches) if not is_empty(batch)]
    if not given:
        raise HeadPruneError("There are no examples to estimate with.", "Give batches of at least one example.")
    if calibrate_on < 1:
        raise HeadPruneError(f"Nothing can be measured on {calibrate_on} batches.", "Give calibrate_on=1 or more.")
    with config_kept(model):
        layers = layers_for(model, layers, batches=given)
    maskable = maskable_of(model, layers)
    names = [methods] if isinstance(methods, str) else list(methods)
    searches = bool(budgets) or not (isinstance(keep, list | tuple) and not keep)
    if not searches and not names:
        raise HeadPruneError("Nothing is asked for.", 'Pass keep="50%", or methods=["ablation"].')
    ledger, rehearsal = Ledger(), None
    with torch.inference_mode(False), torch.random.fork_rng(), config_kept(model):
        fitted_to = given
        if searches:
            request = searching.Request(
                searching.budgets_of(keep, budgets, maskable), strategy, Constraints.parse(protect, maskable, min_heads_per_layer),
                effort, seed,
            )  # fmt: skip
            names = names or list(request.methods)
            fitted_to, chooses = searching.parted(given, choose, True)
        add_scoring(ledger, names, fitted_to, settings)
        limits = Limits(calibrate_on)
        sampler = Sampler(
            model, layers, fitted_to, limits.of(len(fitted_to)), repair, searching.may_add_biases(strategy, model, layers), loss_fn, distil,
            settings,
        )  # fmt: skip
        if searches:
            answers, mixes = traits(model, layers, fitted_to[0]) if repair else (0, False)
            rehearsal = Rehearsal(
                model, layers, fitted_to, chooses, repair=repair, loss_fn=loss_fn, biases=sampler.biases, ledger=ledger,
                answers=answers, mixes=mixes,
            )  # fmt: skip
            orders = len(request.searches(made_up_scores(maskable, names)))
            own = bisected(request.budgets, ledger, sum(a.num_heads for a in maskable), orders, sampler.pass_seconds)
            plans = _searched(replace(request, budgets=own), names, rehearsal, given[0])
            for drop in plans if repair else ():  # `headprune.repair` measures the dense model anew
                own_repair = rehearsal.anew()
                with own_repair.repaired(drop, whole=True):
                    rehearsal.fits += own_repair.fits
                    rehearsal.solved += own_repair.solved
        return estimated(ledger, sampler, rehearsal, limits, began)


def _searched(request: searching.Request, names: Sequence[str], rehearsal: Rehearsal, example: Any) -> list[Heads]:
    """`headprune.search`, rehearsed; the plans that it made up."""
    scores = made_up_scores(rehearsal.maskable, names)
    orders = searching.orders_of(request, scores, rehearsal, SILENT)
    inputs = without_labels(rehearsal.model, inputs_of(rehearsal.model, example))
    subject = Subject(rehearsal.model, rehearsal.layers, inputs, inputs, change=rehearsal.change_at)
    fits = searching.fits_of(request, orders, rehearsal, SILENT, lambda budget: subject)
    return list({str(f.plan.drop): f.plan.drop for f in fits}.values())
