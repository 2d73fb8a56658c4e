"""The loss of each example: scores are derivatives and differences of it.

transformers' models return one mean over the batch (and over all of its tokens). Scores need every
example's own loss, so it is computed from the logits here, and compared once with the model's own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from headprune.batches import Rows, apparent_size, find_rows
from headprune.conventions import SQUARED, LabelUse, Outcome, find_label_use, outcome_of
from headprune.divergence import IGNORED, Divergence, part_of
from headprune.errors import HeadPruneError
from headprune.inputs import ADDED, LABELS, call, inputs_of, tensors, unlabelled

LossFn = Callable[[Any, Any], Tensor]


class ExampleLoss:
    """Per-example losses of one model.

    Args:
        model: A transformers model, or any module whose output has ``logits`` (or is the logits).
        loss_fn: ``loss_fn(output, labels)`` giving ``[batch]``; batches are then pairs ``(inputs, labels)``.
        distil: Whether the loss is the divergence from the dense model's answers. It is also if there are no labels.
        seed: For the labels that are drawn from the dense model (`Divergence.surrogate`).

    Raises:
        HeadPruneError: ``loss_fn`` is no function.

    Attributes:
        about: What the loss is, for reports.
        rows: How examples lie in the batches; by the names of tensors, until `prepare` finds it.
        use: How the model uses its labels, found by `prepare`.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn | None = None, *, distil: bool = False, seed: int = 0) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise HeadPruneError(
                f"loss_fn is {type(loss_fn).__name__} {loss_fn!r}, which cannot be called.",
                "Give a function of (output, labels) that returns one loss per example, such as "
                'torch.nn.CrossEntropyLoss(reduction="none").',
            )
        self.model = model
        self.loss_fn = loss_fn
        self.divergence = Divergence(model, seed)
        self.distils = distil
        self.rows = Rows()
        self.use = LabelUse()

    @property
    def about(self) -> str:
        if self.loss_fn is not None:
            return "the given function"
        return self.divergence.about if self.distils else "the model's own"

    def unit(self, unit: str) -> str:
        """The unit of a method's scores for this loss; known once `prepare` was called."""
        if self.distils:
            differs = " added" in unit or self.divergence.compares_numbers
            loss = self.divergence.about if differs else "loss (nats) of labels drawn from the dense model's answers"
        elif self.loss_fn is not None:
            loss = "loss"  # the user's own: it may not be in nats
        elif self.use.convention == SQUARED:
            loss = "squared error"
        else:
            return unit
        return unit.replace("loss (nats)", loss).replace("nats²", "nats²" if self.distils else f"{loss}²")

    def prepare(self, batches: Sequence[Any]) -> list[Any]:
        """Determine how the model compares logits with labels. Call this first, outside of any gate.

        Returns:
            The batches to use: of single examples, if the model has to compute its own loss (`LabelUse.own`).

        Raises:
            HeadPruneError: Batches without labels among others with labels, both ``loss_fn`` and ``distil``, or what
                `headprune.conventions.find_label_use` raises.
        """
        if not batches:
            return []
        if self.loss_fn is not None:
            if self.distils:
                raise HeadPruneError("Both a loss_fn and distil were given.", "Choose one.")
            self.rows = find_rows(self.model, batches, lambda batch: [self._given(batch)])
            return list(batches)
        batches = [_without_none(self.model, batch) for batch in batches]
        self._check_labels(batches)
        self.rows = self.divergence.rows = find_rows(
            self.model, batches, lambda batch: tensors(call(self.model, inputs_of(self.model, batch)))
        )
        if self.distils:
            starts = accumulate(map(self.rows.size, batches), initial=0)
            return [self.divergence.with_answers(batch, start) for batch, start in zip(batches, starts, strict=False)]
        self.use = find_label_use(self.model, batches, self.rows)
        batches = [self.use.of_real_tokens(self.model, batch, self.rows) for batch in batches]
        return [row for batch in batches for row in self.rows.singles(batch)] if self.use.own else batches

    def _check_labels(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Choose the loss by whether the batches have labels, all or none; warn of keys that no module takes.

        Raises:
            HeadPruneError: Some have labels; or none has, and one has a key that may be meant for them.
        """
        labelled = [any(name in batch for name in LABELS) for batch in batches]
        if any(labelled) and not all(labelled) and not self.distils:
            message = f"Batch {labelled.index(False)} has no labels, but others have."
            raise HeadPruneError(message, "Label all, or none.")
        unread = _unread(self.model, batches)
        if unread and not any(labelled) and not self.distils:
            message = f'The batches have no "labels", and {type(self.model).__name__} takes no {unread}.'
            hint = 'Rename the key to "labels" if it holds them, else leave it out; distil=True needs no labels.'
            raise HeadPruneError(message, hint)
        if unread:
            warnings.warn(f"headprune: {type(self.model).__name__} takes no {unread}, so it is not read.", stacklevel=3)
        self.distils |= not any(labelled)

    def __call__(self, batch: Any) -> Tensor:
        """Losses ``[batch]``; differentiable under grad mode."""
        if self.loss_fn is None and self.distils:
            return self.divergence(batch)
        if self.use.own:
            return self._own_loss(batch)
        outcome = self.outcome(batch)
        if bool((outcome.tokens == 0).any()):
            row = int((outcome.tokens == 0).nonzero()[0])
            raise HeadPruneError(f"Example {row} of a batch has no label (all are {IGNORED}).", "Leave it out.")
        return outcome.loss

    def of_output(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """Losses ``[batch]`` of a model's output for a batch, from its logits; 0 for an example without a label.

        Raises:
            HeadPruneError: No logits that fit the labels, or a loss that cannot be computed from them.
        """
        return outcome_of(self.use.convention, output, self.use.of_real_tokens(self.model, batch, self.rows)).loss

    def outcome(self, batch: Any) -> Outcome:
        """Loss and predictions: from the logits if they can be compared with labels, else the model's own loss, without predictions.

        Raises:
            HeadPruneError: No labels, or labels that do not fit the logits; a loss that is not one number for each example.
        """
        if self.loss_fn is not None:
            loss = self._given(batch)
            outcome = Outcome(loss, torch.ones_like(loss, dtype=torch.long))
        elif not any(name in batch for name in LABELS):
            raise HeadPruneError("The examples have no labels.", 'Give dicts with "labels".')
        elif self.use.convention is None:
            loss = self._own_loss(batch)
            outcome = Outcome(loss, self.use.weights(batch["labels"]).to(loss.device))
        else:
            inputs = batch if self.use.needs_labels else unlabelled(batch)
            outcome = outcome_of(self.use.convention, call(self.model, inputs), batch)
        if outcome.loss.shape != (size := self.rows.size(batch),):
            raise _not_each(outcome.loss, size)
        return outcome

    def _given(self, batch: Any) -> Tensor:
        """What ``loss_fn`` returns for a batch."""
        assert self.loss_fn is not None
        if isinstance(batch, Mapping):
            inputs, labels = unlabelled(batch), batch.get("labels")
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, labels = batch
        else:
            raise HeadPruneError("A batch is no pair (inputs, labels).", "With loss_fn=, give pairs, or dicts.")
        loss = self.loss_fn(call(self.model, inputs), labels)
        if not isinstance(loss, Tensor) or loss.ndim != 1:
            raise _not_each(loss, apparent_size(batch))
        return loss

    def _own_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The model's own loss of a batch of one, ``[1]``."""
        loss: Tensor = part_of(call(self.model, batch), "loss")
        return loss.mean().reshape(1)


def _not_each(loss: Any, size: int) -> HeadPruneError:
    shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
    message = f"The loss of {size} examples is {shape}, not one loss per example."
    return HeadPruneError(message, 'A loss_fn needs reduction="none", and a mean over everything but the batch.')


def _without_none(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch without arguments that are None."""
    if not isinstance(batch, Mapping):
        first = next(iter(inspect.signature(model.forward).parameters), "input")
        raise HeadPruneError(
            f"A batch is a {type(batch).__name__}, and there is no loss_fn.",
            f'Give dicts by the names of forward\'s arguments, such as {{"{first}": inputs, "labels": labels}}, which also have an '
            "accuracy; or pairs (inputs, labels) together with loss_fn=.",
        )
    return {k: v for k, v in batch.items() if v is not None}


def _unread(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> str:
    """Keys of batches that no module takes by name (a ``**kwargs`` would swallow them): ``"label, idx"``, or ""."""
    keys = dict.fromkeys(key for batch in batches for key in batch if key not in (*LABELS, *ADDED))
    calls = [model.forward, *{type(m).forward for m in model.modules()}]
    known = {name for call in calls for name in inspect.signature(call).parameters}
    return ", ".join(repr(key) for key in keys if key not in known)
