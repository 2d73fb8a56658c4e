"""The masking hook: a real factor on every head's output, at the input of W_O.

A gate of 1 changes nothing, a gate of 0 removes the head exactly (W_O's bias stays), and the
derivative of a loss with respect to a gate is what gradient scores are made of. Gates live in
hooks, so fused attention kernels stay in use and the model's weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headprune.arguments import Plan, heads_of, layers_for
from headprune.attention import AttentionLayer, HeadGate, check_heads
from headprune.errors import HeadPruneError
from headprune.inputs import Example
from headprune.modules import exact_attention, uncompiled

Fill = Callable[[Tensor, int], Tensor]
"""What a closed gate lets through in the head's place: from W_O's input (features last), and how many gate vectors came for
it (0: one for all its rows), to a tensor of its shape."""


class RowsError(HeadPruneError):
    """W_O sees rows that are not the batch's, so there cannot be one gate per example."""


@contextmanager
def gated(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    gates: Mapping[str, Tensor],
    fill: Mapping[str, Fill] | None = None,
) -> Iterator[None]:
    """Multiply heads' outputs by gates while the context lasts. No hook is left behind.

    Args:
        model: The model that ``layers`` describe.
        layers: From `headprune.find_attention`.
        gates: ``{layer_name: gates}``, each ``[num_heads]``, or ``[batch, num_heads]`` for one
            gate per example. Layers that are not named pass unchanged.
        fill: What comes in a head's place, times (1 - gate): ``{layer_name: fill}``; nothing, where not given.

    Raises:
        HeadPruneError: A layer whose heads cannot be told apart at W_O's input.
    """
    by_name = {layer.name: layer for layer in layers}
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(exact_attention(model))
        for name, gate in gates.items():
            layer = by_name[name]
            place = layer.gate or layer.output_projection
            if place is None:
                raise HeadPruneError(f"Layer {name} cannot be masked: {layer.reason}.")
            try:
                module, hook = model.get_submodule(place.module), _Gate(layer, gate, (fill or {}).get(name))
            except AttributeError:
                raise HeadPruneError(
                    f"This model has no module {place.module}: the layers were traced on another model, or it was pruned since.",
                    "Call find_attention again.",
                ) from None
            if layer.concatenates:
                stack.callback(module.register_forward_hook(hook.on_output).remove)
            else:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def mask(
    model: nn.Module,
    plan: Plan,
    example: Example | None = None,
    *,
    layers: Sequence[AttentionLayer] | None = None,
) -> Iterator[None]:
    """Heads that give nothing while the context lasts.

    Args:
        model: Any model with attention.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to switch off.
        example: A batch to trace the model with, without labels; not needed if ``layers`` are given, nor where an input can
            be made up, as for transformers models.
        layers: From `headprune.find_attention`, to save the trace.

    Raises:
        HeadPruneError: An unknown layer or head, or a layer that cannot be masked.
    """
    layers = layers_for(model, layers, example)
    with gated(model, layers, zero_gates(check_heads(heads_of(plan), layers), layers)):
        yield


def zero_gates(heads: Mapping[str, Sequence[int]], layers: Sequence[AttentionLayer]) -> dict[str, Tensor]:
    """Gates ``[num_heads]`` that are 0 at the listed heads and 1 elsewhere."""
    by_name = {layer.name: layer for layer in layers}
    gates = {}
    for name, indices in heads.items():
        gate = torch.ones(by_name[name].num_heads)
        gate[list(indices)] = 0.0
        gates[name] = gate
    return gates


class _Gate:
    """Forward pre-hook on W_O; without a W_O, forward hook on the attention module."""

    def __init__(self, layer: AttentionLayer, gate: Tensor, fill: Fill | None = None) -> None:
        place = layer.gate or layer.output_projection
        assert place is not None
        self.name = layer.name
        self.gate = gate
        self.fill = fill
        self.features = place.features
        self.dim = place.dim if isinstance(place, HeadGate) else -1
        self.owner: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._gated(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self._gated(kwargs[name])}

    def on_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The gated output of a module that returns its heads side by side."""
        return (self._gated(output[0]), *output[1:]) if isinstance(output, tuple) else self._gated(output)

    def _gated(self, hidden: Tensor) -> Tensor:
        return self._scaled(hidden.movedim(self.dim, -1)).movedim(-1, self.dim)

    def _scaled(self, hidden: Tensor) -> Tensor:
        """``hidden``, which has the heads' features last, times their gates; in float32, where hidden is in half precision.

        So a gate is not rounded, and neither is what a gate's derivative sums over tokens and features. A gate of 1
        leaves ``hidden`` as it is, to the bit.
        """
        gate = self.gate.to(hidden.device, torch.promote_types(hidden.dtype, torch.float32))
        gate = torch.cat([gate, gate.new_ones(*gate.shape[:-1], 1)], dim=-1)
        factor = gate[..., self._owner_of(hidden)]  # [features] or [batch, features]
        if gate.ndim == 1:
            return self._mixed(hidden, factor)
        if hidden.shape[0] != gate.shape[0]:
            # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
            if hidden.shape[0] % gate.shape[0]:
                raise RowsError(
                    f"Layer {self.name}: {hidden.shape[0]} rows cannot be told apart as {gate.shape[0]} examples."
                )
            factor = factor.repeat_interleave(hidden.shape[0] // gate.shape[0], dim=0)
        return self._mixed(hidden, factor.view(-1, *[1] * (hidden.ndim - 2), hidden.shape[-1]))

    def _mixed(self, hidden: Tensor, factor: Tensor) -> Tensor:
        mixed = hidden.to(factor.dtype) * factor
        if self.fill is not None:
            fill = self.fill(hidden.to(factor.dtype), len(self.gate) if self.gate.ndim > 1 else 0)
            mixed = mixed + fill * (1 - factor)
        return mixed.to(hidden.dtype)

    def _owner_of(self, hidden: Tensor) -> Tensor:
        """The head of each input feature of W_O; features of no head get the constant 1 behind the gates."""
        if self.owner is None or self.owner.device != hidden.device:
            if max(map(max, self.features)) >= hidden.shape[-1]:
                raise HeadPruneError(
                    f"Layer {self.name} is not as it was traced: its output projection has only {hidden.shape[-1]} inputs.",
                    "The model was pruned since; call find_attention again.",
                )
            owner = torch.full((hidden.shape[-1],), len(self.features), dtype=torch.long)
            for head, columns in enumerate(self.features):
                owner[list(columns)] = head
            self.owner = owner.to(hidden.device)
        return self.owner
