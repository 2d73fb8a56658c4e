"""What `headprune prune` does: score, search, carry out every plan, time the models, publish the run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from headprune import latency
from headprune.app import report, runs
from headprune.app.data import Part, load_also
from headprune.app.documents import AlsoData, BudgetResult, Dense, Environment, Examples, Measured, Metrics, Point, Run
from headprune.app.runs import RunFolder
from headprune.app.workflow.cost import announce, cost_of_pruning
from headprune.app.workflow.results import PruneContext, carry_out, guessing
from headprune.app.workflow.saving import dense_weights, publish, store_of, was_published
from headprune.app.workflow.scene import Console, Scene, check_same, inputs, open_scene
from headprune.app.workflow.scoring import run_after, run_document, score_all, write_heads
from headprune.app.workflow.search import (
    PruneConfig,
    check_search,
    curves,
    random_orders,
    search_or_plan,
    trade_off,
    trials_of,
)
from headprune.app.workflow.timing import export_models, time_exports, time_generation, time_models, time_parts
from headprune.errors import HeadPruneError, first_line
from headprune.exporting import format_named
from headprune.inputs import model_device
from headprune.parallel import current
from headprune.plan_search import SearchResult
from headprune.scoring import HeadScores, save_scores


def plan_run(config: PruneConfig, console: Console) -> tuple[list[HeadScores], SearchResult]:
    """The scores, and the plans that `prune_run` would carry out; nothing is written.

    Raises:
        HeadPruneError: There are no scores, and the search needs some.
    """
    if config.source is None and config.needs_scores:
        raise HeadPruneError("There are no scores to plan by.", "Run `headprune score` first.")
    scores = config.read_scores()
    scene = open_to_prune(config, scores, console)
    announce(console, lambda: cost_of_pruning(scene, config, scores))
    return scores, search_or_plan(scene, config, config.candidates(scores), trials_of(scene, config), console)


def open_to_prune(config: PruneConfig, scores: Sequence[HeadScores], console: Console) -> Scene:
    """The model and the data.

    Raises:
        HeadPruneError: A format of an export is not there; the budgets make no sense for the model; the scores are another model's, or of
            examples that will be reported.
    """
    for name in config.exports:
        format_named(name)
    config.check_placement()
    scene = open_scene(config.options, console)
    scene = replace(scene, parts=load_also(config.options.data, scene.loaded, scene.parts))
    for part in scene.parts.also:
        console.say(f"Second dataset, to which nothing is fitted: {len(part)} examples of {part.name}.")
    check_search(config, scene)
    if config.source is not None:
        for note in check_same(scene, scores, config.source):
            console.say(note)
    return scene


def prune_run(config: PruneConfig, folder: RunFolder, console: Console) -> Metrics:
    """Prune to each budget, measure again, save the plans and the checkpoints, write the report; what metrics.json says.

    Args:
        folder: Where to write; may be ``config.source``. It changes when all is done; until then results are kept in
            `Folder.unfinished`, where the same call continues.
    """
    started, source = time.monotonic(), config.source
    scores = config.read_scores()
    scene = open_to_prune(config, scores, console)
    if half := scene.loaded.stored:
        console.say(
            f"{config.options.model} is stored in {str(half).removeprefix('torch.')}: pruned models are saved so, too."
        )
    methods = config.methods if source else config.methods_to_score
    run = run_document(scene, methods, folder) if source is None else run_after(source.read_run(), scene, folder)
    announce(console, lambda: cost_of_pruning(scene, config, scores))
    seconds_scoring = 0.0
    if source is None:
        scores, seconds_scoring = score_all(scene, methods, folder, console)
    # What is only measured there changes no other result, but nothing may be trained on it.
    also = [part.content_hash() for part in scene.parts.also]
    candidates = config.candidates(scores)
    facts = [config.facts(), [s.method for s in candidates], [s.to_json() for s in scores]]
    facts += also if config.finetune else []
    store = store_of(folder, "prune", scene, *facts, say=console.say)
    assert store.folder is not None
    content = RunFolder(store.folder / "content")
    result_name = f"{store.folder.name} {[*also, *config.exports]}"
    if current().first("published before", lambda: was_published(folder, result_name) and not content.path.exists()):
        return Metrics.read(folder.metrics_path)  # this command was killed while it moved its files
    context = PruneContext(config, scene, trials_of(scene, config, store), store, content, console)
    environment = current().first("environment", lambda: runs.environment(str(model_device(scene.model))))
    result = _search(context, candidates, environment)
    controls = random_orders(scene, config, result.fits)
    for note in dict.fromkeys(note for fit in result.fits for note in fit.plan.notes):
        console.say(note)
    curve = trade_off(curves(config, result, context.trials), controls, result.fits, context.trials, console)
    results = [carry_out(fit, controls, context) for fit in result.fits]
    metrics = _metrics(context, result, environment, curve, results)

    def write() -> None:
        seconds = round(seconds_scoring + store.seconds + time.monotonic() - started, 1)
        document = replace(run, seconds=(*run.seconds[: len(run.commands) - 1], seconds))
        _write(context, scores, result, metrics, document)
        publish(folder, content, result_name)

    current().first("writing the run", write)
    return metrics


def _write(
    context: PruneContext, scores: Sequence[HeadScores], result: SearchResult, metrics: Metrics, run: Run
) -> None:
    """Write the documents of a run, all but its report, beside its checkpoints."""
    source, content = context.config.source, context.content
    if source is not None and source.scores_path.exists():
        shutil.copyfile(source.scores_path, content.scores_path)
    elif scores:
        save_scores(content.scores_path, scores)
    if source is not None and source.heads_path.exists():
        shutil.copyfile(source.heads_path, content.heads_path)
    else:
        write_heads(context.scene, context.store, content, context.console)
    for i, fit in enumerate(result.fits):
        fit.plan.save(content.plan_path(fit.plan.asked, first=i == 0))
    metrics.write(content.metrics_path)
    content.write_run(run)
    report.write_cards(content)


def _search(context: PruneContext, scores: Sequence[HeadScores], environment: Environment) -> SearchResult:
    """The search, as it was when it first ended: what was timed is not timed again, but on another machine."""
    config = context.config

    def search() -> SearchResult:
        result = search_or_plan(context.scene, config, scores, context.trials, context.console)
        fits = {fit.plan.asked: fit for fit in result.fits}  # "50%" and "36" may be the same
        return replace(result, fits=tuple(fits.values()))

    timed = any(budget.timed for budget in config.search.budgets)
    return context.store.get(f"search {environment}" if timed else "search", search)


def _metrics(
    context: PruneContext,
    result: SearchResult,
    environment: Environment,
    curve: Sequence[Point],
    results: Sequence[tuple[BudgetResult, nn.Module]],
) -> Metrics:
    """What metrics.json says, with the times and the exports, which are made here."""
    scene, metric = context.scene, context.scene.metric
    weights, dtype = dense_weights(scene)

    def measure(part: Part | None = None) -> Measured:
        return Measured.of(context.measure("dense", scene.model, part), metric)

    metrics = Metrics(
        metric=metric,
        environment=environment,
        planning=context.config.planning(result),
        dense=Dense(
            **vars(measure()),
            parameters=latency.parameters(scene.model),
            flops=latency.flops(scene.model, scene.typical_input()),
            guessing=guessing(scene),
            weights=weights,
            dtype=dtype,
        ),
        budgets=tuple(budget for budget, _ in results),
        curve=tuple(curve),
        also=tuple(AlsoData(name=p.name, data=Examples.of(p), dense=measure(p)) for p in scene.parts.also),
        **_times(context, environment, results),
    )

    def export() -> Metrics:
        models = export_models(context, sorted(metrics.budgets, key=lambda budget: -budget.kept))
        return replace(metrics, exports=models, engines=time_exports(context, models, environment))

    return current().first("exports", export) if context.config.exports else metrics


def _times(
    context: PruneContext, environment: Environment, results: Sequence[tuple[BudgetResult, nn.Module]]
) -> dict[str, Any]:
    """What is measured of time, as fields of `Metrics`; on another machine it is measured again."""
    scene, console, store = context.scene, context.console, context.store
    first = partial(current().first, "timing")  # of several processes one times, while the others wait
    largest = sorted(results, key=lambda pair: -pair[0].kept)
    models = {"dense": scene.model, **{result.name: model for result, model in largest}}
    plans = {result.name: {name: list(heads) for name, heads in result.drop.items()} for result, _ in largest}
    latencies = store.get(f"latency {environment}", partial(first, partial(time_models, scene, models, console)))
    shapes = inputs(scene)
    prompts = [shape for shape in shapes if shape[1] == shapes[0][1]]  # of median length: they come first

    def measure(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # such as a model that does not go on from its own cache: the run is worth more
            why = f"{type(error).__name__}: {first_line(error)}"
            console.say(f"The report will have no {name}, which could not be measured ({why}).")
            return ()

    more: dict[str, Callable[[], Any]] = {
        "time": lambda: time_parts(scene.model, scene.layers, shapes, plans, latencies.rows, console),
        "generation": lambda: time_generation(models, prompts, console),
    }
    measured = {
        n: store.get(f"{n} {environment}", partial(first, partial(measure, n, make))) for n, make in more.items()
    }
    return {"latency": latencies, **{name: value for name, value in measured.items() if value}}
