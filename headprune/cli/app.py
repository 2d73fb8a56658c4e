"""The `headprune` command: what all commands have in common."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from headprune.cli.session import fail, hush, run

RETIRED = {
    "--examples": "A method's settings follow its name: -m ablation:examples=64.",
    "--time": "A method's settings follow its name: -m ablation:time=60.",
    "--max-memory": "A method's settings follow its name: -m ablation:memory=4GB.",
    "--normalise": "A method's settings follow its name: -m gradient:normalise.",
    "--steps": "A method's settings follow its name: -m l0:steps=400.",
    "--permutations": "A method's settings follow its name: -m shapley:permutations=64.",
    "--sparsity": "A method's settings follow its name: -m l0:sparsity=0.02.",
    "--keep": "A method's settings follow its name: -m l0:keep=36.",
    "--revision": "The revision of a Hub model follows its name: MODEL@REVISION.",
    "--offload-folder": "Weights that fit in no memory lie in temporary files until the run ends: TMPDIR says where.",
    "--streaming": "For a model larger than the memory: `headprune prune MODEL -d DATA --plan FILE --device-map auto` (docs/scale.md).",
    "--pad": "A padded model is as large as the dense one. Prune by `headprune prune --strategy uniform`, which keeps to what a stock class can "
    "have, or load the folder by from_pretrained(folder, trust_remote_code=True).",
    "estimate": "`headprune score`, `prune` and `finetune` say before they begin how long they will take; with --dry-run, no more than that.",
}
"""By what was typed: the next thing to type. An option is looked up only where its command has none of that name."""


class Commands(typer.core.TyperGroup):
    """All commands.

    A mistake in how one is called is a JSON document too, where one was asked for, and a retired option or command is one line that says what
    to type instead.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:  # typer has its own copy of click's errors
            name = getattr(error, "option_name", None)
            if name not in RETIRED:
                raise
        return _refuse_retired(name, ctx.meta["as_json"])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["as_json"] = "--json" in args
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in RETIRED:
            _refuse_retired(args[0], ctx.meta["as_json"])
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        if not standalone_mode or "--json" not in given:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        try:
            code = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            from headprune.app.console import Console

            message = error.format_message().rstrip(".") + "."  # click's own come without one, or with
            fail(Console(as_json=True), message, "`headprune COMMAND --help` lists what it takes.")
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse_retired(name: str, as_json: bool) -> None:
    """Say what to type instead of an option or a command that there is no longer, and end with a usage error's code."""
    from headprune.app.console import Console

    typed = name if name.startswith("-") else f"`headprune {name}`"
    fail(Console(as_json=as_json), f"{typed} is gone.", RETIRED[name])
    raise typer.Exit(2)


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

    run(all_of_it)
