"""Carries out plans (repair, prune, train, save, load again), and measures and times models, also in other engines."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from headprune import checkpoint, latency
from headprune.amounts import head_count
from headprune.app import documents, harness
from headprune.app.data import Part, load_train
from headprune.app.options import FinetuneOptions
from headprune.app.sources import widen
from headprune.app.workflow.scene import Console, Saved, Scene, budget_input, inputs
from headprune.app.workflow.search import PruneScene
from headprune.arguments import Plan
from headprune.attention import AttentionLayer, Heads
from headprune.budgets import Fit
from headprune.divergence import IGNORED, regresses
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, compare, value_of
from headprune.exporting import Exported, export, format_named, is_exported, time_onnx
from headprune.input_specs import record
from headprune.inputs import LABELS, with_decoder_input, writes
from headprune.metrics import LOSSES, TEXTS, Answers, metric_named
from headprune.offload import copied
from headprune.parallel import current
from headprune.planning import Order
from headprune.plans import PruningPlan
from headprune.pruned import add_record
from headprune.repairing import Repair
from headprune.running import tracked
from headprune.store import digest
from headprune.surgery import prune
from headprune.timing import breakdown

CarriedOut = tuple[documents.BudgetResult, nn.Module]
"""A plan's result for the report, and its pruned model."""


_NOTHING_REPAIRED = "Nothing was repaired: no output projection (W_O) that loses heads can be refitted."


def carry_out(fit: Fit, controls: Sequence[Order], scene: PruneScene) -> CarriedOut:
    """Carry out a plan; its result for the report, and its pruned model, loaded from the folder that it was saved to.

    Args:
        controls: Orders of heads drawn at random.
    """
    plan, metric, asked = fit.plan, scene.metric, fit.plan.asked
    path = scene.content.checkpoint_path(asked)
    build = partial(_build_pruned, scene, plan, path)
    repair, trained, proof, saved, size = scene.store.get(f"model {asked}", build)
    try:
        model = scene.load(path)  # the report is about the model that a user will load, not the one in memory
    except HeadPruneError:  # a folder of an interrupted run may be damaged
        scene.store.forget(f"model {asked}")
        return carry_out(fit, controls, scene)
    nothing = repair is None and scene.config.search.repair
    remarks = [text for text in (_NOTHING_REPAIRED if nothing else "", saved.note) if text]
    scene.console.say(*remarks)
    dense, pruned = scene.measure("dense", scene.model), scene.measure(f"pruned {asked}", model)
    drawn = [order.plan(plan.kept).drop for order in controls]
    random = [scene.measure(f"random heads {i + 1}, {asked}", drop, repaired=True) for i, drop in enumerate(drawn)]
    # Random heads get layer-by-layer repair only.
    further = repair is not None and (repair.answers is not None or any(not trial.kept for trial in repair.trials))
    like_random = (
        scene.measure(f"repaired as random heads are, {asked}", plan.drop, repaired=True)
        if trained or further
        else pruned
    )
    repaired = None
    if repair is not None:
        unrepaired = scene.measure(f"unrepaired {asked}", plan.drop)
        without, alone = (documents.Measured.of(each, metric) for each in (unrepaired, like_random))
        gain, layers_alone = compare(unrepaired, pruned, metric), alone if further else None
        repaired = documents.Repaired(**vars(repair), without=without, layers_alone=layers_alone, gain=gain)
    batch, length = latency.example_shape(budget_input(scene)) if fit.budget and fit.budget.timed else (None, None)
    record = documents.BudgetRecord(
        asked=str(fit.budget or plan.budget), reading=fit.reading, batch=batch, length=length
    )
    result = documents.BudgetResult(
        **{name: getattr(plan, name) for name in ("asked", "kept", "total", "method", "strategy")}, name=head_count(plan.kept),
        budget=record, notes=(*plan.notes, *remarks),
        drop={name: tuple(heads) for name, heads in plan.drop.items()},
        pruned=documents.Measured.of(pruned, metric), change=compare(dense, pruned, metric),
        changes=tuple(compare(dense, pruned, name) for name in scene.measures.further[1:]), answers=_changed_answers(scene, dense, pruned),
        random=tuple(measurement.metrics[metric] for measurement in random),
        over_random=compare(mean_of(random), like_random, metric),
        also=tuple(_measure_also(scene, plan, model, part, changed=bool(repaired or trained)) for part in scene.parts.also),
        repair=repaired, finetune=trained, proof=proof, parameters=latency.parameters(model),
        flops=latency.flops(model, scene.typical_input()), checkpoint=path.name, size=size, weights=saved.weights,
        dtype=saved.dtype, loads=checkpoint.load_call(path).code(),
    )  # fmt: skip
    return result, model


def _measure_also(
    scene: PruneScene, plan: PruningPlan, model: nn.Module, part: Part, changed: bool
) -> documents.AlsoMeasured:
    """Measure a pruned model, whose weights repair or training ``changed``, on a second dataset."""
    metric, gain = scene.metric, None
    dense = scene.measure("dense", scene.model, part)
    pruned = scene.measure(f"pruned {plan.asked}", model, part)
    if changed:
        gain = compare(scene.measure(f"unrepaired {plan.asked}", plan.drop, part), pruned, metric)
    measured, change = documents.Measured.of(pruned, metric), compare(dense, pruned, metric)
    return documents.AlsoMeasured(pruned=measured, change=change, gain=gain)


_SHOWN = 20  # changed answers


def _changed_answers(scene: Scene, dense: Measurement, pruned: Measurement) -> tuple[documents.ChangedAnswer, ...]:
    """The answers in texts that changed the run's metric most, each measured alone."""
    part, metric = scene.parts.report, metric_named(scene.metric)
    texts = scene.measures.texts(part)
    if texts is None or TEXTS not in metric.forms:
        return ()
    rows, changed = [part.rows[i] for i in part.order()], []
    for row, old, new, right in zip(rows, dense.texts, pruned.texts, texts.references, strict=True):
        if old != new:
            values = (metric.score(Answers(TEXTS, [text], [right])) for text in (old, new))
            was, now = (0.0 if value != value else value for value in values)
            several = (right,) if isinstance(right, str) else tuple(right)
            answer = documents.ChangedAnswer(row=row, reference=several, dense=old, pruned=new, before=was, after=now)
            changed.append(answer)
    return tuple(sorted(changed, key=lambda each: -abs(each.after - each.before))[:_SHOWN])


def run_tasks(scene: PruneScene, pruned_models: Sequence[CarriedOut]) -> list[documents.ValueTable]:
    """The metrics of the dense and every pruned model on each task of lm-evaluation-harness; one process runs them."""
    options, tasks, results = scene.config.tasks, scene.tasks, []
    if not tasks:
        return []
    facts = digest(options.task_limit, *harness.facts_of(tasks))

    def run(name: str, model: nn.Module) -> harness.TaskResults:
        with scene.console.track(f"{', '.join(options.names)}: {name}") as progress:
            size = scene.options.data.batch_size
            return harness.run_tasks(replace(scene.loaded, model=model), tasks, options.task_limit, size, progress)

    for name, model in [("dense", scene.model), *((result.name, model) for result, model in pruned_models)]:
        make = partial(current().first, "tasks", partial(run, name, model))
        results.append((name, scene.store.get(f"tasks {name} {facts}", make)))
    return harness.tables_of(results)


def mean_of(measurements: Sequence[Measurement]) -> Measurement:
    """Losses and correctness of each example, averaged over models, for `compare`; also of metrics and their jackknife."""
    first = measurements[0]
    loss, correct = (np.mean([getattr(m, name) for m in measurements], axis=0) for name in ("loss", "correct"))
    metrics = {name: float(np.mean([m.metrics[name] for m in measurements])) for name in first.jackknife}
    jackknife = {
        name: replace(known, without=np.mean([m.jackknife[name].without for m in measurements], axis=0))
        for name, known in first.jackknife.items()
    }
    return Measurement(metrics, loss, correct, first.tokens, jackknife)


def guessing(scene: PruneScene) -> float | None:
    """The metric of a model that only guesses; see `headprune.app.documents.Dense`."""
    if scene.metric not in LOSSES:
        return scene.measure("dense", scene.model).guesses.get(scene.metric)
    if scene.metric != "accuracy" and scene.loaded.task.metric == "perplexity":  # it predicts tokens
        size = getattr(scene.loaded.config.get_text_config(), "vocab_size", None)
        return value_of(scene.metric, math.log(size), 1) if isinstance(size, int) else None
    if regresses(scene.model):  # it always answers the mean
        numbers = [feature["labels"] for feature in scene.parts.report.features if "labels" in feature]
        return float(np.var(numbers, axis=0).mean()) if numbers else None
    # Where an example has several labels at once, each has a most frequent value of its own; so have an answer's start and end.
    counts: dict[tuple[str, int], Counter[float]] = {}
    for feature in scene.parts.report.features:
        for name in LABELS:
            labels = feature.get(name, [])
            if labels == feature.get("input_ids"):
                labels = labels[1:]  # of a text, whose first token nothing predicts
            for i, label in enumerate(labels if isinstance(labels, list) else [labels]):
                several = isinstance(label, float)  # classes are whole numbers; several at once are 0.0 or 1.0
                if several and (label not in (0.0, 1.0) or not isinstance(labels, list)):
                    return None  # labels are no classes
                if label != IGNORED:
                    counts.setdefault((name, i if several else 0), Counter())[label] += 1
    total = sum(count.total() for count in counts.values())
    if not total:
        return None
    if scene.metric == "accuracy":
        return sum(max(count.values()) for count in counts.values()) / total
    entropies = (n * math.log(count.total() / n) for count in counts.values() for n in count.values())
    return value_of(scene.metric, sum(entropies), total)


def _build_pruned(
    scene: PruneScene, plan: PruningPlan, path: Path
) -> tuple[Repair | None, documents.Trained | None, documents.Proved, Saved, int]:
    """Repair, prune, train and save: the result of each, and the folder's bytes before figures are added to its card."""
    trials, trained = scene.trials, None
    progress = scene.console.track(f"repairing {head_count(plan.kept)}") if trials.repair else nullcontext()
    with progress, trials.repaired(plan.drop, whole=True) as repair:
        model = copied(scene.model, trials.changed_modules)
    if repair is not None:
        add_record(model, {"repaired": True})
    # The plan was made for the dense model's weights; some of them are repaired now.
    proof = prune(model, plan.drop, scene.example, layers=scene.layers)
    if scene.config.finetune:
        model, trained = _train(scene, model, plan.asked)
    saved = current().first(f"saving {plan.asked}", lambda: scene.save(model, path, proof.tolerance))
    proved = documents.Proved(**asdict(proof), reload_difference=saved.difference)
    return repair, trained, proved, saved, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _train(scene: PruneScene, pruned: nn.Module, asked: int) -> tuple[nn.Module, documents.Trained]:
    """The fine-tuned model, and its record for the report."""
    before = documents.Measured.of(scene.measures.evaluate(pruned, scene.parts.report), scene.metric)
    train, notes = load_train(scene.options.data, scene.loaded, scene.parts)
    scene.console.say(*notes)
    options = FinetuneOptions(epochs=scene.config.finetune, seed=scene.options.seed)
    model, training = scene.finetune(pruned, train, options, scene.content.path.parent / f"finetune-{asked}")
    return model, documents.Trained(**vars(training), options=options, before=before)


# -- times -------------------------------------------------------------------------------------------

NO_HEADS = "no heads"
"""The name of the model without prunable heads."""

Shapes = Sequence[tuple[int, int, Any]]
"""Inputs as (batch, tokens, example)."""

_TRIES = 3
_BOUND_LIMIT = 2_000_000_000  # parameters; above this a third copy of the model is too much to ask


def time_models(scene: Scene, models: dict[str, nn.Module]) -> documents.Latencies:
    """Latencies of the dense and every pruned model, with the bound: the model without (nearly) all heads."""
    bound, ghosts = None, 0
    if latency.parameters(scene.model) < _BOUND_LIMIT:
        empty = copied(scene.model)
        try:
            ghosts = len(prune(empty, _all_prunable_heads(scene.layers), scene.example, layers=scene.layers).ghosts)
            bound = NO_HEADS
            models = {**models, bound: empty}
        except HeadPruneError as error:
            scene.console.say(f"The bound could not be timed: {error.args[0]}")
    with scene.console.track("timing") as progress:
        rows = latency.bench(models, inputs(scene), progress=progress)
    typical = latency.example_shape(scene.typical_input())[1]
    return documents.Latencies(rows=tuple(rows), bound=bound, bound_ghosts=ghosts, typical_length=typical)


def time_parts(
    model: nn.Module, layers: Sequence[AttentionLayer], shapes: Shapes, plans: Mapping[str, Plan],
    timed: Sequence[latency.LatencyRow], console: Console,
) -> tuple[documents.TimeParts, ...]:  # fmt: skip
    """Where the time of the dense model's passes goes, and the largest possible speed-up of each plan.

    Args:
        plans: The heads to remove, by the pruned model's name; a plan without any prunable heads is added.
        timed: The times of the models timed in turn, the dense model first. Passes that take much longer or shorter are
            measured again, up to `_TRIES` times: on a busy machine a few passes say little. The nearest are kept.
    """
    plans, rows = {**plans, NO_HEADS: _all_prunable_heads(layers)}, []
    with console.track("where the time goes") as progress:
        for batch, length, example in tracked(shapes, progress):
            tries: list[documents.TimeParts] = []
            while len(tries) < _TRIES and (not tries or tries[-1].factor_from(timed) > documents.DISTURBED):
                parts = breakdown(model, example, layers=layers)
                bounds = {name: parts.bound(drop) for name, drop in plans.items()}
                measured = {name: getattr(parts, name) for name in ("total", "parts", "stand_ins")}
                tries.append(documents.TimeParts(batch=batch, length=length, bounds=bounds, **measured))
            rows.append(min(tries, key=lambda row: row.factor_from(timed)))
    return tuple(rows)


def time_generation(
    models: Mapping[str, nn.Module], prompts: Shapes, console: Console
) -> tuple[latency.GenerationRow, ...]:
    """Generation times of the dense and the pruned models; () if they do not generate text."""
    if not writes(next(iter(models.values()))):
        return ()
    with console.track("writing tokens") as progress:
        rows = [latency.benchmark_generation(models, example) for *_, example in tracked(prompts, progress)]
    return tuple(row for row in rows if row is not None)


def _all_prunable_heads(layers: Sequence[AttentionLayer]) -> Heads:
    """All prunable heads, by layer."""
    return {layer.name: list(range(layer.num_heads)) for layer in layers if layer.prunable}


def export_models(scene: PruneScene, results: Sequence[documents.BudgetResult]) -> dict[str, Any]:
    """Every pruned model in every format, beside the checkpoints; times of those whose engine can be timed here, and of the dense one.

    Returns:
        Fields of `Metrics`.
    """
    every, rows = [], []
    for name in dict.fromkeys(scene.config.exports):
        models = [_exported(scene, name, result) for result in results]
        files = {model.name: scene.content.path / model.file for model in models if model.file}
        if files and all(map(is_exported, files.values())):
            make = partial(_time_format, scene, name, files)
            try:
                rows.append(scene.store.get(f"latency {name} {scene.environment}", make))
            except HeadPruneError as error:
                scene.console.say(f"The {name} files could not be timed: {error.args[0]}")
        every += models
    return {"exports": tuple(every), "engines": tuple(rows)}


def _exported(scene: PruneScene, name: str, result: documents.BudgetResult) -> documents.ExportedModel:
    """A pruned model in a format, or why there is none: that stops no run."""
    facts: dict[str, Any] = {"format": name, "name": result.name, "checkpoint": result.checkpoint}
    file = scene.content.path / f"{result.checkpoint}{format_named(name).suffix}"

    def make() -> documents.ExportedModel:
        trusted = scene.options.loading.trust_remote_code
        try:
            with scene.console.track(f"writing {file.name}"):
                pruned = checkpoint.load(scene.content.path / result.checkpoint, trust_remote_code=trusted)
                done = _export(scene, pruned, name, file)
        except HeadPruneError as error:
            return documents.ExportedModel(**facts, file=None, proved=False, summary=str(error.args[0]))
        notes = tuple(done.notes)
        return documents.ExportedModel(**facts, file=file.name, proved=done.proved, summary=done.summary, notes=notes)

    if not file.exists():  # a publication moved it
        scene.store.forget(f"export {file.name}")
    model = scene.store.get(f"export {file.name}", make)
    for line in model.notes if model.file else (model.summary, *model.notes):
        scene.console.say(f"{file.name}: {line}")
    return model


def _time_format(scene: PruneScene, name: str, files: dict[str, Path]) -> documents.EngineLatency:
    """Times of files of one format in its engine, beside the dense model, which is exported only for this."""
    dense = scene.content.path.parent / f"dense{format_named(name).suffix}"
    with scene.console.track(f"timing {name}"):
        model = copy.deepcopy(scene.model).to("cpu")
        record(model, scene.example)  # to be traced as the pruned ones are
        _export(scene, model, name, dense)
        examples = [with_decoder_input(scene.model, example) for _, _, example in inputs(scene)]
        rows = [time_onnx({"dense": dense, **files}, example) for example in examples]
    return documents.EngineLatency(format=name, rows=tuple(rows))


def _export(scene: PruneScene, model: nn.Module, name: str, file: Path) -> Exported:
    """Export a model in float32."""
    widen(model)
    return export(model, file, name, processor=scene.loaded.processor, overwrite=True)
