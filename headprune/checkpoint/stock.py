"""A pruned model as an instance of its stock class, proved equal.

A stock class has one number of heads (and of key/value heads) for all layers, out of its config. No list says which classes can
have which: configs are tried on models without weights, until names and shapes of tensors fit; then answers are compared.
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

TRIED = 48  # configs, at most
_WIDTH = re.compile(r"dim|size|width|channels")  # what a head's width, and not the number of heads, is called

Field = tuple[int, str]
"""A field of a config: which of `configs_in`, and its name."""
Change = dict[Field, Any]
"""New values of fields."""
Built = dict[tuple[Any, ...], tuple[Any, nn.Module]]
"""Configs and models without weights, by the change that made them."""


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


def to_stock(model: nn.Module) -> Any:
    """The pruned model as one of its stock class: what `from_pretrained` would make of its folder.

    It shares the model's weights, so it takes hardly any memory; the model stays as it is.

    Raises:
        NotStockError: The class cannot represent it, or does not give its answers.
    """
    why = None
    for candidate in stock_configs(model):
        try:
            stock = _filled(model, candidate)
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


def _fit(model: nn.Module, like: nn.Module, structure: Structure) -> tuple[Any, Any, Any]:
    """What of the model's tensors a class that has the shapes of ``like`` takes otherwise: `StockConfig`'s cuts, zeros and computed.

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


def empty_model(cls: Any, config: Any, attention: str | None) -> Any:
    """A model of a class whose parameters are on the meta device, with an implementation of attention where its parts have that.

    Buffers are computed as the class does it; no random number is used up.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(), torch.random.fork_rng(devices=[]):
        try:
            return cls._from_config(copy.deepcopy(config), attn_implementation=attention)
        except ValueError:  # a part has another, such as a convolutional backbone: each takes its own
            config._attn_implementation = None
            return cls._from_config(config)


def _filled(model: Any, target: StockConfig) -> Any:
    """A model of the stock class with the pruned model's own tensors, which it shares; in everything else like that model.

    Raises:
        NotStockError: It computes other buffers than the pruned model has.
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
    # It is dispatched as the model is; `state` has placeholders for what is kept elsewhere.
    for name, module in copied(model).named_modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # it finds the weights by their names
            add_hook_to_module(stock.get_submodule(name), hook)
    for name, value in other.items():
        owner, _, last = name.rpartition(".")
        if is_elsewhere(stock.get_submodule(owner), last):
            put(stock.get_submodule(owner), last, value)
    return stock
