"""Plans tried on examples: heads masked, the others repaired, each measured once. What searches compare plans by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from headprune.attention import AttentionLayer, Heads, Layers
from headprune.divergence import Fidelity
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate
from headprune.gates import mask
from headprune.losses import LossFn
from headprune.plans import PruningPlan
from headprune.repairing import Calibration, Repair, calibrate, checked_repair, fit_layers, summary
from headprune.store import Store


@dataclass(frozen=True)
class ComparedPlan:
    """How a plan did on the choosing examples: divergence from the dense model's answers, or where that is not known the loss, in nats.

    A divergence is never less than what rounding makes of equal answers (`headprune.divergence.Divergence.rounding`).
    """

    budget: str
    kept: int
    divergence: float | None = None
    loss: float | None = None


@dataclass(eq=False)
class Trials:
    """Plans tried on the examples that choose: heads masked, not removed, and the others repaired. Each is measured once.

    Attributes:
        model: The dense model. It changes only while a context of `repaired` lasts.
        layers: Its attention layers.
        batches: Examples that repair is fitted to, and that heads are ranked by.
        choose: Others, that plans are compared on.
        repair: Whether the heads that stay are refitted in a plan that is tried.
        biases: Whether repair may give output projections a bias that have none.
        metric: Of a point of the trade-off curve, and of a budget of lost accuracy.
        loss_fn: As for `headprune.evaluate`.
        store: Where what is measured is kept.
    """

    model: nn.Module
    layers: Layers
    batches: Sequence[Any]
    choose: Sequence[Any]
    repair: bool = True
    biases: bool = True
    metric: str = "loss"
    loss_fn: LossFn | None = None
    store: Store = field(default_factory=Store)

    @cached_property
    def calibration(self) -> Calibration:
        """The dense model, and the examples that repair is fitted to; with nothing to fit to, if there is to be no repair."""
        return calibrate(self.model, self.layers, self.batches, repair=self.repair, biases=self.biases)

    @cached_property
    def _fidelity(self) -> Fidelity:
        return Fidelity(self.model, self.choose)

    @property
    def written(self) -> Sequence[str]:
        """The modules whose weights `repaired` may change."""
        if not self.repair or "calibration" not in vars(self):
            return ()
        known = self.calibration
        # Of attention the whole module: a stand-in's projections are parts of tensors that have other names there.
        around = [layer.module for layer in self.layers]
        return [*around, *(p.name for p in known.projections), *(v.name for v in known.values.values())]

    @property
    def passes(self) -> float:
        """Forward passes over the examples that repair is fitted to, so far."""
        return self.calibration.runner.passes if "calibration" in vars(self) else 0.0

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers that plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def masked(self, drop: Heads, batches: Sequence[Any]) -> Measurement:
        """The model as it is now, without some heads, on batches."""
        with mask(self.model, drop, layers=self.layers):
            return evaluate(self.model, batches, loss_fn=self.loss_fn)

    def measure(self, drop: Heads, *, whole: bool = False) -> Measurement:
        """The model without some heads, repaired, on the examples that choose; ``whole`` as for `repaired`."""

        def measured() -> Measurement:
            with self.repaired(drop, whole=whole):
                return self.masked(drop, self.choose)

        return self.store.get(f"trial {sorted(drop.items())}, {whole}", measured)

    @contextmanager
    def repaired(self, drop: Heads, *, whole: bool = False) -> Iterator[Repair | None]:
        """The model repaired, while the context lasts; what that did.

        Args:
            whole: Whether as what is reported is: with the last step, and without those that do no better on the examples that
                choose (`headprune.repairing.steps`).
        """
        if not self.repair or not any(drop.values()):
            yield None
            return
        calibration = self.calibration
        measured = calibration.statistics.passes + (calibration.answers[1] if whole else 0.0)  # once for all plans
        before = self.passes
        if whole:
            weights = checked_repair(calibration, drop, self._fidelity if self.choose else None)
        else:
            weights = fit_layers(calibration, drop)
        if not weights:
            yield None
            return
        with calibration.applied(weights.by_module):
            yield summary(calibration, weights, measured + self.passes - before)

    def change_at(self, plan: PruningPlan) -> Change:
        """The paired change from the dense model to a plan, repaired as it will be."""
        return compare(self.measure({}), self.measure(plan.drop, whole=True), self.metric)

    @property
    def judged_by(self) -> str:
        """What `merit` goes by, for the report."""
        return "the divergence (KL) from the dense model's answers" if self._fidelity.known else "the loss"

    def check_compares(self) -> None:
        """Refuse to compare plans where there are no examples that choose.

        Raises:
            HeadPruneError: There are none.
        """
        if not self.choose:
            message = "There are no examples to choose between plans by: one batch was given, and no others."
            raise HeadPruneError(message, "Pass choose=[batch, …] with other examples.")

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        By how near its answers stay to the dense model's: minus the logarithm of the divergence, so that large and small
        budgets weigh alike. Minus the loss, where these answers are not known.

        Raises:
            HeadPruneError: There are no examples that choose.
        """
        self.check_compares()
        if not self._fidelity.known:
            return -self.measure(plan.drop).metrics["loss"]

        def nearness() -> float:
            with self.repaired(plan.drop), mask(self.model, plan.drop, layers=self.layers):
                return -self._fidelity.log_divergence()

        return self.store.get(f"merit {sorted(plan.drop.items())}", nearness)

    def judge(self, plan: PruningPlan) -> ComparedPlan:
        """What `merit` goes by, in nats."""
        cost = -self.merit(plan)
        if self._fidelity.known:
            return ComparedPlan(plan.budget, plan.kept, divergence=math.exp(cost))
        return ComparedPlan(plan.budget, plan.kept, loss=cost)
