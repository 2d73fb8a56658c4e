"""`headprune prune`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.asked import known_methods, planned, refuse_unused, scores_first
from headprune.cli.made import check_epochs, key_of, options_of, plan_of, prune_folder, search_of, source_of
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
)  # fmt: skip
from headprune.cli.session import session
from headprune.errors import ScoresError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig


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
    seed: Seed = None,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    with session(manner, shared=True) as console:
        key = key_of(
            "prune", budgets, planning, data, scoring, loading, placing, writing,
            model=model, no_repair=no_repair, finetune=finetune, scores=scores, method=method, seed=seed,
            also=also, export=export,
        )  # fmt: skip
        from headprune.app import runs, workflow
        from headprune.app.folders import claimed
        from headprune.searching import methods_for

        search = search_of(budgets, planning, no_repair, seed or 0)
        plan = plan_of(budgets, planning, method)
        check_epochs(finetune)
        given_methods = known_methods(method)
        # A plan needs no scores, so none are looked for if it is said what to prune and measure on.
        found = None if plan and model and scores is None else source_of(model, scores, writing.output, console)

        def pruned(source: RunFolder | None) -> RunFolder | None:
            """What was asked for, with the scores of a run or with new ones."""
            keep = None if source else next(iter(budgets.asked.get("keep", [])), None)
            options = options_of(source, model, data, scoring, loading, seed, keep, also, placing)
            config = workflow.PruneConfig(
                options, replace(search, seed=options.seed), plan, str(budgets.plan or ""), finetune or 0.0, given_methods, source,
                export or (),
            )  # fmt: skip
            refuse_unused(config, {**vars(scoring), "method": method})
            if source is None and config.uses_scores and not given_methods:
                methods = list(methods_for(search.strategy))
                config = replace(config, methods=methods)
                console.say(scores_first(search.strategy, methods))
            choose = partial(prune_folder, source, writing.output, options.model, writing.overwrite, key)
            if writing.dry_run:
                _dry_run(config, choose(), console)
                return None
            with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
                did = partial(folder.did, key, writing.overwrite)  # it may have been killed just after the end
                workflow.prune_run(config, folder, console, did)
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


def _dry_run(config: PruneConfig, folder: RunFolder, console: Console) -> None:
    """What would be done; nothing is written."""
    from headprune.app import workflow

    if config.source is None and config.needs_scores:
        scene = workflow.open_to_prune(config, [], console)
        tables.print_layers(console, type(scene.model).__name__, scene.layers)
        cost = workflow.cost_of_pruning(scene, config)
        console.result(f"Would score, then prune and write {folder.path}. {cost.line} Nothing was written.")
        console.document(planned(folder, list(config.methods), scene))
        return
    scores, result = workflow.plan_run(config, console)
    told: set[str] = set()
    for fit in result.fits:
        tables.print_plan(console, fit, scores, told)
    console.document({"folder": str(folder.path), "plans": [fit.plan.to_json() for fit in result.fits]})
    console.result(f"Would prune and write {folder.path}. Nothing was written.")
