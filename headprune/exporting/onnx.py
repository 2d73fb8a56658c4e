"""ONNX files, which onnxruntime and many other engines run; and OpenVINO's folders, which are made of them."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune import __version__
from headprune.checkpoint import difference
from headprune.errors import HeadPruneError, first_line
from headprune.exporting.engines import Session
from headprune.exporting.formats import Exported, exporter
from headprune.exporting.graph import BATCH, FlatModel, Graph, flat_model, graphs, traceable
from headprune.inputs import map_tensors, writes

TOLERANCE = 1e-4  # of an answer's largest value, for a file in float32
_ROUNDED = 4  # times what rounding does to the answers is allowed where weights are stored in half
# The sizes that a file is tried with, of the batch and of lengths: so many times the traced size, and so much more.
_SIZES = (((1, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 1), (0, 1)), ((1, 1), (2, 1)), ((1, 1), (1, 1)))

Load = Callable[[Path], Session]
"""An ONNX file to what runs it."""


@exporter("onnx", ".onnx", needs=("onnx", "onnxscript", "onnxruntime"), dtypes=("float32", "float16"), as_stored=False)
def onnx(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A file for onnxruntime and other engines (any model that torch.export takes; batch and lengths stay free)."""
    function = flat_model(model, processor)
    traced = function if dtype == "float32" else _half(function)
    return _export(path, dtype, path, Session, function, traced, traced)


@exporter("openvino", "-openvino", needs=("openvino", "onnx", "onnxscript"), dtypes=("float32", "float16"), folder=True)
def openvino(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A folder for OpenVINO: the same graph as onnx (weights may be in half precision; it computes as the processor likes)."""
    import openvino as ov

    half = dtype == "float16"

    def load(file: Path) -> Session:
        ov.save_model(ov.Core().read_model(file), path / "openvino_model.xml", compress_to_fp16=half)
        return Session(path)

    function = flat_model(model, processor)
    rounded = FlatModel(copy.deepcopy(model).half().float(), function.example) if half else function
    with tempfile.TemporaryDirectory() as folder:
        return _export(path, dtype, Path(folder, "model.onnx"), load, function, function, rounded)


def _half(function: FlatModel) -> FlatModel:
    """A model in half precision, inputs and all."""
    try:
        example = map_tensors(function.example, lambda t: t.half() if t.is_floating_point() else t)
        return FlatModel(copy.deepcopy(function.model).half(), example)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        message = f"{type(function.model).__name__} does not run in float16: {why}"
        raise HeadPruneError(message, "Use --dtype float32.") from error


def _export(
    path: Path, dtype: str, file: Path, load: Load, function: FlatModel, traced: FlatModel, rounded: FlatModel
) -> Exported:
    """Write an ONNX file that gives the model's answers in an engine, with as many free sizes as it can have.

    Args:
        path: What is exported: the file, or a folder.
        file: Where the ONNX file goes.
        load: The file in its engine.
        function: The model, in float32.
        traced: What the graph is made of.
        rounded: What rounding of the weights makes of the model: this much may the answers differ.

    Raises:
        HeadPruneError: There is none.
    """
    failed: list[HeadPruneError] = []
    for graph in graphs(traced):
        try:
            _convert(graph, traced, file)
            proof = prove(load(file), graph, function, rounded)
            break
        except HeadPruneError as error:
            failed.append(error)
    else:
        raise failed[0]
    size = sum(f.stat().st_size for f in (path if path.is_dir() else path.parent).rglob("*") if f.is_file())
    plain = {symbol: type(symbol)(name) for symbol, name in graph.names.items()}
    sizes = [[d if isinstance(d, int) else str(d.subs(plain)) for d in dims] for dims in graph.dims]
    inputs = dict(zip(function.inputs, sizes, strict=True))
    shapes = ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in inputs.items())
    form, where = f"{shapes} to {', '.join(function.outputs)}", f"{proof['engine']} on {len(proof['shapes'])} shapes"
    tried = f"tried in {where}: answers within {proof['largest_difference']:.1g} of their largest value"
    summary = f"{size / 1e6:,.1f} MB, {dtype}; {form}; {tried}"
    facts = {"dtype": dtype, "bytes": size, "inputs": inputs, "outputs": function.outputs, "proof": proof}
    note = "The file computes whole sequences; it holds no cache of keys and values for generating text."
    return Exported(path, "onnx", True, summary, facts, (note,) if writes(function.model) else ())


def _convert(graph: Graph, function: FlatModel, file: Path) -> None:
    """Write an ONNX file; weights that one file cannot hold go into another beside it."""
    axes = tuple({d: graph.names[size] for d, size in enumerate(dims) if size in graph.names} for dims in graph.dims)
    with traceable(function.model):
        try:
            converted: Any = torch.onnx.export(
                graph.program, (), input_names=function.inputs, output_names=function.outputs, dynamic_shapes=axes, verbose=False,
            )  # fmt: skip
        except Exception as error:
            cause = error.__cause__ or error
            message = f"PyTorch's exporter does not convert {type(function.model).__name__} to ONNX: {type(cause).__name__}: {first_line(cause)}"
            hint = "Try the dense model: where that fails too, ONNX has no operation for something that it does."
            raise HeadPruneError(message, hint) from error
        converted.model.producer_name, converted.model.producer_version = "headprune", __version__
        converted.save(file)


def prove(session: Session, graph: Graph, function: FlatModel, rounded: FlatModel) -> dict[str, Any]:
    """Compare an engine's answers with the model's, on several shapes.

    Args:
        function: The model, in float32.
        rounded: The same, or what rounding to half precision makes of it.

    Returns:
        The facts; differences are shares of an answer's largest value.

    Raises:
        HeadPruneError: They differ.
    """
    worst, bound, shapes = 0.0, TOLERANCE, []
    for inputs, answers in trials(graph, function):
        near = answers if rounded is function else rounded(*inputs)
        shapes.append([list(t.shape) for t in inputs])
        got = session(**dict(zip(function.inputs, inputs, strict=True)))
        for name, own, expected, close in zip(function.outputs, got, answers, near, strict=True):
            off, allowed = difference([own], [expected]), max(TOLERANCE, _ROUNDED * difference([close], [expected]))
            if not off <= allowed:
                where = f"on inputs of the shapes {', '.join(map(str, shapes[-1]))} (allowed: {allowed:.2g})"
                message = f"The engine's {name} is {off:.2g} of its largest value off the model's, {where}."
                raise HeadPruneError(message, "Report it, with the model's name, and torch's and onnxscript's version.")
            worst, bound = max(worst, off), max(bound, allowed)
    if not shapes:
        message = "The model took none of the inputs that the file was to be tried on."
        raise HeadPruneError(message, "Report it, with the model's name.")
    return {"engine": session.engine, "largest_difference": worst, "allowed": bound, "shapes": shapes}


def trials(graph: Graph, function: FlatModel) -> Iterator[tuple[list[Tensor], tuple[Tensor, ...]]]:
    """Inputs of the traced shape, and of others that the model takes, with padding where there are masks; and the model's answers."""
    seen: list[dict[Any, int]] = []
    for number, plan in enumerate(_SIZES):
        sizes = {}
        for symbol, size in graph.sizes.items():
            times, plus = plan[graph.names[symbol] != BATCH]
            limits = graph.program.range_constraints.get(symbol)
            most = limits.upper if limits is not None and limits.upper.is_Integer else math.inf
            sizes[symbol] = int(min(times * size + plus, most))
        for shift in dict.fromkeys((number, 0)) if sizes not in seen else ():
            # other content, if the model takes it: some ids have places of their own
            given = zip(function.inputs, graph.example, graph.dims, strict=True)
            inputs = [_pad(name, _resize(name, t, dims, sizes, shift)) for name, t, dims in given]
            try:
                answers = function(*(t.float() if t.dtype == torch.float16 else t for t in inputs))
            except Exception:  # too long, or too short: a model may refuse with any error
                continue
            seen.append(sizes)
            yield inputs, answers
            break


def _resize(name: str, t: Tensor, dims: list[Any], sizes: dict[Any, int], shift: int) -> Tensor:
    """An input of the traced one's content in other sizes; rolled, if it is content."""
    for d, size in enumerate(dims):
        new = size if isinstance(size, int) else int(size.subs(sizes))
        t = t.index_select(d, torch.arange(new) % t.shape[d])
    ids = t.dtype in (torch.long, torch.int) and name.endswith("ids") and "type" not in name
    return t.roll(shift, -1) if t.ndim > 1 and (ids or t.is_floating_point()) else t


def _pad(name: str, t: Tensor) -> Tensor:
    """A mask with the end of the first row padded, and the start of the last."""
    if "mask" not in name or t.ndim != 2 or t.is_floating_point() or t.shape[1] < 3 or bool((t > 1).any()):
        return t
    t, third = torch.ones_like(t), t.shape[1] // 3
    t[0, -third:] = 0
    if len(t) > 1:
        t[-1, :third] = 0
    return t
