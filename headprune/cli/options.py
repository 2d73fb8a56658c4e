"""From dataclasses of options to options of commands: each field with a `Flag` is one, defined once, where its value is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headprune.app.options import DataOptions, LoadOptions, Options
from headprune.budgets import BUDGETS, Budget
from headprune.errors import HeadPruneError, ScoresError
from headprune.options import MAX_SEED, Flag, SearchOptions

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hub id (or ID@REVISION), local folder, a folder headprune saved, or a run folder."
    ),
]
Method = Annotated[
    list[str] | None,
    typer.Option("--method", "-m", help="Scoring method, such as gradient or shapley:permutations=64; repeatable."),
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of every random draw.")]
Task = Annotated[str | None, typer.Option(help="What the model is for [read from its config].")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Distil = Annotated[
    bool, typer.Option("--distil", help="Score by the divergence from the dense model's answers, not by labels.")
]


@dataclass(frozen=True)
class Manner:
    """How a command tells what it does."""

    json: Annotated[bool, Flag("One JSON document on stdout.")] = False
    quiet: Annotated[bool, Flag("Nothing on stderr but errors.", short="-q")] = False
    verbose: Annotated[bool, Flag("The libraries' messages too, and tracebacks.", short="-v")] = False


@dataclass(frozen=True)
class Writing:
    """Where a run writes, and what it finds there."""

    output: Annotated[Path | None, Flag("Run folder [reports/MODEL-1, or the next free number].", short="-o")] = None
    overwrite: Annotated[bool, Flag("Replace what is in the run folder.")] = False
    no_resume: Annotated[bool, Flag("Start anew, whatever an interrupted run has left.")] = False
    dry_run: Annotated[
        bool,
        Flag(
            "Load and check everything, then stop; write nothing. prune also searches for the plan and prints it, unless its strategy needs "
            "scores that are not there yet."
        ),
    ] = False

    @property
    def place(self) -> tuple[Path | None, bool]:
        """What of it changes the result, and not only how the command goes about it."""
        return self.output, self.overwrite


_BUDGET = "Budget (one kind per run; can be given several times, for nested plans)"


def _option_of(flag: str) -> str:
    """A flag as the name of an argument."""
    return flag.strip("-").replace("-", "_")


def _with_budgets(group: type) -> type:
    """A group of options with one for every kind of budget in the register, before its own."""
    options = {
        _option_of(kind.flag): Annotated[tuple[str, ...], Flag(kind.help, kind.flag, kind.short, panel=_BUDGET)]
        for kind in BUDGETS.values()
    }
    for name in options:
        setattr(group, name, ())
    group.__annotations__ = {**options, **group.__annotations__}
    return dataclass(frozen=True)(group)


@_with_budgets
class Budgets:
    """How many heads stay: budgets of one kind, each with its option, or a plan."""

    plan: Annotated[Path | None, Flag("A plan's file, such as a plan.json edited by hand.", panel=_BUDGET)] = None

    @property
    def texts(self) -> dict[str, tuple[str, ...]]:
        """What was typed, by kind of budget."""
        typed = {name: getattr(self, _option_of(kind.flag)) for name, kind in BUDGETS.items()}
        return {name: texts for name, texts in typed.items() if texts}

    def parse(self) -> tuple[Budget, ...]:
        """The budgets, of one kind; none where a plan was given.

        Raises:
            HeadPruneError: Neither was given, or two kinds of them.
        """
        flags = [BUDGETS[kind].flag for kind in self.texts] + (["--plan"] if self.plan else [])
        if not flags:
            raise HeadPruneError(
                "How many heads to keep?",
                "Say it with --keep, for instance --keep 50%, or with another budget (headprune prune --help).",
            )
        if len(flags) > 1:
            hint = "Give one of them."
            if (drop := BUDGETS["drop"].flag) in flags:
                hint += f" {drop} keeps the fewest heads that it allows: what that run reports of speed and size is the most that this loss can buy."
            raise HeadPruneError(f"{' and '.join(flags)} are different kinds of budget.", hint)
        budgets = tuple(BUDGETS[kind].parse(text) for kind, texts in self.texts.items() for text in texts)
        for budget in budgets:
            budget.check()
        return budgets


Typed = frozenset[str]
"""Which options were typed: the names of their fields."""


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options as its arguments: Typer sees each option, the command gets one value a class.

    Every parameter whose type is a dataclass is replaced by its fields that have a `Flag`; one of the type `Typed` gets which were typed.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    typed = [name for name, kind in hints.items() if kind == Typed]
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, own in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        elif name not in typed:
            parameters.append(own.replace(kind=own.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(function)
    def command(context: typer.Context, **given: Any) -> None:
        names = frozenset(name for name in given if _was_typed(context, name))
        values = {name: _group(kind, given) for name, kind in groups.items()}
        function(**given, **values, **dict.fromkeys(typed, names))

    del command.__wrapped__  # its signature would be read
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameters(group: Any) -> list[inspect.Parameter]:
    """A parameter for every field of a class that the command line shows."""
    parameters = []
    for field, kind, flag in _flags(group):
        name = flag.name or f"--{field.name.replace('_', '-')}"
        option = typer.Option(
            name, *filter(None, [flag.short]), help=flag.help, metavar=flag.metavar, rich_help_panel=flag.panel,
            show_default=bool(field.default), min=flag.least,
        )  # fmt: skip
        several = get_origin(kind) is tuple
        shown: Any = list[str] if several else str if kind == str | tuple[str, ...] else kind
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if several else field.default,
                annotation=Annotated[shown | None if several else shown, option],
            )
        )
    return parameters


def _flags(group: Any) -> list[tuple[Field[Any], Any, Flag]]:
    """The fields of a class that the command line shows, with their types."""
    hints = get_type_hints(group, include_extras=True)
    annotated = [(f, get_args(hints[f.name])) for f in fields(group) if get_origin(hints[f.name]) is Annotated]
    return [(f, kind, mark) for f, (kind, *marks) in annotated for mark in marks if isinstance(mark, Flag)]


def _group(kind: Any, given: dict[str, Any]) -> Any:
    """The value of a class, its fields taken out of what was given."""
    values = {}
    for field, _, _ in _flags(kind):
        value = given.pop(field.name)
        values[field.name] = tuple(value or ()) if isinstance(field.default, tuple) else value
    return kind(**values)


# -- from what was typed to what the workflow takes ------------------------------------------------------


def options_of(
    source: RunFolder | None, model: str | None, data: DataOptions, loading: LoadOptions, typed: Typed, **more: Any
) -> Options:
    """What was typed, over what the scores' run was made with, over the defaults.

    Args:
        more: Further fields of `Options`; those that were not typed are left out.

    Raises:
        HeadPruneError: No dataset; a value that is surely wrong.
    """
    own = {name: value for name, value in more.items() if name != "seed" or "seed" in typed}
    if "seed" in own:
        data = replace(data, seed=own["seed"])
    if source is None:
        options = Options(model or "", data, loading, **own)
    else:
        base = source.read_run().options
        options = replace(
            base,
            model=model or base.model,
            data=replace(base.data, **_typed(data, typed)),
            loading=replace(base.loading, **_typed(loading, typed)),
            **own,
        )
    options.check()
    return options


def _typed(group: Any, typed: Typed) -> dict[str, Any]:
    """The fields of options that were typed."""
    return {field.name: getattr(group, field.name) for field in fields(group) if field.name in typed}


def checked(search: SearchOptions) -> SearchOptions:
    """The search, if there are such a strategy and effort.

    Raises:
        HeadPruneError: There are not.
    """
    from headprune.planning import strategy_named
    from headprune.planning.strategies import effort_named

    strategy_named(search.strategy)
    effort_named(search.effort)
    return search


def known_methods(texts: Sequence[str]) -> tuple[str, ...]:
    """The scoring methods that were typed, with their settings, each once.

    Raises:
        HeadPruneError: There is no such method or setting, or a method stands twice.
    """
    from headprune.scoring.base import method_and_settings

    names = [method_and_settings(text)[0] for text in dict.fromkeys(texts)]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise HeadPruneError(f"--method {twice[0]} is there twice, with different settings.", "Give it once.")
    return tuple(dict.fromkeys(texts))


def refuse_unused(config: PruneConfig, distil: bool) -> None:
    """Refuse options for scoring where nothing will be scored: to ignore them would be to mislead.

    Raises:
        HeadPruneError: There is one.
    """
    if not config.uses_scores and (config.methods or distil):
        why = "a plan says which heads go" if config.plan else f"--strategy {config.search.strategy} takes no scores"
        flag = "--method" if config.methods else "--distil"
        raise HeadPruneError(f"{flag} has no use here: {why}.", f"Leave out {flag}.")
    if config.source is None:
        return
    late = "--distil" if distil else next((f"--method {method}" for method in config.methods if ":" in method), None)
    if late:
        raise ScoresError(
            f"{late} has no use here: the scores in {config.source.path} are made already.",
            f"Leave it out, or score anew: `headprune score` with {late}, or here with another folder by -o.",
        )


def scores_first(strategy: str, methods: Sequence[str]) -> str:
    """What is going to be scored, where there are no scores yet."""
    line = f"There are no scores yet: heads are scored by {' and '.join(methods)} first"
    if strategy != "auto":
        return f"{line}."
    return f"{line}, which is enough for auto, as it makes orders of its own (-m ablation -m gradient scores by both)."


def source_of(model: str | None, scores: Path | None, output: Path | None, console: Console) -> RunFolder | None:
    """The run whose scores `prune` uses, if any.

    Raises:
        HeadPruneError: There is no such run; there are no scores, and no model was named.
    """
    from headprune.app.runs import REPORTS, RunFolder, newest_scores

    if scores is not None:
        if not scores.exists():
            raise HeadPruneError(f"There is no file or folder {scores}.", "Pass a run folder, or its scores.json.")
        folder = RunFolder(scores if scores.is_dir() else scores.parent)
        if not scores.is_dir() and scores.name != folder.scores_path.name:
            raise HeadPruneError(f"{scores} is not a run's scores.json.", "Pass a run folder, or its scores.json.")
        folder.read_scores()
        return folder
    newest = newest_scores(output, model)
    if newest is None and model is None:
        raise HeadPruneError(
            f"There are no scores in {output or REPORTS}.",
            "Run `headprune score MODEL -d DATASET` first, or name a MODEL.",
        )
    if newest is not None:
        console.say(f"Using the scores in {newest.path}")
    return newest


def prune_folder(source: RunFolder | None, output: Path | None, model: str, overwrite: bool, key: str) -> RunFolder:
    """Where `prune` writes: the scores' own run, unless that was pruned before, or another prune was interrupted there.

    Raises:
        HeadPruneError: That folder is taken.
    """
    from headprune.app.runs import choose_folder

    if source is not None and output in (None, source.path, source.path.parent):
        free = not source.pruned or overwrite or source.left_by(key)
        if free and (output == source.path or source.command is None or source.left_by(key)):
            return source
        if output == source.path:
            raise HeadPruneError(
                f"{source.path} was pruned before.", "Choose another folder with -o, or add --overwrite."
            )
        output = None
    return choose_folder(output, Path(model.rstrip("/")).name, overwrite, key)


_LARGEST = 1_000_000  # examples in a batch, or tokens in a text, that anyone may want to time


def numbers_in(flag: str, text: str) -> list[int]:
    """Numbers from a list such as ``1,8,32``.

    Raises:
        HeadPruneError: It is none.
    """
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _LARGEST:
        raise HeadPruneError(
            f"{flag} {text!r} is no list of numbers from 1 to {_LARGEST:,}.", f"Write it as {flag} 1,8,32."
        )
    return numbers
