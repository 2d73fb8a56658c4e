"""Budgets: what a user asks for, and the plan with the most heads that holds it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context, Decimal

from headprune.errors import HeadPruneError
from headprune.evaluation import Change
from headprune.planning.order import Order
from headprune.plans import PruningPlan, heads_to_keep, keep_of

FLAGS = {
    "keep": "--keep",
    "latency": "--target-latency",
    "flops": "--target-flops",
    "params": "--target-params",
    "kv-cache": "--target-kv-cache",
    "drop": "--max-drop",
}
_UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "latency": ("ms", {"": 1, "ms": 1, "s": 1000}),
    "flops": ("FLOPs", {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}),
    "params": ("parameters", {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}),
    "kv-cache": ("bytes per token", {"": 1, "b": 1, "k": 1024, "kb": 1024, "m": 1024**2, "mb": 1024**2}),
    "drop": ("", {"": 1}),
}
_EXAMPLES = {"latency": "12.5ms or 80%", "flops": "1.2G or 80%", "params": "60M or 80%", "kv-cache": "20K or 50%", "drop": "0.01 or 1%"}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """What must not be exceeded.

    Attributes:
        kind: ``"keep"``, ``"latency"``, ``"flops"``, ``"params"``, ``"kv-cache"`` or ``"drop"``.
        text: As it was asked for, such as ``"80%"``.
        amount: The number in it: a share of the dense model's, if ``relative``, else in `unit`; a loss of accuracy (in
            parts of 1) or a relative increase of perplexity for ``"drop"``; NaN for ``"keep"`` (`heads` reads that).
        relative: Whether ``amount`` is a share of what the dense model needs.
    """

    kind: str
    text: str
    amount: float = math.nan
    relative: bool = False

    @classmethod
    def parse(cls, kind: str, text: str) -> Budget:
        """A budget from what follows its flag.

        Raises:
            HeadPruneError: No such kind, or no number that makes sense.
        """
        if kind == "keep":
            keep_of(text)
            return cls(kind, text)
        if kind not in FLAGS:
            raise HeadPruneError(f"There is no budget {kind!r}.", f"Choose from {', '.join(FLAGS)}.")
        match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([a-z]*|%)\s*", text.lower())
        factors = {**_UNITS[kind][1], "%": 0.01}
        try:
            amount = float(match[1]) * factors[match[2]] if match else math.nan
        except (ValueError, KeyError):
            amount = math.nan
        if not math.isfinite(amount) or (amount <= 0 and kind != "drop"):
            raise HeadPruneError(f"{FLAGS[kind]} {text} is no budget.", f"Write it as {_EXAMPLES[kind]}.")
        return cls(kind, text.strip(), amount, kind != "drop" and match is not None and match[2] == "%")

    def check(self) -> None:
        """Refuse a share that the dense model has as it is: all of it.

        Raises:
            HeadPruneError: There would be nothing to prune.
        """
        share = keep_of(self.text) if self.kind == "keep" else self.amount if self.relative else 0
        if self.kind == "keep" and isinstance(share, float) and share > 1:
            raise HeadPruneError(
                f"{FLAGS[self.kind]} {self.text} is more than all heads.", "Keep fewer, for instance --keep 50%."
            )
        if isinstance(share, float) and share >= 1:
            met = "keeps all heads" if self.kind == "keep" else "is met by the dense model"
            raise HeadPruneError(
                f"{FLAGS[self.kind]} {self.text} {met}, so there is nothing to prune.",
                f"Ask for less, for instance {FLAGS[self.kind]} {'50' if self.kind == 'keep' else '80'}%.",
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.text}"

    @property
    def unit(self) -> str:
        """What ``amount`` counts."""
        return "of the dense model's" if self.relative else _UNITS[self.kind][0] if self.kind in _UNITS else "heads"

    def heads(self, total: int) -> int:
        """The count that a ``"keep"`` budget asks for."""
        return heads_to_keep(self.text, total)

    def show(self, amount: float) -> str:
        """An amount in this budget's terms, such as ``0.780`` (of the dense model's) or ``12.5 ms``."""
        if self.relative or self.kind == "drop":
            return f"{amount:.3f}"
        return f"{amount:.4g} ms" if self.kind == "latency" else f"{amount:,.0f} {self.unit}"

    def at_least(self, amount: float) -> str:
        """What to type for a budget of this kind that is met by ``amount``: rounded up, to three digits."""
        up = Context(prec=3, rounding=ROUND_CEILING)
        number = Decimal(amount) * 100 if self.relative else Decimal(amount)
        return f"{FLAGS[self.kind]} {up.create_decimal(number):f}{'%' if self.relative else ''}"


@dataclass(frozen=True)
class Reading:
    """What a plan costs, in a budget's terms: a share of the dense model's, or in its unit.

    Attributes:
        low, high: 95 % interval; both are ``value`` for what is counted. A budget holds if ``high`` does not exceed it.
    """

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Reading:
        """Of what is counted, not timed."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Cost:
    """What plans cost.

    Attributes:
        estimate: For the search: falls (about) as heads go.
        measure: On a model that was really pruned, afresh at each call.
    """

    estimate: Callable[[PruningPlan], Reading]
    measure: Callable[[PruningPlan], Reading]


@dataclass(frozen=True)
class Fit:
    """A plan that holds a budget (None for a plan of the user's), and what it was measured to cost (where heads are not
    just counted)."""

    plan: PruningPlan
    budget: Budget | None = None
    reading: Reading | None = None


def fit(order: Order, budget: Budget, cost: Cost) -> Fit:
    """The plan with the most heads that holds a budget of latency, FLOPs, parameters or cache.

    Bisects on estimates, then measures the plan that was found, and goes on to fewer heads, in growing strides, while
    that exceeds the budget: what is returned was measured to hold it, after it was chosen.

    Raises:
        HeadPruneError: Even the fewest heads exceed the budget; the hint says the nearest that can be met.
    """
    last = len(order.steps)
    if cost.estimate(order.after(last)).high > budget.amount:
        raise _out_of_reach(order, budget, cost.measure(order.after(last)))
    low, high = -1, last  # high holds the budget, low does not
    while high - low > 1:
        middle = (low + high) // 2
        if cost.estimate(order.after(middle)).high <= budget.amount:
            high = middle
        else:
            low = middle
    stride = 1
    while (reading := cost.measure(order.after(high))).high > budget.amount:
        if high == last:
            raise _out_of_reach(order, budget, reading)
        high, stride = min(high + stride, last), 2 * stride
    return Fit(replace(order.after(high), budget=str(budget)), budget, reading)


def _out_of_reach(order: Order, budget: Budget, least: Reading) -> HeadPruneError:
    why = f" ({'; '.join(order.stays[:3])})" if order.stays else ""
    return HeadPruneError(
        f"{FLAGS[budget.kind]} {budget.text} is out of reach: with the fewest heads that {order.strategy} can keep{why}, "
        f"{order.least} of {order.total}, it is {budget.show(least.high)}.",
        "Pruning heads does not bring it below the dense model's."
        if budget.relative and least.high >= 1
        else f"The nearest that can be met is {budget.at_least(least.high)}.",
    )


PARTS = 8  # into how many parts a search for a drop cuts its range each time


def fit_drop(order: Order, budget: Budget, change_at: Callable[[PruningPlan], Change]) -> Fit:
    """The fewest heads such that accuracy surely falls by no more than a budget.

    The budget must hold for the upper end of the 95 % interval of the loss (of accuracy, in parts of 1; or the relative
    increase of perplexity), here and at every larger number of heads that was looked at. Those are a coarse grid down
    to the first that fails, then a finer one between that and the last that held, and so on. Each grid depends on
    nothing but the range, so a larger budget never keeps more heads, however noisy the measurements are.

    Args:
        change_at: The change from the dense model to a plan, the same for the same plan.

    Raises:
        HeadPruneError: Nothing can go; the hint says the nearest budget that can be met.
    """
    losses: dict[int, Reading] = {}

    def loss(steps: int) -> Reading:
        if steps not in losses:
            losses[steps] = _loss(change_at(order.after(steps)))
        return losses[steps]

    held, failed = 0, len(order.steps) + 1
    while failed - held > 1:
        # The first range ends at the last plan, which may hold; later ones end at one that failed.
        end = min(failed, len(order.steps))
        for steps in sorted({held + max(1, round((end - held) * part / PARTS)) for part in range(1, PARTS + 1)}):
            if loss(steps).high > budget.amount:
                failed = steps
                break
            held = steps
    if held == 0:
        smallest = min(losses, key=lambda n: losses[n].high, default=0)
        if smallest == 0:
            raise HeadPruneError("No head can go.", "; ".join(order.stays))
        plan = order.after(smallest)
        raise HeadPruneError(
            f"{FLAGS['drop']} {budget.text} is out of reach: with {plan.kept} of {plan.total} heads the loss is "
            f"{losses[smallest].value:.4f}, and with 95 % confidence no more than {losses[smallest].high:.4f}.",
            f"The nearest that can be met is {budget.at_least(losses[smallest].high)}; more examples narrow the interval.",
        )
    return Fit(replace(order.after(held), budget=str(budget)), budget, losses[held])


def _loss(change: Change) -> Reading:
    """A change as something that should be small."""
    if change.metric == "perplexity":
        return Reading(change.value, change.low, change.high)
    return Reading(-change.value, -change.high, -change.low)
