"""Learned scores: gates trained on frozen weights to select the heads to keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headprune.errors import HeadPruneError
from headprune.parallel import current
from headprune.running import checkpointed, frozen
from headprune.scoring.base import Estimate, Problem, method
from headprune.scoring.gradient import separate

_STEPS, _EPOCHS = 200, 2  # the larger of the two
_NO_ERROR = "none from one training run of the gates"
_PART = 25  # steps between stored states
_RATE, _MEAN, _SQUARE = 0.1, 0.9, 0.98  # Adam's learning rate and betas; all heads share one second moment
_FASTEST = 1.0  # the largest change of a parameter in a step

_LOW, _HIGH, _TEMPERATURE = -0.1, 1.1, 2 / 3  # of the hard concrete distribution
_OPEN = 3.5  # initial log-odds

_HOT, _COLD = 1.0, 0.1  # first and last temperature of the relaxed draw

Draw = Callable[[Tensor, int, torch.Generator, float], Tensor]
Penalty = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@method("l0", unit="log-odds that the trained gate is open", settings=("keep", "steps", "sparsity"))
def l0(problem: Problem) -> Estimate:
    """Voita et al. (2019): random gates trained to close where the loss allows; the log-odds of staying open.

    "Analyzing Multi-Head Self-Attention" (ACL 2019, arXiv:1905.09418): hard concrete gates (Louizos et al. 2018,
    arXiv:1712.01312, equations 10 to 12), drawn for each example, minimise ``L + price * C`` where
    ``C = sum_h P(gate_h > 0)`` is the expected number of open heads. The model's weights do not change.

    The price is ``settings.sparsity`` if that is given without ``settings.keep``. Otherwise C has a target, which falls
    to ``keep`` (half of the heads by default) in the first half of the steps, and the price is its Lagrange multiplier:
    to first order, the price at which a step reaches the target. ``details["open"]`` is the final C.
    """
    heads, keep = problem.heads, _keep(problem)
    fixed = problem.settings.sparsity if problem.keep is None else None
    begin = heads / (1 + math.exp(-_OPEN))

    def draw(odds: Tensor, size: int, generator: torch.Generator, done: float) -> Tensor:
        noise = torch.rand(size, heads, generator=generator, dtype=torch.float64).logit(1e-6)
        alpha = odds + _TEMPERATURE * math.log(-_LOW / _HIGH)  # log alpha, from equation 12
        return (((noise + alpha) / _TEMPERATURE).sigmoid() * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def penalty(odds: Tensor, slope: Tensor, speed: Tensor, done: float) -> Tensor:
        opened = odds.sigmoid()
        change = opened * (1 - opened)
        if fixed is not None:
            return fixed * change
        excess = opened.sum() - (begin + (keep - begin) * min(1.0, 2 * done))
        return change * (excess - speed * change @ slope) / (speed * change @ change).clamp(min=1e-30)

    odds, steps = _train(problem, "l0", _OPEN, draw, penalty)
    return Estimate.without_error(odds, _NO_ERROR, problem.examples, steps=steps, open=odds.sigmoid().sum().item())


@method("dsp", unit="log weight of the head in the draw of those that stay", settings=("keep", "steps"))
def dsp(problem: Problem) -> Estimate:
    """Li et al. (2021): exactly K heads drawn without replacement by weights that are trained; the log weights.

    "Differentiable Subset Pruning of Transformer Heads" (TACL 2021, arXiv:2108.04657), K being ``settings.keep`` or
    half of the heads: the K largest of ``weight + Gumbel noise`` stay, and the gradient is that of the relaxed draw
    (Xie and Ermon 2019, arXiv:1901.10517), whose temperature falls from 1 to 0.1. A straight-through estimator: the
    model always runs with exactly K heads, drawn for each example. The model's weights do not change.
    """
    heads, keep = problem.heads, _keep(problem)

    def draw(weights: Tensor, size: int, generator: torch.Generator, done: float) -> Tensor:
        keys = weights - torch.empty(size, heads, dtype=torch.float64).exponential_(generator=generator).log()
        soft = _relaxed(keys, keep, _HOT * (_COLD / _HOT) ** done)
        return torch.zeros_like(keys).scatter(1, keys.topk(keep).indices, 1.0) + (soft - soft.detach())

    weights, steps = _train(problem, "dsp", 0.0, draw, lambda weights, slope, speed, done: torch.zeros_like(slope))
    return Estimate.without_error(weights, _NO_ERROR, problem.examples, steps=steps, keep=keep)


def _keep(problem: Problem) -> int:
    """The target number of heads: by default half of them."""
    return max(1, problem.heads // 2) if problem.keep is None else problem.keep


def _relaxed(keys: Tensor, keep: int, temperature: float) -> Tensor:
    """A relaxed 0/1 vector of the ``keep`` largest keys: the sum of ``keep`` softmaxes, each excluding the earlier ones' choices."""
    total = torch.zeros_like(keys)
    for _ in range(keep):
        taken = (keys / temperature).softmax(dim=-1)
        total, keys = total + taken, keys + (1 - taken).clamp(min=1e-12).log()
    return total


def _train(problem: Problem, name: str, start: float, draw: Draw, penalty: Penalty) -> tuple[Tensor, int]:
    """Train one parameter per head by Adam, with one step size for all heads, so that important heads move further.

    Args:
        problem: Gives the losses to minimise.
        name: Prefix of the keys in the store.
        start: The first value of all parameters.
        draw: (parameters, size, generator, share of steps done) -> gates ``[size, heads]``. The generator depends only on
            the seed and the step, so a resumed training gives exactly the same result.
        penalty: (parameters, gradient of the loss, step size, share of steps done) -> the penalty's gradient: the
            parameters move by ``-speed * (slope + penalty)``.

    Returns:
        Parameters ``[heads]``, and the number of steps.
    """
    state = torch.zeros(3, problem.heads, dtype=torch.float64)  # parameters, running means of slope and square
    state[0] = start
    with frozen(problem.model):
        batches = separate(problem)
        steps = problem.settings.steps or max(_STEPS, _EPOCHS * len(batches))

        def gradient(parameters: Tensor, step: int) -> Tensor:
            """The gradient of the mean loss over the data, estimated from one batch."""
            batch, size = batches[step % len(batches)]
            generator = torch.Generator().manual_seed((problem.seed * 2**24 + step) % 2**63)
            parameters = parameters.clone().requires_grad_()
            with torch.enable_grad():
                gates = problem.split(draw(parameters, size, generator, step / steps))
                with problem.gated(gates), checkpointed(problem.model):
                    loss = problem.losses(batch).sum() * (len(batches) / problem.examples)
                    (slope,) = torch.autograd.grad(loss, parameters)
            if not slope.isfinite().all():
                message = f"The gradient of batch {step % len(batches)} is not finite."
                raise HeadPruneError(message, "Use --dtype float32.")
            return slope

        def part(state: Tensor, first: int) -> Tensor:
            parameters, mean, square = state
            for step in range(first, min(first + _PART, steps)):
                slope = gradient(parameters, step)
                mean = mean.lerp(slope, 1 - _MEAN)
                square = square.lerp((slope**2).mean(), 1 - _SQUARE)
                slope = mean / (1 - _MEAN ** (step + 1))  # bias correction: both start at 0
                speed = _RATE / ((square / (1 - _SQUARE ** (step + 1))).sqrt() + 1e-12)
                move = speed * (slope + penalty(parameters, slope, speed, step / steps))
                parameters = parameters - move.clamp(-_FASTEST, _FASTEST)
                problem.progress(step + 1, steps)
            return torch.stack([parameters, mean, square])

        for first in range(0, steps, _PART):
            # Steps are sequential: one rank trains, and the others wait.
            train = partial(current().first, f"training {name}", partial(part, state, first))
            state = problem.store.get(f"{name}-{first}", train)
    return state[0], steps
