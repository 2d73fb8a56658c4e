"""The work of `headprune finetune`: fine-tunes a pruned folder's model, measures it and saves it to a new folder."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from headprune import checkpoint
from headprune.app import documents, runs
from headprune.app.data import load_parts, load_train
from headprune.app.models import load_model
from headprune.app.options import DataOptions, FinetuneOptions, Options
from headprune.app.report import finetune_card, finetune_report
from headprune.app.sources import half_of, holds, name_of
from headprune.app.workflow.cost import announce, cost_of_training
from headprune.app.workflow.scene import Console, Scene, changed_options, open_scene, seen_before
from headprune.errors import HeadPruneError
from headprune.evaluation import compare
from headprune.files import write_file
from headprune.fingerprint import config_hash, has_identity, processor_hash
from headprune.parallel import current

DOCUMENT = "finetune.json"
REPORT = "finetune.md"
_EXACT = 1e-5  # relative: how much the saved model's answers may differ from the trained one's


class TunedFolder(runs.Folder):
    """The folder of a fine-tuned model and its documents; a new result replaces everything in it."""

    parts = ("*",)


def choose_folder(output: Path, overwrite: bool, key: str) -> TunedFolder:
    """The folder to write.

    Raises:
        HeadPruneError: It exists and is not empty, and may not be overwritten.
    """
    folder = TunedFolder(output)
    runs.check_free(folder, overwrite or folder.left_by == key)
    if not folder.empty and not (output / DOCUMENT).is_file():
        raise HeadPruneError(f"{output} holds something that finetune did not write.", "Choose another with -o.")
    return folder


def finetune_run(
    source: Path, options: Options, training: FinetuneOptions, train_limit: int | None, folder: TunedFolder, console: Console
) -> documents.FinetuneRecord:  # fmt: skip
    """Train, measure on the reporting part, and write the model with ``finetune.json`` and ``finetune.md``.

    Args:
        source: A folder that headprune saved.
        options: The dense model (the teacher) and the data; best in float32, as the stored precision may be too coarse for small steps.
        train_limit: Examples to train on, at most.
        folder: Where to write; it changes when all is done.

    Returns:
        What is in ``finetune.json``.

    Raises:
        HeadPruneError: No dense model, or data that is cut differently than for pruning.
    """
    began = time.monotonic()
    run = run_of(source)
    scene = _open_dense(options, run, console)
    parts, metric, task = scene.parts, scene.metric, scene.loaded.task.name
    pruned = load_model(str(source), replace(options.loading, task=task), with_processor=False).model
    train, notes = load_train(options.data, scene.loaded, parts, train_limit)
    notes = [*_check_unseen(scene, source, run), *notes]
    half = half_of(pruned.config)
    if half and next(pruned.parameters()).dtype == torch.float32 and holds(pruned, half):
        scene = replace(scene, loaded=replace(scene.loaded, stored=half))
        notes.append(
            f"{source} is stored in {name_of(half)}, and so is the fine-tuned model; trained and measured in float32."
        )
    console.say(*notes)
    announce(console, lambda: cost_of_training(pruned, train, parts.choose, parts.report, training.epochs))
    tuned, trained = scene.finetune(pruned, train, training, folder.unfinished / "training")
    content, origin = folder.unfinished / "content", {"from": str(source)}
    saved = current().first("saving", lambda: scene.save(tuned, content, _EXACT, finetuned=origin))
    models = {"dense": scene.model, "pruned": pruned, "finetuned": scene.load(content)}
    measured = {}
    for name, model in models.items():
        with console.track(f"measuring the {name} model") as progress:
            measured[name] = scene.measures.evaluate(model, parts.report, progress)
    pairs = {"pruned": ("dense", "pruned"), "finetuned": ("dense", "finetuned"), "gain": ("pruned", "finetuned")}
    asked = {**vars(training), "dtype": options.loading.dtype, "train_limit": train_limit}
    record = documents.FinetuneRecord(
        command=runs.command_line(), when=runs.now(), environment=scene.environment,
        pruned=str(source), teacher=scene.loaded.source, task=task, metric=metric, data=options.data,
        options=documents.TrainingOptions(**asked), parts=documents.Cut.of(parts, train),
        notes=(*parts.notes, *notes, *filter(None, [saved.note])), seconds=round(time.monotonic() - began, 1), training=trained,
        models={name: documents.Measured.of(each, metric) for name, each in measured.items()},
        changes={name: compare(measured[a], measured[b], metric) for name, (a, b) in pairs.items()},
    )  # fmt: skip

    def write() -> None:
        record.write(content / DOCUMENT)
        write_file(content / REPORT, finetune_report(folder.path.name, record))
        checkpoint.add_figures(content, finetune_card(record))
        folder.publish(content)

    current().first("writing the run", write)
    return record


def run_of(source: Path) -> documents.Run | None:
    """The run.json of the run folder that a checkpoint lies in; None if it lies in none."""
    folder = runs.RunFolder(source.resolve().parent)
    return folder.read_run() if folder.run_path.is_file() else None


def _open_dense(options: Options, run: documents.Run | None, console: Console) -> Scene:
    """The data and the dense model, which is the teacher and the baseline of the comparisons.

    Raises:
        HeadPruneError: The dense model does not load, or has changed since the model was pruned.
    """
    try:
        scene = open_scene(options, console)
    except HeadPruneError as error:
        if options.model not in str(error):
            raise
        raise HeadPruneError(error.args[0], f"{error.hint} Or name another dense model with --teacher.") from error
    model, changed = scene.model, []
    dtype = next(model.parameters()).dtype
    if run is not None and (options.model, name_of(dtype)) == (run.options.model, run.model.dtype):
        changed = run.model.other_now(run.environment, config_hash(model), processor_hash(scene.loaded.processor))
        changed += [] if has_identity(model, run.model.fingerprint) else ["weights"]
    if changed:
        message = f"The {' and '.join(changed)} of {options.model} changed since the model was pruned."
        raise HeadPruneError(message, "Restore it, or name the dense model where it is now with --teacher.")
    return scene


def _check_unseen(scene: Scene, source: Path, run: documents.Run | None) -> list[str]:
    """Refuse to report examples that scored or chose the heads, or trained the model; notes if that is unknown.

    Raises:
        HeadPruneError: Such examples would be reported, or the data has changed.
    """
    now, data = documents.Cut.of(scene.parts), scene.options.data
    trained = trained_on(source, run)
    if trained is not None and not trained[0].same(now):
        flags, same = _differences(trained[1], data)
        if same:
            raise HeadPruneError(
                f"{source} was fine-tuned before; with {flags} the data is cut differently than it was then, and examples that it was "
                "trained on could be reported.",
                f"Leave out {flags}, or use the same values as then.",
            )
    if run is None or run.parts.same(now):
        return []
    before, unknown = run.options.data, ""
    flags, same = _differences(before, data)
    try:
        then = load_parts(before, scene.loaded)
        if not run.parts.same(documents.Cut.of(then)):
            unknown = f"{before.dataset} has changed since the model was pruned"
    except HeadPruneError as error:
        unknown = str(error.args[0]).rstrip(".")
    if unknown and not same:
        return [f"Whether reported examples were used to score or choose the heads is not known: {unknown}."]
    if unknown:
        message = f"{unknown}, so examples that were used to choose its heads could be reported."
        raise HeadPruneError(message, "Restore the data, or name other data with -d.")
    if seen := seen_before(scene.parts, (then.score, then.choose), same):
        raise HeadPruneError(
            f"With {flags}, {seen:,} of the {len(scene.parts.report):,} examples to report were used to score or choose the heads when "
            "the model was pruned.",
            f"Leave out {flags}, or name other data with -d.",
        )
    return []


def _differences(before: DataOptions, now: DataOptions) -> tuple[str, bool]:
    """The options that cut the data differently than before, in words; and whether the dataset is the same."""
    same = (before.dataset, before.subset) == (now.dataset, now.subset)
    return " and ".join(changed_options(before, now)) or "these options", same


def trained_on(source: Path, run: documents.Run | None) -> tuple[documents.Cut, DataOptions, int | None] | None:
    """How the data was cut when a model was fine-tuned, by `finetune` or by `prune --finetune`, and the most examples to train on.

    None if it was not.
    """
    if (source / DOCUMENT).is_file():
        record = documents.FinetuneRecord.read(source / DOCUMENT)
        return record.parts, record.data, record.options.train_limit
    metrics = runs.RunFolder(source.resolve().parent).read_metrics() if run is not None else None
    if run is not None and metrics and any(b.checkpoint == source.name and b.finetune for b in metrics.budgets):
        return run.parts, run.options.data, None
    return None
