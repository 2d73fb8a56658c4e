"""Pruned models written for other engines, where that is asked for, and timed there."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from headprune import checkpoint
from headprune.app.documents import BudgetResult, EngineLatency, Environment, ExportedModel
from headprune.app.precision import widen
from headprune.app.workflow.results import Job
from headprune.app.workflow.timing import inputs
from headprune.errors import HeadPruneError
from headprune.exporting import Exported, export, format_named, is_exported, time_onnx


def check(formats: Sequence[str]) -> None:
    """Refuse, before the long work, formats that are not there.

    Raises:
        HeadPruneError: An unknown format, or one whose packages are not installed.
    """
    for name in formats:
        format_named(name)


def exported(job: Job, formats: Sequence[str], results: Sequence[BudgetResult]) -> tuple[ExportedModel, ...]:
    """Every pruned model in every format, beside the checkpoints. What a format cannot express is said, and loses nothing."""
    return tuple(_exported(job, name, result) for name in dict.fromkeys(formats) for result in results)


def timed(job: Job, made: Sequence[ExportedModel], environment: Environment) -> tuple[EngineLatency, ...]:
    """The models of each format against the dense one, on the inputs that the run times; of formats whose engine can be timed here."""
    found = []
    for name in dict.fromkeys(model.format for model in made):
        files = {m.name: job.content.path / m.file for m in made if m.format == name and m.file}
        if files and all(map(is_exported, files.values())):
            make = partial(_in_turn, job, name, files)
            found.append(job.stages.get(f"latency {name} {environment}", make, EngineLatency.model_validate))
    return tuple(found)


def _exported(job: Job, name: str, result: BudgetResult) -> ExportedModel:
    file = f"{result.checkpoint}{format_named(name).suffix}"
    stage = f"export {file}"
    make = partial(_written, job, name, result, job.content.path / file)
    made = job.stages.get(stage, make, ExportedModel.model_validate)
    if made.file is not None and not (job.content.path / made.file).exists():
        job.stages.forget(stage)
        made = job.stages.get(stage, make, ExportedModel.model_validate)
    for line in made.notes if made.file else (made.summary, *made.notes):
        job.console.say(f"{file}: {line}")
    return made


def _loaded(job: Job, result: BudgetResult) -> nn.Module:
    trusted = job.scene.options.trust_remote_code
    return checkpoint.load(job.content.path / result.checkpoint, trust_remote_code=trusted)


def _written(job: Job, name: str, result: BudgetResult, file: Path) -> dict[str, Any]:
    facts = {"format": name, "name": result.name, "checkpoint": result.checkpoint}
    try:
        with job.console.track(f"writing {file.name}"):
            done = _export(job, _loaded(job, result), name, file)
    except HeadPruneError as error:
        return {**facts, "file": None, "proved": False, "summary": str(error.args[0])}
    return {**facts, "file": file.name, "proved": done.proved, "summary": done.summary, "notes": list(done.notes)}


def _in_turn(job: Job, name: str, files: dict[str, Path]) -> dict[str, Any]:
    dense = job.stages.path / f"dense{format_named(name).suffix}"  # for the times alone
    with job.console.track(f"timing {name}"):
        _export(job, copy.deepcopy(job.scene.model).to("cpu"), name, dense)
        rows = [time_onnx({"dense": dense, **files}, example) for _, _, example in inputs(job.scene)]
    return EngineLatency(format=name, rows=tuple(rows)).to_json()


def _export(job: Job, model: nn.Module, name: str, file: Path) -> Exported:
    """A model written in float32."""
    widen(model)
    return export(model, file, name, processor=job.scene.loaded.processor, overwrite=True)
