"""`headprune demo`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from headprune.app.options import DataOptions, Device, LoadOptions
from headprune.cli import tables
from headprune.cli.app import command
from headprune.cli.options import Console, Overwrite, output_option


@command("`headprune demo`")
def demo(
    console: Console,
    output: Annotated[Path | None, output_option(help="Run folder [reports/demo].")] = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Train a small ViT on scikit-learn's digits (once), score it, prune it, and write reports/demo/."""
    from headprune.app import demo as room
    from headprune.app import runs, workflow
    from headprune.app.folders import Folder, claimed, key_of
    from headprune.budgets import budget_of
    from headprune.options import SearchOptions
    from headprune.scoring import DEFAULT_METHODS

    key = key_of("demo", output, device, overwrite)
    folder = runs.RunFolder(output or room.REPORT)
    if room.was_run(folder) and not overwrite:
        console.result(f"The demo has been run: {folder.report_path}\nAgain: headprune demo --overwrite")
        tables.print_document(console, folder)
        return
    # reports/demo belongs to the demo, so it may be replaced.
    choose = partial(runs.choose_folder, folder.path, "digits", overwrite or output is None, key)
    with claimed(choose, key, runs.command_line(), say=console.say) as folder:
        with (
            Folder(room.HOME).locked(runs.command_line()),
            console.track("training a ViT on digits, once, for about half a minute") as progress,
        ):
            model, data, accuracy = room.prepare(room.HOME, progress)
        console.say(f"Test accuracy of the dense ViT: {accuracy:.1%}")
        options = workflow.Options(str(model), DataOptions(str(data), limit=1000), LoadOptions(device=device))
        search = SearchOptions(tuple(budget_of(f"keep {keep}") for keep in room.KEEP))
        config = workflow.PruneConfig(options, search, methods=DEFAULT_METHODS)
        workflow.prune_run(config, folder, console)
        room.remember(folder)
    tables.print_scores(console, folder.read_scores())
    tables.print_pruned(console, folder)
