"""A lock that one process holds, and that is released when the process ends, in whatever way."""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from headprune.errors import HeadPruneError

try:
    import fcntl
except ImportError:  # Windows, where runs are not locked
    fcntl = None  # type: ignore[assignment]

_WAITS = (0.05, 0.1, 0.2)  # seconds between attempts: another process may hold the lock only to see whether it is free
# What a file system without locks answers.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}


class BusyError(HeadPruneError):
    """Another process holds the lock."""


class Lock:
    """A file that one process at a time holds.

    The kernel knows which process holds it (``flock``) and releases it when that process ends, after SIGKILL too, so a
    killed run never blocks the next one; on NFS the server does the same. The file also says which process holds it, for
    the message. On a file system without locks this text decides: a process of this machine that has ended holds nothing.

    Args:
        path: The file; it exists only while the lock is held, or after a kill.
    """

    held: ClassVar[set[Path]] = set()  # by this process

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._made: list[Path] = []  # folders made for the lock

    @contextmanager
    def holding(self, what: str, command: str) -> Iterator[None]:
        """Hold it while the context lasts; arguments and errors as for `take`."""
        self.take(what, command)
        try:
            yield
        finally:
            self.free()

    def take(self, what: str, command: str) -> None:
        """Take it; its folder is made if it is missing.

        Args:
            what: What is locked, for the message.
            command: What this process is doing, for the messages of other processes.

        Raises:
            BusyError: Another process has it; the message says which.
            HeadPruneError: The file cannot be written.
        """
        try:
            while self._file is None:
                self._file = self._opened(what)
            os.ftruncate(self._file, 0)
            os.write(self._file, json.dumps({**_this_process(), "command": command}).encode())
        except BaseException as error:
            self.free()
            if not isinstance(error, OSError):
                raise
            raise HeadPruneError(f"{what} cannot be written: {error.strerror}.", "Choose another with -o.") from None
        self.held.add(self.path.resolve())

    def free(self) -> None:
        """Release it; folders that were made for it are removed, if they are empty."""
        if self._file is not None:
            self.held.discard(self.path.resolve())
            with suppress(OSError):
                self.path.unlink()
            os.close(self._file)
            self._file = None
        with suppress(OSError):  # not empty
            while self._made:
                self._made.pop().rmdir()
        self._made.clear()

    def taken(self) -> bool:
        """Whether another process has it now."""
        if self.path.resolve() in self.held:
            return False
        try:
            with open(self.path, "r+b") as file:
                return not _acquired(file.fileno())
        except OSError:
            return False

    def _opened(self, what: str) -> int | None:
        """The file, locked; None if its last holder has just removed it."""
        missing = [p for p in (self.path.parent, *self.path.parent.parents) if not p.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._made += reversed(missing)
        try:
            # A link is not followed: what it leads to would be overwritten.
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:
            return None
        for wait in _WAITS:
            if _acquired(file):
                break
            time.sleep(wait)
        else:
            owner = _read(file)
            os.close(file)
            raise BusyError(f"{what} is in use by {_described(owner)}.", _hint(owner, self.path))
        with suppress(FileNotFoundError):
            if os.fstat(file).st_ino == os.stat(self.path).st_ino:
                return file
        os.close(file)
        return None


def _acquired(file: int) -> bool:
    """Lock a file for as long as it is open; False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return not _is_alive(_read(file))
    return True


def _this_process() -> dict[str, Any]:
    since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return {"pid": os.getpid(), "host": platform.node(), "started": _started(os.getpid()), "since": since}


def _read(file: int) -> dict[str, Any]:
    try:
        os.lseek(file, 0, os.SEEK_SET)
        found = json.loads(os.read(file, 1 << 16))
        known = isinstance(found, dict) and type(found.get("pid")) is int and 0 < found["pid"] < 2**31
        return found if known else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote this may still be running."""
    if not owner:
        return False
    if owner.get("host") != platform.node():
        return True  # not known
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return _started(owner["pid"]) == owner.get("started")  # if not, another process has its number now


def _started(pid: int) -> str:
    """When a process began, in Linux's clock ticks; "" on other systems."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _described(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    where = "" if owner.get("host") == platform.node() else f" on {owner.get('host')}"
    return f"process {owner['pid']}{where} (`{owner.get('command', '')}`, since {owner.get('since', '?')})"


def _hint(owner: dict[str, Any], path: Path) -> str:
    if owner and owner.get("host") != platform.node():
        return f"Wait for it, or choose another folder with -o; if it is surely gone, remove {path}."
    return "Wait for it, or choose another folder with -o."
