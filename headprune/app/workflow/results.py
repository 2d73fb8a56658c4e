"""One budget's plan facts out: repaired, pruned, trained, saved, loaded again and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from headprune.app.documents import AlsoMeasured, BudgetRecord, BudgetResult, Measured, Proved, Repaired, Trained
from headprune.app.options import FinetuneOptions
from headprune.app.runs import RunFolder
from headprune.app.workflow import saving
from headprune.app.workflow.scene import Console, Scene, budget_input
from headprune.app.workflow.search import PruneConfig
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
from headprune.pruned import add_record
from headprune.repairing import Repair
from headprune.store import Store
from headprune.surgery import prune
from headprune.trials import Trials


@dataclass(frozen=True)
class PruneContext:
    """What every plan of a run is facts out with.

    Attributes:
        trials: The dense model, and how plans are masked and repaired.
        store: Keeps results.
        content: Where the run's new files go.
    """

    config: PruneConfig
    scene: Scene
    trials: Trials
    store: Store
    content: RunFolder
    console: Console

    def measure(self, name: str, model: nn.Module, label: str, also: Part | None = None) -> Measurement:
        """A model on the reporting part, or on a second dataset.

        Args:
            name: Under which the result is kept.
            label: Of the progress bar.
        """
        with self.console.track(label) as progress:
            return self._get(name, also, lambda batches: evaluate(model, batches, progress=progress))

    def measure_masked(self, name: str, drop: Heads, *, repaired: bool, also: Part | None = None) -> Measurement:
        """The dense model with heads masked, on the reporting part or a second dataset.

        Args:
            name: Under which the result is kept.
            repaired: Whether the other heads are refitted layer by layer, as for the random control: a whole repair of each would take long.
        """

        def measure(batches: Iterable[Any]) -> Measurement:
            with self.trials.repaired(drop) if repaired else nullcontext():
                return self.trials.masked(drop, list(batches))

        return self._get(name, also, measure)

    def _get(self, name: str, also: Part | None, measure: Callable[[Iterable[Any]], Measurement]) -> Measurement:
        """A measurement that is kept; a second dataset is in its name, as it is not in the key of the run's computation."""
        if also is not None:
            name = f"{name} on {also.name} {also.content_hash()}"
        return self.store.get(name, lambda: measure((also or self.scene.parts.report).batches()))


@dataclass(frozen=True)
class Controls:
    """What pruned models are compared with.

    Attributes:
        dense: The dense model on the reporting part.
        random: Orders of heads drawn at random.
        also: The dense model on every second dataset.
    """

    dense: Measurement
    random: Sequence[Order]
    also: Sequence[Measurement] = ()


@dataclass(frozen=True)
class SavedModel:
    """A pruned model that was saved.

    Attributes:
        repair: What its repair did; None where there was none.
        size: Bytes of its folder, before its card is written with the figures of the run.
    """

    repair: Repair | None
    finetune: Trained | None
    proof: Proved
    saved: saving.Saved
    size: int


def carry_out(fit: Fit, controls: Controls, context: PruneContext) -> tuple[BudgetResult, nn.Module]:
    """What is reported of a plan, and its pruned model as it is loaded from where it was saved."""
    scene, plan, metric = context.scene, fit.plan, context.scene.metric
    path = context.content.checkpoint_path(plan.asked)
    make = partial(_make, context, plan, path)
    facts = context.store.get(f"made {plan.asked}", make)
    try:
        model = saving.load(scene, path)  # what is reported is what a user will load, not what is in memory
    except HeadPruneError:  # a folder of an interrupted run may be damaged
        context.store.forget(f"made {plan.asked}")
        facts = context.store.get(f"made {plan.asked}", make)
        model = saving.load(scene, path)
    if facts.saved.note:
        context.console.say(facts.saved.note)
    pruned = context.measure(f"pruned {plan.asked}", model, f"measuring with {head_count(plan.kept)}")
    random = _measure_random(context, plan, controls.random)
    like_random = pruned
    if _differs_from_control(facts.repair) or context.config.finetune:
        like_random = context.measure_masked(f"like control {plan.asked}", plan.drop, repaired=True)
    repair = None
    if facts.repair is not None:
        without = context.measure_masked(f"unrepaired {plan.asked}", plan.drop, repaired=False)
        layers = Measured.of(like_random, metric) if _differs_from_control(facts.repair) else None
        gain = compare(without, pruned, metric)
        repair = Repaired(**vars(facts.repair), without=Measured.of(without, metric), layers_alone=layers, gain=gain)
    also = tuple(
        _measure_also(context, plan, model, part, dense)
        for part, dense in zip(scene.parts.also, controls.also, strict=True)
    )
    result = BudgetResult(
        name=head_count(plan.kept),
        asked=plan.asked,
        kept=plan.kept,
        total=plan.total,
        method=plan.method,
        strategy=plan.strategy,
        budget=_budget_reading(scene, fit),
        notes=(*plan.notes, *filter(None, [facts.saved.note])),
        drop={name: tuple(heads) for name, heads in plan.drop.items()},
        pruned=Measured.of(pruned, metric),
        change=compare(controls.dense, pruned, metric),
        random=tuple(measurement.metrics[metric] for measurement in random),
        over_random=compare(mean_of(random), like_random, metric),
        also=also,
        repair=repair,
        finetune=facts.finetune,
        proof=facts.proof,
        parameters=latency.parameters(model),
        flops=latency.flops(model, scene.typical_input()),
        checkpoint=path.name,
        size=facts.size,
        weights=facts.saved.weights,
        dtype=facts.saved.dtype,
        loads=checkpoint.load_call(path).code(),
    )
    return result, model


def _differs_from_control(repair: Repair | None) -> bool:
    """Whether a repair is not what the random control gets: all fits of single layers, and nothing else."""
    return repair is not None and (repair.answers is not None or any(not trial.kept for trial in repair.trials))


def _measure_random(context: PruneContext, plan: PruningPlan, orders: Sequence[Order]) -> list[Measurement]:
    """As many heads drawn at random, by each order."""
    measurements = []
    with context.console.track(f"random control with {head_count(plan.kept)}") as progress:
        for i, order in enumerate(orders):
            drop = order.plan(plan.kept).drop
            measurements.append(context.measure_masked(f"random {plan.asked} {i}", drop, repaired=True))
            progress(i + 1, len(orders))
    return measurements


def _measure_also(
    context: PruneContext, plan: PruningPlan, model: nn.Module, part: Part, dense: Measurement
) -> AlsoMeasured:
    """A pruned model on a second dataset."""
    metric, label = context.scene.metric, f"measuring with {head_count(plan.kept)} on {part.name}"
    pruned = context.measure(f"pruned {plan.asked}", model, label, part)
    gain = None
    if context.config.search.repair or context.config.finetune:
        without = context.measure_masked(f"unrepaired {plan.asked}", plan.drop, repaired=False, also=part)
        gain = compare(without, pruned, metric)
    return AlsoMeasured(pruned=Measured.of(pruned, metric), change=compare(dense, pruned, metric), gain=gain)


def mean_of(measurements: Sequence[Measurement]) -> Measurement:
    """The mean over models of what they did on each example, for `compare`; it has no metrics of its own."""
    loss, correct = (np.mean([getattr(m, name) for m in measurements], axis=0) for name in ("loss", "correct"))
    return Measurement({}, loss, correct, measurements[0].tokens)


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
            labels = feature.get(name, [])
            for i, label in enumerate(labels if isinstance(labels, list) else [labels]):
                several = isinstance(label, float)  # classes are whole numbers; several at once are 0.0 or 1.0
                if several and label not in (0.0, 1.0):
                    return None
                if label != IGNORED:
                    counts.setdefault((name, i if several else 0), Counter())[label] += 1
    total = sum(count.total() for count in counts.values())
    return sum(max(count.values()) for count in counts.values()) / total if total else None


def _make(context: PruneContext, plan: PruningPlan, path: Path) -> SavedModel:
    """Repair, prune, train and save."""
    scene, trials, console = context.scene, context.trials, context.console
    progress = console.track(f"repairing {head_count(plan.kept)}") if trials.repair else nullcontext()
    with progress, trials.repaired(plan.drop, whole=True) as repair:
        model = copied(scene.model, trials.written)
    if repair is not None:
        add_record(model, {"repaired": True})
    # The plan was made for the dense model's weights; some of them are repaired now.
    proof = prune(model, plan.drop, scene.example, layers=scene.layers)
    trained = None
    if context.config.finetune:
        model, trained = _train(context, model, plan.asked)
    saved = current().first(f"saving {plan.asked}", lambda: saving.save(scene, model, path, proof.tolerance))
    return SavedModel(
        repair=repair,
        finetune=trained,
        proof=Proved(**asdict(proof), reload_difference=saved.difference),
        saved=saved,
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    )


def _train(context: PruneContext, pruned: nn.Module, asked: int) -> tuple[nn.Module, Trained]:
    """The fine-tuned model, and what a report says of it."""
    from headprune.app.finetune import finetune  # imports Trainer, which takes seconds

    scene, console = context.scene, context.console
    before = evaluate(pruned, scene.parts.report.batches())
    train, notes = load_train(scene.options.data, scene.loaded, scene.parts)
    for note in notes:
        console.say(note)
    options = FinetuneOptions(epochs=context.config.finetune, seed=scene.options.seed)
    with console.track("fine-tuning") as progress:
        model, training = finetune(
            pruned, scene.model, train, scene.parts.choose, options, context.content.path.parent / f"finetune-{asked}",
            metric=scene.metric, progress=progress, say=console.say,
        )  # fmt: skip
    return model, Trained(**vars(training), options=options, before=Measured.of(before, scene.metric))


def _budget_reading(scene: Scene, fit: Fit) -> BudgetRecord:
    """A budget as it was asked for, and what the plan was measured to cost."""
    budget, reading = fit.budget, fit.reading
    if budget is None or reading is None:
        return BudgetRecord(asked=fit.plan.budget)
    return BudgetRecord.of(budget, reading, *latency.example_shape(budget_input(scene)) if budget.timed else ())
