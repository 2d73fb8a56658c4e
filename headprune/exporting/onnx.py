"""ONNX files, which onnxruntime and many other engines run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune import __version__
from headprune.errors import HeadPruneError, first_line
from headprune.exporting import engines
from headprune.exporting.base import Exported, Request, exporter
from headprune.exporting.graph import BATCH, Call, Graph, callable_of, graphs, plainly
from headprune.inputs import map_tensors, writes
from headprune.surgery.watch import gap, largest

TOLERANCE = 1e-4  # of an answer's largest value, for a file in float32
_ROUNDED = 4  # times what rounding does to the answers is allowed where weights are stored in half
_LARGEST = 1_800_000_000  # bytes of weights in one file; protobuf, which ONNX files are, ends at 2 GiB


@dataclass(frozen=True)
class Trial:
    """Inputs, and what the model answers to them.

    Attributes:
        inputs, answers: In the order of the graph's.
        allowed: How far an engine's answers may be off, each as a share of its largest value.
    """

    inputs: list[Tensor]
    answers: list[Tensor]
    allowed: list[float]


@dataclass(frozen=True)
class Proof:
    """How an engine answered: the largest difference, as a share of that answer's largest value; and the shapes tried."""

    engine: str
    difference: float
    allowed: float
    shapes: list[list[list[int]]]
    varied: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine, "largest_difference": self.difference, "allowed": self.allowed, "shapes": self.shapes,
        }  # fmt: skip


@exporter("onnx", ".onnx", needs=("onnx", "onnxscript", "onnxruntime"), dtypes=("float32", "float16"), as_stored=False)
def onnx(request: Request) -> Exported:
    """A file for onnxruntime and other engines (any model that torch.export takes; batch and lengths stay free)."""
    function = callable_of(request.model, request.processor)
    traced = function if request.dtype == "float32" else _rounded(function, getattr(torch, request.dtype))
    graph, proof = written(function, request.path, engines.session, traced=traced, rounded=traced)
    return exported(request, "onnx", graph, proof)


def exported(request: Request, name: str, graph: Graph, proof: Proof) -> Exported:
    """What is said of a file or folder that was proved."""
    folder = request.path if request.path.is_dir() else request.path.parent
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    facts = {
        "dtype": request.dtype, "bytes": size, "inputs": graph.shapes, "outputs": list(graph.outputs), "proof": proof.to_json(),
    }  # fmt: skip
    summary = (
        f"{size / 1e6:,.1f} MB, {request.dtype}; {_listed(graph.shapes)} to {', '.join(graph.outputs)}; tried in {proof.engine} "
        f"on {len(proof.shapes)} shapes: answers within {proof.difference:.1g} of their largest value"
    )
    return Exported(request.path, name, True, summary, facts, _notes(request.model, graph, proof))


def written(
    function: Call, path: Path, load: Callable[[Path], engines.Session], *, traced: Call | None = None, rounded: Call
) -> tuple[Graph, Proof]:
    """Write an ONNX file that gives the model's answers in an engine, with as many free sizes as it can have.

    Args:
        function: The model, in float32.
        load: The file in its engine.
        traced: What the graph is made of, by default the same.
        rounded: What rounding of the weights makes of the model: this much may the answers differ.

    Raises:
        HeadPruneError: There is none.
    """
    failed: HeadPruneError | None = None
    for graph in graphs(traced or function):
        try:
            _convert(graph, path, function.model)
            return graph, prove(load(path), graph, function, rounded)
        except HeadPruneError as error:
            failed = failed or error
    assert failed is not None
    raise failed


def prove(session: engines.Session, graph: Graph, function: Call, rounded: Call) -> Proof:
    """Compare an engine's answers with the model's, on several shapes.

    Args:
        function: The model, in float32.
        rounded: The same, or what rounding to half precision makes of it.

    Raises:
        HeadPruneError: They differ.
    """
    worst, bound, shapes, varied = 0.0, TOLERANCE, [], set[str]()
    for sizes, trial in trials(graph, function, rounded):
        shape = [list(t.shape) for t in trial.inputs]
        got = session.run(dict(zip(graph.inputs, trial.inputs, strict=True)))
        for name, own, expected, allowed in zip(graph.outputs, got, trial.answers, trial.allowed, strict=True):
            off = _off(own, expected)
            if not off <= allowed:
                raise HeadPruneError(
                    f"The engine's {name} is {off:.2g} of its largest value off the model's, on inputs of the shapes "
                    f"{', '.join(map(str, shape))} (allowed: {allowed:.2g}).",
                    "Report it, with the model's name and the versions of torch and onnxscript.",
                )
            worst, bound = max(worst, off), max(bound, allowed)
        shapes.append(shape)
        varied |= {str(symbol) for symbol, size in sizes.items() if size != _traced_sizes(graph)[symbol]}
    return Proof(session.engine, worst, bound, shapes, frozenset(varied))


def trials(graph: Graph, function: Call, rounded: Call) -> Iterator[tuple[dict[Any, int], Trial]]:
    """The traced shape, and others that the model takes, with padding where there are masks; with the free sizes of each."""
    traced_sizes = _traced_sizes(graph)
    bounds = graph.program.range_constraints
    plans: list[Callable[[bool, int], int]] = [
        lambda row, size: size, lambda row, size: 1 if row else size, lambda row, size: 1,
        lambda row, size: size + 1 if row else 2 * size + 1, lambda row, size: size + 1,
    ]  # fmt: skip
    seen: list[dict[Any, int]] = []
    for number, plan in enumerate(plans):
        sizes = {}
        for symbol, size in traced_sizes.items():
            new = plan(graph.names[str(symbol)] == BATCH, size)
            high = bounds[symbol].upper if symbol in bounds else None
            sizes[symbol] = min(new, int(high)) if high is not None and high.is_Integer else new
        if sizes in seen:
            continue
        for shift in (number, 0):  # other content, if the model takes it: some ids have places of their own
            inputs = [
                _padded(name, _resized(t, dims, sizes, shift if shift else 0, name))
                for name, t, dims in zip(graph.inputs, graph.example, graph.dims, strict=True)
            ]
            wide = [t.float() if t.dtype == torch.float16 else t for t in inputs]
            try:
                answers = function.answers(wide)
                near = answers if rounded is function else rounded.answers(inputs)
            except Exception:  # too long, or too short: a model may refuse with any error
                continue
            allowed = [max(TOLERANCE, _ROUNDED * _off(r, a)) for r, a in zip(near, answers, strict=True)]
            seen.append(sizes)
            yield sizes, Trial(inputs, answers, allowed)
            break


def _convert(graph: Graph, path: Path, model: nn.Module) -> None:
    """Write the file; weights that one file cannot hold go into another beside it."""
    import onnx_ir

    with plainly(model):
        try:
            converted: Any = torch.onnx.export(
                graph.program, (), input_names=list(graph.inputs), output_names=list(graph.outputs), verbose=False,
            )  # fmt: skip
        except Exception as error:
            cause = error.__cause__ or error
            raise HeadPruneError(
                f"PyTorch's exporter does not convert {type(model).__name__} to ONNX: {type(cause).__name__}: {first_line(cause)}",
                "Try the dense model: where that fails too, ONNX has no operation for something that it does.",
            ) from error
        for value in _values(converted.model):
            if value.shape is not None:
                dims = [
                    onnx_ir.SymbolicDim(graph.named(d.value)) if hasattr(d, "value") and d.value else d
                    for d in value.shape
                ]
                value.shape = onnx_ir.Shape(dims)
        converted.model.producer_name, converted.model.producer_version = "headprune", __version__
        size = sum(t.nbytes for t in graph.program.state_dict.values())
        converted.save(path, external_data=size > _LARGEST)


def _values(model: Any) -> Iterator[Any]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _rounded(function: Call, dtype: torch.dtype) -> Call:
    """The same in half precision, inputs and all."""
    model = copy.deepcopy(function.model).to(dtype)

    def half(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    try:
        return Call(model, map_tensors(function.example, half))
    except Exception as error:
        raise HeadPruneError(
            f"{type(model).__name__} does not run in {str(dtype).removeprefix('torch.')}: {type(error).__name__}: {first_line(error)}",
            "Use --dtype float32.",
        ) from error


def _traced_sizes(graph: Graph) -> dict[Any, int]:
    """The free sizes' values in the trace."""
    found: dict[Any, int] = {}
    for t, dims in zip(graph.example, graph.dims, strict=True):
        found |= {d: size for d, size in zip(dims, t.shape, strict=True) if getattr(d, "is_Symbol", False)}
    return found


def _resized(t: Tensor, dims: Sequence[Any], sizes: dict[Any, int], shift: int, name: str) -> Tensor:
    for d, size in enumerate(dims):
        new = size if isinstance(size, int) else int(size.subs(sizes))
        t = t.index_select(d, torch.arange(new) % t.shape[d])
    content = t.is_floating_point() or (
        t.dtype in (torch.long, torch.int) and name.endswith("ids") and "type" not in name
    )
    return t.roll(shift, -1) if content and t.ndim > 1 else t


def _padded(name: str, t: Tensor) -> Tensor:
    """A mask with the end of the first row padded, and the start of the last."""
    if "mask" not in name or t.ndim != 2 or t.is_floating_point() or t.shape[1] < 3 or bool((t > 1).any()):
        return t
    t, third = torch.ones_like(t), t.shape[1] // 3
    t[0, -third:] = 0
    if len(t) > 1:
        t[-1, :third] = 0
    return t


def _off(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value; infinite for another shape, or another whole number."""
    if got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got.to(expected.dtype), expected) else float("inf")
    off = gap(got.double(), expected.double())
    return off / max(largest(expected.double()), 1e-30) if off else 0.0


def _listed(shapes: dict[str, list[int | str]]) -> str:
    return ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in shapes.items())


def _notes(model: nn.Module, graph: Graph, proof: Proof) -> tuple[str, ...]:
    notes = []
    fixed = [name for name, dims in graph.shapes.items() if all(isinstance(d, int) for d in dims)]
    if fixed:
        notes.append(f"Of fixed size in the file, since the model or PyTorch's exporter fixes it: {', '.join(fixed)}.")
    if untried := sorted({graph.names[s] for s in graph.names if s not in proof.varied}):
        notes.append(f"The model took no other {' or '.join(untried)} than it was traced with, so none was tried.")
    if writes(model):
        notes.append("The file computes whole sequences; it holds no cache of keys and values for generating text.")
    return tuple(notes)
