"""Export models for other engines and loaders. Each format has its own file, except ``stock`` (folders for stock classes)."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.checkpoint import NotStockError, load_call, prove_same_answers, save, to_stock
from headprune.errors import HeadPruneError, check_link, check_text, check_writable, import_files
from headprune.exporting.engines import bench_files, is_exported, time_onnx
from headprune.exporting.formats import FORMATS, Exported, Format, exporter, format_named
from headprune.files import atomic_folder, locked
from headprune.inputs import check_model
from headprune.pruned import structure_of, unwrapped
from headprune.running import evaluating

__all__ = ["FORMATS", "Exported", "bench_files", "check_place", "export", "exporter", "format_named", "is_exported"]
__all__ += ["time_onnx"]

import_files(__name__, __path__)  # the formats


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
        path: The file, or for some formats the folder (`Format.folder`). It appears complete, and tested if the engine is installed, or
            not at all.
        to: The format: a name in `FORMATS`.
        processor: The model's tokenizer, for formats that hold one.
        dtype: The type of the stored weights: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        name: The model's name inside the file; by default the name of the file or folder.
        overwrite: Replace an existing file or folder.

    Returns:
        `Exported`: the path, whether the file was tested in its engine, and figures.

    Raises:
        HeadPruneError: The format cannot express the model, a package is not installed, the path exists or cannot be written,
            or the file does not give the model's answers. Nothing is written then.
    """
    check_model(model)
    model, path = unwrapped(model), Path(path)
    chosen = check_place(path, to, dtype, overwrite)
    for where, p in model.named_parameters():
        if p.dtype != torch.float32 or p.device.type != "cpu":
            kind = f"{str(p.dtype).removeprefix('torch.')} on {p.device}"
            message = f"{where} is {kind}: the file is compared with a model in float32 on a CPU."
            raise HeadPruneError(message, 'Pass model.to("cpu").float(), and dtype= for what the file stores.')
    path.parent.mkdir(parents=True, exist_ok=True)
    place = atomic_folder if chosen.folder else _replace_file
    with torch.no_grad(), evaluating(model), _quiet(), place(path, overwrite) as new:
        exported = chosen.write(model, new, processor, dtype, name or path.stem)
    return replace(exported, path=path, format=to)


def check_place(path: Path, to: str, dtype: str, overwrite: bool) -> Format:
    """Check, before any model is loaded, that a file of a format can be written to ``path``; returns the format.

    Raises:
        HeadPruneError: An unknown format or type, a package that is not installed, or a path that cannot be written.
    """
    chosen = format_named(to)
    if dtype not in chosen.dtypes:
        raise HeadPruneError(f"{to} has no type {dtype!r} for weights.", f"Choose from {', '.join(chosen.dtypes)}.")
    if path.exists() and path.is_dir() != chosen.folder:
        there, wanted = ("file", "folder") if chosen.folder else ("folder", "file")
        raise HeadPruneError(f"{path} is a {there}.", f"Name a {wanted} with -o.")
    if not chosen.folder and path.suffix != chosen.suffix:
        other = path.suffix in {each.suffix for each in FORMATS.values()}  # a dot may be part of a name: model-1.5
        name = path.stem if other else path.name
        raise HeadPruneError(f"{path.name} does not end in {chosen.suffix}.", f"Name it {name}{chosen.suffix}.")
    _check_free(path, overwrite)
    check_text(path)
    check_writable(path.parent)
    return chosen


def _check_free(path: Path, overwrite: bool) -> None:
    check_link(path)
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise HeadPruneError(f"{path} exists.", "Choose another with -o, or allow overwriting (--overwrite).")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress logs and warnings of PyTorch's exporter and of gguf while the context lasts."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield


@contextmanager
def _replace_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a path in a temporary folder; when the block ends without an error, move all files there to ``path``'s folder."""
    folder = path.with_name(f".{path.name}.new")
    with locked(path.with_name(f".{path.name}.lock"), f"The file {path}", "headprune export"):
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed while writing
        folder.mkdir()
        try:
            yield folder / path.name  # the final name, which files beside it may refer to
            _check_free(path, overwrite)  # another process may have written it meanwhile
            others = [file.name for file in folder.iterdir() if file.name != path.name]
            if others:  # several files cannot be replaced at once: avoid a mix of old and new ones
                path.unlink(missing_ok=True)
            for name in (*others, path.name):  # the file that names the others comes last
                os.replace(folder / name, path.with_name(name))
            if overwrite and not others and path.suffix == ".onnx":  # weights of the file that was replaced
                path.with_name(f"{path.name}.data").unlink(missing_ok=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@exporter("stock", "-stock", folder=True)
def stock(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A folder that from_pretrained loads without any option (as many heads in every layer, where the class can have them)."""
    try:
        same: Any = to_stock(model) if structure_of(model) else model
    except NotStockError as error:
        hint = "Load the folder as it is, with trust_remote_code=True. Where a stock class can have fewer heads, --strategy uniform keeps to it (docs/planning.md)."
        raise HeadPruneError(error.args[0], hint) from error
    if dtype != "float32":
        same = copy.deepcopy(same)
        for parameter in same.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    save(same, path, processor=processor, overwrite=True, about={"exported": name})
    loaded = type(same).from_pretrained(path, attn_implementation=same.config._attn_implementation).eval()
    difference, loads = prove_same_answers(model, loaded), load_call(path).code()
    size = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    facts = {"bytes": size, "dtype": dtype, "difference": difference, "loads": loads}
    summary = f"{size / 1e6:,.0f} MB, {dtype}; loads with {loads}: answers within {difference:.1g} of the largest"
    return Exported(path, "stock", True, summary, facts)
