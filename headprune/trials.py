"""Trials of plans on examples, by which searches compare plans: heads masked, others repaired, each measured once."""

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
    """How a plan did on the choosing examples, in nats: divergence from the dense answers, or if not known, the loss.

    A divergence is never below the rounding error of equal answers (`headprune.divergence.Divergence.rounding`).
    """

    budget: str
    kept: int
    divergence: float | None = None
    loss: float | None = None


@dataclass(eq=False)
class Trials:
    """Trials of plans on the choosing examples: heads masked, not removed, the others repaired. Each is measured once.

    Attributes:
        model: The dense model. It changes only while a context of `repaired` lasts.
        layers: Its attention layers.
        batches: Examples that repair is fitted to, and that heads are ranked by.
        choose: Other examples, on which plans are compared.
        repair: Whether the kept heads are refitted in a trial.
        biases: Whether repair may give a bias to output projections without one.
        metric: The metric of the trade-off curve, and of a budget of lost accuracy.
        loss_fn: As for `headprune.evaluate`.
        store: Keeps the measurements.
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
        """The calibration for repair, on ``batches``; without repair, one that refits nothing."""
        return calibrate(self.model, self.layers, self.batches, repair=self.repair, biases=self.biases)

    @cached_property
    def _fidelity(self) -> Fidelity:
        return Fidelity(self.model, self.choose)

    @property
    def changed_modules(self) -> Sequence[str]:
        """The modules whose weights `repaired` may change."""
        if not self.repair or "calibration" not in vars(self):
            return ()
        known = self.calibration
        # Whole attention modules: a stand-in's projections are parts of tensors with other names in the original.
        around = [layer.module for layer in self.layers]
        return [*around, *(p.name for p in known.projections), *(v.name for v in known.values.values())]

    @property
    def passes(self) -> float:
        """Forward passes over the examples that repair is fitted to, so far."""
        return self.calibration.runner.passes if "calibration" in vars(self) else 0.0

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers whose heads plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def measure(self, drop: Heads, *, whole: bool = False) -> Measurement:
        """Evaluate the repaired model on the choosing examples, with some heads masked; ``whole`` as for `repaired`."""

        def measured() -> Measurement:
            with self.repaired(drop, whole=whole), mask(self.model, drop, layers=self.layers):
                return evaluate(self.model, self.choose, metrics=[self.metric], loss_fn=self.loss_fn)

        return self.store.get(f"trial {sorted(drop.items())}, {whole}", measured)

    @contextmanager
    def repaired(self, drop: Heads, *, whole: bool = False) -> Iterator[Repair | None]:
        """Repair the model while the context lasts; gives the `Repair`, or None if nothing was refitted.

        Args:
            whole: Whether to repair as for the report: with the last step, and without steps that do no better on the
                choosing examples (`headprune.repairing.steps`).
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
        """The paired change from the dense model to a plan, repaired as for the report."""
        return compare(self.measure({}), self.measure(plan.drop, whole=True), self.metric)

    @property
    def judged_by(self) -> str:
        """What `merit` measures, for the report."""
        return "the divergence (KL) from the dense model's answers" if self._fidelity.known else "the loss"

    def check_compares(self) -> None:
        """Refuse to compare plans without choosing examples.

        Raises:
            HeadPruneError: There are none.
        """
        if not self.choose:
            message = "There are no examples to choose between plans by: one batch was given, and no others."
            raise HeadPruneError(message, "Pass choose=[batch, …] with other examples.")

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        Minus the logarithm of the divergence from the dense model's answers, so that large and small budgets weigh
        alike; minus the loss, if these answers are not known.

        Raises:
            HeadPruneError: There are no choosing examples.
        """
        self.check_compares()
        if not self._fidelity.known:
            return -self.measure(plan.drop).metrics["loss"]

        def nearness() -> float:
            with self.repaired(plan.drop), mask(self.model, plan.drop, layers=self.layers):
                return -self._fidelity.log_divergence()

        return self.store.get(f"merit {sorted(plan.drop.items())}", nearness)

    def judge(self, plan: PruningPlan) -> ComparedPlan:
        """The divergence or loss that `merit` measures, in nats."""
        cost = -self.merit(plan)
        if self._fidelity.known:
            return ComparedPlan(plan.budget, plan.kept, divergence=math.exp(cost))
        return ComparedPlan(plan.budget, plan.kept, loss=cost)
