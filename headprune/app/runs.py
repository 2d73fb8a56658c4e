"""Folders that one process writes at a time, that change as a whole, and in which an interrupted run can continue; run folders.

Beside its content, a folder holds these, only while they are needed:

    .lock        which process is writing it (`headprune.files`)
    .unfinished  results of a run that has not ended (`headprune.store`)
    .ready       the complete new content, while it is moved to its place

A run makes its new content in ``.unfinished`` and publishes it with one rename, to ``.ready``. Before the rename the folder is
unchanged; after it the new content counts, and if the run is killed while it moves files, the next command moves the rest.
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headprune import files
from headprune.app.documents import Heads, Metrics, Orders, ReportValues, Run
from headprune.app.sources import resolved
from headprune.errors import HeadPruneError, Stopped, check_link, check_writable
from headprune.files import BusyError, digest, locked, remove
from headprune.parallel import current
from headprune.scoring.scores import HeadScores, load_scores
from headprune.store import Store

_LOCK, _UNFINISHED, _READY = OWN = (".lock", ".unfinished", ".ready")
_GONE = ".gone.json"
_PATIENCE = 20.0  # seconds that a reader waits for a run that is moving its files


@dataclass(frozen=True)
class Folder:
    """A folder that a command writes to.

    Attributes:
        parts: Patterns of the names that a new result replaces.
    """

    path: Path
    parts: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse links in place of headprune's own files here: the links' targets would be moved or removed.

        Raises:
            HeadPruneError: There is one.
        """
        for path in (self.path / name for name in OWN):
            if os.path.islink(path):  # False in an unreadable folder, which `locked` reports
                hint = "Remove the link, or use another folder."
                raise HeadPruneError(f"{path} is a link, which headprune never makes there.", hint)

    @property
    def unfinished(self) -> Path:
        """The folder with an unfinished run's results."""
        return self.path / _UNFINISHED

    def store(self, say: Callable[[str], None] = lambda text: None) -> Store:
        """The store of an unfinished run's results."""
        return Store(self.unfinished, say)

    @property
    def left_by(self) -> str | None:
        """The key (`key_of`) of the command that was interrupted here; None if there is none."""
        key: str | None = self.store().known("key")
        return key

    @property
    def empty(self) -> bool:
        """Whether the folder has no content, apart from headprune's lock and unfinished work."""
        path = self.path
        return not path.exists() or (path.is_dir() and all(entry.name in OWN for entry in path.iterdir()))

    @property
    def in_use(self) -> bool:
        """Whether another process is writing to the folder."""
        return files.is_taken(self.path / _LOCK)

    def clear_unfinished(self) -> None:
        """Remove the unfinished work of an interrupted run."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    @contextmanager
    def locked(self, command: str) -> Iterator[None]:
        """Lock the folder for this process while the context lasts.

        Raises:
            BusyError: Another process is writing to it.
        """
        check_writable(self.path)
        with locked(self.path / _LOCK, f"The folder {self.path}", command):
            yield

    def check_idle(self) -> None:
        """Raise BusyError if another process is writing to a subfolder that would be replaced: its work would be removed."""
        for path in sorted(self._replaced()):
            if path.is_dir() and Folder(path).in_use:
                hint = "Wait for it and run the same command again, or choose another folder with -o."
                raise BusyError(f"{path}, which a new result would remove, is in use by another process.", hint)

    def check_spares(self, model: Path) -> None:
        """Raise HeadPruneError if a new result would remove the model that it is made of."""
        gone = {path.resolve() for path in self._replaced()}
        if model.is_dir() and gone & {model.resolve(), *model.resolve().parents}:
            message = f"The model {model} lies in {self.path}, and would be removed with what a new run replaces there."
            raise HeadPruneError(message, "Choose another folder with -o.")

    def _replaced(self) -> set[Path]:
        """The paths that a new result replaces or removes."""
        return {path for pattern in self.parts for path in self.path.glob(pattern) if path.name not in OWN}

    def publish(self, content: Path) -> None:
        """Replace the folder's content by that of ``content``: a complete folder in `unfinished`, so that one rename commits it.

        Raises:
            BusyError: Another process is writing to a subfolder that would be removed; nothing has changed then.
        """
        self.check_idle()
        for path in (*content.glob(".*"), *content.rglob(".*.tmp")):  # half-written by a killed run
            remove(path)
        gone = {path.name for path in self._replaced()} - {path.name for path in content.iterdir()}
        files.write_json(content / _GONE, "publication", {"gone": sorted(gone)})
        os.replace(content, self.path / _READY)
        self.settle()

    def settle(self) -> None:
        """Finish a publication that has begun, also one of a killed run; or wait for a run that is publishing now.

        After an interruption, calling it again moves the rest to its place.

        Raises:
            BusyError: Waiting takes too long.
            HeadPruneError: The list of removed files is damaged, or not headprune's.
        """
        lock, ready = self.path / _LOCK, self.path / _READY
        if not ready.exists():
            return
        with nullcontext() if files.is_held(lock) else locked(lock, f"The folder {self.path}", "reading", _PATIENCE):
            journal = ready / _GONE
            if journal.exists():
                gone = files.read_json(journal, "publication").get("gone")
                for entry in list(self.path.iterdir()):  # never a path elsewhere, whatever the journal says
                    if isinstance(gone, list) and entry.name in gone and entry.name not in OWN:
                        remove(entry)
                # Folders first: when a report or a document appears, all that it names is there.
                for entry in sorted(ready.iterdir(), key=lambda p: (p.is_file(), p.name)):
                    if entry != journal:
                        target = self.path / entry.name
                        if entry.is_dir() or target.is_dir():
                            remove(target)
                        os.replace(entry, target)
                journal.unlink()
            with suppress(FileNotFoundError):
                ready.rmdir()


T = TypeVar("T")
AnyFolder = TypeVar("AnyFolder", bound=Folder)


def key_of(*options: Any) -> str:
    """A hash of a command's options (plain values, and dataclasses of them); commands with one key continue each other's work."""
    return digest(repr(options))


@contextmanager
def claimed(
    choose: Callable[[], AnyFolder], key: str, command: str, *, resume: bool = True, say: Callable[[str], None]
) -> Iterator[AnyFolder]:
    """A folder to write to, locked while the context lasts; with several ranks, the first one holds the lock.

    Afterwards unfinished work is removed, and so is an empty folder. After an interruption unfinished work stays, so that the
    same command can continue; after an error it stays for any command, since this command may be the mistake.

    Args:
        choose: Gives the folder; called again once it is locked, since another process may have been faster.
        key: See `key_of`.
        command: The command as it was typed.
        resume: Whether unfinished work is used.

    Raises:
        BusyError: Another process is writing to the folder.
        HeadPruneError: The ranks were given different options.
    """
    ranks = current()
    ranks.agree("options", lambda: key)  # different learning rates, say, would not be noticed later
    with ExitStack() as lock:
        folder = ranks.first("claiming", partial(_choose_and_lock, choose, command, lock))
        keep = False
        try:
            ranks.first("beginning", partial(_begin, folder, key, command, resume, say))
            yield folder
            ranks.gather("through", None)
        except BaseException as error:
            keep = any(path.is_file() for path in folder.unfinished.glob("*/**/*"))  # not the notes at its top
            if ranks.main and isinstance(error, HeadPruneError):
                folder.store().forget("key")  # nothing is written: the disk may be full
            if isinstance(error, KeyboardInterrupt):
                kept = f"What was finished is kept in {folder.unfinished}: the same command continues there."
                raise Stopped(getattr(error, "status", 130), kept if keep else "Nothing was written.") from error
            raise
        finally:
            if ranks.main and not keep:
                folder.clear_unfinished()


def _choose_and_lock(choose: Callable[[], AnyFolder], command: str, lock: ExitStack) -> AnyFolder:
    """Choose a folder, and lock it until ``lock`` is closed."""
    while True:
        folder = choose()
        with ExitStack() as stack:
            try:
                stack.enter_context(folder.locked(command))
                folder.settle()
            except BusyError:
                if choose() == folder:
                    raise
                continue  # another process took it meanwhile: choose another
            if choose() == folder:
                folder.check_idle()  # now, not only when the long work is done
                lock.push(stack.pop_all())
                return folder


def _begin(folder: Folder, key: str, command: str, resume: bool, say: Callable[[str], None]) -> None:
    """Note which command the unfinished work belongs to."""
    if not resume:
        folder.clear_unfinished()
    store = folder.store()
    if folder.left_by not in (None, key):
        use = "what fits is used, the rest is removed when this is done"
        say(f"{folder.path} holds unfinished work of `{store.known('command')}`: {use}.")
    store.keep("command", command)
    store.keep("key", key)


# -- run folders -------------------------------------------------------------------------------------------

REPORTS = Path("reports")
# A run's files, all replaced by a new run.
PARTS = (
    "scores.json", "run.json", "metrics.json", "heads.json", "orders.json", "report.npz", "plan*.json", "pruned-*", "report.md", "report.html",
    "importance.png", "tradeoff.png", "heads.png",
)  # fmt: skip


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
        """What each model did on each reported example; None in older folders."""
        return self._read(self.values_path, ReportValues.read) if self.values_path.exists() else None

    def _read(self, path: Path, read: Callable[[Path], T]) -> T:
        """Read a document that run.json was written with: documents of different runs must not be mixed.

        Raises:
            HeadPruneError: The document's checksum is not the one in run.json.
        """
        self.settle()
        stored, known = files.stored_checksum(path), None
        with suppress(HeadPruneError):  # reported where run.json is read
            known = Run.read(self.run_path).checksums.get(path.name)
        if stored is not None and known is not None and stored != known:
            hint = f'Copy the whole folder again, or make the run again. If it is meant, delete its line "{files.CHECKSUM}".'
            raise HeadPruneError(f"{path} is another run's: {self.run_path} was not written with it.", hint)
        return read(path)

    def write_run(self, run: Run) -> None:
        """Write run.json, after the documents beside it, which it names by their checksums."""
        documents = (self.scores_path, self.metrics_path, self.heads_path, self.orders_path, self.values_path)
        stamps = {path.name: files.stored_checksum(path) for path in documents}
        replace(run, checksums={name: stamp for name, stamp in stamps.items() if stamp}).write(self.run_path)


def choose_folder(output: Path | None, model: str, overwrite: bool, key: str) -> RunFolder:
    """The folder a new run writes to: the one asked for, or the next free ``reports/<model>-<n>``.

    Args:
        model: As it was named.
        key: The command's key (`key_of`): it continues in a folder where it was interrupted.

    Raises:
        HeadPruneError: The folder exists and is not empty, and may not be overwritten; or the run would remove its own model.
    """
    if output is not None:
        folder = RunFolder(output)
        check_free(folder, overwrite or folder.left_by == key)
        folder.check_spares(Path(resolved(model)))
        return folder
    stem = re.sub(r"[^\w.-]+", "-", Path(model.rstrip("/")).name).strip("-") or "model"
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
    folders = [RunFolder(path) for path in (output or REPORTS, *(output or REPORTS).glob("*/"))]
    for folder in folders:
        folder.settle()
    runs = [folder for folder in folders if folder.scores_path.is_file() and folder.run_path.is_file()]
    runs.sort(key=lambda folder: folder.scores_path.stat().st_mtime, reverse=True)
    for folder in runs:
        with suppress(HeadPruneError, OSError, ValueError):  # it is damaged, or a model is no path
            scored = folder.read_run().options.model
            if model is None or scored == model or Path(scored).samefile(model):
                return folder
    for folder in runs:
        folder.read_run()  # what is damaged may be what was asked for
    return None


def now() -> str:
    """The time, UTC, as documents note it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def command_line() -> str:
    """The command that was typed, as one line that can be typed again."""
    name = Path(sys.argv[0]).name
    program = "headprune" if name in ("headprune", "__main__.py") else f"python {name}"
    return shlex.join([*program.split(), *sys.argv[1:]])
