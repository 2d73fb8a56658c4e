"""A model as a graph: traced by `torch.export`, with the sizes left free that the model leaves free."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.errors import HeadPruneError, first_line
from headprune.input_specs import build, of_config, recorded
from headprune.inputs import LABELS, Example, call, is_encoder_decoder, map_tensors, tensors, writes
from headprune.running import attributes_kept, uncached, uncompiled

BATCH, LENGTH = "batch", "length"


class FlatModel(nn.Module):
    """A model as a function from tensors to tensors, both in a fixed order.

    Attributes:
        example: Inputs that the model takes.
        inputs, outputs: Names of the tensors: arguments of the model's ``forward``, fields of its output.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model = model
        self.example = example
        self.inputs = [name for name, _ in _leaves(_names_of(model, example), "input")]
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
        dims: Of every input, each dimension: a number, or an expression (of sympy) in the free sizes.
        names: What the free sizes are called: batch, length, …
        sizes: The free sizes' values in the trace.
    """

    program: Any
    example: list[Tensor]
    dims: list[list[Any]]
    names: dict[Any, str]
    sizes: dict[Any, int]


def flat_model(model: nn.Module, processor: Any = None) -> FlatModel:
    """A model with inputs that it takes: of the form that it was pruned with, or that its config names.

    Args:
        processor: Its tokenizer: what that gives beside, such as token types, is an input too where the form is not known.

    Raises:
        HeadPruneError: It is not known what it takes.
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
    """The model traced with as many free sizes as it can have, then with fewer: for the first that works.

    Raises:
        HeadPruneError: `torch.export` does not take the model, whatever is fixed.
    """
    example, auto = tensors(function.example), torch.export.Dim.AUTO  # torch.export fixes sizes that the model fixes
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
def traceable(model: nn.Module) -> Iterator[None]:
    """A model as a trace needs it while the context lasts: no cache, no fused layers, experts of which all shapes are known."""
    own: Any = model
    experts = own.get_experts_implementation() if hasattr(own, "get_experts_implementation") else None
    with ExitStack() as stack:
        if experts is not None:
            stack.callback(own.set_experts_implementation, experts)
            own.set_experts_implementation("batched_mm")
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        with uncached(model), attributes_kept(model), uncompiled():
            yield


class _PlainAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` in plain operations, and zeros for a token that sees none, as PyTorch has it.

    What PyTorch's exporter puts in its place takes 4 % longer in onnxruntime (a BERT), and computes a softmax over nothing for such tokens.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._C._nn.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        query, key, value = (given[name] for name in names[:3])
        mask, scale = given.get("attn_mask"), given.get("scale")
        if given.get("enable_gqa"):
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if given.get("is_causal"):
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if mask is None:
            return scores.softmax(-1) @ value
        if mask.dtype == torch.bool:
            blind, scores = ~mask.any(-1, keepdim=True), scores.masked_fill(~mask, float("-inf"))
        else:
            blind, scores = mask.amax(-1, keepdim=True) == float("-inf"), scores + mask
        return (scores.softmax(-1) @ value).masked_fill(blind, 0.0)


def _trace(function: FlatModel, example: list[Tensor], free: list[dict[int, Any]]) -> Graph:
    with traceable(function.model), _PlainAttention():
        program = torch.export.export(function, tuple(example), dynamic_shapes=(tuple(free),))
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][-len(example) :]
    dims = [[_size(d) for d in value.shape] for value in inputs]
    names: dict[Any, str] = {}
    sizes: dict[Any, int] = {}
    for name, t, own in zip(function.inputs, example, dims, strict=True):
        for d, size in enumerate(own):
            for symbol in getattr(size, "free_symbols", ()):
                length = f"{name}_{LENGTH if d == 1 else d}" if LENGTH in names.values() else LENGTH
                names.setdefault(symbol, length if d else BATCH)
            if size in names:
                sizes[size] = t.shape[d]
    return Graph(program, example, dims, names, sizes)


def _size(d: Any) -> Any:
    """A number, or an expression."""
    expression = d if isinstance(d, int) else d.node.expr
    return expression if getattr(expression, "free_symbols", None) else int(expression)


def _examples(model: nn.Module, processor: Any) -> Iterator[Example]:
    """Inputs that a model may take, the fullest first."""
    # A service passes on what the tokenizer gives. Without token types, pairs of texts would get other answers. Models that write text are
    # called without.
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
            example = _without_labels(model, example)
            if isinstance(ids := example.get("input_ids"), Tensor):
                filled = {name: torch.full_like(ids, "mask" in name) for name in names if name not in example}
                yield _two_rows({**example, **filled})
        yield _two_rows(example)
        yield example


def _without_labels(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """An example without labels; a decoder that reads its tokens off the labels gets these tokens."""
    kept = {k: v for k, v in example.items() if k not in LABELS}
    labels = example.get("labels")
    reads = is_encoder_decoder(model) and not any(k.startswith("decoder_input") for k in kept)
    return {**kept, "decoder_input_ids": labels.clamp(min=0)} if reads and isinstance(labels, Tensor) else kept


def _two_rows(example: Example) -> Example:
    """An example with two rows where it has one: torch.export takes 1 for a size that is fixed."""
    if any(len(t) != 1 for t in tensors(example) if t.ndim):
        return example
    two: Example = map_tensors(example, lambda t: torch.cat([t, t.roll(1, -1)]) if t.ndim else t)
    return two


def _names_of(model: nn.Module, example: Example) -> dict[str, Any]:
    """An example with the names of forward's arguments."""
    if isinstance(example, Mapping):
        return dict(example)
    given = (example,) if isinstance(example, Tensor) else tuple(example)
    return dict(inspect.signature(model.forward).bind(*given).arguments)


def _outputs(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a model's output, by name; caches are left out."""
    if not isinstance(output, Mapping | Tensor | tuple | list) and hasattr(output, "__dict__"):
        output = vars(output)
    if isinstance(output, Mapping):
        output = {k: v for k, v in output.items() if k != "past_key_values"}
    return _leaves(output, "output")


def _leaves(value: Any, name: str) -> list[tuple[str, Tensor]]:
    """Tensors and their names, in the order of `headprune.inputs.tensors`."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        parts = [(str(k) if name in ("input", "output") else f"{name}_{k}", v) for k, v in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"{name}_{i}", v) for i, v in enumerate(value)]
    else:
        return []
    return [leaf for key, part in parts for leaf in _leaves(part, key)]
