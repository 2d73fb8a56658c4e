"""Locks that one process holds, files and folders that are never half-written, JSON documents that say when they were changed, and digests of what they hold.

JSON has no infinity and no NaN. Both have one form here, wherever a document holds them: ``{"float": "Infinity"}``,
``{"float": "-Infinity"}`` and ``{"float": "NaN"}``, which `loads` reads back as the floats that they were.

A document also holds a checksum of what it says: one flipped bit turns a score of 0.31 into one of 0.71, and nothing else would tell.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from headprune.errors import HeadPruneError, check_link, first_line

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


SCHEMA = 1
CHECKSUM = "checksum"

_DEEPEST = 100  # values within values, of a document
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
# Whole numbers in a list go on one line, as a person would write the heads of a layer. JSON escapes line ends within
# strings, so what spans lines is never part of one.
_INTEGERS = re.compile(r"\[\n\s*-?\d+(?:,\n\s*-?\d+)*\n\s*\]")


# -- files and folders ----------------------------------------------------------------------------


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name beside ``path``, then renamed: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a killed run; or somebody's link, which must not be followed
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file atomically; a text in UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``path`` to write to; it takes the place of ``path`` when the block ends without an error.

    Raises:
        HeadPruneError: ``path`` exists and is not empty, and ``overwrite`` is False; or another process writes it.
    """
    check_link(path)
    new, old = path.with_name(f".{path.name}.new"), _set_aside(path)
    with _locked(path):
        _finish_swap(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
            raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed while it wrote
        new.mkdir()
        try:
            yield new
            if path.exists():
                os.replace(path, old)
            os.replace(new, path)
        finally:
            _finish_swap(path)
            shutil.rmtree(new, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """Put a folder back whose replacement was cut short by a kill."""
    if not path.exists() and _set_aside(path).exists():
        with _locked(path):
            _finish_swap(path)


def _locked(path: Path) -> Any:
    return locked(path.with_name(f".{path.name}.lock"), f"The folder {path}", "headprune.save")


def _set_aside(path: Path) -> Path:
    """Where a folder is while another takes its place."""
    return path.with_name(f".{path.name}.old")


def _finish_swap(path: Path) -> None:
    """Remove the old folder of a swap, also of one that was killed; or put it back if there is no new one."""
    old = _set_aside(path)
    if not path.exists() and old.exists():
        os.replace(old, path)
    else:
        with suppress(OSError):  # what cannot be removed must not undo a save: on NFS a file that is still open, say
            remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that it holds; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- JSON documents -------------------------------------------------------------------------------


def dumps(data: Any) -> str:
    """JSON that any reader takes: infinities and NaN in the form above, NumPy's numbers as numbers, tuples as lists.

    Raises:
        HeadPruneError: Something that JSON cannot hold; the message says where.
    """
    text = json.dumps(_plain(data, "the document"), indent=1, ensure_ascii=False, allow_nan=False)
    # A file name may hold bytes that are no text. JSON can write them: as escapes.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _INTEGERS.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)


def loads(text: str) -> Any:
    """What `dumps` wrote."""
    return json.loads(text, object_hook=_float_or_dict)


def write_json(path: Path, kind: str, data: Mapping[str, Any]) -> None:
    """Write a document that `read_json` recognises as a ``kind``, with a checksum of its content."""
    write_file(path, dumps({"headprune": kind, "schema": SCHEMA, CHECKSUM: checksum(data), **data}) + "\n")


def read_json(path: Path, kind: str, changed: Callable[[], object] | None = None) -> dict[str, Any]:
    """What `write_json` was given. A document without a checksum (an older version's, or a person's) is taken as it is.

    Args:
        changed: Called if the document was changed since it was written, for documents that people may edit.

    Raises:
        HeadPruneError: No such file, not JSON, not a ``kind``, or changed since it was written.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique, parse_int=_integer)
        if _depth(data) >= _DEEPEST:
            raise RecursionError
    except FileNotFoundError:
        raise HeadPruneError(f"There is no file {path}.", f"headprune writes {kind} as {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        why = "lists within lists, too deep" if isinstance(error, RecursionError) else first_line(error)
        hint = "Make it again, or pass another file."
        raise HeadPruneError(f"{path} is not readable as JSON ({why}).", hint) from None
    if not isinstance(data, dict) or data.get("headprune") != kind:
        raise HeadPruneError(f"{path} does not hold headprune's {kind}.", "Pass a file that headprune wrote.")
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        message = f"{path} has format {schema!r:.60}; this headprune reads {SCHEMA}."
        raise HeadPruneError(message, "Make it again with this version.")
    del data["headprune"], data["schema"]
    if CHECKSUM in data and data.pop(CHECKSUM) != checksum(data):
        if changed is None:
            message = f"{path} is damaged, or was edited: it no longer says what headprune wrote."
            hint = f'Make it again, or copy it again. If the edit is meant, delete its line "{CHECKSUM}".'
            raise HeadPruneError(message, hint)
        changed()
    return data


def checksum(data: Mapping[str, Any]) -> str:
    """The digest of what a document says; how its text is laid out does not count."""
    return digest(json.dumps(_plain(data, "the document"), separators=(",", ":"), allow_nan=False))


def stored_checksum(path: Path) -> str | None:
    """The checksum that a document holds; None without a document, or where it holds none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    stored = document.get(CHECKSUM) if isinstance(document, dict) else None
    return stored if isinstance(stored, str) else None


def _plain(value: Any, where: str) -> Any:
    """A value made of what JSON has."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": json.dumps(float(value))}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise HeadPruneError(f"In {where}, {wrong[0]!r} is no name for a value in JSON.", "Please report this.")
        return {key: _plain(part, f"{where} › {key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, f"{where} › {i}") for i, part in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a number of NumPy's or torch's
        return _plain(value.item(), where)
    raise HeadPruneError(f"In {where} is a {type(value).__name__}, which JSON cannot hold.", "Please report this.")


def _float_or_dict(value: dict[str, Any]) -> Any:
    """A dict of a document, or the float that it stands for."""
    name = value.get("float") if len(value) == 1 else None
    return _FLOATS.get(name, value) if isinstance(name, str) else value


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    """As `_float_or_dict`; a key that stands there twice is refused, since a reader would have to guess which value is meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r:.60} stands there twice")
    return _float_or_dict(value)


def _integer(digits: str) -> int:
    """An integer of at most 64 bits: no document holds another, and neither tensors nor reports could."""
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise ValueError(f"{digits[:20]}… is a number too large")
    return int(digits)


def _depth(value: Any) -> int:
    """How many values lie within values, at most."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=-1)


# -- digests --------------------------------------------------------------------------------------


def digest(parts: str | Path | Iterable[str | bytes | memoryview | Path], length: int = 16) -> str:
    """Hexadecimal SHA-256 of a text, of a file's content, or of several such and bytes, in order."""
    sha = hashlib.sha256()
    for part in (parts,) if isinstance(parts, str | Path) else parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:  # in pieces: a checkpoint may be as large as the memory
                while content := file.read(1 << 20):
                    sha.update(content)
        else:
            sha.update(part.encode("utf-8", "backslashreplace") if isinstance(part, str) else part)
    return sha.hexdigest()[:length]
