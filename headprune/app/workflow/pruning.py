"""What `headprune prune` does."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headprune import latency
from headprune.app import runs
from headprune.app.data import load_train
from headprune.app.runs import RunFolder
from headprune.app.workflow import saving
from headprune.app.workflow.checks import check_goal, check_scored
from headprune.app.workflow.scene import Console, Options, Scene, open_scene
from headprune.app.workflow.scoring import cut_anew, run_document, score_all
from headprune.app.workflow.stages import Stages, publish, stages_of
from headprune.app.workflow.targets import Goal, fits_of, random_orders, shown, trade_off, trials_of
from headprune.app.workflow.timing import budget_input, time_models
from headprune.attention import Heads
from headprune.budgets import Fit, Reading
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.fingerprint import fingerprint
from headprune.jsonio import dumps, write_json
from headprune.planning import Order
from headprune.plans import PruningPlan
from headprune.scoring import HeadScores, save_scores
from headprune.searching import candidates, orders_of
from headprune.surgery import prune
from headprune.trials import Trials


@dataclass(frozen=True)
class Pruned:
    """One budget's result."""

    plan: PruningPlan
    change: Change
    document: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    """What every budget of a run works with."""

    scene: Scene
    goal: Goal
    trials: Trials
    stages: Stages
    console: Console


def plan_run(
    options: Options, goal: Goal, methods: Sequence[str], source: RunFolder | None, console: Console
) -> tuple[list[HeadScores], list[Fit]]:
    """The plans that `prune_run` would carry out; nothing is written.

    Raises:
        HeadPruneError: There are no scores, and the goal needs some.
    """
    if source is None and goal.needs_scores:
        raise HeadPruneError("There are no scores to plan by.", "Run `headprune score` first.")
    scores = _scores_of(source, methods)
    scene = open_scene(options, console)
    check_goal(goal, scene)
    if source is not None:
        _check_same(scene, scores, source)
    trials = trials_of(scene, goal.repair)
    orders = {} if goal.plan else orders_of(goal.request(scene), _candidates(scores, methods), trials, console)
    return scores, fits_of(scene, goal, orders, trials, console)


def prune_run(
    options: Options,
    goal: Goal,
    methods: Sequence[str],
    source: RunFolder | None,
    folder: RunFolder,
    console: Console,
) -> list[Pruned]:
    """Prune to each budget, measure again, save the checkpoints, write the report.

    Args:
        goal: The budgets, or the plan.
        methods: Scores to plan by; () takes all that ``source`` has, but random.
        source: The run whose scores to use; None scores first, if the goal needs scores.
        folder: Where to write; may be ``source``. It changes when all is done; until then what was made is kept in
            `Folder.unfinished`, where the same call goes on.
    """
    started = time.monotonic()
    scores = _scores_of(source, methods)
    scene = open_scene(options, console)
    check_goal(goal, scene)
    if half := scene.loaded.stored:
        console.say(
            f"{options.model} is stored in {str(half).removeprefix('torch.')}: pruned models are saved so, too."
        )
    methods = methods if source or goal.uses_scores else []
    run, before = _run_of(scene, methods, source), 0.0
    if source is None:
        scores, before = score_all(scene, methods, folder, console)
    else:
        _check_same(scene, scores, source)
    facts = [asdict(goal), list(methods), [s.to_json() for s in scores]]
    stages = stages_of(folder, "prune", scene, *facts, say=console.say)
    content = RunFolder(stages.path / "content")
    results, metrics = _pruned_and_measured(scene, goal, _candidates(scores, methods), stages, content, console)
    if source is not None and source.scores_path.exists():
        shutil.copyfile(source.scores_path, content.scores_path)
    elif scores:
        save_scores(content.scores_path, scores)
    for i, result in enumerate(results):
        result.plan.save(content.plan_path(result.plan.asked, first=i == 0))
    took = before + stages.before + time.monotonic() - started
    content.write_run({**run, "seconds": [*run["seconds"][: len(run["commands"]) - 1], round(took, 1)]})
    write_json(content.metrics_path, "metrics", metrics)
    publish(folder, content)
    return results


def _run_of(scene: Scene, methods: Sequence[str], source: RunFolder | None) -> dict[str, Any]:
    """The run's document, which must be one that can be written, before the long work."""
    if source is None:
        return run_document(scene, methods)
    run = source.read_run()
    run = {**run, **cut_anew(scene, run), "commands": [run["commands"][0], runs.command_line()]}
    dumps(run)
    return run


def _pruned_and_measured(
    scene: Scene, goal: Goal, scores: Sequence[HeadScores], stages: Stages, content: RunFolder, console: Console
) -> tuple[list[Pruned], dict[str, Any]]:
    """All budgets, with their checkpoints in ``content``, and what metrics.json will say."""
    environment = runs.environment(str(next(scene.model.parameters()).device))
    trials = trials_of(scene, goal.repair, stages)
    run = _Run(scene, goal, trials, stages, console)
    orders = {} if goal.plan else orders_of(goal.request(scene), scores, trials, console)
    fits = _kept_fits(goal, trials, stages, environment, lambda: fits_of(scene, goal, orders, trials, console))
    fits = list({f.plan.asked: f for f in fits}.values())  # "50%" and "36" may be the same
    with console.track("measuring the dense model") as progress:
        dense = stages.measurement(
            "dense", lambda: evaluate(scene.model, scene.parts.report.batches(), progress=progress)
        )  # fmt: skip
    randoms = random_orders(scene, goal, fits)
    curve = trade_off(shown(goal, orders, fits, trials), randoms, fits, trials, console)
    for note in dict.fromkeys(note for f in fits for note in f.plan.notes):
        console.say(note)
    results: list[Pruned] = []
    models: dict[int, nn.Module] = {}
    for fitted in fits:
        path = content.checkpoint_path(fitted.plan.asked)
        results.append(_prune_one(run, fitted, randoms, dense, path, models))
    # On another machine it is timed again.
    timed = stages.get(
        f"latency {environment}",
        lambda: time_models(scene, {"dense": scene.model, **_largest_first(models)}, console), dict,
    )  # fmt: skip
    metrics = {
        "metric": scene.metric,
        # Scores may have been made elsewhere, or with another number of threads.
        "environment": environment,
        "planning": {
            **goal.about(),
            "work": trials.work,
            **({"judged_by": trials.judged_by} if len(orders) > 1 else {}),
            **({"compared": trials.compared} if trials.compared else {}),
        },
        "dense": {
            **_measured(dense, scene.metric),
            "parameters": latency.parameters(scene.model),
            "flops": latency.flops(scene.model, scene.typical_input()),
        },
        "budgets": [r.document for r in results],
        "curve": curve,
        "latency": timed,
    }
    return results, metrics


def _kept_fits(
    goal: Goal, trials: Trials, stages: Stages, environment: Any, make: Callable[[], list[Fit]]
) -> list[Fit]:
    """The plans that hold the budgets, as they were when they were first found: what was timed is not timed again."""
    if goal.plan is not None:
        return make()

    def to_json(fit: Fit) -> dict[str, Any]:
        place = None if fit.budget is None else goal.budgets.index(fit.budget)
        reading = None if fit.reading is None else asdict(fit.reading)
        return {"plan": fit.plan.to_json(), "budget": place, "reading": reading}

    def read(data: dict[str, Any]) -> Fit:
        budget = None if data["budget"] is None else goal.budgets[data["budget"]]
        return Fit(PruningPlan.from_json(data["plan"]), budget, data["reading"] and Reading(**data["reading"]))

    def made() -> dict[str, Any]:
        fits = [to_json(fit) for fit in make()]
        return {"fits": fits, "compared": trials.compared}

    timed = any(budget.timed for budget in goal.budgets)
    found = stages.get(f"fits {environment}" if timed else "fits", made, dict)
    trials.compared = found["compared"]
    return [read(data) for data in found["fits"]]


def _scores_of(source: RunFolder | None, methods: Sequence[str]) -> list[HeadScores]:
    scores = source.read_scores() if source is not None else []
    if source is not None and (missing := [m for m in methods if m not in {s.method for s in scores}]):
        raise HeadPruneError(
            f"{source.scores_path} holds no scores by {missing[0]}.",
            f"It has {', '.join(s.method for s in scores)}; score again with --method {missing[0]}.",
        )
    return scores


def _candidates(scores: Sequence[HeadScores], methods: Sequence[str]) -> list[HeadScores]:
    """The scores to plan by: those asked for, and random only if there is nothing else."""
    return candidates([s for s in scores if s.method in methods] if methods else scores)


def _check_same(scene: Scene, scores: Sequence[HeadScores], source: RunFolder) -> None:
    """Scores must be this model's, and their examples must not be among those that are reported."""
    now = fingerprint(scene.model)
    for s in scores:
        if s.model != now:
            raise HeadPruneError(
                f"The scores in {source.scores_path} are another model's than {scene.options.model} (fingerprint {s.model}, "
                f"this one is {now}).",
                "Score this model first, or leave it out to prune the one that was scored.",
            )
    run = source.read_run()
    check_scored(scene, run, Options.of_run(run, source.path / "run.json").data, str(source.path))


def _prune_one(
    run: _Run,
    fitted: Fit,
    randoms: Sequence[Order],
    dense: Measurement,
    path: Path,
    models: dict[int, nn.Module],
) -> Pruned:
    scene, trials, stages, console = run.scene, run.trials, run.stages, run.console
    chosen, asked = fitted.plan, fitted.plan.asked
    made, reloaded = _made(run, chosen, path)
    if note := made["saved"]["note"]:
        console.say(note)
    batches = list(scene.parts.report.batches())
    with console.track(f"measuring with {chosen.kept} heads") as progress:
        pruned = stages.measurement(f"pruned {asked}", lambda: evaluate(reloaded, batches, progress=progress))
    with console.track(f"random control with {chosen.kept} heads") as progress:
        control = []
        for i, order in enumerate(randoms):
            drop = order.plan(chosen.kept).drop
            control.append(stages.get(f"control {asked} {i}", lambda: _control(drop, trials, batches), float))  # noqa: B023
            progress(i + 1, len(randoms))
    without = alike = None
    if made["repair"] is not None:
        without = stages.measurement(f"unrepaired {asked}", lambda: trials.masked(chosen.drop, batches))
        if made["repair"]["answers"] is not None or any(not trial["kept"] for trial in made["repair"]["trials"]):
            alike = stages.measurement(f"like control {asked}", lambda: _alike(chosen.drop, trials, batches))
    change = compare(dense, pruned, scene.metric)
    models[chosen.kept] = reloaded
    document = {
        "name": _name_of(chosen.kept),
        "asked": asked,
        "kept": chosen.kept,
        "total": chosen.total,
        "method": chosen.method,
        "strategy": chosen.strategy,
        "budget": _budget(scene, fitted),
        "notes": [*chosen.notes, *([note] if note else [])],
        "drop": chosen.drop,
        "pruned": _measured(pruned, scene.metric),
        "change": asdict(change),
        "random": control,
        "repair": None
        if without is None
        else {
            **made["repair"],
            "without": _measured(without, scene.metric),
            "layers_alone": None if alike is None else _measured(alike, scene.metric),
        },
        "finetune": made["finetune"],
        "proof": made["proof"],
        "parameters": latency.parameters(reloaded),
        "flops": latency.flops(reloaded, scene.typical_input()),
        "checkpoint": path.name,
        "dtype": made["saved"]["dtype"],
    }
    return Pruned(chosen, change, document)


def _control(drop: Heads, trials: Trials, batches: Sequence[Any]) -> float:
    """The metric without heads that were drawn at random."""
    return _alike(drop, trials, batches).metrics[trials.metric]


def _alike(drop: Heads, trials: Trials, batches: Sequence[Any]) -> Measurement:
    """The model without some heads as the control is measured: fitted layer by layer, all fits kept. The rest is dear."""
    with trials.repaired(drop):
        return trials.masked(drop, batches)


def _made(run: _Run, chosen: PruningPlan, path: Path) -> tuple[dict[str, Any], nn.Module]:
    """The facts of a pruned model that is saved to ``path``, and the model as it is loaded from there.

    What is reported is what a user will load, not what is in memory.
    """
    name = f"made {chosen.asked}"
    for damaged in (False, True):
        if damaged:
            run.stages.forget(name)
        made = run.stages.get(name, lambda: _make(run, chosen, path), dict)
        try:
            return made, saving.load(run.scene, path)
        except HeadPruneError:
            if damaged:
                raise
    raise AssertionError


def _make(run: _Run, chosen: PruningPlan, path: Path) -> dict[str, Any]:
    """Repair, prune, train and save."""
    scene, trials, console = run.scene, run.trials, run.console
    doing = console.track(f"repairing {chosen.kept} heads") if trials.refit else nullcontext()
    with doing, trials.repaired(chosen.drop, whole=True) as repair:
        model = copy.deepcopy(scene.model)
    # The plan was made for the dense model's weights; some of them are repaired now.
    proof = prune(model, chosen.drop, scene.example, layers=scene.layers)
    trained = None
    if run.goal.finetune:
        model, trained = _trained(run, model, chosen.asked)
    saved = saving.save(scene, model, path, proof.tolerance)
    return {
        "repair": repair and repair.to_json(),
        "finetune": trained,
        "proof": {**asdict(proof), "ghosts": list(proof.ghosts), "reload_difference": saved.difference},
        "saved": {"dtype": saved.dtype, "note": saved.note},
    }


def _trained(run: _Run, pruned: nn.Module, asked: int) -> tuple[nn.Module, dict[str, Any]]:
    """The fine-tuned model, and what a report says of it."""
    from headprune.app.finetune import FinetuneOptions, finetune

    scene, console = run.scene, run.console
    before = evaluate(pruned, scene.parts.report.batches())
    train, notes = load_train(scene.options.data, scene.loaded, scene.parts)
    for note in notes:
        console.say(note)
    options = FinetuneOptions(epochs=run.goal.finetune, seed=scene.options.seed)
    with console.track("fine-tuning") as progress:
        done = finetune(
            pruned, scene.model, train, scene.parts.choose, options, metric=scene.metric,
            work=run.stages.path / f"finetune-{asked}", progress=progress, say=console.say,
        )  # fmt: skip
    return done.model, {**done.to_json(), "options": asdict(options), "before": _measured(before, scene.metric)}


def _budget(scene: Scene, fitted: Fit) -> dict[str, Any]:
    """What was asked for, and what that was measured to be."""
    budget, reading = fitted.budget, fitted.reading
    told: dict[str, Any] = {"asked": fitted.plan.budget}
    if budget is not None and reading is not None:
        told |= {**budget.to_json(), "measured": reading.value, "low": reading.low, "high": reading.high}
        if budget.timed:
            told["batch"], told["length"] = latency.example_shape(budget_input(scene))
    return told


def _name_of(kept: int) -> str:
    return f"{kept} heads"


def _largest_first(models: dict[int, nn.Module]) -> dict[str, nn.Module]:
    return {_name_of(kept): models[kept] for kept in sorted(models, reverse=True)}


def _measured(measured: Measurement, metric: str) -> dict[str, Any]:
    low, high = interval(measured, metric)
    return {"metrics": measured.metrics, "low": low, "high": high, "examples": len(measured)}
