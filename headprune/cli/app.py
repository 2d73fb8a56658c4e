"""The `headprune` command: what all commands have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

from headprune.cli.options import takes_options
from headprune.cli.session import fail, run
from headprune.errors import HeadPruneError


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
        from headprune.app.console import Console

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


def command(example: str, *, shared: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function (`takes_options`); ``shared`` as for `session`."""
    return lambda function: app.command(epilog=f"Example: {example}")(takes_options(function, shared))


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
