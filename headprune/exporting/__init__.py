"""A model written for other engines and loaders: one function, one file a format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.errors import HeadPruneError, check_link, check_text, check_writable
from headprune.exporting import gguf, onnx, openvino, stock
from headprune.exporting.base import DTYPES, FORMATS, Exported, Format, Request, exporter, format_named
from headprune.exporting.engines import is_exported
from headprune.exporting.timing import bench_files, time_onnx
from headprune.files import atomic_folder
from headprune.inputs import check_model
from headprune.locks import Lock

__all__ = [
    "DTYPES",
    "FORMATS",
    "Exported",
    "Format",
    "Request",
    "bench_files",
    "check_asked",
    "export",
    "exporter",
    "format_named",
    "gguf",
    "is_exported",
    "onnx",
    "openvino",
    "stock",
    "time_onnx",
]


def export(
    model: nn.Module,
    path: str | Path,
    to: str = "gguf",
    *,
    processor: Any = None,
    dtype: str = "float32",
    name: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model, pruned or not, for another engine.

    Args:
        model: A transformers model in float32 on a CPU.
        path: The file, or the folder where the format is one (`Format.folder`); it appears complete and tried (where the engine is
            installed), or not at all.
        to: The format: a name in `FORMATS`.
        processor: The model's tokenizer, for formats that hold one.
        dtype: What weights are stored in: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        name: What the model is called inside the file; by default the name of the file or folder.
        overwrite: Replace what is there.

    Returns:
        `Exported`: where it is, whether it was tried, and figures.

    Raises:
        HeadPruneError: The format cannot express the model, a package is not installed, it exists or cannot be written,
            or it does not give the model's answers. Nothing is written then.
    """
    check_model(model)
    path = Path(path)
    chosen = check_asked(path, to, dtype, overwrite)
    for where, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise HeadPruneError(
                f"{where} is {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}: the file is compared with "
                "a model in float32 on a CPU.",
                'Pass model.to("cpu").float(), and dtype= for what the file stores.',
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    try:
        model.eval()
        with (atomic_folder if chosen.folder else _replaced_file)(path, overwrite) as new:
            done = chosen.write(Request(model, processor, new, dtype, name or path.stem))
    finally:
        model.train(was_training)
    return replace(done, path=path)


@contextmanager
def _replaced_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A new file to write, in a folder of its own; it, and what is beside it, moves to ``path`` when the block ends without an error."""
    folder = path.with_name(f".{path.name}.new")
    with Lock(path.with_name(f".{path.name}.lock")).holding(f"The file {path}", "headprune export"):
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed while it wrote
        _put_back(path)
        folder.mkdir()
        try:
            yield folder / path.name  # its own name, which files beside it may refer to
            _check_free(path, overwrite)  # another process may have written it meanwhile
            _move_in(folder, path)
        finally:
            _put_back(path)
            shutil.rmtree(folder, ignore_errors=True)


def _aside(path: Path) -> Path:
    """Where a file in several parts is while another takes its place."""
    return path.with_name(f".{path.name}.old")


def _move_in(folder: Path, path: Path) -> None:
    """Move a new file, and what is beside it, to ``path``. Several files cannot be replaced at once: the old ones wait until all new ones
    are there, and until then the file that names the others is missing, so that never parts of two are together."""
    new = [*(file for file in folder.iterdir() if file.name != path.name), folder / path.name]
    if len(new) > 1:
        _aside(path).mkdir()
        for file in reversed(new):
            if (old := path.with_name(file.name)).exists():
                os.replace(old, _aside(path) / file.name)
    for file in new:
        os.replace(file, path.with_name(file.name))


def _put_back(path: Path) -> None:
    """Finish a replacement of several files, also one that was killed: remove the old ones, or put them back if not all new ones are there."""
    old = _aside(path)
    if not old.is_dir() or old.is_symlink():
        return
    if not path.exists():
        for file in sorted(old.iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.with_name(file.name))
    shutil.rmtree(old, ignore_errors=True)


def check_asked(path: Path, to: str, dtype: str, overwrite: bool) -> Format:
    """Refuse, before any model is loaded, what could not be written.

    Raises:
        HeadPruneError: An unknown format or type, a package that is not installed, or no place for the file.
    """
    chosen = format_named(to)
    chosen.check_installed()
    if dtype not in chosen.dtypes:
        raise HeadPruneError(
            f"There is no type {dtype!r} to store weights in ({chosen.name}).",
            f"Choose from {', '.join(chosen.dtypes)}.",
        )
    if not chosen.folder and path.suffix != chosen.suffix and not path.is_dir():
        raise HeadPruneError(
            f"A file for {chosen.name} ends in {chosen.suffix}, and {path.name} does not.",
            f"Name it {path.stem if path.suffix in {f.suffix for f in FORMATS.values()} else path.name}{chosen.suffix}.",
        )
    if chosen.folder and path.is_file():
        raise HeadPruneError(f"{path} is a file.", "Name a folder with -o.")
    if path.is_dir() and not chosen.folder:
        raise HeadPruneError(f"{path} is a folder.", "Name a file with -o.")
    _check_free(path, overwrite)
    check_text(path)
    check_writable(path.parent)
    return chosen


def _check_free(path: Path, overwrite: bool) -> None:
    check_link(path)
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise HeadPruneError(f"{path} exists.", "Choose another with -o, or allow overwriting (--overwrite).")
