"""What an export is asked for and what it gives, and the register of formats."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headprune.errors import HeadPruneError

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Request:
    """What is to be written.

    Attributes:
        model: A transformers model in float32 on a CPU, in evaluation mode.
        processor: Its tokenizer (or image processor), for formats that hold one.
        path: The file to write, or the folder (empty) to write files into; the caller moves it to its place once it is whole.
        dtype: What weights are stored in: one of `DTYPES`.
        name: What the model is called inside the file.
    """

    model: nn.Module
    processor: Any
    path: Path
    dtype: str
    name: str


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file or folder.
        format: Its name in `FORMATS`.
        proved: Whether the file was run in the engine that it is for, and gave the model's answers.
        summary: The file, and whether it was tried, in a line.
        facts: Figures of the file and of its proof, for a JSON document.
        notes: What a reader should know, in sentences.
    """

    path: Path
    format: str
    proved: bool
    summary: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path), "format": self.format, "proved": self.proved, "facts": self.facts,
            "notes": list(self.notes),
        }  # fmt: skip


Writer = Callable[[Request], Exported]


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        suffix: What its files end in, with the dot; what its folders end in, where a model is several files.
        folder: Whether a model is a folder.
        needs: Packages that write it; ``pip install headprune[NAME]`` installs them.
        dtypes: What it can store weights in: some of `DTYPES`.
        as_stored: Whether weights are best stored as the model's folder has them; else in float32, since engines compute in what the
            file has, and few processors are fast in half precision.
        about: The first line of the writer's docstring.
        tokenizer: Whether the file holds the model's tokenizer, so that there must be one.
    """

    name: str
    suffix: str
    folder: bool
    needs: tuple[str, ...]
    dtypes: tuple[str, ...]
    as_stored: bool
    write: Writer
    about: str
    tokenizer: bool = False

    def check_installed(self) -> None:
        """Raise HeadPruneError, with what to type, unless every package is there that writes this format."""
        for package in self.needs:
            if importlib.util.find_spec(package) is None:
                raise HeadPruneError(
                    f"Writing {self.name} needs the package {package}, which is not installed.",
                    f'pip install "headprune[{self.name}]"',
                )


FORMATS: dict[str, Format] = {}


def exporter(
    name: str,
    suffix: str,
    *,
    needs: tuple[str, ...] = (),
    folder: bool = False,
    dtypes: tuple[str, ...] = DTYPES,
    as_stored: bool = True,
    tokenizer: bool = False,
) -> Callable[[Writer], Writer]:
    """Register a function that writes a format; the first line of its docstring describes it.

    It raises HeadPruneError for what the format cannot express, before it writes anything, and for a file that does not give
    the model's answers.
    """

    def register(write: Writer) -> Writer:
        about = (write.__doc__ or "").strip().partition("\n")[0]
        FORMATS[name] = Format(name, suffix, folder, needs, dtypes, as_stored, write, about, tokenizer)
        return write

    return register


def format_named(name: str) -> Format:
    """A format of the register.

    Raises:
        HeadPruneError: There is none of that name.
    """
    if name not in FORMATS:
        raise HeadPruneError(f"There is no export format {name!r}.", f"Choose from {', '.join(FORMATS)}.")
    return FORMATS[name]
