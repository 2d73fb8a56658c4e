"""What can go, and what must stay: heads, key/value groups or slices of them, under a user's constraints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from headprune.attention import AttentionLayer, Heads, layer_named
from headprune.errors import HeadPruneError

GROUPS, SLICES = "groups", "slices"


@dataclass(frozen=True)
class Constraints:
    """What a user wants to stay.

    Attributes:
        protect: Heads that stay, ``{layer_name: [head, ...]}``.
        min_heads: Query heads that every layer keeps, at least (all of them, where it has fewer).
    """

    protect: Heads = field(default_factory=dict)
    min_heads: int = 0

    @classmethod
    def parse(
        cls, protect: str | Iterable[str], layers: Sequence[AttentionLayer], min_heads_per_layer: int = 0
    ) -> Constraints:
        """Constraints from addresses: ``"L0,L3.H7"``, where a layer's full name serves as well as ``L0``.

        Raises:
            HeadPruneError: An address that names no layer or no head, or a negative number of heads.
        """
        if min_heads_per_layer < 0:
            raise HeadPruneError(f"{min_heads_per_layer} heads per layer make no sense.", "Give 0 or more.")
        texts = protect.split(",") if isinstance(protect, str) else protect
        found: dict[str, set[int]] = {}
        for text in filter(None, map(str.strip, texts)):
            layer, heads = _address(text, layers)
            found.setdefault(layer.name, set()).update(heads)
        ordered = {layer.name: sorted(found[layer.name]) for layer in layers if layer.name in found}
        return cls(ordered, min_heads_per_layer)

    def protected(self, layer: AttentionLayer) -> frozenset[int]:
        """The heads of a layer that must stay."""
        return frozenset(self.protect.get(layer.name, ()))

    def room(self, layer: AttentionLayer) -> int:
        """How many heads of a layer may go, whatever they are."""
        return max(layer.num_heads - self.min_heads, 0) if layer.prunable else 0


def _address(text: str, layers: Sequence[AttentionLayer]) -> tuple[AttentionLayer, Iterable[int]]:
    single = re.fullmatch(r"(.+)\.H(\d+)", text)
    if single is None or any(layer.name == text for layer in layers):
        layer = layer_named(text, layers)
        return layer, range(layer.num_heads)
    layer, head = layer_named(single[1], layers), int(single[2])
    if head >= layer.num_heads:
        raise HeadPruneError(
            f"Layer {layer.name} has no head {head}.", f"It has {layer.num_heads}: 0 to {layer.num_heads - 1}."
        )
    return layer, [head]


class Unit(NamedTuple):
    """Heads of one layer that go together. Units sort by score, then by position.

    Attributes:
        score: The mean of its heads' scores.
        layer: Position of the layer.
        heads: Which go.
    """

    score: float
    layer: int
    heads: tuple[int, ...]


def units_of(
    layers: Sequence[AttentionLayer], values: Mapping[str, Tensor], constraints: Constraints, kind: str = GROUPS
) -> list[list[Unit]]:
    """For every layer, the units that may go, those with the least score first.

    Units that a layer needs to keep ``constraints.min_heads`` are left out: those with the highest scores.

    Args:
        values: ``{layer_name: [num_heads]}``, higher is more important.
        kind: How heads that share key/value heads go: ``"groups"`` goes whole group by group, ``"slices"`` takes one
            query head from every group, those with the least score first within their groups. Where no heads share,
            single heads go either way.
    """
    found = []
    for i, layer in enumerate(layers):
        scores = values[layer.name].tolist()
        heads = _sliced(layer, scores, constraints) if kind == SLICES else grouped(layer, constraints)
        units = sorted(Unit(sum(scores[h] for h in unit) / len(unit), i, unit) for unit in heads)
        found.append(list(within(units, constraints.room(layer))))
    return found


def within(units: Iterable[Unit], room: int) -> Iterator[Unit]:
    """Units from the first on, until the next one does not fit into ``room`` heads."""
    for unit in units:
        room -= len(unit.heads)
        if room < 0:
            return
        yield unit


def grouped(layer: AttentionLayer, constraints: Constraints) -> list[tuple[int, ...]]:
    """A protected head keeps its whole group: the group's other heads cannot go without it."""
    protected = constraints.protected(layer)
    return [unit for unit in layer.units if not protected & set(unit)]


def _sliced(layer: AttentionLayer, scores: Sequence[float], constraints: Constraints) -> list[tuple[int, ...]]:
    if not layer.groups:
        return grouped(layer, constraints)
    protected = constraints.protected(layer)
    queues = [sorted((h for h in group if h not in protected), key=lambda h: (scores[h], h)) for group in layer.groups]
    return [tuple(sorted(heads)) for heads in zip(*queues, strict=False)]  # as many as the most protected group has


def why_stay(layers: Sequence[AttentionLayer], constraints: Constraints) -> tuple[str, ...]:
    """Why not all heads can go, a reason each."""
    reasons = []
    fixed = [layer for layer in layers if not layer.prunable]
    if fixed:
        more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
        reasons.append(f"{fixed[0].name}{more}: {fixed[0].reason}")
    if constraints.protect:
        reasons.append(f"protected: {addresses(constraints.protect, layers)}")
    if constraints.min_heads:
        reasons.append(f"at least {constraints.min_heads} in every layer")
    return tuple(reasons)


def addresses(heads: Heads, layers: Sequence[AttentionLayer]) -> str:
    """Heads as people write them: ``L0, L3.H7``.

    >>> addresses({"a": [0, 1], "b": [1]}, [AttentionLayer(n, i, "encoder", 2, 2, 4) for i, n in enumerate("ab")])
    'L0, L1.H1'
    """
    texts = []
    for layer in layers:
        listed = heads.get(layer.name, ())
        whole = len(listed) == layer.num_heads
        texts += [f"L{layer.index}"] if whole else [layer.label(h) for h in listed]
    return ", ".join(texts)
