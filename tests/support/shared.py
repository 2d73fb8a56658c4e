"""What several processes do together in tests of `headprune.ranks`: each function is called in every one of them."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.errors import HeadPruneError
from headprune.ranks import Ranks, current, launched
from headprune.scoring import Settings
from tests.support.zoo import labelled, randomise, text


def small(double: bool = False) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A BERT with three layers of four heads, and batches of 6, 2, 5, 4 and (ragged) 1 examples."""
    config = tf.BertConfig(
        vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=48, pad_token_id=0,
    )  # fmt: skip
    model = randomise(tf.BertForSequenceClassification(config))
    model = model.double() if double else model
    return model, [labelled(model, text(rows, 7, seed=rows), seed=rows) for rows in (6, 2, 5, 4, 1)]


def scored(method: str, count: int = 5, work: str = "", **settings: Any) -> dict[str, Any]:
    """Scores of the small model on its first batches."""
    model, batches = small()
    with launched():
        found = hp.score(
            model, batches[:count], method, seed=3, settings=Settings(**settings), work=Path(work) if work else None
        )
    return found.to_json()


def pruned(strategy: str = "auto", effort: str = "normal") -> dict[str, Any]:
    """The small model searched, repaired, pruned and evaluated; numbers and weights of all that comes out."""
    model, batches = small(double=True)
    held_out = [labelled(model, text(rows, 7, seed=90 + rows), seed=rows) for rows in (3, 5)]
    with launched() as ranks:
        plans = hp.search(model, batches, [8, 4], choose=held_out, strategy=strategy, effort=effort)
        before = hp.evaluate(model, held_out)
        repair = hp.repair(model, plans[1], batches)
        hp.prune(model, plans[1], batches[0])
        after = hp.evaluate(model, held_out)
    return {
        "plans": [plan.to_json() for plan in plans],
        "repair": repair.to_json(),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "losses": torch.from_numpy(after.loss),
        "metrics": {**before.metrics, **{f"after {k}": v for k, v in after.metrics.items()}},
        "size": ranks.size,
    }
