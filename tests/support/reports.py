"""`headprune report` on run folders of given documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headprune.app.documents import Heads
from headprune.files import write_json
from headprune.scoring.scores import HeadScores, save_scores
from tests.support.commands import run as command
from tests.support.documents import METRICS, RUN

ROOT = Path(__file__).parent.parent.parent
KEPT = re.findall(r"^!/(reports/.+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
COMMITTED = [ROOT / folder for folder in sorted(KEPT)]  # not the runs that someone made beside them


def reported(
    folder: Path, metrics: dict[str, Any] | None = METRICS, *scores: HeadScores, run: dict[str, Any] = RUN, heads: Heads | dict[str, Any] | None = None
) -> str:  # fmt: skip
    """The report.md that `headprune report` writes into a folder of these documents; report.html lies beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    write_json(folder / "run.json", "run", run)
    if metrics is not None:
        write_json(folder / "metrics.json", "metrics", metrics)
    if scores:
        save_scores(folder / "scores.json", scores)
    if heads is not None:
        write_json(folder / "heads.json", "heads", heads if isinstance(heads, dict) else heads.to_json())
    command("report", folder, "-q")
    return (folder / "report.md").read_text()
