"""The attention weights of every head, whichever way a model computes them.

Fused attention never computes its weights, and eager attention mostly does not return them. So they are read where they
are computed: the result of a softmax as it is; those of `scaled_dot_product_attention` are computed a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, module_of
from headprune.inputs import widened
from headprune.modules import exact_attention, uncompiled

Keep = Callable[[AttentionLayer, Tensor], Tensor]

_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, Tensor.softmax}


@contextmanager
def attention_maps(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    examples: int | None = None,
    keep: Keep = lambda layer, weights: weights,
) -> Iterator[dict[str, list[Tensor]]]:
    """Collect attention weights while the context lasts; run the model inside. No hook is left behind.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        examples: How many the model is going to see at once. It tells which example a row belongs to, where a module cuts
            windows out of its input or puts heads into the batch dimension; without it, rows are not reordered, and
            (batch * heads, queries, keys) is taken to have the batch first.
        keep: From a layer and its weights ``[examples, heads, queries, keys]`` (float32, or float64) to what is kept of
            them, to save memory.

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
        self.kept: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
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
                    self._note(_fused(*args, **kwargs))
                elif func in _SOFTMAX and kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, out.ndim - 1):
                    self._note(out)
        return out

    def _note(self, weights: Tensor) -> None:
        layers, seen = self.sharing[self.running[-1]], self.seen[-1]
        layer = layers.get(seen % max(layers) + 1)
        weights_by_head = self._by_head(layer or next(iter(layers.values())), weights)
        if weights_by_head is None:
            return  # a softmax over something else
        self.seen[-1] += 1
        if layer is not None:
            self.kept[layer.name].append(self.keep(layer, widened(weights_by_head).nan_to_num(0.0)))

    def _by_head(self, layer: AttentionLayer, weights: Tensor) -> Tensor | None:
        """``[examples, heads, queries, keys]``; None where no dimension is that of the heads."""
        heads, examples, shape = layer.num_heads, self.examples, weights.shape
        folded = weights.ndim == 3 and shape[0] % heads == 0
        # (batch, heads, queries, keys); more dimensions for windows, heads behind the queries for some sliding ones.
        dim = next((d for d in range(1, weights.ndim - 1) if shape[d] == heads), 0) if weights.ndim > 3 else 0
        if not folded and not dim:
            return None
        weights = weights.reshape(-1, heads, *shape[1:]) if folded else weights.movedim(dim, 1)
        rows = len(weights)
        # (batch * heads, …) or (heads * batch, …)? With one row it is both, with more it is not known.
        if examples is not None and (rows != examples or (folded and rows > 1 < heads)):
            if examples > 1 or folded:
                raise RowsError(
                    f"Layer {layer.name}: attention weights of shape {tuple(shape)} cannot be told apart as {examples} examples."
                )
            weights = weights[None].transpose(1, 2)  # the windows of one example, whose queries are all of theirs
        return weights.flatten(2, -2)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The weights ``[..., queries, keys]`` that `scaled_dot_product_attention` uses, as its documentation computes them."""
    query, key = widened(query), widened(key)
    if query.ndim > 3 and key.shape[-3] != query.shape[-3]:  # each key/value head serves several
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if masked else scores + attn_mask
    return scores.softmax(dim=-1)
