"""Forward hooks of pruned modules, and the data that they read, which JSON can hold.

The hooks give a module the kept heads' part of what is still computed for all heads. Do not rename attributes, fields,
or methods that hooks call (`called`, `returned`, `take`, `place`, `compute`): a model loaded from an older folder runs
that folder's hooks on the data of this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class HookData:
    """Data of one kind for hooks, which a module keeps in its attribute ``name``."""

    name: ClassVar[str]
    cleans_up: ClassVar[bool] = False  # whether `returned` is called after an error, too

    @classmethod
    def of(cls, module: nn.Module) -> Any:
        """A module's data of this kind; None if it has none."""
        return vars(module).get(cls.name)

    def attach(self, module: nn.Module) -> None:
        """Attach the data to a module, and register its hooks unless the module has them already."""
        if self.of(module) is None:
            module.register_forward_pre_hook(partial(_called, self.name), with_kwargs=True)
            hook = partial(_returned, self.name)
            module.register_forward_hook(hook, with_kwargs=True, always_call=self.cleans_up)
        vars(module)[self.name] = self

    def called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the forward pre-hook makes of the module's arguments."""
        return args, kwargs

    def returned(self, module: nn.Module, output: Any) -> Any:
        """What the forward hook makes of the module's output; None leaves it as it is."""

    def to_json(self) -> dict[str, Any]:
        """The fields, indices as ranges."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        return {name: to_ranges(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Any:
        """The data that `to_json` wrote."""
        return cls(**{name: from_ranges(value) if isinstance(value, str) else value for name, value in data.items()})


def _called(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return vars(module)[name].called(module, args, kwargs)  # type: ignore[no-any-return]


def _returned(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return vars(module)[name].returned(module, output)


@dataclass(frozen=True)
class Features:
    """The features of a tensor's dimension that stay: all but those of removed heads.

    Attributes:
        kept: Features of the heads that stay.
        owned: Features of any head; all others always stay.
    """

    kept: frozenset[int]
    owned: frozenset[int]

    def index(self, size: int, device: torch.device) -> Tensor:
        """The indices that stay, of a dimension of this ``size``."""
        stay = [i for i in range(size) if i in self.kept or i not in self.owned]
        return torch.tensor(stay, dtype=torch.long, device=device)


def surviving(features: Sequence[Sequence[int]], kept: Sequence[int]) -> Features:
    """The `Features` that stay if only the heads ``kept`` do; head ``h`` owns ``features[h]``."""
    return Features(frozenset(i for h in kept for i in features[h]), frozenset(i for own in features for i in own))


@dataclass(frozen=True)
class HeadArgument:
    """An argument of the attention module that holds something for each head, such as ALiBi's bias.

    Attributes:
        key: Its keyword, or its position.
        dim: The dimension that the heads lie along: it has as many entries as heads (times the batch, if ``folded``), or
            else the entries of ``features``.
        folded: Whether that dimension is (batch * heads).
        features: ``features[h]`` along ``dim`` belong to head ``h``, as the trace has seen. () if only the shape
            suggests that there is something for each head; the proof decides.
    """

    key: str | int
    dim: int
    folded: bool
    features: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class HeadArguments(HookData):
    """Which entries of its arguments a pruned attention module takes."""

    name = "_headprune_arguments"
    arguments: tuple[HeadArgument, ...]
    num_heads: int
    kept: tuple[int, ...]

    def called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        taken = {a.key: self.take(given[a.key], a) for a in self.arguments if a.key in given}
        return tuple(taken.get(i, v) for i, v in enumerate(args)), {k: taken.get(k, v) for k, v in kwargs.items()}

    def take(self, value: Any, argument: HeadArgument) -> Any:
        """The kept heads' part of an argument; an argument that has no part for each head stays whole."""
        if argument.features and isinstance(value, Tensor):
            stay = surviving(argument.features, self.kept)
            return value.index_select(argument.dim, stay.index(value.shape[argument.dim], value.device))
        if not isinstance(value, Tensor) or value.ndim <= argument.dim or value.shape[argument.dim] % self.num_heads:
            return value
        if argument.folded:  # (batch * heads, …)
            return value.reshape(-1, self.num_heads, *value.shape[1:])[:, list(self.kept)].flatten(0, 1)
        return value.index_select(argument.dim, torch.tensor(self.kept, device=value.device))

    def to_json(self) -> dict[str, Any]:
        arguments = [{**vars(a), "features": [list(own) for own in a.features]} for a in self.arguments]
        return {"arguments": arguments, "num_heads": self.num_heads, "kept": to_ranges(self.kept)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadArguments:
        each = (HeadArgument(**a | {"features": tuple(map(tuple, a.get("features", ())))}) for a in data["arguments"])
        return cls(tuple(each), data["num_heads"], from_ranges(data["kept"]))


@dataclass(frozen=True)
class Selection(HookData):
    """Which features of a module's output are passed on.

    Attributes:
        stages: For each prune that the module has been through; indices count within what the one before kept.
    """

    name = "_headprune_selection"
    stages: tuple[Features, ...]

    def returned(self, module: nn.Module, output: Tensor) -> Tensor:
        return self.take(output)

    def take(self, output: Tensor) -> Tensor:
        """The features that are passed on."""
        for features in self.stages:
            output = output.index_select(-1, features.index(output.shape[-1], output.device))
        return output

    def to_json(self) -> dict[str, Any]:
        return {"stages": [[to_ranges(sorted(s.kept)), to_ranges(sorted(s.owned))] for s in self.stages]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Selection:
        return cls(tuple(Features(*(frozenset(from_ranges(part)) for part in stage)) for stage in data["stages"]))


@dataclass(frozen=True)
class Placement(HookData):
    """Where the kept heads belong among the features that a module returned (or took) when it had all heads.

    Attributes:
        width: Features of all heads.
        source, target: Feature ``source[i]`` of the kept heads' tensor moves to ``target[i]``.
        before: Whether the input is placed (of a norm over all heads), not the output.
    """

    name = "_headprune_placement"
    width: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    before: bool = False

    def called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (self.place(args[0]), *args[1:]) if self.before else args, kwargs

    def returned(self, module: nn.Module, output: Any) -> Any:
        if self.before:
            return output
        return (self.place(output[0]), *output[1:]) if isinstance(output, tuple) else self.place(output)

    def place(self, output: Tensor) -> Tensor:
        """The kept heads' ``output``, widened to all heads with zeros."""
        source, target = (torch.tensor(i, dtype=torch.long, device=output.device) for i in (self.source, self.target))
        whole = output.new_zeros(*output.shape[:-1], self.width)
        return whole.index_copy(-1, target, output.index_select(-1, source))


class _NarrowTensor(Tensor):
    """A tensor whose shape claims a smaller width, for code that sizes its heads by its input's last dimension.

    Results computed from it are plain tensors; only a transpose of other dimensions keeps the claim.
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


_CLAIMS = "_headprune_claims"


class _Claims(TorchFunctionMode):
    """`_NarrowTensor` for `torch.export`, which allows no subclass of Tensor: sizes of some tensors are reported as smaller."""

    def __init__(self, claimed: int) -> None:
        super().__init__()
        self.claimed = claimed
        self.narrow: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not args or not any(args[0] is t for t in self.narrow):
            return out
        whole, given = args[0], [*args[1:], *(kwargs or {}).values()]
        if func is Tensor.transpose and len({d % whole.ndim for d in given} - {whole.ndim - 1}) == 2:
            self.narrow.append(out)
        elif func == Tensor.shape.__get__ or (func is Tensor.size and not given):  # type: ignore[attr-defined] # made anew at each look
            return torch.Size((*out[:-1], self.claimed))
        elif func is Tensor.size and given[0] % whole.ndim == whole.ndim - 1:
            return self.claimed
        return out


@dataclass(frozen=True)
class Narrowing(HookData):
    """The size that a module's inputs claim for their last dimension: ``claimed`` instead of ``width``."""

    name = "_headprune_narrow"
    cleans_up = True
    width: int
    claimed: int

    def called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # the first since torch 2.7
        claims = _Claims(self.claimed) if exporting() else None

        def claim(value: Any) -> Any:
            features = isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (2, 3)
            if not features or value.shape[-1] != self.width:
                return value
            if claims is None:
                return _NarrowTensor.of(value, self.claimed)
            claims.narrow.append(value)
            return value

        given = tuple(map(claim, args)), {k: claim(v) for k, v in kwargs.items()}
        if claims is not None:
            vars(module)[_CLAIMS] = claims
            claims.__enter__()  # type: ignore[no-untyped-call] # until the call ends
        return given

    def returned(self, module: nn.Module, output: Any) -> None:
        claims = vars(module).pop(_CLAIMS, None)
        if claims is not None:
            claims.__exit__(None, None, None)


@dataclass
class SharedPositionBias(HookData):
    """Gives a pruned T5-style layer its heads of the shared position bias, and the whole bias to the next layer.

    A trace cannot see this: the first layer computes a bias for all heads, and all later layers of the stack take it.
    """

    name = "_headprune_bias"
    num_heads: int
    kept: tuple[int, ...]
    original: Callable[..., Tensor] | None = field(default=None, init=False)  # the module's own compute_bias
    whole: Tensor | None = field(default=None, init=False)
    taken: Tensor | None = field(default=None, init=False)
    dim: int = field(default=1, init=False)

    @staticmethod
    def needed_by(attention: nn.Module) -> bool:
        """Whether a module computes or takes a position bias as T5's do."""
        return hasattr(attention, "compute_bias") and "position_bias" in inspect.signature(attention.forward).parameters

    def attach(self, module: nn.Module) -> None:
        earlier: SharedPositionBias | None = self.of(module)
        self.original = earlier.original if earlier else module.compute_bias  # type: ignore[assignment]
        vars(module)["compute_bias"] = self.compute
        super().attach(module)

    def called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if (whole := kwargs.get("position_bias")) is not None:
            kwargs = {**kwargs, "position_bias": self.take(whole)}
        return args, kwargs

    def returned(self, module: nn.Module, output: Any) -> Any:
        """The output with the whole bias, for the next layer."""
        hidden, own, *rest = output
        whole, taken, self.whole, self.taken = self.whole, self.taken, None, None
        if whole is not None and taken is not None and own.ndim == taken.ndim:
            # The next layers also need what this layer added for all heads alike, such as a mask.
            added = own.narrow(self.dim, 0, 1) - taken.narrow(self.dim, 0, 1)
            whole = torch.where(added == 0, whole, whole + added)
        if whole is None:  # cross-attention's first layer: zeros, alike for every head
            whole = own[:, :1].expand(-1, self.num_heads, -1, -1)
        return (hidden, whole, *rest)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the module's ``compute_bias``; returns the kept heads' part of the bias."""
        assert self.original is not None
        return self.take(self.original(*args, **kwargs))

    def take(self, whole: Tensor) -> Tensor:
        """The kept heads' part of a bias for all heads; remembers the whole bias."""
        self.whole = whole
        # In LongT5's local attention, blocks come before the heads.
        self.dim = 1 if whole.shape[1] == self.num_heads or whole.ndim < 4 else 2
        self.taken = whole.index_select(self.dim, torch.tensor(self.kept, device=whole.device))
        return self.taken


HOOK_DATA: dict[str, type[HookData]] = {
    "arguments": HeadArguments,
    "selection": Selection,
    "placement": Placement,
    "narrowing": Narrowing,
    "position_bias": SharedPositionBias,
}
"""The kinds of data, by their names in a saved structure."""


def to_ranges(indices: Sequence[int]) -> str:
    """Indices as runs, since a head's features are mostly one run.

    >>> to_ranges((0, 1, 2, 7))
    '0:3,7:8'
    """
    ranges: list[list[int]] = []
    for i in indices:
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return ",".join(f"{start}:{stop}" for start, stop in ranges)


def from_ranges(text: str) -> tuple[int, ...]:
    """The indices that `to_ranges` wrote."""
    pairs = (run.split(":") for run in text.split(",") if run)
    return tuple(i for start, stop in pairs for i in range(int(start), int(stop)))
