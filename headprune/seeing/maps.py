"""The attention weights of every head, whichever way a model computes them.

Fused attention never computes its weights, and eager attention mostly does not return them. So they are read where they
are computed: the result of a softmax as it is; those of `scaled_dot_product_attention` are computed a second time, if need be
for some queries at a time: of a long input, all weights together may not fit in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from headprune.batches import Rows, find_rows
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, module_of
from headprune.inputs import Example, call, does_not_run, model_device, move, tensors, usable, widened
from headprune.memory import is_out_of_memory
from headprune.running import exact_attention, quiet, uncompiled

_MOST = 2**23  # weights that are computed at once

_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(frozen=True)
class Weights:
    """The attention weights of one call of a layer, computed when they are read, while the model waits.

    Attributes:
        layer: The layer that was called.
        shape: Examples, heads, queries, keys.
        windows: How many windows each example was cut into; a window's queries see that window's keys only, and the queries of
            all windows stand one behind the other.
        ordered: Whether key j is the j-th of a sequence for every query: not where keys count from their query, as in Longformer.
    """

    layer: AttentionLayer
    shape: tuple[int, int, int, int]
    windows: int
    ordered: bool
    _read: Callable[[slice], Tensor]

    def whole(self) -> Tensor:
        """``[examples, heads, queries, keys]``, float32 or float64; zeros for a query that may look nowhere."""
        return self._read(slice(None))

    def blocks(self, most: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """The same in blocks of about ``most`` weights: the first query, and ``[examples, heads, some queries, keys]``."""
        examples, heads, queries, keys = self.shape
        step = max(1, (most or _MOST) // max(1, examples * heads * keys))
        if self.windows > 1 or not self.ordered:  # each query sees few keys
            step = max(queries, 1)
        for start in range(0, max(queries, 1), step):
            yield start, self._read(slice(start, start + step))

    def visible(self) -> Tensor:
        """Which keys any query looks at, ``[examples, keys]``: those of padding are hidden from all."""
        seen = [(block > 0).any(dim=1).any(dim=1) for _, block in self.blocks()]
        return torch.stack(seen).any(dim=0)


Keep = Callable[[Weights], Any]


def attention_weights(
    model: nn.Module, example: Example, layers: Sequence[AttentionLayer] | None = None
) -> dict[str, Tensor]:
    """The attention weights of every head, of any model that headprune traces, whichever way it computes them.

    The model need not be set to eager attention. All weights of a layer are held, so for long inputs name few ``layers``, or use
    `headprune.profile_heads`, which never holds more than a part of them.

    Args:
        model: It is run once, in evaluation mode.
        example: A dict of tensors, a tensor or a tuple.
        layers: Only these.

    Returns:
        ``{layer_name: [examples, heads, queries, keys]}``, in float32. A row sums to 1; to less where an attention sink takes the
        rest (then it is there as a last key, if the model computes it as one), and to 0 where a query may look nowhere. Where a
        model cuts windows out of its input, the queries of all windows stand one behind the other, each with its window's keys.
        Of a layer that runs several times, the last run's.

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
    """A batch on the model's device, in tensors that autograd accepts."""
    with torch.inference_mode(False):
        return usable(move(batch, model_device(model)))


def rows_of(model: nn.Module, batches: Sequence[Example]) -> Rows:
    """How examples lie in batches of inputs; see `find_rows`."""
    return find_rows(model, batches, lambda inputs: tensors(call(model, inputs)))


def collect_by_example(
    model: nn.Module, layers: Layers, inputs: Example, rows: Rows, keep: Callable[[Example, Weights], Any]
) -> list[dict[str, list[Any]]]:  # fmt: skip
    """What ``keep(inputs, weights)`` returns, as `collect`: of one run of all examples, or of one run each where a layer mixes their rows."""
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
    """What ``keep`` returns for the weights of every layer, call by call, in one run on inputs of ``size`` examples.

    Args:
        unseen: As of `attention_maps`.

    Raises:
        RowsError: A layer mixes the rows of several examples.
        HeadPruneError: The model does not run on them.
    """
    # Nobody reads the logits, which for a language model can be the largest of all tensors.
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
    """Collect attention weights while the context lasts; run the model inside. No hook is left behind.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        examples: How many the model is going to see at once. It decides which example a row belongs to, where a module cuts
            windows out of its input or puts heads into the batch dimension.
        keep: From a layer's weights to what is kept of them.
        unseen: Gets the reason, by layer, where weights were not seen; without it, that is an error.

    Yields:
        ``{layer_name: [what is kept, for each call of the layer]}``, filled as the model runs. A query that may
        look nowhere has zeros.

    Raises:
        RowsError: Several examples whose rows a layer mixes; run them one at a time.
        HeadPruneError: A layer whose weights were not seen.
    """
    collector = _Collector(layers, examples, keep)
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(exact_attention(model))
        for name in collector.layers:
            module = module_of(model, name)
            stack.callback(module.register_forward_pre_hook(partial(collector.enter, name)).remove)
            stack.callback(module.register_forward_hook(collector.leave, always_call=True).remove)
        stack.enter_context(collector)
        yield collector.kept
    for layer in layers:
        if layer.module in collector.unclear or not collector.kept[layer.name]:
            why = collector.unclear.get(layer.module, "its attention weights cannot be seen.")
            hint = f"They must be a softmax over the keys, with a dimension of {layer.num_heads} heads."
            if unseen is None:
                raise HeadPruneError(f"Layer {layer.name}: {why}", hint)
            unseen[layer.name] = f"Layer {layer.name}: {why}"


class _Collector(TorchFunctionMode):
    """Reads attention weights that are computed while a layer's module is the innermost that runs.

    Attributes:
        kept: What ``keep`` returned, by layer and call.
        layers: The layers of each module, by the number in their name: "attn#2" is the second attention that "attn" computes.
        unclear: Why it is not clear which weights are whose, by module.
        running: Modules that run, the innermost last, each with the number of attentions that it has computed in this call.
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

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.running.append((name, 0))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, count = self.running.pop()
        if count % max(self.layers[name]):
            self.unclear[name] = f"which of {count} attentions in {name} is its own is not clear."

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
        """Keep weights of a shape, if they are a layer's; ``read`` returns those of some queries."""
        name, count = self.running[-1]
        layers = self.layers[name]
        layer = layers.get(count % max(layers) + 1)
        try:
            weights = _by_head(layer or next(iter(layers.values())), shape, read, self.examples)
        except RowsError:
            if self.examples != 1:
                raise  # they are then run one by one
            self.unclear[name] = f"attention weights of shape {shape} cannot be split into heads and windows."
            return
        if weights is None:
            return  # a softmax over something else
        self.running[-1] = name, count + 1
        if layer is not None:
            self.kept[layer.name].append(self.keep(weights))


def _by_head(
    layer: AttentionLayer, shape: tuple[int, ...], read: Callable[[slice], Tensor], examples: int
) -> Weights | None:
    """The weights by example and head; None where no dimension is that of the heads."""
    heads = layer.num_heads
    # (batch, heads, queries, keys); more dimensions for windows, heads behind the queries for some sliding ones.
    dim = next((d for d in range(1, len(shape) - 1) if shape[d] == heads), 0) if len(shape) > 3 else 0
    folded = len(shape) == 3 and shape[0] % heads == 0  # (batch * heads, queries, keys)
    if not folded and not dim:
        return None
    rows, inner = (shape[0] // heads, shape[1:]) if folded else (shape[0], (*shape[1:dim], *shape[dim + 1 :]))
    # (batch * heads, …) or (heads * batch, …)? With one row it is both, with more it is not known.
    unclear = rows != examples or (folded and rows > 1 < heads)
    if unclear and (examples > 1 or folded):
        what = f"attention weights of shape {shape}"
        raise RowsError(f"Layer {layer.name}: {what} cannot be split into {examples} examples.")
    windowed = unclear  # the windows of one example, whose queries are all of theirs
    windows = prod(inner[:-2]) * (rows if windowed else 1)

    def arranged(queries: slice) -> Tensor:
        weights = read(queries)
        weights = weights.reshape(-1, heads, *weights.shape[1:]) if folded else weights.movedim(dim, 1)
        weights = weights[None].transpose(1, 2) if windowed else weights
        return widened(weights.flatten(2, -2)).nan_to_num(0.0)

    size = (1 if windowed else rows, heads, windows * inner[-2], inner[-1])
    return Weights(layer, size, windows, folded or dim != len(shape) - 2, arranged)


def _fused_weights(
    rows: slice, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The weights ``[..., queries, keys]`` that `scaled_dot_product_attention` uses, as its documentation computes them.

    Args:
        rows: The queries.
    """
    places = torch.arange(query.shape[-2], device=query.device)[rows]
    query, key = widened(query[..., rows, :]), widened(key)
    if query.ndim > 3 and key.shape[-3] != query.shape[-3]:  # each key/value head serves several
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
