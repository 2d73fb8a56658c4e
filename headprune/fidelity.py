"""How near a changed model's answers stay to the dense one's: what plans are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import call, model_device, move
from headprune.loss import inputs_of
from headprune.modules import exact_attention, uncached
from headprune.ranks import current
from headprune.trace import evaluating

MOST = 1 << 28  # bytes of the dense model's answers


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
        # Of several ranks each keeps the answers to its own batches, and compares what comes later on these.
        self._ranks = current()
        self._answers: dict[int, Tensor] = {}
        try:
            sizes = self._ranks.share("dense answers", [partial(self._keep, i) for i in range(len(self._batches))])
            self.known = 0 < sum(sizes) <= MOST
        except HeadPruneError:  # no logits
            self.known = False
        if not self.known:
            self._answers = {}

    @property
    def answers(self) -> list[Tensor]:
        """The dense model's, by batch, as far as they are kept."""
        return list(self._answers.values())

    def _keep(self, index: int) -> int:
        """Keep the answers to a batch, or note that they are too many; their bytes."""
        if sum(map(_bytes, self._answers.values())) > MOST:
            return 0
        self._answers[index] = self._logits(self._batches[index])
        return _bytes(self._answers[index])

    def divergence(self) -> float:
        """Of the model as it is now: mean over examples, in nats (`headprune.divergence.Divergence`)."""
        return self._means()[0]

    def log_divergence(self) -> float:
        """Its logarithm; of one that is only rounding the logarithm of what rounding makes, so that no order is preferred for that."""
        return math.log(max(self._means()))

    def _means(self) -> list[float]:
        """The mean over examples of the divergence, and of what rounding makes of equal answers."""
        tasks = [partial(self._between, i) for i in range(len(self._batches))]
        found: list[float] = torch.cat(self._ranks.share("divergence", tasks), dim=1).double().mean(dim=1).tolist()
        return found

    def _between(self, index: int) -> Tensor:
        """On a batch ``[2, examples]``: the divergence, and what rounding makes."""
        batch, known = self._batches[index], self._answers[index]
        with torch.inference_mode():
            each = self._divergence.between(known, self._logits(batch), batch).clamp(min=0)
            return torch.stack([each, torch.full_like(each, self._divergence.rounding(known))]).cpu()

    def _logits(self, batch: Any) -> Tensor:
        with torch.inference_mode(), evaluating(self.model), exact_attention(self.model), uncached(self.model):
            return logits_of(call(self.model, inputs_of(self.model, batch)), batch if isinstance(batch, dict) else {})


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
