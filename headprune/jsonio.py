"""JSON files that are never half-written, and that say what they hold.

JSON has no infinity and no NaN. Both have one form here, wherever a document holds them: ``{"float": "Infinity"}``,
``{"float": "-Infinity"}`` and ``{"float": "NaN"}``, which `loads` reads back as the floats that they were.

A document also holds a checksum of what it says: one flipped bit turns a score of 0.31 into one of 0.71, and nothing else would tell.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from headprune.errors import HeadPruneError, first_line

SCHEMA = 1
CHECKSUM = "checksum"

_TAG = "float"
_FORMS = {math.inf: "Infinity", -math.inf: "-Infinity"}
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_LARGEST, _DEEPEST = 2**63 - 1, 100
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def dumps(data: Any) -> str:
    """JSON that any reader takes: infinities and NaN in the form above, NumPy's numbers as numbers, tuples as lists.

    Raises:
        HeadPruneError: Something that JSON cannot hold; the message says where.
    """
    text = json.dumps(_plain(data, "the document"), indent=1, ensure_ascii=False, allow_nan=False)
    # A file name may hold bytes that are no text. JSON can write them: as escapes.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text)


def loads(text: str) -> Any:
    """What `dumps` wrote."""
    return json.loads(text, object_hook=_read)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write under a temporary name beside ``path``, then renamed: readers see the old file or the new one.

    Raises:
        HeadPruneError: The disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(
            missing_ok=True
        )  # of a killed run; or a link that somebody put there, which must not be followed
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise HeadPruneError(
            f"{path} could not be written: {error.strerror}.",
            "What was finished before is kept: run the same command again once there is room.",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_bytes(path: Path, content: bytes) -> None:
    """As `replacing`, all at once."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: Path, kind: str, data: Mapping[str, Any]) -> None:
    """Write a document that `read_json` recognises as a ``kind``, with a checksum of its content."""
    write_text(path, dumps({"headprune": kind, "schema": SCHEMA, CHECKSUM: checksum(data), **data}) + "\n")


def checksum(data: Mapping[str, Any]) -> str:
    """Of what a document says; how its text is laid out does not count."""
    text = json.dumps(_plain(data, "the document"), separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamp(path: Path) -> str | None:
    """The checksum that a document holds; None without a document, or where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    written = found.get(CHECKSUM) if isinstance(found, dict) else None
    return written if isinstance(written, str) else None


# Whole numbers in a list go on one line, as a person would write the heads of a layer. JSON escapes line ends within
# strings, so what spans lines is never part of one.
_NUMBERS = re.compile(r"\[\n\s*-?\d+(?:,\n\s*-?\d+)*\n\s*\]")


def read_json(path: Path, kind: str, changed: Callable[[], object] | None = None) -> dict[str, Any]:
    """What `write_json` was given. A document without a checksum (an older version's, or a person's) is taken as it is.

    Args:
        changed: Called if the document was changed since it was written, for documents that people may edit.

    Raises:
        HeadPruneError: No such file, not JSON, not a ``kind``, or changed since it was written.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, object_pairs_hook=_read_once, parse_int=_read_whole)
        if _too_deep(data):
            raise ValueError(f"lists within lists, more than {_DEEPEST} deep")
    except FileNotFoundError:
        raise HeadPruneError(f"There is no file {path}.", f"headprune writes {kind} as {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        why = first_line(error) if not isinstance(error, RecursionError) else "lists within lists, too deep to be read"
        raise HeadPruneError(
            f"{path} is not readable as JSON ({why}).", "Make it again, or pass another file."
        ) from None
    if not isinstance(data, dict) or data.get("headprune") != kind:
        raise HeadPruneError(f"{path} does not hold headprune's {kind}.", "Pass a file that headprune wrote.")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise HeadPruneError(
            f"{path} has format {data.get('schema')!r:.60}; this headprune reads {SCHEMA}.",
            "Make it again with this version.",
        )
    del data["headprune"], data["schema"]
    if CHECKSUM in data and data.pop(CHECKSUM) != checksum(data):
        if changed is None:
            raise HeadPruneError(
                f"{path} is damaged, or was edited: it no longer says what headprune wrote.",
                f'Make it again, or copy it again. If the edit is meant, delete its line "{CHECKSUM}".',
            )
        changed()
    return data


def _plain(value: Any, where: str) -> Any:
    """A value made of what JSON has."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: _FORMS.get(value, "NaN")}
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


def _read(found: dict[str, Any]) -> Any:
    """A dict of a document, or the float that it stands for."""
    form = found.get(_TAG) if len(found) == 1 else None
    return _FLOATS.get(form, found) if isinstance(form, str) else found


def _read_once(pairs: list[tuple[str, Any]]) -> Any:
    """As `_read`; a key that stands there twice is refused, since a reader would have to guess which value is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.60} stands there twice")
    return _read(found)


def _read_whole(digits: str) -> int:
    """A whole number; no document holds one of more than 64 bits, and neither tensors nor reports could."""
    number = int(digits) if len(digits) < 21 else _LARGEST + 1
    if abs(number) > _LARGEST:
        raise ValueError(f"{digits[:20]}… is a number too large")
    return number


def _too_deep(value: Any) -> bool:
    """Whether there are values within values beyond what any document has."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [part for outer in level for part in _parts(outer)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
