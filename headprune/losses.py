"""The loss of each example: scores are derivatives and differences of it.

transformers' models return one mean over the batch (and over all of its tokens). Scores need every
example's own loss, so it is computed from the logits here, and compared once with the model's own.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.batches import Rows, apparent_size, find_rows
from headprune.conventions import Found, find, hidden_labels, unlabelled
from headprune.divergence import IGNORED, Divergence
from headprune.errors import HeadPruneError
from headprune.inputs import ADDED, LABELS, call, inputs_of, tensors
from headprune.outcome import BINARY, CLASSES, SQUARED, TOKENS, Outcome, loss_in, no_logits
from headprune.reduction import LABELS_MEAN, find_reduction

_CHECKED = 4  # batches of which the loss of some examples is compared with the model's own

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
        rows: How examples lie in the batches; until `prepare` was called it goes by the names of tensors.
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
        self._found: Found | None = None

    @property
    def about(self) -> str:
        if self.loss_fn is not None:
            return "the given function"
        return self.divergence.about if self.distils else "the model's own"

    def unit(self, unit: str) -> str:
        """The unit of a method's scores, for the loss that was measured, once `prepare` was called."""
        if self.distils:
            differs = " added" in unit or self.divergence.compares_numbers
            loss = self.divergence.about if differs else "loss (nats) of labels drawn from the dense model's answers"
        elif self.loss_fn is not None:
            loss = "loss"  # the user's own: nobody knows that it is in nats
        elif (convention := self._known.convention) is not None and convention.what == SQUARED:
            loss = "squared error"
        else:
            return unit
        return unit.replace("loss (nats)", loss).replace("nats²", "nats²" if self.distils else f"{loss}²")

    def prepare(self, batches: Sequence[Any]) -> list[Any]:
        """Find out how the model compares logits with labels. Call this first, outside of any gate.

        Returns:
            The batches to use: single examples, for a model whose own loss is another one.

        Raises:
            HeadPruneError: Batches without labels among others with labels, both ``loss_fn`` and ``distil``, or what
                `headprune.conventions.find` raises.
        """
        if not batches:
            return []
        if self.loss_fn is not None:
            if self.distils:
                raise HeadPruneError("Both a loss_fn and distil were given.", "Choose one.")
            self.rows = find_rows(self.model, batches, lambda batch: [self._given(batch)], count=self._count)
            return list(batches)
        batches = [_without_nothing(self.model, batch) for batch in batches]
        labelled = [any(name in batch for name in LABELS) for batch in batches]
        if any(labelled) and not all(labelled) and not self.distils:
            raise HeadPruneError(
                f"Batch {labelled.index(False)} has no labels, but others have.", "Label all, or none."
            )
        unread = _unread(self.model, batches)
        if unread and not any(labelled) and not self.distils:
            raise HeadPruneError(
                f'The batches have no "labels", and {type(self.model).__name__} takes no {unread}.',
                'Rename the key to "labels" if it holds them, else leave it out; distil=True needs no labels.',
            )
        if unread:
            warnings.warn(f"headprune: {type(self.model).__name__} takes no {unread}, so it is not read.", stacklevel=2)
        self.distils |= not any(labelled)
        self.rows = self.divergence.rows = find_rows(
            self.model, batches, lambda batch: tensors(call(self.model, inputs_of(self.model, batch)))
        )
        if self.distils:
            starts = accumulate(map(self.rows.size, batches), initial=0)
            return [self.divergence.taught(batch, start) for batch, start in zip(batches, starts, strict=False)]
        self._found = find(self.model, batches, _probe_examples(batches, self.rows))
        if self._found.convention is None:
            self._found = replace(self._found, reduction=find_reduction(self.model, batches, self.rows))
        batches = [_predicted(batch, self._ahead) for batch in batches]
        return [row for batch in batches for row in self.rows.singles(batch)] if self._found.own else list(batches)

    def __call__(self, batch: Any) -> Tensor:
        """Losses ``[batch]``; differentiable under grad mode."""
        if self.loss_fn is not None:
            return self._custom(batch)
        if self.distils:
            return self.divergence(batch)
        if self.own:
            return self._own_loss(batch).reshape(1)
        outcome = self.outcome(batch)
        loss = outcome.loss
        if loss.shape == outcome.tokens.shape and bool((outcome.tokens == 0).any()):
            row = int((outcome.tokens == 0).nonzero()[0])
            raise HeadPruneError(f"Example {row} of a batch has no label (all are {IGNORED}).", "Leave it out.")
        if loss.shape != (size := self.rows.size(batch),):
            raise HeadPruneError(
                f"The model gave {tuple(loss.shape)} losses for {size} examples.",
                "The first dimension of logits and labels must be the batch.",
            )
        return loss

    @property
    def own(self) -> bool:
        """Whether `prepare` found that the model's loss is another one than the cross-entropy of its logits."""
        return self._known.own

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that can be computed beside the loss, by what `prepare` found: ``"accuracy"`` if logits are compared with
        classes, ``"perplexity"`` if the loss is a mean over labels."""
        if self.loss_fn is not None or self.distils:
            return ()
        if (convention := self._known.convention) is not None:
            return () if convention.what == SQUARED else ("accuracy", "perplexity")
        reduction = self._known.reduction
        return ("perplexity",) if reduction and reduction.kind == LABELS_MEAN else ()

    @property
    def classifies(self) -> bool:
        """Whether what is predicted are classes, the same for all examples; not so where it is a place in a text."""
        convention = None if self.loss_fn is not None or self.distils else self._known.convention
        return convention is not None and convention.what in (CLASSES, TOKENS, BINARY)

    def of_output(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        """Losses ``[batch]`` of a model's output for a batch, from its logits; 0 for an example without a label.

        Raises:
            HeadPruneError: No logits that fit the labels, or `prepare` found that the loss cannot be made from them.
        """
        if self._known.convention is None:
            raise no_logits()
        return self._known.convention.outcome(output, batch).loss

    def outcome(self, batch: Any) -> Outcome:
        """Loss and predictions: from the logits if they can be compared with labels, else the model's own loss, without predictions.

        Raises:
            HeadPruneError: No labels, or labels that do not fit the logits.
        """
        if self.loss_fn is not None:
            loss = self._custom(batch)
            return _bare(loss, torch.ones_like(loss, dtype=torch.long))
        if not any(name in batch for name in LABELS):
            raise HeadPruneError("The examples have no labels.", 'Give dicts with "labels".')
        known = self._known
        if known.convention is None:
            loss = self._own_loss(batch).reshape(1)
            tokens = known.reduction.weights(batch["labels"]) if known.reduction else torch.ones_like(loss).long()
            return _bare(loss, tokens.to(loss.device))
        output = call(self.model, batch if known.gives_labels else unlabelled(batch))
        return known.convention.outcome(output, batch)

    @property
    def _ahead(self) -> int:
        """How many tokens before its label a prediction is made, as far as that was found out."""
        convention, reduction = self._known.convention, self._known.reduction
        return convention.ahead if convention else reduction.unread if reduction else 0

    @property
    def _known(self) -> Found:
        assert self._found is not None, "prepare() comes first"
        return self._found

    def _custom(self, batch: Any) -> Tensor:
        loss, size = self._given(batch), self.rows.size(batch)
        if loss.shape != (size,):
            raise _not_each(tuple(loss.shape), size)
        return loss

    def _count(self, batch: Any) -> int | None:
        """How many losses ``loss_fn`` returns for a batch; None if the model does not run on it."""
        try:
            with torch.no_grad():
                loss = self._given(batch)
        except HeadPruneError:
            raise
        except Exception:  # scoring raises it again, with the place
            return None
        if not any(len(loss) in t.shape for t in tensors(batch)):
            raise _not_each(tuple(loss.shape), apparent_size(batch))
        return len(loss)

    def _given(self, batch: Any) -> Tensor:
        """What ``loss_fn`` returns for a batch."""
        assert self.loss_fn is not None
        if isinstance(batch, Mapping):
            inputs, labels = {k: v for k, v in batch.items() if k not in LABELS}, batch.get("labels")
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            inputs, labels = batch
        else:
            raise HeadPruneError("A batch is no pair (inputs, labels).", "With loss_fn=, give pairs, or dicts.")
        loss = self.loss_fn(call(self.model, inputs), labels)
        if not isinstance(loss, Tensor) or loss.ndim != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise _not_each(shape, apparent_size(batch))
        return loss

    def _own_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The model's own loss of a batch of one."""
        loss = loss_in(call(self.model, batch))
        assert isinstance(loss, Tensor)
        return loss.mean()


def _bare(loss: Tensor, tokens: Tensor) -> Outcome:
    return Outcome(loss, tokens, [], [])


def _not_each(shape: Any, size: int) -> HeadPruneError:
    return HeadPruneError(
        f"loss_fn returned {shape} for {size} examples, not one loss per example.",
        'Use reduction="none" and average over everything but the batch.',
    )


def _without_nothing(model: nn.Module, batch: Any) -> dict[str, Any]:
    """A batch without arguments that are None."""
    if not isinstance(batch, Mapping):
        first = next(iter(inspect.signature(model.forward).parameters), "input")
        raise HeadPruneError(
            f"A batch is a {type(batch).__name__}, and there is no loss_fn.",
            f'Give dicts by the names of forward\'s arguments, such as {{"{first}": inputs, "labels": labels}}, which also have an '
            "accuracy; or pairs (inputs, labels) together with loss_fn=.",
        )
    return {k: v for k, v in batch.items() if v is not None}


def _predicted(batch: dict[str, Any], ahead: int) -> dict[str, Any]:
    """A batch without labels that only padding predicts: that of a text's first token, where padding stands before it.

    The model's own loss counts them, so that it changes with the batch that an example is in.
    """
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if not ahead or not isinstance(labels, Tensor) or not isinstance(mask, Tensor) or labels.shape != mask.shape:
        return batch
    blind = F.pad(mask[:, :-ahead] == 0, (ahead, 0))
    return {**batch, "labels": labels.masked_fill(blind.to(labels.device), IGNORED)}


def _unread(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> str:
    """Keys of batches that no module takes by name, as a ``**kwargs`` would swallow them: ``"label, idx"``, or ""."""
    given = dict.fromkeys(key for batch in batches for key in batch if key not in (*LABELS, *ADDED))
    calls = [model.forward, *{type(m).forward for m in model.modules()}]
    known = {name for call in calls for name in inspect.signature(call).parameters}
    return ", ".join(repr(key) for key in given if key not in known)


def _probe_examples(batches: Sequence[Mapping[str, Any]], rows: Rows) -> list[Any]:
    """Single examples that show which loss a model has: of several batches, the one with the fewest labels, and some others."""
    found = []
    for batch in list(batches)[:: max(1, len(batches) // _CHECKED)][:_CHECKED]:
        labels, mask = batch.get("labels"), rows.table(batch, "attention_mask")
        row = 0
        if isinstance(labels, Tensor) and labels.ndim > 1:
            counts = (labels != IGNORED).flatten(1).sum(1)
            row = int(torch.where(counts == 0, counts.max() + 1, counts).argmin())
        elif mask is not None:
            row = int((mask != 0).sum(1).argmin())
        size = rows.size(batch)
        found += [rows.take(batch, [i]) for i in dict.fromkeys((0, row, size // 3, 2 * size // 3, size - 1))]
    for batch in batches:  # padding that has a label
        hidden = hidden_labels(batch)
        if hidden is not None and bool(hidden.any()):
            return [*found, rows.take(batch, [int(hidden.flatten(1).any(1).nonzero()[0])])]
    return found
