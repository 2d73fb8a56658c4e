"""The loss of each example: what scores are derivatives and differences of.

transformers' models return one mean over the batch (and over all of its tokens). Scores need every
example's own loss, so it is computed from the logits here, and checked once against the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.errors import HeadPruneError
from headprune.inputs import call, first_rows, tensors

IGNORED = -100
_LABELS = ("labels", "start_positions", "end_positions")

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
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self._one_by_one = False

    def prepare(self, batches: Sequence[Any]) -> list[Any]:
        """Check against the model's own loss; a model with a loss of its own gets batches of one.

        Call this first, outside of any gate. Returns the batches to use.
        """
        if self.loss_fn is None:
            self._check(batches[0])
        if not self._one_by_one:
            return list(batches)
        return [_row(batch, i) for batch in batches for i in range(batch_size(batch))]

    def __call__(self, batch: Any) -> Tensor:
        """Losses ``[batch]``; differentiable under grad mode."""
        if self.loss_fn is not None:
            return self._custom(batch)
        if self._one_by_one:
            return self._own_loss(batch).reshape(1)
        return self._outcome(batch).loss

    def outcome(self, batch: Any) -> Outcome:
        """Losses and predictions."""
        if self.loss_fn is not None or self._one_by_one:
            loss = self(batch).detach()
            return Outcome(loss, torch.ones_like(loss, dtype=torch.long), [], [])
        return self._outcome(batch)

    def _custom(self, batch: Any) -> Tensor:
        assert self.loss_fn is not None
        inputs, labels = batch
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
        given = batch if keep else {k: v for k, v in batch.items() if k not in _LABELS}
        output = call(self.model, given)
        outcome = _from_logits(output, batch, _shifts(self.model))
        if outcome is None:
            raise HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")
        return outcome

    def _own_loss(self, batch: Mapping[str, Any]) -> Tensor:
        loss = call(self.model, batch).loss
        assert isinstance(loss, Tensor)
        return loss

    def _check(self, batch: Any) -> None:
        """Compare with the model's own loss on one example; if it computes another, use that, one by one."""
        if not isinstance(batch, Mapping) or not any(name in batch for name in _LABELS):
            raise HeadPruneError(
                "The batches have no labels.",
                'Give dicts with "labels", or pairs (inputs, labels) together with loss_fn=.',
            )
        _check_classes(self.model, batch)
        one = _row(batch, 0)
        with torch.no_grad():
            own = getattr(call(self.model, one), "loss", None)
            if own is None:
                return  # a plain module: the cross-entropy of its logits is all there is
            try:
                mine = self._outcome(one).loss[0]
            except Exception:  # whatever it is, this loss is not the usual one
                mine = torch.full((), float("nan"))
        close = torch.allclose(mine.float(), own.float().reshape(()), rtol=1e-2, atol=1e-4)
        self._one_by_one = bool(own.isfinite()) and not close


def batch_size(batch: Any) -> int:
    """Examples in a batch."""
    found = [t for t in tensors(batch) if t.ndim]
    if not found:
        raise HeadPruneError("A batch holds no tensor.", "Give dicts of tensors, or pairs (inputs, labels).")
    return found[0].shape[0]


def inputs_of(batch: Any, loss_fn: LossFn | None = None) -> Any:
    """What the model is called with, without labels where it does not need them."""
    if loss_fn is not None:
        return batch[0]
    return batch


def _row(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    row: dict[str, Any] = first_rows({k: v[i:] if isinstance(v, Tensor) and v.ndim else v for k, v in batch.items()}, 1)
    return row


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
    if real.numel() and (int(real.max()) >= config.num_labels or int(real.min()) < 0):
        bad = int(real.max()) if int(real.max()) >= config.num_labels else int(real.min())
        raise HeadPruneError(
            f"Label {bad} does not fit the model's head, which has {config.num_labels} classes "
            f"(0 to {config.num_labels - 1}).",
            "Check --label-column, or that this is the data the model was trained on.",
        )
