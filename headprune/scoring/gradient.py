"""Gradient scores: one forward and backward pass for every head at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from headprune.batches import Rows
from headprune.errors import HeadPruneError
from headprune.gates import RowsError, gated
from headprune.inputs import doubled, gathered, model_device
from headprune.memory import halving, is_out_of_memory
from headprune.offload import is_offloaded
from headprune.running import blocks_of, frozen, uncached, wrapped
from headprune.scoring.base import Batches, Estimate, NotFiniteError, Problem, Samples, method

_ASKED: ContextVar[bool] = ContextVar("checkpoints", default=False)  # whether memory demands them


@method("gradient", unit="loss (nats) per unit of gate, mean absolute value")
def gradient(problem: Problem) -> Estimate:
    """Michel et al. (2019): the mean over examples of |dL/dxi|, xi being a factor on the head's output (its gate), at 1.

    Equation (2) of "Are Sixteen Heads Really Better than One?" (NeurIPS 2019, arXiv:1905.10650):
    ``I_h = E_x |dL(x)/dxi_h|``, the absolute value taken per example. There is one gate per example,
    so one backward pass gives every example's own gradient and the result does not depend on the batch size.
    """
    samples = gate_gradients(problem)
    return Estimate.mean_of(Samples(samples.effects.abs(), samples.losses))


@method("signed-gradient", unit="loss (nats) that first order expects to be added by the removal")
def signed_gradient(problem: Problem) -> Estimate:
    """First-order Taylor expansion of ablation: the mean over examples of ``-dL/dxi``, signed.

    Molchanov et al. (2017, arXiv:1611.06440), equation (6), before the absolute value, for the gate of a head. Effects
    of opposite sign in different examples cancel, as they do in ablation; in `gradient` they add up.
    """
    if problem.surrogate is not None:
        raise HeadPruneError(
            "Without labels the loss has no gradient at the dense model, so its first order is nothing.",
            "Score by ablation, or by fisher, its second order.",
        )
    samples = gate_gradients(problem)
    return Estimate.mean_of(Samples(-samples.effects, samples.losses))


@method("fisher", unit="nats² per unit of gate², mean square of the gradient")
def fisher(problem: Problem) -> Estimate:
    """Diagonal of the empirical Fisher information of the gates: the mean over examples of ``(dL/dxi)^2``.

    Kwon et al. (2022, arXiv:2204.09656), equation (6) and section 4.1: half of it is the loss that second order expects
    to be added when the head goes. `HeadScores.matrix` is the whole matrix, ``mean_i g_ih g_ik``, so that pairs of heads that
    stand in for each other can be weighed (their section 4.2).
    """
    samples = gate_gradients(problem)
    squares = Estimate.mean_of(Samples(samples.effects**2, samples.losses))
    return replace(squares, matrix=samples.effects.T @ samples.effects / len(samples.effects))


def gate_gradients(problem: Problem) -> Samples:
    """Signed ``dL_i/dxi_h`` of every example ``i`` and head ``h``, with all gates at 1; L is `Problem.surrogate` if there is one."""
    if problem.surrogate is not None:
        problem = replace(problem, losses=problem.surrogate)
    with frozen(problem.model):
        problem = replace(problem, batches=separate(problem))

        def tables(batch: Any, size: int) -> Tensor:
            done = []
            for part in halving(range(size), size):
                with part as rows:
                    some = batch if len(rows) == size else problem.rows.take(batch, rows)
                    done.append(together_or_singly(problem, partial(_table_of_slopes, problem), some, len(rows)))
            return torch.cat(done)

        found = problem.parts(problem.batches, "gradient", _checkpointing_if_need_be(tables))
    return Samples(finite(found[:, :-1]), found[:, -1])


def _checkpointing_if_need_be(measure: Callable[[Any, int], Tensor]) -> Callable[[Any, int], Tensor]:
    """What ``measure(batch, size)`` finds; with activation checkpointing from the first example on for which memory runs out without."""
    needed = False

    def compute(batch: Any, size: int) -> Tensor:
        nonlocal needed
        if not needed:
            try:
                return measure(batch, size)
            except HeadPruneError as error:
                if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                    raise
                needed = True
        token = _ASKED.set(True)
        try:
            return measure(batch, size)
        finally:
            _ASKED.reset(token)

    return compute


def _table_of_slopes(problem: Problem, batch: Any, size: int) -> Tensor:
    """``[examples, heads + 1]``: the slopes of a batch, and the losses in the last column."""
    found = slopes(problem, batch, size)
    return torch.cat([found.effects, found.losses[:, None]], dim=1)


def together_or_singly(problem: Problem, measure: Callable[[Any, int], Tensor], batch: Any, size: int) -> Tensor:
    """What ``measure(batch, size)`` finds in a batch; in each example alone, if W_O sees rows that are not the examples'."""
    try:
        return measure(batch, size)
    except RowsError:
        if size == 1:
            raise
        return torch.cat([measure(row, 1) for row in problem.rows.singles(batch)])


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Gradient checkpointing, if the model has enabled it, memory demands it, or some of its weights are kept elsewhere.

    By itself it only happens in training mode, with dropout. A graph holds the weights that were loaded for it: with checkpoints only those
    of one block at a time.
    """
    layers: dict[str, nn.Module] = {}
    if _checkpoints(model) or is_offloaded(model):
        layers = blocks_of(model)

    def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return partial(checkpoint, original, use_reentrant=False)

    if not layers:
        yield
        return
    # To its end: what loaded a module's weights must unload them again. A block that runs twice would find its own keys in a cache.
    with wrapped(layers, around), set_checkpoint_early_stop(False), uncached(model):
        yield


def _checkpoints(model: nn.Module) -> bool:
    """Whether memory demands it, or the model was told to checkpoint, by either name that transformers has for it."""
    newer = hasattr(type(model), "is_activation_checkpointing")
    return _ASKED.get() or bool(
        getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False)
    )


def recomputing() -> bool:
    """Whether a backward pass is on, in which a checkpointed block runs once more: hooks that note something have noted it already."""
    return torch._C._current_graph_task_id() != -1


def separate(problem: Problem) -> Batches:
    """The problem's batches; each example alone, where the examples of a batch cannot have gates of their own."""
    return problem.batches if _independent(problem) else in_singles(problem)


def in_singles(problem: Problem) -> list[tuple[Any, int]]:
    """Every example as a batch of its own."""
    return [(row, 1) for batch, _ in problem.batches for row in problem.rows.singles(batch)]


def slopes(problem: Problem, batch: Any, size: int, at: float = 1.0) -> Samples:
    """``dL_i/dxi_h`` of one batch from `separate`, and its losses, with the value ``at`` for all gates."""
    gates = _gates(problem, size, at)
    with torch.enable_grad(), gated(problem.model, problem.layers, gates), checkpointed(problem.model):
        try:
            loss = problem.losses(batch)
        except NotFiniteError as error:  # name the example by its number among these batches
            raise NotFiniteError(problem, batch, error.row, error.value) from None
        return Samples(_rows(loss.sum(), gates), loss.detach().cpu().double())


def finite(effects: Tensor) -> Tensor:
    """``effects`` ``[examples, heads]``, checked.

    Raises:
        HeadPruneError: Some are not finite.
    """
    if not effects.isfinite().all():
        row = int((~effects.isfinite()).any(dim=1).nonzero()[0])
        raise HeadPruneError(f"The gradient of example {row} is not finite.", "Leave it out, or use --dtype float32.")
    return effects


def _gates(problem: Problem, size: int, at: float = 1.0) -> dict[str, Tensor]:
    shapes = {layer.name: (size, layer.num_heads) for layer in problem.layers}
    ones = doubled(
        torch.ones((), device=model_device(problem.model))
    )  # there: each layer's slopes would be copied by themselves
    return {name: ones.new_full(shape, at, requires_grad=True) for name, shape in shapes.items()}


def _rows(loss: Tensor, gates: dict[str, Tensor], *, again: bool = False) -> Tensor:
    """Derivative with respect to every gate, ``[batch, heads]``."""
    if not loss.requires_grad:
        raise HeadPruneError(
            "The loss does not depend on any head by what can be differentiated.", "Score by ablation."
        )
    gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True, retain_graph=again)
    pairs = zip(gradients, gates.values(), strict=True)
    return gathered([torch.zeros_like(gate) if g is None else g for g, gate in pairs], dim=1)


def _independent(problem: Problem) -> bool:
    """Whether each example's loss depends on its own gates alone, tried on a few examples.

    Not so behind a module that puts tokens before the batch.
    """
    # Where a model cuts padding out, rows are only uneven among examples of different length.
    batch, size = max(problem.batches, key=lambda pair: (_spread(problem.rows, pair[0]), pair[1]))
    if size == 1:
        batch, size = max(problem.batches, key=lambda pair: pair[1])
    if size == 1:
        return True
    few = unlike(problem.rows, batch, size)
    batch, size = problem.rows.take(batch, few), len(few)
    gates = _gates(problem, size)
    try:
        if not examples_first(problem, batch, size):
            return False
        with torch.enable_grad(), gated(problem.model, problem.layers, gates), checkpointed(problem.model):
            losses = problem.losses(batch)
            each = torch.stack([_rows(loss, gates, again=i + 1 < size) for i, loss in enumerate(losses)])
    except NotFiniteError:
        return True  # scoring itself names the example
    except RowsError:
        return False
    return not bool(each[~torch.eye(size, dtype=torch.bool)].any())


def examples_first(problem: Problem, batch: Any, size: int) -> bool:
    """Whether the rows that reach every gate are those of the examples, one after another.

    Compares how many rows two and three examples have; gates alone would not show it where the loss reads only one token.
    """
    two, three = (_shapes(problem, problem.rows.take(batch, index)) for index in ([0, 1 % size], [0, 1 % size, 0]))
    return len(two) == len(three) and all(
        a[1:] == b[1:] and 3 * a[0] == 2 * b[0] for a, b in zip(two, three, strict=True)
    )


def _shapes(problem: Problem, batch: Any) -> list[torch.Size]:
    """The shapes of the tensors that reach the gates in a dense pass, in their order."""
    found: list[torch.Size] = []

    def note(hidden: Tensor, gates: int) -> Tensor:
        found.append(hidden.shape)
        return torch.zeros_like(hidden)

    ones = {layer.name: torch.ones(layer.num_heads) for layer in problem.layers}
    with torch.no_grad(), gated(problem.model, problem.layers, ones, dict.fromkeys(ones, note)):
        problem.losses(batch)
    return found


def unlike(rows: Rows, batch: Any, size: int) -> list[int]:
    """Up to three examples of a batch, of different length: a model may cut padding out."""
    lengths = _lengths(rows, batch)
    if lengths is None:
        return list(range(min(size, 3)))
    order = lengths.argsort().tolist()
    return list(dict.fromkeys((order[-1], order[0], order[len(order) // 2])))


def _spread(rows: Rows, batch: Any) -> int:
    """By how many tokens the examples of a batch differ in length."""
    lengths = _lengths(rows, batch)
    return 0 if lengths is None else int(lengths.max() - lengths.min())


def _lengths(rows: Rows, batch: Any) -> Tensor | None:
    """The tokens of every example, ``[examples]``; None without a mask."""
    masks = rows.masks(batch)
    return (masks[0] != 0).sum(1) if masks else None
