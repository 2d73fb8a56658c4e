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
from headprune.app.workflow.results import PruneContext
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


def export_models(context: PruneContext, results: Sequence[BudgetResult]) -> tuple[ExportedModel, ...]:
    """Every pruned model in every format, beside the checkpoints. What a format cannot express is said, and loses nothing."""
    return tuple(
        _exported(context, name, result) for name in dict.fromkeys(context.config.exports) for result in results
    )


def time_exports(
    context: PruneContext, made: Sequence[ExportedModel], environment: Environment
) -> tuple[EngineLatency, ...]:
    """The models of each format against the dense one, on the inputs that the run times; of formats whose engine can be timed here."""
    found = []
    for name in dict.fromkeys(model.format for model in made):
        files = {m.name: context.content.path / m.file for m in made if m.format == name and m.file}
        if files and all(map(is_exported, files.values())):
            make = partial(_in_turn, context, name, files)
            found.append(context.store.get(f"latency {name} {environment}", make))
    return tuple(found)


def _exported(context: PruneContext, name: str, result: BudgetResult) -> ExportedModel:
    file = f"{result.checkpoint}{format_named(name).suffix}"
    stage = f"export {file}"
    make = partial(_written, context, name, result, context.content.path / file)
    made = context.store.get(stage, make)
    if made.file is not None and not (context.content.path / made.file).exists():
        context.store.forget(stage)
        made = context.store.get(stage, make)
    for line in made.notes if made.file else (made.summary, *made.notes):
        context.console.say(f"{file}: {line}")
    return made


def _loaded(context: PruneContext, result: BudgetResult) -> nn.Module:
    trusted = context.scene.options.loading.trust_remote_code
    return checkpoint.load(context.content.path / result.checkpoint, trust_remote_code=trusted)


def _written(context: PruneContext, name: str, result: BudgetResult, file: Path) -> ExportedModel:
    facts: dict[str, Any] = {"format": name, "name": result.name, "checkpoint": result.checkpoint}
    try:
        with context.console.track(f"writing {file.name}"):
            done = _export(context, _loaded(context, result), name, file)
    except HeadPruneError as error:
        return ExportedModel(**facts, file=None, proved=False, summary=str(error.args[0]))
    return ExportedModel(**facts, file=file.name, proved=done.proved, summary=done.summary, notes=tuple(done.notes))


def _in_turn(context: PruneContext, name: str, files: dict[str, Path]) -> EngineLatency:
    dense = context.content.path.parent / f"dense{format_named(name).suffix}"  # for the times alone
    with context.console.track(f"timing {name}"):
        _export(context, copy.deepcopy(context.scene.model).to("cpu"), name, dense)
        rows = [time_onnx({"dense": dense, **files}, example) for _, _, example in inputs(context.scene)]
    return EngineLatency(format=name, rows=tuple(rows))


def _export(context: PruneContext, model: nn.Module, name: str, file: Path) -> Exported:
    """A model written in float32."""
    widen(model)
    return export(model, file, name, processor=context.scene.loaded.processor, overwrite=True)
