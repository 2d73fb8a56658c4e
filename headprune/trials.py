"""Plans tried on examples: heads masked, the others repaired, each measured once. What searches compare plans by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from headprune.attention import AttentionLayer, Heads
from headprune.divergence import Fidelity
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.gates import mask
from headprune.losses import LossFn
from headprune.planning import Order
from headprune.plans import PruningPlan
from headprune.reference import Calibration, calibrate, measure
from headprune.repairing import Refit, Repair, checked
from headprune.scoring.base import Store

T = TypeVar("T")


class Results:
    """Where a search keeps what it has made, by name. This one forgets; `headprune.app.workflow.stages` has one on disk."""

    @property
    def store(self) -> Store | None:
        """For tensors that are made on the way."""
        return None

    def get(self, name: str, make: Callable[[], Any], read: Callable[[Any], T]) -> T:
        """A result: what ``read`` understands what ``make`` gives (as JSON can hold it) to be."""
        return read(make())

    def measurement(self, name: str, make: Callable[[], Measurement]) -> Measurement:
        """A result that was measured."""
        return make()

    def order(self, name: str, make: Callable[[], Order]) -> Order:
        """A result that was planned."""
        return make()


class Trials:
    """Plans tried on the examples that choose: heads masked, not removed, and the others repaired. Each is measured once.

    Args:
        model: The dense model. It changes only while a context of `repaired` lasts.
        layers: Its attention layers.
        batches: Examples that repair is fitted to, and that heads are ranked by.
        choose: Others, that plans are compared on.
        repair: Whether the heads that stay are refitted in a plan that is tried.
        biases: Whether repair may give output projections a bias that have none.
        metric: Of a point of the trade-off curve, and of a budget of lost accuracy.
        loss_fn: As for `headprune.evaluate`.
        results: Where what is measured is kept.

    Attributes:
        work: What making the orders was counted to cost, by name; and of those that were left out for that, why. For the report.
        compared: How the orders that met the budgets did, where there were several (`headprune.searching.fits_of`). For the report.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        batches: Sequence[Any],
        choose: Sequence[Any],
        *,
        repair: bool = True,
        biases: bool = True,
        metric: str = "loss",
        loss_fn: LossFn | None = None,
        results: Results | None = None,
    ) -> None:
        self.model, self.layers, self.batches, self.choose = model, layers, list(batches), list(choose)
        self.biases = biases
        self.repair, self.metric, self.loss_fn, self.results = repair, metric, loss_fn, results or Results()
        self.work: dict[str, dict[str, Any]] = {}
        self.compared: list[dict[str, Any]] = []
        self._known: dict[str, Measurement] = {}
        self._merits: dict[str, float] = {}

    # The dense model's facts are made when the first result needs them that is not known from an interrupted run; of the dense
    # weights whenever that is: only `repaired` writes others into the model, and that takes the dense ones first.

    @cached_property
    def calibration(self) -> Calibration:
        """The dense weights, and the examples that repair is fitted to."""
        return calibrate(self.model, self.layers, self.batches, repair=self.repair, biases=self.biases)

    @cached_property
    def refit(self) -> Refit:
        """Fits of every layer for itself; of none, and with nothing to fit to, if there is to be no repair."""
        return Refit(measure(self.calibration, answers=False), None if self.repair else math.inf)

    @cached_property
    def _whole(self) -> Refit:
        """As `refit`, with what the last step is made from."""
        return self.refit.with_answers()

    @cached_property
    def _fidelity(self) -> Fidelity:
        with self.calibration.weights.dense() if self.repair else nullcontext():
            return Fidelity(self.model, self.choose, self.calibration.weights.dense if self.repair else nullcontext)

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
        key = repr((sorted(drop.items()), whole))
        if key not in self._known:
            self._known[key] = self.results.measurement(f"trial {key}", lambda: self._measured(drop, whole))
        return self._known[key]

    def _measured(self, drop: Heads, whole: bool) -> Measurement:
        with self.repaired(drop, whole=whole):
            return self.masked(drop, self.choose)

    @contextmanager
    def repaired(self, drop: Heads, *, whole: bool = False) -> Iterator[Repair | None]:
        """The model repaired, while the context lasts; what that did.

        Args:
            whole: Whether as what is reported is: with the last step, and without those that do no better on the examples that
                choose (`headprune.repairing.held_out`).
        """
        if not self.repair or not any(drop.values()):
            yield None
            return
        refit = self._whole if whole else self.refit
        before = self.passes
        weights = checked(refit, drop, self._fidelity if self.choose else None) if whole else refit.fitted(drop)
        if not weights:
            yield None
            return
        with refit.applied(weights):
            yield refit.report(weights, self.passes - before)

    def change_at(self, plan: PruningPlan) -> Change:
        """The paired change from the dense model to a plan, repaired as it will be."""
        return compare(self.measure({}), self.measure(plan.drop, whole=True), self.metric)

    @property
    def judged_by(self) -> str:
        """What `merit` goes by, for the report."""
        return "the divergence (KL) from the dense model's answers" if self._fidelity.known else "the loss"

    def merit(self, plan: PruningPlan) -> float:
        """How good a plan is; higher is better.

        By how near its answers stay to the dense model's: minus the logarithm of the divergence, so that large and small
        budgets weigh alike. Minus the loss, where these answers are not known.

        Raises:
            HeadPruneError: There are no examples that choose.
        """
        if not self.choose:
            raise HeadPruneError(
                "There are no examples to choose between plans by: one batch was given, and no others.",
                "Pass choose=[batch, …] with other examples.",
            )
        if not self._fidelity.known:
            return -self.measure(plan.drop).metrics["loss"]
        key = repr(sorted(plan.drop.items()))
        if key not in self._merits:
            self._merits[key] = self.results.get(f"merit {key}", lambda: self._nearness(plan.drop), float)
        return self._merits[key]

    def judged(self, plan: PruningPlan) -> dict[str, float]:
        """What `merit` goes by: the divergence (nats), or where that is not known the loss; lower is better."""
        merit = -self.merit(plan)
        return {"divergence": math.exp(merit)} if self._fidelity.known else {"loss": merit}

    def _nearness(self, drop: Heads) -> float:
        with self.repaired(drop), mask(self.model, drop, layers=self.layers):
            return -self._fidelity.log_divergence()

    def point(self, name: str, plan: PruningPlan) -> dict[str, Any]:
        """A point of the trade-off curve."""
        measured = self.measure(plan.drop)
        low, high = interval(measured, self.metric)
        return {
            "method": name, "kept": plan.kept, "asked": plan.asked, "value": measured.metrics[self.metric],
            "low": low, "high": high, "loss": measured.metrics["loss"],
        }  # fmt: skip
