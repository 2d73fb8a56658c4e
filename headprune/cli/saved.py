"""`headprune report`, `export` and `push`: what is done with what runs have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import LoadOptions, TaskName, Trust
from headprune.cli.app import command
from headprune.cli.options import Console, Model, Overwrite, Saved, output_option
from headprune.errors import HeadPruneError


@command("`headprune report reports/digits`")
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], console: Console) -> None:
    """Write a run's report.md, figures and report.html again, from its JSON documents."""
    from headprune.app import report as room
    from headprune.app.runs import RunFolder, command_line

    folder = RunFolder(run)
    folder.settle()
    if not folder.run_path.is_file():
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
    loaded = load_model(
        model, LoadOptions(task, device="cpu", trust_remote_code=trust_remote_code), any_task=True,
        with_processor=chosen.tokenizer or None,
    )  # fmt: skip
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
        checkpoint.load(source, trust_remote_code=trust_remote_code)  # what is damaged should not be what others get
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
