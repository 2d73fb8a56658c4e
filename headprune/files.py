"""Lock files, atomic writes of files and folders, JSON documents with checksums, and digests.

JSON has no infinity and no NaN. Documents hold them as ``{"float": "Infinity"}``, ``{"float": "-Infinity"}`` and ``{"float": "NaN"}``,
which `loads` turns back into floats.

A document also holds a checksum of its content: one flipped bit can turn a score of 0.31 into 0.71, and nothing else would show it.
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

_PATIENCE = 0.35  # seconds: another process may hold the lock just to test whether it is free
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}  # a file system without `flock`
_held: set[Path] = set()  # by this process


class BusyError(HeadPruneError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, what: str, command: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Hold a lock file while the context lasts; missing folders are created, and removed afterwards if empty.

    The kernel tracks the holder (``flock``), or on NFS the server does, so a killed process blocks nobody. On a file system without
    such locks, filelock checks whether the process named in the file still runs, as far as this machine can tell.

    Args:
        path: The lock file; it exists only while the lock is held, or after a kill.
        what: What is locked, for messages.
        command: The command of this process, for messages in other processes.
        patience: Seconds to wait for another process.

    Raises:
        BusyError: Another process holds the lock; the message says which.
        HeadPruneError: The lock file cannot be written.
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
    """Whether this process holds the lock."""
    return path.resolve() in _held


def is_taken(path: Path) -> bool:
    """Whether another process holds the lock now."""
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

_DEEPEST = 100  # levels of nesting in a document
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
# Lists of integers, such as a layer's heads, go on one line. JSON escapes line ends in strings, so a match that spans
# lines is never inside a string.
_INTEGERS = re.compile(r"\[\n\s*-?\d+(?:,\n\s*-?\d+)*\n\s*\]")


# -- files and folders ----------------------------------------------------------------------------


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name beside ``path``, then rename it: readers see the old file or the complete new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # left by a killed run; or a link, which must not be followed
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically; text as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


_OF_MODELS = ("config.json", "headprune.json", "openvino_model.xml")  # a folder that may be replaced has one of them


@contextmanager
def atomic_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder beside ``path``, which replaces ``path`` when the block ends without an error.

    Raises:
        HeadPruneError: ``path`` exists and is not empty, and ``overwrite`` is False, or it holds no model; or another process writes it.
    """
    check_link(path)
    if path.name in ("", ".."):  # . and /, which no other folder can replace
        raise HeadPruneError(f"The folder {path} cannot be replaced.", "Name another folder.")
    new, old = path.with_name(f".{path.name}.new"), _set_aside(path)
    with _locked(path):
        _finish_swap(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not overwrite:
                raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
            if not any((path / name).exists() for name in _OF_MODELS):
                raise HeadPruneError(f"{path} holds something that is no model.", "Choose another folder, or empty it.")
        shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed while writing
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
    """Restore a folder if a process was killed while replacing it."""
    if not path.exists() and _set_aside(path).exists():
        with _locked(path):
            _finish_swap(path)


def _locked(path: Path) -> Any:
    return locked(path.with_name(f".{path.name}.lock"), f"The folder {path}", "headprune.save")


def _set_aside(path: Path) -> Path:
    """The temporary path of the old folder during a replacement."""
    return path.with_name(f".{path.name}.old")


def _finish_swap(path: Path) -> None:
    """Finish a replacement, also after a kill: remove the old folder, or put it back if there is no new one."""
    old = _set_aside(path)
    if not path.exists() and old.exists():
        os.replace(old, path)
    else:
        with suppress(OSError):  # a failed removal, such as of an open file on NFS, must not undo a save
            remove(old)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content; a missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- JSON documents -------------------------------------------------------------------------------


def dumps(data: Any) -> str:
    """Standard JSON: infinities and NaN as in the module's docstring, NumPy's numbers as numbers, tuples as lists.

    Raises:
        HeadPruneError: A value that JSON cannot hold; the message says where.
    """
    text = json.dumps(_plain(data, "the document"), indent=1, ensure_ascii=False, allow_nan=False)
    # A file name may hold bytes that are not valid text: write them as escapes.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _INTEGERS.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)


def loads(text: str) -> Any:
    """Parse JSON that `dumps` wrote."""
    return json.loads(text, object_hook=_float_or_dict)


def write_json(path: Path, kind: str, data: Mapping[str, Any]) -> None:
    """Write a JSON document of a ``kind``, which `read_json` checks, with a checksum of its content."""
    write_file(path, dumps({"headprune": kind, "schema": SCHEMA, CHECKSUM: checksum(data), **data}) + "\n")


def read_json(path: Path, kind: str, changed: Callable[[], object] | None = None) -> dict[str, Any]:
    """Read a document that `write_json` wrote. One without a checksum (from an older version, or from a person) is accepted unchecked.

    Args:
        changed: For documents that people may edit: called instead of an error if the checksum does not match.

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
    """The digest of a document's content, whatever its layout as text."""
    return digest(json.dumps(_plain(data, "the document"), separators=(",", ":"), allow_nan=False))


def stored_checksum(path: Path) -> str | None:
    """The checksum in a document, or of all bytes of another file; None if the file is missing, or the document unreadable or without one."""
    if path.suffix != ".json":
        return digest(path, 64) if path.is_file() else None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    stored = document.get(CHECKSUM) if isinstance(document, dict) else None
    return stored if isinstance(stored, str) else None


def _plain(value: Any, where: str) -> Any:
    """Convert a value to JSON types; ``where`` is its place, for errors."""
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
    """A JSON object as a dict, or as the float that it stands for."""
    name = value.get("float") if len(value) == 1 else None
    return _FLOATS.get(name, value) if isinstance(name, str) else value


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    """As `_float_or_dict`; refuses duplicate keys, whose value would be ambiguous."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r:.60} stands there twice")
    return _float_or_dict(value)


def _integer(digits: str) -> int:
    """Parse an integer; refuses more than 64 bits, which no document needs and no tensor can hold."""
    if len(digits) > 20 or abs(int(digits)) >= 2**63:
        raise ValueError(f"{digits[:20]}… is a number too large")
    return int(digits)


def _depth(value: Any) -> int:
    """The nesting depth of a JSON value; 0 for a scalar."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=-1)


# -- digests --------------------------------------------------------------------------------------


def digest(parts: str | Path | Iterable[str | bytes | memoryview | Path], length: int = 16) -> str:
    """The first ``length`` hexadecimal digits of the SHA-256 of texts, bytes and files' contents (`Path`), in order."""
    sha = hashlib.sha256()
    for part in (parts,) if isinstance(parts, str | Path) else parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:  # in chunks: a checkpoint may not fit in memory
                while content := file.read(1 << 20):
                    sha.update(content)
        else:
            sha.update(part.encode("utf-8", "backslashreplace") if isinstance(part, str) else part)
    return sha.hexdigest()[:length]
