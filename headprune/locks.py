"""A lock that one process holds, and that is released when the process ends, in whatever way."""

from __future__ import annotations

import datetime
import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from headprune.errors import HeadPruneError

_PATIENCE = 0.35  # seconds: another process may hold the lock only to see whether it is free
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}  # a file system without `flock`
_held: set[Path] = set()  # by this process


class BusyError(HeadPruneError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, what: str, command: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Only this process holds the lock while the context lasts; its folder is made if it is missing, and goes again if it is empty.

    The kernel knows which process holds it (``flock``), so one that was killed blocks nobody; on NFS the server does the same. Where a
    file system has no such locks, filelock goes by the process that the file names, as far as it can be seen from here.

    Args:
        path: The file; it exists only while the lock is held, or after a kill.
        what: What is locked, for the messages.
        command: What this process is doing, for the messages of other processes.
        patience: Seconds to wait for another process.

    Raises:
        BusyError: Another process has it; the message says which.
        HeadPruneError: The file cannot be written.
    """
    note = ""
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquired(path, patience)
        if not isinstance(lock, SoftFileLock):
            since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
            note = f"process {os.getpid()} (`{command}`, since {since} on {platform.node()})"
            path.write_text(note, encoding="utf-8", errors="backslashreplace")
    except Timeout:
        with suppress(OSError):
            note = path.read_text(encoding="utf-8", errors="replace")
        holder = note if note.startswith("process ") else "another process"
        hint = f"Wait for it, or choose another with -o; if it is surely gone, remove {path}."
        raise BusyError(f"{what} is in use by {holder}.", hint) from None
    except OSError as error:
        raise HeadPruneError(f"{what} cannot be written: {error.strerror}.", "Choose another with -o.") from None
    _held.add(path.resolve())
    try:
        yield
    finally:
        _held.discard(path.resolve())
        with suppress(OSError):
            path.unlink()
        lock.release()
        with suppress(OSError):  # not empty
            for folder in missing:
                folder.rmdir()


def is_held(path: Path) -> bool:
    """Whether this process has a lock."""
    return path.resolve() in _held


def is_taken(path: Path) -> bool:
    """Whether another process has a lock now."""
    if is_held(path) or not path.exists():
        return False
    try:
        with locked(path, str(path), "looking"):
            return False
    except HeadPruneError as error:
        return isinstance(error, BusyError)


def _acquired(path: Path, patience: float) -> BaseFileLock:
    lock: BaseFileLock = FileLock(path, timeout=patience)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        lock = SoftFileLock(path, timeout=patience)
        lock.acquire()
    return lock
