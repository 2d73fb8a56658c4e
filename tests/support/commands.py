"""Commands as a user types them, run inside the test's process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner

from headprune.cli import app

runner = CliRunner()

PRUNE = ["prune", "-s", "one-shot", "-q", "-k"]  # the quickest, where it is not about what goes


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


class Silent:
    """A console that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def track(self, label: str) -> Any:
        yield lambda done, total, note="": None
