"""Gradient scores: one forward and backward pass scores all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headprune.batches import halving, is_out_of_memory
from headprune.errors import HeadPruneError
from headprune.gates import RowsError
from headprune.inputs import doubled, gathered, model_device
from headprune.running import checkpointed, frozen
from headprune.scoring.base import Batches, Estimate, NotFiniteError, Problem, method


@method("gradient", unit="loss (nats) per unit of gate, mean absolute value")
def gradient(problem: Problem) -> Estimate:
    """Michel et al. (2019): the mean over examples of |dL/dxi|, xi being a factor on the head's output (its gate), at 1.

    Equation (2) of "Are Sixteen Heads Really Better than One?" (NeurIPS 2019, arXiv:1905.10650):
    ``I_h = E_x |dL(x)/dxi_h|``, the absolute value taken per example. There is one gate per example,
    so one backward pass gives every example's own gradient and the result does not depend on the batch size.
    """
    slopes, losses = gate_gradients(problem)
    return Estimate.mean_of(slopes.abs(), losses)


@method("signed-gradient", unit="loss (nats) that first order expects to be added by the removal")
def signed_gradient(problem: Problem) -> Estimate:
    """First-order Taylor expansion of ablation: the mean over examples of ``-dL/dxi``, signed.

    Molchanov et al. (2017, arXiv:1611.06440), equation (6), before the absolute value, for the gate of a head. Effects
    of opposite sign in different examples cancel, as they do in ablation; in `gradient` they add up.
    """
    if problem.surrogate is not None:
        message = "Without labels the loss has no gradient at the dense model, so its first order is nothing."
        raise HeadPruneError(message, "Score by ablation, or by fisher, its second order.")
    slopes, losses = gate_gradients(problem)
    return Estimate.mean_of(-slopes, losses)


@method("fisher", unit="nats² per unit of gate², mean square of the gradient")
def fisher(problem: Problem) -> Estimate:
    """Diagonal of the empirical Fisher information of the gates: the mean over examples of ``(dL/dxi)^2``.

    Kwon et al. (2022, arXiv:2204.09656), equation (6) and section 4.1: half of it is the second-order estimate of the loss
    that removing the head adds. `HeadScores.matrix` is the whole matrix, ``mean_i g_ih g_ik``, which shows pairs of heads
    that can replace each other (their section 4.2).
    """
    slopes, losses = gate_gradients(problem)
    return replace(Estimate.mean_of(slopes**2, losses), matrix=slopes.T @ slopes / len(slopes))


def gate_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """The gradient of every example's loss by every head's gate, with all gates at 1, and every example's loss.

    Returns:
        ``dL_i/dxi_h`` ``[examples, heads]``, signed, and the loss of every example ``[examples]``. If `Problem.surrogate` is
        set, L is that, and the losses are 0: the dense model does not diverge from itself.
    """
    if problem.surrogate is not None:
        problem = replace(problem, loss=problem.surrogate)
    with frozen(problem.model):
        problem = replace(problem, batches=separate(problem))

        def compute(first: int, batch: Any, size: int) -> Tensor:
            nonlocal problem
            try:
                return _slopes_in_parts(problem, batch, size)
            except HeadPruneError as error:
                if problem.checkpoints or error.__cause__ is None or not is_out_of_memory(error.__cause__):
                    raise
            problem = replace(problem, checkpoints=True)  # for all batches from here on
            return _slopes_in_parts(problem, batch, size)

        table = torch.cat(problem.parts("gradient", compute, problem.progress))
    return finite(table[:, :-1]), table[:, -1] * (problem.surrogate is None)


def slopes(problem: Problem, batch: Any, size: int, at: float = 1.0) -> Tensor:
    """Gate gradients ``dL_i/dxi_h`` of one batch from `separate`, with all gates at ``at``; the losses in the last column.

    Returns:
        ``[size, heads + 1]``, float64, on the CPU.
    """
    gates = _gates(problem, size, at)
    with torch.enable_grad(), problem.gated(gates), checkpointed(problem.model, problem.checkpoints):
        loss = problem.losses(batch)
        return torch.cat([_gate_slopes(loss.sum(), gates), loss.detach().cpu().double()[:, None]], dim=1)


def finite(effects: Tensor) -> Tensor:
    """Return ``effects`` ``[examples, heads]`` if all are finite.

    Raises:
        HeadPruneError: An effect is not finite.
    """
    if len(wrong := (~effects.isfinite()).any(dim=1).nonzero()):
        message = f"The gradient of example {int(wrong[0])} is not finite."
        raise HeadPruneError(message, "Leave it out, or use --dtype float32.")
    return effects


def whole_or_singly(problem: Problem, measure: Callable[[Any, int], Tensor], batch: Any, size: int) -> Tensor:
    """``measure(batch, size)``; or on each example separately, if W_O's input rows do not split by example."""
    try:
        return measure(batch, size)
    except RowsError:
        if size == 1:
            raise
        return torch.cat([measure(row, 1) for row in problem.rows.singles(batch)])


def _slopes_in_parts(problem: Problem, batch: Any, size: int) -> Tensor:
    """`slopes` of a batch; halves the batch when memory runs out."""
    tables = []
    for part in halving(range(size), size):
        with part as rows:
            some = batch if len(rows) == size else problem.rows.take(batch, rows)
            tables.append(whole_or_singly(problem, partial(slopes, problem), some, len(rows)))
    return torch.cat(tables)


def _gates(problem: Problem, size: int, at: float = 1.0) -> dict[str, Tensor]:
    """Gates ``[size, num_heads]`` of every layer, all at one value; on the model's device, so that one copy fetches all gradients."""
    one = doubled(torch.ones((), device=model_device(problem.model)))
    return {layer.name: one.new_full((size, layer.num_heads), at, requires_grad=True) for layer in problem.layers}


def _gate_slopes(loss: Tensor, gates: dict[str, Tensor], *, again: bool = False) -> Tensor:
    """The gradient of a loss with respect to every gate, ``[batch, heads]``."""
    if not loss.requires_grad:
        message = "The loss does not depend on any head by what can be differentiated."
        raise HeadPruneError(message, "Score by ablation.")
    gradients = torch.autograd.grad(
        loss, [*gates.values()], allow_unused=True, retain_graph=again, materialize_grads=True
    )
    return gathered(gradients, dim=1)


# -- batches whose examples have gates of their own ----------------------------------------------------


def separate(problem: Problem) -> Batches:
    """The problem's batches; split into single examples if examples of one batch cannot have gates of their own."""
    return problem.batches if independent(problem) else in_singles(problem)


def in_singles(problem: Problem) -> list[tuple[Any, int]]:
    """The problem's batches, split into batches of one example."""
    return [(row, 1) for batch, _ in problem.batches for row in problem.rows.singles(batch)]


def independent(problem: Problem) -> bool:
    """Whether each example's loss depends only on its own gates, tested on a few examples.

    It does not, for instance, behind a module that moves tokens in front of the batch dimension.
    """

    def rank(pair: tuple[Any, int]) -> tuple[int, int]:
        lengths = problem.rows.lengths(pair[0])
        return int(lengths.max() - lengths.min()), pair[1]

    # A model that removes padding has uneven rows only if examples differ in length.
    batch, size = max(problem.batches, key=rank)
    if size == 1:
        return True
    few = problem.rows.unlike(batch)
    batch, size = problem.rows.take(batch, few), len(few)
    gates = _gates(problem, size)
    try:
        if not problem.rows.lead(batch, partial(gate_shapes, problem)):
            return False
        with torch.enable_grad(), problem.gated(gates), checkpointed(problem.model, problem.checkpoints):
            losses = problem.losses(batch)
            each = torch.stack([_gate_slopes(loss, gates, again=i + 1 < size) for i, loss in enumerate(losses)])
    except NotFiniteError:
        return True  # scoring itself names the example
    except RowsError:
        return False
    return not bool(each[~torch.eye(size, dtype=torch.bool)].any())


def gate_shapes(problem: Problem, batch: Any) -> list[torch.Size]:
    """The shapes of the tensors that reach the gates in a dense pass, in order."""
    shapes: list[torch.Size] = []

    def note(hidden: Tensor, gates: int) -> Tensor:
        shapes.append(hidden.shape)
        return torch.zeros_like(hidden)

    ones = {layer.name: torch.ones(layer.num_heads) for layer in problem.layers}
    with torch.no_grad(), problem.gated(ones, dict.fromkeys(ones, note)):
        problem.losses(batch)
    return shapes
