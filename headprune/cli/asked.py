"""What was typed, where it can be judged before anything is loaded; and how mistakes are told. No torch is imported here."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer
import typer.core

from headprune.amounts import in_line
from headprune.cli.retired import RETIRED
from headprune.errors import HeadPruneError, ScoresError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig, Scene


class Commands(typer.core.TyperGroup):
    """All commands.

    A mistake in how one is called is a JSON document too, where one was asked for, and a retired option or command is one line that says what
    to type instead (`headprune.cli.retired`).
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


def fail(console: Console, message: str, hint: str) -> None:
    """Say what is wrong: a line on stderr, and the document if one was asked for."""
    _say(in_line(f"headprune: {message} {hint}".rstrip()), aside=not console.as_json)
    with suppress(OSError, HeadPruneError):  # stdout may be what is full, or closed
        console.document({"error": message, "hint": hint.strip("()")})


def _say(line: str, aside: bool = True) -> None:
    """A line on stderr; if that takes nothing and ``aside``, on stdout: who sees only that hears of it, too."""
    typer.echo(line, err=True)
    if aside and getattr(sys.stderr, "lost", False):  # `headprune.cli.ending.Patient`
        with suppress(OSError):
            typer.echo(line)


def known_methods(names: list[str] | None) -> list[str]:
    """The scoring methods that were named, each once; [] for none.

    Raises:
        HeadPruneError: There is no such method.
    """
    from headprune.scoring import method_named

    return list(dict.fromkeys(method_named(name).name for name in names or []))


_SCORING_FLAGS = {
    "method": "--method", "examples": "--examples", "seconds": "--time", "max_memory": "--max-memory",
    "normalise": "--normalise", "distil": "--distil", "steps": "--steps", "permutations": "--permutations",
    "sparsity": "--sparsity",
}  # fmt: skip


def refuse_unused(config: PruneConfig, given: Mapping[str, Any]) -> None:
    """Refuse options for scoring where nothing will be scored: to ignore them would be to mislead."""
    typed = [flag for name, flag in _SCORING_FLAGS.items() if given[name]]
    if not config.uses_scores and typed:
        why = "a plan says which heads go" if config.plan else f"--strategy {config.search.strategy} takes no scores"
        raise HeadPruneError(f"{typed[0]} has no use here: {why}.", f"Leave out {typed[0]}.")
    if config.source is not None and (late := [flag for flag in typed if flag != "--method"]):
        raise ScoresError(
            f"{late[0]} has no use here: the scores in {config.source.path} are made already.",
            f"Leave it out, or score anew: `headprune score` with {late[0]}, or here with another folder by -o.",
        )


def scores_first(strategy: str, methods: list[str]) -> str:
    """What is going to be scored, where there are no scores yet."""
    if strategy != "auto":
        return f"There are no scores yet: heads are scored by {' and '.join(methods)} first."
    return (
        f"There are no scores yet: heads are scored by {' and '.join(methods)} first, which is enough for auto, as it makes "
        "orders of its own (-m ablation -m gradient scores by both)."
    )


def planned(folder: RunFolder, methods: list[str], scene: Scene) -> dict[str, Any]:
    """What a dry run found, as a document."""
    from headprune import documents
    from headprune.app.documents import Cut

    return {
        "folder": str(folder.path), "methods": methods, "parts": documents.to_json(Cut.of(scene.parts)),
        "layers": [layer.to_json() for layer in scene.layers],
    }  # fmt: skip


def bytes_of(text: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)i?b?\s*", text.lower())
    try:
        size = int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise HeadPruneError(f"--max-memory {text!r} is no amount of memory.", "Write it as 4GB or 500MB.")
    return size


_LARGEST = 1_000_000  # examples in a batch, or tokens in a text, that anyone may want to time


def numbers_in(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _LARGEST:
        raise HeadPruneError(
            f"{flag} {text!r} is no list of numbers from 1 to {_LARGEST:,}.", f"Write it as {flag} 1,8,32."
        )
    return numbers
