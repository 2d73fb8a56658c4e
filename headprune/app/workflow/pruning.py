"""What `headprune prune` does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from headprune import latency
from headprune.app import report, runs
from headprune.app.data import load_also
from headprune.app.documents import (
    AlsoData,
    BudgetResult,
    ComparedOrder,
    Dense,
    Document,
    Environment,
    Examples,
    Latency,
    Measured,
    Metrics,
    Point,
)
from headprune.app.options import Options
from headprune.app.runs import RunFolder
from headprune.app.workflow import exports
from headprune.app.workflow.checks import check_goal, check_scored
from headprune.app.workflow.cost import announce, cost_of_pruning
from headprune.app.workflow.results import CarriedOut, Control, Job, carry_out, guessing, result_of
from headprune.app.workflow.saving import dense_weights
from headprune.app.workflow.scene import Console, Scene, open_scene
from headprune.app.workflow.scoring import run_after, run_document, score_all, write_heads
from headprune.app.workflow.stages import made_from, publish, stages_of
from headprune.app.workflow.targets import Goal, fits_of, random_orders, shown, trade_off, trials_of
from headprune.app.workflow.timing import inputs, time_generation, time_models, time_parts
from headprune.budgets import Fit, Reading
from headprune.errors import HeadPruneError, ScoresError, first_line
from headprune.evaluation import Measurement
from headprune.fingerprint import config_hash, identity, is_same, processor_hash
from headprune.inputs import model_device
from headprune.planning import Order
from headprune.plans import PruningPlan
from headprune.ranks import current
from headprune.scoring import HeadScores, save_scores
from headprune.searching import candidates, orders_of


@dataclass(frozen=True)
class PruneRun:
    """What was asked for.

    Attributes:
        goal: The budgets, or the plan.
        methods: Scores to plan by. Of a ``source``, () takes all that it has, but random.
        source: The run whose scores to use; None scores first, if the goal needs scores.
        exports: Formats to write the pruned models in as well, names of `headprune.exporting.FORMATS`.
    """

    options: Options
    goal: Goal
    methods: Sequence[str] = ()
    source: RunFolder | None = None
    exports: Sequence[str] = ()

    def scores(self) -> list[HeadScores]:
        """What ``source`` has.

        Raises:
            HeadPruneError: Scores by one of the methods are missing.
        """
        scores = self.source.read_scores() if self.source is not None else []
        known = [s.method for s in scores]
        if self.source is not None and (missing := [m for m in self.methods if m not in known]):
            raise ScoresError(
                f"{self.source.scores_path} holds no scores by {missing[0]}.",
                f"It has {', '.join(known)}; score again with --method {missing[0]}.",
            )
        return scores

    def candidates(self, scores: Sequence[HeadScores]) -> list[HeadScores]:
        """The scores to plan by: those asked for, and random only if there is nothing else."""
        return candidates([s for s in scores if s.method in self.methods] if self.methods else scores)

    def open(self, scores: Sequence[HeadScores], console: Console) -> Scene:
        """The model and the data.

        Raises:
            HeadPruneError: A format of an export is not there; the goal makes no sense for the model; the scores are another model's, or of examples that will be reported.
        """
        exports.check(self.exports)
        _check_placed(self)
        scene = open_scene(self.options, console)
        scene = replace(scene, parts=load_also(self.options.data, scene.loaded, scene.parts))
        for part in scene.parts.also:
            console.say(f"Second dataset, to which nothing is fitted: {len(part)} examples of {part.name}.")
        check_goal(self.goal, scene)
        if self.source is not None:
            for note in _check_same(scene, scores, self.source):
                console.say(note)
        return scene


def _check_placed(asked: PruneRun) -> None:
    """Refuse what a model that is spread over devices cannot do, before it is loaded.

    Raises:
        HeadPruneError: It was to be trained or exported.
    """
    if asked.options.device_map is None:
        return
    if asked.goal.finetune:
        raise HeadPruneError(
            "--finetune and --device-map do not go together: weights that are loaded for each pass cannot be trained.",
            "Leave out --finetune; train the pruned folder where it fits (headprune finetune).",
        )
    if asked.exports:
        raise HeadPruneError(
            "--export and --device-map do not go together: an export takes the whole model into memory.",
            "Leave out --export; `headprune export` writes the pruned folder's file where that fits.",
        )


def plan_run(asked: PruneRun, console: Console) -> tuple[list[HeadScores], list[Fit]]:
    """The plans that `prune_run` would carry out; nothing is written.

    Raises:
        HeadPruneError: There are no scores, and the goal needs some.
    """
    goal = asked.goal
    if asked.source is None and goal.needs_scores:
        raise HeadPruneError("There are no scores to plan by.", "Run `headprune score` first.")
    scores = asked.scores()
    scene = asked.open(scores, console)
    missing = () if asked.source is not None else asked.methods
    announce(console, lambda: cost_of_pruning(scene, goal, missing, scores))
    trials = trials_of(scene, goal)
    orders = {} if goal.plan else orders_of(goal.request(scene), asked.candidates(scores), trials, console)
    return scores, fits_of(scene, goal, orders, trials, console)


def prune_run(
    asked: PruneRun, folder: RunFolder, console: Console, did: Callable[[str], bool] = lambda of: False
) -> Metrics:
    """Prune to each budget, measure again, save the plans and the checkpoints, write the report.

    Args:
        folder: Where to write; may be ``asked.source``. It changes when all is done; until then what was made is kept in
            `Folder.unfinished`, where the same call continues.
        did: Whether that was done already, of what `made_from` names (`Folder.did`).
    """
    started, source = time.monotonic(), asked.source
    scores = asked.scores()
    scene = asked.open(scores, console)
    # The folder's own scores may be those that this command made.
    others = (
        [s.to_json() for s in scores] if source is not None and source.path.resolve() != folder.path.resolve() else []
    )
    if did(of := made_from(scene, asdict(asked.goal), others)):
        return Metrics.read(folder.metrics_path)
    if half := scene.loaded.stored:
        console.say(
            f"{asked.options.model} is stored in {str(half).removeprefix('torch.')}: pruned models are saved so, too."
        )
    methods = asked.methods if source or asked.goal.uses_scores else []
    run = run_document(scene, methods, folder) if source is None else run_after(source.read_run(), scene, folder)
    goal, missing = asked.goal, () if source is not None else methods
    low = None if goal.effort == "low" else lambda: cost_of_pruning(scene, replace(goal, effort="low"), missing, scores)
    announce(console, lambda: cost_of_pruning(scene, goal, missing, scores), low)
    before = 0.0
    if source is None:
        scores, before = score_all(scene, methods, folder, console)
    # What is only measured there changes no other result, but nothing may be trained on it.
    also = [part.content_hash() for part in scene.parts.also] if asked.goal.finetune else []
    facts = [asdict(asked.goal), list(methods), [s.to_json() for s in scores], *also]
    stages = stages_of(folder, "prune", scene, *facts, say=console.say)
    content = RunFolder(stages.path / "content")
    ranks = current()
    job = Job(scene, asked.goal, trials_of(scene, asked.goal, stages), stages, content, console)
    fits, metrics = _pruned_and_measured(job, asked.candidates(scores))
    metrics = ranks.first("exports", lambda: _with_exports(job, metrics, asked.exports))

    def written() -> None:
        if source is not None and source.scores_path.exists():
            shutil.copyfile(source.scores_path, content.scores_path)
        elif scores:
            save_scores(content.scores_path, scores)
        if source is not None and source.heads_path.exists():
            shutil.copyfile(source.heads_path, content.heads_path)
        else:
            write_heads(scene, stages, content, console)
        for i, fitted in enumerate(fits):
            fitted.plan.save(content.plan_path(fitted.plan.asked, first=i == 0))
        took = before + stages.before + time.monotonic() - started
        metrics.write(content.metrics_path)
        content.write_run(run.changed(seconds=(*run.seconds[: len(run.commands) - 1], round(took, 1))))
        report.write_cards(content)
        publish(folder, content, of)

    ranks.first("writing the run", written)
    return metrics


@dataclass(frozen=True)
class Done:
    """The long work of a run, done."""

    orders: Mapping[str, Order]
    fits: list[Fit]
    dense: Measurement
    also: Sequence[Measurement]
    control: Control
    curve: list[Point]
    budgets: list[CarriedOut]


def carry_out_all(job: Job, scores: Sequence[HeadScores], environment: Environment) -> Done:
    """All of a run's long work between the scores and the timing."""
    scene, goal, trials, console = job.scene, job.goal, job.trials, job.console
    orders = {} if goal.plan else orders_of(goal.request(scene), scores, trials, console)
    fits = _kept_fits(job, environment, lambda: fits_of(scene, goal, orders, trials, console))
    fits = list({f.plan.asked: f for f in fits}.values())  # "50%" and "36" may be the same
    dense = job.measured("dense", scene.model, "measuring the dense model")
    also = [job.measured("dense", scene.model, f"measuring the dense model on {p.name}", p) for p in scene.parts.also]
    control = Control(dense, random_orders(scene, goal, fits), also)
    curve = trade_off(shown(goal, orders, fits, trials), control.random, fits, trials, console)
    for note in dict.fromkeys(note for f in fits for note in f.plan.notes):
        console.say(note)
    return Done(orders, fits, dense, also, control, curve, [carry_out(fitted, control, job) for fitted in fits])


def _pruned_and_measured(job: Job, scores: Sequence[HeadScores]) -> tuple[list[Fit], Metrics]:
    """The plans, carried out with their checkpoints in the new content, and what metrics.json will say."""
    scene, goal = job.scene, job.goal
    environment = current().first("environment", lambda: _environment(scene))
    done = carry_out_all(job, scores, environment)
    weights, dtype = dense_weights(scene)
    made = [(result_of(did, done.control, job), did.model) for did in done.budgets]
    metrics = Metrics(
        metric=scene.metric,
        environment=environment,
        planning=goal.planning(dict(done.orders), job.trials),
        dense=Dense(
            **Measured.of(done.dense, scene.metric).given(),
            parameters=latency.parameters(scene.model),
            flops=latency.flops(scene.model, scene.typical_input()),
            guessing=guessing(scene),
            weights=weights,
            dtype=dtype,
        ),
        budgets=tuple(result for result, _ in made),
        curve=tuple(done.curve),
        **_timed(job, environment, made),
        also=tuple(
            AlsoData(name=part.name, data=Examples.of(part), dense=Measured.of(found, scene.metric))
            for part, found in zip(scene.parts.also, done.also, strict=True)
        ),
    )
    return done.fits, metrics


def _environment(scene: Scene) -> Environment:
    return runs.environment(str(model_device(scene.model)))


def _with_exports(job: Job, metrics: Metrics, formats: Sequence[str]) -> Metrics:
    """The same, with the pruned models in other formats and their times there."""
    if not formats:
        return metrics
    made = exports.exported(job, formats, sorted(metrics.budgets, key=lambda b: -b.kept))
    environment = metrics.environment or runs.environment("cpu")
    return metrics.changed(exports=made, engines=exports.timed(job, made, environment))


def _timed(job: Job, environment: Environment, made: Sequence[tuple[BudgetResult, nn.Module]]) -> dict[str, Any]:
    """What is measured of time, as fields of `Metrics`; on another machine it is measured again."""
    scene, console, stages = job.scene, job.console, job.stages
    largest = sorted(made, key=lambda pair: -pair[0].kept)
    models = {"dense": scene.model, **{result.name: model for result, model in largest}}
    plans = {result.name: {name: list(heads) for name, heads in result.drop.items()} for result, _ in largest}
    latencies = stages.get(
        f"latency {environment}",
        lambda: time_models(scene, models, console).to_json(),
        Latency.model_validate,
        alone=True,
    )
    shapes = inputs(scene)
    more: dict[str, Callable[[], Any]] = {
        "time": lambda: [
            row.to_json() for row in time_parts(scene.model, scene.layers, shapes, plans, latencies.rows, console)
        ],
        # From prompts of median length: they come first.
        "generation": lambda: [
            row.to_json() for row in time_generation(models, [s for s in shapes if s[1] == shapes[0][1]], console)
        ],
    }

    def tried(name: str) -> Any:
        try:
            return more[name]()
        except Exception as error:  # such as a model that does not go on from its own cache: the run is worth more
            console.say(
                f"The report will have no {name}, which could not be measured ({type(error).__name__}: {first_line(error)})."
            )
            return None

    found = {
        name: stages.get(f"{name} {environment}", partial(tried, name), lambda made: made, alone=True) for name in more
    }
    return {"latency": latencies, **{name: value for name, value in found.items() if value}}


class _KeptFit(Document):
    """A `Fit` on disk; ``budget`` is its place among the goal's."""

    plan: PruningPlan
    budget: int | None
    reading: Reading | None


class _KeptFits(Document):
    """What was found for the budgets, and how the orders did that were compared."""

    fits: tuple[_KeptFit, ...]
    compared: tuple[ComparedOrder, ...]


def _kept_fits(job: Job, environment: Environment, make: Callable[[], list[Fit]]) -> list[Fit]:
    """The plans that hold the budgets, as they were when they were first found: what was timed is not timed again."""
    budgets, trials = job.goal.budgets, job.trials
    if job.goal.plan is not None:
        return make()

    def made() -> dict[str, Any]:
        places = [(fit, None if fit.budget is None else budgets.index(fit.budget)) for fit in make()]
        fits = [_KeptFit(plan=fit.plan, budget=place, reading=fit.reading) for fit, place in places]
        return _KeptFits.model_validate({"fits": fits, "compared": trials.compared}).to_json()

    timed = any(budget.timed for budget in budgets)
    found = job.stages.get(f"fits {environment}" if timed else "fits", made, _KeptFits.model_validate)
    trials.compared = [order.to_json() for order in found.compared]
    return [Fit(kept.plan, None if kept.budget is None else budgets[kept.budget], kept.reading) for kept in found.fits]


def _check_same(scene: Scene, scores: Sequence[HeadScores], source: RunFolder) -> list[str]:
    """Scores must be this model's, and their examples must not be among those that are reported; notes on what else changed."""
    for s in scores:
        if not is_same(scene.model, s.model):
            raise ScoresError(
                f"The scores in {source.scores_path} are of another model than {scene.options.model} (fingerprint {s.model}, "
                f"this one is {identity(scene.model)}).",
                "Score this model first, or leave it out to prune the one that was scored.",
            )
    run = source.read_run()
    for what in run.model.other_now(run.environment, config_hash(scene.model), processor_hash(scene.loaded.processor)):
        raise ScoresError(
            f"The {what} of {scene.options.model} has changed since {source.path} was scored.",
            "Restore it, or score again.",
        )
    notes = check_scored(scene, run, source.path)
    scene.parts.notes.extend(notes)
    return notes
