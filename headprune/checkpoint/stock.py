"""Convert a pruned model to an instance of its stock class, and prove the two equal.

A stock class takes one number of heads (and of key/value heads) for all layers from its config. headprune has no list of the numbers
that a class accepts. It tries configs on models without weights until all tensors' names and shapes fit, then compares the answers.
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
from headprune.checkpoint.probe import difference, prove_same_answers
from headprune.checkpoint.remote_code import NotStockError, configs_in, dense_class, is_stock, plain_config
from headprune.errors import first_line
from headprune.input_specs import record_specs, recorded
from headprune.inputs import model_device
from headprune.offload import Offloaded, copied, is_dispatched, is_elsewhere, put
from headprune.pruned import add_biases, add_record, from_ranges, record_of, restructure, structure_of
from headprune.pruned.structure import Structure
from headprune.surgery import remove
from headprune.surgery.proof import tolerance_of
from headprune.surgery.removal import ways

TRIED = 48  # the most configs to try
_WIDTH = re.compile(r"dim|size|width|channels")  # marks a field as a head's width, not a number of heads

Field = tuple[int, str]
"""A config's field: (index in `configs_in`, field name)."""
Change = dict[Field, Any]
"""New values of config fields."""


@dataclass(frozen=True)
class StockConfig:
    """How a stock class represents a pruned model.

    Attributes:
        cls: The class.
        config: Its config, after a round trip through JSON.
        cuts: Tensors that the pruned model keeps whole and slices in every forward pass, while the class holds only the kept heads' part:
            ``{name: (dim, indices)}``, such as T5's position bias table.
        zeros: Biases that the class has and the model lacks, filled with zeros: ``{name: shape}``.
        computed: Buffers in the model's state dict that the class computes itself.
        fields: The changed config fields, in words.
    """

    cls: type
    config: Any
    cuts: dict[str, tuple[int, tuple[int, ...]]]
    zeros: dict[str, torch.Size]
    computed: tuple[str, ...]
    fields: str


class StockCounts:
    """Tests which prunes a model's stock class can represent, by pruning copies on the meta device.

    Args:
        model: A transformers model, pruned before or not.
        layers: Its attention layers.
    """

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        self.model, self.layers = model, layers
        self.name = dense_class(model).__name__

    @classmethod
    def of(cls, model: nn.Module | None, layers: Layers) -> StockCounts | None:
        """The `StockCounts` of a transformers model; None for any other module, and for None."""
        return cls(model, layers) if model is not None and is_stock(dense_class(model)) else None

    def config_without(self, drop: Mapping[str, Sequence[int]]) -> StockConfig | None:
        """How the class represents the model without the heads in ``drop``; None if it cannot. Does not compare answers."""
        touched = [layer for layer in self.layers if drop.get(layer.name)]
        pruned = _meta_copy(self.model)
        remove(pruned, ways(touched, {n: list(h) for n, h in drop.items() if h})[0])
        try:
            return next(stock_configs(pruned), None)
        except NotStockError:
            return None

    def has_place_for_biases(self) -> bool:
        """Whether the class can represent biases added to every W_O that has none; also True if it can represent no prune at all."""
        fewest = {a.name: [h for unit in a.units[1:] for h in unit] for a in self.layers if a.prunable}
        if self.config_without(fewest) is None:
            return True
        with_biases = _meta_copy(self.model)
        outputs = {a.output_projection.module for a in self.layers if a.output_projection and not a.concatenates}
        add_biases(with_biases, [n for n in outputs if getattr(with_biases.get_submodule(n), "bias", None) is None])
        return StockCounts(with_biases, self.layers).config_without(fewest) is not None


def to_stock(model: nn.Module) -> Any:
    """The pruned model as an instance of its stock class, as `from_pretrained` would load it from its folder.

    The instance shares the model's weights, so it takes hardly any memory. The model itself does not change.

    Raises:
        NotStockError: The class cannot represent the model, or gives other answers.
    """
    why = None
    for candidate in stock_configs(model):
        try:
            stock = _build_stock_model(model, candidate)
            prove_same_answers(model, stock)
        except NotStockError as error:
            why = why or error
        except Exception as error:
            cls, fields = candidate.cls.__name__, candidate.fields
            why = why or NotStockError(f"{cls} with {fields} does not run: {first_line(error)}.")
        else:
            add_record(stock, record_of(model))
            record_specs(stock, recorded(model))
            return stock
    assert why is not None
    raise why


def stock_configs(model: nn.Module) -> Iterator[StockConfig]:
    """The configs with which a stock class has the pruned model's tensors, by name and shape; the most likely ones first.

    Args:
        model: A pruned transformers model; its weights may be on the meta device.

    Raises:
        NotStockError: No config fits.
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
    any_fits, why = False, ""
    for change in _changes(base, sorted(shares), structure["biases"]):
        fields = ", ".join(f"{name}={value}" for (_, name), value in change.items())
        try:
            config = _changed(base, change)
            fit = _fit(model, on_meta(cls, config), structure)
        except NotStockError as error:
            why = why or f"with {fields}, {error.args[0]}"
        except Exception as error:  # any error of the class or its config
            why = why or f"{fields} is refused: {first_line(error.__cause__ or error)}"
        else:
            any_fits = True
            yield StockConfig(cls, config, *fit, fields)
    if not any_fits:
        why = (why or "its config has no number of heads").rstrip(".")
        raise NotStockError(f"{cls.__name__} cannot represent it: {why}.")


def on_meta(cls: Any, config: Any) -> nn.Module:
    """A model of a class, with its weights on the meta device."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: nn.Module = cls(copy.deepcopy(config))
    return model


def pattern(name: str) -> str:
    """A module's name with ``#`` for every number, the same for all layers.

    >>> pattern("encoder.layer.11.attention.self")
    'encoder.layer.#.attention.self'
    """
    return re.sub(r"\d+", "#", name)


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a pruned model on the meta device, without weights."""
    again = on_meta(dense_class(model), plain_config(model))
    restructure(again, structure_of(model))
    return again


def _shares(model: nn.Module, dense: nn.Module, structure: Structure) -> set[Fraction]:
    """The shares of their heads that pruned modules keep, from the ratios of their sizes and counts; leaves out modules that keep all.

    Raises:
        NotStockError: Layers of one kind keep different shares; the error names two.
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
        shares = frozenset(
            Fraction(new, old) for new, old in pairs if isinstance(old, int) and old and new and new != old
        )
        other, others = first.setdefault((pattern(name), type(module)), (name, shares))
        if shares != others:
            both = ", ".join(" and ".join(map(str, sorted(each))) or "all" for each in (others, shares))
            why = f"keep different shares of their heads ({both}), and a stock class has one number for all layers"
            raise NotStockError(f"{other} and {name} {why}.")
        every |= shares
    return every


def _changes(base: Any, ratios: Sequence[Fraction], biases: Sequence[str]) -> Iterator[Change]:
    """Candidate changes of a config: other numbers of heads, with or without an explicit head width, and flags that add biases."""
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
    """A changed config after a round trip through JSON; raises the config class's own errors."""
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
    """``value * ratio``; or ``value``, if that is not a positive integer."""
    part = value * ratio
    return int(part) if part.denominator == 1 and part > 0 else value


def _widths(parts: Sequence[Any], new: Change) -> Change:
    """Explicit ``head_dim`` entries for configs whose class would divide the hidden size by the number of heads."""
    widths: dict[Field, int] = {}
    for i, name in new:
        values: dict[str, Any] = {}
        for field in ("hidden_size", name, "head_dim"):
            # A config may lack the field, or hold one value per layer, for which transformers raises its own errors.
            with suppress(Exception):
                values[field] = getattr(parts[i], field)
        whole, heads, width = values.get("hidden_size"), values.get(name), values.get("head_dim")
        if type(width) is not int and isinstance(whole, int) and isinstance(heads, int) and whole % heads == 0:
            widths[i, "head_dim"] = min(whole // heads, widths.get((i, "head_dim"), whole))
    return dict(widths)


def _fit(model: nn.Module, like: nn.Module, structure: Structure) -> tuple[Any, Any, Any]:
    """How the model's tensors map to those of ``like``, an instance of the stock class: `StockConfig`'s cuts, zeros and computed.

    Raises:
        NotStockError: A tensor has no counterpart, or another shape; the error names the first.
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
    """The head dimension of a table with entries for all heads, and the kept heads' indices in it.

    Raises:
        NotStockError: The tensor is no such table; or layers that share it keep different heads.
    """
    why = f"{name} is {list(shape)}, in the pruned model {list(tensor.shape)}"
    dims = [d for d, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b]
    # Modules that slice the kept heads' part out of a tensor for all heads: name -> (number of heads, kept heads).
    takers = {}
    for module, entry in structure["modules"].items():
        for kind in {"position_bias", "arguments"} & entry.get("carried", {}).keys():
            data = entry["carried"][kind]
            takers[module] = data["num_heads"], from_ranges(data["kept"])
    if len(dims) != 1 or tensor.ndim != len(shape) or not takers:
        raise NotStockError(why)
    nearest = max(takers, key=lambda module: len(commonprefix([module, name])))  # noqa: RUF071 (names, no paths)
    sharing = [module for module in takers if pattern(module) == pattern(nearest)]
    if sum(pattern(each) == pattern(name) for each in like.state_dict()) == len(sharing):  # one table per layer
        sharing = [nearest]
    if len({takers[module] for module in sharing}) > 1:
        raise NotStockError(f"{name} is shared by {len(sharing)} layers, and they keep different heads")
    heads, kept = takers[nearest]
    if (heads, len(kept)) != (tensor.shape[dims[0]], shape[dims[0]]):
        raise NotStockError(why)
    return dims[0], kept


def empty_model(cls: Any, config: Any, attention: str | None) -> Any:
    """A model of a class with parameters on the meta device, and with this attention implementation if all its parts support it.

    The class computes its buffers as usual; the state of the random number generator does not change.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(), torch.random.fork_rng(devices=[]):
        try:
            return cls._from_config(copy.deepcopy(config), attn_implementation=attention)
        except ValueError:  # a part, such as a convolutional backbone, lacks it: each takes its default
            config._attn_implementation = None
            return cls._from_config(config)


def _build_stock_model(model: Any, target: StockConfig) -> Any:
    """An instance of the stock class that shares the pruned model's tensors, and has its mode, devices and trainable parameters.

    Raises:
        NotStockError: The class computes other buffers than the pruned model has.
    """
    from accelerate.hooks import add_hook_to_module

    state, stored, other = model.state_dict(), Offloaded(model), dict[str, Tensor]()
    for name, (dim, kept) in target.cuts.items():
        whole = stored[name]
        other[name] = whole.index_select(dim, torch.tensor(kept, device=whole.device))
    for name, shape in target.zeros.items():
        other[name] = stored[f"{name.rpartition('.')[0]}.weight"].new_zeros(shape)
    computed = {name: state.pop(name) for name in target.computed}
    state |= other
    stock = empty_model(target.cls, target.config, getattr(target.config, "_attn_implementation", None))
    own, tolerance = dict(stock.named_buffers()), tolerance_of(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    for name, buffer in {**buffers, **computed}.items():
        if name in own and difference([own[name].cpu().double()], [buffer.cpu().double()]) > tolerance:
            raise NotStockError(f"{target.cls.__name__} computes another {name}.")
    stock.load_state_dict(state, assign=True)
    stock.tie_weights()
    trained = {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
    for name, parameter in stock.named_parameters():
        parameter.requires_grad_(trained.get(name, True) and parameter.is_floating_point())
    stock.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        stock.generation_config = model.generation_config
    if not is_dispatched(model):
        return stock.to(model_device(model))
    # Dispatch it as the model is dispatched; in `state`, offloaded weights are placeholders.
    for name, module in copied(model).named_modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # finds the weights by name
            add_hook_to_module(stock.get_submodule(name), hook)
    for name, value in other.items():
        owner, _, last = name.rpartition(".")
        if is_elsewhere(stock.get_submodule(owner), last):
            put(stock.get_submodule(owner), last, value)
    return stock
