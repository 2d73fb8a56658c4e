"""What has gone so far in a search, and what may go next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headprune.attention import Heads
from headprune.planning.strategies import Search
from headprune.planning.units import SLICES, Unit, grouped


@dataclass
class State:
    """What has gone so far in a search.

    Attributes:
        drop: ``{layer_name: [head, ...]}``.
        steps: The same, in order.
    """

    search: Search
    drop: Heads = field(default_factory=dict)
    steps: list[Heads] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return sum(layer.num_heads for layer in self.search.layers) - sum(map(len, self.drop.values()))

    def fits(self, unit: Unit) -> bool:
        """Whether a unit is still there, and may go."""
        layer = self.search.layers[unit.layer]
        gone = self.drop.get(layer.name, [])
        room = self.search.constraints.room(layer) - len(gone)
        return len(unit.heads) <= room and not set(unit.heads) & set(gone)

    def take(self, *units: Unit) -> None:
        for unit in units:
            self.steps.append(self.search.step(unit))
            self.drop = self.without(unit)

    def without(self, unit: Unit) -> Heads:
        name = self.search.layers[unit.layer].name
        return {**self.drop, name: sorted([*self.drop.get(name, []), *unit.heads])}

    def remove(self, ranked: Sequence[Unit], level: int) -> None:
        """Take units in their order until no more than ``level`` heads are kept."""
        for unit in ranked:
            if self.kept <= level:
                return
            if self.fits(unit):
                self.take(unit)

    def copy(self, units: Iterable[Unit] = ()) -> State:
        """A state of its own, in which some more units are gone."""
        other = State(self.search, dict(self.drop), list(self.steps))
        other.take(*units)
        return other

    def units(self) -> list[Unit]:
        """What may go together: heads or key/value groups; single heads, where slices are to be made of them."""
        found = []
        for i, layer in enumerate(self.search.layers):
            if not layer.prunable:
                continue
            if self.search.kind == SLICES and layer.groups:
                protected = self.search.constraints.protected(layer)
                found += [Unit(0.0, i, (h,)) for group in layer.groups for h in group if h not in protected]
            else:
                found += [Unit(0.0, i, heads) for heads in grouped(layer, self.search.constraints)]
        return [unit for unit in found if self.fits(unit)]
