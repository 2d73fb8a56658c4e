"""report.html: the report as one page that needs no network, with charts to look into. Figures are written as report.md's are."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import shlex
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from headprune.amounts import visible
from headprune.app.documents import Heads, Metrics, Run
from headprune.app.report import findings, numbers, sentences
from headprune.app.report.busy import disturbed
from headprune.app.report.heads import roles
from headprune.app.report.page import drawn
from headprune.app.report.usage import usage
from headprune.app.report.verdict import verdict
from headprune.scoring.scores import HeadScores

# In the order of the page. A part is parts/NAME.html.j2, and parts/NAME.js where something in it moves.
PARTS = ("opening", "sizes", "also", "slider", "curve", "heads", "roles", "engines", "details")
_SCRIPTS = ("state", "slider", "curve", "latency", "map", "attention", "head", "table")
_VENDORED = ("d3.min.js", "plot.umd.min.js")


def render(run: Run, scores: Sequence[HeadScores], metrics: Metrics | None, heads: Heads | None = None) -> str:
    """The whole page.

    Args:
        run: The run's ``run.json``.
        scores: Of every method, or none for a plan of the user's.
        metrics: The run's ``metrics.json``; None where nothing was pruned.
        heads: The run's ``heads.json``; None where no head was looked at.
    """
    shown = [s for s in scores if s.method != "random"] or list(scores)
    sizes = drawn.sizes(metrics) if metrics is not None else []
    budgets = findings.largest_first(metrics) if metrics is not None else []
    values: dict[str, Any] = {
        "run": run, "scores": scores, "metrics": metrics, "shown": shown, "sizes": sizes, "parts": PARTS,
        "heads": drawn.head_rows(run, shown, sizes, heads), "profiles": heads is not None,
        "parts_told": sentences.parts(run, metrics, bool(scores)),
        "looked": heads, "budgets": budgets, "kinds": roles(heads, budgets) if heads is not None else [],
        "data": Markup(drawn.to_json(drawn.everything(run, shown, metrics, sizes, heads))), **_assets(),
    }  # fmt: skip
    if metrics is not None:
        values |= {
            "metric": metrics.metric, "chosen": drawn.chosen(metrics, sizes), "curves": findings.trade_off(metrics.curve, metrics.metric),
            "columns": sentences.table(metrics)[0], "at": sentences.Column, "found": verdict(metrics),
            "headline": sentences.headline(run, metrics), "orders": sentences.orders(metrics),
            "second": sentences.also_table(metrics), "engine_head": sentences.ENGINE_HEAD,
            "engines": [(engine.format, sentences.engine_rows(engine)) for engine in metrics.engines],
            "reasons": [
                sentences.rule(metrics), f"Better than random heads? {sentences.over_random(metrics)}",
                usage(run, metrics), *filter(None, [sentences.precision(run, metrics)]),
            ],
            "cautions": sentences.cautions(run, metrics), "curves_told": sentences.curves(run, metrics),
            "busy": [told for row in metrics.time if (told := disturbed(row, metrics.latency.rows))],
        }  # fmt: skip
    return _environment().get_template("page.html.j2").render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    """As report.md's, but every text is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("headprune.app.report.page", "."), undefined=jinja2.StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # what is marked up has been through it
    )  # fmt: skip
    made.filters |= {
        f.__name__: f
        for f in (
            numbers.value,
            numbers.ratio,
            numbers.shape,
            numbers.device,
            numbers.name_of,
            numbers.to_repeat,
            shlex.quote,
        )
    }
    made.filters |= {"fmt": format, "thousands": lambda number: f"{number:,}", "coded": _coded}
    made.globals["about"] = sentences.about
    return made


def _coded(text: str) -> Markup:
    """A text, escaped; what stands in backticks becomes code."""
    parts = re.split("`+", visible(text))
    if not len(parts) % 2:
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


@functools.cache
def _assets() -> dict[str, Any]:
    """Style and scripts of every page, and the policy by which a browser runs these scripts and fetches nothing."""
    here = resources.files(__name__)
    own = "".join(f"{(here / 'parts' / f'{name}.js').read_text('utf-8')}\n" for name in _SCRIPTS)
    scripts = [(here / "vendor" / name).read_text("utf-8") for name in _VENDORED]
    scripts.append(f'(() => {{\n"use strict";\n{own}}})();\n')
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{found}'" for found in hashes)
    return {
        "style": Markup((here / "style.css").read_text("utf-8")),
        "scripts": [Markup(script) for script in scripts],
        "licences": Markup((here / "vendor" / "LICENSES.txt").read_text("utf-8")),
        # Plot sets styles of its own; images (a sample of an image model) are in the page itself.
        "policy": f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
    }
