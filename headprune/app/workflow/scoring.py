"""What `headprune score` does."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headprune import latency
from headprune.app import runs
from headprune.app.documents import Cut, Heads, LayerFacts, ModelFacts, Run
from headprune.app.options import Options
from headprune.app.runs import RunFolder
from headprune.app.seeing import look
from headprune.app.workflow.cost import announce, cost_of_scores
from headprune.app.workflow.saving import publish, store_of
from headprune.app.workflow.scene import Console, Scene, open_scene
from headprune.errors import HeadPruneError
from headprune.fingerprint import config_hash, fingerprint, processor_hash
from headprune.inputs import model_device
from headprune.parallel import current
from headprune.scoring import HeadScores, save_scores, score
from headprune.scoring.base import Settings, method_and_settings
from headprune.store import Store


def score_run(options: Options, folder: RunFolder, console: Console) -> tuple[Scene, list[HeadScores]]:
    """Score a model by each of the options' methods and write the run folder."""
    started, methods = time.monotonic(), options.methods
    scene = open_scene(options, console, labelled=None)
    run = run_document(scene, methods, folder)
    announce(console, lambda: cost_of_scores(scene))
    scores, before = score_all(scene, methods, folder, console)

    def write() -> None:
        content = RunFolder(folder.unfinished / "content")
        shutil.rmtree(content.path, ignore_errors=True)  # of a run that was killed while it wrote
        save_scores(content.scores_path, scores)
        write_heads(scene, store_of(folder, "score", scene, say=lambda _: None), content, console)
        content.write_run(replace(run, seconds=(round(before + time.monotonic() - started, 1),)))
        publish(folder, content)

    current().first("writing the run", write)
    return scene, scores


def score_all(
    scene: Scene, methods: Sequence[str], folder: RunFolder, console: Console
) -> tuple[list[HeadScores], float]:
    """The scores by every method, and the seconds that interrupted runs took of them."""
    if not methods:
        return [], 0.0
    batches = list(scene.parts.score.batches())
    options, base = scene.options, Settings(keep=scene.options.keep)
    store = store_of(folder, "score", scene, say=console.say)

    def score_by(text: str) -> HeadScores:
        began = time.monotonic()
        name, settings = method_and_settings(text, base)
        with console.track(f"scoring by {name}") as progress:
            s = score(
                scene.model, batches, name, layers=scene.layers, seed=options.seed, progress=progress,
                distil=options.distil, settings=settings, work=folder.store(console.say),
            )  # fmt: skip
        s.details["seconds"] = round(time.monotonic() - began, 2)
        return HeadScores.from_json(s.to_json(), scene.maskable)  # as `prune` will read it

    return [store.get(text, partial(score_by, text)) for text in methods], store.seconds


def write_heads(scene: Scene, store: Store, content: RunFolder, console: Console) -> None:
    """Look what the heads do, and write heads.json; a model whose weights cannot be seen has none."""

    def make() -> Heads:
        with console.track("looking at what the heads do"):
            return look(scene.loaded, scene.parts.score, scene.layers, scene.options.seed)

    try:
        store.get("heads", make).write(content.heads_path)
    except HeadPruneError as error:
        console.say(f"What the heads do cannot be shown: {error.args[0]}")


def run_document(scene: Scene, methods: Sequence[str], folder: RunFolder) -> Run:
    """What run.json says, but for the time that it took; made before the long work, so that it is known to be writable."""
    attention = getattr(scene.model.config, "_attn_implementation", None)
    parameter = next(scene.model.parameters())
    return Run(
        commands=(runs.command_line(),),
        when=runs.now(),
        seconds=(),
        options=scene.options,
        methods=tuple(method_and_settings(text)[0] for text in methods),
        environment=runs.environment(str(model_device(scene.model))),
        **_cut_of(scene),
        model=ModelFacts(
            class_name=type(scene.model).__name__,
            task=scene.loaded.task.name,
            metric=scene.metric,
            dtype=str(parameter.dtype).removeprefix("torch."),
            attention=attention if isinstance(attention, str) else None,
            parameters=latency.parameters(scene.model),
            fingerprint=fingerprint(scene.model),
            config=config_hash(scene.model),
            processor=processor_hash(scene.loaded.processor),
            heads=sum(layer.num_heads for layer in scene.layers),
            layers=tuple(map(LayerFacts.of, scene.layers)),
        ),
        folder=str(folder.path),
    )


def run_after(run: Run, scene: Scene, folder: RunFolder) -> Run:
    """A scoring run's document where another run prunes by its scores: the data beside the scored part may be other data."""
    scored = run.options
    options = replace(scene.options, methods=scored.methods, distil=scored.distil, keep=scored.keep)
    commands = (run.commands[0], runs.command_line())
    return replace(run, options=options, **_cut_of(scene), commands=commands, folder=str(folder.path))


def _cut_of(scene: Scene) -> dict[str, Any]:
    """What a run's document says of the data."""
    return {"parts": Cut.of(scene.parts), "columns": scene.parts.columns, "notes": tuple(scene.parts.notes)}
