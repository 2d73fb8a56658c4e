"""What a head does, in figures."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadProfile:
    """How one head attends: means over queries, each of them a token that is no padding.

    A share is the part of a query's attention (its weights sum to 1) that goes to some keys, 0 to 1. None stands for a figure
    that this layer cannot have: cross-attention has no previous token, an image no separator.

    Attributes:
        queries: How many queries the means are over.
        entropy: Of a query's weights, in nats.
        evenness: Entropy as a share of the largest possible one, ln(keys that the query may see); 1 is a plain average.
        largest: A query's largest weight.
        distance: From a query to what it attends to, weighted: in tokens, or for images in patches (Euclidean).
        reach: Distance as a share of what a plain average over the keys in sight would give.
        previous, next, itself: Shares of the keys at -1, +1 and 0 from the query.
        first: Share of the first token that is no padding.
        separator: Share of the separators, such as [SEP]; None where too few queries have one in sight (fewer than 20, and than half).
        same: Share of other positions with the query's own token, over the queries that have such a position in sight, at least 20.
        sink: Share of keys that are no tokens, such as a learned attention sink.
        rare: How many queries have their largest weight on one of the two tokens that are rarest in their example; frequencies
            are those of the data.
        rare_chance: How many would, if the largest weight were anywhere with the same probability.
        position, pointing: The most frequent place of the largest weight, from -8 to 8 tokens from its query, and how many queries
            have it there.
        induction, duplicate: On random tokens repeated once: the shares of the key after the query's first occurrence, and of that
            occurrence itself. Of causal language models only.
        role: In words: what `headprune.seeing.roles` calls it.
        because: The figure that justifies the role, in words.
        clarity: That figure, 0 to 1: of heads with the same role, the one with the largest shows it best.
    """

    queries: int
    entropy: float
    evenness: float | None = None
    largest: float = 0.0
    distance: float | None = None
    reach: float | None = None
    previous: float | None = None
    next: float | None = None
    itself: float | None = None
    first: float | None = None
    separator: float | None = None
    same: float | None = None
    sink: float | None = None
    rare: float | None = None
    rare_chance: float | None = None
    position: int | None = None
    pointing: float | None = None
    induction: float | None = None
    duplicate: float | None = None
    role: str = ""
    because: str = ""
    clarity: float = 0.0

    def __repr__(self) -> str:
        return f"HeadProfile({self.role or 'no role'}: {self.because or f'entropy {self.entropy:.2f} nats'})"


class HeadProfiles(dict[str, list[HeadProfile]]):
    """``{layer_name: [profile of head 0, …]}``, which prints short.

    Attributes:
        layers: Index of each layer, by its name.
    """

    def __init__(self, profiles: Mapping[str, list[HeadProfile]], layers: Mapping[str, int]) -> None:
        super().__init__(profiles)
        self.layers = dict(layers)

    def top(self, count: int = 10) -> list[tuple[str, HeadProfile]]:
        """The heads that show their role best: (label such as ``"L3.H7"``, profile)."""
        every = [(f"L{self.layers[name]}.H{h}", p) for name, heads in self.items() for h, p in enumerate(heads)]
        return sorted(every, key=lambda one: -one[1].clarity)[:count]

    def _roles(self) -> Counter[str]:
        return Counter(profile.role for heads in self.values() for profile in heads)

    def __repr__(self) -> str:
        roles = self._roles()
        told = ", ".join(f"{count} {role}" for role, count in roles.most_common())
        return f"HeadProfiles({roles.total()} heads in {len(self)} layers: {told})"

    def _repr_html_(self) -> str:
        """A notebook's table: the heads that show their role best."""
        rows = (
            f"<tr><th>{label}</th><td>{html.escape(p.role)}</td><td>{html.escape(p.because)}</td></tr>"
            for label, p in self.top()
        )
        return f"<table><caption>{html.escape(repr(self))}</caption>{''.join(rows)}</table>"

    def plot(self) -> Figure:
        """How many heads have each role; the figure's ``savefig`` writes it."""
        from matplotlib.figure import Figure

        roles, counts = zip(*reversed(self._roles().most_common()), strict=True)
        figure = Figure(layout="constrained")
        axis = figure.subplots()
        axis.bar_label(axis.barh(roles, counts))
        axis.set(xlabel="heads")
        return figure
