"""The masking hook: a real factor on every head's output, at the input of W_O.

A gate of 1 changes nothing, a gate of 0 removes the head exactly (W_O's bias stays), and the
derivative of a loss with respect to a gate is what gradient scores are made of. Gates live in
hooks, so fused attention kernels stay in use and the model's weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadFeatures, Layers, check_heads
from headprune.errors import HeadPruneError
from headprune.running import exact_attention, uncompiled

Fill = Callable[[Tensor, int], Tensor]
"""What takes the place of a head whose gate is 0. Arguments: W_O's input, with the features last, and how many gate vectors
there are for its rows (0: one for all of them). Returns a tensor with the shape of the input."""


class RowsError(HeadPruneError):
    """W_O sees rows that are not the batch's, so there cannot be one gate per example."""


@contextmanager
def gated(
    model: nn.Module, layers: Layers, gates: Mapping[str, Tensor], fill: Mapping[str, Fill] | None = None
) -> Iterator[None]:
    """Multiply heads' outputs by gates while the context lasts. No hook is left behind.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        gates: ``{layer_name: gates}``, each ``[num_heads]``, or ``[batch, num_heads]`` for one
            gate per example. Layers that are not named pass unchanged.
        fill: What is added in a head's place, times (1 - gate): ``{layer_name: fill}``. Nothing by default.

    Raises:
        HeadPruneError: A layer whose heads cannot be told apart at W_O's input, or that this model does not have.
    """
    by_name = {layer.name: layer for layer in layers}
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(exact_attention(model))
        for name, gate in gates.items():
            layer = by_name[name]
            if layer.mask_point is None:
                raise HeadPruneError(f"Layer {layer.title} cannot be masked: {layer.reason}.")
            change = _scaling(layer, layer.mask_point, gate, (fill or {}).get(name))
            stack.callback(hook_heads(model, layer, layer.mask_point.module, change))
        yield


def mask(model: nn.Module, heads: Mapping[str, Sequence[int]], *, layers: Layers) -> AbstractContextManager[None]:
    """Gates of 0 for ``{layer_name: [head, ...]}`` while the context lasts. `headprune.mask` traces the model first.

    Raises:
        HeadPruneError: An unknown layer or head, or a layer that cannot be masked.
    """
    return gated(model, layers, zero_gates(check_heads(heads, layers), layers))


def zero_gates(heads: Mapping[str, Sequence[int]], layers: Layers) -> dict[str, Tensor]:
    """Gates ``[num_heads]`` that are 0 at the listed heads and 1 elsewhere."""
    counts = {layer.name: layer.num_heads for layer in layers}
    return {
        name: torch.ones(counts[name]).index_fill(0, torch.tensor(indices, dtype=torch.long), 0.0)
        for name, indices in heads.items()
    }


def hook_heads(
    model: nn.Module, layer: AttentionLayer, name: str, change: Callable[[Tensor], Tensor | None]
) -> Callable[[], None]:
    """Call a function with the heads' output whenever a layer runs: the input of a module, mostly of W_O.

    Args:
        model: The model that ``layer`` describes.
        layer: If it returns its heads side by side, without a W_O, the function gets the module's output instead.
        name: The module.
        change: Maps the hidden state to its replacement; None leaves it as it is.

    Returns:
        A function that removes the hook.

    Raises:
        HeadPruneError: The model has no such module.
    """

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            changed = change(args[0])
            return None if changed is None else ((changed, *args[1:]), kwargs)
        key = next(iter(kwargs))
        changed = change(kwargs[key])
        return None if changed is None else (args, {**kwargs, key: changed})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return change(output)
        changed = change(output[0])
        return None if changed is None else (changed, *output[1:])

    module = module_of(model, name)
    if layer.concatenates:
        return module.register_forward_hook(after).remove
    return module.register_forward_pre_hook(before, with_kwargs=True).remove


def module_of(model: nn.Module, name: str) -> nn.Module:
    """The module of a model that a traced layer names.

    Raises:
        HeadPruneError: There is none.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        message = f"This model has no module {name}: the layers were traced on another model, or it was pruned since."
        raise HeadPruneError(message, "Call find_attention again.") from None


def check_width(layer: AttentionLayer, place: HeadFeatures, width: int) -> None:
    """Refuse a layer whose W_O (or gate) has fewer inputs than when it was traced.

    Raises:
        HeadPruneError: It has.
    """
    if max(map(max, place.features)) >= width:
        message = f"Layer {layer.title} is not as it was traced: W_O has only {width} inputs."
        raise HeadPruneError(message, "The model was pruned since; call find_attention again.")


def _scaling(
    layer: AttentionLayer, place: HeadFeatures, gates: Tensor, fill: Fill | None
) -> Callable[[Tensor], Tensor]:
    """A function that multiplies the heads' output of one layer by gates, ``[num_heads]`` or ``[batch, num_heads]``."""

    @cache
    def owners(width: int, device: torch.device) -> Tensor:
        """The head of each input feature of W_O. Features of no head get the constant gate 1 after the heads' gates."""
        check_width(layer, place, width)
        owner = torch.full((width,), len(place.features), dtype=torch.long)
        for head, columns in enumerate(place.features):
            owner[list(columns)] = head
        return owner.to(device)

    def scaled(hidden: Tensor) -> Tensor:
        """``hidden`` with the heads' features times their gates.

        Half precision is computed in float32: then a gate is not rounded, and neither is its derivative, a sum over tokens
        and features. A gate of 1 leaves ``hidden`` exactly as it is.
        """
        hidden = hidden.movedim(place.dim, -1)
        gate = gates.to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))
        gate = torch.cat([gate, gate.new_ones(*gate.shape[:-1], 1)], dim=-1)
        factor = gate[..., owners(hidden.shape[-1], hidden.device)]  # [features] or [batch, features]
        if gate.ndim > 1:
            rows, examples = hidden.shape[0], gate.shape[0]
            if rows % examples:
                raise RowsError(f"Layer {layer.title}: {rows} rows cannot be told apart as {examples} examples.")
            if rows != examples:  # tokens or windows of every example: rows of one example stay together
                factor = factor.repeat_interleave(rows // examples, dim=0)
            factor = factor.view(-1, *[1] * (hidden.ndim - 2), hidden.shape[-1])
        result = hidden.to(factor.dtype) * factor
        if fill is not None:
            result = result + fill(hidden.to(factor.dtype), len(gate) if gate.ndim > 1 else 0) * (1 - factor)
        return result.to(hidden.dtype).movedim(-1, place.dim)

    return scaled
