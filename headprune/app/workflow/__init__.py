"""The work of `headprune score` and `headprune prune`: score, search, carry out plans, time models, publish.

The result of each step is stored at once, so that an interrupted run can continue; the run folder changes at the end, as a whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from headprune import latency
from headprune.app import documents, harness, report, runs
from headprune.app.data import Part, load_also
from headprune.app.options import Options
from headprune.app.seeing import look
from headprune.app.sources import name_of, stored_size
from headprune.app.workflow import results, search
from headprune.app.workflow.cost import announce, cost_of_pruning, cost_of_scores
from headprune.app.workflow.scene import Console, Scene, check_same, inputs, open_scene
from headprune.errors import HeadPruneError, first_line, is_of_the_disk
from headprune.exporting import format_named
from headprune.fingerprint import config_hash, fingerprint, processor_hash, versions
from headprune.inputs import model_device
from headprune.offload import is_offloaded
from headprune.parallel import current
from headprune.plan_search import SearchResult
from headprune.pruned import ghosts
from headprune.scoring import HeadScores, Settings, method_and_settings, save_scores, score
from headprune.store import Store, digest
from headprune.surgery import layers_that_run


def score_run(options: Options, folder: runs.RunFolder, console: Console) -> list[HeadScores]:
    """Score a model by each of the options' methods and write the run folder; returns the scores."""
    started = time.monotonic()
    scene = open_scene(options, console, labelled=None)
    run = run_document(scene, folder)
    announce(console, lambda: cost_of_scores(scene))
    scores, store = score_all(scene, options.methods, folder)

    def write() -> None:
        content = runs.RunFolder(folder.unfinished / "content")
        shutil.rmtree(content.path, ignore_errors=True)  # of a run that was killed while it wrote
        save_scores(content.scores_path, scores)
        write_heads(scene, store, content)
        content.write_run(replace(run, seconds=(round(store.seconds + time.monotonic() - started, 1),)))
        publish(folder, content)

    current().first("writing the run", write)
    return scores


def score_all(scene: Scene, methods: Sequence[str], folder: runs.RunFolder) -> tuple[list[HeadScores], Store]:
    """The scores by every method, and the store that keeps them."""
    if not methods:
        return [], Store()
    batches = list(scene.parts.score.batches())
    options, base = scene.options, Settings(keep=scene.options.keep)
    store = store_of(folder, "score", scene)

    def score_by(text: str) -> HeadScores:
        began = time.monotonic()
        name, settings = method_and_settings(text, base)
        with scene.console.track(f"scoring by {name}") as progress:
            s = score(
                scene.model, batches, name, layers=scene.layers, seed=options.seed, progress=progress,
                distil=options.distil, settings=settings, work=folder.store(scene.console.say),
            )  # fmt: skip
        s.details["seconds"] = round(time.monotonic() - began, 2)
        return HeadScores.from_json(s.to_json(), scene.maskable)  # as `prune` will read it

    return [store.get(text, partial(score_by, text)) for text in methods], store


def write_heads(scene: Scene, store: Store, content: runs.RunFolder) -> None:
    """Profile the heads and write heads.json, unless the attention weights cannot be read."""

    def make() -> documents.Heads:
        with scene.console.track("looking at what the heads do"):
            return look(scene.loaded, scene.parts.score, scene.layers, scene.options.seed)

    try:
        store.get("heads", make).write(content.heads_path)
    except HeadPruneError as error:
        scene.console.say(f"What the heads do cannot be shown: {error.args[0]}")


def run_document(scene: Scene, folder: runs.RunFolder) -> documents.Run:
    """The content of run.json, but for the run's time; made before the long work, so that it is known to be writable."""
    attention = getattr(scene.model.config, "_attn_implementation", None)
    parameter = next(scene.model.parameters())
    facts = documents.ModelFacts(
        class_name=type(scene.model).__name__, task=scene.loaded.task.name, metric=scene.metric,
        dtype=name_of(parameter.dtype), attention=attention if isinstance(attention, str) else None,
        parameters=latency.parameters(scene.model), fingerprint=fingerprint(scene.model), config=config_hash(scene.model),
        processor=processor_hash(scene.loaded.processor),
        heads=sum(layer.num_heads for layer in scene.layers if layer.name not in ghosts(scene.model)),
        layers=tuple(map(documents.LayerFacts.of, scene.layers)),
    )  # fmt: skip
    return documents.Run(
        commands=(runs.command_line(),), when=runs.now(), seconds=(), options=scene.options, model=facts, folder=str(folder.path),
        environment=scene.environment, **_cut_of(scene),
    )  # fmt: skip


def run_after(run: documents.Run, scene: Scene, folder: runs.RunFolder) -> documents.Run:
    """A scoring run's document, updated for a run that prunes by its scores, whose other parts may differ."""
    scored = run.options
    options = replace(scene.options, methods=scored.methods, distil=scored.distil, keep=scored.keep)
    commands = (run.commands[0], runs.command_line())
    return replace(run, options=options, **_cut_of(scene), commands=commands, folder=str(folder.path))


def _cut_of(scene: Scene) -> dict[str, Any]:
    """The fields of run.json on the data."""
    return {"parts": documents.Cut.of(scene.parts), "columns": scene.parts.columns, "notes": tuple(scene.parts.notes)}


# -- prune -------------------------------------------------------------------------------------------


def plan_run(config: search.PruneConfig, console: Console) -> tuple[search.PruneScene, SearchResult]:
    """The scene, and the plans that `prune_run` would carry out; nothing is written."""
    scene = open_to_prune(config, console)
    announce(console, lambda: cost_of_pruning(scene))
    return scene, search.search_or_plan(scene)


def open_to_prune(config: search.PruneConfig, console: Console) -> search.PruneScene:
    """Load the model and the data, and check that they can be pruned as asked.

    Raises:
        HeadPruneError: An unknown export format; tasks that do not load, or do not fit the model; budgets that make no sense for the model; scores of another model, or of
            another scoring part.
    """
    scores = config.read_scores()
    for name in config.exports:
        format_named(name)
    config.check_placement()
    tasks = harness.load_tasks(config.tasks)
    opened = open_scene(config.options, console)
    if tasks:
        harness.check_model(opened.loaded)
    opened = replace(opened, parts=load_also(config.options.data, opened.loaded, opened.parts))
    for part in opened.parts.also:
        console.say(f"Second dataset, to which nothing is fitted: {len(part)} examples of {part.name}.")
    if not is_offloaded(opened.model):  # it would be loaded for every pass
        opened = replace(opened, layers=layers_that_run(opened.model, opened.layers, opened.parts.score.short(2)))
    if half := opened.loaded.stored:
        console.say(f"{config.options.model} is stored in {name_of(half)}: pruned models are saved so, too.")
    scene = search.PruneScene(**vars(opened), config=config, tasks=tasks, scores=scores)
    search.check_search(scene)
    if config.source is not None:
        console.say(*check_same(scene, scores, config.source))
    return replace(scene, known=search.known_orders(scene))


def prune_run(config: search.PruneConfig, folder: runs.RunFolder, console: Console) -> None:
    """Prune to each budget, measure again, save plans and checkpoints, write the report.

    Args:
        folder: Where to write; may be ``config.source``. It changes when all is done; until then results are kept in
            `Folder.unfinished`, where the same call continues.
    """
    started, source, scored = time.monotonic(), config.source, Store()
    scene = open_to_prune(config, console)
    run = run_document(scene, folder) if source is None else run_after(source.read_run(), scene, folder)
    if source is None:
        run = replace(run, options=replace(run.options, methods=tuple(config.methods_to_score)))
    announce(console, lambda: cost_of_pruning(scene))
    if source is None:
        scores, scored = score_all(scene, config.methods_to_score, folder)
        scene = replace(scene, scores=scores)
    # Second datasets change other results only by training, which leaves out their examples.
    also = [part.content_hash for part in scene.parts.also] if config.finetune else []
    asked = [config.search, config.plan, config.plan_file, config.finetune]
    # A plan for a timed budget, and so all that follows from it, is of the machine that it was timed on.
    where = [scene.environment] if any(budget.timed for budget in config.search.budgets) else []
    facts = [asked, [s.method for s in scene.candidates], [s.to_json() for s in scene.scores], *also, *where]
    scene = replace(scene, store=store_of(folder, "prune", scene, *facts))
    content, store = scene.content, scene.store
    if scene.measures.further:  # one that is not defined here must not stop the run in its last minute
        scene.measure("dense", scene.model)
    result = search.search_or_plan(scene)
    controls = search.random_orders(scene, result.fits)
    console.say(*dict.fromkeys(note for fit in result.fits for note in fit.plan.notes))
    curve = search.trade_off(scene, result)
    pruned_models = [results.carry_out(fit, controls, scene) for fit in result.fits]
    metrics = _metrics(scene, result, curve, pruned_models)
    measured = {"dense": scene.measure("dense", scene.model)}
    measured |= {budget.checkpoint: scene.measure(f"pruned {budget.asked}", model) for budget, model in pruned_models}

    def write() -> None:
        seconds = round(scored.seconds + store.seconds + time.monotonic() - started, 1)
        if scene.scores:
            save_scores(content.scores_path, scene.scores)
        if source is not None and source.heads_path.exists():
            shutil.copyfile(source.heads_path, content.heads_path)
        else:
            write_heads(scene, store, content)
        for i, fit in enumerate(result.fits):
            fit.plan.save(content.plan_path(fit.plan.asked, first=i == 0))
        metrics.write(content.metrics_path)
        if config.plan is None:
            (scene.known or search.orders_document(scene, result)).write(content.orders_path)
        documents.ReportValues.of(scene.parts.report, measured).write(content.values_path)
        # Last, since it names the other documents by their checksums.
        content.write_run(replace(run, seconds=(*run.seconds[: len(run.commands) - 1], seconds)))
        report.write_cards(content)
        publish(folder, content)

    current().first("writing the run", write)


def _metrics(
    scene: search.PruneScene, result: SearchResult, curve: list[documents.Point], models: list[results.CarriedOut]
) -> documents.Metrics:
    """The content of metrics.json; times are measured and exports made here."""
    metric, stored = scene.metric, scene.loaded.stored  # in which pruned models are saved
    largest = sorted(models, key=lambda pair: -pair[0].kept)

    def measure(part: Part | None = None) -> documents.Measured:
        return documents.Measured.of(scene.measure("dense", scene.model, part), metric)

    dense = documents.Dense(
        **vars(measure()), parameters=latency.parameters(scene.model), weights=stored_size(scene.model, stored),
        dtype=name_of(stored or next(scene.model.parameters()).dtype),
        flops=latency.flops(scene.model, scene.typical_input()), guessing=results.guessing(scene),
    )  # fmt: skip
    also = [documents.AlsoData(name=p.name, data=documents.Examples.of(p), dense=measure(p)) for p in scene.parts.also]
    exports = partial(results.export_models, scene, [budget for budget, _ in largest])
    return documents.Metrics(
        metric=metric, curve_metric=scene.measures.for_plans, environment=scene.environment, planning=scene.config.planning(result), dense=dense,
        budgets=tuple(budget for budget, _ in models), curve=tuple(curve), also=tuple(also), **_times(scene, largest),
        tasks=tuple(results.run_tasks(scene, largest)), **current().first("exports", exports),
    )  # fmt: skip


def _times(scene: search.PruneScene, pruned_models: Sequence[results.CarriedOut]) -> dict[str, Any]:
    """All measured times, as fields of `Metrics`; on another machine they are measured again."""
    console, store, environment = scene.console, scene.store, scene.environment
    first = partial(current().first, "timing")  # of several processes one times, while the others wait
    models = {"dense": scene.model, **{result.name: model for result, model in pruned_models}}
    plans = {result.name: result.drop for result, _ in pruned_models}
    latencies = store.get(f"latency {environment}", partial(first, partial(results.time_models, scene, models)))
    shapes = inputs(scene)
    prompts = [shape for shape in shapes if shape[1] == shapes[0][1]]  # of median length: they come first

    def attempt(name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:  # such as a model that cannot use its own cache: the run must not fail for it
            why = f"{type(error).__name__}: {first_line(error)}"
            console.say(f"The report will have no {name}, which could not be measured ({why}).")
            return ()

    parts: Any = partial(results.time_parts, scene.model, scene.layers, shapes, plans, latencies.rows, console)
    makes = {"time": parts, "generation": partial(results.time_generation, models, prompts, console)}
    more = {name: partial(first, partial(attempt, name, make)) for name, make in makes.items()}
    return {"latency": latencies, **{name: store.get(f"{name} {environment}", make) for name, make in more.items()}}


# -- results on disk ---------------------------------------------------------------------------------


def store_of(folder: runs.RunFolder, name: str, scene: Scene, *facts: Any) -> Store:
    """The store of one computation's results, keyed by the model, data, options and versions.

    Args:
        name: The computation's name.
        facts: What else the results depend on.
    """
    options = asdict(scene.options)
    loading = options["loading"]
    del loading["trust_remote_code"], options["data"]["also"], options["methods"]  # these change no result here
    del loading["device_map"], loading["device_memory"]  # nor does where weights are kept
    parts = [digest(*part.batches(), part.rows) for part in (scene.parts.score, scene.parts.choose, scene.parts.report)]
    processor = processor_hash(scene.loaded.processor)  # generated answers are made into texts by it
    about = [versions(), model_device(scene.model).type, options, parts, processor, list(facts)]
    return folder.store(scene.console.say).keyed(name, about, scene.model)


def publish(folder: runs.RunFolder, content: runs.RunFolder) -> None:
    """Write the report of a complete run, and replace the folder's content by the run.

    Raises:
        HeadPruneError: The report could not be written; all else is published. Or the disk is full: then nothing is, and the old
            content stays.
    """
    try:
        report.write(content)
    except Exception as error:
        if is_of_the_disk(error):  # the report will be written once there is room, so the old folder stays until then
            raise
        folder.publish(content.path)
        folder.clear_unfinished()  # it is not needed any more
        raise HeadPruneError(
            f"The report could not be written ({type(error).__name__}: {first_line(error)}); all else is in {folder.path}.",
            f"`headprune report {folder.path}` tries again.",
        ) from error
    folder.publish(content.path)
