"""The `headprune` command: what all commands have in common."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headprune.cli import ending
from headprune.cli.asked import Commands
from headprune.cli.session import hush

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


_WAITS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def wait_asleep() -> None:
    """Let OpenMP's threads sleep soon while they wait, unless the user set how they wait; call it before torch is imported.

    Threads that spin keep those of other programs, and their own, from the cores: on a busy machine small work took thirty times as long.
    Threads that never spin (OMP_WAIT_POLICY=PASSIVE) are slower on an idle one.
    """
    if not any(name in os.environ for name in _WAITS):
        os.environ["GOMP_SPINCOUNT"] = (
            "10000"  # turns of a loop, in libgomp, which PyTorch has on Linux; its own count is 300,000
        )


def main() -> None:
    """The entry point of the ``headprune`` command."""
    wait_asleep()

    def all_of_it() -> None:
        hush()
        app()

    ending.run(all_of_it)
