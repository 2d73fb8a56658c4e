"""The run folder: where a run's documents lie, and which folder a run may write to."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune import __version__
from headprune.errors import HeadPruneError
from headprune.jsonio import read_json, write_json
from headprune.plans import PruningPlan
from headprune.scoring.base import HeadScores, load_scores, save_scores

REPORTS = Path("reports")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class RunFolder:
    """One run: scores, and once pruned, plans, metrics and checkpoints."""

    path: Path

    @property
    def scores_path(self) -> Path:
        return self.path / "scores.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.md"

    @property
    def unfinished(self) -> Path:
        """Finished parts of a scoring run that is not through."""
        return self.path / _UNFINISHED

    def clear_unfinished(self) -> None:
        """Remove the parts of an interrupted scoring run."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def plan_path(self, keep: int, first: bool) -> Path:
        """The first budget's plan is plan.json; further ones carry their number."""
        return self.path / ("plan.json" if first else f"plan-{keep}.json")

    def checkpoint_path(self, keep: int) -> Path:
        return self.path / f"pruned-{keep}"

    @property
    def pruned(self) -> bool:
        return self.metrics_path.exists()

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder inside for checkpoints until the run is complete; what stays in it is thrown away."""
        path = self.path / f".staging-{os.getpid()}"
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def clear_pruned(self) -> None:
        """Remove an earlier prune, so that its figures are never shown beside new ones."""
        stale = [
            self.metrics_path,
            self.path / "tradeoff.png",
            self.path / "latency.png",
            *self.path.glob("plan*.json"),
        ]
        for path in stale:
            path.unlink(missing_ok=True)
        for path in self.path.glob("pruned-*"):
            shutil.rmtree(path)

    def write_scores(self, scores: Sequence[HeadScores], run: dict[str, Any]) -> None:
        save_scores(self.scores_path, scores)
        self.write_run(run)

    def write_run(self, run: dict[str, Any]) -> None:
        write_json(self.path / "run.json", "run", run)

    def read_run(self) -> dict[str, Any]:
        return read_json(self.path / "run.json", "run")

    def read_scores(self) -> list[HeadScores]:
        return load_scores(self.scores_path)

    def read_metrics(self) -> dict[str, Any] | None:
        return read_json(self.metrics_path, "metrics") if self.pruned else None

    def read_plan(self, keep: int, first: bool) -> PruningPlan:
        return PruningPlan.load(self.plan_path(keep, first))


def choose_folder(output: Path | None, model: str, overwrite: bool) -> RunFolder:
    """The folder a new run writes to: the one asked for, or the next free ``reports/<model>-<n>``.

    Raises:
        HeadPruneError: It exists and holds something, and may not be overwritten.
    """
    if output is None:
        stem = re.sub(r"[^\w.-]+", "-", model).strip("-") or "model"
        n = 1
        while _holds_something(REPORTS / f"{stem}-{n}"):
            n += 1
        return RunFolder(REPORTS / f"{stem}-{n}")
    if output.exists() and not output.is_dir():
        raise HeadPruneError(f"{output} is a file.", "Choose a folder with -o.")
    if _holds_something(output) and not overwrite:
        raise HeadPruneError(
            f"The folder {output} exists and is not empty.", "Choose another with -o, or add --overwrite."
        )
    return RunFolder(output)


def _holds_something(folder: Path) -> bool:
    """Whether there is more in a folder than a run that was interrupted, and can go on."""
    return folder.exists() and any(p.name != _UNFINISHED for p in folder.iterdir())


def newest_scores(output: Path | None, model: str | None = None) -> RunFolder | None:
    """The run with the newest scores (of ``model``): ``output`` itself, or one under it (default ``reports/``)."""
    root = output or REPORTS
    found = [p for p in (root / "scores.json", *root.glob("*/scores.json")) if p.is_file()]
    for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
        folder = RunFolder(path.parent)
        if model is None or _same_model(folder.read_run()["options"]["model"], model):
            return folder
    return None


def _same_model(a: str, b: str) -> bool:
    return a == b or (Path(a).exists() and Path(b).exists() and Path(a).samefile(b))


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware, for the report."""
    import torch
    import transformers

    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(torch.device(device))
    elif Path("/proc/cpuinfo").is_file():
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found.group(1).strip() if found else name
    return {
        "headprune": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.system(),
        "device": device,
        "device_name": name,
        "threads": torch.get_num_threads(),
    }


def command_line() -> str:
    """What was typed, as one line that can be typed again."""
    name = Path(sys.argv[0]).name
    program = "headprune" if name in ("headprune", "__main__.py") else f"python {name}"
    return shlex.join([*program.split(), *sys.argv[1:]])
