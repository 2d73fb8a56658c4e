"""The run folder: where a run's documents lie, and which folder a run may write to."""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headprune import __version__
from headprune.app.documents import Environment, Heads, Metrics, Orders, ReportValues, Run
from headprune.app.folders import Folder
from headprune.errors import HeadPruneError, check_link
from headprune.files import CHECKSUM, digest, stored_checksum
from headprune.scoring.scores import HeadScores, load_scores

REPORTS = Path("reports")
# A run's files, all replaced by a new run.
PARTS = (
    "scores.json", "run.json", "metrics.json", "heads.json", "orders.json", "report.npz", "plan*.json", "pruned-*", "report.md", "report.html",
    "importance.png", "tradeoff.png", "heads.png",
)  # fmt: skip


T = TypeVar("T")


def _file(name: str) -> Any:
    """A property: the path of the file ``name`` in a folder."""
    return property(lambda folder: folder.path / name)


@dataclass(frozen=True)
class RunFolder(Folder):
    """One run: scores, and once pruned, plans, metrics and checkpoints."""

    parts: ClassVar[tuple[str, ...]] = PARTS

    scores_path = _file("scores.json")
    run_path = _file("run.json")
    metrics_path = _file("metrics.json")
    heads_path = _file("heads.json")
    orders_path = _file("orders.json")
    values_path = _file("report.npz")
    report_path = _file("report.md")
    page_path = _file("report.html")

    def plan_path(self, keep: int, first: bool) -> Path:
        """The file of a plan: plan.json for the first budget; for others, with their number of heads."""
        return self.path / ("plan.json" if first else f"plan-{keep}.json")

    def checkpoint_path(self, keep: int) -> Path:
        return self.path / f"pruned-{keep}"

    @property
    def pruned(self) -> bool:
        self.settle()
        return bool(self.metrics_path.exists())

    def read_run(self) -> Run:
        self.settle()
        return Run.read(self.run_path)

    def read_scores(self) -> list[HeadScores]:
        return self._read(self.scores_path, load_scores)

    def read_metrics(self) -> Metrics | None:
        return self._read(self.metrics_path, Metrics.read) if self.pruned else None

    def read_orders(self) -> Orders | None:
        return self._read(self.orders_path, Orders.read) if self.orders_path.exists() else None

    def read_heads(self) -> Heads | None:
        return self._read(self.heads_path, Heads.read) if self.heads_path.exists() else None

    def read_values(self) -> ReportValues | None:
        """What each model did on each reported example; None in older folders.

        Raises:
            HeadPruneError: The file is damaged, or of another run.
        """
        return self._read(self.values_path, ReportValues.read) if self.values_path.exists() else None

    def _read(self, path: Path, read: Callable[[Path], T]) -> T:
        """Read a document that run.json was written with: documents of different runs must not be mixed.

        Raises:
            HeadPruneError: The document's checksum is not the one in run.json.
        """
        self.settle()
        stored, known = _stamp(path), None
        with suppress(HeadPruneError):  # reported where run.json is read
            known = Run.read(self.run_path).checksums.get(path.name)
        if stored is not None and known is not None and stored != known:
            hint = f'Copy the whole folder again, or make the run again. If it is meant, delete its line "{CHECKSUM}".'
            raise HeadPruneError(f"{path} is another run's: {self.run_path} was not written with it.", hint)
        return read(path)

    def write_run(self, run: Run) -> None:
        """Write run.json, after the documents beside it, which it names by their checksums."""
        documents = (self.scores_path, self.metrics_path, self.heads_path, self.orders_path, self.values_path)
        stamps = {path.name: _stamp(path) for path in documents}
        replace(run, checksums={name: stamp for name, stamp in stamps.items() if stamp}).write(self.run_path)


def _stamp(path: Path) -> str | None:
    """A file's checksum: that in a document, or of all bytes; None if the file is missing."""
    if path.suffix == ".json":
        return stored_checksum(path)
    return digest(path, 64) if path.is_file() else None


def choose_folder(output: Path | None, model: str, overwrite: bool, key: str = "") -> RunFolder:
    """The folder a new run writes to: the one asked for, or the next free ``reports/<model>-<n>``.

    Args:
        key: The command's key (`headprune.app.folders.key_of`): it continues in a folder where it was interrupted.

    Raises:
        HeadPruneError: The folder exists and is not empty, and may not be overwritten.
    """
    if output is not None:
        folder = RunFolder(output)
        check_free(folder, overwrite or folder.left_by == key)
        return folder
    stem = re.sub(r"[^\w.-]+", "-", model).strip("-") or "model"
    for n in count(1):
        folder = RunFolder(REPORTS / f"{stem}-{n}")
        folder.settle()
        free = folder.left_by == key or (folder.left_by is None and folder.empty)
        if free and not folder.in_use:
            break
    return folder


def check_free(folder: Folder, overwrite: bool) -> None:
    """Refuse a folder that is not empty, unless it may be overwritten.

    Raises:
        HeadPruneError: It is not empty, or it is no folder.
    """
    check_link(folder.path)
    if folder.path.exists() and not folder.path.is_dir():
        raise HeadPruneError(f"{folder.path} is a file.", "Choose a folder with -o.")
    folder.settle()
    if not folder.empty and not overwrite:
        hint = "Choose another with -o, or add --overwrite."
        raise HeadPruneError(f"The folder {folder.path} exists and is not empty.", hint)


def newest_scores(output: Path | None, model: str | None = None) -> RunFolder | None:
    """The run with the newest scores (of ``model``): ``output`` itself, or one under it (default ``reports/``)."""
    root = output or REPORTS
    for path in (root, *root.glob("*/")):
        RunFolder(path).settle()
    paths = [p for p in (root / "scores.json", *root.glob("*/scores.json")) if p.is_file()]
    for path in sorted(paths, key=lambda p: p.stat().st_mtime, reverse=True):
        folder = RunFolder(path.parent)
        if model is None or (scored := folder.read_run().options.model) == model:
            return folder
        if Path(scored).exists() and Path(model).exists() and Path(scored).samefile(model):
            return folder
    return None


def environment(device: str) -> Environment:
    """Versions and hardware, for the report."""
    import torch
    import transformers

    name = platform.processor() or platform.machine()
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(torch.device(device))
    elif Path("/proc/cpuinfo").is_file():
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = match.group(1).strip() if match else name
    return Environment(
        headprune=__version__, python=platform.python_version(), torch=torch.__version__,
        transformers=transformers.__version__, system=platform.system(), device=device, device_name=name,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def now() -> str:
    """The time, UTC, as documents note it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def command_line() -> str:
    """The command that was typed, as one line that can be typed again."""
    name = Path(sys.argv[0]).name
    program = "headprune" if name in ("headprune", "__main__.py") else f"python {name}"
    return shlex.join([*program.split(), *sys.argv[1:]])
