"""How near a changed model's answers stay to the dense one's: what plans are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import call, model_device, move
from headprune.loss import inputs_of
from headprune.modules import exact_attention
from headprune.trace import evaluating

_MOST = 1 << 28  # bytes of the dense model's answers


class Fidelity:
    """Divergence from the dense model's answers on some examples.

    Every example counts in it. Accuracy changes only with those that change sides, and most changes of the loss are as often
    a gain as a loss.

    Args:
        model: The dense model. Its answers are kept: what happens to the model later changes nothing in them.
        batches: Never those that results are reported on.

    Attributes:
        known: Whether the dense model's answers are known: there are logits, and they are few enough to be kept (a language
            model's are not, as a rule).
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self._divergence = model, Divergence(model, seed=0)
        device = model_device(model)
        self._batches = [move(batch, device) for batch in batches]
        self._answers: list[Tensor] = []
        size = 0
        try:
            for batch in self._batches:
                self._answers.append(self._logits(batch))
                size += self._answers[-1].numel() * self._answers[-1].element_size()
                if size > _MOST:
                    self._answers = []
                    break
        except HeadPruneError:  # no logits
            self._answers = []
        self.known = bool(self._answers)

    def divergence(self) -> float:
        """Of the model as it is now: mean over examples, in nats (`headprune.divergence.Divergence`)."""
        with torch.inference_mode():
            each = [
                self._divergence.between(known, self._logits(batch), batch)
                for known, batch in zip(self._answers, self._batches, strict=True)
            ]
        return float(torch.cat(each).double().mean())

    def _logits(self, batch: Any) -> Tensor:
        with torch.inference_mode(), evaluating(self.model), exact_attention(self.model):
            return logits_of(call(self.model, inputs_of(self.model, batch)), batch if isinstance(batch, dict) else {})
