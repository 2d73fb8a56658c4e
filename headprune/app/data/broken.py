"""Finds the file and the line at which a dataset cannot be read: the libraries name neither.

It is asked only after reading has failed, so that it may take its time, and files that are read well are never refused.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

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
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = (
                    f"{error.msg} at column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else str(error)
                )
                return f"line {number:,} is not valid JSON ({why})", f"Each line must be one JSON object. {_REPAIR}"
            if not isinstance(value, dict):
                return (
                    f"line {number:,} holds {_KINDS.get(type(value), 'a number')} instead of a JSON object",
                    f'Write each example as {{"column": value, …}} in a line of its own. {_REPAIR}',
                )
    return None


_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _json(file: Path) -> _Wrong | None:
    """One value for the whole file, or a line for each example: what its beginning looks like."""
    text = file.read_text(encoding="utf-8-sig")
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("[") and _is_json(text.lstrip().partition("\n")[0]):
            return _json_lines(file)
        where = (
            f"line {error.lineno:,}, column {error.colno:,}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        return f"it is not valid JSON ({where})", _REPAIR
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _table(file: Path, delimiter: str) -> _Wrong | None:
    """No row may have more fields than the header, and quotes must match."""
    try:
        if wrong := _too_wide(file, delimiter):
            return wrong
        for _ in _records(file, delimiter, strict=True):
            pass
    except _QuoteError as error:
        return f'the quotes (") of the row that begins in line {error.line:,} do not match', f"Close them. {_REPAIR}"
    return None


def _too_wide(file: Path, delimiter: str) -> _Wrong | None:
    widths: list[int] = []  # of the header, and of the first row: it may begin with a nameless row number
    for first, fields in _records(file, delimiter, strict=False):
        if len(widths) == 2 and len(fields) > max(widths):
            sign = "commas" if delimiter == "," else "tabs"
            return (
                f"line {first:,} has {len(fields):,} fields where {max(widths):,} are expected",
                f'Put texts that hold {sign} into quotes ("…"). {_REPAIR}',
            )
        if len(widths) < 2 and fields:
            widths.append(len(fields))
    return None


class _QuoteError(Exception):
    """A row that cannot be read, by the line that it begins in."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line


def _records(file: Path, delimiter: str, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """Every row with the number of the line that it begins in: texts in quotes may go over several."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=strict)
            while True:
                first = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error:
                    raise _QuoteError(first) from None
                yield first, fields
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
