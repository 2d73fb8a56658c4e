"""A model written for other engines than PyTorch: one function, one file a format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.errors import HeadPruneError, check_writable
from headprune.exporting import gguf
from headprune.exporting.base import DTYPES, FORMATS, Exported, Format, Request, exporter, format_named
from headprune.locks import Lock

__all__ = [
    "DTYPES",
    "FORMATS",
    "Exported",
    "Format",
    "Request",
    "check_asked",
    "export",
    "exporter",
    "format_named",
    "gguf",
]


def export(
    model: nn.Module,
    path: Path | str,
    to: str = "gguf",
    *,
    processor: Any = None,
    dtype: str = "float32",
    name: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model, pruned or not, as a file for another engine.

    Args:
        model: A transformers model in float32 on a CPU.
        path: The file; it appears complete and tried (where the engine is installed), or not at all.
        to: The format: a name in `FORMATS`.
        processor: The model's tokenizer, for formats that hold one.
        dtype: What weights are stored in: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        name: What the model is called inside the file; by default the file's name.
        overwrite: Replace a file that is there.

    Returns:
        `Exported`: where it is, whether it was tried, and figures.

    Raises:
        HeadPruneError: The format cannot express the model, a package is not installed, the file exists or cannot be written,
            or it does not give the model's answers. Nothing is written then.
    """
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
    unfinished, was_training = path.with_name(f".{path.name}.new"), model.training
    with Lock(path.with_name(f".{path.name}.lock")).holding(f"The file {path}", "headprune export"):
        try:
            model.eval()
            done = chosen.write(Request(model, processor, unfinished, dtype, name or path.stem))
            check_asked(path, to, dtype, overwrite)  # another process may have written it meanwhile
            os.replace(unfinished, path)
        finally:
            model.train(was_training)
            unfinished.unlink(missing_ok=True)  # what a failure, or a process that was killed, left
    return replace(done, path=path)


def check_asked(path: Path, to: str, dtype: str, overwrite: bool) -> Format:
    """Refuse, before any model is loaded, what could not be written.

    Raises:
        HeadPruneError: An unknown format or type, a package that is not installed, or no place for the file.
    """
    chosen = format_named(to)
    chosen.check_installed()
    if dtype not in DTYPES:
        raise HeadPruneError(f"There is no type {dtype!r} to store weights in.", f"Choose from {', '.join(DTYPES)}.")
    if path.is_dir():
        raise HeadPruneError(f"{path} is a folder.", "Name a file with -o.")
    if path.exists() and not overwrite:
        raise HeadPruneError(f"{path} exists.", "Choose another file with -o, or allow overwriting (--overwrite).")
    check_writable(path.parent)
    return chosen
