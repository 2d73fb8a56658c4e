"""What `headprune score` does."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headprune import latency
from headprune.app import runs
from headprune.app.runs import RunFolder
from headprune.app.workflow.scene import Console, Options, Scene, open_scene
from headprune.app.workflow.stages import publish, stages_of
from headprune.fingerprint import fingerprint
from headprune.jsonio import dumps
from headprune.plans import heads_to_keep
from headprune.scoring import HeadScores, method_named, score
from headprune.scoring.resume import Work


def score_run(
    options: Options, methods: Sequence[str], folder: RunFolder, console: Console
) -> tuple[Scene, list[HeadScores]]:
    """Score a model by each method and write the run folder."""
    started = time.monotonic()
    for name in methods:
        method_named(name)
    scene = open_scene(options, console)
    run = run_document(scene, methods)
    scores, before = score_all(scene, methods, folder, console)
    content = RunFolder(folder.unfinished / "content")
    shutil.rmtree(content.path, ignore_errors=True)  # of a run that was killed while it wrote
    content.write_scores(scores, {**run, "seconds": [round(before + time.monotonic() - started, 1)]})
    publish(folder, content)
    return scene, scores


def score_all(
    scene: Scene, methods: Sequence[str], folder: RunFolder, console: Console
) -> tuple[list[HeadScores], float]:
    """The scores by every method, and the seconds that interrupted runs took of them."""
    if not methods:
        return [], 0.0
    batches = list(scene.parts.score.batches())
    found = []
    options, settings = scene.options, scene.options.scoring
    if options.keep is not None:
        settings = replace(settings, keep=heads_to_keep(options.keep, sum(a.num_heads for a in scene.layers)))
    stages = stages_of(folder, "score", scene, say=console.say)

    def scored(name: str) -> dict[str, Any]:
        began = time.monotonic()
        with console.track(f"scoring by {name}") as progress:
            s = score(
                scene.model, batches, name, layers=scene.layers, seed=options.seed, progress=progress,
                distil=options.distil, settings=settings, work=Work(folder.unfinished, console.say),
            )  # fmt: skip
        s.details["seconds"] = round(time.monotonic() - began, 2)
        return s.to_json()

    for name in dict.fromkeys(methods):
        found.append(
            stages.get(name, partial(scored, name), lambda data: HeadScores.from_json(data, scene.maskable))
        )  # fmt: skip
    return found, stages.before


def run_document(scene: Scene, methods: Sequence[str]) -> dict[str, Any]:
    """What run.json says, but for the time that it took.

    Raises:
        HeadPruneError: There is something in it that cannot be written, which is better known before the long work.
    """
    device = str(next(scene.model.parameters()).device)
    document = {
        "commands": [runs.command_line()],
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": [],
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
    dumps(document)
    return document


def cut_anew(scene: Scene, run: Mapping[str, Any]) -> dict[str, Any]:
    """What of a scoring run's document is otherwise where another run prunes by its scores: the data beside the scored part."""
    scored = {k: run["options"][k] for k in ("scoring", "distil", "keep") if k in run["options"]}
    options = {**scene.options.to_json(), **scored}
    return {
        "options": options,
        "parts": scene.parts.about(),
        "columns": scene.parts.columns,
        "notes": scene.parts.notes,
    }


_LAYER_FACTS = ("name", "index", "kind", "num_heads", "num_kv_heads", "head_dim", "prunable", "reason")
