"""Orders of removal: units of heads, the user's constraints, and the nested plans that an order's prefixes give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from headprune.attention import AttentionLayer, Heads, Layers, layer_named
from headprune.errors import HeadPruneError
from headprune.plans import PruningPlan

GROUPS, SLICES = "groups", "slices"


@dataclass(frozen=True)
class Constraints:
    """Heads that the user wants to keep.

    Attributes:
        protect: Heads that stay, ``{layer_name: [head, ...]}``.
        min_heads: Query heads that every layer keeps at least (a layer with fewer keeps all).
    """

    protect: Heads = field(default_factory=dict)
    min_heads: int = 0

    @classmethod
    def parse(cls, protect: str | Iterable[str], layers: Layers, min_heads_per_layer: int = 0) -> Constraints:
        """Constraints from addresses: ``"L0,L3.H7"``, where a layer's full name serves as well as ``L0``.

        Raises:
            HeadPruneError: An address that names no layer or no head, or a negative number of heads.
        """
        if min_heads_per_layer < 0:
            raise HeadPruneError(f"{min_heads_per_layer} heads per layer make no sense.", "Give 0 or more.")
        texts = protect.split(",") if isinstance(protect, str) else protect
        protected: dict[str, set[int]] = {}
        for text in filter(None, map(str.strip, texts)):
            layer, heads = _address(text, layers)
            protected.setdefault(layer.name, set()).update(heads)
        ordered = {layer.name: sorted(protected[layer.name]) for layer in layers if layer.name in protected}
        return cls(ordered, min_heads_per_layer)

    def protected(self, layer: AttentionLayer) -> frozenset[int]:
        """The heads of a layer that must stay."""
        return frozenset(self.protect.get(layer.name, ()))

    def room(self, layer: AttentionLayer) -> int:
        """How many heads a layer may lose, by ``min_heads``; protected heads are not counted here."""
        return max(layer.num_heads - self.min_heads, 0) if layer.prunable else 0

    def check(self, keep: int, layers: Layers) -> None:
        """Refuse a number of heads that no plan can keep, whatever its order.

        Raises:
            HeadPruneError: More than ``keep`` heads have to stay.
        """
        able = (min(self.room(layer), layer.num_heads - len(self.protected(layer))) for layer in layers)
        least = sum(layer.num_heads for layer in layers) - sum(able)
        if keep < least:
            message = f"{least} heads have to stay ({'; '.join(why_stay(layers, self))}), so {keep} is out of reach."
            raise HeadPruneError(message, f"Keep at least {least}.")


def _address(text: str, layers: Layers) -> tuple[AttentionLayer, Iterable[int]]:
    single = re.fullmatch(r"(.+)\.H(\d+)", text)
    if single is None or any(layer.name == text for layer in layers):
        layer = layer_named(text, layers)
        return layer, range(layer.num_heads)
    layer, head = layer_named(single[1], layers), int(single[2])
    if head >= layer.num_heads:
        message = f"Layer {layer.title} has no head {head}."
        raise HeadPruneError(message, f"It has {layer.num_heads}: 0 to {layer.num_heads - 1}.")
    return layer, [head]


class Unit(NamedTuple):
    """Heads of one layer that are removed together. Units sort by score, then by position.

    Attributes:
        score: The mean of its heads' scores.
        layer: Position of the layer.
        heads: The heads.
    """

    score: float
    layer: int
    heads: tuple[int, ...]


def units_of(layers: Layers, values: Mapping[str, Tensor], constraints: Constraints, kind: str) -> list[list[Unit]]:
    """The units that may be removed from every layer, lowest score first.

    The units of highest score that a layer needs to keep ``constraints.min_heads`` heads are left out.

    Args:
        values: ``{layer_name: [num_heads]}``, higher is more important.
        kind: How heads that share key/value heads are removed: ``"groups"`` takes one whole group at a time,
            ``"slices"`` one query head of every group, the lowest score in each group first. Heads that share none are
            single units either way.
    """
    units_by_layer = []
    for i, layer in enumerate(layers):
        scores = values[layer.name].tolist()
        heads = grouped(layer, constraints)
        if kind == SLICES and layer.groups:
            protected = constraints.protected(layer)
            heads = sliced(layer, {h: score for h, score in enumerate(scores) if h not in protected})
        units = sorted(Unit(sum(scores[h] for h in unit) / len(unit), i, unit) for unit in heads)
        gone = accumulate(len(unit.heads) for unit in units)
        units_by_layer.append([u for u, n in zip(units, gone, strict=True) if n <= constraints.room(layer)])
    return units_by_layer


def grouped(layer: AttentionLayer, constraints: Constraints) -> list[tuple[int, ...]]:
    """The heads or key/value groups of a layer without a protected head: a group cannot be removed in part."""
    protected = constraints.protected(layer)
    return [unit for unit in layer.units if not protected & set(unit)]


def sliced(layer: AttentionLayer, scores: Mapping[int, float]) -> list[tuple[int, ...]]:
    """Slices of a layer with key/value groups: each has one head of every group, lowest scores first.

    Args:
        scores: Of the heads that may be removed. The group with the fewest of these sets the number of slices.
    """
    queues = [sorted((h for h in group if h in scores), key=lambda h: (scores[h], h)) for group in layer.groups]
    return [tuple(sorted(heads)) for heads in zip(*queues, strict=False)]


def has_groups(layers: Layers) -> bool:
    """Whether heads share key/value heads, so that groups or slices of them may be removed."""
    return any(layer.groups and layer.prunable for layer in layers)


def why_stay(layers: Layers, constraints: Constraints) -> tuple[str, ...]:
    """The reasons why some heads cannot be removed."""
    reasons = []
    fixed = [layer for layer in layers if not layer.prunable]
    if fixed:
        more = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
        reasons.append(f"{fixed[0].title}{more}: {fixed[0].reason}")
    if constraints.protect:
        reasons.append(f"protected: {addresses(constraints.protect, layers)}")
    if constraints.min_heads:
        reasons.append(f"at least {constraints.min_heads} in every layer")
    return tuple(reasons)


def addresses(heads: Heads, layers: Layers) -> str:
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


@dataclass(frozen=True)
class Order:
    """An order of removal; each of its prefixes is a plan.

    Attributes:
        heads: How many heads each layer has, in the model's order.
        steps: Heads removed together, first to last: a head, a key/value group, one of every group or of every layer.
        strategy: How the order was made.
        method: The scores it was made from, if any.
        model: Fingerprint of the model it is for.
        stays: Why the heads that are in no step stay.
        notes: What else a reader should know.
        stock: Whether the model's stock class can represent every plan, as far as names and shapes tell.
    """

    heads: dict[str, int]
    steps: tuple[Heads, ...]
    strategy: str = ""
    method: str = ""
    model: str = ""
    stays: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stock: bool = False

    @property
    def total(self) -> int:
        """Heads of all layers."""
        return sum(self.heads.values())

    @property
    def least(self) -> int:
        """Heads left after all steps."""
        return self.kept()[-1]

    def kept(self) -> tuple[int, ...]:
        """Heads left after 0, 1, … all steps: ``len(steps) + 1`` falling numbers."""
        return tuple(self.total - gone for gone in accumulate(map(_size, self.steps), initial=0))

    def after(self, steps: int) -> PruningPlan:
        """The plan that removes the heads of the first ``steps`` steps."""
        gone: Heads = {}
        for step in self.steps[:steps]:
            for name, heads in step.items():
                gone.setdefault(name, []).extend(heads)
        drop = {name: sorted(gone[name]) for name in self.heads if name in gone}
        kept = self.total - sum(map(len, drop.values()))
        notes = (*self.notes, *(f"Some heads stay: {reason}." for reason in self.stays))
        return PruningPlan(drop, kept, self.total, kept, self.method, self.model, notes, self.strategy)

    def plan(self, keep: int) -> PruningPlan:
        """The plan that keeps the most heads, but no more than ``keep``.

        Raises:
            HeadPruneError: More than ``keep`` heads have to stay.
        """
        kept = self.kept()
        if keep < kept[-1]:
            why = f" ({'; '.join(self.stays[:3])})" if self.stays else ""
            by = f"by {self.strategy or 'this order'}{why}"
            message = f"{kept[-1]} heads cannot be pruned {by}, so {keep} is out of reach."
            raise HeadPruneError(message, f"Keep at least {kept[-1]}.")
        steps = next(n for n, k in enumerate(kept) if k <= keep)
        plan = self.after(steps)
        if plan.kept == keep:
            return plan
        size = _size(self.steps[steps - 1])
        note = f"{plan.kept} of {plan.total} heads are kept, not {keep}: they go {size} at a time."
        return replace(plan, asked=keep, notes=(note, *plan.notes))

    def reaches(self, keep: int) -> bool:
        """Whether some plan keeps at least 1 and at most ``keep`` heads."""
        return self.least <= keep and any(0 < kept <= keep for kept in self.kept())

    def some(self, keep: int) -> PruningPlan:
        """As `plan`, but refuses a plan that keeps no head.

        Raises:
            HeadPruneError: The last heads can only be removed together, so that none would stay; or as `plan`.
        """
        plan = self.plan(keep)
        if not plan.kept:
            least = min(kept for kept in self.kept() if kept)
            message = f"The last {least} heads go together by {self.strategy or 'this order'}, so with no more than {keep} none would stay."
            raise HeadPruneError(message, f"Keep at least {least}.")
        return plan


def _size(step: Mapping[str, Sequence[int]]) -> int:
    """The number of heads in a step."""
    return sum(map(len, step.values()))
