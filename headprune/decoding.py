"""How fast decoders write: the prompt (prefill), then one token after the other with a key/value cache; models in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

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


def benchmark_generation(
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
    dense: Any = next(iter(models.values()))
    if not writes(dense) or not isinstance(example, Mapping):
        return None
    prompt = _prompt(dense, example)
    most = getattr(dense.config.get_text_config(decoder=True), "max_position_embeddings", None) or 10**9
    tokens = prompt["decoder_input_ids" if is_encoder_decoder(dense) else "input_ids"]
    new = min(new, most - tokens.shape[1])
    sizes = {name: latency.cache_bytes(model, prompt) for name, model in models.items()}
    cache = {name: size for name, size in sizes.items() if size is not None}
    if new < 1 or len(cache) < len(models):
        return None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        arms = {name: _writer(model, prompt, new, times[name]) for name, model in models.items()}
        rounds = latency.in_turn(arms, min_rounds, latency.MIN_SECONDS if min_seconds is None else min_seconds)
    # The rounds after the warm-up.
    first, step = ({name: [pair[i] for pair in times[name][-len(rounds[name]) :]] for name in models} for i in (0, 1))
    prefill, prefill_speedups = latency.compared(first)
    token, token_speedups = latency.compared(step)
    batch, length = latency.example_shape(example)
    speed = {name: 1000 * batch / timing.median for name, timing in token.items()}
    return GenerationRow(batch, length, new, prefill, token, prefill_speedups, token_speedups, speed, cache)


def _prompt(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """What the first pass takes: an example without labels; for encoder-decoders with the first token of the answer."""
    prompt = {k: v for k, v in example.items() if k not in LABELS and not k.startswith("decoder_")}
    if is_encoder_decoder(model):
        rows = latency.example_shape(prompt)[0]
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        prompt["decoder_input_ids"] = torch.full((rows, 1), start)
    return dict(move(prompt, model_device(model)))


def _writer(
    model: nn.Module, prompt: Mapping[str, Any], new: int, times: list[tuple[float, float]]
) -> Callable[[], float]:
    """A function that writes ``new`` tokens; it notes (milliseconds of the prompt, of a step), and returns those of all."""
    device = model_device(model)

    def write() -> float:
        with torch.inference_mode():
            begin = latency.clock(device)
            step = _next(call(model, prompt, use_cache=True), prompt)
            middle = latency.clock(device)
            for _ in range(new):
                step = _next(call(model, step, use_cache=True), step)
            end = latency.clock(device)
        times.append((middle - begin, (end - middle) / new))
        return end - begin

    return write


def _next(output: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The input of the next step: the likeliest token, the cache, and which tokens before may be looked at."""
    token = output.logits[:, -1:].argmax(-1)
    step: dict[str, Any] = {"past_key_values": output.past_key_values}
    mask = given.get("attention_mask")
    if (encoded := getattr(output, "encoder_last_hidden_state", None)) is not None:
        step |= {"encoder_outputs": (encoded,), "decoder_input_ids": token}
    else:
        step["input_ids"] = token
        mask = mask if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return {**step, "attention_mask": mask} if isinstance(mask, Tensor) else step
