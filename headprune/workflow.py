"""The way through the house: what `headprune score` and `headprune prune` do, step by step.

Everything is computed first and written at the end, so an interrupted run leaves no half-written folder.
"""

from __future__ import annotations

import copy
import datetime
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from headprune import checkpoint, latency, report, runs
from headprune.attention import AttentionLayer, Heads
from headprune.data import DataOptions, Parts, load_parts
from headprune.errors import HeadPruneError, PruneError
from headprune.evaluation import Change, Measurement, compare, evaluate, interval
from headprune.fingerprint import fingerprint
from headprune.gates import mask
from headprune.inputs import call, first_rows, move
from headprune.jsonio import write_json
from headprune.models import LoadedModel, load_model
from headprune.planning import plan
from headprune.plans import Keep, PruningPlan, heads_to_keep
from headprune.runs import RunFolder
from headprune.scoring import METHODS, HeadScores, score
from headprune.scoring.base import Progress, Settings
from headprune.scoring.resume import Work
from headprune.surgery import answers, prune
from headprune.trace import find_attention

RANDOM_DRAWS = 3
_CURVE = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_BOUND_LIMIT = 2_000_000_000  # parameters; above this a third copy of the model is too much to ask


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        distil: Score by the divergence from the dense model's answers, not by the labels.
        keep: The budget that scoring should be sharpest at, where it cannot be sharp everywhere.
        scoring: What the scoring methods are told.
    """

    model: str
    data: DataOptions
    task: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    distil: bool = False
    keep: str | None = None
    scoring: Settings = field(default_factory=Settings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        scoring = Settings(**data.get("scoring", {}))
        return cls(**{**data, "data": DataOptions(**data["data"]), "scoring": scoring})


class Console(Protocol):
    """Where a run tells what it does."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


@dataclass(frozen=True)
class Scene:
    """A loaded model with its data and its layers."""

    options: Options
    loaded: LoadedModel
    parts: Parts
    layers: list[AttentionLayer]

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def example(self) -> dict[str, Any]:
        """Two short examples of different length, for the trace and the proof."""
        return next(self.parts.score.batches(2))

    @property
    def metric(self) -> str:
        return self.loaded.task.metric


def open_scene(options: Options, console: Console) -> Scene:
    """Load the model and the data, and find the heads."""
    loaded = load_model(
        options.model, task=options.task, device=options.device, dtype=options.dtype, revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if getattr(loaded.config, "num_labels", 2) == 1 and loaded.task.metric == "accuracy":
        raise HeadPruneError(
            f"{options.model} has a regression head (one label), which the command line does not measure yet.",
            "Use the Python API: headprune.score(model, batches).",
        )
    device = next(loaded.model.parameters()).device
    console.say(f"{type(loaded.model).__name__} for {loaded.task.name} on {device}")
    parts = load_parts(options.data, loaded)
    columns = ", ".join(f"{what}: {name}" for what, name in parts.columns.items())
    sizes = ", ".join(f"{len(p)} to {p.name} ({p.split})" for p in (parts.score, parts.choose, parts.report))
    console.say(f"Data: {sizes}. Columns: {columns}.")
    for note in parts.notes:
        console.say(note)
    return Scene(options, loaded, parts, find_attention(loaded.model, next(parts.score.batches(2))))


# -- score ------------------------------------------------------------------------------------


def score_run(
    options: Options, methods: Sequence[str], folder: RunFolder, console: Console
) -> tuple[Scene, list[HeadScores]]:
    """Score a model by each method and write the run folder."""
    started = time.monotonic()
    for name in methods:
        if name not in METHODS:
            raise HeadPruneError(f"There is no scoring method {name!r}.", f"Choose from {', '.join(METHODS)}.")
    scene = open_scene(options, console)
    scores = _score_all(scene, methods, folder, console)
    folder.clear_pruned()
    folder.write_scores(scores, _run_document(scene, started, methods))
    folder.clear_unfinished()
    report.write(folder)
    return scene, scores


def _score_all(scene: Scene, methods: Sequence[str], folder: RunFolder, console: Console) -> list[HeadScores]:
    batches = list(scene.parts.score.batches())
    found = []
    options, settings = scene.options, scene.options.scoring
    if options.keep is not None:
        settings = replace(settings, keep=heads_to_keep(options.keep, sum(a.num_heads for a in scene.layers)))
    for name in dict.fromkeys(methods):
        with console.track(f"scoring by {name}") as progress:
            began = time.monotonic()
            s = score(
                scene.model, batches, name, layers=scene.layers, seed=options.seed, progress=progress,
                distil=options.distil, settings=settings, work=Work(folder.unfinished, console.say),
            )  # fmt: skip
            s.details["seconds"] = round(time.monotonic() - began, 2)
        found.append(s)
    return found


def _run_document(scene: Scene, started: float, methods: Sequence[str]) -> dict[str, Any]:
    device = str(next(scene.model.parameters()).device)
    return {
        "commands": [runs.command_line()],
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": [round(time.monotonic() - started, 1)],
        "options": scene.options.to_json(),
        "methods": list(methods),
        "environment": runs.environment(device),
        "parts": scene.parts.about(),
        "columns": scene.parts.columns,
        "notes": scene.parts.notes,
        "model": {
            "class": type(scene.model).__name__,
            "task": scene.loaded.task.name,
            "metric": scene.metric,
            "dtype": str(next(scene.model.parameters()).dtype).removeprefix("torch."),
            "attention": getattr(scene.model.config, "_attn_implementation", None),
            "parameters": latency.parameters(scene.model),
            "fingerprint": fingerprint(scene.model),
            "heads": sum(layer.num_heads for layer in scene.layers),
            "layers": [
                {k: v for k, v in layer.to_json().items() if k in _LAYER_FACTS} for layer in scene.layers
            ],
        },
    }  # fmt: skip


_LAYER_FACTS = ("name", "index", "kind", "num_heads", "num_kv_heads", "head_dim", "prunable", "reason")


# -- prune ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """One budget's result."""

    plan: PruningPlan
    change: Change
    document: dict[str, Any]


def prune_run(
    options: Options,
    keeps: Sequence[Keep],
    methods: Sequence[str],
    source: RunFolder | None,
    folder: RunFolder,
    console: Console,
) -> list[Pruned]:
    """Prune to each budget, measure again, save the checkpoints, write the report.

    Args:
        source: The run whose scores to use; None scores first.
        folder: Where to write; may be ``source``.
    """
    started = time.monotonic()
    scores = source.read_scores() if source is not None else []
    if scores and (missing := [m for m in methods if m not in {s.method for s in scores}]):
        raise HeadPruneError(
            f"{source.scores_path if source else ''} holds no scores by {missing[0]}.",
            f"It has {', '.join(s.method for s in scores)}; score again with --method {missing[0]}.",
        )
    scene = open_scene(options, console)
    if source is None:
        scores = _score_all(scene, methods, folder, console)
        run = _run_document(scene, started, methods)
    else:
        _check_same(scene, scores, source)
        run = source.read_run()
        run["commands"] = [run["commands"][0], runs.command_line()]
    total = sum(layer.num_heads for layer in scores[0].layers)
    counts = list(dict.fromkeys(heads_to_keep(keep, total) for keep in keeps))
    asked_for = [s for s in scores if s.method in methods] if methods else scores
    candidates = [s for s in asked_for if s.method != "random"] or asked_for
    plans = {k: [plan(s, k) for s in candidates] for k in counts}  # also refuses what is out of reach, early

    randoms = [
        score(
            scene.model,
            list(scene.parts.score.batches())[:1],
            "random",
            layers=scene.layers,
            seed=scene.options.seed + i,
        )
        for i in range(RANDOM_DRAWS)
    ]
    with console.track("measuring the dense model") as progress:
        dense = evaluate(scene.model, scene.parts.report.batches(), progress)
    if scene.metric not in dense.metrics:
        raise HeadPruneError(f"The {scene.metric} of {options.model} cannot be read off its logits.", "Check --task.")
    curve = _trade_off(scene, candidates, randoms, counts, total, console)

    results: list[Pruned] = []
    models: dict[int, nn.Module] = {}
    with folder.staging() as staging:
        for keep in counts:
            chosen = _choose(plans[keep], curve, scene.metric)
            path = staging / folder.checkpoint_path(keep).name
            results.append(_prune_one(scene, chosen, randoms, dense, path, models, console))
        metrics = {
            "metric": scene.metric,
            # Scores may have been made elsewhere, or with another number of threads.
            "environment": runs.environment(str(next(scene.model.parameters()).device)),
            "dense": {
                **_measured(dense, scene.metric),
                "parameters": latency.parameters(scene.model),
                "flops": latency.flops(scene.model, _typical_input(scene)),
            },
            "budgets": [r.document for r in results],
            "curve": curve,
            "latency": _time(scene, {"dense": scene.model, **_largest_first(models)}, console),
        }
        # All is computed: from here on only files are written.
        folder.clear_pruned()
        for keep in counts:
            (staging / folder.checkpoint_path(keep).name).replace(folder.checkpoint_path(keep))
    if source is None or folder.path != source.path:
        folder.write_scores(scores, run)
    for i, result in enumerate(results):
        result.plan.save(folder.plan_path(counts[i], first=i == 0))
    run["seconds"] = [*run["seconds"][: len(run["commands"]) - 1], round(time.monotonic() - started, 1)]
    folder.write_run(run)
    write_json(folder.metrics_path, "metrics", metrics)
    folder.clear_unfinished()
    report.write(folder)
    return results


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


def _trade_off(
    scene: Scene,
    scores: Sequence[HeadScores],
    randoms: Sequence[HeadScores],
    counts: Sequence[int],
    total: int,
    console: Console,
) -> list[dict[str, Any]]:
    """The metric on the choosing part against heads kept, by every method and by random (masked, not pruned)."""
    grid = sorted({*counts, *(max(1, round(f * total)) for f in _CURVE)}, reverse=True)
    floor = sum(layer.num_heads for layer in scores[0].layers if not layer.prunable)
    grid = [k for k in grid if k >= max(floor, 1)]
    batches = list(scene.parts.choose.batches())
    jobs: list[tuple[str, PruningPlan | None]] = [("dense", None)]
    jobs += [(s.method, plan(s, k)) for k in grid for s in (*scores, *randoms)]
    curve = []
    with console.track("trade-off on the choosing part") as progress:
        for i, (name, p) in enumerate(jobs):
            measured = _masked(scene, p.drop if p else {}, batches)
            low, high = interval(measured, scene.metric)
            curve.append(
                {
                    "method": name, "kept": p.kept if p else total, "asked": p.asked if p else total,
                    "value": measured.metrics[scene.metric], "low": low, "high": high,
                    "loss": measured.metrics["loss"],
                }
            )  # fmt: skip
            progress(i + 1, len(jobs))
    return curve


def _masked(scene: Scene, drop: Heads, batches: Sequence[Any]) -> Measurement:
    with mask(scene.model, drop, layers=scene.layers):
        return evaluate(scene.model, batches)


def _choose(plans: Sequence[PruningPlan], curve: Sequence[dict[str, Any]], metric: str) -> PruningPlan:
    """The plan that did best on the choosing part: by its metric, and by its loss where that ties."""

    def quality(candidate: PruningPlan) -> tuple[float, float]:
        point = next(p for p in curve if p["method"] == candidate.method and p["asked"] == candidate.asked)
        return (-point["value"] if metric == "perplexity" else point["value"], -point["loss"])

    return max(plans, key=quality)


def _prune_one(
    scene: Scene,
    chosen: PruningPlan,
    randoms: Sequence[HeadScores],
    dense: Measurement,
    path: Path,
    models: dict[int, nn.Module],
    console: Console,
) -> Pruned:
    for note in chosen.notes:
        console.say(note)
    model = copy.deepcopy(scene.model)
    proof = prune(model, chosen, scene.example, layers=scene.layers)
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
        for i, r in enumerate(randoms):
            control.append(_masked(scene, plan(r, chosen.asked).drop, batches).metrics[scene.metric])
            progress(i + 1, len(randoms))
    change = compare(dense, pruned, scene.metric, scene.options.seed)
    models[chosen.kept] = reloaded
    document = {
        "name": _name_of(chosen.kept),
        "asked": chosen.asked,
        "kept": chosen.kept,
        "total": chosen.total,
        "method": chosen.method,
        "notes": list(chosen.notes),
        "drop": chosen.drop,
        "pruned": _measured(pruned, scene.metric),
        "change": {k: (None if v != v else v) for k, v in asdict(change).items() if k != "details"},
        "random": control,
        "proof": {**asdict(proof), "ghosts": list(proof.ghosts), "reload_difference": difference},
        "parameters": latency.parameters(reloaded),
        "flops": latency.flops(reloaded, _typical_input(scene)),
        "checkpoint": path.name,
    }
    return Pruned(chosen, change, document)


def _name_of(kept: int) -> str:
    return f"{kept} heads"


def _largest_first(models: dict[int, nn.Module]) -> dict[str, nn.Module]:
    return {_name_of(kept): models[kept] for kept in sorted(models, reverse=True)}


def _measured(measured: Measurement, metric: str) -> dict[str, Any]:
    low, high = interval(measured, metric)
    return {"metrics": measured.metrics, "low": low, "high": high, "examples": len(measured)}


def _typical_input(scene: Scene) -> dict[str, Any]:
    """One example of median length, without labels where the model does not need them."""
    return _inputs(scene, scene.parts.report.typical(1))


def _inputs(scene: Scene, batch: dict[str, Any]) -> dict[str, Any]:
    if getattr(scene.model.config, "is_encoder_decoder", False):
        return batch
    return {k: v for k, v in batch.items() if k not in ("labels", "start_positions", "end_positions")}


def _time(scene: Scene, models: dict[str, nn.Module], console: Console) -> dict[str, Any]:
    """Latency of the dense and every pruned model, with the bound: the model without (nearly) all heads."""
    bound, ghosts = None, 0
    everything = {layer.name: list(range(layer.num_heads)) for layer in scene.layers if layer.prunable}
    if latency.parameters(scene.model) < _BOUND_LIMIT:
        empty = copy.deepcopy(scene.model)
        try:
            ghosts = len(prune(empty, everything, scene.example, layers=scene.layers).ghosts)
            bound = "no heads"
            models = {**models, bound: empty}
        except HeadPruneError as error:
            console.say(f"The bound could not be timed: {error.args[0]}")
    inputs = []
    for batch, length in _shapes(scene):
        example = _shaped(scene, batch, length)
        inputs.append((batch, latency.example_shape(example)[1], example))
    with console.track("timing") as progress:
        rows = latency.bench(models, inputs, seed=scene.options.seed, progress=progress)
    typical = latency.example_shape(_typical_input(scene))[1]
    return {"rows": [row.to_json() for row in rows], "bound": bound, "bound_ghosts": ghosts, "typical_length": typical}


def _shapes(scene: Scene) -> list[tuple[int, int | None]]:
    """Batch 1 and the run's batch size; for texts at the median length and at four times that."""
    sizes = sorted({1, scene.options.data.batch_size})
    lengths: list[int | None] = [None]
    if scene.loaded.task.modality == "text" and scene.loaded.task.name != "seq2seq":
        typical = latency.example_shape(_typical_input(scene))[1]
        limit = getattr(scene.model.config, "max_position_embeddings", None) or 10**6
        lengths = list(dict.fromkeys([typical, min(4 * typical, limit - 2)]))
    return [(size, length) for length in lengths for size in sizes]


def _shaped(scene: Scene, batch: int, length: int | None) -> dict[str, Any]:
    source = scene.parts.report.typical(min(batch, len(scene.parts.report)))
    if length is not None:
        return latency.shaped(source, batch, length)
    if len(scene.parts.report) < batch:
        source = {k: torch.cat([v] * (batch // len(v) + 1))[:batch] for k, v in source.items()}
    return _inputs(scene, first_rows(source, batch))
