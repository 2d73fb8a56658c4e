"""From a model's output to the loss of each example and its predictions: which label each logit may be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headprune.divergence import IGNORED, part_of
from headprune.errors import HeadPruneError
from headprune.inputs import widened

SPAN = "an answer's start and end"
LABEL = "one label per example"
SAME = "a label per token"  # compared with the logits of the same token
NEXT = "the next token's label"  # where something precedes the text (an image, a prompt), its last logits predict the first label
SQUARED = "numbers"  # squared errors
BINARY = "several labels at once"  # binary cross-entropies


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
    predictions: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


def possible_in(output: Any, batch: Mapping[str, Any]) -> list[str]:
    """All ways to compare logits with labels that their shapes allow; none where the logits do not fit the labels."""
    if "start_positions" in batch:
        ends = [part_of(output, name) for name in ("start_logits", "end_logits")]
        return [SPAN] if all(isinstance(t, Tensor) and t.ndim == 2 for t in ends) else []
    logits, labels = logits_in(output), batch.get("labels")
    if logits is None or not isinstance(labels, Tensor) or not logits.ndim or len(logits) != len(labels):
        return []
    if labels.is_floating_point():
        possible = [SQUARED, BINARY] if bool(((labels >= 0) & (labels <= 1)).all()) else [SQUARED]
        return possible if logits[0].numel() == labels[0].numel() else []
    if logits.ndim == 2 and logits.shape[1] > 1 and labels[0].numel() == 1:
        return [LABEL]
    return [SAME, NEXT] if logits.ndim == 3 and labels.ndim == 2 and logits.shape[1] >= labels.shape[1] else []


def outcome_of(convention: str, output: Any, batch: Mapping[str, Any]) -> Outcome:
    """Losses and predictions of a batch, from the model's output and the labels.

    Raises:
        HeadPruneError: Logits that do not fit the labels, or labels that are no classes of the model.
    """
    if convention not in possible_in(output, batch):
        raise no_logits()
    if convention == SPAN:
        return _span(output, batch)
    logits, labels = logits_in(output), batch["labels"]
    assert logits is not None
    if convention in (SQUARED, BINARY):
        return _numbers(logits, labels, convention == BINARY)
    check_classes(logits, labels)
    if convention == LABEL:
        return _classes(logits[:, None], labels.reshape(-1, 1))
    before = logits.shape[1] - labels.shape[1]
    if convention == SAME:
        return _classes(logits[:, before:], labels)
    return _classes(logits[:, :-1], F.pad(labels, (before, 0), value=IGNORED)[:, 1:])


def logits_in(output: Any) -> Tensor | None:
    """The logits of a model's output."""
    logits = output if isinstance(output, Tensor) else part_of(output, "logits")
    return logits if isinstance(logits, Tensor) else None


def check_classes(logits: Tensor | None, labels: Tensor) -> None:
    """Refuse labels that are not classes of the model.

    Raises:
        HeadPruneError: There is one.
    """
    classes = 0 if logits is None else logits.shape[-1]
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise HeadPruneError(
            f"Label {int(wrong[0])} does not fit the model's head, which has {classes} classes (0 to {classes - 1}).",
            "Check --label-column, or that this is the data the model was trained on.",
        )


def no_logits() -> HeadPruneError:
    """The error for logits that cannot be compared with the labels."""
    return HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")


def _span(output: Any, batch: Mapping[str, Any]) -> Outcome:
    """Question answering: the mean of the start's and the end's cross-entropy over the tokens, without padding."""
    logits = torch.stack([part_of(output, "start_logits"), part_of(output, "end_logits")], dim=1)
    labels = torch.stack([batch["start_positions"].flatten(), batch["end_positions"].flatten()], dim=1)
    unknown = (labels < 0) | (labels >= logits.shape[2])
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == logits[:, 0].shape:
        hidden = (mask.to(logits.device) == 0)[:, None].repeat(1, 2, 1)
        # A place that was labelled counts, wherever it is.
        hidden = hidden.scatter(2, labels.masked_fill(unknown, 0)[..., None], False)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    return _classes(logits, labels.masked_fill(unknown, IGNORED))


def _numbers(logits: Tensor, labels: Tensor, binary: bool) -> Outcome:
    """Squared errors, or binary cross-entropies for several labels at once; the mean over each example's numbers."""
    flat, wanted = (widened(t).reshape(len(t), -1) for t in (logits, labels))
    tokens = torch.full((len(logits),), labels[0].numel(), device=logits.device)
    if not binary:
        return Outcome(((flat - wanted) ** 2).mean(dim=1), tokens)
    loss = F.binary_cross_entropy_with_logits(flat, wanted, reduction="none").mean(dim=1)
    return Outcome(loss, tokens, list((flat > 0).to(wanted).detach()), list(wanted))


def _classes(logits: Tensor, labels: Tensor) -> Outcome:
    """Cross-entropy of ``logits`` [batch, tokens, classes] against ``labels`` [batch, tokens]."""
    counted = labels != IGNORED
    loss = F.cross_entropy(widened(logits).transpose(1, 2), labels.long(), ignore_index=IGNORED, reduction="none")
    tokens = counted.sum(dim=1)
    predictions = [guess[own] for guess, own in zip(logits.detach().argmax(dim=-1), counted, strict=True)]
    return Outcome(
        loss.sum(dim=1) / tokens.clamp(min=1), tokens, predictions, [t[c] for t, c in zip(labels, counted, strict=True)]
    )
