"""Head importance: one signature for all methods, one file for each family of methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headprune.arguments import layers_for, listed, together
from headprune.attention import AttentionLayer
from headprune.batches import is_empty
from headprune.errors import HeadPruneError, first_line
from headprune.fingerprint import identity, versions
from headprune.inputs import check_weights, model_device, move, too_long, usable
from headprune.losses import ExampleLoss, LossFn
from headprune.memory import is_out_of_memory
from headprune.parallel import current
from headprune.running import Progress, quiet
from headprune.scoring import ablation, gradient, learned, path, random, shapley, statistics
from headprune.scoring.agreement import agreement
from headprune.scoring.base import (
    DEFAULT_METHODS,
    METHODS,
    Estimate,
    Method,
    NotFiniteError,
    Problem,
    method,
    method_named,
)
from headprune.scoring.reliability import split_half
from headprune.scoring.replay import DisagreementError
from headprune.scoring.scores import HeadScores, load_scores, save_scores
from headprune.scoring.settings import Settings, method_and_settings
from headprune.store import Store, traits

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DEFAULT_METHODS", "METHODS", "HeadScores", "Method", "Problem", "Settings", "ablation", "agreement", "gradient",
    "learned", "load_scores", "method", "method_named", "path", "random", "save_scores", "score", "shapley", "statistics",
]  # fmt: skip


def score(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "gradient",
    *,
    loss_fn: LossFn | None = None,
    distil: bool = False,
    layers: Sequence[AttentionLayer] | None = None,
    seed: int = 0,
    settings: Settings | None = None,
    work: Path | str | Store | None = None,
    accelerator: Accelerator | None = None,
    progress: Progress | None = None,
) -> HeadScores:
    """Score the importance of every maskable head.

    Args:
        model: Any model with attention; its mode and weights are left as they were.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``.
        method: ``"gradient"``, ``"ablation"``, ``"random"``, or one registered with `headprune.scoring.method`; settings may
            follow, as in ``"shapley:permutations=64"``.
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts
            with labels: the loss is then the model's own, per example.
        distil: Measure the divergence from the dense model's answers (KL, nats) instead of a loss. This is also what
            happens without labels and ``loss_fn``.
        layers: From `headprune.find_attention`, to save the trace.
        seed: For methods that draw.
        settings: Time, memory, and options of single methods (`headprune.scoring.Settings`).
        work: A folder (or a store) for finished parts: after an interruption, the same call continues there, and returns exactly
            what it would have returned without. Parts of any other model, data, seed or setting are never used. With a
            ``loss_fn`` nothing is kept: whether a function computes the same as another process's cannot be known.
        accelerator: To share the work out among the processes of an `accelerate.Accelerator`.
        progress: Called with (steps done, steps in all, note).

    Returns:
        `HeadScores`: values and standard errors per layer, in float64. They do not depend on the batch
        size or on padding.

    Raises:
        HeadPruneError: An unknown method, no examples, labels missing, or a loss that is not finite.
    """
    name, settings = method_and_settings(method, settings)
    chosen = method_named(name)
    if seed < 0:
        raise HeadPruneError(f"The seed is {seed}.", "Give 0 or more.")
    check_weights(model)
    batches = listed(batches)
    with together(accelerator, model, batches):
        return _scored(model, batches, chosen, loss_fn, distil, layers, seed, settings, work, progress)


def _scored(
    model: nn.Module, batches: Sequence[Any], chosen: Method, loss_fn: LossFn | None, distil: bool,
    layers: Sequence[AttentionLayer] | None, seed: int, settings: Settings, work: Path | str | Store | None,
    progress: Progress | None,
) -> HeadScores:  # fmt: skip
    """`score`, with its arguments checked."""
    losses = ExampleLoss(model, loss_fn, distil=distil, seed=seed)
    kept = _not_empty(model, batches)
    with quiet(model), torch.enable_grad():
        kept = losses.prepare(kept)
    maskable = maskable_of(model, layers_for(model, layers, batches=kept))
    own = identity(model)  # before anything is swapped: parts of the model may have other names then
    with quiet(model), torch.enable_grad():
        problem = _problem(model, maskable, kept, losses, seed, settings, progress)
        store = Store(Path(work)) if isinstance(work, str | Path) else work
        if store is not None and loss_fn is None:
            problem = replace(problem, store=store.keyed(chosen.name, own, *_facts(problem)))
        estimate = _estimate(chosen, problem)
    details = {**estimate.details, "loss": losses.about}
    # What rank 0 says of memory and time counts.
    estimate = current().first("estimate", lambda: replace(estimate, details=details))
    found = _scores(chosen, problem, estimate, own)
    return replace(found, unit=losses.unit(found.unit))


def _not_empty(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """The batches that hold examples, on the model's device."""
    with torch.inference_mode(False):
        every = [usable(move(batch, model_device(model))) for batch in listed(batches)]
    kept = [batch for batch in every if not is_empty(batch)]
    if not kept:
        raise HeadPruneError("There are no examples to score on.", "Give batches of at least one example.")
    return kept


def maskable_of(model: nn.Module, layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """The layers whose heads can be masked."""
    found = [layer for layer in layers if layer.maskable]
    if not found:
        why = f": {layers[0].reason}" if layers else ""
        raise HeadPruneError(f"No head of {type(model).__name__} can be masked{why}.")
    return found


def _problem(
    model: nn.Module, layers: Sequence[AttentionLayer], batches: Sequence[Any], losses: ExampleLoss, seed: int,
    settings: Settings, progress: Progress | None,
) -> Problem:  # fmt: skip
    problem = Problem(
        model,
        layers,
        [(batch, losses.rows.size(batch)) for batch in batches],
        lambda batch: _checked(problem, batch, losses),
        seed,
        progress or (lambda done, total, note="": None),
        settings,
        surrogate=losses.divergence.surrogate if losses.distils else None,
        rows=losses.rows,
    )
    return problem


def _facts(problem: Problem) -> list[Any]:
    """What a problem's results depend on, beside the method and the model's weights."""
    settings = replace(problem.settings, max_memory=None)  # how much memory there is changes no number
    dtypes = sorted({str(p.dtype) for p in problem.model.parameters()})
    distils = problem.surrogate is not None
    return [
        versions(), problem.seed, settings, list(problem.layers), distils, model_device(problem.model).type, dtypes,
        traits(problem.model), list(problem.batches),
    ]  # fmt: skip


def _estimate(chosen: Method, problem: Problem) -> Estimate:
    """What a method finds; by plain forwards, if replaying them turns out to give other losses."""
    try:
        return chosen.run(problem)
    except DisagreementError:
        problem.store.clear()
        return chosen.run(replace(problem, replays=False))


def _scores(chosen: Method, problem: Problem, estimate: Estimate, own: str) -> HeadScores:
    """An estimate by layer, for the model with the fingerprint ``own``."""
    layers, normalise = problem.layers, problem.settings.normalise
    if normalise:
        estimate = _normalised(problem, estimate)
    reliability = split_half(estimate.effects, problem.seed)
    return HeadScores(
        method=chosen.name,
        unit=chosen.unit + (", each layer divided by its L2 norm" if normalise else ""),
        values=problem.split(estimate.values.cpu().double()),
        stderr=problem.split(estimate.stderr.cpu().double()),
        examples=estimate.examples,
        layers=tuple(layers),
        model=own,
        details={**estimate.details, **({} if reliability is None else {"reliability": reliability})},
        matrix=None if estimate.matrix is None else estimate.matrix.cpu().double(),
    )


def _normalised(problem: Problem, estimate: Estimate) -> Estimate:
    """Each layer's scores divided by their L2 norm (Michel et al. 2019, section 4.1)."""
    parts = problem.split(estimate.values).values()
    norm = torch.cat([part.norm().clamp(min=1e-300).expand(len(part)) for part in parts])
    effects = None if estimate.effects is None else estimate.effects / norm
    return replace(estimate, values=estimate.values / norm, stderr=estimate.stderr / norm, effects=effects)


def _checked(problem: Problem, batch: Any, losses: ExampleLoss) -> Tensor:
    """A batch's losses.

    Raises:
        HeadPruneError: The model does not run on the batch.
        NotFiniteError: A loss is not finite.
    """
    try:
        found = losses(batch)
    except HeadPruneError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise HeadPruneError(
            f"The model does not run on {problem.place(batch)}: {type(error).__name__}: {first_line(error)}.",
            f"Check what these examples hold{too_long(problem.model, batch)}.",
        ) from error
    if not torch.isfinite(found).all():
        row = int((~torch.isfinite(found)).nonzero()[0])
        raise NotFiniteError(problem, batch, row, found[row].item())
    return found
