"""`headprune finetune`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import Data, Device, Manner, Overwrite, Task, Training, Trust, by_groups, typed
from headprune.cli.session import session
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.options import Options


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
        from headprune.app.models import pruned_in
        from headprune.app.options import FinetuneOptions

        given, source = typed(training), pruned_in(pruned)

        def of(kind: Any) -> dict[str, Any]:
            return {f.name: given[f.name] for f in fields(kind) if f.name in given}

        options = _options(source, typed(data), model=teacher, task=task, device=device)
        folder, record = room.finetune_run(
            room.FinetuneRun(
                source, replace(options, dtype=dtype, trust_remote_code=trust_remote_code),
                FinetuneOptions(**of(FinetuneOptions), mixture=Mixture(**of(Mixture))),
                output or source.with_name(f"{source.name}-finetuned"), train_limit, overwrite, resume=not no_resume,
            ),
            console,
        )  # fmt: skip
        tables.print_finetuned(console, record)
        console.result(f"\nReport: {folder / room.REPORT}\nModel:  {folder}")
        tables.print_loading(console, folder)
        console.document({"folder": str(folder), **record.to_json()})


def _options(source: Path, data: dict[str, Any], **given: str | None) -> Options:
    """The dense model and the data: as they were given, else as they were when the model was pruned.

    Raises:
        HeadPruneError: Neither says which.
    """
    from headprune import checkpoint
    from headprune.app.data import DataOptions
    from headprune.app.finetune_run import run_of
    from headprune.app.options import Options

    about, run = checkpoint.about(source), run_of(source)
    if run is None and "dataset" not in data:
        raise HeadPruneError(
            f"{source} is in no run folder that names its data.", "Name the dataset with -d, as when pruning."
        )
    options = Options("", DataOptions(**data)) if run is None else run.options
    known: dict[str, Any] = {"model": about.get("from"), "task": about.get("task"), "device": options.device}
    known.update({name: value for name, value in given.items() if value is not None})
    if not isinstance(known["model"], str) or not isinstance(known["task"], str | None):
        raise HeadPruneError(f"{source} does not say which model it was made from.", "Name it with --teacher.")
    revision = options.revision if given["model"] is None else None
    return Options(**known, data=replace(options.data, **data), revision=revision)
