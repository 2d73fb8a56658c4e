"""How many heads a pruned layer keeps, and the integers that say so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.attention import AttentionLayer


def groups_left(layer: AttentionLayer, kept: Sequence[int]) -> int:
    """Key/value groups that still have a head."""
    if not layer.groups:
        return 1 if layer.num_kv_heads == 1 else len(kept)
    return sum(1 for unit in layer.units if set(unit) & set(kept))


@dataclass(frozen=True)
class Counts:
    """How many heads and key/value groups a layer keeps, to correct the integers by which modules count them."""

    layer: AttentionLayer
    heads: int
    groups: int
    is_width: Callable[[str], bool]
    beside: bool  # not the attention module itself: a module that works on keys or values calls the key/value heads its heads
    by_group: bool = (
        False  # whether integers named for groups count the groups, or a group's heads (`Removal.by_group`)
    )

    def changed(self, fields: Mapping[str, Any]) -> dict[str, int]:
        """The integers among ``fields`` that count heads or their features, with their new values."""
        layer, kv = self.layer, self.layer.num_kv_heads
        found = {}
        for name, value in fields.items():
            if type(value) is not int or name.startswith("_"):
                continue
            if self.by_group and (new := self._by_group(name, value)) is not None:
                found[name] = new
            elif _GROUPS.search(name) and value == layer.num_heads // kv:
                found[name] = self.heads // self.groups if self.groups else 1
            elif _KV_HEADS.search(name) and value == kv:
                found[name] = self.groups
            elif _HEADS.search(name) and value == layer.num_heads:
                found[name] = self.heads
            elif _HEADS.search(name) and value == kv and self.beside:
                found[name] = self.groups
            elif (_HEAD_WIDTH.search(name) and value == layer.head_dim) or _LENGTH.search(name):
                continue
            elif self.is_width(name) and value == layer.num_heads * layer.head_dim:
                found[name] = self.heads * layer.head_dim
            elif self.is_width(name) and _KV_WIDTH.search(name) and value == kv * layer.head_dim:
                found[name] = self.groups * layer.head_dim
        return {name: new for name, new in found.items() if new != fields[name]}

    def _by_group(self, name: str, value: int) -> int | None:
        """What an integer becomes that is named for groups: LitGPT's ``n_query_groups`` is as many as there are key/value heads;
        the groups of a norm over single heads are as many as there are heads."""
        layer = self.layer
        if _IN_GROUP.search(name) and value == layer.num_heads // layer.num_kv_heads:
            return self.heads // self.groups if self.groups else 1
        if _ANY_GROUPS.search(name) and value in (layer.num_kv_heads, layer.num_heads):
            return self.groups if value == layer.num_kv_heads else self.heads
        return None


def names_groups(fields: Mapping[str, Any]) -> bool:
    """Whether an integer among them is named for groups, so that it matters what those count (`Counts.by_group`)."""
    return any(
        type(value) is int and bool(_IN_GROUP.search(name) or _ANY_GROUPS.search(name))
        for name, value in fields.items()
    )


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
