"""The attention weights of every head, whichever way a model computes them.

Fused attention never computes its weights, and eager attention mostly does not return them. So they are read where they
are computed: the result of a softmax as it is; those of `scaled_dot_product_attention` are computed a second time, if need be
for some queries at a time: of a long input, all weights together may not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, module_of
from headprune.inputs import widened
from headprune.running import exact_attention, uncompiled

_MOST = 2**23  # weights that are computed at once

_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}


@dataclass(frozen=True)
class Weights:
    """One computation of attention weights: they are made when they are read, while the model waits.

    Attributes:
        layer: Whose they are.
        shape: Examples, heads, queries, keys.
        windows: How many windows each example was cut into; a window's queries see that window's keys alone, and the queries of
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
        """The same in parts of about ``most`` weights: the first query, and ``[examples, heads, some queries, keys]``."""
        examples, heads, queries, keys = self.shape
        step = max(1, (most or _MOST) // max(1, examples * heads * keys))
        if self.windows > 1 or not self.ordered:  # each query sees few keys
            step = max(queries, 1)
        for start in range(0, max(queries, 1), step):
            yield start, self._read(slice(start, start + step))


Keep = Callable[[Weights], Any]


@contextmanager
def attention_maps(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    examples: int | None = None,
    keep: Keep = Weights.whole,
) -> Iterator[dict[str, list[Any]]]:
    """Collect attention weights while the context lasts; run the model inside. No hook is left behind.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        examples: How many the model is going to see at once. It tells which example a row belongs to, where a module cuts
            windows out of its input or puts heads into the batch dimension; without it, rows are not reordered, and
            (batch * heads, queries, keys) is taken to have the batch first.
        keep: From a layer's weights to what is kept of them: by default all of them, ``[examples, heads, queries, keys]``.

    Yields:
        ``{layer_name: [what is kept, for each time the layer was called]}``, filled as the model runs. A query that may
        look nowhere has zeros.

    Raises:
        RowsError: Several examples whose rows cannot be told apart; run them one at a time.
        HeadPruneError: A layer whose weights were not seen.
    """
    watcher = _Watcher(layers, examples, keep)
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(exact_attention(model))
        for name in watcher.sharing:
            module = module_of(model, name)
            stack.callback(module.register_forward_pre_hook(watcher.entering(name)).remove)
            stack.callback(module.register_forward_hook(watcher.leave, always_call=True).remove)
        stack.enter_context(watcher)
        yield watcher.kept
    for layer in layers:
        if not watcher.kept[layer.name]:
            raise HeadPruneError(
                f"Layer {layer.name}: its attention weights cannot be seen.",
                f"They must be a softmax over the keys, with a dimension of {layer.num_heads} heads.",
            )


class _Watcher(TorchFunctionMode):
    """Reads attention weights that are computed while a layer's module is the innermost that runs."""

    def __init__(self, layers: Sequence[AttentionLayer], examples: int | None, keep: Keep) -> None:
        super().__init__()
        self.examples, self.keep = examples, keep
        self.kept: dict[str, list[Any]] = {layer.name: [] for layer in layers}
        self.sharing: dict[str, dict[int, AttentionLayer]] = {}  # module -> its layers, by the number in their name
        for layer in layers:
            number = int(layer.name.partition("#")[2] or 1)
            self.sharing.setdefault(layer.module, {})[number] = layer
        self.running: list[str] = []
        self.seen: list[int] = []  # attentions that each running module has computed in this call

    def entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self.running.append(name)
            self.seen.append(0)

        return enter

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, seen = self.running.pop(), self.seen.pop()
        if seen % max(self.sharing[name]):
            last = self.sharing[name][max(self.sharing[name])]
            raise HeadPruneError(f"Layer {last.name}: which of {seen} attentions in {name} is its own cannot be told.")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.running:
            with torch.no_grad():
                if func is F.scaled_dot_product_attention:
                    self._note(_fused_shape(*args, **kwargs), lambda rows: _fused(rows, *args, **kwargs))
                elif func in _SOFTMAX and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, out.ndim - 1):
                    self._note(tuple(out.shape), lambda rows: out[..., rows, :])
        return out

    def _note(self, shape: tuple[int, ...], read: Callable[[slice], Tensor]) -> None:
        """Keep weights of a shape, if they are a layer's; ``read`` gives those of some queries."""
        layers, seen = self.sharing[self.running[-1]], self.seen[-1]
        layer = layers.get(seen % max(layers) + 1)
        weights = self._by_head(layer or next(iter(layers.values())), shape, read)
        if weights is None:
            return  # a softmax over something else
        self.seen[-1] += 1
        if layer is not None:
            self.kept[layer.name].append(self.keep(weights))

    def _by_head(
        self, layer: AttentionLayer, shape: tuple[int, ...], read: Callable[[slice], Tensor]
    ) -> Weights | None:
        """The weights by example and head; None where no dimension is that of the heads."""
        heads, examples = layer.num_heads, self.examples
        folded = len(shape) == 3 and shape[0] % heads == 0
        # (batch, heads, queries, keys); more dimensions for windows, heads behind the queries for some sliding ones.
        dim = next((d for d in range(1, len(shape) - 1) if shape[d] == heads), 0) if len(shape) > 3 else 0
        if not folded and not dim:
            return None
        rows = shape[0] // heads if folded else shape[0]
        windowed = False
        # (batch * heads, …) or (heads * batch, …)? With one row it is both, with more it is not known.
        if examples is not None and (rows != examples or (folded and rows > 1 < heads)):
            if examples > 1 or folded:
                raise RowsError(
                    f"Layer {layer.name}: attention weights of shape {shape} cannot be told apart as {examples} examples."
                )
            windowed = True  # the windows of one example, whose queries are all of theirs
        places = (
            (rows, heads, *shape[1:]) if folded else (rows, heads, *(n for d, n in enumerate(shape[1:], 1) if d != dim))
        )
        windows = prod(places[2:-2]) * (rows if windowed else 1)

        def arranged(some: slice) -> Tensor:
            weights = read(some)
            weights = weights.reshape(-1, heads, *weights.shape[1:]) if folded else weights.movedim(dim, 1)
            weights = weights[None].transpose(1, 2) if windowed else weights
            return widened(weights.flatten(2, -2)).nan_to_num(0.0)

        ordered = folded or dim != len(shape) - 2
        return Weights(
            layer, (1 if windowed else rows, heads, windows * places[-2], places[-1]), windows, ordered, arranged
        )


def _fused(
    rows: slice, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The weights ``[..., queries, keys]`` that `scaled_dot_product_attention` uses, as its documentation computes them.

    Args:
        rows: Of which queries.
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


def _fused_shape(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """The shape of these weights."""
    return (*query.shape[:-1], key.shape[-2])
