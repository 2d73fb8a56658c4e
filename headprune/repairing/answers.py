"""The dense model's answers (one vector of logits per example), the target of the last repair step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.linalg import helmert
from torch import Tensor, nn

from headprune.divergence import gives_several, logits_of, part_of, regresses
from headprune.errors import HeadPruneError
from headprune.repairing.examples import block_of
from headprune.repairing.runner import Runner

SEVERAL = "an example has more than one answer (one for every token, say)."
MOST_ROWS = 2048  # in the linear system: examples times directions per answer
_MOST_DIRECTIONS = 4  # per answer; each takes a backward pass
NOT_FITTED = "The answers are not fitted as a whole"


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers to calibration examples.

    The fit's targets are the differences between an example's class logits (for a multi-label or regression head, the
    logits themselves). If there are many, each example is fitted along a few directions of its own. Mixtures of
    examples (`headprune.repairing.examples`) replace the examples, or are added to them if there is room for both.

    Attributes:
        runner: The model, and all examples.
        batches: The batches that are fitted to.
        folds: ``[examples]``, the fold of each.
        left_out: ``[examples]``, the number of the group with which an example is left out in cross-validation.
        known: The dense logits ``[examples, classes]`` by batch, float64.
        basis: Orthonormal directions among the classes that count, ``[directions, classes]``.
        noise: Normal, ``[examples, directions, some]`` by batch; ``some`` is the number of directions per example.
    """

    runner: Runner
    batches: Sequence[Any]
    folds: Tensor
    left_out: Tensor
    known: Sequence[Tensor]
    basis: Tensor
    noise: Sequence[Tensor]

    @property
    def examples(self) -> int:
        """Number of examples that are fitted to."""
        return sum(map(len, self.known))

    @property
    def count(self) -> int:
        """Number of directions along which an example's answer is fitted."""
        return self.noise[0].shape[2]


def dense_answers(runner: Runner) -> DenseAnswers | str:
    """The model's answers to its examples (to some of many), or why there are none. The model must be dense now."""
    mixed = [len(runner.batches) + i for i, each in enumerate(runner.mixtures) if each.shift == 1]
    own = list(range(len(runner.batches)))
    enough = 2 * sum(len(runner.numbers(i)) for i in mixed) >= runner.examples
    taken = _some(runner, mixed if enough else own)
    try:
        known = _answers(runner, taken)
        basis = _basis(runner.model, known[0].shape[1])
        # Mixtures and examples, if there is room for both.
        if enough and 2 * runner.examples * directions(len(basis), runner.examples) <= MOST_ROWS:
            known, taken = _answers(runner, own) + known, own + taken
    except HeadPruneError as error:
        return f"{NOT_FITTED}: {error.args[0]}"
    if not all(bool(each.isfinite().all()) for each in known):
        return f"{NOT_FITTED}: the dense model's are not all finite."
    batches, folds = [runner.everything[i] for i in taken], torch.cat([runner.fold(i) for i in taken])
    numbers, examples = torch.cat([runner.numbers(i) for i in taken]), sum(map(len, known))
    some = directions(len(basis), examples)
    # Drawn once, so that an example's directions do not depend on the batch that it is in.
    noise = torch.randn(examples, len(basis), some, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left_out = block_of(numbers) if enough else numbers  # mixtures join examples of one block only
    by_batch = torch.split(noise, [len(each) for each in known])
    return DenseAnswers(runner, batches, folds, left_out, known, basis, by_batch)


def _some(runner: Runner, every: Sequence[int]) -> list[int]:
    """Some of these batches of `Runner.everything`, evenly spaced, with about `MOST_ROWS` examples at most."""
    count = min(len(every), max(1, MOST_ROWS // max(len(runner.numbers(i)) for i in every)))
    # Evenly spaced, because batches often come sorted by length.
    return [every[i * len(every) // count] for i in range(count)]


def directions(every: int, examples: int) -> int:
    """Number of directions, of ``every``, along which each of so many examples' answers is fitted."""
    return max(1, min(every, _MOST_DIRECTIONS, MOST_ROWS // examples))


def logits_by_example(runner: Runner, output: object, batch: Any) -> Tensor:
    """The logits ``[examples, classes]`` of a batch's output.

    Raises:
        HeadPruneError: An example has more than one answer.
    """
    logits = logits_of(output, batch if isinstance(batch, dict) else {})
    if logits.ndim != 2 or len(logits) != runner.rows.size(batch) or part_of(output, "start_logits") is not None:
        raise HeadPruneError(SEVERAL)
    return logits


def _answers(runner: Runner, taken: Sequence[int]) -> list[Tensor]:
    """The current model's logits for batches of `Runner.everything`, ``[examples, classes]`` by batch."""
    batches = [runner.everything[i] for i in taken]
    with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
        tasks = [partial(_logits, runner, batch) for batch in batches]
        logits = runner.share("answers", tasks, batches)
    runner.count(sum(map(len, logits)))
    return logits


def _logits(runner: Runner, batch: Any) -> Tensor:
    return logits_by_example(runner, runner.run(batch), batch).cpu().double()


def _basis(model: nn.Module, classes: int) -> Tensor:
    """Orthonormal directions of an answer that count, ``[directions, classes]``: all, or class differences (Helmert's).

    Eigenvectors of equal eigenvalues would differ between machines, and random directions are drawn in this basis.
    """
    if gives_several(model) or regresses(model) or classes == 1:
        return torch.eye(classes, dtype=torch.float64)
    return torch.from_numpy(helmert(classes))
