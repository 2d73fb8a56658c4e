"""`headprune prune`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.asked import known_methods, planned, refuse_unused, scores_first
from headprune.cli.made import goal_of, key_of, options_of, prune_folder, source_of
from headprune.cli.options import (
    Budgets,
    Data,
    Loading,
    Manner,
    Placing,
    Planning,
    Scoring,
    Seed,
    Writing,
    by_groups,
    typed,
)  # fmt: skip
from headprune.cli.session import session
from headprune.cli.streaming import stream
from headprune.errors import ScoresError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneRun


@app.command(epilog="Example: `headprune prune --keep 36`, after `headprune score`")
@by_groups
def prune(
    budgets: Budgets,
    planning: Planning,
    data: Data,
    scoring: Scoring,
    loading: Loading,
    placing: Placing,
    writing: Writing,
    manner: Manner,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Without it, the model of the newest scores.")
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
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="A second dataset to measure the dense and pruned models on; nothing is fitted to it. Repeatable [for language models a small "
            "English text].",
            rich_help_panel="Data",
        ),
    ] = None,
    scores: Annotated[Path | None, typer.Option(help="Scores to use: a run folder or its scores.json.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help="Write the pruned models for another engine too, as `headprune export` does; onnx and openvino are timed there. "
            "Repeatable.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="Scores to plan by; repeatable [all that there are; where there are none, heads are scored by gradient, which "
            "is enough for auto, or by ablation and gradient for another --strategy].",
        ),
    ] = None,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming",
            help="With --plan: cut a checkpoint that is larger than the memory, directly in its safetensors files. Neither repairs nor measures.",
        ),
    ] = False,
    seed: Seed = None,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    with session(manner, shared=True) as console:
        key = key_of(
            "prune", budgets, planning, data, scoring, loading, placing, writing,
            model=model, no_repair=no_repair, finetune=finetune, scores=scores, method=method, seed=seed,
            also=also, export=export, streaming=streaming,
        )  # fmt: skip
        if streaming:
            others = {
                **typed(planning),
                **typed(data),
                **typed(scoring),
                **typed(placing),
                "finetune": finetune,
                "also": also,
                "export": export,
            }
            others |= {"scores": scores, "method": method, "seed": seed}
            stream(model, budgets, loading, writing, no_repair, key, others, console)
            return
        from headprune.app import runs, workflow
        from headprune.app.folders import claimed
        from headprune.searching import methods_for

        goal = goal_of(budgets, planning, no_repair=no_repair, finetune=finetune, method=method)
        asked = known_methods(method)
        # A plan needs no scores, so none are looked for if it is said what to prune and measure on.
        found = None if budgets.plan and model and scores is None else source_of(model, scores, writing.output, console)

        def pruned(source: RunFolder | None) -> RunFolder | None:
            """What was asked for, with the scores of a run or with new ones."""
            refuse_unused(source, goal, {**vars(scoring), "method": method})
            keep = None if source else next(iter(budgets.asked.get("keep", [])), None)
            options = options_of(source, model, data, scoring, loading, seed, keep, also, placing)
            choose = partial(prune_folder, source, writing.output, options.model, writing.overwrite, key)
            methods = asked or (list(methods_for(goal.strategy)) if source is None and goal.uses_scores else [])
            if methods and not asked:
                console.say(scores_first(goal, methods))
            wanted = workflow.PruneRun(options, goal, methods, source, export or ())
            if writing.dry_run:
                _dry_run(wanted, choose(), console)
                return None
            with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
                did = partial(
                    folder.already_published, key, writing.overwrite
                )  # it may have been killed just after the end
                workflow.prune_run(wanted, folder, console, did)
            return folder

        try:
            folder = pruned(found)
        except ScoresError as error:
            if found is None or scores is not None or model is None or data.dataset is None:
                raise
            # The command says all that is needed without them.
            console.say(f"The scores in {found.path} are left aside. {error.args[0]}")
            folder = pruned(None)
        if folder is not None:
            tables.print_pruned(console, folder)


def _dry_run(wanted: PruneRun, folder: RunFolder, console: Console) -> None:
    """What would be done; nothing is written."""
    from headprune.app import workflow

    if wanted.source is None and wanted.goal.needs_scores:
        scene = wanted.open([], console)
        tables.print_layers(console, type(scene.model).__name__, scene.layers)
        cost = workflow.cost_of_pruning(scene, wanted.goal, wanted.methods)
        console.result(f"Would score, then prune and write {folder.path}. {cost.line} Nothing was written.")
        console.document(planned(folder, list(wanted.methods), scene))
        return
    found, fits = workflow.plan_run(wanted, console)
    told: set[str] = set()
    for fitted in fits:
        tables.print_plan(console, fitted, found, told)
    console.document({"folder": str(folder.path), "plans": [f.plan.to_json() for f in fits]})
    console.result(f"Would prune and write {folder.path}. Nothing was written.")
