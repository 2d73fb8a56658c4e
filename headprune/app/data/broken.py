"""Finds the file and the line that make a dataset unreadable: the libraries name neither.

This runs only after reading has failed: so it may be slow, and it never refuses a file that can be read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headprune.errors import HeadPruneError, first_line

_REPAIR = "Repair or remove it, then run the same command again."


def first_broken(path: Path) -> HeadPruneError | None:
    """What is wrong with a file, or with the first such file in a folder; None if nothing is found.

    Args:
        path: A data file, or a folder that is searched with all its subfolders.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        look = _LOOKS.get(file.suffix.lower())
        if look is None:
            continue
        try:
            wrong = _not_utf8(file) if look is not _parquet else None
            wrong = wrong or look(file)
        except OSError as error:
            wrong = str(error.strerror), "Check the file and its permissions."
        if wrong:
            return HeadPruneError(f"{file} cannot be read as a dataset: {wrong[0]}.", wrong[1])
    return None


_DEEPEST = 1000  # values within values
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]')


def fatal(path: Path) -> HeadPruneError | None:
    """The error for JSON that must not be read at all, since pyarrow's reader would end the process.

    It overflows its stack at some tens of thousands of values within values, and follows a null pointer where a row is ``null``.

    Args:
        path: A data file, or a folder that is searched with all its subfolders.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if (
            file.suffix.lower() in (".json", ".jsonl")
            and file.is_file()
            and _suspicious(file)
            and (why := _fatal(file))
        ):
            return HeadPruneError(
                f"{file} cannot be read as a dataset: {why}.", f"Each example is a JSON object. {_REPAIR}"
            )
    return None


def _suspicious(file: Path) -> bool:
    """A quick look: brackets in texts count too."""
    open_, widest = 0, 0
    with file.open("rb") as lines:
        for line in lines:
            opened, closed = line.count(b"[") + line.count(b"{"), line.count(b"]") + line.count(b"}")
            open_, widest = open_ + max(opened - closed, 0), max(widest, opened)
            if open_ + widest > _DEEPEST or line.strip() == b"null":
                return True
    return False


def _fatal(file: Path) -> str:
    """What would end the process, and in which line; "" for nothing."""
    depth = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not depth and line.strip() == b"null":
                return f"line {number:,} holds null instead of a JSON object"
            for found in _BRACKETS.finditer(line):
                depth += (found[0] in (b"[", b"{")) - (found[0] in (b"]", b"}"))
                if depth > _DEEPEST:
                    return f"in line {number:,} there are values within values, more than {_DEEPEST:,} deep"
    return ""


_Wrong = tuple[str, str]  # what is wrong and where in the file, what to try


def _not_utf8(file: Path) -> _Wrong | None:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return (
                    f"line {number:,} is not UTF-8 text (byte {line[error.start]:#04x} at position {error.start + 1:,})",
                    "Save the file as UTF-8, or check that it is a text file at all.",
                )
    return None


def _json_lines(file: Path) -> _Wrong | None:
    """Each line that is not empty must be one object."""
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            value = _parsed(line)
            if isinstance(value, Exception):
                at = f" at column {value.colno:,}" if isinstance(value, json.JSONDecodeError) else ""
                why = getattr(value, "msg", value)
                return f"line {number:,} is not valid JSON ({why}{at})", f"Each line must be one JSON object. {_REPAIR}"
            if not isinstance(value, dict):
                return (
                    f"line {number:,} holds {_KINDS.get(type(value), 'a number')} instead of a JSON object",
                    f'Write each example as {{"column": value, …}} in a line of its own. {_REPAIR}',
                )
    return None


_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _json(file: Path) -> _Wrong | None:
    """One value for the whole file, or one line for each example: the beginning tells which."""
    text = file.read_text(encoding="utf-8-sig")
    value = _parsed(text)
    if not isinstance(value, Exception):
        return None
    start = text.lstrip()
    if not start.startswith("[") and not isinstance(_parsed(start.partition("\n")[0]), Exception):
        return _json_lines(file)
    at = f"line {value.lineno:,}, column {value.colno:,}: " if isinstance(value, json.JSONDecodeError) else ""
    return f"it is not valid JSON ({at}{getattr(value, 'msg', value)})", _REPAIR


def _parsed(text: str) -> Any:
    """A JSON text's value, or the error where it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error


def _table(file: Path, delimiter: str) -> _Wrong | None:
    """No row may have more fields than the header, and quotes must match."""
    widths: list[int] = []  # of the header, and of the first row: it may begin with a row number without a name
    for first, fields in _records(file, delimiter, strict=False):
        if fields and len(widths) < 2:
            widths.append(len(fields))
        elif fields and len(fields) > max(widths):
            sign = "commas" if delimiter == "," else "tabs"
            return (
                f"line {first:,} has {len(fields):,} fields where {max(widths):,} are expected",
                f'Put texts that hold {sign} into quotes ("…"). {_REPAIR}',
            )
    for first, fields in _records(file, delimiter, strict=True):
        if fields is None:
            return f'the quotes (") of the row that begins in line {first:,} do not match', f"Close them. {_REPAIR}"
    return None


def _records(file: Path, delimiter: str, strict: bool) -> Iterator[tuple[int, list[str] | None]]:
    """Every row and the line that it begins in (a text in quotes may have several lines); None is a row that cannot be read."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=strict)
            while True:
                first = reader.line_num + 1
                try:
                    yield first, next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    yield first, None
                    return
    finally:
        csv.field_size_limit(limit)


def _parquet(file: Path) -> _Wrong | None:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        ParquetFile(file)
    except ArrowException as error:
        return f"it is no Parquet file ({first_line(error)})", "Write it again, or fetch it again: it may be cut short."
    return None


_LOOKS: dict[str, Callable[[Path], _Wrong | None]] = {
    ".json": _json, ".jsonl": _json_lines, ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"), ".parquet": _parquet, ".txt": lambda _: None,
}  # fmt: skip
