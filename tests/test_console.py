"""What commands print: one document on stdout, progress with a time, and nothing that a model prints."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole
from rich.progress import Progress
from typer.main import get_command

from headprune.app.console import Console, TimeLeft
from headprune.app.models import load_model
from headprune.cli import app
from tests.support.commands import run

pytestmark = pytest.mark.usefixtures("brief")


def test_every_command_gives_one_document(scored: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    quick = ["--scores", scored, "--strategy", "one-shot", "--no-repair"]
    base = [bert_folder, "-d", data_folder, "-L", 20]
    commands: dict[str, list[Any]] = {
        "layers": ["score", *base, "--dry-run"],
        "methods": ["prune", *base, "-k", 4, "-o", "new", "--strategy", "one-shot", "--dry-run"],
        "plans": ["prune", "-k", 4, *quick, "--dry-run"],
        "report": ["report", scored],
        "strategies": ["methods"],
        "model": ["inspect", bert_folder],
        "rows": ["bench", bert_folder, bert_folder, "--batch-sizes", 1, "--lengths", 8],
        "scores": ["score", *base, "-m", "random", "-o", "scored"],
        "budgets": ["prune", "-k", 4, *quick, "-o", "pruned"],
    }
    for key, arguments in commands.items():
        assert key in json.loads(run(*arguments, "--json").stdout), arguments
        assert not (here / "new").exists()


def test_what_a_model_prints_stays_out_of_the_document(
    bert_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_model

    def talking(*arguments: Any, **options: Any) -> Any:
        print("Hello from the model")
        return real(*arguments, **options)

    monkeypatch.setattr("headprune.app.models.load_model", talking)
    result = run("inspect", bert_folder, "--json")
    assert json.loads(result.stdout)["model"] == str(bert_folder)
    assert "Hello from the model" in result.stderr


def test_all_commands_take_the_same_flags() -> None:
    command: Any = get_command(app)
    for name, one in command.commands.items():
        flags = {f for option in one.params for f in option.opts}
        assert {"--json", "--quiet", "-q", "--verbose", "-v"} <= flags, name


def test_progress_never_stands_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes minutes: the time left is known from the first step on, and falls while one waits."""
    clock = [0.0]
    monkeypatch.setattr("headprune.app.console.time.monotonic", lambda: clock[0])
    bars, column = Progress(get_time=lambda: clock[0]), TimeLeft()
    column.max_refresh = None
    bars.add_task("x", total=None)
    (task,) = bars.tasks

    def shown() -> str:
        return column.render(task).plain

    assert shown() == ""
    for now, done, text in (
        (0.0, 0, "0/10"), (60.0, 1, "1/10, 0:09:00 left"), (100.0, None, "1/10, 0:08:20 left"), (5000.0, None, "1/10, 0:00:00 left"),
        (5000.0, 10, "10/10, 0:00:00 left"),
    ):  # fmt: skip
        clock[0] = now
        if done is not None:
            bars.update(task.id, completed=done, total=10, updated=now)
        assert shown() == text


def test_the_bar_is_drawn_with_it() -> None:
    console = Console()
    console.err = RichConsole(file=io.StringIO(), force_terminal=True, width=80)
    with console.track("scoring by ablation") as progress:
        progress(7, 12, "block.encoder.layer.11.attention.self of 24 layers, and more that is told")
    (line,) = [line for line in console.err.file.getvalue().split("\n") if "7/12" in line]  # type: ignore[attr-defined]
    assert "-:--" not in line
    assert "scoring by ablation (block" in line  # it took three lines
    assert "0:00:00 left" in line
