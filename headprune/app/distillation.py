"""The loss for fine-tuning a pruned model: the loss on the labels, and the distance from the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.batches import find_rows
from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import LABELS, call, tensors
from headprune.losses import ExampleLoss


@dataclass(frozen=True)
class Mixture:
    """What the loss is made of.

    Attributes:
        alpha: Weight of the dense model's answers, from 0 (labels only) to 1 (answers only).
        temperature: Both models' logits are divided by it. Above 1 the less likely classes count more.
        hidden_states: Whether the hidden states are compared too, with weight 1.

    Raises:
        HeadPruneError: A value out of its range.
    """

    alpha: float = 0.5
    temperature: float = 2.0
    hidden_states: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise HeadPruneError(
                f"Alpha {self.alpha:g} is no weight.", "Choose one from 0 (labels) to 1 (dense model)."
            )
        if not 0 < self.temperature < float("inf"):
            raise HeadPruneError(f"There is no temperature {self.temperature:g}.", "Choose one above 0; 2 is usual.")

    @property
    def needs_teacher(self) -> bool:
        return self.alpha > 0 or self.hidden_states


class DistillationLoss:
    """Per-example losses of a student that learns from labels and from a teacher.

    ``alpha * T^2 * KL(teacher || student at T) + (1 - alpha) * loss on the labels + hidden states``: the answers as in
    Hinton et al. 2015 (arXiv:1503.02531, section 2), with `Divergence`; the hidden states as in Jiao et al. 2020
    (TinyBERT, arXiv:1909.10351, equation 8). Pruning heads does not change their width, so no matrix has to be learned,
    and each layer is compared with the same layer of the teacher. The squared difference is divided by the mean square of
    the teacher's hidden states, so that it does not depend on their scale; hidden states of zeros would have the loss 1.

    Args:
        student: A transformers model, or any module whose output has ``logits``.
        teacher: The same before pruning; in evaluation mode, on the same device. None if the mixture needs none.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module | None, mixture: Mixture) -> None:
        if teacher is None and mixture.needs_teacher:
            raise HeadPruneError("There is no dense model to learn from.", "Pass it, or train with alpha 0.")
        self.student, self.mixture = student, mixture
        self.teacher = teacher if mixture.needs_teacher else None
        self.labels = ExampleLoss(student)
        self.divergence = Divergence(student, 0, mixture.temperature)
        self._keeps_labels = bool(getattr(getattr(student, "config", None), "is_encoder_decoder", False))
        self._extra = {"output_hidden_states": True} if mixture.hidden_states else {}

    def prepare(self, batch: Mapping[str, Any]) -> None:
        """Check with one batch that models and labels fit, and find out how labels are compared. Call this first.

        Raises:
            HeadPruneError: No labels although alpha is below 1; models with other classes or widths.
        """
        self.divergence.rows = find_rows(self.student, [batch], lambda b: tensors(call(self.student, self._inputs(b))))
        if self.mixture.alpha < 1:
            if not any(name in batch for name in LABELS):
                raise HeadPruneError("The batches to train on have no labels.", "Train with alpha 1.")
            self.labels.prepare([batch])
            self._keeps_labels |= self.labels.own
        with torch.no_grad():
            self(batch)

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Losses ``[batch]`` in nats, each the mean over the example's tokens; differentiable by the student's weights."""
        inputs = self._inputs(batch)
        output = call(self.student, inputs, **self._extra)
        alpha, parts = self.mixture.alpha, []
        if alpha < 1:
            # The model's own loss is one number for the batch.
            loss = output.loss if self.labels.own else self.labels.of_output(output, batch)
            parts.append((1 - alpha) * loss)
        if self.teacher is not None:
            with torch.no_grad():
                answer = call(self.teacher, inputs, **self._extra)
            if alpha > 0:
                theirs, ours = logits_of(answer, batch), logits_of(output, batch)
                if theirs.shape != ours.shape:
                    raise HeadPruneError(
                        f"The dense model's logits are {tuple(theirs.shape)}, the pruned one's {tuple(ours.shape)}.",
                        "Use the dense model that the pruned one was made from.",
                    )
                parts.append(alpha * self.divergence.between(theirs, ours, batch))
            if self.mixture.hidden_states:
                parts.append(self._hidden(answer, output, batch))
        return sum(parts[1:], start=parts[0])

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in batch.items() if self._keeps_labels or k not in LABELS}

    def _hidden(self, answer: Any, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``: relative squared differences of the hidden states, averaged over layers."""
        layers = []
        for theirs, ours in zip(_hidden_states(answer), _hidden_states(output), strict=True):
            if theirs.shape != ours.shape:
                raise HeadPruneError(
                    f"A hidden state is {tuple(theirs.shape)} in the dense model and {tuple(ours.shape)} in the pruned one.",
                    "Use the dense model that the pruned one was made from, or leave hidden states out.",
                )
            difference, size = (x.float().square().flatten(2).mean(-1) for x in (ours - theirs, theirs))
            layers.append(self.divergence.mean(difference, batch) / self.divergence.mean(size, batch).clamp(min=1e-12))
        return torch.stack(layers).mean(dim=0)


def _hidden_states(output: Any) -> list[Tensor]:
    found = [
        state
        for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
        for state in getattr(output, name, None) or ()
    ]
    if not found:
        raise HeadPruneError("The model gives no hidden states.", "Fine-tune without them.")
    return found
