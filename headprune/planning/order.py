"""The order in which heads go: every prefix of it is a plan, so its plans are nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from headprune.attention import AttentionLayer, Heads
from headprune.errors import HeadPruneError
from headprune.plans import PruningPlan


@dataclass(frozen=True)
class Order:
    """Heads in the order in which they go.

    Attributes:
        heads: How many heads each layer has, in the model's order.
        steps: What goes together, first to last: a head, a key/value group, a head of every group or of every layer.
        strategy: How the order was made.
        method: The scores it was made from, if any.
        model: Fingerprint of the model it is for.
        stays: Why the heads that are in no step stay.
        notes: What else a reader should know.
        stock: Whether every plan is one that the model's stock class can represent, as far as names and shapes tell.
    """

    heads: dict[str, int]
    steps: tuple[Heads, ...]
    strategy: str = ""
    method: str = ""
    model: str = ""
    stays: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stock: bool = False

    @classmethod
    def of(cls, layers: Sequence[AttentionLayer], steps: Sequence[Heads], **about: Any) -> Order:
        """An order over the heads of ``layers``."""
        return cls({layer.name: layer.num_heads for layer in layers}, tuple(steps), **about)

    @property
    def total(self) -> int:
        """Heads there are."""
        return sum(self.heads.values())

    @property
    def least(self) -> int:
        """Heads left after all steps."""
        return self.kept()[-1]

    def kept(self) -> tuple[int, ...]:
        """Heads left after 0, 1, … all steps: ``len(steps) + 1`` falling numbers."""
        return tuple(self.total - gone for gone in accumulate(map(_size, self.steps), initial=0))

    def after(self, steps: int) -> PruningPlan:
        """The plan after so many steps."""
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
            HeadPruneError: Fewer than ``keep`` heads would have to stay.
        """
        kept = self.kept()
        if keep < kept[-1]:
            why = f" ({'; '.join(self.stays[:3])})" if self.stays else ""
            raise HeadPruneError(
                f"{kept[-1]} heads cannot be pruned by {self.strategy or 'this order'}{why}, so {keep} is out of reach.",
                f"Keep at least {kept[-1]}.",
            )
        steps = next(n for n, k in enumerate(kept) if k <= keep)
        plan = self.after(steps)
        if plan.kept == keep:
            return plan
        size = _size(self.steps[steps - 1])
        note = f"{plan.kept} of {plan.total} heads are kept, not {keep}: they go {size} at a time."
        return replace(plan, asked=keep, notes=(note, *plan.notes))

    def reaches(self, keep: int) -> bool:
        """Whether a plan keeps no more than ``keep`` heads, and some."""
        return self.least <= keep and any(0 < kept <= keep for kept in self.kept())

    def some(self, keep: int) -> PruningPlan:
        """As `plan`, for a number of heads that somebody asked for.

        Raises:
            HeadPruneError: So many heads go together that none would stay, or fewer than ``keep`` would have to stay.
        """
        plan = self.plan(keep)
        if not plan.kept:
            least = min(kept for kept in self.kept() if kept)
            raise HeadPruneError(
                f"The last {least} heads go together by {self.strategy or 'this order'}, so with no more than {keep} none would stay.",
                f"Keep at least {least}.",
            )
        return plan

    def plans(self) -> Iterator[PruningPlan]:
        """Every plan, from all heads to the fewest."""
        return (self.after(n) for n in range(len(self.steps) + 1))

    def to_json(self) -> dict[str, Any]:
        return {
            "heads": self.heads, "steps": list(self.steps), "strategy": self.strategy, "method": self.method,
            "model": self.model, "stays": list(self.stays), "notes": list(self.notes),
            "stock": self.stock,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Order:
        steps = tuple({name: list(heads) for name, heads in step.items()} for step in data["steps"])
        return cls(
            dict(data["heads"]), steps, data["strategy"], data["method"], data["model"], tuple(data["stays"]),
            tuple(data["notes"]), data.get("stock", False),
        )  # fmt: skip


def _size(step: Mapping[str, Sequence[int]]) -> int:
    """Heads in a step."""
    return sum(map(len, step.values()))
