"""`headprune bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.app.options import LoadOptions
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.config import numbers_in
from headprune.cli.options import Manner, takes_options
from headprune.cli.session import session
from headprune.errors import HeadPruneError


@app.command(epilog="Example: `headprune bench MODEL reports/digits/pruned-12 --batch-sizes 1,64`")
@takes_options
def bench(
    dense: Annotated[
        str,
        typer.Argument(metavar="DENSE", help="The model to compare with (or an .onnx file, or an OpenVINO folder)."),
    ],
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="The other model.")],
    loading: LoadOptions,
    manner: Manner,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,32",
    lengths: Annotated[str, typer.Option(help="Tokens; comma-separated, for texts.")] = "32,128",
) -> None:
    """Time two models in turn, and say where the first one's time goes; or two files that `headprune export` wrote, in their engine."""
    with session(manner) as console:
        from headprune import documents, exporting, latency
        from headprune.app.models import check_length, dummy_input, load_model
        from headprune.app.named import check_source
        from headprune.app.workflow import timing
        from headprune.trace import find_attention

        sizes, tokens = numbers_in("--batch-sizes", batch_sizes), numbers_in("--lengths", lengths)
        files = {"dense": Path(dense), "pruned": Path(pruned)}
        kinds = [exporting.is_exported(file) for file in files.values()]
        if any(kinds):
            if not all(kinds):
                raise HeadPruneError(
                    f"Only one of {dense} and {pruned} is for another engine.", "Export both, or compare two models."
                )
            with console.track("timing") as progress:
                rows = exporting.bench_files(files, sizes, tokens, progress=progress)
            tables.print_latency(console, rows)
            console.document({"rows": [row.to_json() for row in rows]})
            return
        for model in (dense, pruned):
            check_source(model)
        first, second = (load_model(m, loading, with_processor=False) for m in (dense, pruned))
        for note in (*first.notes, *second.notes):
            console.say(note)
        if first.task != second.task:
            raise HeadPruneError(
                f"{dense} is for {first.task.name}, {pruned} for {second.task.name}.", "Compare alike."
            )
        used = tokens if first.task.modality == "text" else [0]
        for loaded in (first, second) if any(used) else ():
            check_length(loaded, max(used))
        inputs = [(b, t, dummy_input(first, b, t or 1)) for t in used for b in sizes]
        models = {"dense": first.model, "pruned": second.model}
        with console.track("timing") as progress:
            rows = latency.bench(models, inputs, progress=progress)
        parts: Sequence[Any] = ()
        try:
            layers = find_attention(first.model, dummy_input(first, 2, min(used) or 1))
            parts = timing.time_parts(first.model, layers, inputs, {}, rows, console)
        except HeadPruneError as error:  # such as a model without attention: its latency is known all the same
            console.say(f"Where the time goes is not known: {error.args[0]}")
        written = timing.time_generation(models, inputs[: len(sizes)], console)
        before, after = (latency.parameters(loaded.model) for loaded in (first, second))
        tables.print_latency(console, rows)
        console.result(f"Parameters: {before:,} and {after:,} ({after / before - 1:+.1%})")
        tables.print_time(console, parts, rows)
        tables.print_generation(console, written)
        found: dict[str, Sequence[Any]] = {
            "time": parts,
            "generation": written,
        }
        more = {name: documents.to_json(list(rows), list[Any]) for name, rows in found.items() if rows}
        console.document({"rows": [row.to_json() for row in rows], **more})
