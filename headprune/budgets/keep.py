"""A number of heads to keep."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headprune.budgets.base import Budget, Fit, budget
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.budgets.subject import Subject
    from headprune.planning import Order


@budget("keep")
class Keep(Budget):
    """Heads, as a count or as a share of all; `heads` reads the text, since what it comes to depends on the model."""

    flag = "--keep"
    short = "-k"
    help = "Heads to keep: 36, 50% or 0.5."
    example = "36, 50% or 0.5"
    limits = "heads"
    unit = "heads"

    @classmethod
    def parse(cls, text: str) -> Budget:
        from headprune.plans import keep_of

        keep_of(text)
        return cls(text.strip())

    def heads(self, total: int) -> int:
        from headprune.plans import heads_to_keep

        return heads_to_keep(self.text, total)

    def check(self) -> None:
        from headprune.plans import keep_of

        share = keep_of(self.text)
        if isinstance(share, float) and share > 1:
            raise HeadPruneError(f"keep {self.text} is more than all heads.", "Keep fewer, for instance 50%.")
        if isinstance(share, float) and share == 1:
            raise HeadPruneError(
                f"keep {self.text} keeps all heads, so there is nothing to prune.",
                "Ask for less, for instance 50%.",
            )

    def check_dense(self, subject: Subject) -> None:
        total = sum(layer.num_heads for layer in subject.layers if layer.maskable)
        if self.heads(total) == total:
            raise HeadPruneError(
                f"keep {self.text} keeps all {total} heads, so there is nothing to prune.",
                f"Keep fewer, for instance {max(total // 2, 1)}.",
            )

    def fit(self, order: Order, subject: Subject) -> Fit:
        return Fit(replace(order.some(self.heads(order.total)), budget=str(self)), self)
