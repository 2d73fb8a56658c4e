"""The report of a run: report.md with its pictures, and report.html, made from the run folder's documents alone."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import UndefinedError

from headprune import checkpoint
from headprune.app import pictures
from headprune.app.report import page, sections
from headprune.app.report.cards import pruned_card
from headprune.app.report.content import Documents, markdown
from headprune.app.runs import PARTS, RunFolder
from headprune.errors import HeadPruneError
from headprune.files import write_file

__all__ = ["write", "write_cards"]

# What documents that belong to no run can raise where they are put into words.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, UndefinedError)


def write_cards(folder: RunFolder) -> None:
    """Write into the models' cards what the run measured of each."""
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
    for name, content in files.items():
        write_file(folder.path / name, content)
    for name in PARTS:  # a picture of a run that had more to show
        if name.endswith(".png") and name not in files:
            (folder.path / name).unlink(missing_ok=True)


def _files(documents: Documents) -> dict[str, bytes]:
    """Everything that a report consists of, by the names of its files."""
    parts, figures = sections.sections_of(sections.TEMPLATE, documents=documents)
    what = "Every head" if documents.metrics is None else "Every size and every head"
    link = f"{what}, and what it attends to: [report.html](report.html), one file for a browser, no network needed."
    painted = {figure.file: pictures.png(figure.draw()) for figure in figures}
    texts = {"report.md": markdown(parts, link), "report.html": page.render(documents, parts, painted)}
    return painted | {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
