"""Budgets of what must be measured: the time of a forward pass, and the accuracy that is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Budget, Fit, Limit, PlanCost, Reading, budget
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.budgets.subject import Subject
    from headprune.evaluation import Change
    from headprune.planning import Order
    from headprune.plans import PruningPlan

_GRID = 8  # parts into which a search for a drop cuts its range each time


@budget("latency")
class LatencyLimit(Limit):
    """End-to-end time of a forward pass, the dense model's turn and the pruned one's alternating."""

    flag = "--target-latency"
    help = "Time of a forward pass, timed on this device: 12.5 (ms) or 80%."
    example = "12.5ms or 80%"
    limits = "latency"
    unit = "ms"
    suffixes: ClassVar = {"": 1, "ms": 1, "s": 1000}
    timed = True

    def show(self, amount: float) -> str:
        return super().show(amount) if self.relative else f"{amount:.4g} ms"

    def cost(self, subject: Subject) -> PlanCost:
        from headprune import latency
        from headprune.parallel import current

        inputs = [(*latency.example_shape(subject.inputs), subject.inputs)]

        def timed(plan: PruningPlan, measured: bool) -> Reading:
            if not plan.drop and self.relative:
                return Reading.exact(1.0)
            # The search may err: the plan that it chooses is timed again, for as long as what is reported.
            runs = latency.MIN_RUNS // (1 if measured else 2)
            least = latency.MIN_SECONDS / (1 if measured else 4)
            models = {"dense": subject.model, "pruned": subject.pruned(plan)}
            # Of several ranks one times, while the others wait.
            (row,) = current().first("timing", lambda: latency.bench(models, inputs, min_runs=runs, min_seconds=least))
            if self.relative:
                speedup = row.speedups["pruned"]
                return Reading(1 / speedup.ratio, 1 / speedup.high, 1 / speedup.low)
            timing = row.timings["pruned"]
            return Reading(timing.median, timing.low, timing.high)

        return timed


@budget("drop")
class Drop(Budget):
    """What the metric may lose: accuracy in parts of 1, perplexity as its relative increase. Never a share of the dense model's."""

    flag = "--max-drop"
    help = (
        "The fewest heads whose loss of accuracy is below this with 95 % confidence: 0.01; of perplexity: its relative "
        "increase."
    )
    example = "0.01 or 1%"
    limits = "accuracy"
    unit = ""
    by_metric = True

    @classmethod
    def parse(cls, text: str) -> Budget:
        return cls(text.strip(), cls._number(text)[0])

    def check(self) -> None:
        if self.amount >= 1:
            percent = f"; did you mean {self.text}%?" if self.amount < 100 and not self.text.endswith("%") else ""
            message = f"{self.flag} {self.text} allows to lose all accuracy, or to double the perplexity, so it asks for nothing."
            raise HeadPruneError(message, f"Write a share of 1, or a percentage: 0.01 or 1% is one point{percent}.")

    def fit(self, order: Order, subject: Subject) -> Fit:
        """The fewest heads such that the loss is no more than this budget, with 95 % confidence.

        The budget must hold for the upper end of the 95 % interval of the loss (of accuracy, in parts of 1; or the relative
        increase of perplexity), here and at every larger number of heads that was looked at. Those are a coarse grid down
        to the first that fails, then a finer one between that and the last that held, and so on. Each grid depends on
        nothing but the range, so a larger budget never keeps more heads, however noisy the measurements are.

        Raises:
            HeadPruneError: Nothing can go; the hint says the nearest budget that can be met.
        """
        change, losses = subject.change, dict[int, Reading]()
        assert change is not None

        def loss(steps: int) -> Reading:
            if steps not in losses:
                losses[steps] = _loss(change(order.after(steps)))
            return losses[steps]

        held, failed = 0, len(order.steps) + 1
        while failed - held > 1:
            # The first range ends at the last plan, which may hold; later ones end at one that failed.
            end = min(failed, len(order.steps))
            for steps in sorted({held + max(1, round((end - held) * part / _GRID)) for part in range(1, _GRID + 1)}):
                if loss(steps).high > self.amount:
                    failed = steps
                    break
                held = steps
        if held == 0:
            raise self._out_of_reach(order, losses)
        return Fit(replace(order.after(held), budget=str(self)), self, losses[held])

    def _out_of_reach(self, order: Order, losses: dict[int, Reading]) -> HeadPruneError:
        if not losses:
            return HeadPruneError("No head can go.", "; ".join(order.stays))
        smallest = min(losses, key=lambda n: losses[n].high)
        plan, least = order.after(smallest), losses[smallest]
        nearest = f"The nearest that can be met is {self.at_least(least.high)}; more" if least.high < 1 else "More"
        return HeadPruneError(
            f"{self.flag} {self.text} is out of reach: with {plan.kept} of {plan.total} heads the loss is "
            f"{least.value:.4f}, and with 95 % confidence no more than {least.high:.4f}.",
            f"{nearest} examples narrow the interval.",
        )

    def show(self, amount: float) -> str:
        return f"{amount:.4f}"

    def result(self, kept: int, reading: Reading, where: str) -> str:
        return (
            f"a loss of no more than {self.amount:g}. The fewest heads that hold it, by the upper end of the 95 % interval on the "
            f"choosing part, are {kept}: {self.show(reading.value)} ({self.show(reading.low)} to {self.show(reading.high)}) there."
        )


def _loss(change: Change) -> Reading:
    """A change as something that should be small."""
    if change.metric == "accuracy":
        return Reading(-change.value, -change.high, -change.low)
    return Reading(change.value, change.low, change.high)
