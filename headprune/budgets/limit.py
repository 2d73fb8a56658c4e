"""Budgets of what falls as heads go, and can be measured on a pruned copy: how the most heads are found that hold one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headprune.budgets.base import Budget, Fit, Reading
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.budgets.subject import Subject
    from headprune.planning import Order
    from headprune.plans import PruningPlan


@dataclass(frozen=True)
class Cost:
    """What plans cost.

    Attributes:
        estimate: For the search: falls (about) as heads go.
        measure: On a model that was really pruned, afresh at each call.
    """

    estimate: Callable[[PruningPlan], Reading]
    measure: Callable[[PruningPlan], Reading]


class Limit(Budget):
    """A budget of something that a pruned model costs."""

    @abstractmethod
    def cost(self, subject: Subject) -> Cost:
        """How to tell what a plan costs, in the terms of this budget.

        Raises:
            HeadPruneError: The model has nothing that this budget limits.
        """

    def check_dense(self, subject: Subject) -> None:
        from headprune.plans import PruningPlan

        dense = self.cost(subject).estimate(PruningPlan({}))
        if dense.high <= self.amount:
            raise HeadPruneError(
                f"{self.flag} {self.text} is met by the dense model ({self.show(dense.high)}), so there is nothing to prune.",
                f"Ask for less, for instance {self.at_least(dense.value / 2)}.",
            )

    def fit(self, order: Order, subject: Subject) -> Fit:
        return self.most_heads(order, self.cost(subject))

    def most_heads(self, order: Order, cost: Cost) -> Fit:
        """The plan with the most heads that holds this budget.

        Bisects on estimates, then measures the plan that was found, and goes on to fewer heads, in growing strides, while
        that exceeds the budget: what is returned was measured to hold it, after it was chosen.

        Raises:
            HeadPruneError: Even the fewest heads exceed the budget; the hint says the nearest that can be met.
        """
        last = len(order.steps)
        if cost.estimate(order.after(last)).high > self.amount:
            raise self._out_of_reach(order, cost.measure(order.after(last)))
        low, high = -1, last  # high holds the budget, low does not
        while high - low > 1:
            middle = (low + high) // 2
            if cost.estimate(order.after(middle)).high <= self.amount:
                high = middle
            else:
                low = middle
        stride = 1
        while (reading := cost.measure(order.after(high))).high > self.amount:
            if high == last:
                raise self._out_of_reach(order, reading)
            high, stride = min(high + stride, last), 2 * stride
        return Fit(replace(order.after(high), budget=str(self)), self, reading)

    def _out_of_reach(self, order: Order, least: Reading) -> HeadPruneError:
        why = f" ({'; '.join(order.stays[:3])})" if order.stays else ""
        return HeadPruneError(
            f"{self.flag} {self.text} is out of reach: with the fewest heads that {order.strategy} can keep{why}, "
            f"{order.least} of {order.total}, it is {self.show(least.high)}.",
            "Pruning heads does not bring it below the dense model's."
            if self.relative and least.high >= 1
            else f"The nearest that can be met is {self.at_least(least.high)}.",
        )
