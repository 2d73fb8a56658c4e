"""`headprune prune`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.app.options import DataOptions, LoadOptions
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.config import (
    key_of,
    known_methods,
    options_of,
    prune_folder,
    refuse_unused,
    scores_first,
    source_of,
)
from headprune.cli.options import Budgets, Distil, Manner, Seed, Typed, Writing, takes_options
from headprune.cli.session import session
from headprune.errors import HeadPruneError, ScoresError
from headprune.options import SearchOptions

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig
    from headprune.plans import PruningPlan


@app.command(epilog="Example: `headprune prune --keep 36`, after `headprune score`")
@takes_options
def prune(
    budgets: Budgets,
    search: SearchOptions,
    data: DataOptions,
    loading: LoadOptions,
    writing: Writing,
    manner: Manner,
    typed: Typed,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Without it, the model of the newest scores.")
    ] = None,
    no_repair: Annotated[
        bool,
        typer.Option("--no-repair", help="Leave the kept heads' weights as they were.", rich_help_panel="Repair"),
    ] = False,
    finetune: Annotated[
        float,
        typer.Option(
            metavar="EPOCHS",
            help="Train afterwards, with distillation from the dense model.",
            rich_help_panel="Repair",
            show_default=False,
        ),
    ] = 0.0,
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
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    with session(manner, shared=True) as console:
        key = key_of(
            "prune", budgets=budgets, search=search, data=data, loading=loading, output=writing.output,
            overwrite=writing.overwrite, model=model, no_repair=no_repair, finetune=finetune, scores=scores, method=method,
            distil=distil, seed=seed, also=also, export=export,
        )  # fmt: skip
        from headprune.app.workflow import PruneConfig

        if "finetune" in typed and not 0 < finetune < float("inf"):
            raise HeadPruneError(f"--finetune {finetune:g} is no number of epochs.", "Give 1, or a fraction.")
        wanted = budgets.parse()
        plan = _read_plan(budgets.plan, typed)
        methods = known_methods(method or ())
        search = _checked(replace(search, budgets=wanted, repair=not no_repair))
        # A plan needs no scores, so none are looked for if it is said what to prune and measure on.
        source = None if plan and model and scores is None else source_of(model, scores, writing.output, console)

        def configure(source: RunFolder | None) -> PruneConfig:
            """What was asked for, with the scores of a run or with new ones."""
            more: dict[str, Any] = {"seed": seed, **({"distil": True} if distil else {})}
            more |= {} if source else {"keep": next(iter(budgets.texts.get("keep", [])), None)}
            options = options_of(source, model, replace(data, also=tuple(also or ())), loading, typed, **more)
            return PruneConfig(
                options, replace(search, seed=options.seed), plan, str(budgets.plan or ""), finetune, methods, source,
                tuple(export or ()),
            )  # fmt: skip

        try:
            folder = _run(configure(source), writing, distil, key, console)
        except ScoresError as error:
            if source is None or scores is not None or model is None or not data.dataset:
                raise
            # The command says all that is needed without them.
            console.say(f"The scores in {source.path} are left aside. {error.args[0]}")
            folder = _run(configure(None), writing, distil, key, console)
        if folder is not None:
            tables.print_pruned(console, folder)


def _read_plan(file: Path | None, typed: Typed) -> PruningPlan | None:
    """The plan's file that was given, read.

    Raises:
        HeadPruneError: It was given together with what would change it.
    """
    from headprune.plans import PruningPlan

    if file is None:
        return None
    if useless := [
        name for name in ("strategy", "protect", "min_heads_per_layer", "effort", "method") if name in typed
    ]:
        flag = f"--{useless[0].replace('_', '-')}"
        raise HeadPruneError(f"--plan says which heads go, so {flag} has no use.", f"Leave out {flag}.")
    return PruningPlan.load(file)


def _checked(search: SearchOptions) -> SearchOptions:
    """The search, if there are such a strategy and effort.

    Raises:
        HeadPruneError: There are not.
    """
    from headprune.planning import strategy_named
    from headprune.planning.strategies import effort_named

    strategy_named(search.strategy)
    effort_named(search.effort)
    return search


def _run(config: PruneConfig, writing: Writing, distil: bool, key: str, console: Console) -> RunFolder | None:
    """Prune, or say what would be done; the folder that was written."""
    from headprune.app import runs, workflow
    from headprune.app.folders import claimed
    from headprune.searching import methods_for

    refuse_unused(config, distil)
    if config.source is None and config.uses_scores and not config.methods:
        config = replace(config, methods=methods_for(config.search.strategy))
        if config.methods:
            console.say(scores_first(config.search.strategy, config.methods))
    choose = partial(prune_folder, config.source, writing.output, config.options.model, writing.overwrite, key)
    if writing.dry_run:
        _dry_run(config, choose(), console)
        return None
    with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
        did = partial(folder.already_published, key, writing.overwrite)  # it may have been killed just after the end
        workflow.prune_run(config, folder, console, did)
    return folder


def _dry_run(config: PruneConfig, folder: RunFolder, console: Console) -> None:
    """What would be done; nothing is written."""
    from headprune.app import workflow

    if config.source is None and config.needs_scores:
        scene = workflow.open_to_prune(config, [], console)
        cost = workflow.cost_of_pruning(scene, config)
        tables.print_dry_run(
            console, scene, config.methods, folder, f"score, then prune and write {folder.path}", cost.line
        )
        return
    scores, result = workflow.plan_run(config, console)
    told: set[str] = set()
    for fit in result.fits:
        tables.print_plan(console, fit, scores, told)
    console.document({"folder": str(folder.path), "plans": [fit.plan.to_json() for fit in result.fits]})
    console.result(f"Would prune and write {folder.path}. Nothing was written.")
