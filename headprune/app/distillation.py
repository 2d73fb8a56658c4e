"""The loss for fine-tuning a pruned model: the loss on the labels, and distillation from the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headprune.app.options import Mixture
from headprune.batches import find_rows
from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import LABELS, call, tensors, without_labels
from headprune.losses import ExampleLoss
from headprune.running import evaluating

_SAME = 1e-4  # relative: how much an example's loss may depend on the other examples of its batch


class DistillationLoss(nn.Module):
    """A student's fine-tuning loss for each example of a batch, ``[batch]``, from the labels and a teacher's outputs.

    ``alpha * T^2 * KL(teacher || student at T) + (1 - alpha) * loss on the labels + hidden states``: the KL term as in
    Hinton et al. 2015 (arXiv:1503.02531, section 2), with `Divergence`; the hidden states as in Jiao et al. 2020
    (TinyBERT, arXiv:1909.10351, equation 8). Pruning heads does not change their width, so no matrix has to be learned,
    and each layer is compared with the same layer of the teacher. The squared difference is divided by the mean square of
    the teacher's hidden states, so that it does not depend on their scale; hidden states of zeros would have the loss 1.
    In nats; each example's loss is the mean over its tokens.

    It is a module whose only output is the loss, so that DistributedDataParallel sees which weights the loss depends on.

    Args:
        student: A transformers model, or any module whose output has ``logits``.
        teacher: The same model before pruning; in evaluation mode, on the same device.
        example: A batch, to check that models and labels fit, and to find how the model compares labels with logits.

    Raises:
        HeadPruneError: No labels where they are needed; models with other classes or widths.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, mixture: Mixture, example: Mapping[str, Any]) -> None:
        super().__init__()
        self.student, self.mixture, self.example = student, mixture, example
        # The tuple keeps the teacher out of this module's parameters: it is neither trained nor saved.
        self.teachers = (teacher,) if mixture.alpha > 0 or mixture.hidden_states else ()
        self.labels = ExampleLoss(student)
        self.divergence = Divergence(student, 0, mixture.temperature)
        with evaluating(student), torch.no_grad():
            self.divergence.rows = find_rows(student, [example], lambda b: tensors(call(student, self._inputs(b))))
            if mixture.alpha < 1:
                if not any(name in example for name in LABELS):
                    raise HeadPruneError("The batches to train on have no labels.", "Train with alpha 1.")
                self.labels.prepare([example])
            self(example)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Losses ``[batch]``, differentiable by the student's weights."""
        inputs, alpha, parts = self._inputs(batch), self.mixture.alpha, []
        more = {"output_hidden_states": True} if self.mixture.hidden_states else {}
        output = call(self.student, inputs, **more)
        if alpha < 1:
            loss = output.loss if self.labels.use.own else self.labels.of_output(output, batch)
            parts.append((1 - alpha) * loss)
        for teacher in self.teachers:
            with torch.no_grad():
                answer = call(teacher, inputs, **more)
            if alpha > 0:
                known, now = logits_of(answer, batch), logits_of(output, batch)
                _check_shapes("logits are", known, now)
                parts.append(alpha * self.divergence.between(known, now, batch))
            if self.mixture.hidden_states:
                parts.append(self._hidden(answer, output, batch))
        return sum(parts[1:], start=parts[0])

    @cached_property
    def separable(self) -> bool:
        """Whether an example's loss is independent of the rest of its batch, in training too; tried on three examples."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.modules()):
            return False
        with evaluating(self.student), torch.no_grad():
            whole = self(self.example)
            single = torch.stack([self(row).mean() for row in self.divergence.rows.singles(self.example)[:3]])
        return whole.ndim == 1 and torch.allclose(single, whole[: len(single)], rtol=0, atol=_SAME * float(whole.max()))

    def _inputs(self, batch: Mapping[str, Any]) -> Any:
        return batch if self.labels.use.own else without_labels(self.student, batch)

    def _hidden(self, answer: Any, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """``[batch]``: relative squared differences of the hidden states, averaged over layers."""
        layers = []
        for known, now in zip(_hidden_states(answer), _hidden_states(output), strict=True):
            _check_shapes("hidden states are", known, now)
            difference, size = (x.float().square().flatten(2).mean(-1) for x in (now - known, known))
            layers.append(self.divergence.mean(difference, batch) / self.divergence.mean(size, batch).clamp(min=1e-12))
        return torch.stack(layers).mean(dim=0)


def _hidden_states(output: Any) -> list[Tensor]:
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    states = [state for name in names for state in getattr(output, name, None) or ()]
    if not states:
        raise HeadPruneError("The model gives no hidden states.", "Fine-tune without them.")
    return states


def _check_shapes(what: str, known: Tensor, now: Tensor) -> None:
    if known.shape != now.shape:
        raise HeadPruneError(
            f"The dense model's {what} {tuple(known.shape)}, the pruned one's {tuple(now.shape)}.",
            "Use the dense model that the pruned one was made from, or leave hidden states out.",
        )
