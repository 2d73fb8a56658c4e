"""Head importance: one signature for all methods, one file for each family of methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.arguments import layers_for, listed, together
from headprune.attention import AttentionLayer, Layers
from headprune.batches import nonempty
from headprune.errors import HeadPruneError, import_files
from headprune.fingerprint import identity, versions
from headprune.inputs import check_weights, model_device
from headprune.losses import ExampleLoss, LossFn
from headprune.parallel import current
from headprune.running import Progress, no_progress, quiet
from headprune.scoring.base import DEFAULT_METHODS, METHODS, Estimate, Problem, Settings, method, method_and_settings
from headprune.scoring.replay import DisagreementError
from headprune.scoring.scores import HeadScores, agreement, load_scores, save_scores
from headprune.seeing.maps import on_device
from headprune.store import Store, traits
from headprune.uncertainty import split_half

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["DEFAULT_METHODS", "METHODS", "HeadScores", "Settings", "agreement", "load_scores", "method"]
__all__ += ["method_and_settings", "save_scores", "score"]

import_files(__name__, __path__)  # the methods


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
        model: Any model with attention; its mode and weights do not change.
        batches: Dicts that the model accepts, with labels, or pairs ``(inputs, labels)`` with ``loss_fn``.
        method: ``"gradient"``, ``"ablation"``, ``"random"``, or one registered with `headprune.scoring.method`; settings may
            follow, as in ``"shapley:permutations=64"``.
        loss_fn: ``loss_fn(output, labels)`` giving one loss per example, ``[batch]``. Not needed for dicts
            with labels: the loss is then the model's own, per example.
        distil: Use the KL divergence (nats) from the dense model's answers as the loss; needs neither labels nor ``loss_fn``.
        layers: From `headprune.find_attention`, to save the trace.
        seed: For methods that draw random numbers.
        settings: Time, memory, and options of single methods (`headprune.scoring.Settings`).
        work: A folder (or a store) for finished parts. After an interruption, the same call resumes from them and returns exactly
            the same scores. Parts of another model, data, seed or setting are never used. With a ``loss_fn`` nothing is kept:
            headprune cannot know whether two functions compute the same.
        accelerator: Shares the work among the processes of an `accelerate.Accelerator`.
        progress: Called with (steps done, steps in all, note).

    Returns:
        `HeadScores`: values and standard errors per layer, in float64. They do not depend on the batch size or on padding.

    Raises:
        HeadPruneError: An unknown method, no examples, labels missing, or a loss that is not finite.
    """
    name, settings = method_and_settings(method, settings)
    if seed < 0:
        raise HeadPruneError(f"The seed is {seed}.", "Give 0 or more.")
    check_weights(model)
    batches = listed(batches)
    with together(accelerator, model, batches):
        losses = ExampleLoss(model, loss_fn, distil=distil, seed=seed)
        examples = nonempty((on_device(model, batch) for batch in batches), "score on")
        with quiet(model), torch.enable_grad():
            examples = losses.prepare(examples)
        maskable = maskable_of(model, layers_for(model, layers, batches=examples))
        own = identity(model)  # before modules are swapped, which may rename parts of the model
        with quiet(model), torch.enable_grad():
            sized = [(batch, losses.rows.size(batch)) for batch in examples]
            problem = Problem(model, maskable, sized, losses, seed, progress or no_progress, settings, rows=losses.rows)
            if losses.distils:
                problem = replace(problem, surrogate=losses.divergence.surrogate)
            if work is not None and losses.loss_fn is None:
                store = work if isinstance(work, Store) else Store(Path(work))
                problem = replace(problem, store=store.keyed(name, own, *_facts(problem)))
            return _scores(name, problem, own, losses)


def maskable_of(model: nn.Module, layers: Layers) -> list[AttentionLayer]:
    """The layers whose heads can be masked."""
    maskable = [layer for layer in layers if layer.maskable]
    if not maskable:
        why = f": {layers[0].reason}" if layers else ""
        raise HeadPruneError(f"No head of {type(model).__name__} can be masked{why}.")
    return maskable


def _facts(problem: Problem) -> list[Any]:
    """Everything but the method and the model's weights that a problem's results depend on: the rest of the store's key."""
    settings = replace(problem.settings, max_memory=None)  # the available memory does not change the results
    dtypes = sorted({str(p.dtype) for p in problem.model.parameters()})
    distils = problem.surrogate is not None
    return [
        versions(), problem.seed, settings, list(problem.layers), distils, model_device(problem.model).type, dtypes,
        traits(problem.model), list(problem.batches),
    ]  # fmt: skip


def _scores(name: str, problem: Problem, own: str, losses: ExampleLoss) -> HeadScores:
    """Run a method and build its `HeadScores`; ``own`` is the model's fingerprint."""
    run, unit = METHODS[name].run, losses.unit(METHODS[name].unit)
    try:
        own_estimate = run(problem)
    except DisagreementError:
        own_estimate = run(replace(problem, replays=False, store=problem.store.keyed("without-replays")))
    estimate = current().first("estimate", lambda: own_estimate)  # ranks differ in memory and time: rank 0's counts
    if problem.settings.normalise:
        unit, estimate = f"{unit}, each layer divided by its L2 norm", _normalised(problem, estimate)
    details = {**estimate.details, "loss": losses.about}
    effects = None if estimate.effects is None else estimate.effects.cpu().double().numpy()
    if effects is not None and (reliability := split_half(effects, problem.seed)) is not None:
        details["reliability"] = reliability
    values, stderr = (problem.split(each.cpu().double()) for each in (estimate.values, estimate.stderr))
    matrix = None if estimate.matrix is None else estimate.matrix.cpu().double()
    return HeadScores(name, unit, values, stderr, estimate.examples, tuple(problem.layers), own, details, matrix)


def _normalised(problem: Problem, estimate: Estimate) -> Estimate:
    """Each layer's scores divided by their L2 norm (Michel et al. 2019, section 4.1)."""
    parts = problem.split(estimate.values).values()
    return estimate.divided(torch.cat([part.norm().clamp(min=1e-300).expand(len(part)) for part in parts]))
