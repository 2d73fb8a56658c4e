"""`headprune estimate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli.app import app
from headprune.cli.asked import known_methods, refuse_unused
from headprune.cli.made import goal_of, options_of, source_of
from headprune.cli.options import Budgets, Data, Loading, Manner, Placing, Planning, Scoring, Seed, by_groups, typed
from headprune.cli.session import session

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.estimating import CostEstimate


@app.command(
    epilog="Example: `headprune estimate MODEL -d DATA --keep 50%`, or `headprune estimate MODEL -d DATA -m ablation`"
)
@by_groups
def estimate(
    budgets: Budgets,
    planning: Planning,
    data: Data,
    scoring: Scoring,
    loading: Loading,
    placing: Placing,
    manner: Manner,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Without it, the model of the newest scores.")
    ] = None,
    no_repair: Annotated[bool, typer.Option("--no-repair", help="As for prune.", rich_help_panel="Repair")] = False,
    finetune: Annotated[
        float | None, typer.Option(metavar="EPOCHS", help="As for prune.", rich_help_panel="Repair")
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help="As for prune.", rich_help_panel="Data")] = None,
    scores: Annotated[
        Path | None, typer.Option(help="Scores that prune would use: a run folder or its scores.json.")
    ] = None,
    export: Annotated[
        list[str] | None, typer.Option(metavar="FORMAT", help="As for prune; its time is not counted.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="As for prune; without a budget, as for score. Repeatable."),
    ] = None,
    batches: Annotated[
        int,
        typer.Option(
            min=1, help="How many batches to measure on, at most; never more than a tenth of them, but at least one."
        ),
    ] = 4,
    seed: Seed = None,
) -> None:
    """Say what `prune` with the same options (without a budget: `score`) will cost: passes, FLOPs, memory, time on this device. Nothing is written."""
    with session(manner) as console:
        from headprune.app import workflow
        from headprune.estimating import Limits
        from headprune.scoring import DEFAULT_METHODS
        from headprune.searching import methods_for

        limits, asked = Limits(batches), known_methods(method)
        prunes = (
            export
            or budgets.asked
            or budgets.plan
            or typed(planning)
            or no_repair
            or finetune is not None
            or scores is not None
        )
        if model is not None and not prunes:
            options = options_of(None, model, data, scoring, loading, seed, None, also, placing)
            methods = asked or list(DEFAULT_METHODS)
            scene = workflow.open_scene(options, console, methods)
            _tell(console, workflow.estimate_score(scene, methods, limits))
            return
        goal = goal_of(budgets, planning, no_repair=no_repair, finetune=finetune, method=method)
        source = None if budgets.plan and model and scores is None else source_of(model, scores, None, console)
        refuse_unused(source, goal, {**vars(scoring), "method": method})
        keep = None if source else next(iter(budgets.asked.get("keep", [])), None)
        options = options_of(source, model, data, scoring, loading, seed, keep, also, placing)
        methods = asked or (list(methods_for(goal.strategy)) if source is None and goal.uses_scores else [])
        wanted = workflow.PruneRun(options, goal, methods, source, export or ())
        known = wanted.scores()
        scene = wanted.open(known, console)
        found = workflow.estimate_prune(wanted, scene, known, limits)
        if source is not None:
            found = replace(
                found,
                notes=(*found.notes, f"The scores in {source.path} are used as they are, so scoring costs nothing."),
            )
        _tell(console, found)


def _tell(console: Console, found: CostEstimate) -> None:
    """An estimate, for people or as a document."""
    from rich.table import Table
    from rich.text import Text

    from headprune.amounts import duration, flops, size

    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(("phase", "forward", "backward", "operations", "time")):
        table.add_column(name, justify="right" if i else "left")
    for p in found.phases:
        varies = p.forward_high > p.forward_low
        forward = f"{p.forward:,.1f}" + (f" ({p.forward_low:,.1f} to {p.forward_high:,.1f})" if varies else "")
        made = p.forward or p.backward
        table.add_row(
            Text(p.name),
            forward if made else "",
            f"{p.backward:,.1f}" if made else "",
            flops(p.flops) if made else "",
            duration(p.seconds),
        )
    console.result(f"Passes over {found.examples:,} examples, typically:\n")
    console.table(table)
    console.result("")
    if duration(found.seconds_low) != duration(found.seconds_high):
        console.result(
            f"Between {duration(found.seconds_low)} and {duration(found.seconds_high)}, depending on what the run finds."
        )
    held = ", ".join(f"{name} {size(count)}" for name, count in found.memory_parts.items())
    console.result(f"Memory: {held}.")
    for note in found.notes:
        console.result(note)
    console.result(found.line)
    console.document({**found.to_json(), "line": found.line})
