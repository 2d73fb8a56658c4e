"""The dense model's answers, one vector of logits an example: what all output projections together are fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headprune.divergence import gives_several, logits_of, part_of, regresses
from headprune.errors import HeadPruneError
from headprune.reference.mixtures import BLOCK, blocks
from headprune.reference.runner import Examples, Runner, unwatched

MOST_ROWS = 2048  # answers that are fitted to: the system is as wide
_MOST_DIRECTIONS = 4  # of an example's answer: a backward pass each
_APART = 0.25  # of the examples, set apart …
_MOST_APART = 128  # … and no more than these
_NOT = "The answers are not fitted as a whole"


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers to calibration examples.

    What is fitted of one vector of logits an example are the differences between classes (for a head that gives several labels
    at once, or numbers, the logits themselves). Where these are many, some directions among them, others for every example.
    Where there are mixtures of the examples (`headprune.reference.mixtures`), they take the examples' place.

    Attributes:
        runner: The model, and the examples that may be fitted to.
        apart: Those that were set apart, to try on what is fitted to the others.
        batches: What is fitted to.
        left_out: ``[examples]``, the number of the group of which an example is left out in cross-validation.
        known: The logits ``[examples, classes]`` by batch, float64.
        basis: The directions among classes that count, orthonormal ``[directions, classes]``.
        noise: Normal, ``[examples, directions, some]`` by batch: along how many directions an example is looked at.
        mixtures: How many mixtures of examples are among what is fitted to.
    """

    runner: Runner
    apart: Examples
    batches: Sequence[Any]
    left_out: Tensor
    known: Sequence[Tensor]
    basis: Tensor
    noise: Sequence[Tensor]
    mixtures: int

    @property
    def examples(self) -> int:
        """How many are fitted to."""
        return sum(map(len, self.known))

    @property
    def count(self) -> int:
        """Along how many directions an example's answer is looked at."""
        return self.noise[0].shape[2]

    def distance(self) -> float:
        """Root mean squared difference between this model's answers, as it is now, and the dense model's."""
        now = _answers(self.runner, self.batches)
        gap = (torch.cat(list(self.known)) - torch.cat(now)) @ self.basis.T
        return float(gap.square().mean().sqrt())


def dense_answers(runner: Runner, apart: Examples | None = None) -> DenseAnswers | str:
    """The answers of the model as it is now, which must be the dense one, to all examples but those apart; or why there are none."""
    rest = runner.without(apart) if apart else runner
    apart = apart or {}
    batches, left_out, mixtures = chosen(rest)
    try:
        known = _answers(rest, batches)
    except HeadPruneError as error:
        return f"{_NOT}: {error.args[0]}"
    if not all(bool(each.isfinite().all()) for each in known):
        return f"{_NOT}: the dense model's are not all finite."
    examples, classes = sum(map(len, known)), known[0].shape[1]
    basis = _basis(classes, gives_several(rest.model) or regresses(rest.model) or classes == 1)
    count = directions(len(basis), examples)
    # Drawn once, so that an example's directions do not depend on the batch that it is in.
    noise = torch.randn(examples, len(basis), count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noises = torch.split(noise, [len(each) for each in known])
    return DenseAnswers(rest, apart, batches, left_out, known, basis, noises, mixtures)


def answers_apart(runner: Runner) -> DenseAnswers | str:
    """The dense model's answers to the examples, a few set apart to try on them what was fitted to the others; or why there are none."""
    apart = set_apart(runner)
    return f"{_NOT}: there are too few examples to try that on." if apart is None else dense_answers(runner, apart)


def set_apart(runner: Runner) -> Examples | None:
    """The examples to try on what is fitted to the others; None where there are too few.

    Whole blocks are set apart, where there are mixtures: no example that stays may have a half in common with one set apart.
    """
    size = 2 * BLOCK if runner.mixtures else 1
    chunks = [
        [(index, row) for row in range(start, min(start + size, runner.rows.size(batch)))]
        for index, batch in enumerate(runner.batches)
        for start in range(0, runner.rows.size(batch), size)
    ]
    wanted = min(_MOST_APART, int(_APART * runner.examples))
    count = wanted // size if wanted >= size else int(2 * size <= runner.examples)
    apart = by_batch([one for chunk in spread_out(chunks, count) for one in chunk])
    held = sum(map(len, apart.values()))
    return None if held < 2 or 2 * held > runner.examples else apart


def directions(every: int, examples: int) -> int:
    """Along how many of all directions an answer is looked at, where there are so many examples."""
    return max(1, min(every, _MOST_DIRECTIONS, MOST_ROWS // examples))


def logits_by_example(runner: Runner, output: object, batch: Any) -> Tensor:
    """The logits ``[examples, classes]`` of a batch's output.

    Raises:
        HeadPruneError: An example has more than one answer.
    """
    logits = logits_of(output, batch if isinstance(batch, dict) else {})
    if logits.ndim != 2 or len(logits) != runner.rows.size(batch) or part_of(output, "start_logits") is not None:
        raise HeadPruneError("an example has more than one answer (one for every token, say).")
    return logits


def spread_out(those: Sequence[Any], count: int) -> list[Any]:
    """Some of them, from everywhere: batches often come sorted by length."""
    return [those[(2 * i + 1) * len(those) // (2 * count)] for i in range(count)]


def by_batch(found: Sequence[tuple[int, int]]) -> Examples:
    """From pairs (number of the batch, row)."""
    examples: Examples = {}
    for index, row in found:
        examples.setdefault(index, []).append(row)
    return examples


def chosen(runner: Runner) -> tuple[list[Any], Tensor, int]:
    """The batches to fit to, the group of each of their examples, and how many of these are mixtures."""
    most = max(1, MOST_ROWS // max(map(runner.rows.size, runner.batches)))
    count = min(len(runner.batches), most)
    # Batches often come sorted by length: some from everywhere.
    taken = [i * len(runner.batches) // count for i in range(count)]
    batches = [runner.batches[i] for i in taken]
    left_out = torch.arange(sum(map(runner.rows.size, batches)))
    mixed = [m for m in runner.mixtures if m.batch in taken and m.shift == 1]
    mixtures = sum(len(m.rows) for m in mixed)
    if 2 * mixtures < len(left_out):
        return batches, left_out, 0
    # Rows of a block are mixed with one another only.
    own = [blocks(runner.rows.size(runner.batches[m.batch]))[m.rows] + runner.first(m.batch) for m in mixed]
    return [m.inputs for m in mixed], torch.cat(own), mixtures


def _answers(runner: Runner, batches: Sequence[Any]) -> list[Tensor]:
    """Of the model as it is now, ``[examples, classes]`` by batch."""
    with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
        tasks = [partial(_logits, runner, batch) for batch in batches]
        found = runner.share("answers", tasks, batches)
    runner.count(sum(map(len, found)))
    return found


def _logits(runner: Runner, batch: Any) -> Tensor:
    return logits_by_example(runner, runner.run(batch, unwatched), batch).cpu().double()


def _basis(classes: int, every: bool) -> Tensor:
    """What counts of an answer, orthonormal ``[directions, classes]``: all of it, or the differences between classes."""
    whole = torch.eye(classes, dtype=torch.float64)
    if every:
        return whole
    found: Tensor = torch.linalg.eigh(whole - 1.0 / classes)[1][:, 1:].T
    return found
