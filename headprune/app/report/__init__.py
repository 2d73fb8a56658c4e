"""Writes report.md with its pictures, report.html and parts of model cards, from a run folder's documents alone.

The template report.md.j2 has the report's sections and their texts. `verdict`, `measured` and `heads` have its tables and figures, and the
sentences that need code.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from headprune import checkpoint, latency
from headprune.amounts import code
from headprune.app import pictures
from headprune.app.documents import BudgetResult, FinetuneRecord, Metrics, Run
from headprune.app.report import content, heads, measured, numbers, page, verdict
from headprune.app.report.content import Block, Documents, Figure, Section, Table, block_of, markdown
from headprune.app.runs import RunFolder
from headprune.errors import HeadPruneError
from headprune.files import write_file

__all__ = ["finetune_card", "finetune_report", "finetune_table", "write", "write_cards"]

TEMPLATE, PRUNED, FINETUNED = (
    (resources.files(__name__) / f"{name}.md.j2").read_text("utf-8") for name in ("report", "pruned", "finetune")
)
ROOMS = {
    "content": content, "numbers": numbers, "verdict": verdict, "of_heads": heads, "measured": measured,
    "latency": latency,
}  # fmt: skip
"""The modules that templates may call."""

# What rendering can raise for documents that are damaged or do not belong together.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, jinja2.UndefinedError)
_FOLD = "\x1e"  # a separator that no escaped text contains


def write_cards(folder: RunFolder) -> None:
    """Add the run's measurements of each pruned model to its model card."""
    run, metrics = folder.read_run(), folder.read_metrics()
    if metrics is not None:
        data = run.options.data.dataset
        of_hub = data if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and not Path(data).exists() else None
        for budget in metrics.budgets:
            checkpoint.add_figures(folder.path / budget.checkpoint, pruned_card(run, metrics, budget), of_hub)


def write(folder: RunFolder) -> None:
    """Write ``report.md``, its pictures and ``report.html``; doing it again gives the same files.

    Raises:
        HeadPruneError: A document is missing or damaged. Then no file is touched.
    """
    scores = folder.read_scores() if folder.scores_path.exists() else []  # a plan of the user's needs none
    documents = Documents(folder.read_run(), scores, folder.read_metrics(), folder.read_heads())
    try:
        files = _files(documents)
    except _DAMAGE as error:
        what = f"The documents in {folder.path} are damaged, or of another version"
        raise HeadPruneError(f"{what} ({type(error).__name__}: {error}).", "Make the run again.") from error
    for name, file in files.items():
        write_file(folder.path / name, file)


def _files(documents: Documents) -> dict[str, bytes]:
    """The files of a report, by name."""
    sections, figures = sections_of(TEMPLATE, documents=documents)
    what = "Every head" if documents.metrics is None else "Every size and every head"
    link = f"{what}, and what it attends to: [report.html](report.html), one file for a browser, no network needed."
    painted = {figure.file: pictures.png(figure.drawing) for figure in figures}
    texts = {"report.md": markdown(sections, link), "report.html": page.render(documents, sections, painted)}
    return painted | {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}


# -- model cards, and the report of a fine-tuning ------------------------------------------------------


def pruned_card(run: Run, metrics: Metrics, budget: BudgetResult) -> str:
    """A pruned model's part of its model card: tables beside the dense model, and how it was made."""
    rows = []
    for row in metrics.latency.rows:
        timings = {name: row.timings[name] for name in ("dense", budget.name)}
        rows.append(replace(row, timings=timings, speedups={budget.name: row.speedups[budget.name]}))
    alone = replace(metrics, budgets=(budget,), latency=replace(metrics.latency, rows=tuple(rows)))
    sizes = replace(measured.sizes_table(alone), strong=None)  # it says nothing of which model is recommended
    (section,), _ = sections_of(PRUNED, run=run, metrics=alone, budget=budget, sizes=sizes)
    return section.text


def finetune_report(name: str, record: FinetuneRecord) -> str:
    """The text of finetune.md."""
    sections, _ = sections_of(FINETUNED, record=record, table=finetune_table(record), name=name, whole=True)
    return markdown(sections)


def finetune_card(record: FinetuneRecord) -> str:
    """A fine-tuned model's part of its model card: the verdict, the table, and the command."""
    pruned, teacher = map(numbers.without_place, (record.pruned, record.teacher))
    record = replace(record, pruned=pruned, teacher=teacher, command=numbers.without_places(record.command))
    (section,), _ = sections_of(FINETUNED, record=record, table=finetune_table(record), name="", whole=False)
    return section.text


def finetune_table(record: FinetuneRecord) -> Table:
    """The dense, the pruned and the fine-tuned model on the reporting part."""
    metric, rows = record.metric, []
    for key, name in (("dense", "dense"), ("pruned", "pruned"), ("finetuned", "pruned, fine-tuned")):
        change = record.changes.get(key)
        cells = (numbers.change(change, metric), change.verdict) if change else ("", "")
        rows.append((name, numbers.interval(record.models[key], metric), *cells))
    return Table(("model", f"{metric} (95 %)", "change from dense (95 %, paired)", "verdict"), rows)


# -- templates -----------------------------------------------------------------------------------------


def sections_of(template: str, **values: Any) -> tuple[list[Section], list[Figure]]:
    """Render a template: a report's sections, in order, and the figures in them."""
    sections: list[Section] = []
    figures: list[Figure] = []

    def section(title: str, caller: Callable[[], str]) -> str:
        text, summary, folded = (*caller().split(_FOLD), "", "")[:3]
        sections.append(Section(title, _tidy(text), summary, _tidy(folded)))
        return ""

    def show(*blocks: Block) -> content.Markdown:  # one below the other
        figures.extend(block for block in blocks if isinstance(block, Figure))
        return content.Markdown("\n\n".join(map(block_of, blocks)))

    _template(template).render(ROOMS, **values, section=section, show=show)
    return sections, figures


@functools.cache
def _template(text: str) -> jinja2.Template:
    """The template; what it prints is escaped, unless it is Markdown already."""

    def escaped(value: Any) -> str:
        return value if isinstance(value, content.Markdown) else content.text_of(value)

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(finalize=escaped, **options)
    environment.filters |= {"commas": "{:,}".format, "quoted": shlex.quote, "to_repeat": numbers.to_repeat}
    environment.globals |= {"code": code, "fold": lambda summary: content.Markdown(f"{_FOLD}{summary}{_FOLD}")}
    return environment.from_string(text)


def _tidy(text: str) -> str:
    """Markdown with the template's continuation lines joined, and one empty line between paragraphs."""
    return re.sub(r"\n{2,}", "\n\n", re.sub(r"\n +(?=\S)", " ", text)).strip()
