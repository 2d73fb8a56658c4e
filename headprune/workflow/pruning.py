"""What `headprune prune` does."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import checkpoint, latency, report, runs
from headprune.data import load_train
from headprune.errors import HeadPruneError, PruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.fingerprint import fingerprint
from headprune.inputs import call, move
from headprune.jsonio import write_json
from headprune.planning import Order
from headprune.planning.budgets import Fit
from headprune.plans import PruningPlan
from headprune.runs import RunFolder
from headprune.scoring import HeadScores
from headprune.surgery import answers, prune
from headprune.workflow.scene import Console, Options, Scene, open_scene
from headprune.workflow.scoring import run_document, score_all
from headprune.workflow.targets import Goal, Trials, fits_of, masked, orders_of, random_orders, shown, trade_off
from headprune.workflow.timing import budget_input, time_models


@dataclass(frozen=True)
class Pruned:
    """One budget's result."""

    plan: PruningPlan
    change: Change
    document: dict[str, Any]


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
    if source is not None:
        _check_same(scene, scores, source)
    trials = Trials(scene, goal.repair)
    orders = {} if goal.plan else orders_of(scene, goal, _candidates(scores, methods), trials, console)
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
        folder: Where to write; may be ``source``.
    """
    started = time.monotonic()
    scores = _scores_of(source, methods)
    scene = open_scene(options, console)
    if source is None:
        methods = methods if goal.uses_scores else []
        scores = score_all(scene, methods, folder, console)
        run = run_document(scene, started, methods)
    else:
        _check_same(scene, scores, source)
        run = source.read_run()
        run["commands"] = [run["commands"][0], runs.command_line()]
    trials = Trials(scene, goal.repair)
    orders = {} if goal.plan else orders_of(scene, goal, _candidates(scores, methods), trials, console)
    fits = fits_of(scene, goal, orders, trials, console)
    fits = list({f.plan.asked: f for f in fits}.values())  # "50%" and "36" may be the same
    with console.track("measuring the dense model") as progress:
        dense = evaluate(scene.model, scene.parts.report.batches(), progress)
    if scene.metric not in dense.metrics:
        raise HeadPruneError(f"The {scene.metric} of {options.model} cannot be read off its logits.", "Check --task.")
    randoms = random_orders(scene, goal, fits)
    curve = trade_off(shown(goal, orders, fits, trials), randoms, fits, trials, console)

    results: list[Pruned] = []
    models: dict[int, nn.Module] = {}
    with folder.staging() as staging:
        for fitted in fits:
            path = staging / folder.checkpoint_path(fitted.plan.asked).name
            work = folder.unfinished / f"finetune-{fitted.plan.asked}"
            results.append(_prune_one(scene, goal, fitted, randoms, trials, dense, path, work, models, console))
        metrics = {
            "metric": scene.metric,
            # Scores may have been made elsewhere, or with another number of threads.
            "environment": runs.environment(str(next(scene.model.parameters()).device)),
            "planning": {**goal.about(), **({"judged_by": trials.judged_by} if len(orders) > 1 else {})},
            "dense": {
                **_measured(dense, scene.metric),
                "parameters": latency.parameters(scene.model),
                "flops": latency.flops(scene.model, scene.typical_input()),
            },
            "budgets": [r.document for r in results],
            "curve": curve,
            "latency": time_models(scene, {"dense": scene.model, **_largest_first(models)}, console),
        }
        # All is computed: from here on only files are written.
        folder.clear_pruned()
        for fitted in fits:
            path = folder.checkpoint_path(fitted.plan.asked)
            (staging / path.name).replace(path)
    if scores and (source is None or folder.path != source.path):
        folder.write_scores(scores, run)
    for i, result in enumerate(results):
        result.plan.save(folder.plan_path(result.plan.asked, first=i == 0))
    run["seconds"] = [*run["seconds"][: len(run["commands"]) - 1], round(time.monotonic() - started, 1)]
    folder.write_run(run)
    write_json(folder.metrics_path, "metrics", metrics)
    folder.clear_unfinished()
    report.write(folder)
    return results


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
    asked_for = [s for s in scores if s.method in methods] if methods else list(scores)
    return [s for s in asked_for if s.method != "random"] or asked_for


def _check_same(scene: Scene, scores: Sequence[HeadScores], source: RunFolder) -> None:
    """Scores must be this model's, and their examples must not be among those that are reported."""
    now = fingerprint(scene.model)
    for s in scores:
        if s.model != now:
            raise HeadPruneError(
                f"The scores in {source.scores_path} are another model's (fingerprint {s.model}, this one is {now}).",
                "Score this model first.",
            )
    then = source.read_run()["parts"]
    if then != scene.parts.about():
        raise HeadPruneError(
            f"The data is not cut as it was for {source.scores_path}, so scored examples could be reported.",
            "Use the same data options and seed, or score again.",
        )


def _prune_one(
    scene: Scene,
    goal: Goal,
    fitted: Fit,
    randoms: Sequence[Order],
    trials: Trials,
    dense: Measurement,
    path: Path,
    work: Path,
    models: dict[int, nn.Module],
    console: Console,
) -> Pruned:
    chosen = fitted.plan
    for note in chosen.notes:
        console.say(note)
    doing = console.track(f"repairing {chosen.kept} heads") if trials.refit else nullcontext()
    with doing, trials.repaired(chosen.drop, answering=True) as repair:
        model = copy.deepcopy(scene.model)
    # The plan was made for the dense model's weights; some of them are repaired now.
    proof = prune(model, chosen.drop, scene.example, layers=scene.layers)
    trained = None
    if goal.finetune:
        model, trained = _trained(scene, goal, model, work, console)
    checkpoint.save(
        model, path, processor=scene.loaded.processor, overwrite=True,
        about={"task": scene.loaded.task.name, "from": scene.loaded.source},
    )  # fmt: skip
    # What is reported is what a user will load, not what is in memory.
    reloaded = checkpoint.load(path, device=next(model.parameters()).device)
    example = move(scene.example, next(model.parameters()).device)
    with torch.inference_mode():
        pairs = zip(answers(call(model, example)), answers(call(reloaded, example)), strict=True)
        difference = max(((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() for a, b in pairs)
    if difference > proof.tolerance:
        raise PruneError(
            f"The saved model answers differently after loading (by {difference:.2g}).", "Please report this."
        )
    del model
    with console.track(f"measuring with {chosen.kept} heads") as progress:
        pruned = evaluate(reloaded, scene.parts.report.batches(), progress)
    batches = list(scene.parts.report.batches())
    with console.track(f"random control with {chosen.kept} heads") as progress:
        control = []
        for i, order in enumerate(randoms):
            drop = order.plan(chosen.kept).drop
            with trials.repaired(drop, answering=True):
                control.append(masked(scene, drop, batches).metrics[scene.metric])
            progress(i + 1, len(randoms))
    without = None if repair is None else _measured(masked(scene, chosen.drop, batches), scene.metric)
    change = compare(dense, pruned, scene.metric, scene.options.seed)
    models[chosen.kept] = reloaded
    document = {
        "name": _name_of(chosen.kept),
        "asked": chosen.asked,
        "kept": chosen.kept,
        "total": chosen.total,
        "method": chosen.method,
        "strategy": chosen.strategy,
        "budget": _budget(scene, fitted),
        "notes": list(chosen.notes),
        "drop": chosen.drop,
        "pruned": _measured(pruned, scene.metric),
        "change": {k: (None if v != v else v) for k, v in asdict(change).items() if k != "details"},
        "random": control,
        "repair": None if repair is None else {**repair.to_json(), "without": without},
        "finetune": trained,
        "proof": {**asdict(proof), "ghosts": list(proof.ghosts), "reload_difference": difference},
        "parameters": latency.parameters(reloaded),
        "flops": latency.flops(reloaded, scene.typical_input()),
        "checkpoint": path.name,
    }
    return Pruned(chosen, change, document)


def _trained(
    scene: Scene, goal: Goal, pruned: nn.Module, work: Path, console: Console
) -> tuple[nn.Module, dict[str, Any]]:
    """The fine-tuned model, and what a report says of it."""
    from headprune.finetune import FinetuneOptions, finetune  # Trainer takes seconds to import

    before = evaluate(pruned, scene.parts.report.batches())
    train, notes = load_train(scene.options.data, scene.loaded, scene.parts)
    for note in notes:
        console.say(note)
    options = FinetuneOptions(epochs=goal.finetune, seed=scene.options.seed)
    with console.track("fine-tuning") as progress:
        done = finetune(
            pruned, scene.model, train, scene.parts.choose, options, metric=scene.metric, work=work,
            progress=progress, say=console.say,
        )  # fmt: skip
    return done.model, {**done.to_json(), "options": asdict(options), "before": _measured(before, scene.metric)}


def _budget(scene: Scene, fitted: Fit) -> dict[str, Any]:
    """What was asked for, and what that was measured to be."""
    budget, reading = fitted.budget, fitted.reading
    told: dict[str, Any] = {"asked": fitted.plan.budget}
    if budget is not None and reading is not None:
        told |= {"kind": budget.kind, "limit": budget.amount, "relative": budget.relative, "unit": budget.unit}
        told |= {"measured": reading.value, "low": reading.low, "high": reading.high}
        if budget.kind == "latency":
            told["batch"], told["length"] = latency.example_shape(budget_input(scene))
    return told


def _name_of(kept: int) -> str:
    return f"{kept} heads"


def _largest_first(models: dict[int, nn.Module]) -> dict[str, nn.Module]:
    return {_name_of(kept): models[kept] for kept in sorted(models, reverse=True)}


def _measured(measured: Measurement, metric: str) -> dict[str, Any]:
    low, high = interval(measured, metric)
    return {"metrics": measured.metrics, "low": low, "high": high, "examples": len(measured)}
