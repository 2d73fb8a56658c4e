"""How near a changed model's answers stay to the dense model's: what plans, and the steps of a repair, are compared by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headprune.divergence import Divergence, logits_of
from headprune.errors import HeadPruneError
from headprune.inputs import call, model_device, move, tensors
from headprune.loss import inputs_of
from headprune.modules import exact_attention, full_precision, uncached, uncompiled
from headprune.parallel import current
from headprune.rows import apparent_size
from headprune.trace import evaluating

MOST = 1 << 28  # bytes of the dense model's answers
Context = Callable[[], AbstractContextManager[Any]]


class Fidelity:
    """Divergence from the dense model's answers on some examples.

    Every example counts in it. Accuracy changes only with those that change sides, and most changes of the loss are as often
    a gain as a loss.

    Args:
        model: The dense model. Its answers are kept, if they are few enough: what happens to the model later changes nothing in them.
        batches: Never those that results are reported on.
        dense: Gives a context in which the model is the dense one, for answers that are not kept.

    Attributes:
        known: Whether the dense model's answers are kept: there are logits, and they are few enough (a language model's are
            not, as a rule).
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], dense: Context = nullcontext) -> None:
        self.model, self._dense, self._divergence = model, dense, Divergence(model, seed=0)
        device = model_device(model)
        self._batches = [move(batch, device) for batch in batches]
        # Of several ranks each keeps the answers to its own batches, and compares what comes later on these.
        self._ranks = current()
        self._answers: dict[int, Tensor] = {}
        try:
            with dense():
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
        batch = self._batches[index]
        self._answers[index] = _logits(self._run(batch), batch)
        return _bytes(self._answers[index])

    def divergence(self) -> float:
        """Of the model as it is now: mean over examples, in nats (`headprune.divergence.Divergence`)."""
        return self._means()[0]

    def log_divergence(self) -> float:
        """Its logarithm; of one that is only rounding the logarithm of what rounding makes, so that no order is preferred for that."""
        return math.log(max(self._means()))

    def each(self, changed: Context) -> Tensor:
        """Of the model in a context that ``changed`` gives: ``[examples]`` in nats, float64; never below 0.

        Where there are no logits, the mean squared difference of all numbers of an example's answer. One pass over the examples;
        a second one, of the dense model, where its answers are not kept.
        """
        tasks = [partial(self._distance, i, changed) for i in range(len(self._batches))]
        return torch.cat(self._ranks.share("divergence", tasks))

    def _distance(self, index: int, changed: Context) -> Tensor:
        batch = self._batches[index]
        dense: Any = self._answers.get(index)
        if dense is None:
            with self._dense():
                dense = self._run(batch)
        with changed():
            now = self._run(batch)
        try:
            known = dense if self.known else _logits(dense, batch)
            each = self._divergence.between(known, _logits(now, batch), batch if isinstance(batch, dict) else {})
        except HeadPruneError:  # no logits
            # A model that says itself how long its answer is (of speech, say) may give another length now.
            size = max(1, apparent_size(batch))
            parts = [
                (a.double() - b.double()).square().reshape(size, -1).mean(1)
                for a, b in zip(tensors(dense), tensors(now), strict=True)
                if a.is_floating_point() and a.ndim and len(a) % size == 0 and a.shape == b.shape
            ]
            each = torch.stack(parts or [torch.zeros(size)]).sum(0)
        return each.detach().double().flatten().clamp(min=0).cpu()  # below 0 is rounding

    def _means(self) -> list[float]:
        """The mean over examples of the divergence, and of what rounding makes of equal answers."""
        tasks = [partial(self._between, i) for i in range(len(self._batches))]
        found: list[float] = torch.cat(self._ranks.share("divergence", tasks), dim=1).double().mean(dim=1).tolist()
        return found

    def _between(self, index: int) -> Tensor:
        """On a batch ``[2, examples]``: the divergence, and what rounding makes."""
        batch, known = self._batches[index], self._answers[index]
        each = self._divergence.between(known, _logits(self._run(batch), batch), batch).clamp(min=0)
        return torch.stack([each, torch.full_like(each, self._divergence.rounding(known))]).cpu()

    def _run(self, batch: Any) -> Any:
        model = self.model
        with (
            torch.no_grad(),
            evaluating(model),
            exact_attention(model),
            uncached(model),
            uncompiled(),
            full_precision(),
        ):
            return call(model, inputs_of(model, batch))


def _logits(output: Any, batch: Any) -> Tensor:
    return logits_of(output, batch if isinstance(batch, dict) else {})


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
