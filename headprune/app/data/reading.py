"""Reads the splits of a Hub dataset, a local folder or a file; errors name the file and the line that is broken."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

from headprune.errors import HeadPruneError, check_text, explained, first_line

BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
_CSV = {"keep_default_na": False, "na_values": ["", "nan", "NaN"]}  # else texts like "None", "null" or "NA" are missing
ARGUMENTS: dict[str, dict[str, Any]] = {".csv": _CSV, ".tsv": {**_CSV, "delimiter": "\t"}}  # of the builders, by suffix
WHOLE = "all"  # the name of the only split where the data has none: one file, or one dataset saved to disk
_HINT = f"Pass a Hub id, a folder, or a file ({', '.join(BUILDERS)})."
_DEEPEST = 1000  # levels of nested JSON values
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]')


def check_local(dataset: str) -> None:
    """Refuse a path that cannot hold data, before `datasets` reads it, whose errors come later and say less.

    Raises:
        HeadPruneError: No such file or folder, an empty one, or a kind of file that headprune does not read.
    """
    path = Path(dataset)
    check_text(path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        empty = (is_file and not path.stat().st_size) or (is_folder and not any(path.iterdir()))
    except OSError as error:
        raise HeadPruneError(f"{dataset} cannot be read: {error.strerror}.", "Check the path.") from None
    known = path.suffix.lower() in BUILDERS
    is_path = known or path.is_absolute() or dataset.startswith((".", "~"))
    problems = {
        "--dataset or --also names no dataset.": not dataset.strip(),
        f"{path} is empty.": empty,
        f"{path} is no data file that headprune reads.": is_file and not known,
        f"There is no file or folder {dataset}.": is_path and not (is_file or is_folder),
    }
    for problem in (problem for problem, holds in problems.items() if holds):
        raise HeadPruneError(problem, _HINT)


def read_splits(dataset: str, subset: str | None = None) -> dict[str, Any]:
    """A dataset's splits, by name; a single file is one split, called `WHOLE`.

    Args:
        dataset: Hub id, folder or file.
        subset: The dataset's configuration, where it has several.

    Raises:
        HeadPruneError: No such dataset, or one that cannot be read; the message names the file and the line, if they can be found.
    """
    check_local(dataset)
    path = Path(dataset)
    _check_json(path)
    _check_addresses(path)
    try:
        if path.is_file():
            return {WHOLE: _load_file(path)}
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            stored = datasets.load_from_disk(str(path))
            return dict(stored) if isinstance(stored, Mapping) else {WHOLE: stored}
        suffixes = {file.suffix.lower() for file in path.rglob("*") if file.is_file()} - {"", ".md"}
        only_tables = bool(suffixes) and suffixes <= ARGUMENTS.keys()  # no images whose labels a table holds
        return dict(datasets.load_dataset(dataset, subset, **(_CSV if only_tables else {})))
    except Exception as error:
        raise _unreadable(path, error) from error


def place(dataset: str, split: str) -> str:
    """A split's name in messages: ``split 'test'``, or the file's name if the data has no splits."""
    return (Path(dataset).name or dataset) if split == WHOLE else f"split {split!r}"


def _load_file(path: Path, streaming: bool = False) -> Any:
    suffix, split = path.suffix.lower(), {"data_files": glob.escape(str(path)), "split": "train"}
    return datasets.load_dataset(BUILDERS[suffix], streaming=streaming, **split, **ARGUMENTS.get(suffix, {}))


# -- what cannot be read ------------------------------------------------------------------------------


def _files_in(path: Path, *suffixes: str) -> Iterator[Path]:
    """The file itself, or all files in a folder and its subfolders, sorted; only those with one of these suffixes."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix.lower() in suffixes and file.is_file():
            yield file


def _broken(file: Path, line: int, why: str) -> HeadPruneError:
    """The error for a file that cannot be read; ``line`` is 0 if unknown."""
    hint = "Repair or remove it (texts are UTF-8, and in JSON lines each line is one object), then run the same command again."
    return HeadPruneError(f"{file} cannot be read as a dataset: {f'line {line:,}: ' if line else ''}{why}.", hint)


def _check_json(path: Path) -> None:
    """Refuse JSON on which pyarrow's reader would crash the process.

    The reader overflows its stack at some tens of thousands of nested values, and follows a null pointer at a ``null`` row.

    Raises:
        HeadPruneError: There is such JSON.
    """
    for file in _files_in(path, ".json", ".jsonl"):
        with file.open("rb") as lines:
            depth = 0
            for number, line in enumerate(lines, 1):
                if depth == 0 and line.strip() == b"null":
                    raise _broken(file, number, "it holds null instead of a JSON object")
                opened = line.count(b"[") + line.count(b"{")
                if depth == 0 and opened <= _DEEPEST and opened == line.count(b"]") + line.count(b"}"):
                    continue  # a whole object, as nearly every line of JSON lines is
                for token in _BRACKETS.finditer(line):
                    depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
                    if depth > _DEEPEST:
                        raise _broken(file, number, f"there are values within values, more than {_DEEPEST:,} deep")


def _check_addresses(folder: Path) -> None:
    """Refuse a folder whose README.md or .huggingface.yaml names files on a network, which `datasets` would fetch.

    Raises:
        HeadPruneError: One of them does.
    """
    for file in (folder / "README.md", folder / ".huggingface.yaml"):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        metadata = text.split("\n---", 1)[0] if file.name == "README.md" else text
        address = re.search(r"[\w+.-]+://[^\s'\",\]]*", metadata)
        if address and ("data_files" in metadata or "data_dir" in metadata):
            raise HeadPruneError(
                f"{file} names files elsewhere ({address[0]:.80}), and headprune fetches nothing for a folder.",
                "Put the files into the folder, or take the address out.",
            )


def _unreadable(path: Path, error: Exception) -> HeadPruneError:
    """The error for a dataset that `datasets` could not read."""
    if problem := explained(error):  # a disk error, perhaps in the cache of `datasets`
        return HeadPruneError(str(problem), "The datasets library keeps what it reads in HF_HOME.")
    if problem := _broken_file(path):
        return problem
    generating = isinstance(error, datasets.exceptions.DatasetGenerationError)  # says only that something went wrong
    text = first_line(error.__cause__ if generating and error.__cause__ else error)
    if path.exists():
        return HeadPruneError(
            f"{path} cannot be read as a dataset: {text}.",
            "Check the files in it, and its name: *, ? and [ are taken for patterns, and a name must be one line.",
        )
    return HeadPruneError(f"There is no dataset {str(path)!r} that can be read: {text}.", f"{_HINT} Check --subset.")


def _broken_file(path: Path) -> HeadPruneError | None:
    """The error for the first file, in a folder or given itself, that cannot be read alone; None if all can.

    The error of `datasets` for a folder does not name the file, and seldom the line.
    """
    for file in _files_in(path, *BUILDERS):
        number, is_text = 0, file.suffix.lower() not in {".parquet"}
        try:
            for line in file.read_bytes().splitlines() if is_text else ():
                number += 1
                text = line.decode("utf-8-sig")
                if file.suffix.lower() == ".jsonl" and text.strip() and not isinstance(json.loads(text), dict):
                    raise ValueError("it is no JSON object")
            number = 0
            for _ in _load_file(file, streaming=True).with_format("arrow").iter(1000):
                pass
        except Exception as error:
            return _broken(file, number, first_line(error).replace("line 1 ", ""))
    return None
