"""A removal of heads: the ways in which it may have to change modules, and the cut itself, which can be undone.

The old tensors are kept until the cut is proved, so the model is not copied.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, HeadFeatures, Heads, Layers
from headprune.errors import HeadPruneError
from headprune.inputs import is_transposed, model_device
from headprune.offload import hook_of, is_elsewhere, put, value_of, with_numbers
from headprune.pruned import MultiheadAttention, hooks, is_ours
from headprune.pruned.hooks import Features, surviving
from headprune.pruned.modules import ConfigView, OnlyBias, emptied
from headprune.pruned.structure import Edited, hold, holder_of, replace_by_stand_in, set_module
from headprune.running import restorer


@dataclass(frozen=True)
class Removal:
    """Heads to remove, and how: enough to repeat a prune on a fresh copy of the model (`headprune.load` does).

    Attributes:
        layers: The layers that lose heads.
        drop: ``{layer_name: [head, …]}``.
        widths: Which integers that equal heads * head_dim shrink with the heads, a key of `WIDTHS`.
        cut_arguments: Whether arguments are cut whose shape suggests that they hold something for each head.
        own_config: Whether the counts of heads in modules' configs change too.
        side_modules: Whether the counts of `AttentionLayer.side_modules` change too.
        narrow: Whether modules' inputs claim the width of the kept heads (`headprune.pruned.hooks.Narrowing`).
        by_group: Whether integers named after groups count groups (``num_kv_groups`` of some models), or else heads per
            group (``num_key_value_groups`` of transformers).
        whole_group: Whether a layer that loses all heads keeps a group with zero output, as until 0.1.0, or else one head.
    """

    layers: tuple[AttentionLayer, ...]
    drop: Heads
    widths: str = "none"
    cut_arguments: bool = False
    own_config: bool = False
    side_modules: bool = False
    narrow: bool = False
    by_group: bool = False
    whole_group: bool = True

    @property
    def ghosts(self) -> tuple[str, ...]:
        """Layers that lose all heads, but keep one with zero output."""
        return tuple(a.name for a in self.layers if a.bypass == "ghost" and len(self.drop[a.name]) == a.num_heads)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Removal:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}  # an older file may lack some
        layers = tuple(map(AttentionLayer.from_json, data["layers"]))
        return cls(**known | {"layers": layers, "drop": {name: list(heads) for name, heads in data["drop"].items()}})


# Which integers that equal heads * head_dim shrink with the heads: some models reshape by them. As few as possible, because
# one that only scales (a softmax by the square root of the width) must stay. The proof decides.
WIDTHS: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "inner": lambda name: name not in {"embed_dim", "d_model", "hidden_size", "dim", "hidden_dim", "n_embd", "width"},
    "all": lambda name: True,
}


def ways(layers: Layers, drop: Heads) -> list[Removal]:
    """All ways to remove the heads, in the order in which they are tried: a trace cannot decide between them, the proof does."""
    # An argument with as many entries as heads may have one for each head; if so, the proof fails unless it is cut.
    arguments = any(not a.features for layer in layers for a in layer.arguments)
    sides, both, no = any(layer.side_modules for layer in layers), (False, True), (False,)
    emptied_groups = any(layer.groups and len(drop[layer.name]) == layer.num_heads for layer in layers)
    choices: dict[str, Any] = {
        "whole_group": both if emptied_groups else (True,), "by_group": both, "narrow": both, "side_modules": both if sides else no, "own_config": both,
        "cut_arguments": both if arguments else no, "widths": WIDTHS,
    }  # fmt: skip
    each = product(*choices.values())  # the last changes first
    return [Removal(tuple(layers), drop, **dict(zip(choices, way, strict=True))) for way in each]


def check_present(model: nn.Module, layer: AttentionLayer) -> None:
    """Refuse weights on the meta device, which can be neither cut nor proved, unless Accelerate keeps them elsewhere.

    Raises:
        HeadPruneError: Some of the layer's parameters are on the meta device, and no hook of their module loads them.
    """
    for owner, module in model.get_submodule(layer.module).named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not is_elsewhere(module, own):
                where = f"{owner}.{own}" if owner else own
                why = f"{where} has no numbers (it is on the meta device, and no hook of Accelerate on its module loads it)"
                hint = "Load the weights first; device_map= of from_pretrained may keep them on the CPU or on disk."
                raise HeadPruneError(f"Layer {layer.title} cannot be pruned: {why}.", hint)


# -- the cut ---------------------------------------------------------------------------------------------


def _of_all(earlier: Any, layer: AttentionLayer, kept: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many heads a layer had before its first prune, and which stay; ``earlier``: the last prune's data, if any."""
    if earlier is None:
        return layer.num_heads, tuple(kept)
    return earlier.num_heads, tuple(earlier.kept[h] for h in kept)


def snapshot(model: nn.Module) -> Callable[[], None]:
    """A function that restores what a model's modules hold now: attributes, tensors, hooks and submodules."""
    modules = [*model.modules()]
    own = [vars(module) for module in modules]
    parts = [part for each in own for part in each.values() if type(part) in (dict, OrderedDict, set)]
    elsewhere = [vars(hook) for hook in map(hook_of, modules) if hook is not None]
    return restorer([*own, *parts, *elsewhere])


def cut(model: nn.Module, removal: Removal) -> tuple[str, ...]:
    """Remove the heads of one `Removal`; returns what was set, to tell whether two ways of removal are the same."""
    cutter = _Cutter()
    for layer in removal.layers:
        cutter.cut_layer(model, layer, removal)
    return tuple(cutter.changes)


class _Cutter:
    """Removes the heads of one `Removal`, layer by layer.

    Attributes:
        changes: The attributes and hooks that were set, as texts.
    """

    def __init__(self) -> None:
        # Shared tensors stay shared. A cut tensor is kept beside its slice: while it lives, no other one has its id.
        self._slices: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self.changes: list[str] = []

    def cut_layer(self, model: nn.Module, layer: AttentionLayer, removal: Removal) -> None:
        """Remove the heads of one layer."""
        dropped = set(removal.drop[layer.name])
        attention = replace_by_stand_in(model, layer.module)
        kept = [h for h in range(layer.num_heads) if h not in dropped]
        ghost = not kept and layer.bypass == "ghost"
        if not kept and layer.bypass == "stub":
            _replace_by_bias(model, layer)
            return
        if ghost:
            kept = list(layer.units[0]) if removal.whole_group else [layer.units[0][0]]
        for part in layer.projections:
            self._slice(model.get_submodule(part.module), surviving(part.features, kept), output=True)
        for part in layer.selections:
            self._select(model.get_submodule(part.module), surviving(part.features, kept))
        shares_bias, of_torch = hooks.SharedPositionBias.needed_by(attention), is_ours(attention, MultiheadAttention)
        for table in () if shares_bias or of_torch else layer.tables:
            owner, _, name = table.name.rpartition(".")
            self._slice_table(model.get_submodule(owner), name, surviving(table.indices, kept), table.dim)
        self._cut_output(model, layer, kept, ghost)
        if of_torch:
            known: Any = attention.kept_heads or list(range(layer.num_heads))
            self._set(attention, "kept_heads", [known[h] for h in kept])
            key = next(part for part in layer.projections if part.module.endswith("k_proj"))
            for name in ("bias_k", "bias_v"):
                self._slice_tensor(attention, name, surviving(key.features, kept), dim=2)
        self._correct_counts(model, layer, removal, kept)
        if removal.narrow:
            narrow = hooks.Narrowing.of(attention)
            width = narrow.width if narrow else layer.num_heads * layer.head_dim
            self._attach(attention, hooks.Narrowing(width, len(kept) * layer.head_dim))
        if shares_bias:
            bias = hooks.SharedPositionBias.of(attention)
            self._attach(attention, hooks.SharedPositionBias(*_of_all(bias, layer, kept)))
        elif arguments := tuple(a for a in layer.arguments if a.features or removal.cut_arguments):
            earlier = hooks.HeadArguments.of(attention)
            arguments = earlier.arguments if earlier else arguments
            self._attach(attention, hooks.HeadArguments(arguments, *_of_all(earlier, layer, kept)))

    def _cut_output(self, model: nn.Module, layer: AttentionLayer, kept: Sequence[int], ghost: bool) -> None:
        """Remove heads' columns from W_O; a module without W_O places its heads' output instead."""
        place = layer.output_projection
        assert place is not None
        output, left = model.get_submodule(place.module), surviving(place.features, kept)
        if layer.concatenates:
            self._place(output, place, [] if ghost else kept, kept)
            return
        if layer.mixer and layer.gate:
            mixer = model.get_submodule(layer.mixer)
            self._place(mixer, layer.gate, kept, kept, before=True)
            self._select(mixer, left)
        self._slice(output, left, output=False, zero=ghost)

    def _correct_counts(self, model: nn.Module, layer: AttentionLayer, removal: Removal, kept: Sequence[int]) -> None:
        """Correct the numbers of heads in modules' attributes or configs, and clear what they cached for all heads."""
        left = len(kept), groups_left(layer, kept)
        for name in (*layer.inner_modules, *(layer.side_modules if removal.side_modules else ())):
            module = model.get_submodule(name)
            changes = partial(count_changes, layer=layer, left=left, removal=removal, beside=name != layer.module)
            for attribute, new in changes(vars(module)).items():
                self._set(module, attribute, new)
            if removal.own_config:
                self._set_config(module, changes)
            for attribute, cache in list(vars(module).items()):
                if type(cache) is dict and attribute[0] != "_" and any(isinstance(v, Tensor) for v in cache.values()):
                    self._set(module, attribute, {})

    # -- tensors ------------------------------------------------------------------------------------

    def _slice(self, module: nn.Module, features: Features, *, output: bool, zero: bool = False) -> None:
        """Keep some input or output features of a linear module; with ``zero``, the weights of heads become 0."""
        size = self._slice_tensor(module, "weight", features, int(output == is_transposed(module)), zero)
        if output:
            self._slice_tensor(module, "bias", features, 0)
        for name in ("out_features", "out_channels", "nf") if output else ("in_features", "in_channels", "nx"):
            if hasattr(module, name):
                self._set(module, name, size)

    def _slice_table(self, module: nn.Module, name: str, features: Features, dim: int) -> None:
        """Keep some entries of a parameter or buffer, and correct its module's counts of them."""
        size = self._slice_tensor(module, name, features, dim)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name == "weight":
            for statistic in ("running_mean", "running_var"):  # not differentiable, so never traced
                self._slice_tensor(module, statistic, features, dim)
            self._set(module, "num_features", size)
        elif isinstance(module, nn.modules.conv._ConvNd) and name == "weight" and dim == 0:
            if module.groups > 1:  # filters for some features, such as each head's: whole groups go
                self._set(module, "groups", module.groups * size // module.out_channels)
                self._set(module, "in_channels", module.in_channels * size // module.out_channels)
            self._set(module, "out_channels", size)

    def _slice_tensor(self, module: nn.Module, name: str, features: Features, dim: int, zero: bool = False) -> int:
        """Keep some entries (those of heads as zeros with ``zero``) of a parameter or buffer, if there is one; returns how many."""
        old = holder_of(module, name).get(name)
        if old is None:
            return 0
        index = features.index(old.shape[dim], torch.device("cpu"))

        def part(whole: Tensor) -> Tensor:
            left = whole.index_select(dim, index.to(whole.device))
            of_heads = [n for n, i in enumerate(index.tolist()) if i in features.kept]
            return left.index_fill(dim, torch.tensor(of_heads, device=left.device), 0) if zero else left

        if is_elsewhere(module, name):  # it is loaded, cut and stored again
            put(module, name, part(value_of(module, name)))
        else:
            key = (id(old), dim, tuple(index.tolist()), zero)
            if key not in self._slices:
                new = part(old.detach())
                self._slices[key] = old, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            hold(module, name, self._slices[key][1])
        Edited.add(module, tensors=(name,))
        return len(index)

    # -- attributes ---------------------------------------------------------------------------------

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set a plain attribute."""
        own = value.own if is_ours(value, ConfigView) else value
        self.changes.append(f"{id(module)} {name} {own if isinstance(own, int | dict | tuple | list) else type(own)}")
        vars(module)[name] = value
        if isinstance(value, int | list):
            Edited.add(module, numbers=(name,))

    def _set_config(self, module: nn.Module, count_changes: Callable[[dict[str, Any]], dict[str, int]]) -> None:
        """Give a module a view of its config with its own counts of heads, where it has a config."""
        for attribute, value in list(vars(module).items()):
            if hasattr(value, "to_dict") and not isinstance(value, nn.Module):
                original, own = (value.original, value.own) if is_ours(value, ConfigView) else (value, {})
                if changes := count_changes({**vars(original), **own}):
                    self._set(module, attribute, ConfigView(original, {**own, **changes}))

    # -- hooks; the heads of a second prune are numbered within what the first one kept --------------------

    def _attach(self, module: nn.Module, data: hooks.HookData) -> None:
        """Give a module data and the hooks that read it."""
        data.attach(module)
        self.changes.append(f"{id(module)} {data.name}")

    def _select(self, module: nn.Module, features: Features) -> None:
        """Pass on only some features of a module's output."""
        earlier = hooks.Selection.of(module)
        self._attach(module, hooks.Selection((*(earlier.stages if earlier else ()), features)))

    def _place(
        self, module: nn.Module, part: HeadFeatures, stay: Sequence[int], kept: Sequence[int], *, before: bool = False
    ) -> None:
        """Put the kept heads' output where it was among all heads, with zeros elsewhere.

        In the output of a module that returns its heads side by side; in the input (``before``) of a norm over all heads.
        """
        earlier = hooks.Placement.of(module)
        computed = sorted(f for h in kept for f in part.features[h])
        target = sorted(f for h in stay for f in part.features[h])
        # The trace before a second prune saw the output that the first one placed, with the same features.
        width = earlier.width if earlier else sum(map(len, part.features))
        self._attach(module, hooks.Placement(width, tuple(computed.index(f) for f in target), tuple(target), before))


def _replace_by_bias(model: nn.Module, layer: AttentionLayer) -> None:
    """Replace the whole attention module by W_O's bias."""
    assert layer.output_projection is not None
    attention, name = model.get_submodule(layer.module), layer.output_projection.module
    output: Any = model.get_submodule(name)
    bias: Tensor | None = getattr(output, "bias", None)
    if bias is not None and is_elsewhere(output, "bias"):  # so small that it stays on the model's device
        trained, bias = bias.requires_grad, value_of(output, "bias").to(model_device(model))
        bias.requires_grad_(trained)
    only_bias = OnlyBias(output, bias)
    if layer.output_inside:
        stub = emptied(attention, only_bias.width, bias, layer.output_arity)
    else:
        stub = emptied(attention, 0, None, layer.output_arity)
        set_module(model, name, with_numbers(only_bias))
    set_module(model, layer.module, with_numbers(stub))


# -- how many heads stay, and the integers that say so -----------------------------------------------


def groups_left(layer: AttentionLayer, kept: Sequence[int]) -> int:
    """Key/value groups that still have a head."""
    if not layer.groups:
        return 1 if layer.num_kv_heads == 1 else len(kept)
    return sum(1 for unit in layer.units if set(unit) & set(kept))


def count_changes(
    attributes: Mapping[str, Any], layer: AttentionLayer, left: tuple[int, int], removal: Removal, beside: bool
) -> dict[str, int]:
    """The integers among a module's attributes that count heads or their features, with their new values.

    Args:
        left: How many heads and key/value groups the layer keeps.
        removal: Says which integers that equal heads * head_dim shrink, and what integers named after groups count.
        beside: Whether the module is not the attention module: one for keys or values counts key/value heads as heads.
    """
    is_width, (heads_left, kv_left), size = WIDTHS[removal.widths], left, layer.head_dim
    heads, kv = (layer.num_heads, heads_left), (layer.num_kv_heads, kv_left)  # before and after
    of_group = layer.num_heads // layer.num_kv_heads, heads_left // kv_left if kv_left else 1
    # The first rule that fits a name and its value applies. LitGPT's ``n_query_groups`` counts key/value heads; a norm
    # over single heads has as many groups as heads.
    counts = [(_IN_GROUP, of_group), (_ANY_GROUPS, kv), (_ANY_GROUPS, heads)] if removal.by_group else []
    counts += [(_GROUPS, of_group), (_KV_HEADS, kv), (_HEADS, heads), *([(_HEADS, kv)] if beside else [])]
    widths = [(_HEAD_WIDTH, (size, size)), (_ANY, (heads[0] * size, heads_left * size))]
    widths += [(_KV_WIDTH, (kv[0] * size, kv_left * size))]

    def new(name: str, value: int) -> int:
        rules = counts + widths if is_width(name) and not _LENGTH.search(name) else counts
        return next((after for kind, (before, after) in rules if value == before and kind.search(name)), value)

    integers = {name: v for name, v in attributes.items() if type(v) is int and not name.startswith("_")}
    return {name: changed for name, value in integers.items() if (changed := new(name, value)) != value}


_ANY = re.compile("")
_HEADS = re.compile(r"heads$|^(n|num|nb)_?head$|^h$")
_KV_HEADS = re.compile(r"(kv|key_value).*heads?$|heads?_?kv$|^n_?kv")
_GROUPS = re.compile(r"(kv|key_value).*groups$|^n_rep$")
_ANY_GROUPS = re.compile(r"groups$|group_num$|groups_per_partition$")
_IN_GROUP = re.compile(r"group_size$|per_(kv|group)$")
_LENGTH = re.compile(
    r"window|len|position|block|ctx|context|seq|token|vocab|patch|chunk|bucket|image|max_|stride|kernel|landmark|latent|^num_"
)
_KV_WIDTH = re.compile(r"kv|key|value")
_HEAD_WIDTH = re.compile(r"head_(dim|size)$|^(dim|size)_(per_)?head$|^(d_kv|d_k|d_v|d_head|key_value_proj_dim)$")
