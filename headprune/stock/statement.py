"""A config with which a stock class has the tensors of a pruned model: names and shapes alone, so nothing is in memory."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError, first_line
from headprune.pruned import Structure, from_ranges, restructure, structure_of

TRIED = 48  # configs, at most
_DIGITS = re.compile(r"\d+")
_WIDTH = re.compile(r"dim|size|width|channels")  # what a head's width, and not the number of heads, is called

Field = tuple[int, str]
"""A field of a config: which of `configs_in`, and its name."""
Change = dict[Field, Any]
"""New values of fields."""
Known = dict[tuple[Any, ...], tuple[Any, nn.Module]]
"""Configs and models without weights, by the change that made them."""


class CannotStateError(HeadPruneError):
    """No config of the class gives the pruned model; the text says why."""


@dataclass(frozen=True)
class Statement:
    """How a stock class states a pruned model.

    Attributes:
        cls: The class.
        config: Its config, as it is once it was written and read.
        cuts: Tensors of which the class holds the kept heads' part, while the pruned model takes it each time: ``{name: (dim,
            indices)}``, such as T5's table of positions.
        zeros: Biases that the class has and the model lacks: all zero.
        computed: Buffers of the model's weights that the class computes itself.
        shapes: Of the class's tensors.
        fields: What is another number in the config, in words.
    """

    cls: type
    config: Any
    cuts: dict[str, tuple[int, tuple[int, ...]]]
    zeros: tuple[str, ...]
    computed: tuple[str, ...]
    shapes: dict[str, torch.Size]
    fields: str


def statements(model: nn.Module, known: Known | None = None) -> Iterator[Statement]:
    """The configs with which a pruned model's class has its tensors, by name and shape, most likely ones first.

    Args:
        model: A pruned transformers model; its weights may be on the meta device.
        known: Configs, and models without weights, that were made for other prunes of the same model; more are added.

    Raises:
        CannotStateError: There is none.
    """
    cls, structure = dense_class(model), structure_of(model)
    if not cls.__module__.startswith("transformers.models."):
        raise CannotStateError(f"{cls.__name__} is no class of transformers.")
    if not structure:
        config = as_read(plain(model))
        yield Statement(cls, config, {}, (), (), {n: t.shape for n, t in model.state_dict().items()}, "no other number")
        return
    for name in (
        *(n for n, e in structure["modules"].items() if "empty" in e or "only_bias" in e),
        *structure["ghosts"],
    ):
        raise CannotStateError(f"{name} has no heads left, and a stock class has as many in every layer.")
    try:
        dense = on_meta(cls, plain(model))
    except Exception as error:
        raise CannotStateError(f"{cls.__name__} cannot be built: {first_line(error)}.") from error
    ratios = _ratios(model, dense, structure)
    _check_even(dense, ratios)
    base, why, found = plain(model), "", False
    known = {} if known is None else known
    for change in _changes(base, set().union(*ratios.values()), structure["biases"]):
        fields = ", ".join(f"{name}={value}" for (_, name), value in change.items())
        key = tuple(change.items())
        try:
            if key not in known:
                config = as_read(_changed(base, change))
                known[key] = config, on_meta(cls, config)
            config, like = known[key]
            cuts, zeros, computed = _fits(model, like, structure)
        except CannotStateError as error:
            why = why or f"with {fields}, {error.args[0]}"
        except Exception as error:  # whatever a class or its config objects to
            why = why or f"{fields} is refused: {first_line(error.__cause__ or error)}"
        else:
            found = True
            shapes = {name: tensor.shape for name, tensor in like.state_dict().items()}
            yield Statement(cls, config, cuts, zeros, computed, shapes, fields)
    if not found:
        raise CannotStateError(
            f"{cls.__name__} cannot state it: {why or 'its config has no number of heads'}".rstrip(".") + "."
        )


def dense_class(model: nn.Module) -> type:
    """The class of a model; where that came out of the code that headprune put into a pruned folder, the class of transformers that
    it builds on. Not so for other code: what a class adds to one of transformers may change its answers."""
    cls = type(model)
    if not cls.__module__.endswith(".modeling_headprune"):
        return cls
    return next((c for c in cls.__mro__ if c.__module__.startswith("transformers.models.")), cls)


def plain(model: nn.Module) -> Any:
    """A copy of a model's config without what headprune added."""
    config = copy.deepcopy(model.config)
    for name in ("headprune", "auto_map"):
        vars(config).pop(name, None)
    return config


def configs_in(config: Any) -> list[Any]:
    """A config and those in it."""
    below = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return [config, *(c for sub in below if sub is not None for c in configs_in(sub))]


def as_read(config: Any) -> Any:
    """A config as it is once it was written to a file and read again; raises what the class objects to."""
    read: Any = type(config).from_dict(json.loads(config.to_json_string()))
    for new, old in zip(configs_in(read), configs_in(config), strict=True):
        if hasattr(new, "validate"):
            new.validate()
        new._attn_implementation = getattr(old, "_attn_implementation", None)
    return read


def on_meta(cls: Any, config: Any) -> nn.Module:
    """A model of a class without weights."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        made: nn.Module = cls(copy.deepcopy(config))
    return made


def pattern(name: str) -> str:
    """What the names of a module in all layers have in common.

    >>> pattern("encoder.layer.11.attention.self")
    'encoder.layer.#.attention.self'
    """
    return _DIGITS.sub("#", name)


def _ratios(model: nn.Module, dense: nn.Module, structure: Structure) -> dict[str, frozenset[Fraction]]:
    """For every module that changed, by what its sizes and numbers did."""
    own, found = dict(model.named_modules()), {}
    for name, module in dense.named_modules():
        entry = structure["modules"].get(name, {})
        pairs = [(getattr(own[name], n), getattr(module, n, None)) for n in entry.get("numbers", ())]
        pairs += [
            (new, getattr(module.config, n, None)) for e in entry.get("configs", {}).values() for n, new in e.items()
        ]
        for tensor, shape in entry.get("tensors", {}).items():
            old = {**module._parameters, **module._buffers}.get(tensor)
            pairs += [] if old is None else list(zip(shape, old.shape, strict=False))
        found[name] = frozenset(
            Fraction(new, old) for new, old in pairs if isinstance(old, int) and old and new and new != old
        )
    return found


def _check_even(dense: nn.Module, ratios: dict[str, frozenset[Fraction]]) -> None:
    """Refuse other numbers of heads in other layers of one kind.

    Raises:
        CannotStateError: It names two.
    """
    first: dict[tuple[str, type], str] = {}
    for name, module in dense.named_modules():
        other = first.setdefault((pattern(name), type(module)), name)
        if ratios[other] != ratios[name]:
            raise CannotStateError(
                f"{other} and {name} keep different shares of their heads ({_shares(ratios[other])}, {_shares(ratios[name])}), and a "
                "stock class has one number for all layers."
            )


def _shares(ratios: Iterable[Fraction]) -> str:
    return " and ".join(map(str, sorted(ratios))) or "all"


def _changes(base: Any, ratios: set[Fraction], biases: Sequence[str]) -> Iterator[Change]:
    """What may be new in a config: numbers of heads, and where that is not enough a head's width; and flags that give biases."""
    parts = configs_in(base)
    fields = [
        (i, name)
        for i, part in enumerate(parts)
        for name, value in vars(part).items()
        if "head" in name and not name.startswith("_") and not _WIDTH.search(name) and type(value) is int and value > 0
    ]
    values = [vars(parts[i])[name] for i, name in fields]
    alike = [tuple(_share(value, ratio) for value in values) for ratio in sorted(ratios)]
    mixed = islice(product(*([*dict.fromkeys((*(_share(v, r) for r in sorted(ratios)), v))] for v in values)), TRIED)
    for numbers in islice(dict.fromkeys((*alike, *mixed)), TRIED):
        new: Change = {field: n for field, n, old in zip(fields, numbers, values, strict=True) if n != old}
        for flag in _flags(parts) if biases else [()]:
            flagged: Change = {**new, **dict.fromkeys(flag, True)}
            if flagged:
                yield flagged
            if widths := _widths(parts, new):
                yield {**flagged, **widths}


def _changed(base: Any, change: Change) -> Any:
    made = copy.deepcopy(base)
    parts = configs_in(made)
    for (i, name), value in change.items():
        setattr(parts[i], name, value)
    return made


def _share(value: int, ratio: Fraction) -> int:
    """A share of a number of heads; all of them, where that is no whole number."""
    part = value * ratio
    return int(part) if part.denominator == 1 and part > 0 else value


def _flags(parts: Sequence[Any]) -> list[tuple[Field, ...]]:
    """Flags that may give W_O a bias: each alone, then all."""
    found = [
        (i, name)
        for i, part in enumerate(parts)
        for name, value in vars(part).items()
        if "bias" in name and value is False
    ]
    return [*((f,) for f in found), tuple(found)]


def _widths(parts: Sequence[Any], new: Change) -> Change:
    """A head's width, said in so many words where a class would divide by the number of heads."""
    found: dict[Field, int] = {}
    for i, name in new:
        whole, heads, width = (_value(parts[i], field) for field in ("hidden_size", name, "head_dim"))
        if type(width) is not int and isinstance(whole, int) and isinstance(heads, int) and whole % heads == 0:
            found[i, "head_dim"] = min(whole // heads, found.get((i, "head_dim"), whole))
    return dict(found)


def _value(config: Any, name: str) -> Any:
    """A field of a config; None where there is none, or one for each layer, which transformers raises an error of its own for."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _fits(
    model: nn.Module, like: nn.Module, structure: Structure
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """What of the model's tensors is to be cut, filled in and left out for a class that has the shapes of ``like``.

    Raises:
        CannotStateError: The first tensor that has no place, or another shape.
    """
    ours, theirs = model.state_dict(), like.state_dict()
    buffers = dict(like.named_buffers())
    cuts: dict[str, Any] = {}
    computed = []
    for name, tensor in ours.items():
        if name not in theirs:
            if name not in buffers or buffers[name].shape != tensor.shape:
                repaired = " (a repair gave it)" if name.removesuffix(".bias") in structure["biases"] else ""
                raise CannotStateError(f"{name} has no place{repaired}")
            computed.append(name)
        elif theirs[name].shape != tensor.shape:
            cuts[name] = _cut(name, tensor, theirs[name].shape, structure, like)
    zeros = tuple(name for name in theirs if name not in ours)
    for name in zeros:
        if theirs[name].ndim != 1 or not name.endswith("bias"):
            raise CannotStateError(f"there is no {name}")
    return cuts, zeros, tuple(computed)


def _cut(
    name: str, tensor: Tensor, shape: Sequence[int], structure: Structure, like: nn.Module
) -> tuple[int, tuple[int, ...]]:
    """The dimension and the entries of a table for all heads that belong to the kept ones.

    Raises:
        CannotStateError: It is no such table; or layers that share it keep different heads.
    """
    differing = [d for d, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b]
    text = f"{name} is {list(shape)}, in the pruned model {list(tensor.shape)}"
    if len(differing) != 1 or tensor.ndim != len(shape):
        raise CannotStateError(text)
    dim, carriers = differing[0], _carriers(structure)
    owner, beneath = name, list[str]()
    while not beneath and owner:
        owner = owner.rpartition(".")[0]
        beneath = [c for c in carriers if f"{c}.".startswith(f"{owner}." if owner else "")]
    kinds = {pattern(c) for c in beneath}
    tables = sum(pattern(n) == pattern(name) for n in like.state_dict())
    sharing = [c for c in carriers if pattern(c) in kinds]
    takers = beneath if tables == len(sharing) else sharing
    taken = {carriers[c] for c in takers}
    fitting = [kept for heads, kept in taken if heads == tensor.shape[dim] and len(kept) == shape[dim]]
    if len(taken) > 1:
        raise CannotStateError(f"{name} is shared by {len(takers)} layers, and they keep different heads")
    if not fitting:
        raise CannotStateError(text)
    return dim, fitting[0]


def _carriers(structure: Structure) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Modules that take the kept heads' part of something for all heads: name -> (heads, which are kept)."""
    found = {}
    for name, entry in structure["modules"].items():
        carried = entry.get("carried", {})
        for data in (carried.get("position_bias"), carried.get("arguments")):
            if data is not None:
                found[name] = data["num_heads"], from_ranges(data["kept"])
    return found


def meta_copy(model: nn.Module) -> nn.Module:
    """A pruned model again, without weights."""
    made, structure = on_meta(dense_class(model), plain(model)), structure_of(model)
    restructure(made, structure)
    return made
