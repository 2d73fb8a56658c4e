"""Sets of features per head, and helpers that read them from small autograd graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

Key = TypeVar("Key", str, tuple[str, int], str | int)


class Uses:
    """The entries of parameters and buffers that each head reads, along every dimension."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.entries: dict[tuple[str, int], list[set[int]]] = {}

    def add(self, head: int, name: str, gradient: Tensor) -> None:
        """Add the entries of a tensor that a head reads: those where the gradient is not zero."""
        for dim in range(gradient.ndim):
            self.entries.setdefault((name, dim), empty_sets(self.heads))[head] |= nonzero(gradient.movedim(dim, -1))

    def merge_into(self, tables: dict[tuple[str, int], list[set[int]]]) -> None:
        """Add to ``tables`` the dimensions along which every head reads entries that are not common to all heads."""
        for key, heads in self.entries.items():
            shared = set.intersection(*heads)
            if self.heads > 1 and all(h - shared for h in heads):
                merge(tables, {key: [h - shared for h in heads]})


def empty_sets(heads: int) -> list[set[int]]:
    """An empty set of features for each head."""
    return [set() for _ in range(heads)]


def is_matrix(weight: Tensor) -> bool:
    """Whether a weight is a matrix ``[out, in]``, or a convolution's with kernel size 1."""
    return weight.ndim >= 2 and set(weight.shape[2:]) <= {1}


def overlap(features: Sequence[set[int]]) -> bool:
    """Whether some heads share features."""
    return sum(map(len, features)) != len(set().union(*features))


def disjoint(features: Sequence[set[int]]) -> bool:
    """Whether every head has features, and no two heads share one."""
    return bool(features) and all(features) and not overlap(features)


def alike(features: Sequence[set[int]]) -> bool:
    """Whether all heads have the same features."""
    return all(own == features[0] for own in features)


def users_of(features: Sequence[set[int]]) -> dict[int, frozenset[int]]:
    """The heads that have each feature."""
    every = set().union(*features)
    return {feature: frozenset(h for h, own in enumerate(features) if feature in own) for feature in every}


def sharing(rows: Sequence[Sequence[set[int]]], heads: int) -> tuple[tuple[int, ...], ...]:
    """The groups of heads that share features within the group, but not with all heads; () if there are none."""
    group = {h: frozenset({h}) for h in range(heads)}
    for features in rows:
        for together in {users for users in users_of(features).values() if len(users) < heads}:
            whole = frozenset().union(*(group[h] for h in together))
            group.update(dict.fromkeys(whole, whole))
    groups = sorted({tuple(sorted(g)) for g in group.values()})
    return tuple(groups) if any(len(g) > 1 for g in groups) else ()


def filled(features: list[set[int]], size: int) -> list[set[int]]:
    """Each head's features with gaps filled, which arise if an activation is zero for every token of the example.

    If every head has its own block of ``size / heads`` features, an unused feature belongs to the head of its block. Otherwise
    it belongs to the heads on both sides of it, if they are the same. If this guess is wrong, the proof fails.
    """
    users = users_of(features)
    if len(users) in (0, size):
        return features
    block, rest = divmod(size, len(features))
    if block and not rest and len(users) > size // 2 and all(u == {f // block} for f, u in users.items()):
        return [set(range(h * block, (h + 1) * block)) for h in range(len(features))]
    result = [set(own) for own in features]
    for before, after in pairwise(sorted(users)):
        if users[before] == users[after]:
            for h in users[before]:
                result[h].update(range(before + 1, after))
    return result


def merge(into: dict[Key, list[set[int]]], rows: Mapping[Key, list[set[int]]]) -> None:
    """Add each head's features in ``rows`` to those in ``into``."""
    for key, heads in rows.items():
        known = into.get(key, empty_sets(len(heads)))
        into[key] = [old | new for old, new in zip(known, heads, strict=True)]


def nonzero(gradient: Tensor) -> set[int]:
    """The indices of the last dimension at which ``gradient`` has a non-zero entry."""
    gradient = gradient.detach() if gradient.element_size() > 1 else gradient.detach().float()  # float8 is for storage
    flat = gradient.nan_to_num().reshape(-1, gradient.shape[-1])
    return set((flat != 0).any(dim=0).nonzero().flatten().tolist())


def memory(tensor: Tensor) -> int:
    """A tensor's memory address; for a meta tensor, which has no memory, the object's id."""
    return id(tensor) if tensor.device.type == "meta" else tensor.data_ptr()


def nodes_of(tensor: Tensor | None) -> dict[Any, None]:
    """Every node of a tensor's autograd graph, in a fixed order."""
    nodes: dict[Any, None] = {}
    stack = [tensor.grad_fn if tensor is not None else None]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            stack.extend(parent for parent, _ in node.next_functions)
    return nodes


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaf tensors of a tensor's autograd graph."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in nodes_of(tensor) if hasattr(node, "variable")]
