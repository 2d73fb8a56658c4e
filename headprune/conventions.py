"""From a model's output to the loss of each example and its predictions: which label each logit may be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headprune.divergence import IGNORED, part_of
from headprune.errors import HeadPruneError
from headprune.inputs import widened

SPAN, CLASSES, SQUARED, BINARY = "span", "classes", "squared error", "binary cross-entropy"
_Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Losses and predictions for a batch.

    Attributes:
        loss: ``[batch]``, in nats; the mean over an example's labelled tokens.
        tokens: ``[batch]``, each example's weight in a mean: its labelled tokens (1 for one label per example, 2 for an
            answer's start and end); 1 where the model's own loss is used and is not a mean over labels.
        predictions: For each example, the predicted classes ``[tokens]``; empty where the model predicts no classes.
        targets: For each example, the labels ``[tokens]``; empty in the same case.
    """

    loss: Tensor
    tokens: Tensor
    predictions: list[Tensor]
    targets: list[Tensor]


@dataclass(frozen=True)
class Convention:
    """How a model's labels are compared with its logits.

    Attributes:
        what: `SPAN`: an answer's start and end; `CLASSES`: one label per example, or per token; `SQUARED`: numbers;
            `BINARY`: several labels at once.
        ahead: For labels per token: the logits of token t are compared with the label of token t + ahead. Where more logits than labels
            are given, because something precedes the text (an image, a learned prompt), the last of these predicts the first label.
    """

    what: str
    ahead: int = 0

    def outcome(self, output: Any, batch: _Batch) -> Outcome:
        """Losses and predictions from a model's output for a batch.

        Raises:
            HeadPruneError: Logits that do not fit the labels.
        """
        if self.what not in {c.what for c in conventions(output, batch)}:
            raise no_logits()
        if self.what == SPAN:
            return _span(output, batch)
        logits, labels = logits_in(output), batch["labels"]
        assert logits is not None
        if self.what in (SQUARED, BINARY):
            return _numbers(logits, labels, self.what == BINARY)
        refuse_unknown(labels, logits.shape[-1])
        if logits.ndim == 2:
            logits, labels = logits[:, None], labels.reshape(-1, 1)
        before = logits.shape[1] - labels.shape[1]
        if self.ahead:
            labels = F.pad(labels, (before, 0), value=IGNORED)[:, self.ahead :]
            return _classes(logits[:, : -self.ahead], labels)
        return _classes(logits[:, before:], labels)


def conventions(output: Any, batch: _Batch) -> list[Convention]:
    """All conventions that the shapes of logits and labels allow; none where the logits do not fit the labels."""
    if "start_positions" in batch:
        ends = [part_of(output, name) for name in ("start_logits", "end_logits")]
        return [Convention(SPAN)] if all(isinstance(t, Tensor) and t.ndim == 2 for t in ends) else []
    logits, labels = logits_in(output), batch.get("labels")
    if logits is None or not isinstance(labels, Tensor) or not logits.ndim or len(logits) != len(labels):
        return []
    if labels.is_floating_point():
        if logits[0].numel() != labels[0].numel():
            return []
        chances = bool(((labels >= 0) & (labels <= 1)).all())
        return [Convention(SQUARED), *([Convention(BINARY)] if chances else [])]
    if logits.ndim == 2 and logits.shape[1] > 1 and labels[0].numel() == 1:
        return [Convention(CLASSES)]
    if logits.ndim != 3 or labels.ndim != 2 or logits.shape[1] < labels.shape[1]:
        return []
    return [Convention(CLASSES), Convention(CLASSES, 1)]


def logits_in(output: Any) -> Tensor | None:
    """The logits of a model's output."""
    logits = output if isinstance(output, Tensor) else part_of(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def loss_in(output: Any) -> Tensor | None:
    """A model's own loss of a batch; None if there is none, or it is not finite."""
    loss = part_of(output, "loss")
    return loss if isinstance(loss, Tensor) and bool(loss.isfinite().all()) else None


def no_logits() -> HeadPruneError:
    return HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")


def unknown_label(labels: Tensor, classes: int) -> int | None:
    """The first label that is not one of the classes; None if all are."""
    real = labels[labels != IGNORED]
    wrong = real[(real < 0) | (real >= classes)]
    return int(wrong[0]) if len(wrong) else None


def refuse_unknown(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not classes of the model.

    Raises:
        HeadPruneError: There is one.
    """
    if (bad := unknown_label(labels, classes)) is not None:
        raise HeadPruneError(
            f"Label {bad} does not fit the model's head, which has {classes} classes (0 to {classes - 1}).",
            "Check --label-column, or that this is the data the model was trained on.",
        )


def _span(output: Any, batch: _Batch) -> Outcome:
    """Question answering: the mean of the start's and the end's cross-entropy over the tokens, without padding."""
    start, end = part_of(output, "start_logits"), part_of(output, "end_logits")
    length = start.shape[1]
    logits = torch.stack([start, end], dim=1)
    labels = torch.stack([batch["start_positions"].flatten(), batch["end_positions"].flatten()], dim=1)
    unknown = (labels < 0) | (labels >= length)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == start.shape:
        hidden = (mask.to(logits.device) == 0)[:, None].repeat(1, 2, 1)
        # A place that was labelled counts, wherever it is.
        hidden = hidden.scatter(2, labels.masked_fill(unknown, 0)[..., None], False)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    return _classes(logits, labels.masked_fill(unknown, IGNORED))


def _numbers(logits: Tensor, labels: Tensor, binary: bool) -> Outcome:
    """Squared errors, or binary cross-entropies for several labels at once; the mean over each example's numbers."""
    rows = len(logits)
    flat, wanted = widened(logits).reshape(rows, -1), widened(labels).reshape(rows, -1)
    loss = F.binary_cross_entropy_with_logits(flat, wanted, reduction="none") if binary else (flat - wanted) ** 2
    tokens = torch.full((rows,), wanted.shape[1], device=loss.device)
    predictions, targets = (list((flat > 0).to(wanted).detach()), list(wanted)) if binary else ([], [])
    return Outcome(loss.mean(dim=1), tokens, predictions, targets)


def _classes(logits: Tensor, labels: Tensor) -> Outcome:
    """Cross-entropy of ``logits`` [batch, tokens, classes] against ``labels`` [batch, tokens]."""
    counted = labels != IGNORED
    loss = F.cross_entropy(widened(logits).transpose(1, 2), labels.long(), ignore_index=IGNORED, reduction="none")
    tokens = counted.sum(dim=1)
    mean = loss.sum(dim=1) / tokens.clamp(min=1)
    guess = logits.detach().argmax(dim=-1)
    return Outcome(
        mean, tokens,
        [g[c] for g, c in zip(guess, counted, strict=True)], [t[c] for t, c in zip(labels, counted, strict=True)],
    )  # fmt: skip
