"""Ablation scores: how the loss changes when a head is removed, or when its output is replaced.

Ablation on a sample of examples: gradients on all examples predict the effects and guide the sampling.

For example i and head h let ``a`` be the effect of removing the head (the loss without it minus the dense loss) and
``g = -dL/dxi`` its prediction by the gradient. With ``g`` known for all N examples and ``a`` for those in a sample S,
which contains example i with probability ``pi_i``, the difference estimator (Särndal, Swensson and Wretman 1992,
"Model Assisted Survey Sampling", section 6.3)

    score_h = mean_i(g_ih) + 1/N sum over i in S of (a_ih - g_ih) / pi_i

is unbiased for the full-data mean of ``a``, however poor the prediction. A few examples carry nearly all of the effect, so
``pi_i`` is proportional to the norm of the example's gradient (plus a floor). Poisson sampling with permanent random numbers
(Brewer, Early and Joyce 1972) makes a larger sample contain the smaller one; its variance has an unbiased estimate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.gates import Fill
from headprune.running import no_progress
from headprune.scoring.base import Estimate, Problem, method, rounded
from headprune.scoring.gradient import gate_gradients, separate
from headprune.scoring.replay import Replay
from headprune.scoring.statistics import real_queries

FillsOf = Callable[[int, int, Any], Mapping[str, Fill]]
"""(number of the first example, examples, batch) -> the replacement for the heads' output, by layer."""


@method(
    "ablation",
    unit="loss (nats) added when the head is removed",
    settings=("examples", "seconds", "max_memory", "keep"),
)
def ablation(problem: Problem) -> Estimate:
    """Zero ablation: the mean over examples of ``L(without the head) - L``, signed.

    Section 3.2 of Michel et al. (2019), with the loss in place of the metric. A negative score says that
    the model is better off without the head. The standard error is that of the paired differences.
    Where ``settings.examples`` or ``settings.seconds`` do not allow all examples, `sampled` estimates it.
    """
    replay = Replay(problem)
    limited = problem.settings.examples is not None and problem.settings.examples < problem.examples
    if limited or problem.settings.seconds is not None:
        return sampled(problem, replay)
    return _ablated(problem, replay)


@method("mean-ablation", unit="loss (nats) added when the head gives its mean", settings=("max_memory",))
def mean_ablation(problem: Problem) -> Estimate:
    """The head's output is replaced by its mean over the tokens of all examples, as Wang et al. (2022) do.

    Section 2.1 of "Interpretability in the Wild" (arXiv:2211.00593). A constant that a head adds to every token, such as a
    bias, does not count: after pruning, W_O's bias could add it. The mean of a layer that runs several times is over all calls.
    """

    def count_and_sum(tokens: Tensor, example: int) -> Tensor:
        return torch.cat([tokens.new_tensor([len(tokens)]), tokens.sum(0)])

    problem = replace(problem, batches=separate(problem))
    totals = _head_outputs(problem, "mean", count_and_sum, lambda calls, example: calls.sum(0))
    means = {name: each[:, 1:].sum(0) / each[:, 0].sum() for name, each in totals.items()}

    def constant(mean: Tensor) -> Fill:
        return lambda hidden, gates: mean.to(hidden).expand_as(hidden)

    constants = {name: constant(mean) for name, mean in means.items()}
    return _ablated(problem, Replay(problem), lambda start, size, batch: constants)


@method(
    "resample-ablation", unit="loss (nats) added when the head says what it said elsewhere", settings=("max_memory",)
)
def resample_ablation(problem: Problem) -> Estimate:
    """The head's output at each token is replaced by its output at a random token of a random example.

    Resample ablation of Chan et al. (2022), "Causal Scrubbing", per token: the replacement comes from the same distribution
    as the original, so the model only sees activations that occur on the data. The seed gives one draw per token; the pool
    holds one token of every example, of one of the calls where a layer runs several times.
    """

    def one_token(tokens: Tensor, example: int) -> Tensor:
        return tokens[int(_draws(problem.seed, example, 1, len(tokens)))]

    def one_call(tokens: Tensor, example: int) -> Tensor:
        return tokens[int(_draws(problem.seed + 2, example, 1, len(tokens)))]

    problem = replace(problem, batches=separate(problem))
    pools = _head_outputs(problem, "pool", one_token, one_call)

    def fills(start: int, size: int, batch: Any) -> dict[str, Fill]:
        real = {layer.name: partial(real_queries, problem, layer, batch) for layer in problem.layers}
        seed = problem.seed + 1
        return {name: _resampled(pool, seed, start, size, real[name]) for name, pool in pools.items()}

    return _ablated(problem, Replay(problem), fills)


def _ablated(problem: Problem, replay: Replay, fills: FillsOf | None = None) -> Estimate:
    """The mean over examples of the loss without each head minus the dense loss."""
    every = torch.split(1 - torch.eye(problem.heads), [layer.num_heads for layer in problem.layers])

    def without(start: int, batch: Any, size: int) -> Tensor:
        """The dense losses, then the losses without each head: ``[examples, 1 + heads]``."""
        recording = replay.of(batch, size, fills(start, size, batch) if fills else None)
        columns = [recording.dense]
        for gates in every:
            columns += recording.losses(gates)
            done = start * problem.heads + size * (len(columns) - 1)
            problem.progress(done, problem.examples * problem.heads)
        return torch.stack(columns, dim=1)

    losses = torch.cat(problem.parts("ablation", without))
    return Estimate.mean_of(losses[:, 1:] - losses[:, :1], losses[:, 0], replayed=replay.about)


# -- replacements for a head's output ----------------------------------------------------------------


def _resampled(pool: Tensor, seed: int, start: int, size: int, real: Callable[[int], Tensor | None]) -> Fill:
    """A fill that replaces the heads' output at every token of ``size`` examples by that of a random token of the pool.

    Args:
        pool: ``[tokens, features]``.
        start: Number of the first example.
        real: From the number of tokens to a mask of the real (non-padding) ones, ``[examples, 1, tokens]``; None if unknown.
    """

    @cache  # an example's draws do not depend on its batch or padding
    def drawn(tokens: int) -> Tensor:
        rows = torch.stack([_draws(seed, i, tokens, len(pool)) for i in range(start, start + size)])
        if (mask := real(tokens)) is not None:
            rows = rows.gather(1, (mask[:, 0].cpu().cumsum(1) - 1).clamp(min=0).expand(size, -1))
        return rows

    def fill(hidden: Tensor, gates: int) -> Tensor:
        copies = (gates or size) // size
        tokens = hidden.numel() // (hidden.shape[-1] * copies * size)
        return pool[drawn(tokens)].to(hidden).repeat(copies, 1, 1).reshape(hidden.shape)

    return fill


def _draws(seed: int, example: int, count: int, below: int) -> Tensor:
    """``count`` random integers from 0 to ``below`` - 1, fixed by the seed and the example's number."""
    return torch.from_numpy(np.random.default_rng((seed, example)).integers(below, size=count))


def _head_outputs(
    problem: Problem, key: str, summarize: Callable[[Tensor, int], Tensor], join: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """A summary of every example's heads' outputs, by layer: ``{layer_name: [examples that it runs on, width]}``.

    Args:
        summarize: Takes W_O's input at an example's real tokens ``[tokens, features]``, and the example's number.
        join: Takes the summaries of all calls of the layer ``[calls, width]``, and the example's number.
    """
    ones = {layer.name: torch.ones(layer.num_heads) for layer in problem.layers}

    def compute(start: int, batch: Any, size: int) -> dict[str, Tensor]:
        calls: dict[str, list[Tensor]] = {}

        def note(layer: AttentionLayer, hidden: Tensor, gates: int) -> Tensor:
            each = list(hidden.detach().reshape(size, -1, hidden.shape[-1]).cpu().double())
            real = real_queries(problem, layer, batch, len(each[0]))
            if real is not None:
                masks = real[:, 0].cpu().expand(size, -1)
                each = [e[mask] if mask.any() else e for e, mask in zip(each, masks, strict=True)]
            seen = torch.stack([summarize(tokens, start + r) for r, tokens in enumerate(each)])
            calls.setdefault(layer.name, []).append(seen)
            return torch.zeros_like(hidden)

        notes: dict[str, Fill] = {layer.name: partial(note, layer) for layer in problem.layers}
        with torch.no_grad(), problem.gated(ones, notes):
            problem.losses(batch)
        every = {name: torch.stack(own, dim=1) for name, own in calls.items()}
        return {n: torch.stack([join(row, start + r) for r, row in enumerate(own)]) for n, own in every.items()}

    parts = problem.parts(key, compute)
    names = [layer.name for layer in problem.layers if any(layer.name in part for part in parts)]
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


# -- ablation on a sample of examples -------------------------------------------------------------------

_FLOOR = 0.2  # of the mean gradient norm: examples with hardly any gradient are sampled, too
_FIRST = 0.6  # of the budget for all heads alike; the rest for heads whose interval contains the cut
_ROUNDS = 4
_PROBE = 0.02  # of the examples, to time ablation


@dataclass(frozen=True)
class AblationSample:
    """Each head's sample of examples, and its ablation effects on them.

    Attributes:
        expected: g, ``[examples, heads]``.
        effects: a, ``[examples, heads]``; NaN where it has not been computed.
        weight: ``[examples]``; inclusion probabilities are proportional to it.
        uniforms: ``[examples]``, each example's permanent random number.
        sizes: ``[heads]``, expected number of examples in each head's sample.
    """

    expected: Tensor
    effects: Tensor
    weight: Tensor
    uniforms: Tensor
    sizes: Tensor

    def inclusion(self) -> Tensor:
        """The inclusion probabilities ``pi``, ``[examples, heads]``."""
        levels = {size: inclusion(self.weight, size) for size in set(self.sizes.tolist())}
        return torch.stack([levels[size] for size in self.sizes.tolist()], dim=1)

    def each(self) -> Tensor:
        """``[examples, heads]``; the scores are the mean of this over examples."""
        return self.expected + (self.effects - self.expected).nan_to_num() / self.inclusion()


def sampled(problem: Problem, replay: Replay) -> Estimate:
    """Zero ablation of ``settings.examples`` examples per head (on average), or for ``settings.seconds``."""
    began = time.monotonic()
    slopes, losses = gate_gradients(replace(problem, progress=no_progress))
    # A divergence from the dense model has no first order: predict by its second.
    expected = -slopes if problem.surrogate is None else slopes**2 / 2
    n, heads = expected.shape
    sample = _empty(expected, problem.seed)
    budget = _budget(problem, replay, sample, began) * heads
    cut = problem.keep if (problem.keep or 0) < heads else None  # no cut if all heads are kept
    share = 1.0 if cut is None else _FIRST
    sample = _enlarge_sample(problem, replay, sample, torch.full_like(sample.sizes, share * budget / heads), 1)
    for number in range(2, _ROUNDS + 2):
        left = budget - sample.sizes.sum().item()
        unsure = _straddling(sample, cut)
        if left < unsure.sum() or not unsure.any():
            break
        more = left / (_ROUNDS + 2 - number) / unsure.sum()
        sizes = torch.where(unsure, sample.sizes + more, sample.sizes).clamp(max=n)
        sample = _enlarge_sample(problem, replay, sample, sizes, number)
    return _estimate(problem, sample, {"mean_loss": losses.mean().item(), "replayed": replay.about})


def _estimate(problem: Problem, sample: AblationSample, details: dict[str, Any]) -> Estimate:
    """The scores; their standard errors cover the sampling and the choice of examples."""
    n, pi, effects = len(sample.weight), sample.inclusion(), sample.effects.nan_to_num()
    values, variance = scores_and_variance(sample)
    squares = (effects**2 / pi).sum(0)
    counts = (~sample.effects.isnan()).sum(0).double()
    details |= {
        "ablated": counts.mean().item(),
        "ablated_most": int(counts.max()),
        "sampling_stderr": rounded(variance.sqrt()),
        "carried_by": rounded((effects.abs() / pi).sum(0) ** 2 / squares.clamp(min=1e-300)),
        "estimated": f"gradients on all {n} examples, ablation on {counts.mean():.0f} of them per head",
    }
    if (seconds := problem.settings.seconds) is not None:
        more = f", as many as fitted into {seconds:g} s here: on another machine, or a busier one, others"
        details["estimated"] += more
    # The variance over examples, with two more counted: see `headprune.uncertainty`.
    own = (squares - n * values**2).clamp(min=0) + 2 * effects.abs().amax(0) ** 2
    stderr = (variance + own / n**2).sqrt()
    if n == 1:
        details["stderr"], stderr = "none from a single example", torch.full_like(stderr, math.nan)
    return Estimate(values, stderr, n, details, sample.each())


def scores_and_variance(sample: AblationSample) -> tuple[Tensor, Tensor]:
    """Every head's score and its sampling variance, ``[heads]`` each.

    The unbiased variance estimate is too small for a head whose rare large effects are not in the sample. So a head's
    variance is at least the heads' pooled variance, scaled by the size of its gradients.
    """
    n, pi = len(sample.weight), sample.inclusion()
    residual = (sample.effects - sample.expected).nan_to_num()
    own = ((1 - pi) * (residual / pi) ** 2).sum(0) / n**2
    # The sampling variance if the residuals were as large as the gradients.
    scale = ((1 - pi) / pi * sample.expected**2).sum(0) / n**2
    pooled = scale * own.sum() / scale.sum().clamp(min=1e-300)
    return sample.each().mean(0), torch.maximum(own, pooled)


def inclusion(weight: Tensor, size: float) -> Tensor:
    """Probabilities proportional to ``weight`` that sum to ``size``; those that would exceed 1 are 1."""
    if size >= len(weight):
        return torch.ones_like(weight)
    certain = torch.zeros(len(weight), dtype=torch.bool)
    while True:
        share = (size - certain.sum()) * weight / weight[~certain].sum()
        over = ~certain & (share >= 1)
        if not over.any():
            return torch.where(certain, torch.ones_like(weight), share)
        certain |= over


def _empty(expected: Tensor, seed: int) -> AblationSample:
    """A sample without ablated examples; the seed gives every example its random number."""
    n, heads = expected.shape
    length = expected.norm(dim=1)
    weight = length / length.mean() + _FLOOR if length.any() else torch.ones(n, dtype=torch.float64)
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return AblationSample(expected, torch.full_like(expected, math.nan), weight, uniforms, expected.new_zeros(heads))


def _budget(problem: Problem, replay: Replay, sample: AblationSample, began: float) -> float:
    """Examples to ablate per head: ``settings.examples``, or as many as ``settings.seconds`` allow."""
    n, seconds = len(sample.weight), problem.settings.seconds
    most = float(min(problem.settings.examples or n, n))
    if seconds is None:
        return most

    def measure() -> Tensor:
        started, probe = time.monotonic(), max(1.0, _PROBE * n)
        _enlarge_sample(problem, replay, sample, torch.full_like(sample.sizes, probe), 0)
        each = (time.monotonic() - started) / probe
        return torch.tensor([max((seconds - (started - began)) / each, probe)], dtype=torch.float64)

    return min(most, float(problem.store.get("budget", measure)))


def _straddling(sample: AblationSample, keep: int | None) -> Tensor:
    """Which heads' intervals contain the score at the cut, ``[heads]``: more examples of them may change the plan."""
    values, variance = scores_and_variance(sample)
    if keep is None or not 0 < keep < len(values):
        return torch.zeros(len(values), dtype=torch.bool)
    order = values.sort(descending=True).values
    cut = (order[keep - 1] + order[keep]) / 2
    quantile = float(student.ppf(0.975, max(1.0, sample.sizes.min().item() - 1)))
    return ((values - cut).abs() <= quantile * variance.sqrt()) & (sample.sizes < len(sample.weight))


def _enlarge_sample(
    problem: Problem, replay: Replay, sample: AblationSample, sizes: Tensor, number: int
) -> AblationSample:
    """A sample of larger ``sizes``; ablates the examples that it adds.

    Args:
        number: The round, for the store's keys.
    """
    grown = replace(sample, sizes=sizes, effects=sample.effects.clone())
    before = sample.inclusion() if sample.sizes.any() else torch.zeros_like(sample.expected)
    uniforms = sample.uniforms[:, None]
    new = (uniforms < grown.inclusion()) & ~(uniforms < before)
    tasks, places, costs = {}, [], []
    for i, (start, batch, size) in enumerate(problem.numbered()):
        part = new[start : start + size]
        if rows := part.any(1).nonzero().flatten().tolist():
            tasks[f"round{number}-{i}"] = partial(_effects, problem, replay, batch, rows, part[rows].any(0))
            places.append([start + row for row in rows])
            costs.append(int(part.sum()))
    done = [0, *accumulate(costs)]
    steps = max(done[-1], 1)

    def report(tasks: int, total: int) -> None:
        problem.progress(done[tasks], steps)

    for rows, effects in zip(places, problem.store.share(f"round {number}", tasks, costs, report), strict=True):
        grown.effects[rows] = torch.where(new[rows], effects, grown.effects[rows])
    widest = 1.96 * float(scores_and_variance(grown)[1].max().sqrt())
    problem.progress(done[-1], steps, f"widest interval ±{widest:.2g}")
    return grown


def _effects(problem: Problem, replay: Replay, batch: object, rows: list[int], heads: Tensor) -> Tensor:
    """Effects ``[rows, heads]`` of removing each head in the mask ``heads``; zeros for the others."""
    effects = torch.zeros(len(rows), problem.heads, dtype=torch.float64)
    recording = replay.of(problem.rows.take(batch, rows), len(rows))
    counts = [int(own.sum()) for own in problem.split(heads).values()]
    for layer in torch.split(heads.nonzero().flatten(), counts):
        if own := layer.tolist():
            gates = torch.ones(len(own), problem.heads)
            gates[range(len(own)), own] = 0.0
            effects[:, own] = (recording.losses(gates) - recording.dense).T
    return effects
