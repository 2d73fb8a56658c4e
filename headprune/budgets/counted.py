"""Budgets of what can be counted on a pruned copy: parameters and operations."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from headprune.budgets.base import Reading, budget
from headprune.budgets.limit import Cost, Limit

if TYPE_CHECKING:
    from torch import nn

    from headprune.budgets.subject import Subject
    from headprune.inputs import Example
    from headprune.plans import PruningPlan


class Counted(Limit):
    """A budget of a count, which is the same whenever it is made."""

    @abstractmethod
    def count(self, model: nn.Module, inputs: Example) -> float:
        """The count, for a dense or a pruned model on one input."""

    def cost(self, subject: Subject) -> Cost:
        dense = self.count(subject.model, subject.inputs) if self.relative else 1.0

        def counted(plan: PruningPlan) -> Reading:
            return Reading.exact(self.count(subject.pruned(plan), subject.inputs) / dense)

        return Cost(counted, counted)


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
