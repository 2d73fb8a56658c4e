"""What `headprune finetune` does: from a pruned folder to a fine-tuned one beside it, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from headprune import checkpoint
from headprune.app import runs
from headprune.app.data import DataOptions, load_parts, load_train
from headprune.app.documents import (
    Cut,
    FinetunedChanges,
    FinetunedModels,
    FinetuneRecord,
    Measured,
    Run,
    TrainingOptions,
)
from headprune.app.folders import Folder, claimed, key_of
from headprune.app.models import LoadedModel, load_model, pruned_in, set_padding
from headprune.app.options import FinetuneOptions, Options
from headprune.app.precision import half_of, holds
from headprune.app.report.finetuned import card, render
from headprune.app.runs import RunFolder, check_free
from headprune.app.workflow import Console, Scene, open_scene, saving
from headprune.app.workflow.checks import changed_options, seen_before
from headprune.app.workflow.cost import announce, cost_of_training
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, compare, evaluate
from headprune.fingerprint import config_hash, fingerprint
from headprune.jsonio import write_text
from headprune.ranks import current

DOCUMENT = "finetune.json"
REPORT = "finetune.md"
_EXACT = 1e-5  # relative: how much the saved model's answers may differ from the trained one's


@dataclass(frozen=True)
class FinetuneRun:
    """What `finetune_run` is to do; what is None is taken from the run that pruned the model.

    Attributes:
        pruned: A folder that headprune saved, or a run folder with one such.
        teacher: The dense model; by default what the pruned one was made from.
        data: Data options that were given, by their names in `DataOptions`.
        output: Where to write; by default ``<pruned>-finetuned``.
        train_limit: Examples to train on, at most.
    """

    pruned: Path
    teacher: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    train_limit: int | None = None
    training: FinetuneOptions = field(default_factory=FinetuneOptions)
    task: str | None = None
    device: str | None = None
    dtype: str = "float32"  # what a model is stored in may be too coarse for small steps
    output: Path | None = None
    overwrite: bool = False
    resume: bool = True
    trust_remote_code: bool = False


def finetune_run(config: FinetuneRun, console: Console) -> tuple[Path, FinetuneRecord]:
    """Train, measure on the reporting part, and write the model with ``finetune.json`` and ``finetune.md``.

    Returns:
        The folder, which appears complete or not at all, and what is in ``finetune.json``.

    Raises:
        HeadPruneError: No such folder, no dense model, data that is cut otherwise than when pruning.
    """
    source = pruned_in(config.pruned)
    output = config.output or source.with_name(f"{source.name}-finetuned")
    key = key_of("finetune", replace(config, resume=True))

    def choose() -> Folder:
        folder = Folder(output)
        check_free(folder, config.overwrite or folder.done_by(key))  # it may have been killed just after the end
        if not folder.empty and not (output / DOCUMENT).is_file():
            raise HeadPruneError(f"{output} holds something that finetune did not write.", "Choose another with -o.")
        return folder

    with claimed(choose, key, runs.command_line(), resume=config.resume, say=console.say) as folder:
        _run(config, source, folder, console)
        return output, FinetuneRecord.read(output / DOCUMENT)


def _run(config: FinetuneRun, source: Path, folder: Folder, console: Console) -> None:
    from headprune.app.finetune import finetune  # imports Trainer, which takes seconds

    began, run = time.monotonic(), _run_of(source)
    scene = _open(config, source, run, console)
    parts, metric, half = scene.parts, scene.metric, scene.loaded.stored
    dense = _load_dense(config, source, run, scene.loaded)
    notes = [*dense.notes, *_check_unseen(scene, source, run)]
    train, train_notes = load_train(scene.options.data, scene.loaded, parts, config.train_limit)
    notes.extend(train_notes)
    if half is not None:
        name = str(half).removeprefix("torch.")
        notes.append(
            f"{source} is stored in {name}, and so is the fine-tuned model, which is trained and measured in float32."
        )
    for note in notes:
        console.say(note)
    announce(console, lambda: cost_of_training(scene.model, train, parts.choose, parts.report, config.training.epochs))
    with console.track("fine-tuning") as progress:
        tuned, training = finetune(
            scene.model, dense.model, train, parts.choose, config.training, folder.unfinished / "training", metric=metric,
            progress=progress, say=console.say,
        )  # fmt: skip
    content = folder.unfinished / "content"
    about = {"from": dense.source, "finetuned": {"from": str(source)}}
    saved = current().first("saving", lambda: saving.save(scene, tuned, content, _EXACT, about))
    models = {"dense": dense.model, "pruned": scene.model, "fine-tuned": saving.load(scene, content)}
    measured = {name: _measure(model, name, scene, console) for name, model in models.items()}
    dense_, pruned, finetuned = measured.values()
    record = FinetuneRecord(
        command=runs.command_line(),
        when=runs.now(),
        environment=runs.environment(str(next(scene.model.parameters()).device)),
        pruned=str(source),
        teacher=dense.source,
        task=scene.loaded.task.name,
        metric=metric,
        options=TrainingOptions(**vars(config.training), dtype=config.dtype, train_limit=config.train_limit),
        data=scene.options.data,
        parts=Cut.of(parts, train),
        notes=(*parts.notes, *notes, *filter(None, [saved.note])),
        seconds=round(time.monotonic() - began, 1),
        training=training,
        models=FinetunedModels(
            dense=Measured.of(dense_, metric),
            pruned=Measured.of(pruned, metric),
            finetuned=Measured.of(finetuned, metric),
        ),
        changes=FinetunedChanges(
            pruned=compare(dense_, pruned, metric),
            finetuned=compare(dense_, finetuned, metric),
            gain=compare(pruned, finetuned, metric),
        ),
    )

    def write() -> None:
        record.write(content / DOCUMENT)
        write_text(content / REPORT, render(folder.path.name, record))
        checkpoint.add_figures(content, card(record))
        folder.publish(content, ["*"])

    current().first("writing the run", write)


def _measure(model: nn.Module, name: str, scene: Scene, console: Console) -> Measurement:
    with console.track(f"measuring the {name} model") as progress:
        return evaluate(model, scene.parts.report.batches(), progress=progress)


def _run_of(source: Path) -> Run | None:
    """The run that a checkpoint lies in, if it does."""
    folder = RunFolder(source.resolve().parent)
    return folder.read_run() if folder.run_path.is_file() else None


def _open(config: FinetuneRun, source: Path, run: Run | None, console: Console) -> Scene:
    """The pruned model and its data; in half precision if it is stored so, though it is trained in float32."""
    given = {k: v for k, v in config.data.items() if v is not None}
    if run is None and "dataset" not in given:
        raise HeadPruneError(
            f"{source} is in no run folder that names its data.", "Name the dataset with -d, as when pruning."
        )
    data = DataOptions(**given) if run is None else replace(run.options.data, **given)
    options = Options(
        str(source), data, task=config.task or checkpoint.about(source).get("task"), dtype=config.dtype,
        device=config.device or (run.options.device if run else "auto"),
        trust_remote_code=config.trust_remote_code,  # never what a folder says
    )  # fmt: skip
    scene = open_scene(options, console)
    model, half = scene.model, half_of(scene.loaded.config)
    widened = half is not None and next(model.parameters()).dtype.itemsize == 4 and holds(model, half)
    return replace(scene, loaded=replace(scene.loaded, stored=half if widened else None))


def _load_dense(config: FinetuneRun, source: Path, run: Run | None, pruned: LoadedModel) -> LoadedModel:
    """The model before pruning, which teaches, and which the others are compared with.

    Raises:
        HeadPruneError: It is not known, does not load, or has changed since the model was pruned.
    """
    teacher = config.teacher or checkpoint.about(source).get("from")
    if not isinstance(teacher, str):
        raise HeadPruneError(f"{source} does not say which model it was made from.", "Name it with --teacher.")
    named = config.teacher is not None
    try:
        dense = load_model(
            teacher, task=pruned.task.name, device=config.device or (run.options.device if run else "auto"), dtype=config.dtype,
            revision=run.options.revision if run and not named else None, trust_remote_code=config.trust_remote_code,
            with_processor=False,
        )  # fmt: skip
    except HeadPruneError as error:
        if named:
            raise
        raise HeadPruneError(
            f"The dense model that {source} names could not be loaded: {error.args[0]}",
            f"{error.hint} Or name it with --teacher.".strip(),
        ) from error
    if pruned.task.modality == "text":
        set_padding(dense.config, pruned.processor.pad_token_id)
    dtype = str(next(dense.model.parameters()).dtype).removeprefix("torch.")
    if named or run is None or (dense.source, dtype) != (run.options.model, run.model.dtype):
        return dense
    changed = run.model.other_now(run.environment, config_hash(dense.model))
    if fingerprint(dense.model) != run.model.fingerprint:
        changed.append("weights")
    if changed:
        raise HeadPruneError(
            f"The {' and '.join(changed)} of {dense.source} changed since the model was pruned.",
            "Restore it, or name the dense model with --teacher.",
        )
    return dense


def _check_unseen(scene: Scene, source: Path, run: Run | None) -> list[str]:
    """Refuse to report examples that scored or chose the heads, or that the model was trained on; a note where that is not known.

    Raises:
        HeadPruneError: Some of them would be, or the data has changed.
    """
    now, data = Cut.of(scene.parts), scene.options.data
    trained_on = _trained_on(source, run)
    if trained_on is not None and not trained_on[0].same(now) and _same_data(trained_on[1], data):
        flags = " and ".join(changed_options(trained_on[1], data)) or "these options"
        raise HeadPruneError(
            f"{source} was fine-tuned before; with {flags} the data is cut differently than it was then, and examples that it was "
            "trained on could be reported.",
            f"Leave out {flags}, or use the same values as then.",
        )
    if run is None or run.parts.same(now):
        return []
    before = run.options.data
    try:
        then = load_parts(before, scene.loaded)
        changed = "" if run.parts.same(Cut.of(then)) else f"{before.dataset} has changed"
    except HeadPruneError as error:
        changed = str(error.args[0]).rstrip(".")
    if changed and _same_data(before, data):
        raise HeadPruneError(
            f"{changed} since the model was pruned, so examples that were used to choose its heads could be reported.",
            "Restore the data, or name other data with -d.",
        )
    if changed:
        return [f"Whether reported examples were used to score or choose the heads is not known: {changed}."]
    if seen := seen_before(scene.parts, then, _same_data(before, data)):
        flags = " and ".join(changed_options(before, data)) or "these options"
        raise HeadPruneError(
            f"With {flags}, {seen:,} of the {len(scene.parts.report):,} examples to report were used to score or choose the heads when "
            "the model was pruned.",
            f"Leave out {flags}, or name other data with -d.",
        )
    return []


def _same_data(a: DataOptions, b: DataOptions) -> bool:
    return (a.dataset, a.subset) == (b.dataset, b.subset)


def _trained_on(source: Path, run: Run | None) -> tuple[Cut, DataOptions] | None:
    """How the data was cut when a model was fine-tuned, by `finetune` or by `prune --finetune`; None if it was not."""
    if (source / DOCUMENT).is_file():
        record = FinetuneRecord.read(source / DOCUMENT)
        return record.parts, record.data
    metrics = RunFolder(source.resolve().parent).read_metrics() if run is not None else None
    if run is not None and metrics and any(b.checkpoint == source.name and b.finetune for b in metrics.budgets):
        return run.parts, run.options.data
    return None
