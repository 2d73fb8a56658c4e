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
from headprune.app.data import load_also
from headprune.app.documents import AlsoData, BudgetResult, Dense, Environment, Examples, Measured, Metrics, Point, Run
from headprune.app.runs import RunFolder
from headprune.app.workflow.cost import announce, cost_of_pruning
from headprune.app.workflow.results import Controls, PruneContext, carry_out, guessing
from headprune.app.workflow.saving import dense_weights, digest_of_inputs, publish, store_of
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


def prune_run(
    config: PruneConfig, folder: RunFolder, console: Console, published: Callable[[str], bool] = lambda of: False
) -> Metrics:
    """Prune to each budget, measure again, save the plans and the checkpoints, write the report; what metrics.json says.

    Args:
        folder: Where to write; may be ``config.source``. It changes when all is done; until then results are kept in
            `Folder.unfinished`, where the same call continues.
        published: Whether the result of the inputs that `digest_of_inputs` names is in the folder already (`Folder.already_published`).
    """
    started, source = time.monotonic(), config.source
    scores = config.read_scores()
    scene = open_to_prune(config, scores, console)
    # The folder's own scores may be those that this command made.
    own = source is None or source.path.resolve() == folder.path.resolve()
    if published(of := digest_of_inputs(scene, config.facts(), [] if own else [s.to_json() for s in scores])):
        return Metrics.read(folder.metrics_path)
    if half := scene.loaded.stored:
        console.say(
            f"{config.options.model} is stored in {str(half).removeprefix('torch.')}: pruned models are saved so, too."
        )
    methods = config.methods if source else config.methods_to_score
    run = run_document(scene, methods, folder) if source is None else run_after(source.read_run(), scene, folder)
    quick = replace(config, search=replace(config.search, effort="low"))
    low = None if quick == config else lambda: cost_of_pruning(scene, quick, scores)
    announce(console, lambda: cost_of_pruning(scene, config, scores), low)
    seconds_scoring = 0.0
    if source is None:
        scores, seconds_scoring = score_all(scene, methods, folder, console)
    # What is only measured there changes no other result, but nothing may be trained on it.
    also = [part.content_hash() for part in scene.parts.also] if config.finetune else []
    facts = [config.facts(), list(methods), [s.to_json() for s in scores], *also]
    store = store_of(folder, "prune", scene, *facts, say=console.say)
    assert store.folder is not None
    content = RunFolder(store.folder / "content")
    context = PruneContext(config, scene, trials_of(scene, config, store), store, content, console)
    environment = current().first("environment", lambda: runs.environment(str(model_device(scene.model))))
    result = _search(context, config.candidates(scores), environment)
    controls, curve = _compare(context, result)
    results = [carry_out(fit, controls, context) for fit in result.fits]
    metrics = _metrics(context, result, environment, controls, curve, results)

    def write() -> None:
        seconds = round(seconds_scoring + store.seconds + time.monotonic() - started, 1)
        document = replace(run, seconds=(*run.seconds[: len(run.commands) - 1], seconds))
        _write(context, scores, result, metrics, document)
        publish(folder, content, of)

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


def _compare(context: PruneContext, result: SearchResult) -> tuple[Controls, list[Point]]:
    """What pruned models are compared with, and the curves of metric against heads kept."""
    config, scene, console = context.config, context.scene, context.console
    dense = context.measure("dense", scene.model, "measuring the dense model")
    also = [
        context.measure("dense", scene.model, f"measuring the dense model on {p.name}", p) for p in scene.parts.also
    ]
    controls = Controls(dense, random_orders(scene, config, result.fits), also)
    orders = curves(config, result, context.trials)
    curve = trade_off(orders, controls.random, result.fits, context.trials, console)
    for note in dict.fromkeys(note for fit in result.fits for note in fit.plan.notes):
        console.say(note)
    return controls, curve


def _metrics(
    context: PruneContext,
    result: SearchResult,
    environment: Environment,
    controls: Controls,
    curve: Sequence[Point],
    results: Sequence[tuple[BudgetResult, nn.Module]],
) -> Metrics:
    """What metrics.json says, with the times and the exports, which are made here."""
    scene, metric = context.scene, context.scene.metric
    weights, dtype = dense_weights(scene)
    metrics = Metrics(
        metric=metric,
        environment=environment,
        planning=context.config.planning(result),
        dense=Dense(
            **vars(Measured.of(controls.dense, metric)),
            parameters=latency.parameters(scene.model),
            flops=latency.flops(scene.model, scene.typical_input()),
            guessing=guessing(scene),
            weights=weights,
            dtype=dtype,
        ),
        budgets=tuple(budget for budget, _ in results),
        curve=tuple(curve),
        also=tuple(
            AlsoData(name=part.name, data=Examples.of(part), dense=Measured.of(dense, metric))
            for part, dense in zip(scene.parts.also, controls.also, strict=True)
        ),
        **_times(context, environment, results),
    )
    return current().first("exports", lambda: _with_exports(context, metrics, environment))


def _with_exports(context: PruneContext, metrics: Metrics, environment: Environment) -> Metrics:
    """The same, with the pruned models in other formats and their times there."""
    if not context.config.exports:
        return metrics
    models = export_models(context, sorted(metrics.budgets, key=lambda b: -b.kept))
    return replace(metrics, exports=models, engines=time_exports(context, models, environment))


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
    more: dict[str, Callable[[], Any]] = {
        "time": lambda: time_parts(scene.model, scene.layers, shapes, plans, latencies.rows, console),
        "generation": lambda: time_generation(models, prompts, console),
    }

    def measure(name: str) -> Any:
        try:
            return more[name]()
        except Exception as error:  # such as a model that does not go on from its own cache: the run is worth more
            console.say(
                f"The report will have no {name}, which could not be measured ({type(error).__name__}: {first_line(error)})."
            )
            return ()

    measured = {name: store.get(f"{name} {environment}", partial(first, partial(measure, name))) for name in more}
    return {"latency": latencies, **{name: value for name, value in measured.items() if value}}
