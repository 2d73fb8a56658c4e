"""Ablation from few examples: gradients on all of them say what to expect, and where to look.

For example i and head h let ``a`` be the effect of removing the head (the loss without it minus the dense loss) and
``g = -dL/dxi`` what the gradient expects it to be. With ``g`` known for all N examples and ``a`` for those in a
sample S, in which example i is with probability ``pi_i``, the difference estimator (Särndal, Swensson and Wretman
1992, "Model Assisted Survey Sampling", section 6.3)

    score_h = mean_i(g_ih) + 1/N sum over i in S of (a_ih - g_ih) / pi_i

is unbiased for the full-data mean of ``a``, whatever the gradient is worth. Few examples carry nearly all of the effect, so ``pi_i`` is
proportional to the size of the example's gradient (with a floor). Poisson sampling with permanent random numbers
(Brewer, Early and Joyce 1972) makes a larger sample contain the smaller one; its variance has an unbiased estimate.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

from headprune.scoring.base import Estimate, Problem, rounded
from headprune.scoring.gradient import gate_gradients
from headprune.scoring.replay import Replay

_FLOOR = 0.2  # of the mean gradient: examples with hardly any gradient must be looked at, too
_FIRST = 0.6  # of the budget for all heads alike; the rest for those whose interval straddles the cut
_ROUNDS = 4
_PROBE = 0.02  # of the examples, to see how long ablation takes


@dataclass(frozen=True)
class State:
    """What is known so far.

    Attributes:
        expected: g, ``[examples, heads]``.
        effects: a, ``[examples, heads]``; NaN where it has not been computed.
        size: ``[examples]``; the probabilities of inclusion are proportional to it.
        uniforms: ``[examples]``, each example's permanent random number.
        wanted: ``[heads]``, expected number of examples in each head's sample.
    """

    expected: Tensor
    effects: Tensor
    size: Tensor
    uniforms: Tensor
    wanted: Tensor

    @classmethod
    def empty(cls, expected: Tensor, seed: int) -> State:
        """Nothing is ablated yet; every example has its random number from the seed."""
        n, heads = expected.shape
        length = expected.norm(dim=1)
        size = length / length.mean() + _FLOOR if length.any() else torch.ones(n, dtype=torch.float64)
        uniforms = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return cls(
            expected, torch.full_like(expected, math.nan), size, uniforms, torch.zeros(heads, dtype=torch.float64)
        )

    def grown(self, wanted: Tensor) -> State:
        """A copy with larger samples, whose effects are still to be computed."""
        return replace(self, wanted=wanted, effects=self.effects.clone())

    def inclusion(self) -> Tensor:
        """``pi``, ``[examples, heads]``."""
        levels = {w: inclusion(self.size, w) for w in set(self.wanted.tolist())}
        return torch.stack([levels[w] for w in self.wanted.tolist()], dim=1)

    def each(self) -> Tensor:
        """``[examples, heads]``, of which the scores are the mean over examples."""
        return self.expected + (self.effects - self.expected).nan_to_num() / self.inclusion()


def sampled(problem: Problem, replay: Replay) -> Estimate:
    """Zero ablation of ``settings.examples`` examples per head (on average), or for ``settings.seconds``."""
    began = time.monotonic()
    gradients = gate_gradients(replace(problem, progress=lambda done, total, note="": None))
    # A divergence from the dense model grows with the square.
    expected = -gradients.effects if problem.surrogate is None else gradients.effects**2 / 2
    n = len(expected)
    state = State.empty(expected, problem.seed)
    budget = _budget(problem, replay, state, began) * problem.heads
    cut = problem.keep if (problem.keep or 0) < problem.heads else None  # all: there is no cut
    share = _FIRST if cut is not None else 1.0
    state = _look(problem, replay, state, torch.full_like(state.wanted, share * budget / problem.heads), 1)
    for number in range(2, _ROUNDS + 2):
        left = budget - state.wanted.sum().item()
        unsure = _straddling(problem, state, cut)
        if cut is None or left < unsure.sum() or not unsure.any():
            break
        more = left / (_ROUNDS + 2 - number) / unsure.sum()
        state = _look(
            problem, replay, state, torch.where(unsure, state.wanted + more, state.wanted).clamp(max=n), number
        )
    values, variance = estimate(state)
    effects, pi = state.effects.nan_to_num(), state.inclusion()
    squares = (effects**2 / pi).sum(0)
    largest = effects.abs().amax(0)
    looked = (~state.effects.isnan()).sum(0).double()
    details: dict[str, Any] = {
        "mean_loss": gradients.losses.mean().item(),
        "ablated": looked.mean().item(),
        "ablated_most": int(looked.max()),
        "sampling_stderr": rounded(variance.sqrt()),
        "carried_by": rounded((effects.abs() / pi).sum(0) ** 2 / squares.clamp(min=1e-300)),
        "estimated": f"gradients on all {n} examples, ablation on {looked.mean():.0f} of them per head",
        "replayed": replay.about,
    }
    # The examples' own share, two more of them counted: see `headprune.uncertainty`.
    own = (squares - n * values**2).clamp(min=0) + 2 * largest**2
    stderr = (variance + own / n**2).sqrt()
    if n == 1:
        details["stderr"] = "none from a single example"
    if (seconds := problem.settings.seconds) is not None:
        why = f"as many as fitted into {seconds:g} s here: on another machine, or a busier one, others"
        details["estimated"] = f"{details['estimated']}, {why}"
    return Estimate(values, stderr if n > 1 else torch.full_like(stderr, math.nan), n, details, state.each())


def estimate(state: State) -> tuple[Tensor, Tensor]:
    """Every head's score, and the variance of its difference from what all examples would give, ``[heads]`` each.

    The unbiased estimate of the variance is too small for a head whose rare large effects are not in the sample. So its
    variance is at least what the heads have on average, for the size of its gradients.
    """
    n = len(state.size)
    pi = state.inclusion()
    seen = ~state.effects.isnan()
    residual = (state.effects - state.expected).where(seen, torch.zeros((), dtype=torch.float64))
    values = state.each().mean(0)
    own = ((1 - pi) * (residual / pi) ** 2).sum(0) / n**2
    # The variance that a sample of this size would have if the residuals were as large as the gradients.
    scale = ((1 - pi) / pi * state.expected**2).sum(0) / n**2
    pooled = scale * own.sum() / scale.sum().clamp(min=1e-300)
    return values, torch.maximum(own, pooled)


def inclusion(size: Tensor, wanted: float) -> Tensor:
    """Probabilities proportional to ``size`` that sum to ``wanted``; those that would exceed 1 are 1."""
    n = len(size)
    if wanted >= n:
        return torch.ones_like(size)
    certain = torch.zeros(n, dtype=torch.bool)
    while True:
        share = (wanted - certain.sum()) * size / size[~certain].sum()
        over = ~certain & (share >= 1)
        if not over.any():
            return torch.where(certain, torch.ones_like(size), share)
        certain |= over


def _budget(problem: Problem, replay: Replay, state: State, began: float) -> float:
    """Examples to ablate per head: as many as were asked for, or as the time allows."""
    n = len(state.size)
    asked = problem.settings.examples
    wanted = float(min(asked, n)) if asked is not None else float(n)
    if problem.settings.seconds is None:
        return wanted

    def measure() -> Tensor:
        spent = time.monotonic() - began
        probe = max(1.0, _PROBE * n)
        started = time.monotonic()
        _look(problem, replay, state, torch.full_like(state.wanted, probe), 0)
        each = (time.monotonic() - started) / probe
        assert problem.settings.seconds is not None
        return torch.tensor([max((problem.settings.seconds - spent) / each, probe)], dtype=torch.float64)

    return min(wanted, float(problem.store.get("budget", measure)))


def _straddling(problem: Problem, state: State, keep: int | None) -> Tensor:
    """``[heads]``: those whose interval contains the score at the cut, so that more examples may change the plan."""
    values, variance = estimate(state)
    if keep is None or not 0 < keep < len(values):
        return torch.zeros(len(values), dtype=torch.bool)
    order = values.sort(descending=True).values
    cut = (order[keep - 1] + order[keep]) / 2
    quantile = float(student.ppf(0.975, max(1.0, state.wanted.min().item() - 1)))
    return ((values - cut).abs() <= quantile * variance.sqrt()) & (state.wanted < len(state.size))


def _look(problem: Problem, replay: Replay, state: State, wanted: Tensor, number: int) -> State:
    """Ablate the examples that larger samples add to the ones so far."""
    grown = state.grown(wanted)
    before, after = state.inclusion() if state.wanted.any() else torch.zeros_like(state.expected), grown.inclusion()
    uniforms = state.uniforms[:, None]
    new = (uniforms < after) & ~(uniforms < before)
    parts = {}
    jobs: list[tuple[int, Tensor, list[int]]] = []
    for i, (start, batch, size) in enumerate(problem.numbered()):
        part = new[start : start + size]
        if rows := part.any(1).nonzero().flatten().tolist():
            parts[f"round{number}-{i}"] = partial(_effects, problem, replay, batch, rows, part[rows].any(0))
            jobs.append((start, part, rows))
    costs = [float(part.sum()) for _, part, _ in jobs]
    done = [0.0, *accumulate(costs)]
    steps = max(int(done[-1]), 1)
    found = problem.store.share(
        f"round {number}", parts, costs, lambda jobs, total: problem.progress(int(done[jobs]), steps)
    )
    for (start, part, rows), effects in zip(jobs, found, strict=True):
        full = torch.zeros_like(part, dtype=torch.float64)
        full[rows] = effects
        grown.effects[start : start + len(part)][part] = full[part]
    problem.progress(int(done[-1]), steps, f"widest interval ±{_widest(grown):.2g}")
    return grown


def _effects(problem: Problem, replay: Replay, batch: object, rows: list[int], heads: Tensor) -> Tensor:
    """Effects ``[rows, heads]`` of removing each of some heads; zeros for the others."""
    effects = torch.zeros(len(rows), problem.heads, dtype=torch.float64)
    with replay.of(problem.rows.take(batch, rows), len(rows)) as recording:
        start = 0
        for layer in problem.layers:
            own = [start + h for h in range(layer.num_heads) if heads[start + h]]
            start += layer.num_heads
            if own:
                gates = torch.ones(len(own), problem.heads)
                gates[range(len(own)), own] = 0.0
                effects[:, own] = (recording.losses(gates) - recording.dense).T
    return effects


def _widest(state: State) -> float:
    return 1.96 * float(estimate(state)[1].max().sqrt())
