"""`headprune export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune.app.options import LoadOptions
from headprune.cli.app import app
from headprune.cli.options import Manner, Model, Task, Trust, takes_options
from headprune.cli.session import session


@app.command(epilog="Example: `headprune export reports/MODEL-1/pruned-36 --to onnx`")
@takes_options
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            help="onnx (a file for onnxruntime and others), openvino (a folder), gguf (llama.cpp; Llama-like decoders), stock "
            "(transformers without any option), or another of `headprune methods`."
        ),
    ],
    manner: Manner,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file or folder [beside MODEL, with its name].")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What weights are stored in: float32, float16 or bfloat16 (gguf alone) [as in MODEL; onnx: float32]."
        ),
    ] = None,
    task: Task = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a model, pruned or not, for another engine, and try it there."""
    with session(manner) as console:
        from headprune import exporting
        from headprune.app.models import load_model, resolved

        chosen = exporting.format_named(to)
        model = resolved(model)
        source = Path(model.rstrip("/"))
        file = output or (source.parent if source.is_dir() else Path()) / f"{source.name}{chosen.suffix}"
        exporting.check_place(file, to, dtype or "float32", overwrite)
        loaded = load_model(
            model, LoadOptions(task, device="cpu", trust_remote_code=trust_remote_code), any_task=True,
            with_processor=chosen.tokenizer or None,
        )  # fmt: skip
        for note in loaded.notes:
            console.say(note)
        stored = str(loaded.stored or "float32").removeprefix("torch.")
        console.say(f"writing {file} and trying it …")
        done = exporting.export(
            loaded.model,
            file,
            to,
            processor=loaded.processor,
            dtype=dtype or (stored if chosen.as_stored and stored in chosen.dtypes else "float32"),
            name=loaded.name,
            overwrite=overwrite,
        )
        for note in done.notes:
            console.say(note)
        console.result(f"{done.path}: {done.summary}")
        console.document(done.to_json())
