"""What a pruned module carries along: hooks that take the kept heads' part of what is made for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import HeadArgument, HeadFeatures
from headprune.surgery.features import Features, surviving


@dataclass(frozen=True)
class HeadArguments:
    """Which entries of its arguments a pruned attention module takes."""

    arguments: tuple[HeadArgument, ...]
    num_heads: int
    kept: list[int]

    def take(self, value: Any, argument: HeadArgument) -> Any:
        if argument.features and isinstance(value, Tensor):
            features = surviving(HeadFeatures("", argument.features), self.kept)
            return value.index_select(argument.dim, features.index(value.shape[argument.dim], value.device))
        if not isinstance(value, Tensor) or value.ndim <= argument.dim or value.shape[argument.dim] % self.num_heads:
            return value
        if argument.folded:  # (batch * heads, …)
            return value.reshape(-1, self.num_heads, *value.shape[1:])[:, self.kept].flatten(0, 1)
        return value.index_select(argument.dim, torch.tensor(self.kept, device=value.device))


def take_own_arguments(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of arguments that hold something for every head."""
    own: HeadArguments = attention.__dict__["_headprune_arguments"]
    positional = list(args)
    for argument in own.arguments:
        if isinstance(argument.key, int):
            if argument.key < len(positional):
                positional[argument.key] = own.take(positional[argument.key], argument)
        elif argument.key in kwargs:
            kwargs = {**kwargs, argument.key: own.take(kwargs[argument.key], argument)}
    return tuple(positional), kwargs


class Selection:
    """Which features of a module's output pass on."""

    def __init__(self, features: Features, earlier: Selection | None) -> None:
        self.features, self.earlier = features, earlier

    def take(self, output: Tensor) -> Tensor:
        if self.earlier is not None:  # indices of a second prune count within what the first one kept
            output = self.earlier.take(output)
        return output.index_select(-1, self.features.index(output.shape[-1], output.device))


def selected(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: the kept heads' features of what a module computes for all."""
    selection: Selection = module.__dict__["_headprune_selection"]
    return selection.take(output)


class Placement:
    """Where the heads that are left belong among the features that a module without W_O returned."""

    def __init__(self, part: HeadFeatures, stay: list[int], kept: list[int], earlier: Placement | None) -> None:
        features = [f for h in stay for f in part.features[h]]
        computed = sorted(f for h in kept for f in part.features[h])
        # What a second prune traced was placed already, at the same features.
        self.width: int = sum(map(len, part.features)) if earlier is None else earlier.width
        self.source = [computed.index(f) for f in sorted(features)]
        self.target = sorted(features)

    def place(self, output: Tensor) -> Tensor:
        """``output``, which has the kept heads, with a place for every head."""
        source, target = (torch.tensor(i, dtype=torch.long, device=output.device) for i in (self.source, self.target))
        whole = output.new_zeros(*output.shape[:-1], self.width)
        return whole.index_copy(-1, target, output.index_select(-1, source))


def placed(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a module without W_O: the kept heads' output where it was among all."""
    placement: Placement = module.__dict__["_headprune_placement"]
    if isinstance(output, tuple):
        return (placement.place(output[0]), *output[1:])
    return placement.place(output)


def placed_before(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a norm over all heads: the same, to its input."""
    placement: Placement = module.__dict__["_headprune_placement"]
    return (placement.place(args[0]), *args[1:])


class _NarrowTensor(Tensor):
    """A tensor that says that it is narrower than it is, to code that sizes its heads by its input's last dimension.

    What is computed from it is a plain tensor; only swapping other dimensions keeps the pretence.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    said: int

    @classmethod
    def of(cls, tensor: Tensor, said: int) -> _NarrowTensor:
        narrow = tensor.as_subclass(cls)
        narrow.said = said
        return narrow

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*Tensor.size(self)[:-1], self.said))

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    def transpose(self, dim0: int, dim1: int) -> Tensor:  # type: ignore[override]
        swapped = Tensor.transpose(self, dim0, dim1)
        return (
            swapped if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim) else _NarrowTensor.of(swapped, self.said)
        )


def told_narrow(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: inputs that say that they are as narrow as the heads are now."""
    width, said = module.__dict__["_headprune_narrow"]

    def tell(value: Any) -> Any:
        wide = (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.ndim in (2, 3)
            and value.shape[-1] == width
        )
        return _NarrowTensor.of(value, said) if wide else value

    return tuple(map(tell, args)), {k: tell(v) for k, v in kwargs.items()}


# -- T5's position bias: the one thing a trace cannot see --------------------------------------
# The first layer computes a bias for all heads and every later layer of the stack receives it. A
# pruned layer must take its own heads out of it, and pass the whole on.


def shares_position_bias(attention: nn.Module) -> bool:
    """Whether a module computes or takes a position bias as T5's do."""
    return hasattr(attention, "compute_bias") and "position_bias" in inspect.signature(attention.forward).parameters


class SharedPositionBias:
    """Hands a pruned T5-style layer its heads of the shared bias, and restores the whole for the next layer."""

    def __init__(self, original: Callable[..., Tensor], num_heads: int, kept: list[int]) -> None:
        self.original = original  # the module's own compute_bias
        self.num_heads = num_heads
        self.kept = kept
        self.whole: Tensor | None = None
        self.taken: Tensor | None = None
        self.dim = 1

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.take(self.original(*args, **kwargs))

    def take(self, whole: Tensor) -> Tensor:
        self.whole = whole
        # LongT5's local attention has its blocks before the heads.
        self.dim = 1 if whole.shape[1] == self.num_heads or whole.ndim < 4 else 2
        self.taken = whole.index_select(self.dim, torch.tensor(self.kept, device=whole.device))
        return self.taken


def take_own_bias(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of a shared bias."""
    bias: SharedPositionBias = attention.__dict__["_headprune_bias"]
    if (whole := kwargs.get("position_bias")) is not None:
        kwargs = {**kwargs, "position_bias": bias.take(whole)}
    return args, kwargs


def restore_whole_bias(attention: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Forward hook: the whole bias, for the next layer."""
    bias: SharedPositionBias = attention.__dict__["_headprune_bias"]
    hidden, own, *rest = output
    whole, taken, bias.whole, bias.taken = bias.whole, bias.taken, None, None
    if whole is not None and taken is not None and own.ndim == taken.ndim:
        # What the layer added for every head alike, such as a mask, the next layers need too.
        added = own.narrow(bias.dim, 0, 1) - taken.narrow(bias.dim, 0, 1)
        whole = torch.where(added == 0, whole, whole + added)
    if whole is None:  # cross-attention's first layer: zeros, alike for every head
        whole = own[:, :1].expand(-1, bias.num_heads, -1, -1)
    return (hidden, whole, *rest)
