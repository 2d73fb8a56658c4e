"""From a ledger to an estimate: every kind of work in it is measured on a few batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from headprune.estimating import rough
from headprune.estimating.ledger import CostEstimate, Ledger, Load, Rate, summed, total
from headprune.estimating.memory import memory_of
from headprune.estimating.rates import Sampler
from headprune.estimating.rehearsal import Rehearsal
from headprune.scoring.base import cost_of

_USUAL = 60  # forward passes over the scoring examples that a run takes, about, beside the scores
_REHEARSED = 10  # forward passes over a batch that are as long as a rehearsal, about


class TooShortError(Exception):
    """The work is over before it would have been estimated."""


@dataclass(frozen=True)
class Limits:
    """How much measuring may be.

    Attributes:
        batches: On how many batches.
        share: Of the work that is to come, at most; None for no limit.
        least: Seconds of work, about, below which nothing is measured.
    """

    batches: int = 4
    share: float | None = None
    least: float = 0.0

    def of(self, batches: int) -> int:
        """How many of so many batches to measure on: never more than a tenth of them, but one."""
        return max(1, min(self.batches, batches // 10))


def estimated(
    ledger: Ledger, sampler: Sampler, rehearsal: Rehearsal | None, limits: Limits, began: float, copies: int = 0
) -> CostEstimate:
    """What a ledger comes to on this device.

    Args:
        rehearsal: What noted the search, if there is one.
        began: When estimating began (`time.monotonic`).
        copies: Further models as large as this one that are held at once.

    Raises:
        TooShortError: The work is not worth an estimate (`Limits`).
    """
    rates = _rates(ledger, sampler, rehearsal)
    phases, notes = summed(ledger, rates)
    examples = Load.of(sampler.batches).examples
    per = max(1.0, examples)
    parts = memory_of(sampler, rehearsal, copies)
    phases = tuple(
        replace(
            p,
            forward=p.forward / per,
            backward=p.backward / per,
            forward_low=p.forward_low / per,
            forward_high=p.forward_high / per,
        )
        for p in phases
    )
    varies = [p.name for p in phases if p.forward_high > p.forward_low]
    if varies:
        notes = (
            *notes,
            f"How often this is done depends on what the run finds, so the passes are a range: {', '.join(varies)}.",
        )
    return CostEstimate(
        int(examples), total(phases, "forward"), total(phases, "backward"), total(phases, "forward_low"),
        total(phases, "forward_high"), total(phases, "flops"), total(phases, "seconds"), total(phases, "seconds_low"),
        total(phases, "seconds_high"), sum(parts.values()), parts, phases, len(sampler.sample),
        round(time.monotonic() - began, 2), notes,
    )  # fmt: skip


def worth_rehearsing(ledger: Ledger, sampler: Sampler, heads: int, limits: Limits) -> None:
    """Say by an error that a rehearsal would take too long itself, before it is made.

    Args:
        ledger: With the scoring.

    Raises:
        TooShortError: It would.
    """
    load = Load.of(sampler.batches)
    passes = _USUAL + rough.passes(ledger, heads) / max(1.0, load.units)
    work = sampler.pass_seconds / cost_of(sampler.sample[0]) * load.units * passes
    if work < limits.least or (limits.share is not None and limits.share * passes * len(sampler.batches) < _REHEARSED):
        raise TooShortError


def worth(ledger: Ledger, sampler: Sampler, heads: int, limits: Limits, spent: float) -> None:
    """Say by an error that measuring is not worth while, by the time of one pass.

    Args:
        spent: Seconds that estimating took so far.

    Raises:
        TooShortError: It is not.
    """
    if limits.share is None and not limits.least:
        return
    unit = sampler.pass_seconds / cost_of(sampler.sample[0])
    work = unit * rough.passes(ledger, heads)
    cost = unit * rough.once(ledger, heads) * sampler.load.units + spent
    if work < limits.least or (limits.share is not None and cost > limits.share * work):
        raise TooShortError


def _rates(ledger: Ledger, sampler: Sampler, rehearsal: Rehearsal | None) -> dict[str, Rate]:
    """Of every kind that is in the ledger; what the fits take is added to it."""
    kinds = {entry.kind for entry in ledger.entries}
    found = {rough.SECONDS: Rate(1.0, 0.0, 0.0)}
    plain = None
    if kinds & {"evaluating", "a pass"} or any(map(rough.directions_of, kinds)):
        found["evaluating"] = sampler.evaluating()
        found["a pass"] = plain = replace(found["evaluating"], fixed=0.0, forward=1.0, flops=sampler.flops_per_unit)
    if "statistics" in kinds:
        found["statistics"] = sampler.statistics()
    if "a look" in kinds:
        found["a look"] = sampler.looking()
    for kind in kinds:
        if (count := rough.directions_of(kind)) is not None and plain is not None:
            slope = sampler.slopes()
            back = max(0.3 * slope.seconds, slope.seconds - plain.seconds)
            found[kind] = Rate(
                slope.seconds + (count - 1) * back, 0.0, 1.0, float(count), (1 + count) * sampler.flops_per_unit
            )
        elif (method := rough.method_of(kind)) is not None:
            found[kind] = sampler.scoring(method)
        elif kind == "training":
            found[kind] = sampler.training()
    if rehearsal is not None and rehearsal.fits:
        half, power, again = sampler.fits()
        for phase, share, whole in rehearsal.fits:
            seconds = half * (2 * share) ** power * (1.0 if whole else again)
            ledger.add(phase, rough.SECONDS, Load(0, seconds))
        for phase, rows in rehearsal.solved:
            ledger.add(phase, rough.SECONDS, Load(0, _solving(rows) / sampler.products))
    return found


def _solving(rows: int) -> float:
    """Operations of the last step's system (`headprune.repairing.steps.logits.solved`), about: its kernel, strengths tried on a part of
    the rows, and the best one on all of them. Factorisations run at about half of the speed of products."""
    from headprune.repairing.coordinates import MOST

    tried = min(rows, 1024)
    return 1.3 * rows**2 * min(MOST, 4096) + 2 * (4 * 2.0 * tried**3 + 2.0 * rows**3)
