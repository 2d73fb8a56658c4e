"""The register of formats: what each is given and gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headprune.errors import HeadPruneError, registered


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
        return {**asdict(self), "path": str(self.path)}


Writer = Callable[[nn.Module, Path, Any, str, str], Exported]
"""A function of

- a transformers model in float32 on a CPU, in evaluation mode,
- the file to write, or the folder (empty) to write files into; the caller moves it to its place once it is whole,
- the model's tokenizer (or image processor), for formats that hold one,
- what weights are stored in: one of `Format.dtypes`,
- what the model is called inside the file.

It raises HeadPruneError for what the format cannot express, before it writes anything, and for a file that does not give the model's answers.
"""


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        suffix: What its files end in, with the dot; what its folders end in, where a model is several files.
        write: Writes a model (`Writer`).
        folder: Whether a model is a folder.
        needs: Packages that write it; ``pip install headprune[NAME]`` installs them.
        dtypes: What it can store weights in.
        as_stored: Whether weights are best stored as the model's folder has them; else in float32, since engines compute in what the
            file has, and few processors are fast in half precision.
        tokenizer: Whether the file holds the model's tokenizer, so that there must be one.
    """

    name: str
    suffix: str
    write: Writer
    folder: bool = False
    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    as_stored: bool = True
    tokenizer: bool = False

    @property
    def about(self) -> str:
        """The first line of the writer's docstring."""
        return (self.write.__doc__ or "").strip().partition("\n")[0]


FORMATS: dict[str, Format] = {}


def exporter(name: str, suffix: str, **properties: Any) -> Callable[[Writer], Writer]:
    """Register a function that writes a format; ``properties`` are those of `Format`, and the first line of its docstring describes it."""

    def register(write: Writer) -> Writer:
        FORMATS[name] = Format(name, suffix, write, **properties)
        return write

    return register


def format_named(name: str) -> Format:
    """A format of the register.

    Raises:
        HeadPruneError: There is none of that name, or a package that it needs is not installed.
    """
    chosen = registered(FORMATS, "export format", name)
    if missing := [package for package in chosen.needs if importlib.util.find_spec(package) is None]:
        raise HeadPruneError(f"To write {name}, {missing[0]} must be installed.", f'pip install "headprune[{name}]"')
    return chosen
