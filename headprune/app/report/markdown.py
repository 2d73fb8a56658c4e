"""Fills the report's template. Every figure in it comes from the run folder's documents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jinja2

from headprune.app.documents import Metrics, Run
from headprune.app.report import findings, numbers
from headprune.latency import WARM_UP
from headprune.scoring import METHODS
from headprune.scoring.agreement import agreements, chance
from headprune.scoring.base import HeadScores


def render(run: Run, scores: Sequence[HeadScores], metrics: Metrics | None) -> str:
    """The whole report.

    Args:
        run: The run's ``run.json``.
        scores: Of every method, or none for a plan of the user's.
        metrics: The run's ``metrics.json``; None where nothing was pruned.
    """
    values: dict[str, Any] = {"run": run, "scores": scores, "metrics": metrics, "pairs": agreements(scores)}
    values["rankings"] = [findings.ranking(s) for s in scores if s.method != "random"]
    if metrics is not None:
        values |= _of_metrics(metrics)
    return _environment().get_template("report.md.j2").render(values)


def _of_metrics(metrics: Metrics) -> dict[str, Any]:
    """What several sections need."""
    budgets = findings.largest_first(metrics)
    repairs = [b.repair for b in metrics.budgets if b.repair]
    return {
        "metric": metrics.metric, "dense": metrics.dense, "budgets": budgets, "repairs": repairs,
        "tunings": [b.finetune for b in metrics.budgets if b.finetune],
        "stepped": any(r.answers for r in repairs), "alone": any(r.layers_alone for r in repairs),
    }  # fmt: skip


@functools.cache
def _environment() -> jinja2.Environment:
    """The template's filters and functions; what a document lacks is an error and never an empty place."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("headprune.app.report", "."), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= {
        f.__name__: f for f in (
            numbers.value, numbers.change, numbers.ratio, numbers.shape, numbers.flops, numbers.measured, numbers.ridge,
            numbers.rank, numbers.known, numbers.with_error, numbers.device, numbers.cache, numbers.joules,
        )
    } | {"fmt": format, "thousands": lambda number: f"{number:,}"}  # fmt: skip
    made.globals |= {
        f.__name__: f for f in (
            findings.chosen_by, findings.speed, findings.trained_on_choosing, findings.rests_on_few, findings.trade_off,
            findings.changed_weights, findings.refit, findings.shared_notes, findings.notes_in_common, findings.limits_metric, findings.fewest_rounds,
            findings.closest_first, findings.where_time_goes, chance,
        )
    } | {"about": _about, "WARM_UP": WARM_UP}  # fmt: skip
    return made


def _about(method: str) -> str:
    return METHODS[method].about if method in METHODS else "a method of the user's."
