"""A model as a graph: traced by `torch.export`, with the sizes left free that the model leaves free."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.errors import HeadPruneError, first_line
from headprune.forms import guesses, made, remembered
from headprune.inputs import LABELS, Example, call, is_encoder_decoder, map_tensors, seeded, tensors, writes
from headprune.running import attributes_kept, evaluating, uncompiled

BATCH, LENGTH = "batch", "length"


@dataclass(frozen=True)
class Graph:
    """A traced model.

    Attributes:
        program: A `torch.export.ExportedProgram` from the inputs, in order, to the outputs.
        inputs, outputs: Their names: arguments of the model's ``forward``, fields of its output.
        example: The inputs that it was traced with.
        dims: Of every input, each dimension: a number, or an expression (of sympy) in the free sizes.
        names: What the free sizes are called in a file, by the tracer's names.
    """

    program: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    example: tuple[Tensor, ...]
    dims: tuple[tuple[Any, ...], ...]
    names: dict[str, str]

    def named(self, expression: Any) -> str:
        """A size as it is called in a file."""
        return re.sub(r"\b[su]\d+\b", lambda found: self.names.get(found[0], found[0]), str(expression))

    @property
    def shapes(self) -> dict[str, list[int | str]]:
        """Every input's shape; free sizes by their names."""
        return {
            name: [d if isinstance(d, int) else self.named(d) for d in dims]
            for name, dims in zip(self.inputs, self.dims, strict=True)
        }


class Call(nn.Module):
    """A model as a function from tensors to tensors, both in a fixed order."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model = model
        self.example = example
        self.inputs = tuple(name for name, _ in _leaves(_by_name(model, example), "input"))
        with torch.no_grad():
            found = _outputs(call(model, example))
        self.outputs = tuple(f"{name}_out" if name in self.inputs else name for name, _ in found)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        left = iter(given)
        example = map_tensors(self.example, lambda _: next(left))
        return tuple(t for _, t in _outputs(call(self.model, example)))

    def answers(self, given: Sequence[Tensor]) -> list[Tensor]:
        """What the model answers, with the same random numbers each time."""
        with torch.no_grad(), seeded(self.model, 0):
            return [t.detach() for t in self(*given)]


def callable_of(model: nn.Module, processor: Any = None) -> Call:
    """A model with inputs that it takes: of the form that it was pruned with, or that its config names.

    Args:
        processor: Its tokenizer: what that gives beside, such as token types, is an input too where the form is not known.

    Raises:
        HeadPruneError: It is not known what it takes.
    """
    reason = ""
    for example in _examples(model, processor):
        try:
            return Call(model, example)
        except Exception as error:  # a model may refuse an input with any error
            reason = reason or f" It did not run on a made-up input ({type(error).__name__}: {first_line(error)})."
    raise HeadPruneError(
        f"It is not known what {type(model).__name__} takes.{reason}",
        "Export a model that headprune has pruned or saved with an example: it remembers what that looked like.",
    )


def graphs(function: Call) -> Iterator[Graph]:
    """The model traced with as many free sizes as it can be, then with fewer: for the first that works.

    Raises:
        HeadPruneError: `torch.export` does not take the model, whatever is fixed.
    """
    example = tuple(tensors(function.example))
    free = [_axes(example, lengths=True), _axes(example, lengths=False), tuple({} for _ in example)]
    failed, some = None, False
    for axes in {repr(a): a for a in free}.values():
        try:
            graph = _traced(function, example, axes)
        except Exception as error:
            failed = failed or error
            continue
        some = True
        yield graph
    if not some:
        assert failed is not None
        raise HeadPruneError(
            f"torch.export does not take {type(function.model).__name__}: {type(failed).__name__}: {first_line(failed)}",
            "Try the dense model: where that fails too, PyTorch's exporter does not know something that it does.",
        ) from failed


@contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Whatever a trace needs of a model: no cache, no fused kernels, experts of which all shapes are known; and silence."""
    configs = [v for m in model.modules() for v in vars(m).values() if getattr(v, "use_cache", None) is True]
    chosen: Any = model
    experts = chosen.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None
    fast, fused = torch.backends.mha.get_fastpath_enabled(), F.scaled_dot_product_attention
    loggers = [
        logging.getLogger(name)
        for name in ("torch", "torch.__trace", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for config in configs:
            config.use_cache = False
        if experts is not None:
            chosen.set_experts_implementation("batched_mm")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        F.scaled_dot_product_attention = _attend  # type: ignore[assignment]
        with (
            warnings.catch_warnings(), evaluating(model), attributes_kept(model), uncompiled(), torch.no_grad(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            yield
    finally:
        if experts is not None:
            chosen.set_experts_implementation(experts)
        F.scaled_dot_product_attention = fused
        torch.backends.mha.set_fastpath_enabled(fast)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for config in configs:
            config.use_cache = True


def _traced(function: Call, example: tuple[Tensor, ...], axes: tuple[dict[int, Any], ...]) -> Graph:
    with plainly(function.model), _PlainAttention():
        program = torch.export.export(function, example, dynamic_shapes=(axes,))
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"][-len(example) :]
    dims = tuple(tuple(_size(d) for d in value.shape) for value in inputs)
    names: dict[str, str] = {}
    for name, own in zip(function.inputs, dims, strict=True):
        for d, size in enumerate(own):
            for symbol in getattr(size, "free_symbols", ()):
                taken = set(names.values())
                plain = BATCH if d == 0 else LENGTH if LENGTH not in taken else f"{name}_{LENGTH if d == 1 else d}"
                names.setdefault(str(symbol), plain)
    return Graph(program, function.inputs, function.outputs, example, dims, names)


def _size(d: Any) -> Any:
    """A number, or an expression."""
    expression = d if isinstance(d, int) else d.node.expr
    return expression if getattr(expression, "free_symbols", None) else int(expression)


def _axes(example: Sequence[Tensor], *, lengths: bool) -> tuple[dict[int, Any], ...]:
    """The dimensions that may be free: rows, and lengths where asked. torch.export fixes those that the model fixes."""
    auto = torch.export.Dim.AUTO
    return tuple({d: auto for d in range(t.ndim) if not d or (lengths and t.ndim < 4)} for t in example)


def _examples(model: nn.Module, processor: Any) -> Iterator[Example]:
    known = [made(form) for form in remembered(model)]
    guessed = [made(form) for form in guesses(model)]
    for example in (
        *known,
        *(with_more for each in guessed if (with_more := _tokenized(model, processor, each))),
        *guessed,
    ):
        if isinstance(example, Mapping):
            example = _unlabelled(model, example)
            own = inspect.signature(model.forward).parameters
            if "input_ids" in example and "attention_mask" in own and "attention_mask" not in example:
                yield _rows({**example, "attention_mask": torch.ones_like(example["input_ids"])})
        yield _rows(example)
        yield example


def _tokenized(model: nn.Module, processor: Any, example: Example) -> Example | None:
    """A text with what its tokenizer gives and the model takes beside the guessed; None if there is no more.

    A service passes on what the tokenizer gives. Without token types, pairs of texts would get other answers. Models that write text are
    called without.
    """
    if not callable(processor) or not isinstance(example, Mapping) or "input_ids" not in example or writes(model):
        return None
    try:
        given = set(processor("a"))
    except Exception:  # an image processor, or one that takes texts in another form
        return None
    more = [name for name in inspect.signature(model.forward).parameters if name in given - {*example, *LABELS}]
    return {**example, **{name: torch.zeros_like(example["input_ids"]) for name in more}} if more else None


def _unlabelled(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """Without labels; where a decoder reads its tokens off them, with these tokens."""
    kept = {k: v for k, v in example.items() if k not in LABELS}
    labels = example.get("labels")
    if (
        is_encoder_decoder(model)
        and isinstance(labels, Tensor)
        and not any(k.startswith("decoder_input") for k in kept)
    ):
        kept["decoder_input_ids"] = labels.clamp(min=0)
    return kept


def _rows(example: Example) -> Example:
    """With two rows where there is one: torch.export takes 1 for a size that is fixed."""
    found = [t for t in tensors(example) if t.ndim]
    if any(len(t) != 1 for t in found):
        return example
    two: Example = map_tensors(example, lambda t: torch.cat([t, t.roll(1, -1)]) if t.ndim else t)
    return two


def _by_name(model: nn.Module, example: Example) -> dict[str, Any]:
    """An example with the names of forward's arguments."""
    if isinstance(example, Mapping):
        return dict(example)
    given = (example,) if isinstance(example, Tensor) else tuple(example)
    try:
        bound = inspect.signature(model.forward).bind(*given).arguments
    except TypeError:
        return {f"input_{i}": value for i, value in enumerate(given)}
    return dict(bound)


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


class _PlainAttention(TorchFunctionMode):
    """`_attend` for code that holds the fused function under another name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = func is torch._C._nn.scaled_dot_product_attention
        return (_attend if fused else func)(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` in plain operations.

    The strides of the fused kernels' results are others than those of what the exporter puts in their place, and it fails
    on this where sizes are free.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype == torch.bool:
        blind = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    else:
        blind = attn_mask.amax(-1, keepdim=True) == float("-inf")
        scores = scores + attn_mask
    return (scores.softmax(-1) @ value).masked_fill(blind, 0.0)  # as PyTorch: a token that sees none gets zeros
