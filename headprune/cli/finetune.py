"""`headprune finetune`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import DataOptions, Device, FinetuneOptions, LoadOptions, Mixture, Options, TaskName, Trust
from headprune.cli import tables
from headprune.cli.app import command
from headprune.cli.options import Console, NoResume, Overwrite, Saved, Typed, output_option, over
from headprune.errors import HeadPruneError


@command("`headprune finetune reports/MODEL-1/pruned-36`, after `headprune prune --keep 36`", shared=True)
def finetune(
    pruned: Saved,
    training: FinetuneOptions,
    mixture: Mixture,
    data: DataOptions,
    console: Console,
    typed: Typed,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The dense model [what PRUNED was made from].", rich_help_panel="Training"),
    ] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=1, help="Examples to train on, at most [all].", rich_help_panel="Data")
    ] = None,
    task: TaskName = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="To train in: float32 or bfloat16.")] = "float32",
    output: Annotated[Path | None, output_option(help="Folder for the trained model [PRUNED-finetuned].")] = None,
    no_resume: NoResume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train a pruned model, with distillation from the dense one, and measure all three."""
    from headprune.app import finetune_run as room
    from headprune.app.options import check_values
    from headprune.app.report.cards import finetune_table
    from headprune.app.sources import pruned_in

    training = replace(training, mixture=mixture)
    check_values(training)  # before it is looked whether the folder is one
    source = pruned_in(pruned)
    loading = LoadOptions(task, device, dtype, trust_remote_code)
    options = _options(source, data, loading, teacher, typed)
    output = output or source.with_name(f"{source.name}-finetuned")
    config = room.FinetuneRun(source, options, training, output, train_limit, overwrite, not no_resume)
    folder, record = room.finetune_run(config, console)
    tables.print_table(console, "Dense, pruned and fine-tuned, on the reporting part", finetune_table(record))
    console.result(f"Training: {record.changes['gain'].verdict}.\n\nReport: {folder / room.REPORT}\nModel:  {folder}")
    tables.print_loading(console, folder)
    console.document({"folder": str(folder), **record.to_json()})


def _options(source: Path, data: DataOptions, loading: LoadOptions, teacher: str | None, typed: Typed) -> Options:
    """The dense model and the data: as they were typed, else as they were when the model was pruned.

    Raises:
        HeadPruneError: Neither says which.
    """
    from headprune import checkpoint
    from headprune.app.finetune_run import run_of
    from headprune.app.sources import split_revision

    about, run = checkpoint.about(source), run_of(source)
    if run is None and not data.dataset:
        raise HeadPruneError(f"{source} is in no run folder that names its data.", "Name the dataset with -d.")
    model, task = teacher or about.get("from"), loading.task or about.get("task")
    if not isinstance(model, str) or not isinstance(task, str | None):
        raise HeadPruneError(f"{source} does not say which model it was made from.", "Name it with --teacher.")
    before = Options("", DataOptions()) if run is None else run.options
    if teacher is None and split_revision(before.model)[0] == model:
        model = before.model  # with its revision
    device = before.loading.device if loading.device == "auto" else loading.device
    own = over(before.data, data, typed - {"seed"})  # that is the training's
    return Options(model, own, replace(loading, task=task, device=device))
