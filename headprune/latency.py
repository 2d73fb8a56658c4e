"""Measure speed-ups: models run forward passes, or generate text, in turn, so that a change of the machine's speed favours none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import (
    Example,
    call,
    does_not_run,
    is_encoder_decoder,
    model_device,
    move,
    positions_of,
    tensors,
    unlabelled,
    with_decoder_input,
    without_labels,
    writes,
)
from headprune.running import Progress, config_kept, evaluating, exact_attention, frozen, no_progress, quiet, tracked
from headprune.uncertainty import CONFIDENCE

WARM_UP, MIN_RUNS, MAX_RUNS = 3, 20, 100  # rounds
MIN_SECONDS = 1.0
SLOW_RUNS, SLOW_SECONDS = 10, 5.0  # as many rounds are enough once they took so long
NEW_TOKENS = 16  # for generation
MIN_ROUNDS = 6  # the fewest whose median has a 95 % interval: all six on one side of it have a probability of 3 %


@dataclass(frozen=True)
class Timing:
    """Times of one model on one input shape, in milliseconds.

    Attributes:
        low, high: 95 % interval of the median.
    """

    median: float
    p95: float
    runs: int
    low: float
    high: float


@dataclass(frozen=True)
class Speedup:
    """How much faster a model is than the first one: the median over rounds of the ratio of their times.

    Attributes:
        ratio: Time of the first (dense) model over this one's; above 1 is faster.
        low, high: 95 % interval over rounds.
        verdict: ``"faster"``, ``"slower"`` or ``"no measurable change"`` (the interval holds 1).
    """

    ratio: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class LatencyRow:
    """Timings and speed-ups of all models on one input shape."""

    batch: int
    length: int
    timings: dict[str, Timing]
    speedups: dict[str, Speedup]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def benchmark(
    models: Mapping[str, nn.Module],
    example: Example,
    *,
    min_runs: int | None = None,
    min_seconds: float | None = None,
    progress: Progress | None = None,
) -> LatencyRow:
    """Time the forward passes of models against each other, on one input.

    Every round runs each model once, every other round in reverse order, so that a change of the machine's speed favours no
    model. Rounds continue until both ``min_runs`` and ``min_seconds`` are reached, but no longer than `MAX_RUNS` rounds, and there are
    at least six: fewer say nothing with 95 % confidence.

    Args:
        models: By name; all others are compared with the first, usually the dense model. All on one device. They are timed in
            evaluation mode; afterwards each has its former mode.
        example: A dict of tensors (keyword arguments), a tensor, or a tuple (positional arguments). Labels are left out,
            except for encoder-decoders, which need them.
        min_runs: Minimum number of rounds; by default `MIN_RUNS`, or `SLOW_RUNS` of passes that take about half a second or more.
        min_seconds: Minimum total time of each model; by default `MIN_SECONDS`.
        progress: Called with (inputs done, inputs in all).

    Returns:
        A `LatencyRow`: `LatencyRow.timings` has every model's median and 95th percentile in milliseconds, and
        `LatencyRow.speedups` every other model's ratio to the first (above 1 is faster), with 95 % intervals.

    Raises:
        HeadPruneError: No model is given, or a model does not run on the example.
    """
    if not isinstance(models, Mapping) or not models or not all(isinstance(m, nn.Module) for m in models.values()):
        raise HeadPruneError("models= names no models.", 'Pass models={"dense": model, "pruned": other}.')
    example = without_labels(next(iter(models.values())), example)
    if not tensors(example):
        raise HeadPruneError("The example holds no tensor.", "Pass what the models' forward() takes.")
    for name, model in models.items():
        check_runs(model, example, f"The model {name!r}")
    inputs = [(*example_shape(example), example)]
    (row,) = bench(models, inputs, min_runs=min_runs, min_seconds=min_seconds, progress=progress)
    return row


def check_runs(model: nn.Module, example: Example, name: str = "The model") -> None:
    """Run a model once, to check that it runs.

    Raises:
        HeadPruneError: It does not run on the example.
    """
    try:
        with evaluating(model), torch.inference_mode():
            call(model, move(example, model_device(model)))
    except Exception as error:
        raise does_not_run(error, name) from error


def bench(
    models: Mapping[str, nn.Module],
    inputs: Sequence[tuple[int, int, Example]],
    *,
    min_runs: int | None = None,
    min_seconds: float | None = None,
    progress: Progress | None = None,
) -> list[LatencyRow]:
    """Time models against each other on several inputs, as `benchmark` does on one.

    Args:
        models: The dense model first; all on one device.
        inputs: (batch, tokens, example) for each row.

    Returns:
        A row for each input. On CUDA, times are measured by events on the device, elsewhere by a monotonic clock.
    """
    rows = []
    with evaluating(*models.values()):
        for batch, length, example in tracked(inputs, progress or no_progress):
            times = in_turn({name: timer(model, example) for name, model in models.items()}, min_runs, min_seconds)
            rows.append(LatencyRow(batch, length, *compared(times)))
    return rows


def in_turn(
    arms: Mapping[str, Callable[[], float]], min_runs: int | None, min_seconds: float | None
) -> dict[str, list[float]]:
    """Run models in turn after a warm-up; returns each model's milliseconds per round. Limits as for `benchmark`."""
    least = 1000 * (MIN_SECONDS if min_seconds is None else min_seconds)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        for _ in range(WARM_UP):
            arm()
    for rounds in range(MAX_RUNS):
        took = min(map(sum, times.values()))
        enough = max(MIN_ROUNDS, min_runs or (MIN_RUNS if took < 1000 * SLOW_SECONDS else SLOW_RUNS))
        if rounds >= enough and took >= least:
            break
        for name in arms if rounds % 2 == 0 else reversed(list(arms)):
            times[name].append(arms[name]())
    return times


def seconds_of(once: float) -> float:
    """About how many seconds `benchmark` times a model for whose pass takes ``once``."""
    return max(MIN_SECONDS, min(MIN_RUNS * once, max(SLOW_SECONDS, SLOW_RUNS * once)))


def compared(times: Mapping[str, Sequence[float]]) -> tuple[dict[str, Timing], dict[str, Speedup]]:
    """From milliseconds per round: every model's `Timing`, and the `Speedup` of all others over the first."""
    first, *others = times
    timings = {}
    for name, took in times.items():
        p95 = float(np.percentile(took, 95))
        timings[name] = Timing(float(np.median(took)), p95, len(took), *_median_interval(np.asarray(took)))
    return timings, {name: speedup(times[first], times[name]) for name in others}


def speedup(dense: Sequence[float], other: Sequence[float]) -> Speedup:
    """The ratio of two models' times (in any unit), paired by round."""
    ratios = np.asarray(dense) / np.asarray(other)
    low, high = _median_interval(ratios)
    verdict = "faster" if low > 1 else "slower" if high < 1 else "no measurable change"
    return Speedup(float(np.median(ratios)), low, high, verdict)


def _median_interval(values: np.ndarray) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median: two order statistics, from the binomial distribution of the number of values below
    the median (Conover 1999, Practical Nonparametric Statistics, section 3.2). For 20 values, a bootstrap interval is too narrow: it
    misses in 6 to 8 % of cases."""
    ordered = np.sort(values)
    place = max(int(binom.ppf((1 - CONFIDENCE) / 2, len(values), 0.5)) - 1, 0)
    return float(ordered[place]), float(ordered[-1 - place])


def parameters(model: nn.Module) -> int:
    """How many parameters a model has; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def flops(model: nn.Module, example: Example) -> int:
    """Floating-point operations of one forward pass (`torch.utils.flop_counter`: 2 per multiply-add)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter does not know the CPU's fused attention, nn.TransformerEncoder's fused layer, nor the product of all experts
    # at once (transformers' grouped_mm), so plain operations with the same products replace them.
    plain, counter = sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False)
    with config_kept(model):
        for module in model.modules():
            fused = getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm"
            if fused and callable(change := getattr(module, "set_experts_implementation", None)):
                change("eager")
        # Frozen, since the counter asks for the autograd node of views of parameters that require gradients.
        with quiet(model), frozen(model), torch.no_grad(), plain, counter:
            call(model, move(example, model_device(model)))
    return int(counter.get_total_flops())


def cache_bytes(model: nn.Module, example: Example) -> float | None:
    """Bytes per token in the key/value cache of a decoder's self-attention; None for a model without a cache.

    A layer with a sliding window counts by the tokens that it holds itself, as for a text within its window.
    """
    # BART and its like keep no cache if they are given labels.
    example = with_decoder_input(model, example) if isinstance(example, Mapping) else example
    with evaluating(model), exact_attention(model), torch.no_grad():
        try:
            output = call(model, move(example, model_device(model)), use_cache=True)
        except TypeError:  # the model takes no such argument
            return None
    cache = getattr(output, "past_key_values", None)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    cached = [t for layer in layers for name in ("keys", "values") if (t := getattr(layer, name, None)) is not None]
    return sum(t.nbytes / (t.shape[0] * t.shape[-2]) for t in cached if t.numel()) or None


def clock(device: torch.device) -> float:
    """Milliseconds of a monotonic clock, read after synchronising the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the default is the current device, which may be another
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() * 1000


def timer(model: nn.Module, example: Example) -> Callable[[], float]:
    """A function that runs the model once and returns the milliseconds that it took."""
    device = model_device(model)
    moved = move(example, device)

    def run() -> float:
        if device.type != "cuda":
            begin = clock(device)
            with torch.inference_mode():
                call(model, moved)
            return clock(device) - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        with torch.inference_mode(), torch.cuda.device(device):
            start.record()
            call(model, moved)
            end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))

    return run


def example_shape(example: Example) -> tuple[int, int]:
    """(batch, tokens) of an example; a batch of 1 if no tensor has dimensions, 0 tokens if it has no ``input_ids``."""
    batch = next((len(t) for t in tensors(example) if t.ndim), 1)
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    return batch, ids.shape[1] if isinstance(ids, Tensor) else 0


# -- generation: the prompt (prefill), then one token per step with a key/value cache -------------------------


@dataclass(frozen=True)
class GenerationRow:
    """Generation times of all models on one prompt, in milliseconds.

    Attributes:
        batch, length: Number of sequences, and tokens per prompt.
        new: Tokens generated after the first.
        prefill, token: By model: time of the pass over the prompt, and mean time of a step, which adds a token to every sequence.
        prefill_speedups, token_speedups: By model, except the first (dense).
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
    """Time the generation of text by several models: greedy, with a key/value cache, from one prompt.

    Args:
        models: The dense model first; all on one device.
        example: The prompt, as the models' ``forward`` takes it. An encoder-decoder's answer begins with its start token.
        new: Tokens to generate after the first.
        min_rounds: Minimum number of rounds; in each, every model generates once.

    Returns:
        The times; None if the first model does not generate text, if a model keeps no key/value cache, or if the prompt leaves no room
        for a token.
    """
    dense: Any = next(iter(models.values()))
    if not writes(dense) or not isinstance(example, Mapping):
        return None
    prompt = _prompt(dense, example)
    most = positions_of(dense, decoder=True) or 10**9
    tokens = prompt["decoder_input_ids" if is_encoder_decoder(dense) else "input_ids"]
    new = min(new, most - tokens.shape[1])
    sizes = {name: cache_bytes(model, prompt) for name, model in models.items()}
    cache = {name: size for name, size in sizes.items() if size is not None}
    if new < 1 or len(cache) < len(models):
        return None
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with evaluating(*models.values()):
        arms = {name: _writer(model, prompt, new, times[name]) for name, model in models.items()}
        rounds = in_turn(arms, min_rounds, min_seconds)
    # The rounds after the warm-up.
    first, step = ({name: [pair[i] for pair in times[name][-len(rounds[name]) :]] for name in models} for i in (0, 1))
    prefill, prefill_speedups = compared(first)
    token, token_speedups = compared(step)
    batch, length = example_shape(example)
    speed = {name: 1000 * batch / timing.median for name, timing in token.items()}
    return GenerationRow(batch, length, new, prefill, token, prefill_speedups, token_speedups, speed, cache)


def _prompt(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """The input of the first pass: the example without labels; for encoder-decoders, with the decoder's start token."""
    prompt = {k: v for k, v in unlabelled(example).items() if not k.startswith("decoder_")}
    if is_encoder_decoder(model):
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        prompt["decoder_input_ids"] = torch.full((example_shape(prompt)[0], 1), start)
    return dict(move(prompt, model_device(model)))


def _writer(
    model: nn.Module, prompt: Mapping[str, Any], new: int, times: list[tuple[float, float]]
) -> Callable[[], float]:
    """A function that generates ``new`` tokens, appends (milliseconds of the prefill, of a step) to ``times``, and returns the total."""
    device = model_device(model)

    def write() -> float:
        with torch.inference_mode():
            begin = clock(device)
            step = _next(call(model, prompt, use_cache=True), prompt)
            middle = clock(device)
            for _ in range(new):
                step = _next(call(model, step, use_cache=True), step)
            end = clock(device)
        times.append((middle - begin, (end - middle) / new))
        return end - begin

    return write


def _next(output: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The input of the next step: the likeliest token, the key/value cache and the attention mask."""
    token = output.logits[:, -1:].argmax(-1)
    step: dict[str, Any] = {"past_key_values": output.past_key_values}
    mask = given.get("attention_mask")
    if (encoded := getattr(output, "encoder_last_hidden_state", None)) is not None:
        step |= {"encoder_outputs": (encoded,), "decoder_input_ids": token}
    else:
        step["input_ids"] = token
        mask = mask if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return {**step, "attention_mask": mask} if isinstance(mask, Tensor) else step
