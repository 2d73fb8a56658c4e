"""Export to ONNX files, for onnxruntime and many other engines, and from these to OpenVINO folders.

`torch.export` traces a model as a function from tensors to tensors; the sizes that the model leaves free stay dynamic.
"""

from __future__ import annotations

import copy
import inspect
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune import __version__
from headprune.checkpoint import difference
from headprune.errors import HeadPruneError, first_line
from headprune.exporting.engines import Session
from headprune.exporting.formats import Exported, exporter
from headprune.input_specs import build, of_config, recorded
from headprune.inputs import LABELS, Example, by_path, call, map_tensors, with_decoder_input, writes
from headprune.running import attributes_kept, uncached, uncompiled

BATCH, LENGTH = "batch", "length"
TOLERANCE = 1e-4  # relative to an answer's largest value, for a file in float32
_ROUNDED = 4  # tolerance for weights in half precision, as a multiple of the change that rounding them causes
# Sizes to test a file with: (factor, summand) on the traced batch size, then on the traced lengths.
_SIZES = (((1, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 1), (0, 1)), ((1, 1), (2, 1)), ((1, 1), (1, 1)))


@exporter("onnx", ".onnx", needs=("onnx", "onnxscript", "onnxruntime"), dtypes=("float32", "float16"), as_stored=False)
def onnx(model: nn.Module, path: Path, processor: Any, dtype: str, name: str) -> Exported:
    """A file for onnxruntime and other engines (any model that torch.export takes; batch and lengths stay free)."""
    function = traced = flat_model(model, processor)
    if dtype == "float16":
        try:
            example = map_tensors(function.example, lambda t: t.half() if t.is_floating_point() else t)
            traced = FlatModel(copy.deepcopy(model).half(), example)
        except Exception as error:
            message = f"{type(model).__name__} does not run in float16: {type(error).__name__}: {first_line(error)}"
            raise HeadPruneError(message, "Use --dtype float32.") from error
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


def _export(
    path: Path, dtype: str, file: Path, load: Any, function: FlatModel, traced: FlatModel, rounded: FlatModel
) -> Exported:
    """Write an ONNX file that gives the model's answers in an engine, with as many free sizes as possible.

    Args:
        path: The exported file or folder.
        file: Path of the ONNX file.
        load: Takes the ONNX file, and returns its `Session`.
        function: The model, in float32.
        traced: The model to trace.
        rounded: The model with rounded weights; its error sets the tolerance.

    Raises:
        HeadPruneError: No such file can be written.
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
    tried = f"tried in {proof['engine']} on {len(proof['shapes'])} shapes: answers within {proof['largest_difference']:.1g} of their largest value"
    summary = f"{size / 1e6:,.1f} MB, {dtype}; {shapes} to {', '.join(function.outputs)}; {tried}"
    facts = {"dtype": dtype, "bytes": size, "inputs": inputs, "outputs": function.outputs, "proof": proof}
    note = ("The file computes whole sequences; it holds no cache of keys and values for generating text.",)
    return Exported(path, "onnx", True, summary, facts, note if writes(function.model) else ())


def _convert(graph: Graph, function: FlatModel, file: Path) -> None:
    """Write an ONNX file; weights too large for it go into a second file beside it."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

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
        ClearMetadataAndDocStringPass()(converted.model)  # removes stack traces, which hold this machine's paths
        converted.model.producer_name, converted.model.producer_version = "headprune", __version__
        converted.save(file)


class FlatModel(nn.Module):
    """A model as a function from tensors to tensors, both in a fixed order.

    Attributes:
        example: An example input.
        inputs, outputs: Names of the tensors: arguments of the model's ``forward``, fields of its output.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model, self.example, named = model, example, example
        if not isinstance(example, Mapping):
            positional = (example,) if isinstance(example, Tensor) else example
            named = inspect.signature(model.forward).bind(*positional).arguments
        self.inputs = [name for name, _ in _leaves(named, "input")]
        outputs = [name for name, _ in _outputs(call(model, example))]
        self.outputs = [f"{name}_out" if name in self.inputs else name for name in outputs]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        left = iter(given)
        example = map_tensors(self.example, lambda _: next(left))
        return tuple(t for _, t in _outputs(call(self.model, example)))


@dataclass(frozen=True)
class Graph:
    """A traced model.

    Attributes:
        program: A `torch.export.ExportedProgram` of a `FlatModel`.
        example: The inputs that it was traced with.
        dims: The dimensions of every input: numbers, or sympy expressions in the free sizes.
        names: Names of the free sizes: batch, length, …
        sizes: The free sizes' values in the trace.
    """

    program: Any
    example: list[Tensor]
    dims: list[list[Any]]
    names: dict[Any, str]
    sizes: dict[Any, int]


def flat_model(model: nn.Module, processor: Any = None) -> FlatModel:
    """A `FlatModel` with an example input, in the form that the model was pruned with or that its config implies.

    Args:
        processor: The tokenizer; if the form comes from the config, its other outputs, such as token types, are inputs too.

    Raises:
        HeadPruneError: No form is known on which the model runs.
    """
    reason = ""
    for example in _examples(model, processor):
        try:
            return FlatModel(model, example)
        except Exception as error:  # a model may refuse an input with any error
            reason = reason or f" It did not run on a made-up input ({type(error).__name__}: {first_line(error)})."
    hint = "Export a model that headprune has pruned or saved with an example: it remembers what that looked like."
    raise HeadPruneError(f"It is not known what {type(model).__name__} takes.{reason}", hint)


def graphs(function: FlatModel) -> Iterator[Graph]:
    """Trace the model with as many free sizes as possible, then with fewer; callers take the first graph that works.

    Raises:
        HeadPruneError: `torch.export` fails on the model even with all sizes fixed.
    """
    # torch.export fixes sizes that the model fixes.
    example, auto = list(by_path(function.example).values()), torch.export.Dim.AUTO
    lengths = tuple(t.ndim if t.ndim < 4 else 1 for t in example)
    choices = dict.fromkeys((lengths, tuple(min(t.ndim, 1) for t in example), (0,) * len(example)))
    failed: list[Exception] = []
    for dims in choices:
        try:
            graph = _trace(function, example, [dict.fromkeys(range(most), auto) for most in dims])
        except Exception as error:
            failed.append(error)
        else:
            yield graph
    if len(failed) == len(choices):
        message = f"torch.export does not take {type(function.model).__name__}: {type(failed[0]).__name__}: {first_line(failed[0])}"
        hint = "Try the dense model: where that fails too, PyTorch's exporter does not know something that it does."
        raise HeadPruneError(message, hint) from failed[0]


@contextmanager
def traceable(model: Any) -> Iterator[None]:
    """Prepare a model for tracing while the context lasts: no cache, no fused fast path, and experts with static shapes."""
    experts = model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
    with ExitStack() as stack:
        if experts is not None:
            stack.callback(model.set_experts_implementation, experts)
            model.set_experts_implementation("batched_mm")
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with uncached(model), attributes_kept(model), uncompiled():
            yield


class _PlainAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` by plain operations, with PyTorch's zeros for a token that may attend to no other.

    The decomposition of PyTorch's exporter takes 4 % longer in onnxruntime (a BERT), and computes a softmax over nothing for such tokens.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = _attention if func is torch._C._nn.scaled_dot_product_attention else func
        return plain(*args, **(kwargs or {}))


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, **more: Any
) -> Any:
    scale = more.get("scale")
    if more.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype == torch.bool:
        blind, scores = ~attn_mask.any(-1, keepdim=True), scores.masked_fill(~attn_mask, float("-inf"))
    else:
        blind, scores = attn_mask.amax(-1, keepdim=True) == float("-inf"), scores + attn_mask
    return (scores.softmax(-1) @ value).masked_fill(blind, 0.0)


def _trace(function: FlatModel, example: list[Tensor], free: list[dict[int, Any]]) -> Graph:
    with traceable(function.model), _PlainAttention():
        program = torch.export.export(function, tuple(example), dynamic_shapes=(tuple(free),))
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][-len(example) :]
    expressions = [[d if isinstance(d, int) else d.node.expr for d in value.shape] for value in inputs]
    dims = [[d if getattr(d, "free_symbols", None) else int(d) for d in own] for own in expressions]
    names, sizes = dict[Any, str](), dict[Any, int]()
    for name, t, own in zip(function.inputs, example, dims, strict=True):
        for d, size in enumerate(own):
            for symbol in getattr(size, "free_symbols", ()):
                length = f"{name}_{LENGTH if d == 1 else d}" if LENGTH in names.values() else LENGTH
                names.setdefault(symbol, length if d else BATCH)
            if size in names:
                sizes[size] = t.shape[d]
    return Graph(program, example, dims, names, sizes)


def _examples(model: nn.Module, processor: Any) -> Iterator[Example]:
    """Candidate inputs without labels, those with the most fields first; decoders that shift labels get ``decoder_input_ids`` instead."""
    # A service passes on all that the tokenizer gives, and without token types, pairs of texts would get other answers. Models that
    # generate text are called without these.
    try:
        given = [] if writes(model) else list(processor("a"))
    except Exception:  # no tokenizer, an image processor, or one that takes texts in another form
        given = []
    parameters = inspect.signature(model.forward).parameters
    more = [name for name in given if name in parameters and name not in LABELS]
    mask = ["attention_mask"] if "attention_mask" in parameters else []
    forms = [(form, mask) for form in recorded(model)]
    forms += [(form, names) for names in (mask + more, mask) for form in of_config(model)]
    for form, names in forms:
        example = build(form)
        if isinstance(example, Mapping):
            example = with_decoder_input(model, example)
            if isinstance(ids := example.get("input_ids"), Tensor):
                filled = {name: torch.full_like(ids, "mask" in name) for name in names if name not in example}
                yield _two_rows({**example, **filled})
        yield _two_rows(example)
        yield example


def _two_rows(example: Any) -> Any:
    """An example with its single row doubled, since torch.export treats a size of 1 as fixed."""
    alone = all(len(t) == 1 for t in by_path(example).values() if t.ndim)
    return map_tensors(example, lambda t: torch.cat([t, t.roll(1, -1)]) if t.ndim else t) if alone else example


def _outputs(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a model's output with their names, without the cache."""
    if not isinstance(output, Mapping | Tensor | tuple | list) and hasattr(output, "__dict__"):
        output = vars(output)
    if isinstance(output, Mapping):
        output = {k: v for k, v in output.items() if k != "past_key_values"}
    return _leaves(output, "output")


def _leaves(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """(name, tensor) for all tensors in a value, in the order of `headprune.inputs.by_path`; those in a mapping have their keys' names."""
    first = () if isinstance(value, Mapping) else (name,)
    return [("_".join(map(str, (*first, *path))), t) for path, t in by_path(value).items()]


def prove(session: Session, graph: Graph, function: FlatModel, rounded: FlatModel) -> dict[str, Any]:
    """Compare an engine's answers with the model's, on several shapes.

    Args:
        function: The model, in float32.
        rounded: The same, or the model rounded to half precision.

    Returns:
        The facts of the proof; differences are relative to an answer's largest value.

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
        raise HeadPruneError(
            "The model took none of the inputs to try the file on.", "Report it, with the model's name."
        )
    return {"engine": session.engine, "largest_difference": worst, "allowed": bound, "shapes": shapes}


def trials(graph: Graph, function: FlatModel) -> Iterator[tuple[list[Tensor], tuple[Tensor, ...]]]:
    """Test inputs of the traced shape and of other shapes that the model accepts, with padding in masks, and the model's answers."""
    seen: list[dict[Any, int]] = []
    for number, plan in enumerate(_SIZES):
        sizes = {}
        for symbol, size in graph.sizes.items():
            times, plus = plan[graph.names[symbol] != BATCH]
            limits = graph.program.range_constraints.get(symbol)
            most = limits.upper if limits is not None and limits.upper.is_Integer else math.inf
            sizes[symbol] = int(min(times * size + plus, most))
        for shift in dict.fromkeys((number, 0)) if sizes not in seen else ():
            # rolled content, if the model accepts it: some ids must stay at their positions
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
    """A traced input repeated or cut to other sizes; ids and floats are rolled by ``shift``."""
    for d, size in enumerate(dims):
        new = size if isinstance(size, int) else int(size.subs(sizes))
        t = t.index_select(d, torch.arange(new) % t.shape[d])
    ids = t.dtype in (torch.long, torch.int) and name.endswith("ids") and "type" not in name
    return t.roll(shift, -1) if t.ndim > 1 and (ids or t.is_floating_point()) else t


def _pad(name: str, t: Tensor) -> Tensor:
    """Pad a mask at the end of its first row and the start of its last; other inputs stay the same."""
    if "mask" not in name or t.ndim != 2 or t.is_floating_point() or t.shape[1] < 3 or bool((t > 1).any()):
        return t
    t, third = torch.ones_like(t), t.shape[1] // 3
    t[0, -third:] = 0
    if len(t) > 1:
        t[-1, :third] = 0
    return t
