"""Folders that one process at a time writes, that change as a whole, and whose unfinished work is gone on with.

What a folder holds beside what is for readers, and only while it is needed:

    .lock        who is writing it (`headprune.locks`)
    .unfinished  finished parts of a run that is not through
    .ready       the whole new content, complete, on its way to its place

A run makes its new content in ``.unfinished``, and publishes it by one rename, to ``.ready``. Before that the folder is as it
was; from then on the new content counts, and whoever comes next carries on if the run was killed while it moved files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headprune.errors import HeadPruneError, Stopped, check_writable
from headprune.jsonio import read_json, write_json
from headprune.locks import BusyError, Lock

_LOCK, _UNFINISHED, _READY = ".lock", ".unfinished", ".ready"
_COMMAND, _DONE, _GONE = "command.json", "done.json", ".gone.json"
_PATIENCE = 20.0  # seconds that a reader waits for a run that is moving its files


@dataclass(frozen=True)
class Folder:
    """What a command writes to."""

    path: Path

    @property
    def unfinished(self) -> Path:
        """Finished parts of a run that is not through."""
        return self.path / _UNFINISHED

    @property
    def empty(self) -> bool:
        """Whether there is nothing for readers in it."""
        if not self.path.is_dir():
            return not self.path.exists()
        return all(p.name in (_LOCK, _UNFINISHED, _READY) for p in self.path.iterdir())

    @property
    def in_use(self) -> bool:
        """Whether another process is writing it."""
        return Lock(self.path / _LOCK).taken()

    @property
    def command(self) -> dict[str, Any] | None:
        """The command whose unfinished work is here, if it was interrupted."""
        try:
            return read_json(self.unfinished / _COMMAND, "command")
        except HeadPruneError:
            return None

    def left_by(self, key: str) -> bool:
        """Whether this very command was interrupted here."""
        return (self.command or {}).get("key") == key

    def done_by(self, key: str) -> bool:
        """Whether this very command was interrupted here when all was done."""
        return self.left_by(key) and (self.unfinished / _DONE).exists()

    def clear_unfinished(self) -> None:
        """Remove what an interrupted run has left."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    @contextmanager
    def locked(self, command: str) -> Iterator[None]:
        """This process's own while the context lasts.

        Raises:
            BusyError: Another process is writing it.
        """
        check_writable(self.path)
        lock = Lock(self.path / _LOCK)
        lock.take(f"The folder {self.path}", command)
        try:
            yield
        finally:
            lock.free()

    def publish(self, content: Path, replaces: Iterable[str]) -> None:
        """Put the content of a folder in the place of what is here.

        Args:
            content: Complete, and in `unfinished`, so that one rename commits it.
            replaces: Patterns of names that go, if they are here.
        """
        for path in content.glob(".*"):  # what a killed run had half written
            _remove(path)
        new = {p.name for p in content.iterdir()}
        gone = {p.name for pattern in replaces for p in self.path.glob(pattern)} - {_LOCK, _UNFINISHED, _READY}
        write_json(content / _GONE, "publication", {"gone": sorted(gone - new)})
        os.replace(content, self.path / _READY)
        self._move()

    def settle(self) -> None:
        """Finish what a run that was killed had begun to publish, or wait for one that is at it.

        Raises:
            BusyError: It takes too long.
        """
        deadline = time.monotonic() + _PATIENCE
        while (self.path / _READY).exists():
            lock = Lock(self.path / _LOCK)
            if lock.path.resolve() in Lock.held:
                return self._move()
            try:
                lock.take(f"The folder {self.path}", "reading")
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
                continue
            try:
                self._move()
            finally:
                lock.free()
        return None

    def _move(self) -> None:
        """The rest of what is ready to its place; done again after an interruption, it goes on."""
        ready = self.path / _READY
        journal = ready / _GONE
        if journal.exists():
            for name in read_json(journal, "publication")["gone"]:
                _remove(self.path / name)
            # Folders first: whoever waits for a report or a document finds all that it speaks of.
            for entry in sorted(ready.iterdir(), key=lambda p: (p.is_file(), p.name)):
                if entry != journal:
                    target = self.path / entry.name
                    if entry.is_dir() or target.is_dir():
                        _remove(target)
                    os.replace(entry, target)
            self.unfinished.mkdir(exist_ok=True)
            os.replace(journal, self.unfinished / _DONE)
        for path in self.unfinished.iterdir():
            if path.name not in (_COMMAND, _DONE):
                _remove(path)
        with suppress(FileNotFoundError):
            ready.rmdir()


AnyFolder = TypeVar("AnyFolder", bound=Folder)


def key_of(*asked: Any) -> str:
    """A name for what a command was asked; two that were asked the same go on with one another's work.

    Args:
        asked: Dataclasses of plain values, and such.
    """
    return hashlib.sha256(repr(asked).encode("utf-8", "backslashreplace")).hexdigest()[:16]


@contextmanager
def claimed(
    choose: Callable[[], AnyFolder], key: str, command: str, *, resume: bool = True, say: Callable[[str], None]
) -> Iterator[AnyFolder]:
    """A folder to write to, this process's own while the context lasts.

    Afterwards unfinished work is gone, and a folder in which there is nothing else. After an interruption it stays, for
    the same command to go on with; after an error it does too, for any command, since this one may be wrong.

    Args:
        choose: The folder to take; asked again once it is locked, since another process may have been there before.
        key: See `key_of`.
        command: The command as it was typed.
        resume: Whether unfinished work is used.

    Raises:
        BusyError: Another process is writing it.
    """
    while True:
        folder = choose()
        check_writable(folder.path)
        lock = Lock(folder.path / _LOCK)
        try:
            lock.take(f"The folder {folder.path}", command)
        except BusyError:
            if choose() != folder:  # it was free when it was chosen, and there are others
                continue
            raise
        try:
            folder.settle()
            if choose() == folder:
                break
        except BaseException:
            lock.free()
            raise
        lock.free()
    keep = True
    try:
        _begin(folder, key, command, resume, say)
        yield folder
        keep = False
    except KeyboardInterrupt as error:
        kept = f"What was finished is kept in {folder.unfinished}: the same command goes on there."
        hint = kept if _worth_keeping(folder.unfinished) else "Nothing was written."
        raise Stopped(getattr(error, "status", 130), hint) from error
    except HeadPruneError:
        for name in (_COMMAND, _DONE):
            (folder.unfinished / name).unlink(missing_ok=True)
        raise
    finally:
        if not keep or not _worth_keeping(folder.unfinished):
            folder.clear_unfinished()
        lock.free()
        with suppress(OSError):  # not empty
            folder.path.rmdir()


def _begin(folder: Folder, key: str, command: str, resume: bool, say: Callable[[str], None]) -> None:
    """Note whose unfinished work this is going to be."""
    if not resume:
        folder.clear_unfinished()
    before = folder.command
    if before is not None and before["key"] != key:
        (folder.unfinished / _DONE).unlink(missing_ok=True)
        say(
            f"{folder.path} holds unfinished work of `{before['command']}`: what fits is used, the rest goes when this is done."
        )
    write_json(folder.unfinished / _COMMAND, "command", {"key": key, "command": command})


def _worth_keeping(unfinished: Path) -> bool:
    return any(p.is_file() and p.name != _COMMAND for p in unfinished.rglob("*"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
