"""Commands as a user types them, run inside the test's process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command
from typer.testing import CliRunner

from headprune.app.options import DataOptions, Options
from headprune.app.workflow.scene import open_scene
from headprune.cli.app import app

ROOT = Path(__file__).parents[2]
runner = CliRunner()
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

PRUNE = ["prune", "-s", "one-shot", "-q", "-k"]  # the quickest, where it is not about what goes


def invoke(*arguments: str) -> Any:
    return runner.invoke(app, arguments)


def run(*arguments: object, code: int = 0) -> Any:
    result = invoke(*map(str, arguments))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def stderr_of(*arguments: object, code: int = 0) -> str:
    """What a command says on stderr, in one line."""
    return " ".join(run(*arguments, code=code).stderr.split())


def python(*arguments: str, **given: Any) -> Any:
    """What becomes of a Python of its own in the repository's folder; Ctrl-C reaches it, whatever started the tests."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **given.pop("env", {})}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, text=True, timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
    )  # fmt: skip


def metrics_of(folder: Path) -> Any:
    """A run's metrics.json."""
    return json.loads((folder / "metrics.json").read_text())


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
