"""Files that must not or cannot be read: the file and the line, where the libraries' errors name neither."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from headprune.errors import HeadPruneError

_DEEPEST = 1000  # values within values
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]')


def files_in(path: Path, *suffixes: str) -> Iterator[Path]:
    """A file itself, or a folder's files with all its subfolders', sorted: those with one of these suffixes."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix.lower() in suffixes and file.is_file():
            yield file


def fatal(path: Path) -> HeadPruneError | None:
    """The error for JSON that must not be read at all, since pyarrow's reader would end the process.

    It overflows its stack at some tens of thousands of values within values, and follows a null pointer where a row is ``null``.
    """
    for file in files_in(path, ".json", ".jsonl"):
        with file.open("rb") as lines:
            depth = 0
            for number, line in enumerate(lines, 1):
                if depth == 0 and line.strip() == b"null":
                    return _unreadable(file, number, "it holds null instead of a JSON object")
                opened = line.count(b"[") + line.count(b"{")
                if depth == 0 and opened <= _DEEPEST and opened == line.count(b"]") + line.count(b"}"):
                    continue  # a whole object, as nearly every line of JSON lines is
                for token in _BRACKETS.finditer(line):
                    depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
                    if depth > _DEEPEST:
                        return _unreadable(file, number, f"there are values within values, more than {_DEEPEST:,} deep")
    return None


def broken_line(file: Path) -> HeadPruneError | None:
    """The error for the first line of a file of texts that is not UTF-8, or of JSON lines that is no JSON object; None without one."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            text = line.decode("utf-8-sig")
            if file.suffix.lower() == ".jsonl" and text.strip() and not isinstance(json.loads(text), dict):
                return _unreadable(file, number, "it is no JSON object")
        except (ValueError, RecursionError) as error:
            return _unreadable(file, number, str(error).replace("line 1 ", ""))
    return None


def _unreadable(file: Path, line: int, why: str) -> HeadPruneError:
    hint = "Repair or remove it (texts are UTF-8, and in JSON lines each line is one object), then run the same command again."
    return HeadPruneError(f"{file} cannot be read as a dataset: line {line:,}: {why}.", hint)
