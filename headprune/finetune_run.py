"""What `headprune finetune` does: from a pruned folder to a fine-tuned one beside it, measured."""

from __future__ import annotations

import datetime
import re
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from headprune import checkpoint, runs
from headprune.data import DataOptions, Parts, load_parts, load_train
from headprune.errors import HeadPruneError
from headprune.evaluation import Measurement, compare, evaluate, interval
from headprune.finetune import Finetuned, FinetuneOptions, finetune
from headprune.fingerprint import fingerprint
from headprune.jsonio import write_json, write_text
from headprune.models import LoadedModel, load_model
from headprune.report.finetuned import render
from headprune.runs import RunFolder
from headprune.workflow import Console, Options

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
    device: str | None = None
    dtype: str = "float32"  # what a model is stored in may be too coarse for small steps
    output: Path | None = None
    overwrite: bool = False
    resume: bool = True
    trust_remote_code: bool = False


def finetune_run(asked: FinetuneRun, console: Console) -> tuple[Path, dict[str, Any]]:
    """Train, measure on the reporting part, and write the model with ``finetune.json`` and ``finetune.md``.

    Returns:
        The folder, which appears complete or not at all, and what is in ``finetune.json``.

    Raises:
        HeadPruneError: No such folder, no dense model, data that is cut otherwise than when pruning.
    """
    started = time.monotonic()
    source = _checkpoint(asked.pruned)
    output = asked.output or source.with_name(f"{source.name}-finetuned")
    _check_free(output, asked.overwrite)
    work = output.with_name(f".{output.name}.unfinished")
    if not asked.resume:
        shutil.rmtree(work, ignore_errors=True)
    run = _run_of(source)
    data = _data_options(asked, run)
    pruned, dense = _load(asked, source, run)
    metric = pruned.task.metric
    if getattr(pruned.config, "num_labels", 2) == 1 and metric == "accuracy":
        raise HeadPruneError(
            f"{source} has a regression head (one label), which the command line does not measure yet.",
            "Use the Python API: headprune.finetune.finetune.",
        )
    parts = load_parts(data, pruned)
    _check_cut(parts, data, run)
    train, notes = load_train(data, pruned, parts, asked.train_limit)
    console.say(f"{type(pruned.model).__name__} for {pruned.task.name} on {next(pruned.model.parameters()).device}")
    for note in (*parts.notes, *notes):
        console.say(note)
    with console.track("fine-tuning") as progress:
        tuned = finetune(
            pruned.model, dense.model, train, parts.choose, asked.training, metric=metric, work=work,
            progress=progress, say=console.say,
        )  # fmt: skip

    staging = work / "staging"
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed while it wrote
    try:
        about = {"task": pruned.task.name, "from": dense.source, "finetuned": {"from": str(source)}}
        checkpoint.save(tuned.model, staging, processor=pruned.processor, about=about)
        measured = _measure(
            {"dense": dense.model, "pruned": pruned.model, "finetuned": _reloaded(staging, tuned)}, parts, console
        )
        document = {
            "command": runs.command_line(),
            "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - started, 1),
            "environment": runs.environment(str(next(pruned.model.parameters()).device)),
            "pruned": str(source),
            "teacher": dense.source,
            "task": pruned.task.name,
            "metric": metric,
            "options": {**asdict(asked.training), "dtype": asked.dtype, "train_limit": asked.train_limit},
            "data": asdict(data),
            "parts": {**parts.about(), "train": train.about()},
            "notes": [*parts.notes, *notes],
            "training": tuned.to_json(),
            **_figures(measured, metric, asked.training.seed),
        }
        write_json(staging / DOCUMENT, "finetune", document)
        write_text(staging / REPORT, render(output.name, document))
        checkpoint.swap_in(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    return output, document


def _checkpoint(path: Path) -> Path:
    """The folder itself, or the one that a run folder holds."""
    if checkpoint.is_checkpoint(path):
        return path
    if not path.is_dir():
        raise HeadPruneError(f"There is no folder {path}.", "Pass a folder that `headprune prune` saved.")
    found = [
        p for p in sorted(path.glob("pruned-*")) if re.fullmatch(r"pruned-\d+", p.name) and checkpoint.is_checkpoint(p)
    ]
    if len(found) != 1:
        held = f"{len(found)} pruned models ({', '.join(p.name for p in found)})" if found else "no pruned model"
        hint = f"Name one, such as {found[0]}." if found else "Pass a folder that `headprune prune` saved."
        raise HeadPruneError(f"{path} holds {held}.", hint)
    return found[0]


def _check_free(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise HeadPruneError(f"{output} is a file.", "Choose a folder with -o.")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise HeadPruneError(
                f"The folder {output} exists and is not empty.", "Choose another with -o, or add --overwrite."
            )
        if not (output / DOCUMENT).is_file():
            raise HeadPruneError(f"{output} holds something that finetune did not write.", "Choose another with -o.")


def _run_of(source: Path) -> dict[str, Any] | None:
    """The run that a checkpoint lies in, if it does."""
    folder = RunFolder(source.resolve().parent)
    return folder.read_run() if (folder.path / "run.json").is_file() else None


def _data_options(asked: FinetuneRun, run: dict[str, Any] | None) -> DataOptions:
    given = {k: v for k, v in asked.data.items() if v is not None}
    if run is not None:
        return replace(Options.from_json(run["options"]).data, **given)
    if "dataset" not in given:
        raise HeadPruneError(
            f"{asked.pruned} lies in no run folder that says its data.", "Name the dataset with -d, as when pruning."
        )
    return DataOptions(**given)


def _load(asked: FinetuneRun, source: Path, run: dict[str, Any] | None) -> tuple[LoadedModel, LoadedModel]:
    """The pruned model and the dense one."""
    about = checkpoint.about(source)
    options = Options.from_json(run["options"]) if run is not None else Options("", DataOptions(""))
    teacher = asked.teacher or about.get("from")
    if teacher is None:
        raise HeadPruneError(f"{source} does not say which model it was made from.", "Name it with --teacher.")
    common: dict[str, Any] = {
        "task": asked.task or about.get("task"), "device": asked.device or options.device, "dtype": asked.dtype,
        "trust_remote_code": asked.trust_remote_code or options.trust_remote_code,
    }  # fmt: skip
    pruned = load_model(str(source), **common)
    try:
        revision = options.revision if asked.teacher is None else None
        dense = load_model(teacher, **common, revision=revision, with_processor=False)
    except HeadPruneError as error:
        if asked.teacher is not None:
            raise
        raise HeadPruneError(
            f"The dense model that {source} names is not to be had: {error.args[0]}", "Name it with --teacher."
        ) from error
    return pruned, dense


def _check_cut(parts: Parts, data: DataOptions, run: dict[str, Any] | None) -> None:
    """What scored and chose the heads must not be reported here."""
    if run is None or run["parts"] == parts.about():
        return
    before = Options.from_json(run["options"]).data
    if data.dataset == before.dataset and data.subset == before.subset:
        raise HeadPruneError(
            "The data is not cut as it was when the model was pruned, so examples that chose its heads could be reported.",
            "Use the same data options and seed.",
        )


def _reloaded(path: Path, tuned: Finetuned) -> nn.Module:
    """What is reported is what a user will load."""
    device = next(tuned.model.parameters()).device
    model = checkpoint.load(path, device=device)
    if fingerprint(model) != fingerprint(tuned.model):
        raise HeadPruneError("The saved model is not the trained one after loading.", "Please report this.")
    return model


def _measure(models: dict[str, nn.Module], parts: Parts, console: Console) -> dict[str, Measurement]:
    found = {}
    for name, model in models.items():
        with console.track(f"measuring the {name} model") as progress:
            found[name] = evaluate(model, parts.report.batches(), progress)
    return found


def _figures(measured: dict[str, Measurement], metric: str, seed: int) -> dict[str, Any]:
    """Metrics of the three models, and the paired changes between them."""
    models = {}
    for name, m in measured.items():
        low, high = interval(m, metric)
        models[name] = {"metrics": m.metrics, "low": low, "high": high, "examples": len(m)}
    pairs = {"pruned": ("dense", "pruned"), "finetuned": ("dense", "finetuned"), "gain": ("pruned", "finetuned")}
    changes = {}
    for name, (before, after) in pairs.items():
        change = asdict(compare(measured[before], measured[after], metric, seed))
        changes[name] = {k: (None if v != v else v) for k, v in change.items() if k != "details"}
    return {"models": models, "changes": changes}
