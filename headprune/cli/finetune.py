"""`headprune finetune`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import Data, Device, Manner, Overwrite, Task, Training, Trust, by_groups, typed
from headprune.cli.session import session


@app.command(epilog="Example: `headprune finetune reports/MODEL-1/pruned-36`, after `headprune prune --keep 36`")
@by_groups
def finetune(
    pruned: Annotated[
        Path, typer.Argument(metavar="PRUNED", help="A folder headprune saved, or a run folder that contains one.")
    ],
    training: Training,
    data: Data,
    manner: Manner,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The dense model [what PRUNED was made from].", rich_help_panel="Training"),
    ] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=1, help="Examples to train on, at most [all].", rich_help_panel="Data")
    ] = None,
    task: Task = None,
    device: Device = None,
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
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train a pruned model, with distillation from the dense one, and measure all three."""
    with session(manner, shared=True) as console:
        from headprune.app import finetune_run as room
        from headprune.app.distillation import Mixture
        from headprune.app.options import FinetuneOptions

        given = typed(training)

        def of(kind: Any) -> dict[str, Any]:
            return {f.name: given[f.name] for f in fields(kind) if f.name in given}

        folder, record = room.finetune_run(
            room.FinetuneRun(
                pruned, teacher, data=typed(data), train_limit=train_limit,
                training=FinetuneOptions(**of(FinetuneOptions), mixture=Mixture(**of(Mixture))),
                task=task, device=device, dtype=dtype, output=output, overwrite=overwrite, resume=not no_resume,
                trust_remote_code=trust_remote_code,
            ),
            console,
        )  # fmt: skip
        tables.print_finetuned(console, record)
        console.result(f"\nReport: {folder / room.REPORT}\nModel:  {folder}")
        tables.print_loading(console, folder)
        console.document({"folder": str(folder), **record.to_json()})
