"""The commands that look at what is there, and prune nothing: `headprune inspect`, `show`, `bench`, `evaluate`, `compare`, `methods`; and `demo`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.app.options import DataOptions, Device, LoadOptions, MetricOptions, Options, TaskOptions
from headprune.cli import terminal
from headprune.cli.app import Console, Model, Overwrite, Seed, Typed, command, numbers_in, output_option
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.comparison import RunComparison
    from headprune.app.documents import Heads

_PICTURES = (".png", ".svg", ".pdf")
_LIMIT = 64
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@command("`headprune inspect openai-community/gpt2`")
def inspect(model: Model, loading: LoadOptions, console: Console) -> None:
    """List a model's attention layers, heads and groups, and what can be pruned."""
    from headprune.app.models import dummy_input, load_model
    from headprune.trace import find_attention

    loaded = load_model(model, loading, with_processor=False, any_task=True)
    console.say(*loaded.notes)
    layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))
    terminal.print_layers(console, loaded.model, layers)
    console.document({"model": model, "layers": [layer.to_json() for layer in layers]})


@command('`headprune show openai-community/gpt2 --text "When Mary and John went to the store, John gave"`')
def show(
    model: Model,
    data: DataOptions,
    loading: LoadOptions,
    console: Console,
    typed: Typed,
    text: Annotated[str | None, typer.Option("--text", "-t", help="A text to look at.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image file to look at.")] = None,
    head: Annotated[str | None, typer.Option("--head", help="One head, large: L3.H7.")] = None,
    output: Annotated[Path | None, output_option(help="A picture to write: .png, .svg or .pdf.")] = None,
    seed: Seed = 0,
) -> None:
    """Show what every head attends to: on a text or an image, and with a dataset what each does on average."""
    _check_shown(text, image, data, output)
    from headprune.app.data import load_parts
    from headprune.app.models import dummy_input, load_model
    from headprune.app.seeing import look, look_at, of_image, of_text
    from headprune.trace import find_attention

    loaded = load_model(model, loading, any_task=True)
    console.say(*loaded.notes)
    heads: Heads | None = None
    if data.dataset:
        limits: dict[str, Any] = {name: _LIMIT for name in ("limit", "report_limit") if name not in typed}
        part = load_parts(replace(data, seed=seed, **limits), loaded, labelled=False).score
        layers = find_attention(loaded.model, next(part.batches(2)))
        with console.track("looking"):
            heads = look(loaded, part, layers, seed)
    if text is not None or image is not None:
        given = of_text(loaded, text) if text is not None else of_image(loaded, image or Path())
        layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))
        with console.track("looking"):
            one = look_at(loaded, given, layers, seed)
        heads = replace(heads, samples=one.samples) if heads else one
    assert heads is not None
    _print_heads(heads, head, output, console)


def _check_shown(text: str | None, image: Path | None, data: DataOptions, output: Path | None) -> None:
    """Refuse invalid inputs and outputs of `show`, before anything is loaded."""
    if text is None and image is None and not data.dataset:
        raise HeadPruneError("There is nothing to look at.", 'Give --text "…", --image FILE or --dataset DATA.')
    if text is not None and image is not None:
        raise HeadPruneError("--text and --image are two inputs.", "Give one of them.")
    if text is not None and not text.strip():
        raise HeadPruneError("The text is empty.", "Give a longer one.")
    if output is not None and output.suffix.lower() not in _PICTURES:
        raise HeadPruneError(f"{output} is no name of a picture.", f"Let it end in {', '.join(_PICTURES)}.")
    if output is not None and not output.parent.is_dir():
        raise HeadPruneError(f"There is no folder {output.parent}.", "Make it, or choose another.")


def _print_heads(heads: Heads, head: str | None, output: Path | None, console: Console) -> None:
    """Print all heads, or one of them, in the last sample and on average; ``output`` is a picture file to write, too."""
    from headprune.app import pictures
    from headprune.app.documents import head_named

    sample = heads.samples[-1] if heads.samples else None
    colours = console.out.color_system is not None
    what = f"{heads.examples} example{'s' * (heads.examples != 1)}, {heads.tokens} {heads.unit}"
    document: dict[str, Any] = heads.to_json()
    draw: Callable[[], Any] | None = None
    if head is None:
        if sample is not None:
            console.show(pictures.all_heads(heads, sample, console.out.width, colours))
            draw = partial(pictures.figure_of_all, heads, sample)
        if heads.examples > 1:
            console.show(pictures.role_table(heads))
        roles = "\n".join(pictures.role_counts(heads))
        console.result(f"\nRoles on {what}; docs/heads.md says when a head has one:\n{roles}")
        console.say(*filter(None, (layer.unseen for layer in heads.layers)))
    else:
        layer, number = head_named(heads, head)
        profile, name = layer.heads[number], f"L{layer.index}.H{number}"
        document = {"head": name, **vars(profile)}
        console.result(f"{name} ({layer.name}): {profile.role}: {profile.because} ({what}).")
        console.show(pictures.figures_of(profile))
        seen = sample.layer(layer.index) if sample is not None else None
        if sample is not None and seen is not None:
            console.show(pictures.one_head(sample, seen, number, colours))
            draw = partial(pictures.figure_of_head, sample, seen, number, f"{name}: {profile.role}")
    if output is not None:
        if draw is None:
            raise HeadPruneError("There is no sample to draw.", "Give --text or --image.")
        pictures.save(draw(), output)
        console.result(f"\nPicture: {output}")
    console.document(document)


@command("`headprune bench MODEL reports/digits/pruned-12 --batch-sizes 1,64`")
def bench(
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="A model, an .onnx file or an OpenVINO folder.")],
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="Another one, to compare with the first.")],
    loading: LoadOptions,
    console: Console,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,32",
    lengths: Annotated[str, typer.Option(help="Tokens; comma-separated, for texts.")] = "32,128",
) -> None:
    """Time two models in turn, and say where the first one's time goes; or two files that `headprune export` wrote, in their engine."""
    from headprune.exporting import bench_files, is_exported

    sizes, tokens = numbers_in("--batch-sizes", batch_sizes), numbers_in("--lengths", lengths)
    files = {"dense": Path(dense), "pruned": Path(pruned)}
    exported = [is_exported(file) for file in files.values()]
    if not any(exported):
        _bench_models(dense, pruned, loading, sizes, tokens, console)
        return
    if not all(exported):
        raise HeadPruneError(f"Only one of {dense} and {pruned} is for another engine.", "Export both, or neither.")
    with console.track("timing") as progress:
        rows = bench_files(files, sizes, tokens, progress=progress)
    terminal.print_times(console, rows)
    console.document({"rows": [row.to_json() for row in rows]})


def _bench_models(
    dense: str, pruned: str, loading: LoadOptions, sizes: list[int], tokens: list[int], console: Console
) -> None:
    """Print the latency of two models, where the first one's time goes, and how fast both generate."""
    from headprune import documents, latency
    from headprune.app.models import check_length, dummy_input, load_model
    from headprune.app.sources import check_source
    from headprune.app.workflow import results
    from headprune.trace import find_attention

    for model in (dense, pruned):
        check_source(model)
    first, second = (load_model(m, loading, with_processor=False) for m in (dense, pruned))
    console.say(*first.notes, *second.notes)
    if first.task != second.task:
        raise HeadPruneError(f"{dense} is for {first.task.name}, {pruned} for {second.task.name}.", "Compare alike.")
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
        parts = results.time_parts(first.model, layers, inputs, {}, rows, console)
    except HeadPruneError as error:  # such as a model without attention: its latency is known all the same
        console.say(f"Where the time goes is not known: {error.args[0]}")
    generation = results.time_generation(models, inputs[: len(sizes)], console)
    before, after = (latency.parameters(loaded.model) for loaded in (first, second))
    terminal.print_times(console, rows, parts, generation)
    console.result(f"Parameters: {before:,} and {after:,} ({after / before - 1:+.1%})")
    measured = {"rows": rows, "time": parts, "generation": generation}
    console.document({name: [documents.to_json(row) for row in each] for name, each in measured.items() if each})


@command("`headprune evaluate openai-community/gpt2 reports/gpt2-1 -d data/test.jsonl --tasks hellaswag,arc_easy`")
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL…", help="Models, run folders, and files that `headprune export` wrote."),
    ],
    data: DataOptions,
    loading: LoadOptions,
    measuring: MetricOptions,
    tasks: TaskOptions,
    console: Console,
    seed: Seed = 0,
) -> None:
    """Measure models on the same examples, and compare the others with the first; nothing is pruned."""
    from headprune import documents
    from headprune.app.measuring import measure_models

    measured = measure_models(models, replace(data, seed=seed), loading, measuring, tasks, console)
    for table in measured:
        terminal.print_values(console, table)
    console.document({"models": list(models), "tables": [documents.to_json(table) for table in measured]})


@command("`headprune compare reports/gpt2-1 reports/gpt2-2`")
def compare(first: _Run, second: _Run, console: Console) -> None:
    """Compare two runs of `prune`: options, metrics (paired where they report on the same examples), speed and size."""
    from headprune import documents
    from headprune.app.comparison import compare_runs
    from headprune.app.runs import RunFolder

    comparison = compare_runs(RunFolder(first), RunFolder(second))
    _print_comparison(console, comparison)
    console.document(documents.to_json(comparison))


def _print_comparison(console: Console, comparison: RunComparison) -> None:
    from headprune import amounts
    from headprune.app.report import numbers
    from headprune.app.report.content import Table

    metric, rows = comparison.metric, []
    for m in comparison.models:
        speed = f"{numbers.ratio(m.speedup)} at {numbers.shape(m)}" if m.speedup else ""
        size = numbers.with_more(f"{m.parameters:,}", amounts.size(m.weights, 3) if m.weights else "")
        rows.append((m.run, m.name, str(m.kept), numbers.interval(m.measured, metric), speed, size))
    head = ["run", "model", "heads", f"{metric} (95 %)", "speed-up over its dense model (95 %)", "parameters"]
    terminal.print_table(console, "Both runs", Table(head, rows))
    changes = [
        (p.first, p.second, numbers.change(p.change, metric), "yes" if p.paired else "no", p.change.verdict)
        for p in comparison.pairs
    ]
    head = ["of the first run", "of the second run", "change (95 %)", "paired", "verdict"]
    terminal.print_table(console, f"Change of {metric} from the first run to the second", Table(head, changes))
    options = [(name, *both) for name, both in comparison.options.items()]
    terminal.print_table(console, "Options that differ", Table(("option", *comparison.runs), options))
    for note in comparison.notes:
        console.result(note)


@command("`headprune score MODEL -d DATASET --method fisher --method random`")
def methods(console: Console) -> None:
    """List the scoring methods, each with its unit, the planning strategies, and the formats of `headprune export`."""
    from headprune.app.report.content import Table
    from headprune.exporting import FORMATS
    from headprune.planning import abouts
    from headprune.scoring import METHODS

    lists = {
        "methods": [{"name": m.name, "about": m.about, "unit": m.unit} for m in METHODS.values()],
        "strategies": [{"name": name, "about": about} for name, about in abouts().items()],
        "formats": [{"name": f.name, "about": f.about} for f in FORMATS.values()],
    }
    titles = ("Scoring methods", "Strategies: how heads are picked", "Formats of `headprune export --to`")
    for title, rows in zip(titles, lists.values(), strict=True):
        terminal.print_table(console, title, Table(tuple(rows[0]), [tuple(row.values()) for row in rows]))
    console.document(lists)


@command("`headprune demo`")
def demo(
    console: Console,
    output: Annotated[Path | None, output_option(help="Run folder [reports/demo].")] = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Train a small ViT on scikit-learn's digits (once), score it, prune it, and write reports/demo/."""
    from headprune.app import demo as room
    from headprune.app import runs
    from headprune.app.workflow import prune_run
    from headprune.app.workflow.search import PruneConfig
    from headprune.budgets import SearchOptions, budget_of
    from headprune.scoring import DEFAULT_METHODS

    key = runs.key_of("demo", output, device, overwrite)
    folder = runs.RunFolder(output or room.REPORT)
    if room.was_run(folder) and not overwrite:
        console.result(f"The demo has been run: {folder.report_path}\nAgain: headprune demo --overwrite")
        terminal.print_document(console, folder)
        return
    # reports/demo belongs to the demo, so it may be replaced.
    choose = partial(runs.choose_folder, folder.path, "digits", overwrite or output is None, key)
    with runs.claimed(choose, key, runs.command_line(), say=console.say) as folder:
        with (
            runs.Folder(room.HOME).locked(runs.command_line()),
            console.track("training a ViT on digits, once, for about half a minute") as progress,
        ):
            model, data, accuracy = room.prepare(room.HOME, progress)
        console.say(f"Test accuracy of the dense ViT: {accuracy:.1%}")
        options = Options(str(model), DataOptions(str(data), limit=1000), LoadOptions(device=device))
        search = SearchOptions(tuple(budget_of(f"keep {keep}") for keep in room.KEEP))
        config = PruneConfig(options, search, methods=DEFAULT_METHODS)
        prune_run(config, folder, console)
    terminal.print_scores(console, folder.read_scores())
    terminal.print_pruned(console, folder)
