"""Options that several commands take, and the conversion of dataclasses of options into options of a command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from headprune.app.options import MAX_SEED, DataOptions, LoadOptions, Options
from headprune.budgets import BUDGETS, Budget
from headprune.cli.session import Manner, session
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.console import Console as Console
    from headprune.app.runs import RunFolder
else:
    Console = Manner  # a command's console is made from these options

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id (or ID@REVISION), model folder, or run folder.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of every random draw.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Saved = Annotated[Path, typer.Argument(metavar="PRUNED", help="A folder headprune saved, or a run folder with one.")]
NoResume = Annotated[bool, typer.Option("--no-resume", help="Start anew, whatever an interrupted run has left.")]
Distil = Annotated[bool, typer.Option("--distil", help="Score by divergence from the dense answers, not by labels.")]


output_option = partial(typer.Option, "--output", "-o")


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


Typed = frozenset[str]
"""The field names of the options that were typed."""


def takes_options(function: Callable[..., None], shared: bool) -> Callable[..., None]:
    """A Typer command that runs a function in a `session`; the function's arguments may be dataclasses of options.

    A dataclass gives one option for each of its ``Annotated`` fields. A parameter of the type `Typed` gets the names of
    the options that were typed.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, own in signature(function).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        elif hints[name] != Typed:
            parameters.append(own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(function)
    def command(context: typer.Context, **given: Any) -> None:
        typed = frozenset(n for n in given if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        for name, kind in groups.items():
            values[name] = kind(**{p.name: values.pop(p.name) for p in _parameters(kind)})
        values |= {name: typed for name, kind in hints.items() if kind == Typed}
        with session(values.pop("console"), shared=shared) as console:
            function(console=console, **values)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters(group: Any) -> list[Parameter]:
    """A Typer parameter for every ``Annotated`` field of a dataclass; a tuple becomes a list, for a repeatable option."""
    hints, parameters = get_type_hints(group, include_extras=True), []
    for each in fields(group):
        hint, default = hints[each.name], each.default
        if get_origin(hint) is not Annotated:
            continue
        kind, *_, option = get_args(hint)
        if get_origin(kind) is tuple:
            hint, default = Annotated[list[str], option], []
        parameters.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return parameters


def options_of(
    source: RunFolder | None, model: str | None, data: DataOptions, loading: LoadOptions, typed: Typed, **more: Any
) -> Options:
    """A run's options: as they were typed; else those of the run that has the scores; else the defaults.

    Args:
        more: Further fields of `Options`; a seed that was not typed is left out.

    Raises:
        HeadPruneError: No dataset; an invalid value.
    """
    own = {name: value for name, value in more.items() if name != "seed" or "seed" in typed}
    if "seed" in own:
        data = replace(data, seed=own["seed"])
    base = Options("", DataOptions()) if source is None else source.read_run().options
    data, loading = over(base.data, data, typed), over(base.loading, loading, typed)
    if "measuring" in own:
        own["measuring"] = over(base.measuring, own["measuring"], typed)
    options = replace(base, model=model or base.model, data=data, loading=loading, **own)
    options.check()
    return options


def over(base: Any, group: Any, typed: Typed) -> Any:
    """``base`` with the fields of ``group`` that were typed."""
    return replace(base, **{f.name: getattr(group, f.name) for f in fields(group) if f.name in typed})


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


_LARGEST = 1_000_000  # examples in a batch, or tokens in a text, that anyone may want to time


def numbers_in(flag: str, text: str) -> list[int]:
    """Numbers from a list such as ``1,8,32``.

    Raises:
        HeadPruneError: The text is no such list.
    """
    numbers = [int(n) for n in text.split(",") if re.fullmatch(r"\s*\d{1,9}\s*", n)]
    if len(numbers) != text.count(",") + 1 or not 1 <= min(numbers) <= max(numbers) <= _LARGEST:
        raise HeadPruneError(f"{flag} {text!r} is no list of numbers from 1 to {_LARGEST:,}.", f"Write {flag} 1,8,32.")
    return numbers
