"""`headprune score` and `headprune prune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune.app.options import DataOptions, LoadOptions, MetricOptions, Options, TaskOptions
from headprune.budgets import BUDGETS, Budget, SearchOptions
from headprune.cli import terminal
from headprune.cli.app import Console, Distil, Model, NoResume, Overwrite, Seed, Typed, command, output_option, over
from headprune.errors import HeadPruneError, ScoresError

if TYPE_CHECKING:
    from headprune.app.runs import RunFolder
    from headprune.app.workflow.search import PruneConfig
    from headprune.plans import PruningPlan


@dataclass(frozen=True)
class Writing:
    """Where a run writes, and how it treats what it finds there."""

    output: Annotated[Path | None, output_option(help="Run folder [reports/MODEL-1, or the next free number].")] = None
    overwrite: Overwrite = False
    no_resume: NoResume = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load and check everything, then stop; write nothing. prune also searches for the plan and prints it, unless its strategy "
            "needs scores that are not there yet.",
        ),
    ] = False


@command(
    "`headprune score distilbert/distilbert-base-uncased-finetuned-sst-2-english -d nyu-mll/glue --subset sst2`",
    shared=True,
)
def score(
    model: Model,
    data: DataOptions,
    loading: LoadOptions,
    writing: Writing,
    console: Console,
    typed: Typed,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="Scoring method, such as gradient or shapley:permutations=64; repeatable."),
    ] = None,
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Score the importance of every head, by ablation and by gradient."""
    from headprune.app import runs
    from headprune.app.workflow import cost, scene, score_run
    from headprune.scoring import DEFAULT_METHODS

    key = runs.key_of("score", data, loading, writing.output, writing.overwrite, model, method, distil, seed)
    methods = known_methods(method or DEFAULT_METHODS)
    options = options_of(None, model, data, loading, MetricOptions(), seed, typed, distil=distil, methods=methods)
    choose = partial(runs.choose_folder, writing.output, model, writing.overwrite, key)
    if writing.dry_run:
        opened = scene.open_scene(options, console, labelled=None)
        path = choose().path
        doing = f"score by {', '.join(methods)} and write {path}"
        terminal.print_dry_run(console, opened, methods, path, doing, cost.cost_of_scores(opened).line)
        return
    with runs.claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
        scores = score_run(options, folder, console)
    # The work is done, so a closed pipe (`| head`) does not interrupt it.
    terminal.print_scores(console, scores)
    console.result(f"\nReport: {folder.report_path}\nPage:   {folder.page_path}")
    console.result(f"Next:   headprune prune --keep 50% -o {folder.path}")
    console.document({"folder": str(folder.path), "scores": [s.to_json() for s in scores]})


_budget = partial(typer.Option, rich_help_panel="Budget (one kind per run; repeatable, for nested plans)")


_options = {name: _budget(kind.flag, *filter(None, [kind.short]), help=kind.help) for name, kind in BUDGETS.items()}
_fields = [(name.replace("-", "_"), Annotated[tuple[str, ...], option], ()) for name, option in _options.items()]
_BudgetTexts: Any = make_dataclass("_BudgetTexts", _fields, frozen=True)


@dataclass(frozen=True)
class Budgets(_BudgetTexts):  # type: ignore[misc]
    """How many heads stay: budgets of one kind, each with its option, or a plan."""

    plan: Annotated[Path | None, _budget(help="A plan's file, such as a plan.json edited by hand.")] = None

    @property
    def texts(self) -> dict[str, tuple[str, ...]]:
        """What was typed, by kind of budget."""
        return {name: texts for name in BUDGETS if (texts := getattr(self, name.replace("-", "_")))}

    def parse(self) -> tuple[Budget, ...]:
        """The budgets, of one kind; none where a plan was given.

        Raises:
            HeadPruneError: Neither was given, or two kinds of them.
        """
        flags = [BUDGETS[kind].flag for kind in self.texts] + (["--plan"] if self.plan else [])
        if not flags:
            hint = "Say it with --keep, for instance --keep 50%, or with another budget (headprune prune --help)."
            raise HeadPruneError("How many heads to keep?", hint)
        if len(flags) > 1:
            hint = "Give one of them."
            if (drop := BUDGETS["drop"].flag) in flags:
                hint += f" {drop} keeps the fewest heads that it allows: what that run reports of speed and size is the most that this loss can buy."
            raise HeadPruneError(f"{' and '.join(flags)} are different kinds of budget.", hint)
        budgets = tuple(BUDGETS[kind].parse(text) for kind, texts in self.texts.items() for text in texts)
        for budget in budgets:
            budget.check()
        return budgets


_repair = partial(typer.Option, rich_help_panel="Repair")


@dataclass(frozen=True)
class More:
    """The options that only `prune` has."""

    no_repair: Annotated[bool, _repair("--no-repair", help="Leave the weights that stay as they were.")] = False
    finetune: Annotated[
        float, _repair(metavar="EPOCHS", help="Train afterwards, distilling from the dense model.", show_default=False)
    ] = 0.0
    also: Annotated[
        tuple[str, ...],
        typer.Option(
            help="A second dataset to measure the dense and pruned models on; nothing is fitted to it. Repeatable [for language models a "
            "small English text].",
            rich_help_panel="Data",
        ),
    ] = ()
    scores: Annotated[Path | None, typer.Option(help="Scores to use: a run folder or its scores.json.")] = None
    export: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="FORMAT",
            help="Write the pruned models for another engine too, as `headprune export` does; onnx and openvino are timed there. Repeatable.",
        ),
    ] = ()
    method: Annotated[
        tuple[str, ...],
        typer.Option(
            "--method",
            "-m",
            help="Scores to plan by; repeatable [all that there are; where there are none, heads are scored by gradient, which "
            "is enough for auto, or by ablation and gradient for another --strategy].",
        ),
    ] = ()


@command("`headprune prune --keep 36`, after `headprune score`", shared=True)
def prune(
    budgets: Budgets,
    search: SearchOptions,
    data: DataOptions,
    loading: LoadOptions,
    measuring: MetricOptions,
    writing: Writing,
    console: Console,
    more: More,
    tasks: TaskOptions,
    typed: Typed,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="[that of the newest scores].")] = None,
    distil: Distil = False,
    seed: Seed = 0,
) -> None:
    """Remove the least important heads, measure accuracy and latency again, save the model and the report."""
    from headprune.app.runs import key_of
    from headprune.app.workflow.search import PruneConfig
    from headprune.planning import check_strategy
    from headprune.planning.strategies import effort_named

    key = key_of(
        "prune", budgets, search, data, loading, measuring, writing.output, writing.overwrite, model, more, tasks, distil, seed,
    )  # fmt: skip
    if "finetune" in typed and not 0 < more.finetune < float("inf"):
        raise HeadPruneError(f"--finetune {more.finetune:g} is no number of epochs.", "Give 1, or a fraction.")
    search = replace(search, budgets=budgets.parse(), repair=not more.no_repair)
    plan = _read_plan(budgets.plan, typed)
    methods = known_methods(more.method)
    check_strategy(search.strategy)
    effort_named(search.effort)
    # A plan needs no scores, so none are looked for if a model is named too.
    searched = bool(more.scores or not (plan and model))
    source = _source_of(model, more.scores, writing.output, console) if searched else None

    def configure(source: RunFolder | None) -> PruneConfig:
        """The command's settings, with the scores of a run or with new ones."""
        keep = next(iter(budgets.texts.get("keep", [])), None)
        all_data = replace(data, also=more.also)
        options = options_of(source, model, all_data, loading, measuring, seed, typed, distil=distil, keep=keep)
        return PruneConfig(
            options, replace(search, seed=options.seed), plan, str(budgets.plan or ""), more.finetune, methods, source,
            writing.no_resume, more.export, tasks,
        )  # fmt: skip

    try:
        folder = _run(configure(source), writing, key, console)
    except ScoresError as error:
        if source is None or more.scores is not None or model is None or not data.dataset:
            raise
        # Without these scores, the command line still says all that is needed.
        console.say(f"The scores in {source.path} are left aside. {error.args[0]}")
        folder = _run(configure(None), writing, key, console)
    if folder is not None:
        terminal.print_pruned(console, folder)


def _read_plan(file: Path | None, typed: Typed) -> PruningPlan | None:
    """The user's plan, read from its file; None without one.

    Raises:
        HeadPruneError: An option that chooses heads was given too.
    """
    from headprune.plans import PruningPlan

    if file is None:
        return None
    for name in ("strategy", "protect", "min_heads_per_layer", "effort", "method"):
        if name in typed:
            flag = f"--{name.replace('_', '-')}"
            raise HeadPruneError(f"--plan says which heads go, so {flag} has no use.", f"Leave out {flag}.")
    return PruningPlan.load(file)


def _source_of(model: str | None, scores: Path | None, output: Path | None, console: Console) -> RunFolder | None:
    """The run whose scores are used, if any.

    Raises:
        HeadPruneError: There is no such run; it was named as the model; there are no scores, and no model was named.
    """
    from headprune.app.runs import REPORTS, RunFolder, newest_scores

    if scores is not None:
        folder = RunFolder(scores if scores.is_dir() else scores.parent)
        if not scores.exists():
            raise HeadPruneError(f"There is no file or folder {scores}.", "Pass a run folder, or its scores.json.")
        if scores not in (folder.path, folder.scores_path):
            raise HeadPruneError(f"{scores} is not a run's scores.json.", "Pass a run folder, or its scores.json.")
        folder.read_scores()
        return folder
    run = RunFolder(Path(model or ""))
    if model and run.run_path.is_file() and run.scores_path.is_file() and not run.pruned:
        hint = f"Say `headprune prune --scores {model}`, without MODEL."
        raise HeadPruneError(f"{model} is a run folder with scores, and holds no model.", hint)
    newest = newest_scores(output, model)
    if newest is not None:
        console.say(f"Using the scores in {newest.path}")
    elif model is None:
        hint = "Run `headprune score MODEL -d DATASET` first, or name a MODEL."
        raise HeadPruneError(f"There are no scores in {output or REPORTS}.", hint)
    return newest


def _run(config: PruneConfig, writing: Writing, key: str, console: Console) -> RunFolder | None:
    """Prune, or with ``--dry-run`` print what would be done; the folder that was written, or None."""
    from headprune.api import methods_for
    from headprune.app import runs
    from headprune.app.workflow import prune_run

    _refuse_unused(config)
    if config.source is None and config.uses_scores and not config.methods:
        config = replace(config, methods=methods_for(config.search.strategy))
        if config.methods:
            console.say(f"There are no scores yet: heads are scored by {' and '.join(config.methods)} first.")
    choose = partial(_prune_folder, config.source, writing.output, config.options.model, writing.overwrite, key)
    if writing.dry_run:
        _dry_run(config, choose(), console)
        return None
    with runs.claimed(choose, key, runs.command_line(), resume=not writing.no_resume, say=console.say) as folder:
        prune_run(config, folder, console)
    return folder


def _refuse_unused(config: PruneConfig) -> None:
    """Refuse options for scoring where nothing will be scored: to ignore them would mislead.

    Raises:
        HeadPruneError: Such an option was given.
    """
    flags = [*(["--distil"] if config.options.distil else []), *(f"--method {method}" for method in config.methods)]
    if flags and not config.uses_scores:
        why = "a plan says which heads go" if config.plan else f"--strategy {config.search.strategy} takes no scores"
        raise HeadPruneError(f"{flags[0]} has no use here: {why}.", f"Leave out {flags[0]}.")
    late = next((flag for flag in flags if flag == "--distil" or ":" in flag), None)
    if late and config.source is not None:
        hint = f"Leave it out, or score anew: `headprune score` with {late}, or here with another folder by -o."
        raise ScoresError(f"{late} has no use here: the scores in {config.source.path} are made already.", hint)


def _prune_folder(source: RunFolder | None, output: Path | None, model: str, overwrite: bool, key: str) -> RunFolder:
    """Where to write: the scores' own run, unless that was pruned before, or another prune was interrupted there.

    Raises:
        HeadPruneError: That folder is taken.
    """
    from headprune.app.runs import choose_folder

    if source is not None and output in (None, source.path, source.path.parent):
        free = not source.pruned or overwrite or source.left_by == key
        if free and (output == source.path or source.left_by in (None, key)):
            return source
        if output == source.path:
            raise HeadPruneError(f"{source.path} was pruned before.", "Choose another with -o, or add --overwrite.")
        output = None
    return choose_folder(output, model, overwrite, key)


def _dry_run(config: PruneConfig, folder: RunFolder, console: Console) -> None:
    """Print what would be done; nothing is written."""
    from headprune.app.workflow import cost, open_to_prune, plan_run

    if config.source is None and config.needs_scores:
        scene = open_to_prune(config, console)
        doing = f"score, then prune and write {folder.path}"
        terminal.print_dry_run(console, scene, config.methods, folder.path, doing, cost.cost_of_pruning(scene).line)
        return
    scene, result = plan_run(config, console)
    terminal.print_plans(console, result.fits, scene.scores)
    console.document({"folder": str(folder.path), "plans": [fit.plan.to_json() for fit in result.fits]})
    console.result(f"Would prune and write {folder.path}. Nothing was written.")


# -- options of a run --------------------------------------------------------------------------------------


def options_of(
    source: RunFolder | None, model: str | None, data: DataOptions, loading: LoadOptions, measuring: MetricOptions,
    seed: int, typed: Typed, **more: Any,
) -> Options:  # fmt: skip
    """A run's options: as they were typed; else those of the run that has the scores; else the defaults.

    Args:
        more: Further fields of `Options`, whatever that run has.

    Raises:
        HeadPruneError: No dataset; an invalid value.
    """
    base = Options("", DataOptions()) if source is None else source.read_run().options
    given = {"data": replace(data, seed=seed), "loading": loading, "measuring": measuring}
    parts: dict[str, Any] = {name: over(getattr(base, name), part, typed) for name, part in given.items()}
    seed = seed if "seed" in typed else base.seed
    options = replace(base, model=model or base.model, seed=seed, **parts, **more)
    options.check()
    return options


def known_methods(texts: Sequence[str]) -> tuple[str, ...]:
    """The scoring methods that were typed, with their settings, each once.

    Raises:
        HeadPruneError: There is no such method or setting, or a method is given twice.
    """
    from headprune.scoring.base import method_and_settings

    methods = {text: method_and_settings(text)[0] for text in texts}
    names = list(methods.values())
    if twice := [name for name in names if names.count(name) > 1]:
        raise HeadPruneError(f"--method {twice[0]} is there twice, with different settings.", "Give it once.")
    return tuple(methods)
