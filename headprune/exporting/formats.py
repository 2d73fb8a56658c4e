"""The registry of export formats, and the interface of a format's writer."""

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
    """An exported file or folder.

    Attributes:
        path: The file or folder.
        format: Its name in `FORMATS`.
        proved: Whether the file ran in its engine and gave the model's answers.
        summary: One line on the file, and whether it was tested.
        facts: Figures of the file and of its proof, for a JSON document.
        notes: Remarks for the user, in sentences.
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
"""A function that writes a model in a format. It takes

- a transformers model in float32 on a CPU, in evaluation mode,
- the file to write, or the (empty) folder to write files into, which the caller then moves to its final place,
- the model's tokenizer (or image processor), for formats that hold one,
- the type of the stored weights: one of `Format.dtypes`,
- the model's name inside the file.

It raises HeadPruneError before it writes anything if the format cannot express the model, and later if the file does not give the model's
answers.
"""


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        suffix: The suffix of its files, with the dot, or of its folders.
        write: Writes a model (`Writer`).
        folder: Whether a model is a folder, not a single file.
        needs: Packages that write it; ``pip install headprune[NAME]`` installs them.
        dtypes: The types that it can store weights in.
        as_stored: Whether to store weights in the type of the model's folder by default. Otherwise in float32, since engines compute in
            the file's type, and few processors are fast in half precision.
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
    """Decorator: register a format's writer; its docstring's first line describes the format, ``properties`` are fields of `Format`."""

    def register(write: Writer) -> Writer:
        FORMATS[name] = Format(name, suffix, write, **properties)
        return write

    return register


def format_named(name: str) -> Format:
    """Look up an export format by name.

    Raises:
        HeadPruneError: No format has this name, or a package that it needs is not installed.
    """
    chosen = registered(FORMATS, "export format", name)
    if missing := [package for package in chosen.needs if importlib.util.find_spec(package) is None]:
        raise HeadPruneError(f"To write {name}, {missing[0]} must be installed.", f'pip install "headprune[{name}]"')
    return chosen
