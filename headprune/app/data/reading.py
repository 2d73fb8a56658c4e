"""Every split of a Hub dataset, a local folder or a local file; for what cannot be read, the file and the line."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headprune.errors import HeadPruneError, causes, check_text, explained, first_line, is_of_the_disk

_DEEPEST = 1000  # values within values
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]')


def files_in(path: Path, *suffixes: str) -> Iterator[Path]:
    """A file itself, or a folder's files with all its subfolders', sorted: those with one of these suffixes."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix.lower() in suffixes and file.is_file():
            yield file


def fatal(path: Path) -> HeadPruneError | None:
    """The error for JSON on which pyarrow's reader would crash the process; None for any other file.

    It overflows its stack at some tens of thousands of values within values, and follows a null pointer where a row is ``null``.
    """
    for file in files_in(path, ".json", ".jsonl"):
        with file.open("rb") as lines:
            depth = 0
            for number, line in enumerate(lines, 1):
                if depth == 0 and line.strip() == b"null":
                    return _broken_at(file, number, "it holds null instead of a JSON object")
                opened = line.count(b"[") + line.count(b"{")
                if depth == 0 and opened <= _DEEPEST and opened == line.count(b"]") + line.count(b"}"):
                    continue  # a whole object, as nearly every line of JSON lines is
                for token in _BRACKETS.finditer(line):
                    depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
                    if depth > _DEEPEST:
                        return _broken_at(file, number, f"there are values within values, more than {_DEEPEST:,} deep")
    return None


def broken_line(file: Path) -> HeadPruneError | None:
    """The error for the first line of a file of texts that is not UTF-8, or of JSON lines that is no JSON object; None without one."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            text = line.decode("utf-8-sig")
            if file.suffix.lower() == ".jsonl" and text.strip() and not isinstance(json.loads(text), dict):
                return _broken_at(file, number, "it is no JSON object")
        except (ValueError, RecursionError) as error:
            return _broken_at(file, number, str(error).replace("line 1 ", ""))
    return None


def _broken_at(file: Path, line: int, why: str) -> HeadPruneError:
    hint = "Repair or remove it (texts are UTF-8, and in JSON lines each line is one object), then run the same command again."
    return HeadPruneError(f"{file} cannot be read as a dataset: line {line:,}: {why}.", hint)


BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
WHOLE = "all"  # the name of the only split where the data has none: one file, or one dataset saved to disk


def check_local(dataset: str) -> None:
    """Refuse a path that cannot hold data, before the library reads it: its own errors come later and say less.

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
    if not dataset.strip():
        raise HeadPruneError(
            "--dataset or --also names no dataset.", "Pass a Hub id, a folder, or a .jsonl, .csv or .parquet file."
        )
    if empty:
        raise HeadPruneError(f"{path} is empty.", "Pass a folder or a file with data in it.")
    known = path.suffix.lower() in BUILDERS
    if is_file and not known:
        raise HeadPruneError(
            f"{path} is no data file that headprune reads.", f"Use {', '.join(BUILDERS)}, a folder or a Hub id."
        )
    if not is_file and not is_folder and (known or path.is_absolute() or dataset.startswith((".", "~"))):
        raise HeadPruneError(f"There is no file or folder {dataset}.", "Check the path.")


def read_splits(dataset: str, subset: str | None = None) -> dict[str, Any]:
    """Every split by its name; a single file is one split, called `WHOLE`.

    Args:
        dataset: Hub id, folder or file.
        subset: The dataset's configuration, where it has several.

    Raises:
        HeadPruneError: No such dataset, or one that cannot be read; the message names the file and the line, if they can be found.
    """
    check_local(dataset)
    if Path(dataset).exists() and (deadly := fatal(Path(dataset))):
        raise deadly
    _check_addresses(Path(dataset))
    try:
        return _load(dataset, subset)
    except Exception as error:
        raise _unreadable(dataset, error) from error


def _check_addresses(folder: Path) -> None:
    """Refuse a folder whose description names files on a network, which the library would fetch.

    Raises:
        HeadPruneError: It does.
    """
    for name in ("README.md", ".huggingface.yaml"):
        file = folder / name
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        metadata = text.split("\n---", 1)[0] if name == "README.md" else text
        address = re.search(r"[\w+.-]+://[^\s'\",\]]*", metadata)
        if address and ("data_files" in metadata or "data_dir" in metadata):
            raise HeadPruneError(
                f"{file} names files elsewhere ({address[0]:.80}), and headprune fetches nothing for a folder.",
                "Put the files into the folder, or take the address out.",
            )


def place(dataset: str, split: str) -> str:
    """A split's name in messages: ``split 'test'``, or the file's name if the data has no splits."""
    return (Path(dataset).name or dataset) if split == WHOLE else f"split {split!r}"


def _load(dataset: str, subset: str | None) -> dict[str, Any]:
    import datasets

    path = Path(dataset)
    if path.is_file():
        return {WHOLE: _load_file(path)}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        stored = datasets.load_from_disk(str(path))
        return dict(stored) if isinstance(stored, Mapping) else {WHOLE: stored}
    return dict(datasets.load_dataset(dataset, subset))


def _load_file(path: Path, streaming: bool = False) -> Any:
    import datasets

    suffix = path.suffix.lower()
    extra = {"delimiter": "\t"} if suffix == ".tsv" else {}
    return datasets.load_dataset(
        BUILDERS[suffix], data_files=glob.escape(str(path)), split="train", streaming=streaming, **extra
    )


def unreadable_file(path: Path) -> HeadPruneError | None:
    """The error for the first file, of a folder or itself, that cannot be read by itself; None without one.

    The library's error for a folder does not name the file.
    """
    for file in files_in(path, *BUILDERS):
        try:
            if BUILDERS[file.suffix.lower()] != "parquet" and (problem := broken_line(file)):
                return problem
            for _ in _load_file(file, streaming=True).with_format("arrow").iter(1000):
                pass
        except Exception as error:
            return HeadPruneError(
                f"{file} cannot be read as a dataset: {first_line(error)}.",
                "Repair or remove it, then run the same command again.",
            )
    return None


def _of_the_cache(path: Path, error: Exception) -> HeadPruneError | None:
    """The error for a full disk or a cache folder that the library cannot write; None if the data itself is at fault."""
    if is_of_the_disk(error) and (full := explained(error)):
        return full
    for cause in causes(error):
        if not isinstance(cause, OSError) or not isinstance(name := cause.filename, str):
            continue
        places = (Path(name).absolute(), path.absolute()), (Path(name).resolve(), path.resolve())
        if not any(inner.is_relative_to(outer) for inner, outer in places):
            return HeadPruneError(
                f"The datasets library cannot write its cache: {name}: {cause.strerror}.",
                "Set HF_HOME to a folder that can be written.",
            )
    return None


def _unreadable(dataset: str, error: Exception) -> HeadPruneError:
    """The error for a dataset that the library could not read."""
    import datasets

    path, cause = Path(dataset), error
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and isinstance(error.__cause__, Exception):
        cause = error.__cause__  # its own text says only that something went wrong
    text = first_line(cause)
    if (elsewhere := _of_the_cache(path, error)) is not None:
        return elsewhere
    if path.exists():
        if problem := unreadable_file(path):
            return problem
        if path.is_dir() and glob.has_magic(str(path.resolve())):
            return HeadPruneError(
                f"{path} cannot be read as a dataset: the library takes *, ? and [ in {path.resolve()} for patterns of names.",
                "Name a file in it, or rename the folder.",
            )
        if path.is_dir() and len(str(path.resolve()).splitlines()) > 1:
            return HeadPruneError(
                f"{path} cannot be read as a dataset: the library finds no files where a folder's name has a line end in it.",
                "Name a file in it, or rename the folder.",
            )
        why = (
            "it holds no rows" if re.search("empty|no data", text.lower()) or isinstance(error, StopIteration) else text
        )
        return HeadPruneError(f"{path} cannot be read as a dataset: {why}.", "Check the files in it.")
    if cause is not error:
        return HeadPruneError(f"Dataset {dataset!r} cannot be read: {text}.", "Check --subset, or its page on the hub.")
    return HeadPruneError(
        f"There is no dataset {dataset!r}: no such file or folder, and the Hugging Face hub says: {text}.",
        "Pass a Hub id, a folder, or a .jsonl, .csv or .parquet file.",
    )
