"""Commands as a user types them, run inside the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.main import get_command
from typer.testing import CliRunner

from headprune.app.options import DataOptions, Options
from headprune.app.workflow import open_scene
from headprune.cli.app import RETIRED as RETIRED
from headprune.cli.app import app

runner = CliRunner()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

PRUNE = ["prune", "-s", "one-shot", "-q", "-k"]  # the quickest, where it is not about what goes


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, arguments)


def run(*arguments: object, code: int = 0) -> Any:
    result = invoke(*map(str, arguments))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def all_options() -> Iterator[tuple[str, set[str], bool]]:
    """Of every option of every command: the command, its flags, and whether it takes a value."""
    commands: Any = get_command(app)
    for name, command in commands.commands.items():
        for option in command.params:
            if option.param_type_name == "option":
                yield name, set(option.opts), not option.is_flag


class Silent:
    """A console that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, *texts: str) -> None:
        self.said += texts

    @contextmanager
    def track(self, label: str) -> Any:
        yield lambda done, total, note="": None


def parts_of_a_run(model: object, data: object, **options: Any) -> tuple[Any, list[Any], list[Any]]:
    """The model of a command, and the batches that it fits to and chooses by."""
    scene = open_scene(Options(str(model), DataOptions(str(data), **options), seed=options["seed"]), Silent())
    return scene.model, list(scene.parts.score.batches()), list(scene.parts.choose.batches())
