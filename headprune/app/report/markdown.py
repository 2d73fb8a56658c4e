"""Fills the report's template. Every figure in it comes from the run folder's documents."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from typing import Any

import jinja2

from headprune.amounts import head_count, visible
from headprune.app.documents import BudgetResult, Heads, Metrics, Run
from headprune.app.report import busy, findings, numbers, sentences
from headprune.app.report import heads as seen
from headprune.app.report.usage import usage
from headprune.app.report.verdict import verdict
from headprune.checkpoint import code
from headprune.latency import WARM_UP
from headprune.repairing.steps import STEPS
from headprune.scoring.agreement import agreements, chance
from headprune.scoring.scores import HeadScores


def render(run: Run, scores: Sequence[HeadScores], metrics: Metrics | None, heads: Heads | None = None) -> str:
    """The whole report.

    Args:
        run: The run's ``run.json``.
        scores: Of every method, or none for a plan of the user's.
        metrics: The run's ``metrics.json``; None where nothing was pruned.
        heads: The run's ``heads.json``; None in a run from before there was one, or of a model whose weights cannot be seen.
    """
    values: dict[str, Any] = {
        "run": run,
        "scores": scores,
        "metrics": metrics,
        "heads": heads,
        "pairs": agreements(scores),
        "repairs": [],
    }
    values["rankings"] = [findings.ranking(s) for s in scores if s.method != "random"]
    if metrics is not None:
        values |= _of_metrics(metrics)
    return visible(_environment().get_template("report.md.j2").render(values))


def card(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """What the model card of one budget's folder says of its costs."""
    values = {
        "run": run, "metrics": metrics, "metric": metrics.metric, "dense": metrics.dense, "b": budget,
        "latency": metrics.latency, "dataset": numbers.without_place(run.options.data.dataset),
    }  # fmt: skip
    return visible(_environment().get_template("card.md.j2").render(values))


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
            numbers.rank, numbers.known, numbers.measured_value, shlex.quote, numbers.with_error, numbers.device,
            numbers.without_places, numbers.cache, numbers.name_of, numbers.to_repeat, numbers.size, numbers.operations,
        )
    } | {"code": code, "fmt": format, "head_count": head_count, "thousands": lambda number: f"{number:,}", "plain": seen.plain, "prose": seen.prose, "fence": seen.fence}  # fmt: skip
    made.globals |= {
        f.__name__: f for f in (
            findings.chosen_by, findings.mean_of, findings.speed, findings.trade_off,
            findings.changed_weights, findings.refit, findings.shared_notes, findings.notes_in_common, findings.limits_metric, findings.fewest_rounds,
            findings.closest_first, findings.where_time_goes, busy.disturbed, chance, verdict, sentences.headline, sentences.table, sentences.rule, sentences.over_random,
            sentences.cautions, sentences.curves, sentences.stay_though_low, sentences.precision, usage, sentences.proved, sentences.reloaded, sentences.orders, sentences.about, sentences.parts,
            sentences.also_table, sentences.engine_rows, findings.tried_steps, findings.compared, seen.roles, seen.told_removed,
        )
    } | {
        "WARM_UP": WARM_UP, "ENGINE_HEAD": sentences.ENGINE_HEAD, "STEPS": {step.name: step.about for step in STEPS},
    }  # fmt: skip
    return made
