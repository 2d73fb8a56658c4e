"""What a run will cost: its own long work (`carry_out_all`), rehearsed, and what lies around that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune import latency, searching
from headprune.app.data import Part, load_train
from headprune.app.documents import Environment, Proved, Refitted
from headprune.app.folders import Folder
from headprune.app.runs import RunFolder
from headprune.app.workflow.results import Job, Made
from headprune.app.workflow.scene import Console, Scene
from headprune.app.workflow.stages import Stages
from headprune.app.workflow.timing import inputs
from headprune.errors import first_line
from headprune.estimating import (
    SILENT,
    CostEstimate,
    Ledger,
    Limits,
    Load,
    Rehearsal,
    Sampler,
    TooShortError,
    add_scoring,
    bisected,
    estimated,
    made_up_scores,
    rough,
    traits,
    worth,
    worth_rehearsing,
)
from headprune.estimating.memory import weights_of
from headprune.evaluation import Measurement
from headprune.modules import config_kept
from headprune.plans import PruningPlan
from headprune.ranks import current
from headprune.repairing import AnswersRepair
from headprune.scoring import HeadScores
from headprune.searching import AUTO
from headprune.timing import decoding, shares

if TYPE_CHECKING:
    from headprune.app.workflow.pruning import PruneRun

BEFORE_A_RUN = Limits(batches=2, share=0.02, least=10.0)
"""For the line before a run: what is over in seconds needs none, and it must not take long itself."""

_REPORT = 2.0  # seconds that the report and its pictures take, about (1.0 to 1.7 of a CPU for the committed reports)
_PROFILED = 5.0  # forward passes, about, that looking at what heads do takes on each of its examples
_LOOKED_AT = 64  # examples of that
_CLOCKED = 3  # passes with an input that is going to be timed: the first is slower, and one may be disturbed
_PARTS = 1.5  # seconds, at least, that the parts of a pass are timed for, with each input
_REPORT_MEMORY = 250_000_000  # bytes, about, that the libraries hold which draw and profile
_STORED = 2e8  # bytes a second: a pruned model copied, proved, hashed, written, read and hashed again


def announce(console: Console, make: Callable[[], CostEstimate]) -> None:
    """Say in one line what is to come. Nothing, where that is over soon; and why not, where it cannot be told. It never stops a run."""
    try:
        found = current().first("estimate", make)
    except TooShortError:
        return
    except Exception as error:
        console.say(f"How long this takes could not be estimated ({type(error).__name__}: {first_line(error)}).")
        return
    size = current().size
    console.say(found.line if size == 1 else f"{found.line} This is for one process; {size} share the work.")


def begun(folder: Folder, *names: str) -> bool:
    """Whether an interrupted run has left something of these computations: how much there is still to do is not known then.

    Args:
        names: Of stages, and of scoring methods: a method's finished parts are there before its stage is.
    """
    return any(next(folder.unfinished.glob(f"{name}*"), None) is not None for name in names)


def estimate_score(scene: Scene, methods: Sequence[str], limits: Limits | None = None) -> CostEstimate:
    """What `score_run` will cost, without loading the model and the data."""
    began, limits, ledger = time.monotonic(), limits or Limits(), Ledger()
    with torch.inference_mode(False), torch.random.fork_rng(), config_kept(scene.model):
        batches = list(scene.parts.score.batches())
        add_scoring(ledger, methods, batches, scene.options.scoring)
        sampler = _sampler(scene, batches, limits, repair=False)
        worth(ledger, sampler, _heads(scene), limits, time.monotonic() - began)
        _profiles(ledger, batches)
        return estimated(ledger, sampler, None, limits, began)


def estimate_prune(
    asked: PruneRun, scene: Scene, scores: Sequence[HeadScores] = (), limits: Limits | None = None
) -> CostEstimate:
    """What `prune_run` will cost, without loading the model and the data.

    Args:
        scores: Those that there are.
    """
    from headprune.app.workflow.pruning import carry_out_all  # which calls `announce`

    began, limits, ledger = time.monotonic(), limits or Limits(), Ledger()
    with torch.inference_mode(False), torch.random.fork_rng(), config_kept(scene.model):
        batches = list(scene.parts.score.batches())
        methods = list(asked.methods) if asked.source is None and asked.goal.uses_scores else []
        add_scoring(ledger, methods, batches, scene.options.scoring)
        sampler = _sampler(scene, batches, limits, asked.goal.repair, asked.goal.strategy)
        worth_rehearsing(ledger, sampler, _heads(scene), limits)
        known = asked.candidates(scores) if asked.source is not None else made_up_scores(scene.maskable, methods)
        rehearsal = _rehearsal(asked, scene, batches, sampler, ledger)
        orders = 1 if asked.goal.plan else len(asked.goal.request(scene).searches(known))
        budgets = bisected(asked.goal.budgets, ledger, _heads(scene), orders, sampler.pass_seconds)
        job = Rehearsed(
            scene, replace(asked.goal, budgets=budgets), rehearsal, Stages(), RunFolder(Path("rehearsed")), SILENT
        )  # fmt: skip
        done = carry_out_all(job, known, _NOWHERE)
        worth(ledger, sampler, _heads(scene), limits, time.monotonic() - began)
        _timing(ledger, scene, len(done.budgets) + 2, sampler)
        if asked.source is None:
            _profiles(ledger, batches)
        else:
            ledger.add("report", rough.SECONDS, Load(0, _REPORT))
        for name in asked.exports:
            ledger.unknown.append(f"The export to {name} is not counted.")
        found = estimated(ledger, sampler, rehearsal, limits, began, copies=len(done.budgets) + 2)
        more = _REPORT_MEMORY if sampler.device.type == "cpu" else 0
        parts = {**found.memory_parts, "drawing and profiling": more}
        return replace(found, memory=found.memory + more, memory_parts=parts)


def estimate_finetune(
    model: nn.Module, train: Part, choose: Part, report: Part, epochs: float, patience: int,
    limits: Limits | None = None,
) -> CostEstimate:  # fmt: skip
    """What fine-tuning a model and measuring three will cost."""
    began, limits, ledger = time.monotonic(), limits or Limits(), Ledger()
    with torch.inference_mode(False), torch.random.fork_rng(), config_kept(model):
        batches = _some(train, limits.batches)
        _trained(ledger, train, choose, epochs, patience)
        ledger.add("measuring", "evaluating", load_of(report), 3)
        sampler = Sampler(model, [], batches, limits.of(len(batches) * 10), repair=False)
        worth(ledger, sampler, 0, limits, time.monotonic() - began)
        found = estimated(ledger, sampler, None, limits, began, copies=4)
        per = load_of(train).examples / found.examples  # passes are over all that is trained on
        phases = tuple(
            replace(
                p,
                forward=p.forward / per,
                backward=p.backward / per,
                forward_low=p.forward_low / per,
                forward_high=p.forward_high / per,
            )
            for p in found.phases
        )
        return replace(
            found, phases=phases, examples=len(train), forward=found.forward / per, backward=found.backward / per,
            forward_low=found.forward_low / per, forward_high=found.forward_high / per,
        )  # fmt: skip


# -- the rehearsal ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsed(Job):
    """A job whose measurements and models are noted, and not made."""

    @property
    def ledger(self) -> Ledger:
        assert isinstance(self.trials, Rehearsal)
        return self.trials.ledger

    def measured(self, name: str, model: nn.Module, label: str, also: Part | None = None) -> Measurement:
        assert isinstance(self.trials, Rehearsal)
        part = also or self.scene.parts.report
        self.trials.phase = "comparing with other plans"
        self.ledger.add("measuring", "evaluating", load_of(part))
        return self.trials.made_up({}, len(part))

    def made(self, plan: PruningPlan, path: Path) -> tuple[Made, nn.Module]:
        trials, scene = self.trials, self.scene
        assert isinstance(trials, Rehearsal)
        with trials.repaired(plan.drop, whole=True):
            self.ledger.add("saving", rough.SECONDS, Load(0, weights_of(scene.model) / _STORED))
        if self.goal.finetune:
            train, _ = load_train(scene.options.data, scene.loaded, scene.parts)
            self.ledger.add("measuring", "evaluating", load_of(scene.parts.report))
            _trained(self.ledger, train, scene.parts.choose, self.goal.finetune, 2)
        repair = None
        if trials.repair and any(plan.drop.values()):
            answers = AnswersRepair(1.0, 1.0, 1.0, 1) if trials.answers else None
            repair = Refitted(layers={}, examples=1, passes=0, biases=(), notes=(), answers=answers)
        proof = Proved(difference=0.0, tolerance=0.0, inputs=0, ghosts=(), reload_difference=0.0)
        return Made(repair=repair, finetune=None, proof=proof, dtype="", note="", size=0), scene.model


_NOWHERE = Environment.model_construct()


def _rehearsal(asked: PruneRun, scene: Scene, batches: Sequence[Any], sampler: Sampler, ledger: Ledger) -> Rehearsal:
    goal = asked.goal
    answers, mixes = traits(scene.model, scene.layers, sampler.sample[0]) if goal.repair else (0, False)
    return Rehearsal(
        scene.model, scene.layers, batches, list(scene.parts.choose.batches()), repair=goal.repair, biases=sampler.biases,
        metric=scene.metric, ledger=ledger, answers=answers, mixes=mixes,
    )  # fmt: skip


def _sampler(
    scene: Scene, batches: Sequence[Any], limits: Limits, repair: bool = True, strategy: str = AUTO
) -> Sampler:
    biases = searching.may_add_biases(strategy, scene.model, scene.layers)
    return Sampler(
        scene.model, scene.layers, batches, limits.of(len(batches)), repair, biases, distil=scene.options.distil,
        settings=scene.options.scoring,
    )  # fmt: skip


# -- what lies around it ---------------------------------------------------------------------------


def _trained(ledger: Ledger, train: Part, choose: Part, epochs: float, patience: int) -> None:
    least = min(epochs, patience + 1.0)
    ledger.add("fine-tuning", "training", load_of(train), epochs, least, epochs)
    ledger.add("fine-tuning", "evaluating", load_of(choose), 1 + epochs, 1 + least, 1 + epochs)


def _profiles(ledger: Ledger, batches: Sequence[Any]) -> None:
    ledger.add("looking at what the heads do", "a pass", Load.of(batches).first(_LOOKED_AT), _PROFILED)
    ledger.add("report", rough.SECONDS, Load(0, _REPORT))


def _timing(ledger: Ledger, scene: Scene, models: int, sampler: Sampler) -> None:
    """The times that are reported: of every model, with every input, for at least a second (`headprune.latency.bench`)."""
    shapes = inputs(scene)
    for _, length, example in shapes:
        passes: list[float] = []
        sampler.metered(partial(_pass_often, latency.timer(scene.model, example), passes))  # for the memory of it, too
        once = min(passes) / 1000
        whole = min(max(latency.MIN_RUNS * once, latency.MIN_SECONDS), latency.MAX_RUNS * once)
        plain, profiled = (max(shares.MIN_PASSES * n * once, latency.MIN_SECONDS / 2) for n in (1, 2))
        parts = max(_PARTS, (1 + latency.WARM_UP) * once + plain + profiled)
        ledger.add("timing", rough.SECONDS, Load(0, models * (latency.WARM_UP * once + whole) + parts))
        if length == shapes[0][1] and (text := _writing(scene.model, example)) is not None:
            rounds = max(decoding.MIN_ROUNDS * text, latency.MIN_SECONDS) + latency.WARM_UP * text
            ledger.add("timing", rough.SECONDS, Load(0, (models - 1) * rounds))
    ledger.unknown.extend([] if sampler.device.type == "cpu" else ["Energy is not counted."])


def _pass_often(clock: Callable[[], float], passes: list[float]) -> None:
    passes.extend(clock() for _ in range(_CLOCKED))


def _writing(model: nn.Module, prompt: Any) -> float | None:
    """Seconds in which a decoder writes as much as is timed for the report; None where it does not write."""
    with suppress(Exception):  # such as a model that does not go on from its own cache: that is not timed either
        row = decoding.generation({"": model}, prompt, new=2, min_rounds=1, min_seconds=0.0)
        if row is not None:
            return (row.prefill[""].median + decoding.NEW_TOKENS * row.token[""].median) / 1000
    return None


def _heads(scene: Scene) -> int:
    return sum(layer.num_heads for layer in scene.maskable)


def _some(part: Part, count: int) -> list[Any]:
    """A few batches from everywhere in a part."""
    order, size = part.order(), part.batch_size
    starts = list(range(0, len(order), size))
    chosen = [starts[(2 * i + 1) * len(starts) // (2 * count)] for i in range(min(count, len(starts)))]
    return [part.collate([part.features[j] for j in order[start : start + size]]) for start in chosen]


def load_of(part: Part) -> Load:
    """Of all batches of a part, one of which is made: their padding is known from the lengths."""
    lengths, order, size = part.lengths(), part.order(), part.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    longest = [max(lengths[i] for i in own) for own in batches]
    one = Load.of(_some(part, 1))
    per_token = one.units / (one.examples * longest[len(batches) // 2])
    return Load(len(part), per_token * sum(len(own) * most for own, most in zip(batches, longest, strict=True)))
