"""A budget of the time of a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Reading, budget
from headprune.budgets.limit import Cost, Limit

if TYPE_CHECKING:
    from headprune.budgets.subject import Subject
    from headprune.plans import PruningPlan


@budget("latency")
class Latency(Limit):
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

    def cost(self, subject: Subject) -> Cost:
        from headprune import latency
        from headprune.parallel import current

        inputs = [(*latency.example_shape(subject.inputs), subject.inputs)]

        def timed(plan: PruningPlan, runs: int, seconds: float) -> Reading:
            if not plan.drop and self.relative:
                return Reading.exact(1.0)
            models = {"dense": subject.model, "pruned": subject.pruned(plan)}
            # Of several ranks one times, while the others wait.
            (row,) = current().first(
                "timing", lambda: latency.bench(models, inputs, min_runs=runs, min_seconds=seconds)
            )
            if self.relative:
                speedup = row.speedups["pruned"]
                return Reading(1 / speedup.ratio, 1 / speedup.high, 1 / speedup.low)
            timing = row.timings["pruned"]
            return Reading(timing.median, timing.low, timing.high)

        # The search may err: what it finds is timed again, for as long as what is reported.
        return Cost(
            lambda plan: timed(plan, latency.MIN_RUNS // 2, latency.MIN_SECONDS / 4),
            lambda plan: timed(plan, latency.MIN_RUNS, latency.MIN_SECONDS),
        )
