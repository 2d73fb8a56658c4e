"""What `headprune score` does."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headprune import latency, report, runs
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.plans import heads_to_keep
from headprune.runs import RunFolder
from headprune.scoring import METHODS, HeadScores, score
from headprune.scoring.resume import Work
from headprune.workflow.scene import Console, Options, Scene, open_scene


def score_run(
    options: Options, methods: Sequence[str], folder: RunFolder, console: Console
) -> tuple[Scene, list[HeadScores]]:
    """Score a model by each method and write the run folder."""
    started = time.monotonic()
    for name in methods:
        if name not in METHODS:
            raise HeadPruneError(f"There is no scoring method {name!r}.", f"Choose from {', '.join(METHODS)}.")
    scene = open_scene(options, console)
    scores = score_all(scene, methods, folder, console)
    folder.clear_pruned()
    folder.write_scores(scores, run_document(scene, started, methods))
    folder.clear_unfinished()
    report.write(folder)
    return scene, scores


def score_all(scene: Scene, methods: Sequence[str], folder: RunFolder, console: Console) -> list[HeadScores]:
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


def run_document(scene: Scene, started: float, methods: Sequence[str]) -> dict[str, Any]:
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
