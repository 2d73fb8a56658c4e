"""The command line: parsing and printing only. torch is imported when a command runs, not for --help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.asked import (
    Commands,
    bytes_of,
    fail,
    known_methods,
    numbers_in,
    planned,
    refuse_unused,
    scores_first,
)  # fmt: skip
from headprune.errors import HeadPruneError, Stopped, explained, first_line

if TYPE_CHECKING:
    from headprune.console import Console
    from headprune.planning.budgets import Fit
    from headprune.runs import RunFolder
    from headprune.scoring import HeadScores
    from headprune.workflow import Goal, Options, Scene


app = typer.Typer(
    name="headprune",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Which attention heads matter, and what happens when the others go.\n\n"
    "    headprune demo                                                  # no model, no network needed\n\n"
    "    headprune score MODEL -d DATASET                                # importance of every head\n\n"
    "    headprune prune --keep 50%                                      # prune what was scored, measure, save\n\n"
    "    headprune prune --target-latency 80%                            # the same, to a time on this device",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder, or a folder headprune saved.")]
DatasetOption = Annotated[
    str | None,
    typer.Option("--dataset", "-d", help="Hub id, folder, or .jsonl, .csv or .parquet file.", rich_help_panel="Data"),
]
Subset = Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.", rich_help_panel="Data")]
Split = Annotated[str | None, typer.Option(help="Split to score on [train, if there is one].", rich_help_panel="Data")]
ChooseSplit = Annotated[str | None, typer.Option(help="Split to choose plans on [validation].", rich_help_panel="Data")]
ReportSplit = Annotated[str | None, typer.Option(help="Split to report on [test].", rich_help_panel="Data")]
TextColumn = Annotated[
    str | None,
    typer.Option(help="Column of the text, image or sound; two for pairs: a,b [guessed].", rich_help_panel="Data"),
]
LabelColumn = Annotated[
    str | None, typer.Option(help="Column of the label or target [guessed].", rich_help_panel="Data")
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", "-L", min=2, help="Examples to score, and to choose, on [512].", rich_help_panel="Data"),
]
ReportLimit = Annotated[
    int | None, typer.Option(min=2, help="Examples to report on, at most [2000].", rich_help_panel="Data")
]
MaxLength = Annotated[
    int | None, typer.Option(min=2, help="Tokens per example, at most [512].", rich_help_panel="Data")
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", "-b", min=1, help="Examples per batch [32].", rich_help_panel="Data")
]
Task = Annotated[str | None, typer.Option(help="What the model is for [read from its config].")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps [auto].")]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16 [auto: as stored; float32 on a CPU].")
]
_MAX_SEED = 2**31 - 1  # as in headprune.data, which is not imported for --help
Seed = Annotated[int | None, typer.Option(min=0, max=_MAX_SEED, help="For every draw [0].")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Run folder [reports/MODEL-1, or the next free number].")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="The libraries' messages too, and tracebacks.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Load and check everything, then stop; write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the run folder.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method", "-m", help="Scoring method; repeatable. `headprune methods` lists them [ablation, gradient]."
    ),
]
PlanBy = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        help="Scores to plan by; repeatable [all that there are; where there are none, heads are scored by gradient, which is "
        "enough for auto, or by ablation and gradient for another --strategy].",
    ),
]
Examples = Annotated[
    int | None,
    typer.Option(min=2, help="Examples to ablate, at most; gradients carry the rest [all].", rich_help_panel="Scoring"),
]
Seconds = Annotated[
    float | None, typer.Option("--time", min=0.1, help="Seconds to ablate for, about.", rich_help_panel="Scoring")
]
MaxMemory = Annotated[
    str | None, typer.Option(help="For scoring, such as 4GB [half of what is free].", rich_help_panel="Scoring")
]
Normalise = Annotated[
    bool, typer.Option("--normalise", help="Divide each layer's scores by their L2 norm.", rich_help_panel="Scoring")
]
Distil = Annotated[
    bool,
    typer.Option(
        "--distil", help="Score by the divergence from the dense model, not by labels.", rich_help_panel="Scoring"
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Of l0, dsp and integrated-gradients.", rich_help_panel="Scoring")
]
Permutations = Annotated[int | None, typer.Option(min=1, help="Of shapley, at most.", rich_help_panel="Scoring")]
Sparsity = Annotated[float | None, typer.Option(min=0, help="Of l0: the price of a head.", rich_help_panel="Scoring")]
NoResume = Annotated[
    bool,
    typer.Option("--no-resume", help="Start anew, whatever an interrupted run has left.", rich_help_panel="Scoring"),
]

_DEFAULT_METHODS = ["ablation", "gradient"]
_BUDGET = "Budget (one kind)"


@app.command(
    epilog="Example: `headprune score distilbert/distilbert-base-uncased-finetuned-sst-2-english -d nyu-mll/glue --subset sst2`"
)
def score(
    model: Model,
    dataset: DatasetOption = None,
    subset: Subset = None,
    split: Split = None,
    choose_split: ChooseSplit = None,
    report_split: ReportSplit = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    limit: Limit = None,
    report_limit: ReportLimit = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = None,
    method: Methods = None,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            "-k",
            help="What l0 and dsp aim at, and where --examples and --time look closest.",
            rich_help_panel="Scoring",
        ),
    ] = None,
    examples: Examples = None,
    seconds: Seconds = None,
    max_memory: MaxMemory = None,
    normalise: Normalise = False,
    distil: Distil = False,
    steps: Steps = None,
    permutations: Permutations = None,
    sparsity: Sparsity = None,
    no_resume: NoResume = False,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    output: Output = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
) -> None:
    """Score the importance of every head, by ablation and by gradient."""
    key = _key("score", dict(locals()))
    with _session(quiet, verbose, json) as console:
        from headprune import runs, workflow
        from headprune.folders import claimed

        options = _options(None, dict(locals()))
        methods = known_methods(method) or _DEFAULT_METHODS
        choose = partial(runs.choose_folder, output, Path(options.model.rstrip("/")).name, overwrite, key)
        if dry_run:
            folder = choose()
            scene = workflow.open_scene(options, console)
            _print_layers(console, scene)
            console.result(f"Would score by {', '.join(methods)} and write {folder.path}. Nothing was written.")
            console.document(planned(folder, methods, scene))
            return
        with claimed(choose, key, runs.command_line(), resume=not no_resume, say=console.say) as folder:
            if not folder.done_by(key):  # else it was killed just after
                workflow.score_run(options, methods, folder, console)
            scores = folder.read_scores()
            _print_scores(console, scores)
            console.result(f"\nReport: {folder.report_path}\nNext:   headprune prune --keep 50% -o {folder.path}")
            console.document({"folder": str(folder.path), "scores": [s.to_json() for s in scores]})


@app.command(epilog="Example: `headprune prune --keep 36`, after `headprune score`")
def prune(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Without it, the model of the newest scores.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", "-k", help="Heads to keep: 36, 50% or 0.5; repeatable.", rich_help_panel=_BUDGET),
    ] = None,
    target_latency: Annotated[
        str | None,
        typer.Option(help="Time of a forward pass, timed on this device: 12.5 (ms) or 80%.", rich_help_panel=_BUDGET),
    ] = None,
    target_flops: Annotated[
        str | None, typer.Option(help="Of a forward pass: 1.2G or 80%.", rich_help_panel=_BUDGET)
    ] = None,
    target_params: Annotated[
        str | None, typer.Option(help="Parameters of the model: 60M or 80%.", rich_help_panel=_BUDGET)
    ] = None,
    target_kv_cache: Annotated[
        str | None, typer.Option(help="A decoder's cache, bytes per token: 20K or 50%.", rich_help_panel=_BUDGET)
    ] = None,
    max_drop: Annotated[
        str | None,
        typer.Option(
            help="The fewest heads that surely (95 %) lose no more accuracy: 0.01; of perplexity: its relative increase.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan's file, such as a plan.json edited by hand.", rich_help_panel=_BUDGET)
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            "-s",
            help="How heads are picked by their scores; `headprune methods` lists them [auto].",
            rich_help_panel="Planning",
        ),
    ] = None,
    protect: Annotated[
        str | None, typer.Option(help="Layers and heads that stay: L0,L3.H7.", rich_help_panel="Planning")
    ] = None,
    min_heads_per_layer: Annotated[
        int | None, typer.Option(min=0, help="Query heads that every layer keeps [0].", rich_help_panel="Planning")
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(
            help="Of the search for heads: low, normal or high (counted, never timed; see docs/planning.md) [normal].",
            rich_help_panel="Planning",
        ),
    ] = None,
    no_repair: Annotated[
        bool,
        typer.Option("--no-repair", help="Leave the kept heads' weights as they were.", rich_help_panel="Repair"),
    ] = False,
    finetune: Annotated[
        float | None,
        typer.Option(
            metavar="EPOCHS", help="Train afterwards, with distillation from the dense model.", rich_help_panel="Repair"
        ),
    ] = None,
    scores: Annotated[Path | None, typer.Option(help="Scores to use: a run folder or its scores.json.")] = None,
    dataset: DatasetOption = None,
    subset: Subset = None,
    split: Split = None,
    choose_split: ChooseSplit = None,
    report_split: ReportSplit = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    limit: Limit = None,
    report_limit: ReportLimit = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = None,
    method: PlanBy = None,
    examples: Examples = None,
    seconds: Seconds = None,
    max_memory: MaxMemory = None,
    normalise: Normalise = False,
    distil: Distil = False,
    steps: Steps = None,
    permutations: Permutations = None,
    sparsity: Sparsity = None,
    no_resume: NoResume = False,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    output: Output = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    key = _key("prune", dict(locals()))
    with _session(quiet, verbose, json) as console:
        from headprune import runs, workflow
        from headprune.folders import claimed

        goal = _goal(dict(locals()))
        asked = known_methods(method)
        # A plan needs no scores, so none are looked for if it is said what to prune and measure on.
        source = None if plan and model and scores is None else _source(model, scores, output, console)
        refuse_unused(source, goal, dict(locals()))
        options = _options(source, {**locals(), "keep": keep[0] if keep and not source else None})
        choose = partial(_prune_folder, source, output, options.model, overwrite, key)
        usual = ["gradient"] if goal.strategy == "auto" else _DEFAULT_METHODS
        methods = asked or (usual if source is None and goal.uses_scores else [])
        if methods and not asked:
            console.say(scores_first(goal, methods))
        if dry_run:
            folder = choose()
            if source is None and goal.needs_scores:
                scene = workflow.open_scene(options, console)
                workflow.check_goal(goal, scene)
                _print_layers(console, scene)
                console.result(f"Would score, then prune and write {folder.path}. Nothing was written.")
                console.document(planned(folder, methods, scene))
                return
            found, fits = workflow.plan_run(options, goal, asked, source, console)
            told: set[str] = set()
            for fitted in fits:
                _print_plan(console, fitted, found, told)
            console.document({"folder": str(folder.path), "plans": [f.plan.to_json() for f in fits]})
            console.result(f"Would prune and write {folder.path}. Nothing was written.")
            return
        with claimed(choose, key, runs.command_line(), resume=not no_resume, say=console.say) as folder:
            if not folder.done_by(key):  # else it was killed just after
                workflow.prune_run(options, goal, methods, source, folder, console)
            _print_pruned(console, folder)


@app.command(epilog="Example: `headprune finetune reports/MODEL-1/pruned-36`, after `headprune prune --keep 36`")
def finetune(
    pruned: Annotated[
        Path, typer.Argument(metavar="PRUNED", help="A folder headprune saved, or a run folder that holds one.")
    ],
    epochs: Annotated[float, typer.Option(help="Passes over the training part.", rich_help_panel="Training")] = 1.0,
    learning_rate: Annotated[float | None, typer.Option(help="At its peak [3e-5].", rich_help_panel="Training")] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The dense model [what PRUNED was made from].", rich_help_panel="Training"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the distillation [2].", rich_help_panel="Training")
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Weight of the dense model's answers against the labels [0.5].", rich_help_panel="Training"),
    ] = None,
    hidden_states: Annotated[
        bool,
        typer.Option("--hidden-states", help="Learn the dense model's hidden states too.", rich_help_panel="Training"),
    ] = False,
    patience: Annotated[
        int | None,
        typer.Option(help="Stop after so many epochs that are no better [2].", rich_help_panel="Training"),
    ] = None,
    train_limit: Annotated[
        int | None, typer.Option(min=1, help="Examples to train on, at most [all].", rich_help_panel="Data")
    ] = None,
    dataset: DatasetOption = None,
    subset: Subset = None,
    split: Split = None,
    choose_split: ChooseSplit = None,
    report_split: ReportSplit = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    limit: Limit = None,
    report_limit: ReportLimit = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = None,
    task: Task = None,
    device: Device = None,
    dtype: Annotated[str, typer.Option(help="To train in: float32 or bfloat16.")] = "float32",
    seed: Annotated[
        int | None, typer.Option(min=0, max=_MAX_SEED, help="For the order of the examples, and dropout [0].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the trained model [PRUNED-finetuned].")
    ] = None,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume", help="Start anew, whatever an interrupted run has left.", rich_help_panel="Training"
        ),
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train a pruned model, with distillation from the dense one, and measure all three."""
    with _session(quiet, verbose, json) as console:
        given = dict(locals())
        from dataclasses import fields

        from headprune import finetune_run as room
        from headprune.data import DataOptions
        from headprune.distillation import Mixture
        from headprune.finetune import FinetuneOptions

        def typed(kind: Any, *without: str) -> dict[str, Any]:
            names = {f.name for f in fields(kind)} - set(without)
            return {k: v for k, v in given.items() if k in names and v is not None}

        folder, document = room.finetune_run(
            room.FinetuneRun(
                pruned, teacher, data=typed(DataOptions, "seed"), train_limit=train_limit,
                training=FinetuneOptions(**typed(FinetuneOptions), mixture=Mixture(**typed(Mixture))),
                task=task, device=device, dtype=dtype, output=output, overwrite=overwrite, resume=not no_resume,
                trust_remote_code=trust_remote_code,
            ),
            console,
        )  # fmt: skip
        _print_finetuned(console, document)
        console.result(f"\nReport: {folder / room.REPORT}\nModel:  {folder}  (headprune.load reads it)")
        console.document({"folder": str(folder), **document})


@app.command(epilog="Example: `headprune report reports/digits`")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a run's markdown and figures again, from its JSON documents."""
    with _session(quiet, verbose, json) as console:
        from headprune import report as room
        from headprune.runs import RunFolder, command_line

        if not run.is_dir():
            raise HeadPruneError(f"There is no folder {run}.", "Pass a folder that `headprune score` or `prune` wrote.")
        folder = RunFolder(run)
        folder.settle()
        if not (run / "run.json").is_file():
            raise HeadPruneError(
                f"{run} is not a run's folder: it has no run.json.", "Pass one that `headprune score` or `prune` wrote."
            )
        folder.read_run()
        with folder.locked(command_line()):
            room.write(folder)
        console.result(str(folder.report_path))
        console.document({"folder": str(folder.path), "report": str(folder.report_path)})


@app.command(epilog="Example: `headprune inspect openai-community/gpt2`")
def inspect(
    model: Model,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust_remote_code: Trust = False,
    revision: Revision = None,
) -> None:
    """List a model's attention layers, heads and groups, and what can be pruned."""
    with _session(quiet, verbose, json) as console:
        from headprune.models import dummy_input, load_model
        from headprune.trace import find_attention

        loaded = load_model(
            model, task=task, device=device or "auto", dtype=dtype or "auto", revision=revision,
            trust_remote_code=trust_remote_code, with_processor=False,
        )  # fmt: skip
        layers = find_attention(loaded.model, dummy_input(loaded, 2, 8))
        _print_attention(console, type(loaded.model).__name__, layers)
        console.document({"model": model, "layers": [layer.to_json() for layer in layers]})


@app.command(epilog="Example: `headprune bench MODEL reports/digits/pruned-12 --batch-sizes 1,64`")
def bench(
    dense: Annotated[str, typer.Argument(metavar="DENSE", help="The model to compare with.")],
    pruned: Annotated[str, typer.Argument(metavar="PRUNED", help="The other model.")],
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8,32",
    lengths: Annotated[str, typer.Option(help="Tokens; comma-separated, for texts.")] = "32,128",
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    trust_remote_code: Trust = False,
) -> None:
    """Time two models against each other, in turn, on the same inputs."""
    with _session(quiet, verbose, json) as console:
        from headprune import latency
        from headprune.models import check_length, dummy_input, load_model

        sizes, tokens = numbers_in("--batch-sizes", batch_sizes), numbers_in("--lengths", lengths)
        first, second = (
            load_model(
                m, task=task, device=device or "auto", dtype=dtype or "auto", trust_remote_code=trust_remote_code,
                with_processor=False,
            )
            for m in (dense, pruned)
        )  # fmt: skip
        if first.task != second.task:
            raise HeadPruneError(
                f"{dense} is for {first.task.name}, {pruned} for {second.task.name}.", "Compare alike."
            )
        used = tokens if first.task.modality == "text" else [0]
        for loaded in (first, second) if any(used) else ():
            check_length(loaded, max(used))
        inputs = [(b, t, dummy_input(first, b, t or 1)) for t in used for b in sizes]
        with console.track("timing") as progress:
            rows = latency.bench(
                {"dense": first.model, "pruned": second.model}, inputs, seed=seed or 0, progress=progress
            )
        count = latency.parameters(second.model) / latency.parameters(first.model) - 1
        _print_latency(console, [row.to_json() for row in rows])
        console.result(
            f"Parameters: {latency.parameters(first.model):,} and {latency.parameters(second.model):,} ({count:+.1%})"
        )
        console.document({"rows": [row.to_json() for row in rows]})


@app.command(epilog="Example: `headprune score MODEL -d DATASET --method fisher --method random`")
def methods(json: Json = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """List the scoring methods, each with its unit, and the planning strategies."""
    with _session(quiet, verbose, json) as console:
        from rich.table import Table

        from headprune.planning import STRATEGIES
        from headprune.scoring import METHODS

        table = Table(box=None)
        for column in ("method", "what it is", "unit"):
            table.add_column(column, overflow="fold")
        for m in METHODS.values():
            table.add_row(m.name, m.about, m.unit)
        console.table(table)
        table = Table(box=None)
        for column in ("strategy", "how heads are picked by their scores"):
            table.add_column(column, overflow="fold")
        for s in STRATEGIES.values():
            table.add_row(s.name, s.about)
        console.result("")
        console.table(table)
        console.document(
            {
                "methods": [{"name": m.name, "about": m.about, "unit": m.unit} for m in METHODS.values()],
                "strategies": [{"name": s.name, "about": s.about} for s in STRATEGIES.values()],
            }
        )


@app.command(epilog="Example: `headprune demo`")
def demo(
    output: Output = None,
    device: Device = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    overwrite: Overwrite = False,
) -> None:
    """Train a small ViT on scikit-learn's digits (once), score it, prune it, and write reports/digits/."""
    key = _key("demo", dict(locals()))
    with _session(quiet, verbose, json) as console:
        from headprune import demo as room
        from headprune import runs, workflow
        from headprune.data import DataOptions
        from headprune.folders import Folder, claimed
        from headprune.planning.budgets import Budget

        folder = runs.RunFolder(output or room.REPORT)
        if room.was_run(folder) and not overwrite:
            console.result(f"The demo has been run: {folder.report_path}\nAgain: headprune demo --overwrite")
            console.document({"folder": str(folder.path), **(folder.read_metrics() or {})})
            return
        # reports/digits is the demo's own: a checkout brings one made on another machine. It stays until there is another.
        choose = partial(runs.choose_folder, folder.path, "digits", overwrite or output is None, key)
        with claimed(choose, key, runs.command_line(), say=console.say) as folder:
            if not folder.done_by(key):  # else it was killed just after
                with (
                    Folder(room.HOME).locked(runs.command_line()),
                    console.track("training a ViT on digits, once, for about half a minute") as progress,
                ):
                    model, data, accuracy = room.prepare(room.HOME, progress)
                console.say(f"Test accuracy of the dense ViT: {accuracy:.1%}")
                options = workflow.Options(str(model), DataOptions(str(data), limit=1000), device=device or "auto")
                goal = workflow.Goal(tuple(Budget.parse("keep", keep) for keep in room.KEEP))
                workflow.prune_run(options, goal, _DEFAULT_METHODS, None, folder, console)
            room.remember(folder)
            _print_scores(console, folder.read_scores())
            _print_pruned(console, folder)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of the ``headprune`` command."""

    def stop(number: int, _: Any) -> None:
        raise Stopped(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, stop)
    app()


# -- options ----------------------------------------------------------------------------------


@contextmanager
def _session(quiet: bool, verbose: bool, as_json: bool) -> Iterator[Console]:
    """A command's surroundings: quiet libraries, and errors as one line with the right exit code."""
    from headprune.console import Console

    console = Console(quiet, as_json)
    # What libraries (or a model's own code) print must not get into the document.
    apart = redirect_stdout(sys.stderr) if as_json else nullcontext()
    try:
        with apart:
            _quieten(verbose)
            yield console
    except HeadPruneError as error:
        fail(console, str(error.args[0]), error.hint)
        if verbose:
            raise
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped()
        fail(console, "interrupted." if stopped.status == Stopped().status else "terminated.", stopped.hint)
        raise typer.Exit(stopped.status) from None
    except (typer.Exit, SystemExit, BrokenPipeError):  # nobody reads on, as behind `| head`
        raise
    except Exception as error:
        name, known = type(error).__name__, explained(error)
        if known is not None:
            fail(console, str(known.args[0]), known.hint)
        else:
            fail(console, f"{name}: {first_line(error)}", "(unexpected; add -v for the traceback)")
        if verbose or os.environ.get("HEADPRUNE_DEBUG"):
            raise
        raise typer.Exit(1) from None


def _quieten(verbose: bool) -> None:
    """Keep the libraries' bars and warnings off the screen."""
    if verbose:
        return
    import warnings

    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", message="headprune: ")  # such as a checkpoint that was edited
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # an error is told once, by its exception
    datasets.disable_progress_bars()


_MANNERS = ("json", "quiet", "verbose", "dry_run", "no_resume")


def _key(command: str, given: dict[str, Any]) -> str:
    """A name for what was typed, but for the manner of it: whoever types the same again goes on."""
    from headprune.folders import key_of

    return key_of(command, sorted((k, v) for k, v in given.items() if k not in _MANNERS))


def _options(source: RunFolder | None, given: dict[str, Any]) -> Options:
    """What was typed, over what the scores' run was made with, over the defaults."""
    from dataclasses import fields, replace

    from headprune.data import DataOptions
    from headprune.scoring import Settings
    from headprune.workflow import Options

    data_names = {f.name for f in fields(DataOptions)}
    typed_data = {k: v for k, v in given.items() if k in data_names and v is not None}
    if given.get("max_memory") is not None:
        given["max_memory"] = bytes_of(given["max_memory"])
    names = {f.name for f in fields(Settings)} - {"keep"}
    settings = Settings(**{k: v for k, v in given.items() if k in names})
    names = {f.name for f in fields(Options)} - {"data", "scoring"}
    typed = {k: v for k, v in given.items() if k in names and v is not None and v is not False}
    if source is not None:
        base = Options.of_run(source.read_run(), source.path / "run.json")
        found = replace(base, **typed, data=replace(base.data, **typed_data), scoring=settings)
        found.check()
        return found
    if "dataset" not in typed_data:
        raise HeadPruneError(
            "No dataset was given.", "Name one with -d, for instance: -d stanfordnlp/imdb, or -d data/train.jsonl."
        )
    found = Options(**typed, data=DataOptions(**typed_data), scoring=settings)
    found.check()
    return found


def _goal(given: dict[str, Any]) -> Goal:
    """The one kind of budget that was given, with its constraints.

    Raises:
        HeadPruneError: No budget, two kinds of them, or a plan together with what would change it.
    """
    from headprune.planning import strategy_named
    from headprune.planning.budgets import FLAGS, Budget
    from headprune.planning.effort import effort_named
    from headprune.plans import PruningPlan
    from headprune.workflow import Goal

    typed = {kind: given[flag.strip("-").replace("-", "_")] for kind, flag in FLAGS.items()}
    flags = [FLAGS[kind] for kind, value in typed.items() if value] + (["--plan"] if given["plan"] else [])
    if not flags:
        raise HeadPruneError(
            "How many heads to keep?",
            "Say it with --keep, for instance --keep 50%, or with another budget (headprune prune --help).",
        )
    if len(flags) > 1:
        raise HeadPruneError(f"{' and '.join(flags)} are different kinds of budget.", "Give one of them.")
    if given["finetune"] is not None and not 0 < given["finetune"] < float("inf"):
        raise HeadPruneError(f"--finetune {given['finetune']:g} is no number of epochs.", "Give 1, or a fraction.")
    after: dict[str, Any] = {"repair": not given["no_repair"], "finetune": given["finetune"] or 0.0}
    if given["plan"]:
        changing = [
            n for n in ("strategy", "effort", "protect", "min_heads_per_layer", "method") if given[n] is not None
        ]
        if changing:
            flag = f"--{changing[0].replace('_', '-')}"
            raise HeadPruneError(f"--plan says which heads go, so {flag} has no use.", f"Leave out {flag}.")
        return Goal(plan=PruningPlan.load(given["plan"]), file=str(given["plan"]), **after)
    strategy = strategy_named(given["strategy"] or "auto").name
    after["effort"] = effort_named(given["effort"] or "normal").name
    texts = {kind: [value] if isinstance(value, str) else value for kind, value in typed.items() if value}
    budgets = tuple(Budget.parse(kind, text) for kind, values in texts.items() for text in values)
    for budget in budgets:
        budget.check()
    return Goal(budgets, strategy, given["protect"] or "", given["min_heads_per_layer"] or 0, **after)


def _source(model: str | None, scores: Path | None, output: Path | None, console: Console) -> RunFolder | None:
    """The run whose scores `prune` uses, if any."""
    from headprune.runs import REPORTS, RunFolder, newest_scores

    if scores is not None:
        if not scores.exists():
            raise HeadPruneError(f"There is no file or folder {scores}.", "Pass a run folder, or its scores.json.")
        folder = RunFolder(scores if scores.is_dir() else scores.parent)
        if not scores.is_dir() and scores.name != folder.scores_path.name:
            raise HeadPruneError(f"{scores} is not a run's scores.json.", "Pass a run folder, or its scores.json.")
        folder.read_scores()
        return folder
    found = newest_scores(output, model)
    if found is None and model is None:
        raise HeadPruneError(
            f"There are no scores in {output or REPORTS}.",
            "Run `headprune score MODEL -d DATASET` first, or name a MODEL.",
        )
    if found is not None:
        console.say(f"Using the scores in {found.path}")
    return found


def _prune_folder(source: RunFolder | None, output: Path | None, model: str, overwrite: bool, key: str) -> RunFolder:
    """Where `prune` writes: the scores' own run, unless that was pruned before, or another prune was interrupted there."""
    from headprune.runs import choose_folder

    if source is not None and output in (None, source.path, source.path.parent):
        free = not source.pruned or overwrite or source.done_by(key)
        if free and (output == source.path or source.command is None or source.left_by(key)):
            return source
        if output == source.path:
            raise HeadPruneError(
                f"{source.path} was pruned before.", "Choose another folder with -o, or add --overwrite."
            )
        output = None
    return choose_folder(output, Path(model.rstrip("/")).name, overwrite, key)


# -- printing ---------------------------------------------------------------------------------


def _print_scores(console: Console, scores: list[HeadScores]) -> None:
    from rich.table import Table

    from headprune.scoring.agreement import agreements, chance

    for s in scores:
        _print_heat(console, s, {})
    for s in scores:
        if s.caution:
            console.result(f"{s.method}: {s.caution}.")
        if stable := s.details.get("stability"):
            console.result(
                f"{s.method}: other examples would order the heads alike to Spearman {stable['spearman']:.2f}."
            )
    if not (pairs := agreements(scores)):
        return
    random = chance(len(scores[0].flat()))
    table = Table(title="Rank agreement", title_justify="left", box=None)
    for column in ("", "", "Spearman", "Kendall", "better half in common"):
        table.add_column(column)
    for both in pairs:
        table.add_row(both.first, both.second, f"{both.spearman:.2f}", f"{both.kendall:.2f}", f"{both.top_half:.0%}")
    table.add_row(
        "random orders", "95 % within", f"±{random.spearman:.2f}", f"±{random.kendall:.2f}", f"{random.top_half:.0%}",
        style="dim",
    )  # fmt: skip
    console.result("")
    console.table(table)


def _print_heat(console: Console, s: HeadScores, drop: dict[str, list[int]]) -> None:
    from headprune.console import heat_map

    rows = [(f"L{a.index}", s.values[a.name].tolist(), drop.get(a.name, [])) for a in s.layers]
    console.result("")
    console.table(heat_map(f"{s.method}: {s.unit}; {s.basis}", rows, s.signed))


def _print_plan(console: Console, fitted: Fit, scores: list[HeadScores], told: set[str]) -> None:
    """A plan, and those of its notes that were not told yet."""
    plan = fitted.plan
    notes = [note for note in plan.notes if note not in told]
    told.update(notes)
    for s in scores:
        if s.method == plan.method:
            _print_heat(console, s, plan.drop)
    by = ", ".join(filter(None, (plan.method, plan.strategy)))
    cost = f" Asked: {plan.budget}." if plan.budget else ""
    if fitted.budget is not None and (reading := fitted.reading) is not None:
        cost = f" Asked: {plan.budget}; measured: {fitted.budget.show(reading.value)}."
    console.result(f"{f'{by}: ' if by else ''}keeps {plan.kept} of {plan.total}.{cost} {' '.join(notes)}".rstrip())
    for name, heads in plan.drop.items():
        console.result(f"  {name}: drops {', '.join(f'H{h}' for h in heads)}")


def _print_layers(console: Console, scene: Scene) -> None:
    _print_attention(console, type(scene.model).__name__, scene.layers)


def _print_attention(console: Console, name: str, layers: list[Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: {sum(a.num_heads for a in layers)} heads", title_justify="left", box=None)
    for column in ("", "attention layer", "kind", "heads", "key/value", "width", "prunable"):
        table.add_column(column, overflow="fold")
    for a in layers:
        alone = "heads" if len(a.units[0]) == 1 else f"groups of {len(a.units[0])}"
        table.add_row(
            f"L{a.index}", a.name, a.kind, str(a.num_heads), str(a.num_kv_heads), str(a.head_dim),
            alone if a.prunable else f"no: {a.reason}",
        )  # fmt: skip
    console.table(table)


def _print_pruned(console: Console, folder: RunFolder) -> None:
    metrics = folder.read_metrics()
    assert metrics is not None
    _print_results(console, metrics)
    console.result(f"\nReport: {folder.report_path}")
    for b in metrics["budgets"]:
        console.result(f"Model:  {folder.path / b['checkpoint']}  (headprune.load reads it)")
    console.document({"folder": str(folder.path), **metrics})


def _print_results(console: Console, metrics: dict[str, Any]) -> None:
    from rich.table import Table

    metric = metrics["metric"]
    table = Table(box=None, title="Dense and pruned, on the reporting part", title_justify="left")
    for column in ("heads", metric, "change (95 %)", "random", "parameters", "by"):
        table.add_column(column)
    show: Callable[[float], str] = (lambda v: f"{100 * v:.1f} %") if metric == "accuracy" else (lambda v: f"{v:,.4g}")
    sign: Callable[[float], str] = (lambda v: f"{100 * v:+.2f}") if metric == "accuracy" else (lambda v: f"{v:+.1%}")
    dense = metrics["dense"]
    total = metrics["budgets"][0]["total"]
    table.add_row(f"{total} (dense)", show(dense["metrics"][metric]), "", "", f"{dense['parameters']:,}", "")
    for b in metrics["budgets"]:
        c = b["change"]
        table.add_row(
            str(b["kept"]), show(b["pruned"]["metrics"][metric]), f"{sign(c['value'])} ({sign(c['low'])} to {sign(c['high'])})",
            show(sum(b["random"]) / len(b["random"])),
            f"{b['parameters']:,} ({b['parameters'] / dense['parameters'] - 1:+.1%})", b["method"] or b["strategy"],
        )  # fmt: skip
    console.result("")
    console.table(table)
    for b in metrics["budgets"]:
        console.result(f"{b['kept']} heads: {b['change']['verdict']}.")
        if left_out := [t["step"] for t in (b.get("repair") or {}).get("trials", ()) if not t["kept"]]:
            console.result(
                f"{b['kept']} heads: repair of {', '.join(left_out)} did no better on held-out examples; left out."
            )
    _print_latency(console, metrics["latency"]["rows"])


def _print_finetuned(console: Console, document: dict[str, Any]) -> None:
    from rich.table import Table

    from headprune.report.finetuned import rows

    table = Table(box=None, title="Dense, pruned and fine-tuned, on the reporting part", title_justify="left")
    head, *body = rows(document)
    for column in head:
        table.add_column(column)
    for row in body:
        table.add_row(*row)
    console.result("")
    console.table(table)
    console.result(f"Training: {document['changes']['gain']['verdict']}.")


def _print_latency(console: Console, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, title="Latency of a forward pass, dense against pruned in turn", title_justify="left")
    for column in ("input", "model", "median, ms", "95th", "speed-up (95 %)"):
        table.add_column(column)
    for row in rows:
        shape = f"batch {row['batch']}" + (f" x {row['length']} tokens" if row["length"] else "")
        for name, timing in row["timings"].items():
            s = row["speedups"].get(name)
            ratio = f"{s['ratio']:.2f}x ({s['low']:.2f} to {s['high']:.2f})" if s else ""
            table.add_row(shape, name, f"{timing['median']:.2f}", f"{timing['p95']:.2f}", ratio)
            shape = ""
    console.result("")
    console.table(table)


if __name__ == "__main__":
    main()
