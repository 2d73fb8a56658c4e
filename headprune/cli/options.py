"""From dataclasses of options to options of commands: each field with a `Flag` is one, defined once, where its value is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headprune.budgets import BUDGETS, Budget
from headprune.errors import HeadPruneError
from headprune.options import MAX_SEED, Flag

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
