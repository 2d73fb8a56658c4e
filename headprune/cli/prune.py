"""`headprune prune`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.app.options import DataOptions, LoadOptions
from headprune.cli import options as given
from headprune.cli import tables
from headprune.cli.app import app
from headprune.cli.options import Budgets, Distil, Manner, Seed, Typed, Writing, takes_options
from headprune.cli.session import session
from headprune.errors import HeadPruneError, ScoresError
from headprune.options import Flag, SearchOptions

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig
    from headprune.plans import PruningPlan


@dataclass(frozen=True)
class More:
    """The options that only `prune` has."""

    no_repair: Annotated[bool, Flag("Leave the kept heads' weights as they were.", panel="Repair")] = False
    finetune: Annotated[
        float, Flag("Train afterwards, with distillation from the dense model.", metavar="EPOCHS", panel="Repair")
    ] = 0.0
    also: Annotated[
        tuple[str, ...],
        Flag(
            "A second dataset to measure the dense and pruned models on; nothing is fitted to it. Repeatable [for language models a small "
            "English text].",
            panel="Data",
        ),
    ] = ()
    scores: Annotated[Path | None, Flag("Scores to use: a run folder or its scores.json.")] = None
    export: Annotated[
        tuple[str, ...],
        Flag(
            "Write the pruned models for another engine too, as `headprune export` does; onnx and openvino are timed there. Repeatable.",
            metavar="FORMAT",
        ),
    ] = ()
    method: Annotated[
        tuple[str, ...],
        Flag(
            "Scores to plan by; repeatable [all that there are; where there are none, heads are scored by gradient, which "
            "is enough for auto, or by ablation and gradient for another --strategy].",
            short="-m",
        ),
    ] = ()


@app.command(epilog="Example: `headprune prune --keep 36`, after `headprune score`")
@takes_options
def prune(
    budgets: Budgets,
    search: SearchOptions,
    data: DataOptions,
    loading: LoadOptions,
    writing: Writing,
    manner: Manner,
    more: More,
    typed: Typed,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Without it, the model of the newest scores.")
    ] = None,
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    with session(manner, shared=True) as console:
        from headprune.app.folders import key_of
        from headprune.app.workflow import PruneConfig

        key = key_of("prune", budgets, search, data, loading, writing.place, model, more, distil, seed)
        if "finetune" in typed and not 0 < more.finetune < float("inf"):
            raise HeadPruneError(f"--finetune {more.finetune:g} is no number of epochs.", "Give 1, or a fraction.")
        wanted = budgets.parse()
        plan = _read_plan(budgets.plan, typed)
        methods = given.known_methods(more.method)
        search = given.checked(replace(search, budgets=wanted, repair=not more.no_repair))
        # A plan needs no scores, so none are looked for if it is said what to prune and measure on.
        source = None
        if more.scores or not (plan and model):
            source = given.source_of(model, more.scores, writing.output, console)

        def configure(source: RunFolder | None) -> PruneConfig:
            """What was asked for, with the scores of a run or with new ones."""
            extra: dict[str, Any] = {"seed": seed, **({"distil": True} if distil else {})}
            extra |= {} if source else {"keep": next(iter(budgets.texts.get("keep", [])), None)}
            options = given.options_of(source, model, replace(data, also=more.also), loading, typed, **extra)
            return PruneConfig(
                options, replace(search, seed=options.seed), plan, str(budgets.plan or ""), more.finetune, methods, source,
                more.export,
            )  # fmt: skip

        try:
            folder = _run(configure(source), writing, distil, key, console)
        except ScoresError as error:
            if source is None or more.scores is not None or model is None or not data.dataset:
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


def _run(config: PruneConfig, writing: Writing, distil: bool, key: str, console: Console) -> RunFolder | None:
    """Prune, or say what would be done; the folder that was written."""
    from headprune.app import runs, workflow
    from headprune.app.folders import claimed
    from headprune.searching import methods_for

    given.refuse_unused(config, distil)
    if config.source is None and config.uses_scores and not config.methods:
        config = replace(config, methods=methods_for(config.search.strategy))
        if config.methods:
            console.say(given.scores_first(config.search.strategy, config.methods))
    choose = partial(given.prune_folder, config.source, writing.output, config.options.model, writing.overwrite, key)
    if writing.dry_run:
        _dry_run(config, choose(), console)
        return None
    with claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
        workflow.prune_run(config, folder, console)
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
    printed: set[str] = set()
    for fit in result.fits:
        tables.print_plan(console, fit, scores, printed)
    console.document({"folder": str(folder.path), "plans": [fit.plan.to_json() for fit in result.fits]})
    console.result(f"Would prune and write {folder.path}. Nothing was written.")
