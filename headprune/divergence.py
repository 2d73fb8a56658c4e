"""Divergence of a model's answers from the dense model's: a loss for data without labels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.batches import Rows, apparent_size, find_rows
from headprune.errors import HeadPruneError
from headprune.inputs import (
    ADDED,
    LABELS,
    call,
    doubled,
    inputs_of,
    is_encoder_decoder,
    model_device,
    move,
    tensors,
    widened,
)
from headprune.parallel import current
from headprune.running import quiet, wrapped

KNOWN, DRAWN = ADDED  # the dense model's logits, and labels drawn from them
IGNORED = -100
# Methods of transformers' models of sound that compute the number of frames from the number of samples.
_LENGTHS = ("_get_feat_extract_output_lengths", "_get_subsampling_output_length")


class Divergence:
    """Divergence from the dense model's answers, per example, in nats.

    The Kullback-Leibler divergence KL(dense || current) (Hinton et al. 2015) of the softmax over classes, or, for a
    head that gives several labels at once, the sum of that of each label's sigmoid. For a head that gives real numbers,
    the sum of their squared differences. It is averaged over tokens without padding.

    Args:
        model: Whose answers are compared.
        seed: For the labels that are drawn (`surrogate`).
        temperature: T, by which the logits are divided; the divergence is then multiplied by T squared, so that its
            gradient keeps its size (section 2.1 there). Squared differences have none.

    Attributes:
        rows: How examples lie in the batches; by the names of tensors, until it is set to the result of `headprune.batches.find_rows`.
    """

    def __init__(self, model: nn.Module, seed: int, temperature: float = 1.0) -> None:
        self.model, self.seed, self.temperature = model, seed, temperature
        self.rows = Rows()
        self.compares_numbers = False

    # Read when they are needed: transformers' models set their config's problem_type when they first see labels.

    @property
    def _several(self) -> bool:
        return gives_several(self.model)

    @property
    def _regresses(self) -> bool:
        return regresses(self.model)

    @property
    def about(self) -> str:
        """What the divergence is, for reports."""
        kind = "squared difference" if self.compares_numbers else "divergence (KL in nats)"
        return f"{kind} from the dense model's answers"

    def with_answers(self, batch: Mapping[str, Any], start: int) -> dict[str, Any]:
        """A batch with the dense model's answers, ``start`` being the number of its first example."""
        with torch.no_grad():
            known = self._logits(batch)
        batch = {**batch, KNOWN: known}
        self.compares_numbers |= self.are_numbers(known)
        if self.compares_numbers or self._several:
            return batch
        # An example's draws do not depend on its batch or padding.
        chances = doubled(known).softmax(-1).cumsum(-1)  # large for a language model: it stays on its device
        drawn = torch.zeros(chances.shape[:-1], dtype=torch.long, device=chances.device)
        for i, (rows, real) in enumerate(zip(chances, self._counted(batch, chances[..., 0]), strict=True)):
            numbers = np.random.default_rng((self.seed, start + i)).random(int(real.sum()))
            uniform, real = torch.from_numpy(numbers)[:, None].to(chances.device), real.to(chances.device)
            drawn[i][real] = (rows[real].reshape(-1, rows.shape[-1]) < uniform).sum(-1).clamp(max=rows.shape[-1] - 1)
        return {**batch, DRAWN: drawn.to(known.device)}

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``; differentiable under grad mode."""
        return self.between(batch[KNOWN], self._logits(batch), batch)

    def between(self, known: Tensor, now: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``, from the dense model's logits (`logits_of`) and this model's."""
        squared, numbers = 1.0, self.are_numbers(known)
        if not numbers and self.temperature != 1:
            known, now, squared = known / self.temperature, now / self.temperature, self.temperature**2
        if self._several:
            chance = known.sigmoid()
            each = F.binary_cross_entropy_with_logits(now, chance, reduction="none")
            each = (each - F.binary_cross_entropy_with_logits(known, chance, reduction="none")).sum(-1)
        elif numbers:
            each = ((now - known) ** 2).sum(-1)
        else:
            now, known = now.log_softmax(-1), known.log_softmax(-1)
            ruled = known == -math.inf  # what the dense model rules out weighs nothing
            if bool(ruled.any()):
                now, known = now.masked_fill(ruled, 0.0), known.masked_fill(ruled, 0.0)
            each = F.kl_div(now, known, reduction="none", log_target=True).sum(-1)
        return squared * self.mean(each, batch)

    def rounding(self, known: Tensor) -> float:
        """The divergence of equal answers by rounding: in float32, sums of logarithms are off by about 1e-7 nats."""
        return 1e-12 if self.are_numbers(known) or known.dtype == torch.float64 else 1e-7

    def surrogate(self, batch: Mapping[str, Any]) -> Tensor:
        """Cross-entropy against labels drawn from the dense model, ``[batch]``.

        The divergence has no gradient at the dense model, but the mean square of these gradients is its curvature there
        (the Fisher information).
        """
        if DRAWN not in batch:
            message = "Without labels this model's answers are compared as numbers, and that has no gradient at the dense model."
            raise HeadPruneError(message, "Score by ablation, shapley or integrated-gradients.")
        chosen = self._logits(batch).log_softmax(-1).gather(-1, batch[DRAWN][..., None])
        return self.mean(-chosen[..., 0], batch)

    def are_numbers(self, logits: Tensor) -> bool:
        """Whether answers are real numbers, which are compared by squared differences, not classes."""
        return self._regresses or (logits.shape[-1] == 1 and not self._several)

    def mean(self, each: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``: the mean of ``[batch, tokens]`` over each example's real tokens."""
        if each.ndim == 1:
            return each
        counted = self._counted(batch, each).to(each.device).flatten(1)
        return (each.flatten(1) * counted).sum(1) / counted.sum(1).clamp(min=1)

    def _counted(self, batch: Mapping[str, Any], values: Tensor) -> Tensor:
        """Which of ``[batch, tokens]`` (or ``[batch]``) are real."""
        tokens = values.shape[1] if values.ndim == 2 else 0
        real = real_tokens(self.model, batch, "decoder", self.rows, tokens)
        return torch.ones(values.shape, dtype=torch.bool) if real is None else real.cpu()

    def _logits(self, batch: Mapping[str, Any]) -> Tensor:
        """``[batch, (tokens,) classes]``, in float32 or wider."""
        if not isinstance(batch, Mapping):
            raise HeadPruneError("Batches without labels must be dicts.", "Give dicts that the model accepts.")
        hidden = (*ADDED, *(() if is_encoder_decoder(self.model) else LABELS))
        return logits_of(call(self.model, {k: v for k, v in batch.items() if k not in hidden}), batch)


def real_tokens(model: nn.Module, batch: Any, kind: str, rows: Rows, tokens: int) -> Tensor | None:
    """Mask of a layer's ``tokens`` queries without padding, ``[examples, tokens]``; None if the batch has no such mask.

    Args:
        batch: A dict, or a pair of one and its labels.
        kind: The layer's: ``"encoder"``, ``"decoder"`` or ``"cross"``.
        rows: How examples lie in the batch.
    """
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return None
    masks = [rows.table(batch, "attention_mask")]
    if kind != "encoder" and (is_encoder_decoder(model) or "decoder_input_ids" in batch):
        labels = batch.get("labels")
        masks = [
            rows.table(batch, "decoder_attention_mask"),
            labels != IGNORED if isinstance(labels, Tensor) and labels.ndim == 2 else None,
            *(masks if "decoder_input_ids" not in batch else ()),  # BART's decoder then reads the encoder's input
        ]
    for mask in masks:
        if mask is not None and mask.shape[1] == tokens:
            return mask != 0
    return None if masks[0] is None else _real_frames(model, masks[0], tokens)


def _real_frames(model: nn.Module, mask: Tensor, frames: int) -> Tensor | None:
    """Mask of frames that are no padding, ``[examples, frames]``, from the mask of the samples that convolutions pool.

    Uses the methods of transformers' models for their convolutions' lengths; None for a model without such methods.
    """
    named = ((m, name) for m in model.modules() for name in _LENGTHS if callable(getattr(m, name, None)))
    owner, name = next(named, (None, ""))
    if owner is None or not 0 < frames < mask.shape[1]:
        return None
    count = getattr(owner, name)
    # An adapter behind the layers makes fewer frames still.
    for more in ({"add_adapter": False}, {}) if "add_adapter" in inspect.signature(count).parameters else ({},):
        every, *real = (count(n, **more) for n in (torch.tensor(mask.shape[1]), *(mask != 0).sum(1).cpu()))
        if not isinstance(every, Tensor | int):
            return None
        together = int(every) // frames  # SEW's layers pool several frames into one
        if together and int(every) // together == frames:
            ends = torch.tensor([int(n) // together for n in real], device=mask.device)
            return torch.arange(frames, device=mask.device) < ends[:, None]
    return None


def gives_several(model: nn.Module) -> bool:
    """Whether a model's head gives several labels at once."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"


def regresses(model: nn.Module) -> bool:
    """Whether a model's head gives real numbers, one or several, by its config."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "regression"


def part_of(output: Any, name: str) -> Any:
    """The part ``name`` of a model's output: an attribute, or else an entry of a dict; None if there is none.

    The attribute counts first: in older transformers, ``output.loss = …`` sets no entry if there was no loss.
    """
    part = getattr(output, name, None)
    return output.get(name) if part is None and isinstance(output, Mapping) else part


def logits_in(output: Any) -> Tensor | None:
    """The logits of a model's output: the output itself, if it is a tensor."""
    logits = output if isinstance(output, Tensor) else part_of(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def logits_of(output: Any, batch: Any) -> Tensor:
    """The logits of a model's output, ``[batch, (tokens,) classes]``, in float32 or wider.

    For an answer's start and end ``[batch, 2, tokens]``: the tokens are the classes, without padding.
    """
    logits = logits_in(output)
    start, end = part_of(output, "start_logits"), part_of(output, "end_logits")
    if start is not None and end is not None:
        logits = torch.stack([start, end], dim=1)
        if isinstance(mask := batch.get("attention_mask") if isinstance(batch, Mapping) else None, Tensor):
            logits = logits.masked_fill(mask[:, None].to(logits.device) == 0, torch.finfo(logits.dtype).min)
    if not isinstance(logits, Tensor) or logits.ndim < 2:
        message = "The batches have no labels, and the model gives no logits to compare with the dense model's."
        raise HeadPruneError(message, 'Give dicts with "labels", or pairs (inputs, labels) together with loss_fn=.')
    if logits.ndim > 3:  # images: [batch, classes, height, width]
        logits = logits.movedim(1, -1).flatten(1, -2)
    return widened(logits)


# -- how near a changed model stays: what plans, and the steps of a repair, are compared by -----------

MOST = 1 << 28  # bytes of the dense model's answers
ENOUGH = 512  # examples: more hardly change which of two plans, or of two steps, is better
Context = Callable[[], AbstractContextManager[Any]]


def enough(model: nn.Module, batches: Sequence[Any], most: int = ENOUGH) -> Sequence[Any]:
    """The ``most`` evenly spaced examples; all, if there are no more, or if it is not known how examples lie in the batches."""
    try:
        with quiet(model, attributes=False), torch.no_grad():
            device = model_device(model)
            rows = find_rows(model, batches, lambda batch: tensors(call(model, move(inputs_of(model, batch), device))))
        every = [(index, row) for index, batch in enumerate(batches) for row in range(rows.size(batch))]
    except HeadPruneError:
        return batches
    return batches if len(every) <= most else rows.take_evenly(batches, every, most)


class DenseRuns:
    """The dense model's outputs on the same batches time and again.

    Where one layer gives the logits (a language model's output embeddings), what it reads is kept, up to `MOST` bytes of all
    batches: later it alone runs, and gives the same logits, which would take many times that.

    Args:
        model: It must be dense whenever it is asked.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._read: dict[int, Tensor] = {}

    def __call__(self, index: int, batch: Any) -> Any:
        """The model's output on the batch of this number, without gradients; the logits alone, if it `skips` the rest."""
        last, calls = self._last_layer, list[tuple[tuple[Any, ...], Tensor, int]]()

        def seen(name: str, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            output = run(*args, **kwargs)
            if isinstance(output, Tensor) and not output.is_inference():
                calls.append((args, output, output._version))
            return output

        with quiet(self.model, attributes=False), torch.no_grad():
            if last is not None and self.skips(index):
                return last(self._read[index])
            with wrapped({} if last is None else {"": last}, seen):
                output = call(self.model, inputs_of(self.model, batch))
        for args, logits, version in calls if len(calls) == 1 else ():
            # Chameleon writes into its logits: what the last layer gave is then not what the model answers.
            whole = logits_in(output) is logits and logits._version == version and len(args) == 1
            if whole and args[0].nbytes + sum(t.nbytes for t in self._read.values()) <= MOST:
                self._read[index] = args[0]
        return output

    def skips(self, index: int) -> bool:
        """Whether the last layer alone will run on the batch of this number."""
        return index in self._read

    @property
    def _last_layer(self) -> nn.Module | None:
        find = getattr(self.model, "get_output_embeddings", None)
        try:
            found = find() if callable(find) else None
        except (AttributeError, NotImplementedError):
            return None
        return found if isinstance(found, nn.Module) else None


class Fidelity:
    """Divergence from the dense model's answers on some examples.

    Every example contributes to it. Accuracy changes only if predictions flip, and most changes of the loss are as
    often a gain as a loss.

    Args:
        model: The dense model. Its answers are kept, if they are few enough; later changes do not affect these.
        batches: Never those that results are reported on.

    Attributes:
        known: Whether the dense model's answers are kept: there are logits, and they are few enough (a language model's are
            not, as a rule).
        about: What the divergence is, and of how many examples, for reports; "" if the model gives no logits.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self._divergence = model, Divergence(model, seed=0)
        device = model_device(model)
        self._batches = [move(batch, device) for batch in batches]
        # Of several ranks, each keeps the answers to its own batches, and compares later answers on these.
        self._ranks = current()
        self._answers: dict[int, Tensor] = {}
        self._dense = DenseRuns(model)
        self._rounding, self.about = 0.0, ""
        try:
            tasks = [partial(self._keep, i) for i in range(len(self._batches))]
            sizes, roundings, counts = zip(*self._ranks.share("dense answers", tasks), strict=True)
            self.known = 0 < sum(sizes) <= MOST
            self._rounding = max(roundings)
            self.about = f"{self._divergence.about}, on {sum(counts):,} examples"
        except HeadPruneError:  # no logits
            self.known = False
        if self.known:
            self._dense = DenseRuns(model)  # what it kept is not needed any more
        else:
            self._answers = {}

    def _keep(self, index: int) -> tuple[int, float, int]:
        """Keep the answers to a batch, unless there are too many; returns their bytes, `Divergence.rounding`, and the examples."""
        if sum(answers.nbytes for answers in self._answers.values()) > MOST:
            return 0, 0.0, apparent_size(self._batches[index])
        answers = self._answers[index] = logits_of(self._dense(index, self._batches[index]), self._batches[index])
        self._divergence.compares_numbers |= self._divergence.are_numbers(answers)
        return answers.nbytes, answers.new_tensor(self._divergence.rounding(answers)).item(), len(answers)

    def log_divergence(self, changed: Context) -> float:
        """Logarithm of the mean of `each`, at least that of rounding errors, so that these never decide between orders."""
        return math.log(max(float(self.each(changed).mean()), self._rounding))

    def each(self, changed: Context) -> Tensor:
        """Divergence of every example in the context that ``changed`` gives: ``[examples]`` in nats, float64; never below 0.

        Outside of it the model must be dense, unless the answers are ``known``. Without logits, the mean squared difference of
        all numbers of an example's answer. Takes one pass over the examples, and a second one with the dense model if neither
        its answers nor what its last layer reads is kept.
        """
        # Answers that are kept need no dense model: the change is made once, not for every batch.
        once, of_batch = (changed, nullcontext) if self.known else (nullcontext, changed)
        with once():
            tasks = [partial(self._distance, i, of_batch) for i in range(len(self._batches))]
            return torch.cat(self._ranks.share("divergence", tasks))

    def _distance(self, index: int, changed: Context) -> Tensor:
        batch = self._batches[index]
        dense: Any = self._answers.get(index)
        if dense is None:
            dense = self._dense(index, batch)
        with changed():
            now = self._run(batch)
        try:
            known = dense if self.known else logits_of(dense, batch)
            each = self._divergence.between(known, logits_of(now, batch), batch)
        except HeadPruneError:  # no logits
            # A model that chooses the length of its answer (of speech, say) may choose another one now.
            size = max(1, apparent_size(batch))
            parts = [
                (doubled(a) - doubled(b)).square().reshape(size, -1).mean(1)
                for a, b in zip(tensors(dense), tensors(now), strict=True)
                if a.is_floating_point() and a.ndim and len(a) % size == 0 and a.shape == b.shape
            ]
            each = torch.stack(parts or [torch.zeros(size)]).sum(0)
        return doubled(each.detach()).flatten().clamp(min=0).cpu()  # below 0 is rounding

    def _run(self, batch: Any) -> Any:
        with quiet(self.model, attributes=False), torch.no_grad():
            return call(self.model, inputs_of(self.model, batch))
