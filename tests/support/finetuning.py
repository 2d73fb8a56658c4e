"""A dense model, the same pruned, and what both are fine-tuned and compared by."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

import headprune as hp
from headprune.app.distillation import DistillationLoss
from tests.support import zoo


def t5() -> Any:
    """Eager: transformers 5.0 has no other attention for it."""
    return zoo.t5("eager")


def pair(made: Any, removed: dict[int, list[int]] | None = None) -> tuple[nn.Module, nn.Module, Any]:
    """A dense model, the same pruned, and an example."""
    dense, example = made
    pruned = copy.deepcopy(dense)
    layers = hp.find_attention(dense, example)
    heads = removed or {0: [1], 1: list(range(layers[1].num_heads))}
    hp.prune(pruned, {layers[i].name: h for i, h in heads.items()}, example)
    return dense, pruned, example


def prepared(loss: DistillationLoss, batch: dict[str, Any]) -> DistillationLoss:
    loss.prepare(batch)
    return loss
