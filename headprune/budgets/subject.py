"""What budgets measure plans on: the dense model, and copies of it that were really pruned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from headprune.attention import Layers
from headprune.evaluation import Change
from headprune.inputs import Example
from headprune.offload import add_stored_biases, copied
from headprune.plans import PruningPlan
from headprune.surgery import prune


@dataclass(frozen=True)
class Subject:
    """The dense model that plans are for, which is never changed.

    Attributes:
        layers: From `headprune.find_attention`.
        example: For the proof of every prune.
        inputs: What is timed, and what operations are counted on.
        biases: Modules that the repair may give a bias, which costs something too.
        change: The change of the metric (accuracy or perplexity) from the dense model to a plan, repaired, on the examples that
            choose; the same for the same plan. None before there is a search.
    """

    model: nn.Module
    layers: Layers
    example: Example
    inputs: Example
    biases: Sequence[str] = ()
    change: Callable[[PruningPlan], Change] | None = None

    def pruned(self, plan: PruningPlan) -> nn.Module:
        """A copy without the plan's heads."""
        model = copied(self.model)
        if plan.drop:
            add_stored_biases(model, self.biases)
        prune(model, plan.drop, self.example, layers=self.layers)  # the fingerprint was checked: this is a copy
        return model
