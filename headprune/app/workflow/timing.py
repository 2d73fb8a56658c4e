"""Latencies of the dense and every pruned model over shapes of input, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headprune import latency
from headprune.app.documents import DISTURBED, Latencies, TimeParts
from headprune.app.workflow.scene import Console, Scene
from headprune.attention import AttentionLayer, Heads
from headprune.decoding import GenerationRow, benchmark_generation
from headprune.errors import HeadPruneError
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
                tries.append(
                    TimeParts(
                        batch=batch,
                        length=length,
                        bounds=bounds,
                        total=parts.total,
                        parts=parts.parts,
                        stand_ins=parts.stand_ins,
                    )
                )
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


def inputs(scene: Scene) -> list[tuple[int, int, dict[str, Any]]]:
    """What is timed, as (batch, tokens, example); the largest is the last."""
    examples = [(batch, _shaped(scene, batch, length)) for batch, length in _shapes(scene)]
    return [(batch, latency.example_shape(example)[1], example) for batch, example in examples]


def _everything(layers: Sequence[AttentionLayer]) -> Heads:
    """Every head that can go."""
    return {layer.name: list(range(layer.num_heads)) for layer in layers if layer.prunable}


def budget_input(scene: Scene) -> dict[str, Any]:
    """What a latency budget is about: a batch of the run's size, of median length."""
    return _shaped(scene, scene.options.data.batch_size, _shapes(scene)[0][1])


def _shapes(scene: Scene) -> list[tuple[int, int | None]]:
    """Batch 1 and the run's batch size; for texts at the median length and at four times that, as far as the model reads."""
    sizes = sorted({1, scene.options.data.batch_size})
    lengths: list[int | None] = [None]
    if scene.loaded.task.modality == "text" and scene.loaded.task.name != "seq2seq":
        typical = latency.example_shape(scene.typical_input())[1]
        limit = getattr(scene.model.config, "max_position_embeddings", None) or 10**6
        longer = min(4 * typical, limit - 2)  # RoBERTa's positions begin at 2
        lengths = [typical, longer] if longer > typical else [typical]
    return [(size, length) for length in lengths for size in sizes]


def _shaped(scene: Scene, batch: int, length: int | None) -> dict[str, Any]:
    if length is None:
        return scene.typical_input(batch)
    return latency.shaped(scene.parts.report.typical(min(batch, len(scene.parts.report))), batch, length)
