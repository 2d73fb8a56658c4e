"""A removal of heads, the ways in which it may have to change modules, and the integers by which these count heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads, Layers
from headprune.errors import HeadPruneError
from headprune.offload import is_elsewhere


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
    """

    layers: tuple[AttentionLayer, ...]
    drop: Heads
    widths: str = "none"
    cut_arguments: bool = False
    own_config: bool = False
    side_modules: bool = False
    narrow: bool = False
    by_group: bool = False

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
    choices: dict[str, Any] = {
        "by_group": both, "narrow": both, "side_modules": both if sides else no, "own_config": both,
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
                raise HeadPruneError(f"Layer {layer.name} cannot be pruned: {why}.", hint)


def left_as_ghosts(layers: Layers, drop: Heads) -> tuple[str, ...]:
    """Layers that lose all heads, but keep one with zero output."""
    return tuple(a.name for a in layers if a.bypass == "ghost" and len(drop[a.name]) == a.num_heads)


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
