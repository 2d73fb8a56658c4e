"""Reading small autograd graphs: what depends on which features of which tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", str, tuple[str, int], str | int)


@dataclass(frozen=True)
class Heads:
    """Where the heads are in a tensor: ``indices[h]`` of dimension ``dim``.

    Four-dimensional attention has the heads in dimension 1; three-dimensional attention
    (batch * heads, tokens, …), as OPT's time and D2L wrote it, mixes them with the batch in dimension 0.
    """

    dim: int
    indices: tuple[tuple[int, ...], ...]

    @classmethod
    def along(cls, dim: int, count: int) -> Heads:
        """One head for each index of a dimension."""
        return cls(dim, tuple((h,) for h in range(count)))

    def repeated(self, size: int) -> Heads:
        """The same heads in a tensor that has ``size`` of them, each shared by several (grouped keys and values)."""
        repeat = max(1, len(self) // size) if self.dim == 1 else 1
        return Heads(self.dim, tuple(tuple(i // repeat for i in index) for index in self.indices))

    def take(self, tensor: Tensor, head: int) -> Tensor:
        """The part of a tensor that belongs to one head."""
        return tensor.index_select(self.dim, torch.tensor(self.indices[head], device=tensor.device))

    def __len__(self) -> int:
        return len(self.indices)


class Uses:
    """Which entries of parameters and buffers each head reads, along every dimension."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.used: dict[tuple[str, int], list[set[int]]] = {}

    def add(self, head: int, name: str, gradient: Tensor) -> None:
        """Note what a head reads of a tensor: where its gradient is not zero."""
        for dim in range(gradient.ndim):
            self.used.setdefault((name, dim), none_of(self.heads))[head] |= used(gradient.movedim(dim, -1))

    def merge_into(self, tables: dict[tuple[str, int], list[set[int]]]) -> None:
        """Add the dimensions along which every head reads entries that not all heads read."""
        for key, heads in self.used.items():
            shared = set.intersection(*heads)
            if self.heads > 1 and all(h - shared for h in heads):
                merge(tables, {key: [h - shared for h in heads]})


def none_of(heads: int) -> list[set[int]]:
    """No features for any head, to begin with."""
    return [set() for _ in range(heads)]


def is_matrix(weight: Tensor) -> bool:
    """Whether a weight is ``[out, in]``, or that of a convolution with a kernel of 1."""
    return weight.ndim >= 2 and set(weight.shape[2:]) <= {1}


def overlap(columns: Sequence[set[int]]) -> bool:
    """Whether some heads share features."""
    return sum(map(len, columns)) != len(set().union(*columns))


def apart(columns: Sequence[set[int]]) -> bool:
    """Whether every head has features, and no two heads share one."""
    return bool(columns) and all(columns) and not overlap(columns)


def merge(into: dict[Key, list[set[int]]], rows: Mapping[Key, list[set[int]]]) -> None:
    """Add each head's features to those that are known."""
    for key, heads in rows.items():
        known = into.get(key, none_of(len(heads)))
        into[key] = [mine | new for mine, new in zip(known, heads, strict=True)]


def used(gradient: Tensor) -> set[int]:
    """Indices of the last dimension that are not zero everywhere."""
    gradient = gradient.detach() if gradient.element_size() > 1 else gradient.detach().float()  # float8 is for storage
    flat = gradient.nan_to_num().reshape(-1, gradient.shape[-1])
    return set((flat != 0).any(dim=0).nonzero().flatten().tolist())


def memory(tensor: Tensor) -> int:
    """Where a tensor's numbers lie; the object itself for a meta tensor, which has none."""
    return id(tensor) if tensor.device.type == "meta" else tensor.data_ptr()


def nodes_of(tensor: Tensor | None) -> set[object]:
    """Every node of ``tensor``'s autograd graph."""
    seen, stack = set[object](), [tensor.grad_fn if tensor is not None else None]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(n for n, _ in node.next_functions)
    return seen


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The tensors where ``tensor``'s autograd graph starts."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    seen, stack, leaves = set(), [tensor.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(n for n, _ in node.next_functions)
    return leaves
