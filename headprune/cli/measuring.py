"""The commands `headprune evaluate` and `headprune compare`, which measure and compare what is there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.app.options import DataOptions, LoadOptions, MetricOptions, TaskOptions
from headprune.cli import tables
from headprune.cli.app import Console, Seed, command

if TYPE_CHECKING:
    from headprune.app.comparison import RunComparison

_Run = partial(typer.Argument, help="A run folder.")


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
        tables.print_values(console, table)
    console.document({"models": list(models), "tables": [documents.to_json(table) for table in measured]})


@command("`headprune compare reports/gpt2-1 reports/gpt2-2`")
def compare(
    first: Annotated[Path, _Run(metavar="RUN")], second: Annotated[Path, _Run(metavar="RUN")], console: Console
) -> None:
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
    tables.print_table(console, "Both runs", Table(head, rows))
    changes = [
        (p.first, p.second, numbers.change(p.change, metric), "yes" if p.paired else "no", p.change.verdict)
        for p in comparison.pairs
    ]
    head = ["of the first run", "of the second run", "change (95 %)", "paired", "verdict"]
    tables.print_table(console, f"Change of {metric} from the first run to the second", Table(head, changes))
    options = [(name, *both) for name, both in comparison.options.items()]
    tables.print_table(console, "Options that differ", Table(("option", *comparison.runs), options))
    for note in comparison.notes:
        console.result(note)
