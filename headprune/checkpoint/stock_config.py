"""A config with which a stock class has the tensors of a pruned model, found by trying: names and shapes alone, without weights.

A stock class has one number of heads (and of key/value heads) for all layers, out of its config. No list says which classes can
have which: configs are tried, and `headprune.checkpoint.building` proves a model that was made with one.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, product
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import Layers
from headprune.errors import HeadPruneError, first_line
from headprune.pruned import add_biases, from_ranges, restructure, structure_of
from headprune.pruned.structure import Structure
from headprune.surgery import remove
from headprune.surgery.removal import ways

TRIED = 48  # configs, at most
_WIDTH = re.compile(r"dim|size|width|channels")  # what a head's width, and not the number of heads, is called

Field = tuple[int, str]
"""A field of a config: which of `configs_in`, and its name."""
Change = dict[Field, Any]
"""New values of fields."""
Built = dict[tuple[Any, ...], tuple[Any, nn.Module]]
"""Configs and models without weights, by the change that made them."""


class NotStockError(HeadPruneError):
    """The stock class cannot represent the pruned model; the text says why."""


@dataclass(frozen=True)
class StockConfig:
    """How a stock class represents a pruned model.

    Attributes:
        cls: The class.
        config: Its config, as it is once it was written and read.
        cuts: Tensors of which the class holds the kept heads' part, while the pruned model takes it each time: ``{name: (dim,
            indices)}``, such as T5's table of positions.
        zeros: Biases that the class has and the model lacks, all zero: ``{name: shape}``.
        computed: Buffers of the model's weights that the class computes itself.
        fields: What is another number in the config, in words.
    """

    cls: type
    config: Any
    cuts: dict[str, tuple[int, tuple[int, ...]]]
    zeros: dict[str, torch.Size]
    computed: tuple[str, ...]
    fields: str


class StockCounts:
    """Which numbers of heads a model's class can have, by prunes of copies without weights.

    Args:
        model: A transformers model, pruned before or not.
        layers: Its attention layers.
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.model, self.layers = model, layers
        self.name = dense_class(model).__name__
        self._built: Built = {}

    @classmethod
    def of(cls, model: nn.Module | None, layers: Layers) -> StockCounts | None:
        """For a transformers model; None for any other module, and for none."""
        return cls(model, layers) if model is not None and is_stock(dense_class(model)) else None

    def config_without(self, drop: Mapping[str, Sequence[int]]) -> StockConfig | None:
        """How the class represents the model without these heads; None if it cannot. Answers are not compared."""
        touched = [layer for layer in self.layers if drop.get(layer.name)]
        pruned = _meta_copy(self.model)
        remove(pruned, ways(touched, {n: list(h) for n, h in drop.items() if h})[0])
        try:
            return next(stock_configs(pruned, self._built), None)
        except NotStockError:
            return None

    def has_place_for_biases(self) -> bool:
        """Whether the class can give W_O a bias where it has none; True also where it can represent no prune anyway."""
        fewest = {a.name: [h for unit in a.units[1:] for h in unit] for a in self.layers if a.prunable}
        if self.config_without(fewest) is None:
            return True
        with_biases = _meta_copy(self.model)
        outputs = {a.output_projection.module for a in self.layers if a.output_projection and not a.concatenates}
        add_biases(with_biases, [n for n in outputs if getattr(with_biases.get_submodule(n), "bias", None) is None])
        return StockCounts(with_biases, self.layers).config_without(fewest) is not None


def stock_configs(model: nn.Module, built: Built | None = None) -> Iterator[StockConfig]:
    """The configs with which a pruned model's class has its tensors, by name and shape, most likely ones first.

    Args:
        model: A pruned transformers model; its weights may be on the meta device.
        built: Configs, and models without weights, that were made for other prunes of the same model; more are added.

    Raises:
        NotStockError: There is none.
    """
    cls, structure, base = dense_class(model), structure_of(model), plain_config(model)
    if not is_stock(cls):
        raise NotStockError(f"{cls.__name__} is no class of transformers.")
    if not structure:
        yield StockConfig(cls, _changed(base, {}), {}, {}, (), "no other number")
        return
    empty = [name for name, entry in structure["modules"].items() if "empty" in entry or "only_bias" in entry]
    for name in (*empty, *structure["ghosts"]):
        raise NotStockError(f"{name} has no heads left, and a stock class has as many in every layer.")
    try:
        dense = on_meta(cls, base)
    except Exception as error:
        raise NotStockError(f"{cls.__name__} cannot be built: {first_line(error)}.") from error
    shares = _shares(model, dense, structure)
    built, any_fits, why = {} if built is None else built, False, ""
    for change in _changes(base, sorted(shares), structure["biases"]):
        fields = ", ".join(f"{name}={value}" for (_, name), value in change.items())
        key = tuple(change.items())
        try:
            if key not in built:
                config = _changed(base, change)
                built[key] = config, on_meta(cls, config)
            config, like = built[key]
            fit = _fit(model, like, structure)
        except NotStockError as error:
            why = why or f"with {fields}, {error.args[0]}"
        except Exception as error:  # whatever a class or its config objects to
            why = why or f"{fields} is refused: {first_line(error.__cause__ or error)}"
        else:
            any_fits = True
            yield StockConfig(cls, config, *fit, fields)
    if not any_fits:
        why = (why or "its config has no number of heads").rstrip(".")
        raise NotStockError(f"{cls.__name__} cannot represent it: {why}.")


def dense_class(model: nn.Module) -> type:
    """The class of a model; where that came out of the code that headprune put into a pruned folder, the class of transformers that
    it builds on. Not so for other code: what a class adds to one of transformers may change its answers."""
    cls = type(model)
    if not cls.__module__.endswith(".modeling_headprune"):
        return cls
    return next((c for c in cls.__mro__ if is_stock(c)), cls)


def is_stock(cls: type) -> bool:
    """Whether a class is one of transformers' models."""
    return cls.__module__.startswith("transformers.models.")


def plain_config(model: nn.Module) -> Any:
    """A copy of a model's config without what headprune added."""
    config = copy.deepcopy(model.config)
    for name in ("headprune", "auto_map"):
        vars(config).pop(name, None)
    return config


def configs_in(config: Any) -> list[Any]:
    """A config and those in it."""
    below = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return [config, *(c for sub in below if sub is not None for c in configs_in(sub))]


def on_meta(cls: Any, config: Any) -> nn.Module:
    """A model of a class without weights."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: nn.Module = cls(copy.deepcopy(config))
    return model


def pattern(name: str) -> str:
    """What the names of a module in all layers have in common.

    >>> pattern("encoder.layer.11.attention.self")
    'encoder.layer.#.attention.self'
    """
    return re.sub(r"\d+", "#", name)


def _meta_copy(model: nn.Module) -> nn.Module:
    """A pruned model again, without weights."""
    again = on_meta(dense_class(model), plain_config(model))
    restructure(again, structure_of(model))
    return again


def _shares(model: nn.Module, dense: nn.Module, structure: Structure) -> set[Fraction]:
    """The shares of their heads that modules keep, as their sizes and numbers say; without those that keep all.

    Raises:
        NotStockError: Layers of one kind keep different shares; it names two.
    """
    own, every = dict(model.named_modules()), set[Fraction]()
    first: dict[tuple[str, type], tuple[str, frozenset[Fraction]]] = {}
    for name, module in dense.named_modules():
        entry = structure["modules"].get(name, {})
        pairs = [(getattr(own[name], n), getattr(module, n, None)) for n in entry.get("numbers", ())]
        for fields in entry.get("configs", {}).values():
            pairs += [(new, getattr(module.config, n, None)) for n, new in fields.items()]
        for tensor, shape in entry.get("tensors", {}).items():
            old = {**module._parameters, **module._buffers}.get(tensor)
            pairs += [] if old is None else list(zip(shape, old.shape, strict=False))
        numbers = [(new, old) for new, old in pairs if isinstance(old, int) and old and new and new != old]
        shares = frozenset(Fraction(new, old) for new, old in numbers)
        other, others = first.setdefault((pattern(name), type(module)), (name, shares))
        if shares != others:
            both = ", ".join(" and ".join(map(str, sorted(each))) or "all" for each in (others, shares))
            why = f"keep different shares of their heads ({both}), and a stock class has one number for all layers"
            raise NotStockError(f"{other} and {name} {why}.")
        every |= shares
    return every


def _changes(base: Any, ratios: Sequence[Fraction], biases: Sequence[str]) -> Iterator[Change]:
    """What may be new in a config: numbers of heads, and where that is not enough a head's width; and flags that give biases."""
    parts = configs_in(base)
    fields = [(i, name, value) for i, part in enumerate(parts) for name, value in vars(part).items()]
    named = [(i, name, v) for i, name, v in fields if "head" in name and not name.startswith("_")]
    counts: Change = {(i, n): v for i, n, v in named if not _WIDTH.search(n) and type(v) is int and v > 0}
    flags = [(i, name) for i, name, value in fields if "bias" in name and value is False]
    shares = [[*dict.fromkeys((*(_share(v, r) for r in ratios), v))] for v in counts.values()]
    alike = (tuple(_share(value, ratio) for value in counts.values()) for ratio in ratios)
    tried = dict.fromkeys((*alike, *islice(product(*shares), TRIED)))
    for numbers in islice(tried, TRIED):
        new: Change = {f: n for (f, old), n in zip(counts.items(), numbers, strict=True) if n != old}
        for flag in [*((f,) for f in flags), flags] if biases else [()]:  # each alone, then all
            flagged: Change = {**new, **dict.fromkeys(flag, True)}
            if flagged:
                yield flagged
            if widths := _widths(parts, new):
                yield {**flagged, **widths}


def _changed(base: Any, change: Change) -> Any:
    """A config with other values, as it is once it was written to a file and read again; raises what the class objects to."""
    config = copy.deepcopy(base)
    parts = configs_in(config)
    for (i, name), value in change.items():
        setattr(parts[i], name, value)
    read: Any = type(config).from_dict(json.loads(config.to_json_string()))
    for new, old in zip(configs_in(read), configs_in(config), strict=True):
        if hasattr(new, "validate"):
            new.validate()
        new._attn_implementation = getattr(old, "_attn_implementation", None)
    return read


def _share(value: int, ratio: Fraction) -> int:
    """A share of a number of heads; all of them, where that is no whole number."""
    part = value * ratio
    return int(part) if part.denominator == 1 and part > 0 else value


def _widths(parts: Sequence[Any], new: Change) -> Change:
    """A head's width, said in so many words where a class would divide by the number of heads."""
    widths: dict[Field, int] = {}
    for i, name in new:
        values: dict[str, Any] = {}
        for field in ("hidden_size", name, "head_dim"):
            # There may be none; or one for each layer, for which transformers has errors of its own.
            with suppress(Exception):
                values[field] = getattr(parts[i], field)
        whole, heads, width = values.get("hidden_size"), values.get(name), values.get("head_dim")
        if type(width) is not int and isinstance(whole, int) and isinstance(heads, int) and whole % heads == 0:
            widths[i, "head_dim"] = min(whole // heads, widths.get((i, "head_dim"), whole))
    return dict(widths)


Fit = tuple[dict[str, tuple[int, tuple[int, ...]]], dict[str, torch.Size], tuple[str, ...]]


def _fit(model: nn.Module, like: nn.Module, structure: Structure) -> Fit:
    """What of the model's tensors is to be cut, filled in and left out for a class that has the shapes of ``like``.

    Raises:
        NotStockError: The first tensor that has no place, or another shape.
    """
    ours, theirs = model.state_dict(), like.state_dict()
    buffers, cuts, computed = dict(like.named_buffers()), {}, []
    for name, tensor in ours.items():
        if name not in theirs:
            if name not in buffers or buffers[name].shape != tensor.shape:
                repaired = " (a repair gave it)" if name.removesuffix(".bias") in structure["biases"] else ""
                raise NotStockError(f"{name} has no place{repaired}")
            computed.append(name)
        elif theirs[name].shape != tensor.shape:
            cuts[name] = _cut(name, tensor, theirs[name].shape, structure, like)
    zeros = {name: tensor.shape for name, tensor in theirs.items() if name not in ours}
    for name, shape in zeros.items():
        if len(shape) != 1 or not name.endswith("bias"):
            raise NotStockError(f"there is no {name}")
    return cuts, zeros, tuple(computed)


def _cut(
    name: str, tensor: Tensor, shape: Sequence[int], structure: Structure, like: nn.Module
) -> tuple[int, tuple[int, ...]]:
    """The dimension and the entries of a table for all heads that belong to the kept ones.

    Raises:
        NotStockError: It is no such table; or layers that share it keep different heads.
    """
    why = f"{name} is {list(shape)}, in the pruned model {list(tensor.shape)}"
    dims = [d for d, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b]
    # Modules that take the kept heads' part of something for all heads: name -> (heads, which are kept).
    takers = {}
    for module, entry in structure["modules"].items():
        for kind in {"position_bias", "arguments"} & entry.get("carried", {}).keys():
            data = entry["carried"][kind]
            takers[module] = data["num_heads"], from_ranges(data["kept"])
    if len(dims) != 1 or tensor.ndim != len(shape) or not takers:
        raise NotStockError(why)
    nearest = max(takers, key=lambda module: len(commonprefix([module, name])))  # noqa: RUF071 (names, no paths)
    sharing = [module for module in takers if pattern(module) == pattern(nearest)]
    if sum(pattern(each) == pattern(name) for each in like.state_dict()) == len(sharing):  # each layer has its own
        sharing = [nearest]
    if len({takers[module] for module in sharing}) > 1:
        raise NotStockError(f"{name} is shared by {len(sharing)} layers, and they keep different heads")
    heads, kept = takers[nearest]
    if (heads, len(kept)) != (tensor.shape[dims[0]], shape[dims[0]]):
        raise NotStockError(why)
    return dims[0], kept
