"""How fast decoders write: the prompt (prefill), then one token after the other with a key/value cache; models in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headprune import latency
from headprune.inputs import LABELS, call, is_encoder_decoder, model_device, move, writes
from headprune.latency import Speedup, Timing
from headprune.running import evaluating

NEW_TOKENS, MIN_ROUNDS = 16, 6


@dataclass(frozen=True)
class GenerationRow:
    """Models that write text in turn, from one prompt. Times are in milliseconds.

    Attributes:
        batch, length: Sequences, and tokens of each prompt.
        new: Tokens written after the prompt's first.
        prefill, token: By model: the pass over the prompt, and the mean time of a step, which writes one token of every sequence.
        prefill_speedups, token_speedups: By model, but for the first (dense).
        tokens_per_second: By model, over all sequences; steps only.
        cache: By model: bytes per token of one sequence in the key/value cache of self-attention.
    """

    batch: int
    length: int
    new: int
    prefill: dict[str, Timing]
    token: dict[str, Timing]
    prefill_speedups: dict[str, Speedup]
    token_speedups: dict[str, Speedup]
    tokens_per_second: dict[str, float]
    cache: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def generation(
    models: Mapping[str, nn.Module],
    example: Mapping[str, Any],
    *,
    new: int = NEW_TOKENS,
    min_rounds: int = MIN_ROUNDS,
    min_seconds: float | None = None,
) -> GenerationRow | None:
    """Time models that write text against each other: greedily, with a cache, from one prompt.

    Args:
        models: The dense model first; all on one device.
        example: The prompt, as the models' ``forward`` takes it. An encoder-decoder's answer begins with its start token.
        new: Tokens to write after the first.
        min_rounds: Rounds, at least; in each every model writes once.

    Returns:
        The times; None if the first model does not write text, if any keeps no key/value cache, or if the prompt leaves no place for a token.
    """
    dense = next(iter(models.values()))
    if not writes(dense) or not isinstance(example, Mapping):
        return None
    given = _prompt(dense, example)
    most = getattr(dense.config, "max_position_embeddings", None) or 10**9
    tokens = given["decoder_input_ids" if is_encoder_decoder(dense) else "input_ids"]
    new = min(new, most - tokens.shape[1])
    cache = {name: latency.cache_bytes(model, given) for name, model in models.items()}
    if new < 1 or any(size is None for size in cache.values()):
        return None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        arms = {name: _writer(model, given, new, times[name]) for name, model in models.items()}
        rounds = latency.in_turn(arms, min_rounds, latency.MIN_SECONDS if min_seconds is None else min_seconds)
    # The rounds after the warm-up.
    prefill, step = ({name: [pair[i] for pair in times[name][-len(rounds[name]) :]] for name in models} for i in (0, 1))
    first, *others = models
    batch, length = latency.example_shape(example)
    return GenerationRow(
        batch,
        length,
        new,
        prefill={name: latency.timing(took) for name, took in prefill.items()},
        token={name: latency.timing(took) for name, took in step.items()},
        prefill_speedups={name: latency.speedup(prefill[first], prefill[name]) for name in others},
        token_speedups={name: latency.speedup(step[first], step[name]) for name in others},
        tokens_per_second={name: 1000 * batch / float(np.median(took)) for name, took in step.items()},
        cache={name: size for name, size in cache.items() if size is not None},
    )


def _prompt(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """What the first pass takes: an example without labels; for encoder-decoders with the first token of the answer."""
    given = {k: v for k, v in example.items() if k not in LABELS and not k.startswith("decoder_")}
    if is_encoder_decoder(model):
        rows = latency.example_shape(given)[0]
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        given["decoder_input_ids"] = torch.full((rows, 1), start)
    moved: dict[str, Any] = move(given, model_device(model))
    return moved


def _writer(
    model: nn.Module, given: Mapping[str, Any], new: int, times: list[tuple[float, float]]
) -> Callable[[], float]:
    """A function that writes ``new`` tokens; it notes (milliseconds of the prompt, of a step), and gives those of all."""
    device = model_device(model)

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # by itself it waits for the current device, which may be another
        elif device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter() * 1000

    def write() -> float:
        with torch.inference_mode():
            begin = clock()
            output = call(model, given, use_cache=True)
            step = _next(output, given)
            middle = clock()
            for _ in range(new):
                output = call(model, step, use_cache=True)
                step = _next(output, step)
            end = clock()
        times.append((middle - begin, (end - middle) / new))
        return end - begin

    return write


def _next(output: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The input of the next step: the likeliest token, the cache, and what the tokens before may be looked at by."""
    token = output.logits[:, -1:].argmax(-1)
    mask = given.get("attention_mask")
    following: dict[str, Any] = {"past_key_values": output.past_key_values}
    if (encoded := getattr(output, "encoder_last_hidden_state", None)) is not None:
        following |= {"encoder_outputs": (encoded,), "decoder_input_ids": token}
    else:
        following["input_ids"] = token
        mask = mask if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return following if not isinstance(mask, Tensor) else {**following, "attention_mask": mask}
