"""Head importance: one signature, one file a family of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.inputs import model_device, move
from headprune.loss import ExampleLoss, batch_size, inputs_of
from headprune.modules import exact_attention
from headprune.scoring import ablation, gradient, learned, path, random, shapley
from headprune.scoring.agreement import agreement
from headprune.scoring.base import METHODS, HeadScores, Method, Problem, Progress, Settings, load_scores, method, save_scores
from headprune.trace import evaluating, find_attention

__all__ = [
    "METHODS", "HeadScores", "Method", "Problem", "Settings", "ablation", "agreement", "gradient",
    "learned", "load_scores", "method", "path", "random", "save_scores", "score", "shapley",
]  # fmt: skip


def score(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "gradient",
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    layers: Sequence[AttentionLayer] | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Score the importance of every maskable head.

    Args:
        model: Any model with attention; its mode and weights are left as they were.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``.
        method: ``"gradient"``, ``"ablation"``, ``"random"``, or one registered with `headprune.scoring.method`.
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts
            with labels: the loss is then the model's own, per example.
        layers: From `headprune.find_attention`, to save the trace.
        seed: For methods that draw.
        settings: How long, how much memory, and what single methods may be told.
        progress: Called with (steps done, steps in all, note).

    Returns:
        `HeadScores`: values and standard errors per layer, in float64. They do not depend on the batch
        size or on padding.

    Raises:
        HeadPruneError: An unknown method, no examples, labels missing, or a loss that is not finite.
    """
    if method not in METHODS:
        raise HeadPruneError(f"There is no scoring method {method!r}.", f"Choose from {', '.join(METHODS)}.")
    chosen = METHODS[method]
    device = model_device(model)
    kept = [move(batch, device) for batch in batches]
    if not kept:
        raise HeadPruneError("There are no examples to score on.", "Check the dataset, its split and --limit.")
    losses = ExampleLoss(model, loss_fn)
    with evaluating(model):
        kept = losses.prepare(kept)
    if layers is None:
        layers = find_attention(model, inputs_of(model, kept[0]))
    maskable = [layer for layer in layers if layer.maskable]
    if not maskable:
        raise HeadPruneError(f"No head of {type(model).__name__} can be masked: {layers[0].reason}.")
    with evaluating(model), exact_attention(model):
        problem = Problem(
            model,
            maskable,
            [(batch, batch_size(batch)) for batch in kept],
            lambda batch: _finite(losses(batch)),
            seed,
            progress or _silent,
            settings or Settings(),
        )
        estimate = chosen.run(problem)
    sizes = [layer.num_heads for layer in maskable]
    names = [layer.name for layer in maskable]
    return HeadScores(
        method=method,
        unit=chosen.unit,
        values=dict(zip(names, torch.split(estimate.values.cpu().double(), sizes), strict=True)),
        stderr=dict(zip(names, torch.split(estimate.stderr.cpu().double(), sizes), strict=True)),
        examples=estimate.examples,
        layers=tuple(maskable),
        model=fingerprint(model),
        details=estimate.details,
        matrix=None if estimate.matrix is None else estimate.matrix.cpu().double(),
    )


def _silent(done: int, total: int, note: str = "") -> None:
    pass


def _finite(losses: Tensor) -> Tensor:
    if not torch.isfinite(losses).all():
        row = int((~torch.isfinite(losses)).nonzero()[0])
        value = losses[row].item()
        raise HeadPruneError(
            f"The loss of example {row} of a batch is {value}.", "Check its label and text, or use --dtype float32."
        )
    return losses
