"""Hooks that stay on a pruned module: they take the kept heads' part of what is still computed for all heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headprune.attention import HeadArgument, HeadFeatures
from headprune.surgery.features import Features, surviving


class Carried:
    """Something that the hooks of a pruned module read: an attribute of the module, called ``name``."""

    name: ClassVar[str]

    @classmethod
    def of(cls, module: nn.Module) -> Any:
        """What a module carries of this kind; None if it carries nothing."""
        return module.__dict__.get(cls.name)


@dataclass(frozen=True)
class HeadArguments(Carried):
    """Which entries of its arguments a pruned attention module takes."""

    name = "_headprune_arguments"
    arguments: tuple[HeadArgument, ...]
    num_heads: int
    kept: list[int]

    def take(self, value: Any, argument: HeadArgument) -> Any:
        """The kept heads' part of an argument; an argument that has no part for each head stays whole."""
        if argument.features and isinstance(value, Tensor):
            stay = surviving(argument.features, self.kept)
            return value.index_select(argument.dim, stay.index(value.shape[argument.dim], value.device))
        if not isinstance(value, Tensor) or value.ndim <= argument.dim or value.shape[argument.dim] % self.num_heads:
            return value
        if argument.folded:  # (batch * heads, …)
            return value.reshape(-1, self.num_heads, *value.shape[1:])[:, self.kept].flatten(0, 1)
        return value.index_select(argument.dim, torch.tensor(self.kept, device=value.device))


def take_own_arguments(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of arguments that hold something for every head."""
    own = HeadArguments.of(attention)
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    taken = {a.key: own.take(given[a.key], a) for a in own.arguments if a.key in given}
    return tuple(taken.get(i, v) for i, v in enumerate(args)), {k: taken.get(k, v) for k, v in kwargs.items()}


@dataclass(frozen=True)
class Selection(Carried):
    """Which features of a module's output are passed on."""

    name = "_headprune_selection"
    features: Features
    earlier: Selection | None  # of an earlier prune: indices count within what that one kept

    def take(self, output: Tensor) -> Tensor:
        """The features that are passed on."""
        if self.earlier is not None:
            output = self.earlier.take(output)
        return output.index_select(-1, self.features.index(output.shape[-1], output.device))


def selected(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: the kept heads' features of what a module computes for all."""
    taken: Tensor = Selection.of(module).take(output)
    return taken


class Placement(Carried):
    """Where the heads that stay belong among the features that a module without W_O returned."""

    name = "_headprune_placement"

    def __init__(self, part: HeadFeatures, stay: Sequence[int], kept: Sequence[int], earlier: Placement | None) -> None:
        computed = sorted(f for h in kept for f in part.features[h])
        # The trace before a second prune saw what the first one placed, at the same features.
        self.width: int = sum(map(len, part.features)) if earlier is None else earlier.width
        self.target = sorted(f for h in stay for f in part.features[h])
        self.source = [computed.index(f) for f in self.target]

    def place(self, output: Tensor) -> Tensor:
        """``output``, which has the kept heads, with a place for every head."""
        source, target = (torch.tensor(i, dtype=torch.long, device=output.device) for i in (self.source, self.target))
        whole = output.new_zeros(*output.shape[:-1], self.width)
        return whole.index_copy(-1, target, output.index_select(-1, source))


def placed(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a module without W_O: the kept heads' output where it was among all."""
    place = Placement.of(module).place
    return (place(output[0]), *output[1:]) if isinstance(output, tuple) else place(output)


def placed_before(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a norm over all heads: the same, for its input."""
    return (Placement.of(module).place(args[0]), *args[1:])


class _NarrowTensor(Tensor):
    """A tensor whose shape claims a smaller width, for code that sizes its heads by its input's last dimension.

    What is computed from it is a plain tensor; only the transpose of other dimensions keeps the claim.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    claimed: int

    @classmethod
    def of(cls, tensor: Tensor, claimed: int) -> _NarrowTensor:
        narrow = tensor.as_subclass(cls)
        narrow.claimed = claimed
        return narrow

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((*Tensor.size(self)[:-1], self.claimed))

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self.shape if dim is None else self.shape[dim]

    def transpose(self, dim0: int, dim1: int) -> Tensor:  # type: ignore[override]
        swapped = Tensor.transpose(self, dim0, dim1)
        last = self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim)
        return swapped if last else _NarrowTensor.of(swapped, self.claimed)


@dataclass(frozen=True)
class Narrowing(Carried):
    """What a module's inputs claim about their last dimension: ``claimed`` where it is ``width``."""

    name = "_headprune_narrow"
    width: int
    claimed: int


def narrowed(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: inputs that claim to be as narrow as the heads are now."""
    own = Narrowing.of(module)

    def claim(value: Any) -> Any:
        features = isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3)
        return _NarrowTensor.of(value, own.claimed) if features and value.shape[-1] == own.width else value

    return tuple(map(claim, args)), {k: claim(v) for k, v in kwargs.items()}


# -- T5's position bias: the one thing a trace cannot see --------------------------------------
# The first layer computes a bias for all heads and every later layer of the stack receives it. A
# pruned layer must take its own heads out of it, and pass the whole on.


def shares_position_bias(attention: nn.Module) -> bool:
    """Whether a module computes or takes a position bias as T5's do."""
    return hasattr(attention, "compute_bias") and "position_bias" in inspect.signature(attention.forward).parameters


class SharedPositionBias(Carried):
    """Gives a pruned T5-style layer its heads of the shared bias, and the whole bias to the next layer."""

    name = "_headprune_bias"

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
        # In LongT5's local attention, blocks come before the heads.
        self.dim = 1 if whole.shape[1] == self.num_heads or whole.ndim < 4 else 2
        self.taken = whole.index_select(self.dim, torch.tensor(self.kept, device=whole.device))
        return self.taken


def take_own_bias(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook: the kept heads' part of a shared bias."""
    bias: SharedPositionBias = SharedPositionBias.of(attention)
    if (whole := kwargs.get("position_bias")) is not None:
        kwargs = {**kwargs, "position_bias": bias.take(whole)}
    return args, kwargs


def restore_whole_bias(attention: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Forward hook: the whole bias, for the next layer."""
    bias: SharedPositionBias = SharedPositionBias.of(attention)
    hidden, own, *rest = output
    whole, taken, bias.whole, bias.taken = bias.whole, bias.taken, None, None
    if whole is not None and taken is not None and own.ndim == taken.ndim:
        # The next layers also need what this layer added for all heads alike, such as a mask.
        added = own.narrow(bias.dim, 0, 1) - taken.narrow(bias.dim, 0, 1)
        whole = torch.where(added == 0, whole, whole + added)
    if whole is None:  # cross-attention's first layer: zeros, alike for every head
        whole = own[:, :1].expand(-1, bias.num_heads, -1, -1)
    return (hidden, whole, *rest)
