"""The attention weights of every head, for eager and fused attention.

Fused attention never forms its weights, and eager attention mostly does not return them. So a torch function mode takes the result
of each softmax, and computes the weights of `scaled_dot_product_attention` a second time, in blocks of queries if all weights of a
long input might not fit in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.arguments import layers_for
from headprune.attention import AttentionLayer, Layers
from headprune.batches import Rows, find_rows, is_out_of_memory
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, module_of
from headprune.inputs import Example, call, does_not_run, model_device, move, tensors, usable, widened
from headprune.running import exact_attention, quiet, uncompiled, wrapped

_MOST = 2**23  # weights to compute at once

_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(frozen=True)
class Weights:
    """The attention weights of one call of a layer, computed lazily, while the forward pass waits.

    Attributes:
        layer: The layer that was called.
        shape: (examples, heads, queries, keys).
        windows: Number of windows per example; a window's queries see only its keys, and the queries of all windows are concatenated.
        ordered: Whether key j is position j of a sequence for every query; False if keys are relative to their query, as in Longformer.
    """

    layer: AttentionLayer
    shape: tuple[int, int, int, int]
    windows: int
    ordered: bool
    _read: Callable[[slice], Tensor]

    def whole(self) -> Tensor:
        """All weights ``[examples, heads, queries, keys]``, float32 or float64; zeros for a query whose keys are all masked."""
        return self._read(slice(None))

    def blocks(self, most: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """The weights in blocks of about ``most``: (index of the first query, ``[examples, heads, some queries, keys]``)."""
        examples, heads, queries, keys = self.shape
        if self.windows > 1 or not self.ordered:  # each query sees few keys
            yield 0, self.whole()
            return
        step = max(1, (most or _MOST) // max(1, examples * heads * keys))
        for start in range(0, max(queries, 1), step):
            yield start, self._read(slice(start, start + step))

    def visible(self) -> Tensor:
        """Which keys any query attends to, ``[examples, keys]``; no query attends to masked padding."""
        seen = [(block > 0).any(dim=1).any(dim=1) for _, block in self.blocks()]
        return torch.stack(seen).any(dim=0)


Keep = Callable[[Weights], Any]


def attention_weights(
    model: nn.Module, example: Example, layers: Sequence[AttentionLayer] | None = None
) -> dict[str, Tensor]:
    """The attention weights of every head, for any model that headprune traces and any attention kernel.

    The model need not use eager attention. All weights of a layer are in memory at once, so for long inputs name few ``layers``, or
    use `headprune.profile_heads`, which holds only a block of them.

    Args:
        model: It is run once, in evaluation mode.
        example: A dict of tensors, a tensor or a tuple.
        layers: Return only these layers' weights.

    Returns:
        ``{layer_name: [examples, heads, queries, keys]}``, in float32. A query's weights sum to 1; to less if an attention sink takes
        the rest (which is the last key, if the model computes it as a key); and to 0 if all its keys are masked. If a model cuts its
        input into windows, the queries of all windows are concatenated, each with the keys of its window. For a layer that runs
        several times, these are the last run's weights.

    Raises:
        HeadPruneError: The model does not run on the example, or the weights of a layer cannot be seen.
    """
    example = on_device(model, example)
    layers = layers_for(model, layers, example)
    with quiet(model), torch.no_grad():
        rows = rows_of(model, [example])
        runs = collect_by_example(model, layers, example, rows, lambda _, weights: weights.whole().cpu())
    return {layer.name: torch.cat([run[layer.name][-1] for run in runs]) for layer in layers}


def on_device(model: nn.Module, batch: Any) -> Any:
    """A batch on the model's device, as tensors that autograd accepts."""
    with torch.inference_mode(False):
        return usable(move(batch, model_device(model)))


def rows_of(model: nn.Module, batches: Sequence[Example]) -> Rows:
    """The batch dimensions of a model's inputs; see `find_rows`."""
    return find_rows(model, batches, lambda inputs: tensors(call(model, inputs)))


def collect_by_example(
    model: nn.Module, layers: Layers, inputs: Example, rows: Rows, keep: Callable[[Example, Weights], Any]
) -> list[dict[str, list[Any]]]:  # fmt: skip
    """As `collect`, with ``keep(inputs, weights)``: one run for all examples or, if a layer mixes their rows, one run per example."""
    size = rows.size(inputs)
    try:
        return [collect(model, layers, inputs, size, partial(keep, inputs))]
    except RowsError:
        if size == 1:
            raise
        return [collect(model, layers, one, 1, partial(keep, one)) for one in rows.singles(inputs)]


def collect(
    model: nn.Module, layers: Layers, inputs: Example, size: int, keep: Keep, unseen: dict[str, str] | None = None
) -> dict[str, list[Any]]:  # fmt: skip
    """Run the model on ``size`` examples and return what ``keep`` returns for every layer's weights: ``{layer_name: [per call]}``.

    Args:
        unseen: As in `attention_maps`.

    Raises:
        RowsError: A layer mixes the rows of several examples.
        HeadPruneError: The model does not run on the inputs.
    """
    # The logits, often a language model's largest tensor, are not needed.
    named = isinstance(inputs, Mapping) and not {"labels", "logits_to_keep"} & set(inputs)
    short = {"logits_to_keep": 1} if named and "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with attention_maps(model, layers, size, keep, unseen) as kept:
        try:
            call(model, inputs, **short)
        except Exception as error:
            if isinstance(error, HeadPruneError) or is_out_of_memory(error):
                raise
            raise does_not_run(error) from error
    return kept


@contextmanager
def attention_maps(
    model: nn.Module, layers: Layers, examples: int, keep: Keep, unseen: dict[str, str] | None = None
) -> Iterator[dict[str, list[Any]]]:
    """Collect attention weights while the context lasts; run the model inside it. The model is left as it was.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        examples: Batch size of the coming forward pass. It tells which example a row belongs to if a module cuts its input into
            windows or puts heads into the batch dimension.
        keep: Takes a layer's `Weights`, and returns what to keep of them.
        unseen: Receives layer name -> reason for layers whose weights were not seen; without it, that is an error.

    Yields:
        ``{layer_name: [result of keep for each call of the layer]}``, filled as the model runs. The weights of a query whose
        keys are all masked are zeros.

    Raises:
        RowsError: A layer mixes the rows of several examples; run them one at a time.
        HeadPruneError: A layer's weights were not seen.
    """
    collector = _Collector(layers, examples, keep)
    modules = {name: module_of(model, name) for name in collector.layers}
    with uncompiled(), exact_attention(model), wrapped(modules, collector.run), collector:
        yield collector.kept
    for layer in layers:
        if layer.module in collector.unclear or not collector.kept[layer.name]:
            why = collector.unclear.get(layer.module, "its attention weights cannot be seen.")
            hint = f"They must be a softmax over the keys, with a dimension of {layer.num_heads} heads."
            if unseen is None:
                raise HeadPruneError(f"Layer {layer.title}: {why}", hint)
            unseen[layer.name] = f"Layer {layer.title}: {why}"


class _Collector(TorchFunctionMode):
    """Torch function mode that collects attention weights, and assigns them to the innermost running layer.

    Attributes:
        kept: Results of ``keep``, by layer and call.
        layers: The layers of each module, by the number in their name: "attn#2" is the second attention that "attn" computes.
        unclear: Why weights cannot be assigned to layers, by module.
        running: Running modules, innermost last, each with the number of attentions computed in this call so far.
    """

    def __init__(self, layers: Layers, examples: int, keep: Keep) -> None:
        super().__init__()
        self.examples, self.keep = examples, keep
        self.kept: dict[str, list[Any]] = {layer.name: [] for layer in layers}
        self.layers: dict[str, dict[int, AttentionLayer]] = {}
        for layer in layers:
            number = int(layer.name.partition("#")[2] or 1)
            self.layers.setdefault(layer.module, {})[number] = layer
        self.unclear: dict[str, str] = {}
        self.running: list[tuple[str, int]] = []

    def run(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, as `wrapped` does."""
        self.running.append((name, 0))
        try:
            return call(*args, **kwargs)
        finally:
            _, count = self.running.pop()
            if count % max(self.layers[name]):
                self.unclear[name] = f"which of {count} attentions in {name or 'the model'} is its own is not clear."

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.running:
            with torch.no_grad():
                if func is F.scaled_dot_product_attention:
                    key = kwargs["key"] if "key" in kwargs else args[1]
                    self._collect((*out.shape[:-1], key.shape[-2]), lambda rows: _fused_weights(rows, *args, **kwargs))
                elif func in _SOFTMAX and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, out.ndim - 1):
                    self._collect(tuple(out.shape), lambda rows: out[..., rows, :])
        return out

    def _collect(self, shape: tuple[int, ...], read: Callable[[slice], Tensor]) -> None:
        """Keep a softmax result if it is a layer's attention weights; ``read`` returns the rows of some queries."""
        name, count = self.running[-1]
        layers = self.layers[name]
        layer = layers.get(count % max(layers) + 1)
        try:
            weights = _by_head(layer or next(iter(layers.values())), shape, read, self.examples)
        except RowsError:
            if self.examples != 1:
                raise  # the caller then runs the examples one by one
            self.unclear[name] = f"attention weights of shape {shape} cannot be split into heads and windows."
            return
        if weights is None:
            return  # a softmax that is no attention
        self.running[-1] = name, count + 1
        if layer is not None:
            self.kept[layer.name].append(self.keep(weights))


def _by_head(
    layer: AttentionLayer, shape: tuple[int, ...], read: Callable[[slice], Tensor], examples: int
) -> Weights | None:
    """The `Weights` by example and head; None if no dimension holds the heads."""
    heads = layer.num_heads
    first = layer.heads_dim == 0 and len(shape) == 4
    if first:  # (batch * heads, 1, queries, keys), or (heads, batch, queries, keys)
        shape = (shape[0], *shape[2:]) if shape[1] == 1 else (shape[1], shape[0], *shape[2:])
    grouped = len(shape) == 5 and min(shape[1:3]) > 1 and shape[1] * shape[2] == heads
    if grouped:  # key/value groups, and the heads in each
        shape = (shape[0], heads, *shape[3:])
    # (batch, heads, queries, keys); with more dimensions for windows; some sliding windows have the heads after the queries.
    places = [d for d in range(1, len(shape) - 1) if shape[d] == heads and len(shape) > 3]
    dim = layer.heads_dim if layer.heads_dim in places else next(iter(places), 0)
    folded = len(shape) == 3 and shape[0] % heads == 0  # (batch * heads, queries, keys)
    if not folded and not dim:
        return None
    rows, inner = (shape[0] // heads, shape[1:]) if folded else (shape[0], (*shape[1:dim], *shape[dim + 1 :]))
    # (batch * heads, …) or (heads * batch, …)? With one row they are the same, with more it is not known.
    unclear = rows != examples or (folded and rows > 1 < heads)
    if unclear and (examples > 1 or folded):
        what = f"attention weights of shape {shape}"
        raise RowsError(f"Layer {layer.title}: {what} cannot be split into {examples} examples.")
    windowed = unclear  # rows are the windows of one example: their queries are concatenated
    windows = prod(inner[:-2]) * (rows if windowed else 1)

    def arranged(queries: slice) -> Tensor:
        weights = read(queries)
        if first:
            weights = weights.squeeze(1) if folded else weights.transpose(0, 1)
        if grouped:
            weights = weights.flatten(1, 2)
        weights = weights.reshape(-1, heads, *weights.shape[1:]) if folded else weights.movedim(dim, 1)
        weights = weights[None].transpose(1, 2) if windowed else weights
        return widened(weights.flatten(2, -2)).nan_to_num(0.0)

    size = (1 if windowed else rows, heads, windows * inner[-2], inner[-1])
    return Weights(layer, size, windows, folded or dim != len(shape) - 2, arranged)


def _fused_weights(
    rows: slice, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Recompute the weights ``[..., queries, keys]`` of `scaled_dot_product_attention`, as in its documentation.

    Args:
        rows: Which queries.
    """
    places = torch.arange(query.shape[-2], device=query.device)[rows]
    query, key = widened(query[..., rows, :]), widened(key)
    if query.ndim > 3 and key.shape[-3] != query.shape[-3]:  # grouped-query attention
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.arange(key.shape[-2], device=scores.device) <= places[:, None]
    elif attn_mask is not None and attn_mask.ndim > 1 and attn_mask.shape[-2] > 1:
        attn_mask = attn_mask[..., rows, :]
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if masked else scores + attn_mask
    return scores.softmax(dim=-1)
