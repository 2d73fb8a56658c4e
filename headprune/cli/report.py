"""`headprune report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.cli.app import app
from headprune.cli.options import Manner, takes_options
from headprune.cli.session import session
from headprune.errors import HeadPruneError


@app.command(epilog="Example: `headprune report reports/digits`")
@takes_options
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    manner: Manner,
) -> None:
    """Write a run's report.md, figures and report.html again, from its JSON documents."""
    with session(manner) as console:
        from headprune.app import report as room
        from headprune.app.runs import RunFolder, command_line

        if not run.is_dir():
            raise HeadPruneError(f"There is no folder {run}.", "Pass a folder that `headprune score` or `prune` wrote.")
        folder = RunFolder(run)
        folder.settle()
        if not (run / "run.json").is_file():
            raise HeadPruneError(
                f"{run} is not a run's folder: it has no run.json.", "Pass one that `headprune score` or `prune` wrote."
            )
        folder.read_run()
        with folder.locked(command_line()):
            room.write(folder)
        console.result(f"{folder.report_path}\n{folder.page_path}")
        console.document({"folder": str(folder.path), "report": str(folder.report_path), "page": str(folder.page_path)})
