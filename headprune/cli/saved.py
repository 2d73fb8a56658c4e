"""The commands `headprune finetune`, `report`, `export` and `push`, which work on what runs have saved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import DataOptions, Device, FinetuneOptions, LoadOptions, Mixture, Options, TaskName, Trust
from headprune.cli import terminal
from headprune.cli.app import Console, Model, NoResume, Overwrite, Saved, Typed, command, output_option, over
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
    from headprune.app import runs
    from headprune.app.options import check_values
    from headprune.app.report import finetune_table
    from headprune.app.sources import pruned_in

    training = replace(training, mixture=mixture)
    check_values(training)  # before the folder is checked
    source = pruned_in(pruned)
    loading = LoadOptions(task, device, dtype, trust_remote_code)
    options = _finetune_options(source, data, loading, teacher, typed)
    output = output or source.with_name(f"{source.name}-finetuned")
    key = runs.key_of("finetune", source, options, training, output, train_limit, overwrite)
    choose = partial(room.choose_folder, output, overwrite, key)
    with runs.claimed(choose, key, runs.command_line(), resume=not no_resume, say=console.say) as folder:
        record = room.finetune_run(source, options, training, train_limit, folder, console)
    terminal.print_table(console, "Dense, pruned and fine-tuned, on the reporting part", finetune_table(record))
    console.result(f"Training: {record.changes['gain'].verdict}.\n\nReport: {output / room.REPORT}\nModel:  {output}")
    terminal.print_loading(console, output)
    console.document({"folder": str(output), **record.to_json()})


def _finetune_options(
    source: Path, data: DataOptions, loading: LoadOptions, teacher: str | None, typed: Typed
) -> Options:
    """The options of the dense model and the data: as they were typed; else those of the run that pruned the model.

    Raises:
        HeadPruneError: Neither names the data, or the dense model.
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
    # A typed seed is for the training, not for the data.
    options = Options(model, over(before.data, data, typed - {"seed"}), replace(loading, task=task, device=device))
    options.check()
    return options


@command("`headprune report reports/digits`")
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], console: Console) -> None:
    """Write a run's report.md, figures and report.html again, from its JSON documents."""
    from headprune.app import report as room
    from headprune.app.runs import RunFolder, command_line

    folder = RunFolder(run)
    folder.settle()
    if not folder.run_path.is_file():
        if folder.unfinished.is_dir():
            raise HeadPruneError(
                f"The run in {run} has not ended.", "The command that began it goes on where it was interrupted."
            )
        raise HeadPruneError(f"{run} is not a run's folder: it has no run.json.", "Pass what score or prune wrote.")
    folder.read_run()
    with folder.locked(command_line()):
        room.write(folder)
    console.result(f"{folder.report_path}\n{folder.page_path}")
    console.document({"folder": str(folder.path), "report": str(folder.report_path), "page": str(folder.page_path)})


@command("`headprune export reports/MODEL-1/pruned-36 --to onnx`")
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            help="onnx (a file for onnxruntime and others), openvino (a folder), gguf (llama.cpp; Llama-like decoders), stock "
            "(transformers without any option), or another of `headprune methods`."
        ),
    ],
    console: Console,
    output: Annotated[Path | None, output_option(help="The file or folder [beside MODEL, with its name].")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Weights: float32, float16 or bfloat16 (gguf alone) [as in MODEL; onnx: float32]."),
    ] = None,
    task: TaskName = None,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a model, pruned or not, for another engine, and try it there."""
    from headprune import exporting
    from headprune.app.models import load_model
    from headprune.app.sources import resolved

    chosen = exporting.format_named(to)
    model = resolved(model)
    source = Path(model.rstrip("/"))
    file = output or (source.parent if source.is_dir() else Path()) / f"{source.name}{chosen.suffix}"
    exporting.check_place(file, to, dtype or "float32", overwrite)
    loading = LoadOptions(task, device="cpu", trust_remote_code=trust_remote_code)
    loaded = load_model(model, loading, any_task=True, with_processor=chosen.tokenizer or None)
    stored = str(loaded.stored or "float32").removeprefix("torch.")
    console.say(*loaded.notes, f"writing {file} and trying it …")
    dtype = dtype or (stored if chosen.as_stored and stored in chosen.dtypes else "float32")
    done = exporting.export(
        loaded.model, file, to, processor=loaded.processor, dtype=dtype, name=loaded.name, overwrite=overwrite
    )
    console.say(*done.notes)
    console.result(f"{done.path}: {done.summary}")
    console.document(done.to_json())


@command("`headprune push reports/MODEL-1/pruned-36 me/smaller --private`")
def push(
    pruned: Saved,
    repo: Annotated[str, typer.Argument(help="The repository, user/name; it is created if it does not exist.")],
    console: Console,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be uploaded; upload nothing.")] = False,
) -> None:
    """Upload a saved model to the Hugging Face Hub, with its model card. Needs `hf auth login`, or HF_TOKEN."""
    from headprune import checkpoint
    from headprune.app.sources import pruned_in

    source = pruned_in(pruned)
    if (source / "config.json").is_file():
        checkpoint.load(source, trust_remote_code=trust_remote_code)  # so that nobody gets a damaged model
    if dry_run:
        files = {p.relative_to(source).as_posix(): p.stat().st_size for p in checkpoint.files_to_upload(source)}
        for name, size in files.items():
            console.result(f"{size:>15,} bytes  {name}")
        said = checkpoint.metadata(source)
        for key in ("license", "base_model", "datasets"):
            console.result(f"{key}: {said.get(key) or f'not in the card; add it at the top of {source}/README.md'}")
        console.result(f"Would upload {sum(files.values()):,} bytes to {repo}. Nothing was uploaded.")
        console.document({"folder": str(source), "repo": repo, "files": files})
        return
    url = checkpoint.upload(source, repo, private=private or None, commit_message="Upload a model pruned by headprune")
    console.result(url)
    console.document({"folder": str(source), "url": url})
