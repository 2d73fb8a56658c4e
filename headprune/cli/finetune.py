"""`headprune finetune`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import DataOptions, FinetuneOptions, Mixture
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import Manner, Task, Trust, Typed, takes_options
from headprune.cli.session import session


@app.command(epilog="Example: `headprune finetune reports/MODEL-1/pruned-36`, after `headprune prune --keep 36`")
@takes_options
def finetune(
    pruned: Annotated[
        Path, typer.Argument(metavar="PRUNED", help="A folder headprune saved, or a run folder that contains one.")
    ],
    training: FinetuneOptions,
    mixture: Mixture,
    data: DataOptions,
    manner: Manner,
    typed: Typed,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The dense model [what PRUNED was made from].", rich_help_panel="Training"),
    ] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=1, help="Examples to train on, at most [all].", rich_help_panel="Data")
    ] = None,
    task: Task = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="To train in: float32 or bfloat16.")] = "float32",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the trained model [PRUNED-finetuned].")
    ] = None,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume", help="Do not continue an interrupted run: start again.", rich_help_panel="Training"
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train a pruned model, with distillation from the dense one, and measure all three."""
    with session(manner, shared=True) as console:
        from headprune.app import finetune_run as room

        folder, record = room.finetune_run(
            room.FinetuneRun(
                pruned, teacher, data={name: value for name, value in vars(data).items() if name in typed},
                train_limit=train_limit, training=replace(training, mixture=mixture), task=task, device=device, dtype=dtype,
                output=output, overwrite=overwrite, resume=not no_resume, trust_remote_code=trust_remote_code,
            ),
            console,
        )  # fmt: skip
        tables.print_finetuned(console, record)
        console.result(f"\nReport: {folder / room.REPORT}\nModel:  {folder}")
        tables.print_loading(console, folder)
        console.document({"folder": str(folder), **record.to_json()})
