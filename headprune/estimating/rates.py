"""What each kind of work costs on this device: the work itself, done on a few batches and metered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from headprune import latency
from headprune.attention import AttentionLayer, Heads
from headprune.estimating.ledger import Load, Rate
from headprune.estimating.meter import Meter, clock, metered, resident
from headprune.evaluation import evaluate
from headprune.inputs import call, model_device, move, tensors, usable
from headprune.loss import LossFn, inputs_of
from headprune.planning.effects import effects
from headprune.planning.state import State
from headprune.planning.strategies import Search
from headprune.reference import DenseReference, calibrate, measure
from headprune.reference.answers import DenseAnswers, dense_answers
from headprune.repairing import Refit
from headprune.rows import apparent_size, by_names
from headprune.scoring import Settings, score
from headprune.scoring.base import cost_of
from headprune.trace import evaluating

_FEW = 8  # examples of a batch that a method is tried on that runs the model for every head
_LOOPS = ("statistics", "directions", "mixtures")
_ADAM = 6  # reads and writes of a weight in a step of the optimizer, about, with the norm of its gradient
_MATRIX = 768  # rows of the product that shows how fast matrices are multiplied


@dataclass
class Sampler:
    """Measures on a few batches of the user's data.

    Args:
        batches: The scoring examples.
        count: How many of their batches to measure on.

    Attributes:
        sample: These.
        held: Bytes of this process before.
        peak: Bytes that any of the work held more than before it.
    """

    model: nn.Module
    layers: Sequence[AttentionLayer]
    batches: Sequence[Any]
    count: int = 2
    repair: bool = True
    biases: bool = True
    loss_fn: LossFn | None = None
    distil: bool = False
    settings: Settings | None = None
    peak: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.held = resident()
        self.batches = [usable(batch) for batch in self.batches]
        order = sorted(
            range(len(self.batches)), key=lambda i: cost_of(self.batches[i]) / max(1, apparent_size(self.batches[i]))
        )
        count = min(self.count, len(order))
        # The middles of as many equal parts: short ones and long ones.
        self.sample = [self.batches[order[(2 * i + 1) * len(order) // (2 * count)]] for i in range(count)]
        self.load = Load.of(self.sample)
        self.device = model_device(self.model)
        with torch.inference_mode(), evaluating(self.model):  # the first pass makes what later ones find
            call(self.model, move(inputs_of(self.model, self.sample[0]), self.device))

    @property
    def maskable(self) -> list[AttentionLayer]:
        return [layer for layer in self.layers if layer.maskable]

    def metered(self, work: Callable[[], Any]) -> Meter:
        """What a piece of work takes."""
        with metered(self.model) as meter:
            work()
        self.peak = max(self.peak, meter.peak)
        return meter

    @cached_property
    def pass_seconds(self) -> float:
        """Of one forward pass over the first batch of the sample."""
        batch = move(inputs_of(self.model, self.sample[0]), self.device)
        began = clock(self.device)
        with torch.inference_mode(), evaluating(self.model):
            call(self.model, batch)
        return clock(self.device) - began

    # -- floating-point operations -----------------------------------------------------------------

    @cached_property
    def _counted(self) -> tuple[list[float], list[float]]:
        """Numbers in single examples, and operations of a forward pass over each; short ones first."""
        every = sorted(self.batches, key=lambda batch: cost_of(batch) / max(1, apparent_size(batch)))
        found: dict[float, float] = {}
        for i in sorted({0, len(every) // 2, len(every) - 1}):
            try:
                one = by_names(every[i]).take(every[i], [0])
                found[cost_of(one)] = float(latency.flops(self.model, inputs_of(self.model, one)))
            except Exception:  # a model that does not take one example: a whole batch then
                size = max(1, apparent_size(every[i]))
                found[cost_of(every[i]) / size] = latency.flops(self.model, inputs_of(self.model, every[i])) / size
        return list(found), list(found.values())

    def flops(self, batches: Sequence[Any]) -> float:
        """Of one forward pass over batches, by the real lengths of their examples, padding included."""
        sizes, counts = self._counted
        found = 0.0
        for batch in batches:
            size = max(1, apparent_size(batch))
            found += size * _between(cost_of(batch) / size, sizes, counts)
        return found

    @cached_property
    def flops_per_unit(self) -> float:
        """Of a forward pass, on average over the scoring examples."""
        return self.flops(self.batches) / max(1.0, Load.of(self.batches).units)

    # -- passes ------------------------------------------------------------------------------------

    def _rate(self, meter: Meter, *loops: str, load: Load | None = None, back: float = 1.0) -> Rate:
        """From what was metered: its loops grow with the load, the rest does not.

        Args:
            back: Operations of a backward pass, in those of a forward pass.
        """
        load, spent = load or self.load, meter.loop(*loops)
        forward, backward = spent.forward / load.examples, spent.backward / load.examples
        fixed = meter.rest(*loops)
        return Rate(
            spent.seconds / load.units, fixed, forward, backward, (forward + back * backward) * self.flops_per_unit
        )

    def evaluating(self) -> Rate:
        """A model measured, heads masked or not."""
        return self._rate(self.metered(lambda: evaluate(self.model, self.sample, loss_fn=self.loss_fn)), "evaluating")

    def scoring(self, name: str) -> Rate:
        """A turn of a scoring method through the examples (`PARTS`)."""
        known = PARTS.get(name, Part())
        sample = [self._part(self.sample[0])] if known.by_head else self.sample
        if known.whole:
            return self._twice(name, known, sample)
        meter, load = self._scored(name, known.settings, sample), Load.of(sample)
        rate = self._rate(meter, *meter.loops, load=load)
        # Of the passes for every head only what comes behind its layer is made: on average, half.
        return replace(rate, flops=rate.flops / 2) if known.by_head else rate

    def _scored(self, name: str, told: Mapping[str, Any], sample: Sequence[Any]) -> Meter:
        settings = replace(self.settings or Settings(), examples=None, seconds=None, **told)
        return self.metered(
            lambda: score(
                self.model,
                sample,
                name,
                layers=self.layers,
                loss_fn=self.loss_fn,
                distil=self.distil,
                settings=settings,
            )
        )

    def _twice(self, name: str, known: Part, sample: Sequence[Any]) -> Rate:
        """A method whose loop is its own: it is done, and twice as much of it is, so that what does not grow is told apart."""
        first = self._scored(name, known.settings, sample[:1])
        more = {"steps": 2 * known.steps} if known.steps else known.settings
        second = self._scored(name, more, sample[:1] if known.steps else [sample[0], sample[0]])
        load = Load.of(sample[:1]).times(known.steps or 1)
        grown = [max(0.0, getattr(second, part) - getattr(first, part)) for part in ("seconds", "forward", "backward")]
        forward, backward = grown[1] / load.examples, grown[2] / load.examples
        return Rate(
            grown[0] / load.units,
            max(0.0, first.seconds - grown[0]),
            forward,
            backward,
            (forward + backward) * self.flops_per_unit,
        )

    def _part(self, batch: Any) -> Any:
        size = apparent_size(batch)
        try:
            return by_names(batch).take(batch, list(range(min(_FEW, size)))) if size > _FEW else batch
        except Exception:  # of a form that cannot be parted
            return batch

    # -- repair ------------------------------------------------------------------------------------

    @cached_property
    def _measured(self) -> tuple[Refit, Meter]:
        found: list[DenseReference] = []

        def work() -> None:
            calibration = calibrate(self.model, self.layers, self.sample, repair=self.repair, biases=self.biases)
            found.append(measure(calibration, answers=False))

        with metered(self.model) as meter:  # the sums that it makes are counted apart, so this is not what a pass takes
            work()
        return Refit(found[0], None if self.repair else math.inf), meter

    @property
    def refit(self) -> Refit:
        """To the batches that were measured on."""
        return self._measured[0]

    def statistics(self) -> Rate:
        """What repair and search rest on. The load is the examples, each counted again for every mixture."""
        refit, meter = self._measured
        reference, runner = refit.reference, refit.reference.runner
        mixed = sum(len(m.firsts) for m in runner.mixtures)
        load = self.load.times(1 + mixed / max(1, runner.examples))
        rate = self._rate(meter, *_LOOPS, load=load)
        # Block by block no call of the model comes to its end, which is what a meter counts.
        backward = 1.0 if reference.projections else 0.0
        forward = max(0.0, reference.passes * runner.examples / load.examples - 2 * backward)
        return replace(rate, forward=forward, backward=backward, flops=(forward + backward) * self.flops_per_unit)

    def looking(self) -> Rate:
        """A look at what every head is worth, nothing being gone."""
        search = Search(self.maskable)
        units = State(search).units()
        return self._rate(self.metered(lambda: effects(self.refit, self.maskable, {}, units)), "a look")

    def fits(self) -> tuple[float, float, float]:
        """Seconds of a layer's fit with half of its heads; how they grow with the heads that stay (an exponent); and what fitting it
        again with the same strength takes of them."""
        fitted = {layer.name for p in self.refit.reference.projections for layer in p.layers}
        able = [layer for layer in self.maskable if layer.name in fitted and layer.prunable and layer.num_heads > 1]
        if not able or not self.repair:
            return 0.0, 2.0, 0.0
        layer = able[len(able) // 2]
        half, most = layer.num_heads // 2, max(layer.num_heads // 2 + 1, 7 * layer.num_heads // 8)
        (small, again), (large, _) = (self._fit({layer.name: list(range(k, layer.num_heads))}) for k in (half, most))
        if most >= layer.num_heads:
            return small, 2.0, again / max(small, 1e-9)
        power = math.log(max(large, 1e-9) / max(small, 1e-9)) / math.log(most / half)
        return small, min(3.0, max(0.0, power)), again / max(small, 1e-9)

    def _fit(self, drop: Heads) -> tuple[float, float]:
        """Seconds of a fit of one layer, and of another one with the same strength."""
        refit, cpu = self.refit, torch.device("cpu")
        began = clock(cpu)
        weights = refit.fitted(drop)
        middle = clock(cpu)
        with torch.inference_mode(False), torch.no_grad():
            for name, fit in weights.fits.items():
                fit.again(refit.reference.moments[name].only(0))
        return middle - began, clock(cpu) - middle

    def slopes(self) -> Rate:
        """A pass with gradients along one direction at every output projection."""
        runner = self.refit.reference.runner
        index = range(len(self.sample))
        meter = self.metered(lambda: [runner.slopes(i) for i in index])
        return Rate(meter.seconds / self.load.units, 0.0, 1.0, 1.0, 2 * self.flops_per_unit)

    def training(self) -> Rate:
        """A step of fine-tuning with distillation: forward and backward with gradients for all weights, the optimizer, and the dense
        model's pass."""
        batch, load = move(self.sample[-1], self.device), Load.of([self.sample[-1]])
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        before = [p.requires_grad for p in weights]

        def step() -> None:
            some = [t for t in tensors(call(self.model, inputs_of(self.model, batch))) if t.requires_grad]
            loss = torch.stack([t.float().square().mean() for t in some]).sum()
            torch.autograd.grad(loss, weights, allow_unused=True)

        try:
            for p in weights:
                p.requires_grad_(True)
            with torch.inference_mode(False), torch.enable_grad(), evaluating(self.model):
                meter = self.metered(step)
        finally:
            for p, was in zip(weights, before, strict=True):
                p.requires_grad_(was)
        dense = self.metered(lambda: evaluate(self.model, [batch], loss_fn=self.loss_fn)).loop("evaluating").seconds
        updated = sum(p.numel() for p in weights) * _ADAM * self._stream
        return Rate((meter.seconds + dense + updated) / load.units, 0.0, 2.0, 1.0, 4 * self.flops_per_unit)

    @cached_property
    def _stream(self) -> float:
        """Seconds to read and write a float32 on the model's device."""
        a = torch.zeros(1 << 22, device=self.device)
        a += 1
        began = clock(self.device)
        a += 1
        return (clock(self.device) - began) / a.numel()

    @cached_property
    def products(self) -> float:
        """Floating-point operations a second of products of large float32 matrices on this machine's CPU."""
        a = torch.ones(_MATRIX, _MATRIX)
        a @ a
        began = clock(torch.device("cpu"))
        a @ a
        return 2 * _MATRIX**3 / max(1e-9, clock(torch.device("cpu")) - began)


def _between(at: float, sizes: Sequence[float], counts: Sequence[float]) -> float:
    """Operations of an example of a size: linear between those that were counted, in proportion outside of them."""
    if not counts:
        return 0.0
    if at > sizes[-1]:
        return counts[-1] * at / sizes[-1]
    return float(np.interp(at, sizes, counts)) if at >= sizes[0] else counts[0] * at / sizes[0]


def traits(model: nn.Module, layers: Sequence[AttentionLayer], batch: Any) -> tuple[int, bool]:
    """In how many directions the model's answers differ, 0 where the last step of repair is not made; and whether it takes mixtures."""
    try:
        some = by_names(batch).take(batch, list(range(min(_FEW, apparent_size(batch)))))
    except Exception:  # of a form that cannot be parted
        some = batch
    calibration = calibrate(model, layers, [some], values=False)
    answers = dense_answers(calibration.runner)
    return len(answers.basis) if isinstance(answers, DenseAnswers) else 0, False


# -- scoring methods that do not simply go through the examples once -------------------------------


Turns = tuple[float, float, float]


@dataclass(frozen=True)
class Part:
    """How a method is measured on a few examples.

    Attributes:
        settings: What it is told, so that this is short.
        by_head: Whether it runs the model for every head.
        whole: Whether all of its time is taken as one: no single loop of it grows with the examples.
        steps: Batches that it takes when it is measured, where it does not take each once.
        turns: ``(settings, batches, examples)`` to how often a real run does over all examples what was measured: typically, at least, at most.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    by_head: bool = False
    whole: bool = False
    steps: int = 0
    turns: Callable[[Settings, int, int], Turns] = lambda settings, batches, examples: (1.0, 1.0, 1.0)


def _turns_of_shapley(settings: Settings, batches: int, examples: int) -> Turns:
    """It stops when it is sure enough, at the latest after all permutations."""
    most = max(1, (settings.permutations or 128) // 2 // batches)
    return float(most), 1.0, float(most)


def _turns_of_ablation(settings: Settings, batches: int, examples: int) -> Turns:
    """Of few examples, where few were asked for."""
    part = 1.0 if settings.examples is None else min(1.0, settings.examples / examples)
    return part, part, part


def _turns_of_path(settings: Settings, batches: int, examples: int) -> Turns:
    """In points of integration, of which 4 were measured. They double, up to 64, where they do not add up, and stay so for later
    batches: the passes with 4, 8, 16 and 32 points that were too few are made of one batch each."""
    if settings.steps:
        return settings.steps / 4, settings.steps / 4, settings.steps / 4
    return 2.0, 1.0, 16.0 + 15.0 / batches


def _turns_of_gates(settings: Settings, batches: int, examples: int) -> Turns:
    """In passes over all batches; a step takes one batch."""
    steps = settings.steps or max(200, 2 * batches)
    return steps / batches, steps / batches, steps / batches


PARTS: dict[str, Part] = {
    "ablation": Part(by_head=True, turns=_turns_of_ablation),
    "mean-ablation": Part(by_head=True),
    "resample-ablation": Part(by_head=True),
    "shapley": Part({"permutations": 2}, by_head=True, turns=_turns_of_shapley),
    "integrated-gradients": Part({"steps": 4}, whole=True, turns=_turns_of_path),
    "l0": Part({"steps": 4}, whole=True, steps=4, turns=_turns_of_gates),
    "dsp": Part({"steps": 4}, whole=True, steps=4, turns=_turns_of_gates),
}
"""Methods that are not one turn through the examples; a method that is not named here is taken to be."""
