"""What `headprune finetune` does: from a pruned folder to a fine-tuned one beside it, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import checkpoint
from headprune.app import runs
from headprune.app.data import Parts, load_parts, load_train
from headprune.app.documents import (
    Cut,
    FinetunedChanges,
    FinetunedModels,
    FinetuneFacts,
    FinetuneRecord,
    Measured,
    Run,
    Training,
    TrainingOptions,
)
from headprune.app.finetune import finetune
from headprune.app.folders import Folder, claimed, key_of
from headprune.app.models import LoadedModel, load_model, numbers_given, pruned_in, set_padding
from headprune.app.options import DataOptions, FinetuneOptions, LoadOptions
from headprune.app.precision import half_of, holds, narrow, widen
from headprune.app.report.finetuned import card, render
from headprune.app.runs import RunFolder, check_free
from headprune.app.workflow import Console
from headprune.app.workflow.checks import changed_options, seen_before
from headprune.app.workflow.cost import announce, cost_of_training
from headprune.app.workflow.saving import halved, in_full, in_half
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, compare, evaluate
from headprune.files import write_file
from headprune.fingerprint import config_hash, fingerprint, processor_hash, versions
from headprune.inputs import model_device, move
from headprune.memory import is_out_of_memory
from headprune.parallel import current
from headprune.store import Store, digest

DOCUMENT = "finetune.json"
REPORT = "finetune.md"


@dataclass(frozen=True)
class FinetuneRun:
    """What was asked for; what is None is taken from the run that pruned the model.

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
    device: str = "auto"
    dtype: str = "float32"  # what a model is stored in may be too coarse for small steps
    output: Path | None = None
    overwrite: bool = False
    resume: bool = True
    trust_remote_code: bool = False


def finetune_run(asked: FinetuneRun, console: Console) -> tuple[Path, FinetuneRecord]:
    """Train, measure on the reporting part, and write the model with ``finetune.json`` and ``finetune.md``.

    Returns:
        The folder, which appears complete or not at all, and what is in ``finetune.json``.

    Raises:
        HeadPruneError: No such folder, no dense model, data that is cut otherwise than when pruning.
    """
    source = pruned_in(asked.pruned)
    output = asked.output or source.with_name(f"{source.name}-finetuned")
    key = key_of("finetune", replace(asked, resume=True))

    def choose() -> Folder:
        folder = Folder(output)
        check_free(folder, asked.overwrite or folder.done_by(key))
        if not folder.empty and not (output / DOCUMENT).is_file():
            raise HeadPruneError(f"{output} holds something that finetune did not write.", "Choose another with -o.")
        return folder

    with claimed(choose, key, runs.command_line(), resume=asked.resume, say=console.say) as folder:
        # It may have been killed just after the end.
        _run(asked, source, folder, console, partial(folder.already_published, key, asked.overwrite))
        return output, FinetuneRecord.read(output / DOCUMENT)


def _run(asked: FinetuneRun, source: Path, folder: Folder, console: Console, did: Callable[[str], bool]) -> None:
    started = time.monotonic()
    run = _run_of(source)
    data = _data_options(asked, run)
    data.check()
    pruned, dense = _load(asked, source, run)
    metric = pruned.task.metric
    if (numbers := numbers_given(pruned)) is not None:
        raise HeadPruneError(
            f"{source} has a regression head ({numbers}), which the command line does not measure yet.",
            "Use the Python API: headprune.app.finetune.finetune.",
        )
    parts = load_parts(data, pruned)
    parts.notes.extend((*pruned.notes, *dense.notes, *_check_cut(parts, data, run, pruned)))
    train, notes = load_train(data, pruned, parts, asked.train_limit)
    half = _stored(pruned.model)
    if half is not None:
        notes.append(
            f"{source} is stored in {str(half).removeprefix('torch.')}, and so is the fine-tuned model, which is trained and measured in float32."
        )
    console.say(f"{type(pruned.model).__name__} for {pruned.task.name} on {next(pruned.model.parameters()).device}")
    for note in (*parts.notes, *notes):
        console.say(note)
    both = [(fingerprint(m.model), config_hash(m.model)) for m in (pruned, dense)]
    examples = [part.content_hash() for part in (train, parts.choose, parts.report)]
    if did(of := digest(versions(), both, processor_hash(pruned.processor), examples)):
        return
    facts = FinetuneFacts(  # before the long work, so that it is known to be writable
        command=runs.command_line(),
        when=runs.now(),
        environment=runs.environment(str(next(pruned.model.parameters()).device)),
        pruned=str(source),
        teacher=dense.source,
        task=pruned.task.name,
        metric=metric,
        options=TrainingOptions(**vars(asked.training), dtype=asked.dtype, train_limit=asked.train_limit),
        data=data,
        parts=Cut.of(parts, train),
        notes=(*parts.notes, *notes),
    )
    announce(console, lambda: cost_of_training(pruned.model, train, parts.choose, parts.report, asked.training.epochs))
    with console.track("fine-tuning") as progress:
        tuned = finetune(
            pruned.model, dense.model, train, parts.choose, asked.training, metric=metric,
            work=folder.unfinished / "training", progress=progress, say=console.say,
        )  # fmt: skip
    ranks, content = current(), folder.unfinished / "content"
    about = {"task": pruned.task.name, "from": dense.source, "finetuned": {"from": str(source)}}

    save = partial(checkpoint.save, path=content, processor=pruned.processor, overwrite=True, about=about)
    half, told = ranks.first("saving", lambda: _saved(tuned.model, half, next(parts.score.batches(2)), save))
    models = {
        "dense": dense.model,
        "pruned": pruned.model,
        "finetuned": _reloaded(content, tuned.model, half, asked.trust_remote_code),
    }
    measured = _measure(models, parts, folder.store(console.say), console)
    record = FinetuneRecord(
        **{**vars(facts), "notes": (*facts.notes, *told)},
        seconds=round(time.monotonic() - started, 1),
        training=Training(**{f.name: getattr(tuned, f.name) for f in fields(Training)}),
        models=FinetunedModels(**{name: Measured.of(m, metric) for name, m in measured.items()}),
        changes=FinetunedChanges(
            pruned=compare(measured["dense"], measured["pruned"], metric),
            finetuned=compare(measured["dense"], measured["finetuned"], metric),
            gain=compare(measured["pruned"], measured["finetuned"], metric),
        ),
    )

    def written() -> None:
        record.write(content / DOCUMENT)
        write_file(content / REPORT, render(folder.path.name, record))
        checkpoint.add_figures(content, card(record))
        folder.publish(content, ["*"], of)

    ranks.first("writing the run", written)


def _stored(model: nn.Module) -> torch.dtype | None:
    """The half precision that a model is stored in, if it is trained in float32."""
    half = half_of(model.config)
    return half if half and next(model.parameters()).dtype == torch.float32 and holds(model, half) else None


def _saved(
    model: nn.Module, half: torch.dtype | None, example: dict[str, torch.Tensor], save: Callable[..., Any]
) -> tuple[torch.dtype | None, list[str]]:
    """Save a trained model as the pruned one is stored; in which half precision that was done, and what a reader should know.

    Args:
        save: Given the model, and in half precision an example for it.
    """
    told = []
    if half is not None:
        given = in_half(move(example, model_device(model)), half)
        try:
            save(halved(model, half, given), example=given)
            return half, []
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, OSError):
                raise
            told = [in_full(half, error)]
    save(model)
    return None, told


def _run_of(source: Path) -> Run | None:
    """The run that a checkpoint lies in, if it does."""
    folder = RunFolder(source.resolve().parent)
    return folder.read_run() if folder.run_path.is_file() else None


def _data_options(asked: FinetuneRun, run: Run | None) -> DataOptions:
    given = {k: v for k, v in asked.data.items() if v is not None}
    if run is not None:
        return replace(run.options.data, **given)
    if "dataset" not in given:
        raise HeadPruneError(
            f"{asked.pruned} is in no run folder that names its data.", "Name the dataset with -d, as when pruning."
        )
    return DataOptions(**given)


def _load(asked: FinetuneRun, source: Path, run: Run | None) -> tuple[LoadedModel, LoadedModel]:
    """The pruned model and the dense one."""
    about = checkpoint.about(source)
    teacher = asked.teacher or about.get("from")
    if not isinstance(teacher, str):
        raise HeadPruneError(f"{source} does not say which model it was made from.", "Name it with --teacher.")
    # Whether code may run is never what a folder says.
    loading = LoadOptions(asked.task or about.get("task"), asked.device, asked.dtype, asked.trust_remote_code)
    if run is not None and asked.device == "auto":
        loading = replace(loading, device=run.options.loading.device)
    pruned = load_model(str(source), loading)
    try:
        named = run.options.model if run is not None and asked.teacher is None else teacher  # with its revision
        dense = load_model(named, loading, with_processor=False)
    except HeadPruneError as error:
        if asked.teacher is not None:
            raise
        raise HeadPruneError(
            f"The dense model that {source} names could not be loaded: {error.args[0]}",
            f"{error.hint} Or name it with --teacher.".strip(),
        ) from error
    if pruned.task.modality == "text" and pruned.processor is not None:
        set_padding(dense.model.config, pruned.processor.pad_token_id)
    if asked.teacher is None and run is not None:
        _check_dense(dense, run)
    return pruned, dense


def _check_dense(dense: LoadedModel, run: Run) -> None:
    """The dense model must be the one that was pruned: it teaches, and the others are compared with it.

    Raises:
        HeadPruneError: Its weights have changed, as far as this can be known.
    """
    dtype = str(next(dense.model.parameters()).dtype).removeprefix("torch.")
    if (dense.source, dtype) != (run.options.model, run.model.dtype):
        return
    for what in run.model.other_now(run.environment, config_hash(dense.model)):
        raise HeadPruneError(
            f"The {what} of {dense.source} has changed since the model was pruned.",
            "Restore it, or name the dense model with --teacher.",
        )
    if (now := fingerprint(dense.model)) != run.model.fingerprint:
        raise HeadPruneError(
            f"{dense.source} is not the model that was pruned (fingerprint {run.model.fingerprint}): its weights have changed "
            f"({now}).",
            "Restore it, or name the dense model with --teacher.",
        )


def _check_cut(parts: Parts, data: DataOptions, run: Run | None, pruned: LoadedModel) -> list[str]:
    """What scored and chose the heads must not be reported here; a note where that cannot be known.

    Raises:
        HeadPruneError: Some of it would be, or the data has changed.
    """
    _check_trained(parts, data, run, Path(pruned.source))
    if run is None or run.parts.same(Cut.of(parts)):
        return []
    before = run.options.data
    changed = changed_options(before, data)
    same_data = (before.dataset, before.subset) == (data.dataset, data.subset)
    try:
        then = load_parts(before, pruned)
    except HeadPruneError as error:
        if same_data:
            raise
        then, why = None, error.args[0]
    if then is None or not run.parts.same(Cut.of(then)):
        if same_data:
            raise HeadPruneError(
                f"{data.dataset} has changed since the model was pruned, so examples that were used to choose its heads could be "
                "reported.",
                "Restore the data, or name other data with -d.",
            )
        why = f"{before.dataset} has changed" if then else why
        return [f"Whether reported examples were used to score or choose the heads is not known: {why.rstrip('.')}."]
    if again := seen_before(parts, then, same_data):
        flags = " and ".join(changed) or "these options"
        raise HeadPruneError(
            f"With {flags}, {again:,} of the {len(parts.report):,} examples to report were used to score or choose the heads when the "
            "model was pruned.",
            f"Leave out {flags}, or name other data with -d.",
        )
    return []


def _check_trained(parts: Parts, data: DataOptions, run: Run | None, source: Path) -> None:
    """Of a model that was fine-tuned before, only what was reported then is surely unseen: it must be cut alike.

    Raises:
        HeadPruneError: It is cut otherwise.
    """
    if (source / DOCUMENT).is_file():
        record = FinetuneRecord.read(source / DOCUMENT)
        then, before = record.parts, record.data
    elif run is not None and (metrics := RunFolder(source.resolve().parent).read_metrics()) is not None:
        if not any(b.checkpoint == source.name and b.finetune for b in metrics.budgets):
            return
        then, before = run.parts, run.options.data
    else:
        return
    if then.same(Cut.of(parts)) or (before.dataset, before.subset) != (data.dataset, data.subset):
        return
    flags = " and ".join(changed_options(before, data)) or "these options"
    raise HeadPruneError(
        f"{source} was fine-tuned before; with {flags} the data is cut differently than it was then, and examples that it was trained "
        "on could be reported.",
        f"Leave out {flags}, or use the same values as then.",
    )


def _reloaded(path: Path, tuned: nn.Module, half: torch.dtype | None, trusted: bool) -> nn.Module:
    """What is reported is what a user will load; from half precision it is widened, as the other models are, and ``tuned`` is rounded to it."""
    model = checkpoint.load(path, device=model_device(tuned), trust_remote_code=trusted)
    if half is not None:
        narrow(tuned, half)
        widen(tuned)
        widen(model)
    if fingerprint(model) != fingerprint(tuned):
        raise HeadPruneError("The saved model is not the trained one after loading.", "Please report this.")
    return model


_SHOWN = {"finetuned": "fine-tuned"}


def _measure(models: dict[str, nn.Module], parts: Parts, root: Store, console: Console) -> dict[str, Measurement]:
    found = {}
    store = root.keyed("measured", versions(), list(parts.report.batches()), *models.values())
    for name, model in models.items():
        with console.track(f"measuring the {_SHOWN.get(name, name)} model") as progress:
            found[name] = store.get(name, partial(evaluate, model, parts.report.batches(), progress=progress))
    return found
