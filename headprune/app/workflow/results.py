"""One budget's plan carried out: repaired, pruned, trained, saved, loaded again and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from headprune import checkpoint, latency
from headprune.amounts import head_count
from headprune.app.data import Part, load_train
from headprune.app.documents import (
    AlsoMeasured,
    Asked,
    BudgetResult,
    Document,
    Measured,
    Proved,
    Refitted,
    Repaired,
    Trained,
    Training,
)
from headprune.app.finetune import finetune
from headprune.app.options import FinetuneOptions
from headprune.app.runs import RunFolder
from headprune.app.workflow import saving
from headprune.app.workflow.scene import Console, Scene
from headprune.app.workflow.targets import Goal
from headprune.app.workflow.timing import budget_input
from headprune.attention import Heads
from headprune.budgets import Fit
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, compare, evaluate
from headprune.inputs import LABELS
from headprune.offload import copied
from headprune.parallel import current
from headprune.planning import Order
from headprune.plans import PruningPlan
from headprune.pruned import note_was_repaired
from headprune.store import Store
from headprune.surgery import prune
from headprune.trials import Trials


@dataclass(frozen=True)
class Job:
    """What every budget of a run works with.

    Attributes:
        content: Where the run's new files go.
    """

    scene: Scene
    goal: Goal
    trials: Trials
    store: Store
    content: RunFolder
    console: Console

    def measured(self, name: str, model: nn.Module, label: str, also: Part | None = None) -> Measurement:
        """A model on the reporting part, or on a second dataset, as the stage ``name``; ``label`` is what a waiting person is told."""
        batches = (also or self.scene.parts.report).batches()
        with self.console.track(label) as progress:
            return self.store.get(stage_on(name, also), lambda: evaluate(model, batches, progress=progress))

    def made(self, plan: PruningPlan, path: Path) -> tuple[Made, nn.Module]:
        """The facts of a pruned model that is saved to ``path``, and the model as it is loaded from there."""
        return _made(self, plan, path)


def stage_on(name: str, also: Part | None) -> str:
    """A stage's name where it is made on a second dataset: which ones there are is no part of what a computation is known by."""
    return name if also is None else f"{name} on {also.name} {also.content_hash()}"


@dataclass(frozen=True)
class Control:
    """What pruned models are compared with.

    Attributes:
        dense: The dense model on the reporting part.
        random: Orders of heads drawn at random.
        also: The dense model on every second dataset.
    """

    dense: Measurement
    random: Sequence[Order]
    also: Sequence[Measurement] = ()


class Made(Document):
    """A pruned model that was saved; ``dtype`` and ``note`` as in `saving.Saved`.

    Attributes:
        size: Bytes of its folder, before its card is written with the figures of the run.
        weights: Bytes of its weights in it.
    """

    repair: Refitted | None
    finetune: Trained | None
    proof: Proved
    dtype: str
    note: str
    size: int
    weights: int | None = None  # of an interrupted run of an older version


@dataclass(frozen=True)
class CarriedOut:
    """A plan, and all that was done with it and takes long: made, saved and measured beside its controls.

    Attributes:
        model: The pruned model as it is loaded from where it was saved.
        path: That place.
        pruned: It on the reporting part.
        repair: What its repair did, and was worth; None where there was none.
        random, like_random: The control, and the plan's own heads repaired as that is.
    """

    fitted: Fit
    made: Made
    model: nn.Module
    path: Path
    pruned: Measurement
    repair: Repaired | None
    random: Sequence[Measurement]
    like_random: Measurement
    also: Sequence[AlsoMeasured]


def carry_out(fitted: Fit, control: Control, job: Job) -> CarriedOut:
    """Make a plan's model and measure it: all of what a budget's work is, in its order."""
    plan = fitted.plan
    path = job.content.checkpoint_path(plan.asked)
    made, model = job.made(plan, path)
    if made.note:
        job.console.say(made.note)
    pruned = job.measured(f"pruned {plan.asked}", model, f"measuring with {head_count(plan.kept)}")
    masked = _Masked(job, plan, pruned)
    repair = None if made.repair is None else masked.repaired(made.repair)
    random = masked.random(control.random)
    like_random = masked.like_random(made.repair)
    also = tuple(
        _on_also(job, plan, model, part, dense) for part, dense in zip(job.scene.parts.also, control.also, strict=True)
    )
    return CarriedOut(fitted, made, model, path, pruned, repair, random, like_random, also)


def result_of(did: CarriedOut, control: Control, job: Job) -> BudgetResult:
    """What is reported of a plan."""
    scene, fitted, made, plan = job.scene, did.fitted, did.made, did.fitted.plan
    return BudgetResult(
        name=f"{head_count(plan.kept)}",
        asked=plan.asked,
        kept=plan.kept,
        total=plan.total,
        method=plan.method,
        strategy=plan.strategy,
        budget=_asked(scene, fitted),
        notes=(*plan.notes, *filter(None, [made.note])),
        drop={name: tuple(heads) for name, heads in plan.drop.items()},
        pruned=Measured.of(did.pruned, scene.metric),
        change=compare(control.dense, did.pruned, scene.metric),
        random=tuple(found.metrics[scene.metric] for found in did.random),
        over_random=compare(mean_of(did.random), did.like_random, scene.metric),
        also=tuple(did.also),
        repair=did.repair,
        finetune=made.finetune,
        proof=made.proof,
        parameters=latency.parameters(did.model),
        flops=latency.flops(did.model, scene.typical_input()),
        checkpoint=did.path.name,
        size=made.size,
        weights=made.weights,
        dtype=made.dtype,
        loads=checkpoint.loading_of(did.path).call(),
    )


@dataclass(frozen=True)
class _Masked:
    """What a plan's pruned model is set beside: the dense model with heads masked, on the reporting part."""

    job: Job
    plan: PruningPlan
    pruned: Measurement

    def random(self, orders: Sequence[Order]) -> list[Measurement]:
        """As many heads drawn at random, by each order."""
        found = []
        with self.job.console.track(f"random control with {head_count(self.plan.kept)}") as progress:
            for i, order in enumerate(orders):
                make = partial(self._layers_alone, order.plan(self.plan.kept).drop)
                found.append(self.job.store.get(f"random {self.plan.asked} {i}", make))
                progress(i + 1, len(orders))
        return found

    def repaired(self, repair: Refitted) -> Repaired:
        """A repair, and what it was worth."""
        metric, without = self.job.scene.metric, self.without()
        alone = Measured.of(self.like_random(repair), metric) if _did_more(repair) else None
        gain = compare(without, self.pruned, metric)
        return Repaired(**repair.given(), without=Measured.of(without, metric), layers_alone=alone, gain=gain)

    def without(self, also: Part | None = None) -> Measurement:
        """The plan's heads masked and nothing repaired."""
        part = also or self.job.scene.parts.report
        make = partial(self.job.trials.masked, self.plan.drop, list(part.batches()))
        return self.job.store.get(stage_on(f"unrepaired {self.plan.asked}", also), make)

    def like_random(self, repair: Refitted | None) -> Measurement:
        """The plan's heads, repaired as random ones are."""
        if not _did_more(repair) and not self.job.goal.finetune:
            return self.pruned
        return self.job.store.get(f"like control {self.plan.asked}", lambda: self._layers_alone(self.plan.drop))

    def _layers_alone(self, drop: Heads) -> Measurement:
        """As the control is measured: fitted layer by layer, all fits kept. A whole repair of each would take long."""
        with self.job.trials.repaired(drop):
            return self.job.trials.masked(drop, list(self.job.scene.parts.report.batches()))


def _did_more(repair: Refitted | None) -> bool:
    """Whether a repair is not what the random control gets."""
    return repair is not None and (repair.answers is not None or any(not trial.kept for trial in repair.trials))


def _on_also(job: Job, plan: PruningPlan, model: nn.Module, part: Part, dense: Measurement) -> AlsoMeasured:
    """A pruned model on a second dataset."""
    metric, label = job.scene.metric, f"measuring with {head_count(plan.kept)} on {part.name}"
    pruned = job.measured(f"pruned {plan.asked}", model, label, part)
    found = AlsoMeasured(pruned=Measured.of(pruned, metric), change=compare(dense, pruned, metric))
    if not job.goal.repair and not job.goal.finetune:
        return found
    return found.changed(gain=compare(_Masked(job, plan, pruned).without(part), pruned, metric))


def mean_of(found: Sequence[Measurement]) -> Measurement:
    """The mean over models of what they did on each example, for `compare`; it has no metrics of its own."""
    loss, correct = (np.mean([getattr(m, name) for m in found], axis=0) for name in ("loss", "correct"))
    return Measurement({}, loss, correct, found[0].tokens)


def guessing(scene: Scene) -> float | None:
    """The metric of a model that knows nothing, as `headprune.app.documents.Dense` has it."""
    if scene.metric == "perplexity":
        size = getattr(scene.loaded.config.get_text_config(), "vocab_size", None)
        return float(size) if isinstance(size, int) else None
    return most_frequent(scene.parts.report.features)


def most_frequent(features: Iterable[Mapping[str, Any]]) -> float | None:
    """The accuracy of always giving the most frequent label; None where labels are no classes.

    Where an example has several labels at once, each has a most frequent value of its own; so have an answer's start and end.
    """
    counts: dict[tuple[str, int], Counter[float]] = {}
    for feature in features:
        for name in LABELS:
            found = feature.get(name, [])
            for i, label in enumerate(found if isinstance(found, list) else [found]):
                several = isinstance(label, float)  # classes are whole numbers; several at once are 0.0 or 1.0
                if several and label not in (0.0, 1.0):
                    return None
                if label != IGNORED:
                    counts.setdefault((name, i if several else 0), Counter())[label] += 1
    total = sum(count.total() for count in counts.values())
    return sum(max(count.values()) for count in counts.values()) / total if total else None


def _made(job: Job, plan: PruningPlan, path: Path) -> tuple[Made, nn.Module]:
    """The facts of a pruned model that is saved to ``path``, and the model as it is loaded from there.

    What is reported is what a user will load, not what is in memory.
    """
    name = f"made {plan.asked}"
    for damaged in (False, True):
        if damaged:
            job.store.forget(name)
        made = job.store.get(name, partial(_make, job, plan, path))
        try:
            return made, saving.load(job.scene, path)
        except HeadPruneError:
            if damaged:
                raise
    raise AssertionError


def _make(job: Job, plan: PruningPlan, path: Path) -> Made:
    """Repair, prune, train and save."""
    scene, trials, console = job.scene, job.trials, job.console
    doing = console.track(f"repairing {head_count(plan.kept)}") if trials.repair else nullcontext()
    with doing, trials.repaired(plan.drop, whole=True) as repair:
        model = copied(scene.model, trials.written)
    if repair is not None:
        note_was_repaired(model)
    # The plan was made for the dense model's weights; some of them are repaired now.
    proof = prune(model, plan.drop, scene.example, layers=scene.layers)
    trained = None
    if job.goal.finetune:
        model, trained = _trained(job, model, plan.asked)
    saved = current().first(f"saving {plan.asked}", lambda: saving.save(scene, model, path, proof.tolerance))
    return Made(
        repair=None if repair is None else Refitted.model_validate(repair.to_json()),
        finetune=trained,
        proof=Proved(**asdict(proof), reload_difference=saved.difference),
        dtype=saved.dtype,
        note=saved.note,
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        weights=saved.weights,
    )


def _trained(job: Job, pruned: nn.Module, asked: int) -> tuple[nn.Module, Trained]:
    """The fine-tuned model, and what a report says of it."""
    scene, console = job.scene, job.console
    before = evaluate(pruned, scene.parts.report.batches())
    train, notes = load_train(scene.options.data, scene.loaded, scene.parts)
    for note in notes:
        console.say(note)
    options = FinetuneOptions(epochs=job.goal.finetune, seed=scene.options.seed)
    with console.track("fine-tuning") as progress:
        done = finetune(
            pruned, scene.model, train, scene.parts.choose, options, metric=scene.metric,
            work=job.content.path.parent / f"finetune-{asked}", progress=progress, say=console.say,
        )  # fmt: skip
    training = Training.model_validate(done).given()
    return done.model, Trained(**training, options=options, before=Measured.of(before, scene.metric))


def _asked(scene: Scene, fitted: Fit) -> Asked:
    """What was asked for, and what that was measured to be."""
    budget, reading = fitted.budget, fitted.reading
    if budget is None or reading is None:
        return Asked(asked=fitted.plan.budget)
    told = Asked.of(budget, reading)
    if not budget.timed:
        return told
    batch, length = latency.example_shape(budget_input(scene))
    return told.changed(batch=batch, length=length)
