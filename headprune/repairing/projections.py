"""Output and value projections that can be refitted, their dense weights, and the sums over tokens for the fit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headprune.attention import AttentionLayer, Heads, Layers
from headprune.inputs import doubled, is_transposed
from headprune.offload import is_elsewhere, on_disk, place_of, value_of
from headprune.running import exact_attention

FOLDS = 2
_BLOCK = 256  # rows of a symmetric matrix that are added at once
_ROUNDED = 1e-12  # share of the mean square: a variance below it is rounding


class Moments:
    """Second moments summed over tokens, by fold: of W_O's inputs with an appended 1, and of its target outputs.

    Args:
        device: Where the sums are; None keeps them in files, for models whose weights are not all in memory either.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | None) -> None:
        place = torch.device("cpu") if device is None or device.type == "mps" else device  # mps has no float64

        def zeros(*shape: int) -> Tensor:
            return on_disk(*shape) if device is None else torch.zeros(shape, dtype=torch.float64, device=place)

        self.xx, self.xy = zeros(FOLDS, inputs + 1, inputs + 1), zeros(FOLDS, inputs + 1, outputs)
        self.yy = torch.zeros(FOLDS, dtype=torch.float64, device=place)

    def add(self, fold: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add tokens ``x`` [tokens, in] and ``y`` [tokens, out], with a weight each."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = torch.cat([x.to(wide), x.new_ones(len(x), 1, dtype=wide)], dim=1)
        y, weight = y.to(wide), weight.to(wide)[:, None]
        weighted = (x * weight).T
        for first in range(0, len(weighted), _BLOCK):  # of the symmetric matrix, the blocks from the diagonal on
            block = slice(first, first + _BLOCK)
            self.xx[fold, block, first:] += (weighted[block] @ x[:, first:]).to(self.xx)
        self.xy[fold] += (weighted @ y).to(self.xy)
        self.yy[fold] += (y**2 * weight).sum().to(self.yy)

    def complete(self) -> None:
        """Fill the part of the symmetric matrix below the diagonal, when all tokens are added."""
        for first in range(0, self.xx.shape[-1], _BLOCK):
            end = first + _BLOCK
            self.xx[:, end:, first:end] = self.xx[:, first:end, end:].mT

    def rows_of(self, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums ``xx``, ``xy`` and ``yy`` for the kept inputs and the appended 1, on the sums' device."""
        both = torch.cat([kept, torch.tensor([self.xx.shape[-1] - 1])]).to(self.xx.device)
        return self.xx[:, both][:, :, both], self.xy[:, both], self.yy

    def of_fold(self, fold: int) -> Moments:
        """The sums of one fold's tokens, for fits with a given strength."""
        part = copy.copy(self)
        part.xx, part.xy, part.yy = (m[fold : fold + 1] for m in (self.xx, self.xy, self.yy))
        return part

    @property
    def seen(self) -> bool:
        """Whether any token has a weight above 0."""
        return bool(self.xx[:, -1, -1].sum() > 0)

    def spread(self) -> float:
        """Variance of the outputs, summed over tokens; of constant outputs, their square."""
        xy, tokens = self.xy.sum(0), self.xx[:, -1, -1].sum()
        square = float(self.yy.sum())
        around = square - float(tokens * (xy[-1] / tokens).square().sum())
        return around if around > _ROUNDED * square else max(square, 1e-30)


def centred(xx: Tensor, xy: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Second moments ``[in, in]`` and ``[in, out]`` per token (central if with a bias); means of inputs and outputs."""
    tokens = xx[-1, -1]
    mean_x, mean_y = (xx[-1, :-1] / tokens, xy[-1] / tokens)
    if not has_bias:  # without a bias, nothing could restore a mean that is subtracted
        return xx[:-1, :-1] / tokens, xy[:-1] / tokens, mean_x, mean_y
    a, c = xx[:-1, :-1] / tokens - torch.outer(mean_x, mean_x), xy[:-1] / tokens - torch.outer(mean_x, mean_y)
    if float(a.diagonal().sum()) <= _ROUNDED * float(xx[:-1, :-1].diagonal().sum() / tokens):
        a, c = torch.zeros_like(a), torch.zeros_like(c)  # constant inputs: what is left is rounding
    return a, c, mean_x, mean_y


@dataclass(frozen=True)
class Values:
    """A value projection that can be refitted along with W_O.

    Attributes:
        name: Of the module.
        weight, bias: The dense model's, ``[in, out]`` and ``[out]`` (None where it has none), float64.
        features: Indices of its outputs, by key/value head ``[key/value heads, head_dim]``.
        owner: The key/value head of every query head.
        columns: Indices of W_O's inputs, by query head ``[heads, head_dim]``.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    features: Tensor
    owner: tuple[int, ...]
    columns: Tensor

    @property
    def head_dim(self) -> int:
        return self.columns.shape[1]


def at(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on this device and in this dtype. The copy is cached, since every copy waits for the GPU."""
    dtype = dtype or tensor.dtype
    if (tensor.device, tensor.dtype) == (device, dtype):
        return tensor
    copies: dict[Any, Tensor] = _COPIES.get(tensor) or {}
    _COPIES[tensor] = copies
    if (device, dtype) not in copies:
        copies[device, dtype] = tensor.to(device, dtype)
    return copies[device, dtype]


_COPIES: MutableMapping[Tensor, dict[Any, Tensor]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer that can be refitted: an output projection, or any other, which only the last step moves.

    Attributes:
        name: Of the module.
        layers: The attention layers that end in it (mostly one); of any other linear layer, the one with the nearest name.
        weight, bias: The dense model's, ``[in, out]`` and ``[out]``; float64 of an output projection, else in its own dtype.
        has_bias: Whether the module has a bias, or can be given one.
        own_bias: Whether it has a bias.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    weight: Tensor
    bias: Tensor
    has_bias: bool
    own_bias: bool

    def kept(self, drop: Heads) -> Tensor:
        """Indices of the inputs that stay when heads are removed."""
        return torch.arange(len(self.weight))

    @property
    def dense(self) -> tuple[Tensor, Tensor | None]:
        """The dense model's weight and bias; None if it has none."""
        return self.weight, self.bias if self.own_bias else None


@dataclass(frozen=True)
class OutputProjection(LinearLayer):
    """An output projection that can be refitted.

    Attributes:
        values: The value projection behind its inputs, if that can be refitted too.
    """

    values: Values | None = None

    def kept(self, drop: Heads) -> Tensor:
        owned = [(a.output_projection.features, drop.get(a.name, ())) for a in self.layers if a.output_projection]
        gone = {f for features, heads in owned for h in heads for f in features[h]}
        return torch.tensor([i for i in range(self.weight.shape[0]) if i not in gone], dtype=torch.long)

    def loses(self, drop: Heads) -> bool:
        """Whether it reads any of the removed heads."""
        return len(self.kept(drop)) < len(self.weight)

    def heads(self, drop: Heads) -> list[int]:
        """The kept heads of its only layer (if it has several, no values are refitted)."""
        gone = set(drop.get(self.layers[0].name, ()))
        return [h for h in range(self.layers[0].num_heads) if h not in gone]


def output_projections(model: nn.Module, layers: Layers, notes: list[str], biases: bool) -> Iterator[OutputProjection]:
    """The output projections that can be refitted, in the order of the layers; why others cannot is added to ``notes``.

    Args:
        biases: Whether projections without a bias can be given one.
    """
    by_module: dict[str, list[AttentionLayer]] = {}
    real = dict(model.named_modules())
    for layer in layers:
        if why := _why_not(layer):
            notes.append(f"{layer.title} keeps its old weights: {why}.")
        elif layer.output_projection:
            by_module.setdefault(layer.output_projection.module, []).append(layer)
    sources = Counter(layer.values.module for layer in layers if layer.values)
    with exact_attention(model):
        owners = owners_of_weights(model)
        for name, those in by_module.items():
            projection: Any = model.get_submodule(name)
            if why := not_plain(projection, owners):
                notes.append(f"{those[0].title} keeps its old weights: {name} {why}.")
            else:
                matrix, bias = matrix_of(projection), bias_of(projection)
                addable = biases and isinstance(projection, nn.Linear) and real.get(name) is projection
                can = bias is not None or addable
                start = matrix.new_zeros(matrix.shape[1]) if bias is None else bias
                separate = len(those) == 1 and those[0].values and sources[those[0].values.module] == 1
                values = _values(model, those[0], len(matrix), owners) if separate else None
                yield OutputProjection(name, tuple(those), matrix, start, can, bias is not None, values)


def owners_of_weights(model: nn.Module, all_names: bool = True) -> Mapping[object, Sequence[str]]:
    """The modules that hold a weight or another parameter, by its storage; by ``all_names`` that a module has, or the first one."""
    owners: dict[object, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=not all_names):
        if isinstance(getattr(module, "weight", None), Tensor):
            owners.setdefault(_storage_of(module), []).append(name)
        for other in (own for own, held in module._parameters.items() if own != "weight" and held is not None):
            owners.setdefault(place_of(module, other), []).append(name)
    return owners


def _values(
    model: nn.Module, layer: AttentionLayer, inputs: int, owners: Mapping[object, Sequence[str]]
) -> Values | None:
    """A layer's value projection, if it can be refitted: a plain linear one, whose features only whole groups share."""
    if layer.values is None or layer.output_projection is None:
        return None
    source, columns = layer.values, layer.output_projection.features
    heads = list(dict.fromkeys(source.features))
    flat = [f for own in heads for f in own]
    width = layer.head_dim
    widths = {len(own) for own in (*heads, *columns)}
    if widths != {width} or len(set(flat)) < len(flat) or inputs != width * layer.num_heads:
        return None
    projection: Any = model.get_submodule(source.module)
    if not_plain(projection, owners):
        return None
    owner = tuple(heads.index(own) for own in source.features)
    weight, bias = matrix_of(projection), bias_of(projection)
    return Values(source.module, weight, bias, torch.tensor(heads), owner, torch.tensor(columns))


def matrix_of(projection: Any) -> Tensor:
    """A copy of a linear module's weights, ``[in, out]``, float64."""
    held = value_of(projection, "weight").detach()
    # A model that is not all in memory leaves hardly room for copies there.
    wide = on_disk(*held.shape).copy_(held) if is_elsewhere(projection, "weight") else doubled(held).clone()
    return wide if is_transposed(projection) else wide.T


def bias_of(projection: Any) -> Tensor | None:
    """A copy of a linear module's bias, float64; None if it has none."""
    bias = getattr(projection, "bias", None)
    return None if bias is None else doubled(value_of(projection, "bias").detach()).clone()


def not_plain(projection: Any, owners: Mapping[object, Sequence[str]]) -> str:
    """Why a module's weights cannot be replaced; empty if they can."""
    # The weight must be the module's own parameter, not computed from others as in adapters.
    weight: Any = projection.weight if "weight" in projection._parameters else None
    plain = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
    if not plain or (weight.is_meta and not is_elsewhere(projection, "weight")):
        return "is no plain linear layer in memory"
    return "shares them with another module" if len(owners.get(_storage_of(projection), ())) > 1 else ""


def _storage_of(module: nn.Module) -> object:
    """Identity of the storage of a module's weight: a stand-in's parameters share it with the original's."""
    own = "weight" in module._parameters or "weight" in module._buffers
    return place_of(module, "weight") if own else id(module.weight)


def _why_not(layer: AttentionLayer) -> str:
    if layer.output_projection is None or layer.concatenates:
        return "it has no output projection"
    if layer.gate is not None or layer.mixer:
        return "something comes between its heads and the output projection"
    return "" if layer.prunable else layer.reason
