"""Latencies of the dense and every pruned model over shapes of input, where the time goes, and the same in other engines."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from headprune import checkpoint, latency
from headprune.app.documents import (
    DISTURBED,
    BudgetResult,
    EngineLatency,
    Environment,
    ExportedModel,
    Latencies,
    TimeParts,
)
from headprune.app.sources import widen
from headprune.app.workflow.results import PruneContext
from headprune.app.workflow.scene import Console, Scene, inputs
from headprune.attention import AttentionLayer, Heads
from headprune.decoding import GenerationRow, benchmark_generation
from headprune.errors import HeadPruneError
from headprune.exporting import Exported, export, format_named, is_exported, time_onnx
from headprune.inputs import writes
from headprune.latency import LatencyRow
from headprune.offload import copied
from headprune.surgery import prune
from headprune.timing import breakdown

NO_HEADS = "no heads"
"""The name of the model without prunable heads."""

Shapes = Sequence[tuple[int, int, Any]]
"""Inputs as (batch, tokens, example)."""

_TRIES = 3
_BOUND_LIMIT = 2_000_000_000  # parameters; above this a third copy of the model is too much to ask


def time_models(scene: Scene, models: dict[str, nn.Module], console: Console) -> Latencies:
    """Latencies of the dense and every pruned model, with the bound: the model without (nearly) all heads."""
    bound, ghosts = None, 0
    if latency.parameters(scene.model) < _BOUND_LIMIT:
        empty = copied(scene.model)
        try:
            ghosts = len(prune(empty, _everything(scene.layers), scene.example, layers=scene.layers).ghosts)
            bound = NO_HEADS
            models = {**models, bound: empty}
        except HeadPruneError as error:
            console.say(f"The bound could not be timed: {error.args[0]}")
    with console.track("timing") as progress:
        rows = latency.bench(models, inputs(scene), progress=progress)
    typical = latency.example_shape(scene.typical_input())[1]
    return Latencies(rows=tuple(rows), bound=bound, bound_ghosts=ghosts, typical_length=typical)


def time_parts(
    model: nn.Module, layers: Sequence[AttentionLayer], shapes: Shapes, plans: Mapping[str, Heads],
    timed: Sequence[LatencyRow], console: Console,
) -> tuple[TimeParts, ...]:  # fmt: skip
    """What the dense model's passes spend their time on, with the most that each plan can gain of it.

    Args:
        plans: The heads that go, by the name of the pruned model; that of the model without heads is added.
        timed: What passes took when the models were timed in turn, the dense model first. Passes that take much longer or shorter
            are measured again, up to `_TRIES` times: on a busy machine a few passes say little. The nearest are kept.
    """
    plans, rows = {**plans, NO_HEADS: _everything(layers)}, []
    with console.track("where the time goes") as progress:
        for i, (batch, length, example) in enumerate(shapes):
            tries: list[TimeParts] = []
            while len(tries) < _TRIES and (not tries or tries[-1].factor_from(timed) > DISTURBED):
                parts = breakdown(model, example, layers=layers)
                bounds = {name: parts.bound(drop) for name, drop in plans.items()}
                measured = {name: getattr(parts, name) for name in ("total", "parts", "stand_ins")}
                tries.append(TimeParts(batch=batch, length=length, bounds=bounds, **measured))
            rows.append(min(tries, key=lambda row: row.factor_from(timed)))
            progress(i + 1, len(shapes))
    return tuple(rows)


def time_generation(models: Mapping[str, nn.Module], prompts: Shapes, console: Console) -> tuple[GenerationRow, ...]:
    """How fast the dense and the pruned models write; () where they do not."""
    rows: list[GenerationRow] = []
    if not writes(next(iter(models.values()))):
        return ()
    with console.track("writing tokens") as progress:
        for i, (_, _, example) in enumerate(prompts):
            row = benchmark_generation(models, example)
            if row is None:
                return ()
            rows.append(row)
            progress(i + 1, len(prompts))
    return tuple(rows)


def _everything(layers: Sequence[AttentionLayer]) -> Heads:
    """Every head that can go."""
    return {layer.name: list(range(layer.num_heads)) for layer in layers if layer.prunable}


def export_models(context: PruneContext, results: Sequence[BudgetResult]) -> tuple[ExportedModel, ...]:
    """Every pruned model in every format, beside the checkpoints. What a format cannot express is said, and loses nothing."""
    models, store = [], context.store
    for name in dict.fromkeys(context.config.exports):
        for result in results:
            file = context.content.path / f"{result.checkpoint}{format_named(name).suffix}"
            if not file.exists():  # a publication took it
                store.forget(f"export {file.name}")
            model = store.get(f"export {file.name}", partial(_export_result, context, name, result, file))
            for line in model.notes if model.file else (model.summary, *model.notes):
                context.console.say(f"{file.name}: {line}")
            models.append(model)
    return tuple(models)


def time_exports(
    context: PruneContext, models: Sequence[ExportedModel], environment: Environment
) -> tuple[EngineLatency, ...]:
    """The models of each format against the dense one, on the inputs that the run times; of formats whose engine can be timed here."""
    rows = []
    for name in dict.fromkeys(model.format for model in models):
        files = {m.name: context.content.path / m.file for m in models if m.format == name and m.file}
        if files and all(map(is_exported, files.values())):
            make = partial(_time_format, context, name, files)
            rows.append(context.store.get(f"latency {name} {environment}", make))
    return tuple(rows)


def _export_result(context: PruneContext, name: str, result: BudgetResult, file: Path) -> ExportedModel:
    facts: dict[str, Any] = {"format": name, "name": result.name, "checkpoint": result.checkpoint}
    trusted = context.scene.options.loading.trust_remote_code
    try:
        with context.console.track(f"writing {file.name}"):
            model = checkpoint.load(context.content.path / result.checkpoint, trust_remote_code=trusted)
            done = _export(context, model, name, file)
    except HeadPruneError as error:
        return ExportedModel(**facts, file=None, proved=False, summary=str(error.args[0]))
    return ExportedModel(**facts, file=file.name, proved=done.proved, summary=done.summary, notes=tuple(done.notes))


def _time_format(context: PruneContext, name: str, files: dict[str, Path]) -> EngineLatency:
    """Times of files of one format in its engine, beside the dense model's, which is exported for this alone."""
    dense = context.content.path.parent / f"dense{format_named(name).suffix}"
    with context.console.track(f"timing {name}"):
        _export(context, copy.deepcopy(context.scene.model).to("cpu"), name, dense)
        rows = [time_onnx({"dense": dense, **files}, example) for _, _, example in inputs(context.scene)]
    return EngineLatency(format=name, rows=tuple(rows))


def _export(context: PruneContext, model: nn.Module, name: str, file: Path) -> Exported:
    """A model written in float32."""
    widen(model)
    return export(model, file, name, processor=context.scene.loaded.processor, overwrite=True)
