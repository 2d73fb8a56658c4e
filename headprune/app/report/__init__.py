"""The report of a run: markdown with figures and one HTML page, made from the run folder's documents alone."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2

from headprune import checkpoint
from headprune.app.report import figures, markdown, page
from headprune.app.report.verdict import verdict
from headprune.app.runs import RunFolder
from headprune.app.seeing import draw_all
from headprune.errors import HeadPruneError
from headprune.files import write_file

__all__ = ["write", "write_cards"]


def write_cards(folder: RunFolder) -> None:
    """Write into the models' cards what the run measured of each."""
    run, metrics = folder.read_run(), folder.read_metrics()
    if metrics is not None:
        data = run.options.data.dataset
        of_hub = data if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not Path(data).exists() else None
        for budget in metrics.budgets:
            checkpoint.add_figures(folder.path / budget.checkpoint, markdown.card(run, metrics, budget), of_hub)


def write(folder: RunFolder) -> None:
    """Write ``report.md``, its figures and ``report.html``; doing it again gives the same text.

    Raises:
        HeadPruneError: A document is missing or damaged.
    """
    try:
        _write(folder)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        StopIteration,
        jinja2.UndefinedError,
    ) as error:
        raise HeadPruneError(
            f"The documents in {folder.path} are damaged, or of another version ({type(error).__name__}: {error}).",
            "Make the run again.",
        ) from error


def _write(folder: RunFolder) -> None:
    # All is read, and put into words, before the first file is touched: a damaged document leaves the report as it was.
    run, metrics = folder.read_run(), folder.read_metrics()
    scores = folder.read_scores() if folder.scores_path.exists() else []  # a plan of the user's needs none
    heads = folder.read_heads()
    text, whole = markdown.render(run, scores, metrics, heads), page.render(run, scores, metrics, heads)
    if scores:
        figures.importance(folder.path / "importance.png", scores, metrics)
    # A picture that is drawn again stays until then; one of an earlier run with more methods, or with heads that were seen, goes.
    if len([s for s in scores if s.method != "random"]) > 1:
        figures.agreement(folder.path / "agreement.png", scores)
    else:
        (folder.path / "agreement.png").unlink(missing_ok=True)
    if metrics is not None:
        figures.trade_off(folder.path / "tradeoff.png", metrics)
        figures.orders(folder.path / "orders.png", metrics)
        figures.latency(folder.path / "latency.png", metrics.latency)
        if metrics.time:
            figures.time_parts(folder.path / "time.png", metrics.time)
    if heads is not None and heads.samples:
        draw_all(folder.path / "heads.png", heads, heads.samples[-1], verdict(metrics).budget.drop if metrics else None)
    else:
        (folder.path / "heads.png").unlink(missing_ok=True)
    write_file(folder.report_path, text)
    write_file(folder.page_path, whole)
