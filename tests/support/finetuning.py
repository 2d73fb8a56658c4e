"""A dense model, the same pruned, and what both are fine-tuned and compared by."""

import copy
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import nn

import headprune as hp
from headprune.app.data import Part
from headprune.app.documents import Training
from headprune.app.finetune import finetune
from headprune.app.options import FinetuneOptions
from tests.support import zoo

Batches = Sequence[Any]


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


def tuned(
    pruned: nn.Module, dense: nn.Module, train: Batches, choose: Batches, work: Path, options: Any = None, **more: Any
) -> tuple[nn.Module, Training]:  # fmt: skip
    """`finetune` on batches as they are, each of which counts as one example."""
    parts = (Part("train", "train", list(range(len(b))), list(b), itemgetter(0), 1) for b in (train, choose))  # type: ignore[arg-type]
    return finetune(pruned, dense, *parts, options or FinetuneOptions(), work, **more)
