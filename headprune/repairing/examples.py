"""What repair is fitted to: the dense answers, and random projections of answers.

The gradients of the projections give the Fisher information. The answers (one vector of logits per example) are the
target of the last repair step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from scipy.linalg import helmert
from torch import Tensor, nn

from headprune.batches import Rows
from headprune.divergence import gives_several, logits_of, part_of, real_tokens, regresses
from headprune.errors import HeadPruneError
from headprune.inputs import tensors, widened

if TYPE_CHECKING:
    from headprune.repairing.runner import Runner

_MANY_CLASSES, _STARTS = 4096, 1 << 20  # as of a language model; starts of a token's run of random numbers


def probe_of(model: nn.Module, output: Any, batch: Any, first: int, rows: Rows, only: int | None = None) -> Tensor:
    """A random projection of the answers to a batch; its squared gradient is on average their Fisher information.

    Args:
        output: The model's output.
        first: The number of the batch's first example, which seeds the noise.
        rows: How examples lie in the batch.
        only: The only example whose answers are projected; by default all.
    """
    seeds = range(first, first + rows.size(batch))

    def drawn(like: Tensor) -> Tensor:
        mask = real_tokens(model, batch, "decoder", rows, like.shape[1]) if like.ndim > 2 else None
        random = noise(like, mask, seeds)
        if only is not None and len(random) == len(seeds):
            random[torch.arange(len(random), device=random.device) != only] = 0
        return random

    # A tensor without dimensions is a loss: it depends on the labels, and is not per example.
    logits, start = (part_of(output, name) for name in ("logits", "start_logits"))
    every = [t for t in tensors(output) if t.ndim and t.is_floating_point() and t.requires_grad]
    if not every and not any(isinstance(t, Tensor) and t.requires_grad for t in (logits, start)):
        message = "The model's answers do not depend on any head by what can be differentiated."
        raise HeadPruneError(message, 'Score by ablation, and search with strategy="one-shot".')
    if start is not None:  # an answer's start and end: the tokens are the classes, without padding
        chances = logits_of(output, batch).log_softmax(-1)
        draws = drawn(chances.movedim(1, -1)).movedim(-1, 1)
    elif isinstance(logits, Tensor) and gives_several(model):  # each label is a separate yes or no
        chance = widened(logits).detach().sigmoid()
        return (drawn(logits) * (chance * (1 - chance)).sqrt() * widened(logits)).sum()
    elif isinstance(logits, Tensor) and logits.shape[-1] > 1 and not regresses(model):
        chances = widened(logits).log_softmax(-1)
        draws = drawn(chances)
    else:
        chances = None
    if chances is not None:
        root = chances.detach().exp().sqrt()
        return (across(root, draws) * root * chances.masked_fill(root == 0, 0.0)).sum()
    return torch.stack([(drawn(widened(t)) * widened(t)).sum() for t in every]).sum()


def across(root: Tensor, draw: Tensor) -> Tensor:
    """Noise ``[..., classes]`` orthogonal to the square roots of the class probabilities, along which nothing changes.

    It is scaled to its average length. So with two classes only the sign is random.
    """
    rest = draw - root * (root * draw).sum(-1, keepdim=True)
    length = rest.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    classes = (draw != 0).sum(-1, keepdim=True)  # without padding
    return torch.mul(rest, (classes - 1).clamp(min=0).to(rest).sqrt() / length)


def noise(like: Tensor, mask: Tensor | None, seeds: Sequence[int]) -> Tensor:
    """Normal random numbers ``[examples, ...]``: the same for an example in any batch, 0 at padding."""
    if not like.ndim or len(like) != len(seeds):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(seeds[0])).to(like)
    many = like.ndim > 1 and like.shape[-1] > _MANY_CLASSES
    random = torch.zeros(like.shape, dtype=torch.float32, device=like.device if many else "cpu")
    places = None if mask is None else mask.cpu()  # all at once: every copy waits for the GPU
    for row, seed in enumerate(seeds):
        generator, real = torch.Generator().manual_seed(seed), ... if places is None else places[row]
        shape = like.shape[1:] if places is None else (int(places[row].sum()), *like.shape[2:])
        if many:
            at = torch.randint(_STARTS, shape[:-1], generator=generator).to(like.device)
            random[row][real] = _numbers(shape[-1], like.device).unfold(0, shape[-1], 1)[at]
        else:
            random[row][real] = torch.randn(shape, generator=generator, dtype=torch.float32)
    return random.to(like)


@lru_cache(maxsize=1)
def _numbers(classes: int, device: torch.device) -> Tensor:
    """Normal random numbers, from which every token of a language model takes a run with a random start.

    They come from the CPU, to be the same on every machine; one for each token and class would keep a GPU waiting.
    """
    numbers = torch.randn(classes + _STARTS - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return numbers.to(device)


# -- the dense answers ---------------------------------------------------------------------------------

SEVERAL = "an example has more than one answer (one for every token, say)."
MOST_ROWS = 2048  # in the linear system: calibration examples times directions per answer; others add as many at most
_MOST_DIRECTIONS = 4  # per answer; each takes a backward pass
NOT_FITTED = "The answers are not fitted as a whole"


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answers to calibration examples.

    The fit's targets are the differences between an example's class logits (for a multi-label or regression head, the
    logits themselves). If there are many, each example is fitted along a few directions of its own.

    Attributes:
        runners: Of each batch that is fitted to, the model and the examples that it is from; the first has the calibration's.
        batches: The batches that are fitted to.
        folds: ``[examples]``, the fold of each: of the calibration examples, or if others are fitted to as well, 0 for
            calibration examples and 1 for others.
        left_out: ``[examples]``, the number of the group with which an example is left out in cross-validation.
        known: The dense logits ``[examples, classes]`` by batch, float64.
        basis: Orthonormal directions among the classes that count, ``[directions, classes]``.
        noise: Normal, ``[examples, directions, some]`` by batch; ``some`` is the number of directions per example.
        others: Whether other examples are fitted to as well.
    """

    runners: Sequence[Runner]
    batches: Sequence[Any]
    folds: Tensor
    left_out: Tensor
    known: Sequence[Tensor]
    basis: Tensor
    noise: Sequence[Tensor]
    others: bool

    @property
    def examples(self) -> int:
        """Number of examples that are fitted to."""
        return sum(map(len, self.known))

    @property
    def count(self) -> int:
        """Number of directions along which an example's answer is fitted."""
        return self.noise[0].shape[2]

    def cut(self, most: int) -> DenseAnswers:
        """The same in batches of at most ``most`` examples."""
        runners: list[Runner] = []
        batches: list[Any] = []
        for runner, batch, own in zip(self.runners, self.batches, self.known, strict=True):
            cuts = range(0, len(own), most)
            runners += [runner] * len(cuts)
            whole = len(cuts) == 1
            batches += [batch if whole else runner.rows.take(batch, range(at, min(at + most, len(own)))) for at in cuts]
        known, noise = (
            [part for each in parts for part in torch.split(each, most)] for parts in (self.known, self.noise)
        )
        return replace(self, runners=runners, batches=batches, known=known, noise=noise)


def dense_answers(*runners: Runner) -> DenseAnswers | str:
    """The model's answers to its examples (to some of many), or why there are none. The model must be dense now.

    Args:
        runners: The model on the calibration examples, and on others that are fitted to as well.
    """
    try:
        taken = [each for runner in runners for each in _some(runner)]
        known = _answers(taken)
        basis = _basis(runners[0].model, known[0].shape[1])
    except HeadPruneError as error:
        return f"{NOT_FITTED}: {error.args[0]}"
    if not all(bool(each.isfinite().all()) for each in known):
        return f"{NOT_FITTED}: the dense model's are not all finite."
    if len({each.shape[1] for each in known}) > 1:
        return f"{NOT_FITTED}: they have different numbers of classes."
    first, groups, folds = runners[0], list[Tensor](), list[Tensor]()
    # Others add rows, and take no direction from an example.
    own_rows = sum(len(each) for (runner, _), each in zip(taken, known, strict=True) if runner is first)
    some = directions(len(basis), own_rows)
    for runner, i in taken:
        numbers, part = runner.numbers(i), runners.index(runner)
        folds.append(torch.full_like(numbers, part) if len(runners) > 1 else runner.fold(i))
        own = runner.blocks[numbers] if runner.mixtures else numbers  # mixtures join examples of one block only
        groups.append(own + part * first.examples)
    examples = sum(map(len, known))
    # Drawn once, so that an example's directions do not depend on the batch that it is in.
    noise = torch.randn(examples, len(basis), some, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_batch, fold, group = torch.split(noise, [len(each) for each in known]), torch.cat(folds), torch.cat(groups)
    of_batch, batches = zip(*((runner, runner.everything[i]) for runner, i in taken), strict=True)
    return DenseAnswers(of_batch, batches, fold, group, known, basis, by_batch, others=len(runners) > 1)


def _some(runner: Runner) -> list[tuple[Runner, int]]:
    """Batches of `Runner.everything` that have every example once, as a mixture if there are any; of many, about `MOST_ROWS` examples.

    Of few examples, they beside their mixtures: more answers teach more than more directions of each. Of a later draw, all mixtures.
    """
    mixtures = [len(runner.own) + i for i, each in enumerate(runner.mixtures) if each.shift == 1 or runner.draw]
    every = mixtures or runner.own
    count = min(len(every), max(1, MOST_ROWS // max(map(runner.size, every))))
    beside = runner.own if mixtures and not runner.mixed_only else ()
    # Evenly spaced, because batches often come sorted by length.
    return [(runner, i) for i in (*beside, *(every[i * len(every) // count] for i in range(count)))]


def directions(every: int, examples: int) -> int:
    """Number of directions, of ``every``, along which each of so many examples' answers is fitted."""
    return max(1, min(every, _MOST_DIRECTIONS, MOST_ROWS // examples))


def logits_by_example(runner: Runner, output: object, batch: Any) -> Tensor:
    """The logits ``[examples, classes]`` of a batch's output.

    Raises:
        HeadPruneError: An example has more than one answer.
    """
    logits = logits_of(output, batch)
    if logits.ndim != 2 or len(logits) != runner.rows.size(batch) or part_of(output, "start_logits") is not None:
        raise HeadPruneError(SEVERAL)
    return logits


def _answers(taken: Sequence[tuple[Runner, int]]) -> list[Tensor]:
    """The dense model's logits for batches of `Runner.everything`, ``[examples, classes]`` by batch."""
    for runner in dict.fromkeys(runner for runner, _ in taken):
        new = [i for own, i in taken if own is runner and i not in runner.dense_answers]
        batches = [runner.everything[i] for i in new]
        with torch.inference_mode(False), torch.no_grad(), runner.deterministic_eval():
            logits = runner.share("answers", [partial(_logits, runner, batch) for batch in batches], batches)
        runner.count(sum(map(len, logits)))
        runner.dense_answers |= dict(zip(new, logits, strict=True))
    return [runner.dense_answers[i] for runner, i in taken]


def _logits(runner: Runner, batch: Any) -> Tensor:
    return logits_by_example(runner, runner.run(batch), batch).cpu().double()


def _basis(model: nn.Module, classes: int) -> Tensor:
    """Orthonormal directions of an answer that count, ``[directions, classes]``: all, or class differences (Helmert's).

    Eigenvectors of equal eigenvalues would differ between machines, and random directions are drawn in this basis.
    """
    if gives_several(model) or regresses(model) or classes == 1:
        return torch.eye(classes, dtype=torch.float64)
    return torch.from_numpy(helmert(classes))
