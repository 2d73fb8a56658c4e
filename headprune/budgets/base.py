"""Base classes of budgets, the search for the plan with the most heads that meets one, and the register of kinds."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from torch import nn

    from headprune.attention import Layers
    from headprune.evaluation import Change
    from headprune.inputs import Example
    from headprune.planning import Order
    from headprune.plans import PruningPlan


@dataclass(frozen=True)
class Reading:
    """A plan's cost, in a budget's terms: a share of the dense model's, or in its unit.

    Attributes:
        low, high: 95 % interval; both are ``value`` for a count. A plan meets a budget if ``high`` does not exceed it.
    """

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Reading:
        """The reading of a count, without an interval."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Fit:
    """A plan that meets a budget (None for a user's own plan), and its measured cost (None for a budget of heads)."""

    plan: PruningPlan
    budget: Budget | None = None
    reading: Reading | None = None


@dataclass(frozen=True)
class Subject:
    """The dense model that plans are for, which is never changed.

    Attributes:
        layers: From `headprune.find_attention`.
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
        biases: Modules that the repair may give a bias, which costs something too.
        change: The change of the metric (accuracy or perplexity) from the dense model to a repaired plan on the
            choosing examples; the same for the same plan. None before there is a search.
    """

    model: nn.Module
    layers: Layers
    example: Example
    inputs: Example
    biases: Sequence[str] = ()
    change: Callable[[PruningPlan], Change] | None = None

    def pruned(self, plan: PruningPlan) -> nn.Module:
        """A copy without the plan's heads."""
        from headprune.offload import add_stored_biases, copied
        from headprune.surgery import prune

        model = copied(self.model)
        if plan.drop:
            add_stored_biases(model, self.biases)
        prune(model, plan.drop, self.example, layers=self.layers)  # the fingerprint was checked: this is a copy
        return model


@dataclass(frozen=True)
class Budget(ABC):
    """A limit that a plan must not exceed. Each kind is a subclass, registered by `kind`.

    Attributes:
        text: As the user wrote it, such as ``"80%"``.
        amount: The number in it: a share of the dense model's, if ``relative``, else in `unit`; NaN for a number of heads.
        relative: Whether ``amount`` is a share of what the dense model needs.
        kind: The name of its class in the register.

    Every kind says:
        flag: Its option, and with ``short`` a letter for it.
        help: The option's, for ``headprune prune --help``.
        example: How to write it.
        limits: What it limits, for "80 % of the dense model's …".
        unit: What `amount` counts.
        suffixes: What may follow a number, and the factor that it stands for.

    And if it differs from the default:
        timed: Whether it is measured on an input of the size for latency, not on a single example.
        by_groups: Whether only removing whole key/value groups lowers it, so that slices are not tried.
        by_metric: Whether it limits the loss of the metric (to 0, perhaps). Then the search is for the fewest heads
            that meet it, choosing examples are needed, and a percentage is no share of what the dense model needs.
    """

    text: str
    amount: float = math.nan
    relative: bool = False
    kind: str = field(init=False)  # a field, so that budgets of two kinds differ wherever fields are listed

    flag: ClassVar[str]
    short: ClassVar[str] = ""
    help: ClassVar[str]
    example: ClassVar[str]
    limits: ClassVar[str]
    unit: ClassVar[str]
    suffixes: ClassVar[Mapping[str, float]] = {"": 1}
    timed: ClassVar[bool] = False
    by_groups: ClassVar[bool] = False
    by_metric: ClassVar[bool] = False

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget from what follows its flag.

        Raises:
            HeadPruneError: No number that makes sense.
        """
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*|%)\s*", text.lower())
        try:
            amount = float(match[1]) * {**cls.suffixes, "%": 0.01}[match[2]] if match else math.nan
        except (ValueError, KeyError):
            amount = math.nan
        if match is None or not math.isfinite(amount) or (amount == 0 and not cls.by_metric):
            raise HeadPruneError(f"{cls.flag} {text} is no budget.", f"Write it as {cls.example}.")
        return cls(text.strip(), amount, match[2] == "%" and not cls.by_metric)

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"

    def heads(self, total: int) -> int | None:
        """How many of ``total`` heads may stay; None if that must be measured."""
        return None

    def check(self) -> None:
        """Refuse a budget that every dense model meets, before anything is loaded.

        Raises:
            HeadPruneError: There would be nothing to prune.
        """
        if self.relative and self.amount >= 1:
            message = f"{self.flag} {self.text} is met by the dense model, so there is nothing to prune."
            raise HeadPruneError(message, f"Ask for less, for instance {self.flag} 80%.")

    def check_dense(self, subject: Subject) -> None:  # noqa: B027  # a budget that no dense model holds
        """Refuse a budget that this dense model meets, before the long work.

        Raises:
            HeadPruneError: There would be nothing to prune, or the model has nothing that this budget limits.
        """

    @abstractmethod
    def fit(self, order: Order, subject: Subject) -> Fit:
        """The plan of an order that meets this budget.

        Raises:
            HeadPruneError: No plan does; the hint says the nearest budget that can be met.
        """

    def show(self, amount: float) -> str:
        """An amount in this budget's terms, such as ``78 %`` (of the dense model's) or ``12.5 ms``."""
        return f"{100 * amount:.3g} %" if self.relative else f"{amount:,.0f} {self.unit}"

    def at_least(self, amount: float) -> str:
        """What to type for a budget of this kind that is met by ``amount``: rounded up, to three digits."""
        from decimal import ROUND_CEILING, Context, Decimal  # slow to import, and --help need not wait for it

        up = Context(prec=3, rounding=ROUND_CEILING)
        number = Decimal(amount) * 100 if self.relative else Decimal(amount)
        return f"{self.flag} {up.create_decimal(number):f}{'%' if self.relative else ''}"

    def result(self, kept: int, reading: Reading, where: str) -> str:
        """A sentence for the report: the budget, and what was measured.

        Args:
            kept: Heads that stay.
            where: What it was measured on, where that is more than a copy of the model.
        """
        of = f" of the dense model's {self.limits}" if self.relative else ""
        low, high = self.show(reading.low), self.show(reading.high)
        interval = f" (95 %: {low} to {high})" if reading.low < reading.high else ""
        return f"at most {self.show(self.amount)}{of}; with {kept} heads it is {self.show(reading.value)}{interval}{where}."


PlanCost = Callable[["PruningPlan", bool], Reading]
"""A plan's cost: with False an estimate for the search, which falls (about) as heads are removed; with True a new
measurement on a pruned copy."""


class Limit(Budget):
    """A budget of a cost that falls as heads are removed, and that can be measured on a pruned copy."""

    @abstractmethod
    def cost(self, subject: Subject) -> PlanCost:
        """A function that gives a plan's cost in this budget's terms.

        Raises:
            HeadPruneError: The model has nothing that this budget limits.
        """

    def check_dense(self, subject: Subject) -> None:
        from headprune.plans import PruningPlan

        dense = self.cost(subject)(PruningPlan({}), False)
        if dense.high <= self.amount:
            message = f"{self.flag} {self.text} is met by the dense model ({self.show(dense.high)}), so there is nothing to prune."
            raise HeadPruneError(message, f"Ask for less, for instance {self.at_least(dense.value / 2)}.")

    def fit(self, order: Order, subject: Subject) -> Fit:
        """The plan with the most heads that meets this budget.

        Bisects on estimates, then measures the plan found. While it exceeds the budget, plans with fewer heads are
        measured, in growing strides. So the plan was measured to meet the budget after it was chosen.

        Raises:
            HeadPruneError: Even the fewest heads exceed the budget; the hint says the nearest that can be met.
        """
        cost, last = self.cost(subject), len(order.steps)
        if cost(order.after(last), False).high > self.amount:
            raise self._out_of_reach(order, cost(order.after(last), True))
        high = bisect_left(range(last), True, key=lambda steps: cost(order.after(steps), False).high <= self.amount)
        stride = 1
        while (reading := cost(order.after(high), True)).high > self.amount:
            if high == last:
                raise self._out_of_reach(order, reading)
            high, stride = min(high + stride, last), 2 * stride
        return Fit(replace(order.after(high), budget=str(self)), self, reading)

    def _out_of_reach(self, order: Order, least: Reading) -> HeadPruneError:
        why = f" ({'; '.join(order.stays[:3])})" if order.stays else ""
        hint = f"The nearest that can be met is {self.at_least(least.high)}."
        if self.relative and least.high >= 1:
            hint = "Pruning heads does not bring it below the dense model's."
        return HeadPruneError(
            f"{self.flag} {self.text} is out of reach: with the fewest heads that {order.strategy} can keep{why}, "
            f"{order.least} of {order.total}, it is {self.show(least.high)}.",
            hint,
        )


BUDGETS: dict[str, type[Budget]] = {}
_Kind = TypeVar("_Kind", bound=type[Budget])


def budget(name: str) -> Callable[[_Kind], _Kind]:
    """Register a kind of budget under a name."""

    def register(kind: _Kind) -> _Kind:
        kind.kind = name
        BUDGETS[name] = kind
        return kind

    return register


def kind_named(name: str) -> type[Budget]:
    """A kind of the register, by its name or its flag: ``flops``, ``target-flops`` or ``--target-flops``.

    Raises:
        HeadPruneError: There is none of that name.
    """
    for known, kind in BUDGETS.items():
        if name.lstrip("-") in (known, kind.flag.lstrip("-")):
            return kind
    raise HeadPruneError(f"There is no budget {name!r}.", f"Choose from {', '.join(BUDGETS)}.")


def budget_of(text: str) -> Budget:
    """A budget from its kind and amount in one text, such as ``"flops 80%"`` or ``"--target-flops 80%"``.

    Raises:
        HeadPruneError: No such kind, or no number that makes sense.
    """
    name, _, amount = str(text).strip().partition(" ")
    return kind_named(name).parse(amount)
