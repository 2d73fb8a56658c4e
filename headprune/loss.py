"""The loss of each example: what scores are derivatives and differences of.

transformers' models return one mean over the batch (and over all of its tokens). Scores need every
example's own loss, so it is computed from the logits here, and checked once against the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.divergence import ADDED, IGNORED, LABELS, Divergence
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import call, tensors

_CHECKED = 4  # batches of which the loss of some examples is compared with the model's own

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a model made of a batch.

    Attributes:
        loss: ``[batch]``, in nats; the mean over an example's labelled tokens.
        tokens: ``[batch]``, labelled tokens (1 for a label per example, 2 for an answer's start and end).
        predictions: Per example, the predicted classes ``[tokens]`` (values for regression).
        targets: Per example, the labels ``[tokens]``.
    """

    loss: Tensor
    tokens: Tensor
    predictions: list[Tensor]
    targets: list[Tensor]


class ExampleLoss:
    """Per-example losses of one model.

    Args:
        model: A transformers model, or any module whose output has ``logits`` (or is the logits).
        loss_fn: ``loss_fn(output, labels)`` giving ``[batch]``; batches are then pairs ``(inputs, labels)``.
        distil: Whether the loss is the divergence from the dense model's answers. Also so where there are no labels.
        seed: For the labels that are drawn from the dense model, to differentiate (`Divergence.surrogate`).

    Attributes:
        about: What the loss is, for reports.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None, *, distil: bool = False, seed: int = 0) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.divergence = Divergence(model, seed)
        self.distils = distil
        self._one_by_one = False

    @property
    def about(self) -> str:
        if self.loss_fn is not None:
            return "the given function"
        return self.divergence.about if self.distils else "the model's own"

    def prepare(self, batches: Sequence[Any]) -> list[Any]:
        """Check against the model's own loss; a model with a loss of its own gets batches of one.

        Call this first, outside of any gate. Returns the batches to use.
        """
        if self.loss_fn is not None:
            if self.distils:
                raise HeadPruneError("Both a loss_fn and distil were given.", "Choose one.")
            return list(batches)
        batches = [_without_nothing(batch) for batch in batches]
        labelled = [any(name in batch for name in LABELS) for batch in batches]
        if any(labelled) and not all(labelled) and not self.distils:
            raise HeadPruneError(
                f"Batch {labelled.index(False)} has no labels, but others have.", "Label all, or none."
            )
        self.distils |= not any(labelled)
        if self.distils:
            starts = accumulate(map(batch_size, batches), initial=0)
            return [self.divergence.taught(batch, start) for batch, start in zip(batches, starts, strict=False)]
        self._check(batches)
        return [row for batch in batches for row in singles(batch)] if self._one_by_one else list(batches)

    def __call__(self, batch: Any) -> Tensor:
        """Losses ``[batch]``; differentiable under grad mode."""
        if self.loss_fn is not None:
            return self._custom(batch)
        if self.distils:
            return self.divergence(batch)
        if self._one_by_one:
            return self._own_loss(batch).reshape(1)
        outcome = self._outcome(batch)
        loss = outcome.loss
        if loss.shape == outcome.tokens.shape and bool((outcome.tokens == 0).any()):
            row = int((outcome.tokens == 0).nonzero()[0])
            raise HeadPruneError(f"Example {row} of a batch has no label (all are {IGNORED}).", "Leave it out.")
        if loss.shape != (batch_size(batch),):
            raise HeadPruneError(
                f"The model gave {tuple(loss.shape)} losses for {batch_size(batch)} examples.",
                "The first dimension of logits and labels must be the batch.",
            )
        return loss

    @property
    def own(self) -> bool:
        """Whether `prepare` found that the model computes another loss than the cross-entropy of its logits."""
        return self._one_by_one

    def of_output(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """Cross-entropies ``[batch]`` of what the model gave for a batch; 0 for an example without a label."""
        outcome = _from_logits(output, batch, _shifts(self.model))
        if outcome is None:
            raise HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")
        return outcome.loss

    def outcome(self, batch: Any) -> Outcome:
        """Cross-entropy and predictions, whatever loss the model was trained with."""
        return self._outcome(batch)

    def _custom(self, batch: Any) -> Tensor:
        assert self.loss_fn is not None
        if isinstance(batch, Mapping):
            inputs, labels = {k: v for k, v in batch.items() if k not in LABELS}, batch.get("labels")
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, labels = batch
        else:
            raise HeadPruneError("A batch is no pair (inputs, labels).", "With loss_fn=, give pairs, or dicts.")
        loss = self.loss_fn(call(self.model, inputs), labels)
        size = batch_size(batch)
        if not isinstance(loss, Tensor) or loss.shape != (size,):
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise HeadPruneError(
                f"loss_fn returned {shape} for {size} examples, not one loss per example.",
                'Use reduction="none" and average over everything but the batch.',
            )
        return loss

    def _outcome(self, batch: Mapping[str, Any]) -> Outcome:
        keep = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        given = batch if keep else {k: v for k, v in batch.items() if k not in LABELS}
        output = call(self.model, given)
        outcome = _from_logits(output, batch, _shifts(self.model))
        if outcome is None:
            raise HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")
        return outcome

    def _own_loss(self, batch: Mapping[str, Any]) -> Tensor:
        loss = call(self.model, batch).loss
        assert isinstance(loss, Tensor)
        return loss

    def _check(self, batches: Sequence[Any]) -> None:
        """Compare with the model's own loss on some examples; if it computes another, use that, one by one."""
        for batch in batches:
            _check_classes(self.model, batch)
        if not _takes(self.model, "labels"):
            return  # a plain module: the cross-entropy of its logits is all there is
        for one in _telling(batches):
            with torch.no_grad():
                try:
                    own = getattr(call(self.model, one), "loss", None)
                except Exception as error:
                    raise HeadPruneError(
                        f"The model does not run on an example with these labels: {type(error).__name__}: {first_line(error)}.",
                        f"Check their type and shape{too_long(self.model, one)}.",
                    ) from error
                if own is None:
                    return
                if not own.isfinite():  # of no label at all, for one
                    continue
                try:
                    mine = self._outcome(one).loss[0]
                except Exception:  # whatever it is, this loss is not the usual one
                    mine = torch.full((), float("nan"))
            if not torch.allclose(mine.float(), own.float().reshape(()), rtol=1e-2, atol=1e-4):
                self._one_by_one = True


def _without_nothing(batch: Any) -> dict[str, Any]:
    """A batch without arguments that are None."""
    if not isinstance(batch, Mapping):
        raise HeadPruneError(
            f"A batch is a {type(batch).__name__}, and there is no loss_fn.",
            'Give dicts with "labels", or pairs (inputs, labels) together with loss_fn=.',
        )
    return {k: v for k, v in batch.items() if v is not None}


def _telling(batches: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Single examples that would show another loss: of several batches, the one with the fewest labels, and some others."""
    found = []
    for batch in list(batches)[:: max(1, len(batches) // _CHECKED)][:_CHECKED]:
        labels, mask = batch.get("labels"), batch.get("attention_mask")
        row = 0
        if isinstance(labels, Tensor) and labels.ndim > 1:
            counts = (labels != IGNORED).flatten(1).sum(1)
            row = int(torch.where(counts == 0, counts.max() + 1, counts).argmin())
        elif isinstance(mask, Tensor) and mask.ndim == 2:
            row = int((mask != 0).sum(1).argmin())
        size = batch_size(batch)
        found += [rows_of(batch, [i]) for i in dict.fromkeys((0, row, size // 3, 2 * size // 3, size - 1))]
    return found


def too_long(model: nn.Module, batch: Any) -> str:
    """That a batch has more tokens than the model has positions, if it has."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or not isinstance(most, int) or ids.shape[-1] <= most:
        return ""
    return f": they have {ids.shape[-1]} tokens, the model has {most} positions (--max-length cuts them)"


def batch_size(batch: Any) -> int:
    """Examples in a batch."""
    if isinstance(batch, Mapping):  # not every tensor has the batch first: position_ids may be shared by all
        named = (batch.get(name) for name in ("labels", "input_ids", "pixel_values", "input_features", "inputs_embeds"))
        first = next((t for t in named if isinstance(t, Tensor) and t.ndim), None)
        if first is not None:
            return first.shape[0]
    found = [t for t in tensors(batch) if t.ndim]
    if not found:
        raise HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")
    return found[0].shape[0]


def inputs_of(model: nn.Module, batch: Any) -> Any:
    """What the model is called with: without labels, where it does not take them."""
    if not isinstance(batch, Mapping):
        return batch[0] if isinstance(batch, tuple | list) else batch
    hidden = (*ADDED, *(() if _takes(model, "labels") else LABELS))
    return {k: v for k, v in batch.items() if k not in hidden}


def singles(batch: Any) -> list[Any]:
    """A batch as batches of one example."""
    return [rows_of(batch, [i]) for i in range(batch_size(batch))]


def rows_of(batch: Any, index: Sequence[int]) -> Any:
    """Some examples of a batch, in this order; what is not per example stays as it is."""
    size = batch_size(batch)

    def take(part: Any) -> Any:
        if isinstance(part, Tensor):
            if not part.ndim or part.shape[0] != size:
                return part
            return part.index_select(0, torch.as_tensor(list(index), device=part.device))
        if isinstance(part, Mapping):
            return {k: take(v) for k, v in part.items()}
        if isinstance(part, tuple | list):
            return tuple(take(v) for v in part)
        return part

    return take(batch)


def _takes(model: nn.Module, name: str) -> bool:
    """Whether ``forward`` has such an argument."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _shifts(model: nn.Module) -> bool:
    """Whether logits predict the next token (causal language models)."""
    name = type(model).__name__
    return name.endswith(("ForCausalLM", "LMHeadModel")) or getattr(model, "loss_type", None) == "ForCausalLM"


def _from_logits(output: Any, batch: Mapping[str, Any], shifts: bool) -> Outcome | None:
    if "start_positions" in batch:
        return _span(output, batch)
    logits = getattr(output, "logits", output)
    labels = batch["labels"]
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return None
    rows = logits.shape[0]
    if labels.is_floating_point():
        if labels.reshape(rows, -1).shape != logits.reshape(rows, -1).shape:
            return None
        flat, wanted = logits.reshape(rows, -1).float(), labels.reshape(rows, -1).float()
        several = logits.ndim == 2 and logits.shape[1] > 1
        loss = F.binary_cross_entropy_with_logits(flat, wanted, reduction="none") if several else (flat - wanted) ** 2
        guess = (flat > 0).float() if several else flat
        tokens = torch.full((rows,), wanted.shape[1], device=loss.device)
        return Outcome(loss.mean(dim=1), tokens, list(guess.detach()), list(wanted))
    if logits.ndim != labels.ndim + 1:
        return None
    if labels.ndim == 1:
        logits, labels = logits[:, None], labels[:, None]
    elif shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.shape[:2] != labels.shape:
        return None
    return _token_outcome(logits, labels)


def _span(output: Any, batch: Mapping[str, Any]) -> Outcome:
    """Question answering: the mean of the start's and the end's cross-entropy."""
    length = output.start_logits.shape[1]
    logits = torch.stack([output.start_logits, output.end_logits], dim=1)
    labels = torch.stack([batch["start_positions"], batch["end_positions"]], dim=1)
    return _token_outcome(logits, labels.masked_fill((labels < 0) | (labels >= length), IGNORED))


def _token_outcome(logits: Tensor, labels: Tensor) -> Outcome:
    """Cross-entropy of ``logits`` [batch, tokens, classes] against ``labels`` [batch, tokens]."""
    counted = labels != IGNORED
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    tokens = counted.sum(dim=1)
    mean = loss.sum(dim=1) / tokens.clamp(min=1)
    guess = logits.detach().argmax(dim=-1)
    return Outcome(
        mean, tokens,
        [g[c] for g, c in zip(guess, counted, strict=True)], [t[c] for t, c in zip(labels, counted, strict=True)],
    )  # fmt: skip


def _check_classes(model: nn.Module, batch: Mapping[str, Any]) -> None:
    labels = batch.get("labels")
    config = getattr(model, "config", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or config is None:
        return
    # A model for tokens of a vocabulary counts classes otherwise; the check is for label heads.
    if not type(model).__name__.endswith("Classification"):
        return
    real = labels[labels != IGNORED]
    if config.num_labels == 1 or getattr(config, "problem_type", None) == "multi_label_classification":
        raise HeadPruneError(
            "The labels are whole numbers, but the model's head wants real ones "
            f"({'regression' if config.num_labels == 1 else 'several labels at once'}).",
            "Pass them as floats.",
        )
    if real.numel() and (int(real.max()) >= config.num_labels or int(real.min()) < 0):
        bad = int(real.max()) if int(real.max()) >= config.num_labels else int(real.min())
        raise HeadPruneError(
            f"Label {bad} does not fit the model's head, which has {config.num_labels} classes "
            f"(0 to {config.num_labels - 1}).",
            "Check --label-column, or that this is the data the model was trained on.",
        )
