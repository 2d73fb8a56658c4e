"""The kinds of budgets: costs that are counted on a pruned copy, and those that are measured (time, lost accuracy)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Budget, Fit, Limit, PlanCost, Reading, Subject, budget
from headprune.errors import HeadPruneError, UndefinedError

if TYPE_CHECKING:
    from torch import nn

    from headprune.attention import Layers
    from headprune.inputs import Example
    from headprune.planning import Order
    from headprune.plans import PruningPlan

_GRID = 8  # parts into which each round of `Drop.fit` divides its range


@budget("keep")
class Keep(Budget):
    """Heads, as a count or as a share of all; `heads` reads the text, since a share's count depends on the model."""

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
        if isinstance(share, float) and share >= 1:
            message = f"keep {self.text} keeps all heads, so there is nothing to prune."
            raise HeadPruneError(message, "Ask for less, for instance 50%.")

    def check_dense(self, subject: Subject) -> None:
        total = sum(layer.num_heads for layer in subject.layers if layer.maskable)
        if self.heads(total) == total:
            message = f"keep {self.text} keeps all {total} heads, so there is nothing to prune."
            raise HeadPruneError(message, f"Keep fewer, for instance {max(total // 2, 1)}.")

    def fit(self, order: Order, subject: Subject) -> Fit:
        return Fit(replace(order.some(self.heads(order.total)), budget=str(self)), self)


class Counted(Limit):
    """A budget of a count on a pruned copy, which is the same each time."""

    @abstractmethod
    def count(self, model: nn.Module, inputs: Example) -> float:
        """The count, for a dense or a pruned model on one input."""

    def cost(self, subject: Subject) -> PlanCost:
        dense = self.count(subject.model, subject.inputs) if self.relative else 1.0

        return lambda plan, _: Reading.exact(self.count(subject.pruned(plan), subject.inputs) / dense)


@budget("flops")
class Flops(Counted):
    """Floating-point operations of a forward pass (`headprune.latency.flops`)."""

    flag = "--target-flops"
    help = "Of a forward pass: 1.2G or 80%."
    example = "1.2G or 80%"
    limits = "FLOPs"
    unit = "FLOPs"
    suffixes: ClassVar = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

    def count(self, model: nn.Module, inputs: Example) -> float:
        from headprune import latency

        return latency.flops(model, inputs)


@budget("params")
class Parameters(Counted):
    """Parameters of the whole model, shared ones once."""

    flag = "--target-params"
    help = "Parameters of the model: 60M or 80%."
    example = "60M or 80%"
    limits = "parameters"
    unit = "parameters"
    suffixes: ClassVar = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}

    def count(self, model: nn.Module, inputs: Example) -> float:
        from headprune import latency

        return latency.parameters(model)


@budget("kv-cache")
class KeyValueCache(Limit):
    """Bytes per token of the cache: computed for the search, measured for the dense model and the chosen plan."""

    flag = "--target-kv-cache"
    help = "A decoder's cache, bytes per token: 20K or 50%."
    example = "20K or 50%"
    limits = "key/value cache"
    unit = "bytes per token"
    suffixes: ClassVar = {"": 1, "b": 1, "k": 1024, "kb": 1024, "m": 1024**2, "mb": 1024**2}
    by_groups = True

    def cost(self, subject: Subject) -> PlanCost:
        from headprune import latency

        dense = latency.cache_bytes(subject.model, subject.inputs)
        size = next(subject.model.parameters()).element_size()
        expected = kv_cache_bytes(subject.layers, {}, size)
        if not dense or not expected:
            message = f"{type(subject.model).__name__} has no key/value cache."
            raise HeadPruneError(message, "Give a budget of another kind: only decoders have one.")
        if dense != expected:
            raise HeadPruneError(
                f"The cache of {type(subject.model).__name__} holds {dense:,g} bytes per token, where its key/value heads "
                f"would make {expected:,}.",
                "Give a budget of another kind: this cache does not hold heads.",
            )
        unit = dense if self.relative else 1.0

        def held(plan: PruningPlan, measured: bool) -> Reading:
            if not measured:
                return Reading.exact(kv_cache_bytes(subject.layers, plan.drop, size) / unit)
            return Reading.exact((latency.cache_bytes(subject.pruned(plan), subject.inputs) or 0.0) / unit)

        return held


def kv_cache_bytes(layers: Layers, drop: Mapping[str, Sequence[int]], size: int) -> int:
    """Bytes per token in the key/value cache of a decoder's self-attention without some heads.

    A key/value head stays as long as a query head of its group does. A layer without heads keeps one of them, where
    the cache needs it (`AttentionLayer.bypass`).

    Args:
        size: Bytes of a number.

    >>> from headprune.attention import AttentionLayer
    >>> layer = AttentionLayer("a", 0, "decoder", 4, 2, 8, groups=((0, 1), (2, 3)))
    >>> kv_cache_bytes([layer], {}, 4), kv_cache_bytes([layer], {"a": [0, 2]}, 4), kv_cache_bytes([layer], {"a": [0, 1]}, 4)
    (128, 128, 64)
    """
    total = 0
    for layer in layers:
        if layer.kind != "decoder":
            continue
        gone = set(drop.get(layer.name, ()))
        kept = 1 if layer.num_kv_heads == 1 else sum(not set(unit) <= gone for unit in layer.units)
        left = kept if len(gone) < layer.num_heads else int(layer.bypass == "ghost")
        total += 2 * left * layer.head_dim * size
    return total


# -- what must be measured -------------------------------------------------------------------------------


@budget("latency")
class LatencyLimit(Limit):
    """End-to-end time of a forward pass; runs of the dense and the pruned model alternate."""

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
            # The search's timings are shorter and may err: the chosen plan is timed again, as long as for the report.
            runs = None if measured else latency.MIN_RUNS // 2
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
    help = "The fewest heads whose loss of the metric is below this with 95 % confidence: 0.01; of perplexity: its relative increase."
    example = "0.01 or 1%"
    limits = "accuracy"
    unit = ""
    by_metric = True

    def check(self) -> None:
        if self.amount >= 1:
            percent = f"; did you mean {self.text}%?" if self.amount < 100 and not self.text.endswith("%") else ""
            message = f"{self.flag} {self.text} allows to lose all accuracy, or to double the perplexity, so it asks for nothing."
            raise HeadPruneError(message, f"Write a share of 1, or a percentage: 0.01 or 1% is one point{percent}.")

    def fit(self, order: Order, subject: Subject) -> Fit:
        """The fewest heads such that the loss is no more than this budget, with 95 % confidence.

        The budget must hold for the upper end of the 95 % interval of the loss (of accuracy, in parts of 1; or the
        relative increase of perplexity), here and at every larger number of heads that was measured. These are a coarse
        grid down to the first that fails, then a finer one between that and the last that held, and so on. Each grid
        depends on the range alone, so a larger budget never keeps more heads, however noisy the measurements are.

        Raises:
            HeadPruneError: Nothing can go; the hint says the nearest budget that can be met.
        """
        from headprune.metrics import metric_named

        measure, losses, undefined = subject.change, dict[int, Reading](), list[UndefinedError]()
        assert measure is not None

        def holds(steps: int) -> bool:
            if steps not in losses:
                try:
                    change = measure(order.after(steps))
                except UndefinedError as error:  # such as the rank correlation of answers that are all the same
                    undefined.append(error)
                    return False
                readings = (change.value, change.low, change.high)
                if metric_named(change.metric).higher:  # the loss is minus the change
                    readings = (-change.value, -change.high, -change.low)
                losses[steps] = Reading(*readings)
            return losses[steps].high <= self.amount

        held, failed = 0, len(order.steps) + 1
        while failed - held > 1:
            # The first range ends at the last plan, which may hold; later ones end at one that failed.
            end = min(failed, len(order.steps))
            for steps in sorted({held + max(1, round((end - held) * part / _GRID)) for part in range(1, _GRID + 1)}):
                if not holds(steps):
                    failed = steps
                    break
                held = steps
        if held == 0:
            raise undefined[0] if undefined and not losses else self._out_of_reach(order, losses)
        return Fit(replace(order.after(held), budget=str(self)), self, losses[held])

    def _out_of_reach(self, order: Order, losses: dict[int, Reading]) -> HeadPruneError:
        if not losses:
            return HeadPruneError("No head can go.", "; ".join(order.stays))
        smallest = min(losses, key=lambda n: losses[n].high)
        plan, least = order.after(smallest), losses[smallest]
        nearest = f"The nearest that can be met is {self.at_least(least.high)}; more" if least.high < 1 else "More"
        return HeadPruneError(
            f"{self.flag} {self.text} is out of reach: with {plan.kept} of {plan.total} heads the loss is "
            f"{self.show(least.value)}, and with 95 % confidence no more than {self.show(least.high)}.",
            f"{nearest} examples narrow the interval.",
        )

    def show(self, amount: float) -> str:
        return f"{round(amount, 4) + 0.0:.4f}"  # no minus before a loss of 0

    def result(self, kept: int, reading: Reading, where: str) -> str:
        return (
            f"a loss of no more than {self.amount:g}. The fewest heads that hold it, by the upper end of the 95 % interval on the "
            f"choosing part, are {kept}: {self.show(reading.value)} ({self.show(reading.low)} to {self.show(reading.high)}) there."
        )
