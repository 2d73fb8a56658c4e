"""What all commands share: the application, options that several commands take, and commands made of functions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
import typer.core

from headprune.app.options import MAX_SEED
from headprune.cli.session import Manner, fail, run, session
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.cli.terminal import Console as Console
else:
    Console = Manner  # a command's console is made from these options


class Commands(typer.core.TyperGroup):
    """All commands; reports usage errors in headprune's own way, with ``--json`` as a JSON document too."""

    def main(self, args: Any = None, *more: Any, **extra: Any) -> Any:
        try:
            code = super().main(args, *more, **{**extra, "standalone_mode": False})
        except Exception as error:  # typer has its own copy of click's errors
            if not hasattr(error, "format_message"):
                raise
            code = _say_misused(error, "--json" in (sys.argv[1:] if args is None else args))
        sys.exit(code if isinstance(code, int) else 0)


def _say_misused(error: Any, as_json: bool) -> int:
    """Report a usage error; the exit status."""
    if as_json:
        from headprune.cli.terminal import Console

        message = f"{error.format_message().rstrip('.')}."
        fail(Console(as_json=True), HeadPruneError(message, "`headprune COMMAND --help` lists what it takes."))
    else:
        from typer.rich_utils import rich_format_error

        rich_format_error(error)
    return int(error.exit_code)


app = typer.Typer(
    name="headprune",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Which attention heads matter, and what happens when the others are removed.\n\n"
    "    headprune demo                                                  # no model, no network needed\n\n"
    "    headprune score MODEL -d DATASET                                # importance of every head\n\n"
    "    headprune prune --keep 50%                                      # prune what was scored, measure, save\n\n"
    "    headprune prune --target-latency 80%                            # the same, to a time on this device",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from headprune import __version__

        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


# -- options, and commands made of functions ------------------------------------------------------------

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id (or ID@REVISION), model folder, or run folder.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of every random draw.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Saved = Annotated[Path, typer.Argument(metavar="PRUNED", help="A folder headprune saved, or a run folder with one.")]
NoResume = Annotated[bool, typer.Option("--no-resume", help="Start anew, whatever an interrupted run has left.")]
Distil = Annotated[bool, typer.Option("--distil", help="Score by divergence from the dense answers, not by labels.")]


output_option = partial(typer.Option, "--output", "-o")

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


def command(example: str, *, shared: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function (`takes_options`); ``shared`` as for `session`."""
    return lambda function: app.command(epilog=f"Example: {example}")(takes_options(function, shared))


def over(base: Any, group: Any, typed: Typed) -> Any:
    """``base`` with the fields of ``group`` that were typed."""
    return replace(base, **{f.name: getattr(group, f.name) for f in fields(group) if f.name in typed})


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


# -- the entry point -------------------------------------------------------------------------------------


def wait_asleep() -> None:
    """Let OpenMP's threads sleep soon while they wait, unless the user set how they wait; call it before torch is imported.

    Threads that spin keep other threads from the cores: on a busy machine small work took thirty times as long.
    Threads that never spin (OMP_WAIT_POLICY=PASSIVE) are slower on an idle machine.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"}:
        # Turns of the spin loop of libgomp, which PyTorch uses on Linux; the default is 300,000.
        os.environ["GOMP_SPINCOUNT"] = "10000"


def main() -> None:
    """The entry point of the ``headprune`` command."""
    wait_asleep()
    run(app)
