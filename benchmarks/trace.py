"""What tracing and pruning cost in time and memory: BERT-base, and a 7-billion-parameter Llama without weights.

    python benchmarks/trace.py

Memory is the peak of a process of its own, above what the model itself takes, so that one measurement does not hide another.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

import headprune as hp


def peak() -> float:
    """The most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bert(tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(1000, 20000, (1, tokens))
    return tf.BertModel(tf.BertConfig()).eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def trace(tokens: int) -> None:
    hp.find_attention(*bert(tokens))


def training_step(tokens: int) -> None:
    model, example = bert(tokens)
    model.train()
    model(**example).last_hidden_state.sum().backward()


def prune(tokens: int) -> None:
    model, example = bert(tokens)
    layers = hp.find_attention(model, example)
    hp.prune(model, {layer.name: [0, 1, 2, 3] for layer in layers}, example, layers=layers)


def without_weights(tokens: int) -> None:
    config = tf.LlamaConfig(dtype="bfloat16")
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config)
    assert len(hp.find_attention(model, {"input_ids": torch.randint(5, 100, (1, tokens))})) == config.num_hidden_layers


def build(tokens: int) -> None:
    bert(tokens)


def measured(work: Callable[[int], None], tokens: int, results: Any) -> None:
    warm, example = bert(4)
    warm(**example)  # what torch and transformers load on first use is not the measured work's
    del warm
    before, started = peak(), time.perf_counter()
    work(tokens)
    results.put((time.perf_counter() - started, peak() - before))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    found = {}
    for work, tokens in (
        (build, 16),
        (trace, 16),
        (trace, 128),
        (training_step, 16),
        (training_step, 128),
        (prune, 16),
        (without_weights, 6),
    ):
        results = context.Queue()
        process = context.Process(target=measured, args=(work, tokens, results))
        process.start()
        seconds, memory = results.get()
        process.join()
        found[f"{work.__name__}, {tokens} tokens"] = {"seconds": round(seconds, 2), "peak_mb": round(memory)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
