"""A search rehearsed: the code that searches, compares and measures, on a model that is never run; what it would run is noted.

So nothing here says in which order a run does what, or how often: that is what `headprune.searching` and the workflow say, which run
as they are. What is found on the way is made up: which heads go, and how good a plan is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.attention import AttentionLayer, Heads
from headprune.estimating.ledger import Ledger, Load
from headprune.estimating.rough import gradients
from headprune.evaluation import Measurement
from headprune.fidelity import Fidelity
from headprune.planning import Order, strategy_named
from headprune.planning.effort import spread
from headprune.planning.units import Unit
from headprune.reference.answers import directions
from headprune.reference.runner import Runner
from headprune.repairing.refit import REMEMBERED
from headprune.trials import Results, Trials

_LOSS = 0.01  # nats, that a made-up plan loses for every percent of the heads


class Rehearsal(Trials):
    """Trials that are noted and not made.

    Args:
        ledger: Where they are noted.
        answers: Directions in which answers differ; 0 where the last step of repair is not made.
        mixes: Whether the model takes mixtures of examples.

    Attributes:
        fits: Of every fit of a layer: the share of its heads that stay, and whether all of its search for a strength is made.
    """

    def __init__(self, *args: Any, ledger: Ledger, answers: int = 0, mixes: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "results": _Unread(self)})
        self._made_of = args, {**kwargs, "ledger": ledger, "answers": answers, "mixes": mixes}
        self.ledger, self.answers, self.mixes = ledger, answers, mixes
        self.fits: list[tuple[str, float, bool]] = []
        self.solved: list[tuple[str, int]] = []
        self.phase = "planning"
        self._choose, self._known_fits = Load.of(self.choose), {}  # type: ignore[var-annotated]
        self._answered = False
        self._generator = torch.Generator().manual_seed(0)

    def anew(self) -> Rehearsal:
        """Another one with the same ledger, for which nothing was measured yet."""
        args, kwargs = self._made_of
        return Rehearsal(*args, **kwargs)

    # -- the dense reference -----------------------------------------------------------------------

    @cached_property
    def refit(self) -> Any:
        """Something that has the runner and no sums."""
        if self.repair:
            self.ledger.add("statistics for repair", "statistics", Load.of(self.runner.batches))
        return SimpleNamespace(
            reference=SimpleNamespace(**vars(self.calibration), passes=0.0),
            model=self.model,
            ridge=None if self.repair else math.inf,
        )

    @cached_property
    def runner(self) -> Runner:
        return self.calibration.runner

    @property
    def look(self) -> Callable[..., Tensor]:
        return self._look

    def _look(
        self, refit: Any, layers: Sequence[AttentionLayer], drop: Heads, units: Sequence[Unit],
        examples: int | None = None, store: object = None,
    ) -> Tensor:  # fmt: skip
        runner = self.calibration.runner
        some = [runner.batches[i] for i in spread(len(runner.batches), runner.examples, examples)]
        self._fit(drop)
        self.ledger.add(self.phase, "a look", Load.of(some))
        return torch.rand(2, len(units), generator=self._generator, dtype=torch.float64)

    # -- plans -------------------------------------------------------------------------------------

    @cached_property
    def _fidelity(self) -> Any:
        self.ledger.add("comparing plans", "a pass", self._choose)
        if not self.choose:
            return SimpleNamespace(known=False)
        from headprune.fidelity import MOST

        batch = self.choose[len(self.choose) // 2]
        one = Fidelity(self.model, [batch])
        bytes_ = sum(t.numel() * t.element_size() for t in one.answers)
        return SimpleNamespace(known=one.known and bytes_ * self._choose.units / Load.of([batch]).units <= MOST)

    def _measured(self, drop: Heads, whole: bool) -> Measurement:
        with self.repaired(drop, whole=whole):
            return self.masked(drop, self.choose)

    def masked(self, drop: Heads, batches: Sequence[Any]) -> Measurement:
        load = Load.of(batches)
        self.ledger.add(self.phase, "evaluating", load)
        return self.made_up(drop, int(load.examples))

    def _nearness(self, drop: Heads) -> float:
        with self.repaired(drop):
            self.ledger.add("comparing plans", "a pass", self._choose)
        return -math.log(self._share(drop) + 1e-3 * float(torch.rand((), generator=self._generator)) + 1e-6)

    @contextmanager
    def repaired(self, drop: Heads, *, whole: bool = False) -> Iterator[None]:
        """Nothing is; what it would take is noted."""
        if self.repair and any(drop.values()):
            self._fit(drop)
            if whole:
                self._whole_repair(drop)
        yield None

    def _fit(self, drop: Heads, again: bool = False) -> None:
        """The fits of the layers that lose heads, but for those that are remembered."""
        if not self.repair or not any(drop.values()):
            return
        _ = self.refit
        for projection in self.calibration.projections:
            if not projection.loses(drop):
                continue
            kept = tuple(projection.kept(drop).tolist())
            share = len(kept) / max(1, len(projection.weight))
            known = self._known_fits.setdefault(projection.name, {})
            if again:
                self.fits.append((self.phase, share, False))
            elif kept not in known:
                known[kept] = True
                self.fits.append((self.phase, share, True))
                if len(known) > REMEMBERED:
                    del known[next(iter(known))]

    def _whole_repair(self, drop: Heads) -> None:
        """The steps tried on examples that they were not fitted to, and the last step (`headprune.repairing.held_out.checked`)."""
        runner, phase = self.calibration.runner, "repair"
        examples = Load.of(runner.batches)
        steps = 2 + bool(self.calibration.values)  # with none: the old weights; and the dense model's answers
        self._fit(drop)
        self.ledger.add(phase, "a pass", examples, 1 + steps, low=3)
        if not self.answers:
            return
        some = examples
        if not self._answered:
            self._answered = True
            self.ledger.add(phase, "a pass", some)
        count = directions(self.answers, int(some.examples))
        self.ledger.add(phase, gradients(count), some)
        self.solved.append((phase, int(some.examples) * count))
        self.ledger.add(phase, "a pass", some, 1, low=1, high=2)

    # -- made up -----------------------------------------------------------------------------------

    def _share(self, drop: Heads) -> float:
        return sum(map(len, drop.values())) / max(1, sum(layer.num_heads for layer in self.maskable))

    def made_up(self, drop: Heads, count: int) -> Measurement:
        """A measurement of so many examples, that is worse with fewer heads."""
        worse = 100 * _LOSS * self._share(drop)
        loss = np.linspace(0.9, 1.1, count) + worse
        correct = (np.arange(count) / count > min(0.9, worse)).astype(float)
        metrics = {
            "loss": float(loss.mean()),
            "accuracy": float(correct.mean()),
            "perplexity": float(np.exp(loss.mean())),
        }
        return Measurement(metrics, loss, correct, np.ones(count))


class _Unread(Results):
    """Nothing is known from an interrupted run; orders of strategies that run the model in ways of their own are made up."""

    def __init__(self, trials: Rehearsal) -> None:
        self._trials = trials

    def order(self, name: str, make: Callable[[], Order]) -> Order:
        trials, strategy = self._trials, name.removeprefix("order ")
        trials.phase = f"planning by {strategy}"
        try:
            found = make() if strategy in _LOOKING or not _runs(strategy) else self._any(strategy)
        finally:
            trials.phase = "comparing plans"
        return found

    def _any(self, strategy: str) -> Order:
        trials = self._trials
        work = trials.work.get(strategy)
        if work is None:
            trials.ledger.unknown.append(f"What the strategy {strategy} does is not counted.")
        else:
            _ = trials.refit
            more = max(0.0, work["passes"] - trials.calibration.cost)
            trials.ledger.add(trials.phase, "evaluating", Load.of(trials.batches), more)
        steps = [{layer.name: [head]} for layer in trials.maskable for head in range(layer.num_heads) if layer.prunable]
        return Order.of(trials.layers, steps[:-1], strategy=strategy)


_LOOKING = ("re-scored", "compensated")


def _runs(name: str) -> bool:
    try:
        return strategy_named(name).runs_model
    except Exception:  # it is named after the scores
        return False
