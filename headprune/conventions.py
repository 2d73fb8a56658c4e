"""Conventions by which models compare logits with labels, and each example's loss and predictions by them.

Class names do not matter: the convention is the one that gives the model's own loss, checked once on one or two
examples. If none does, the model computes its loss itself, for one example at a time. Without a loss of its own a model
needs ``loss_fn`` if more than one convention is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune.batches import Rows
from headprune.divergence import IGNORED, gives_several, logits_in, part_of, regresses
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import LABELS, call, doubled, is_encoder_decoder, takes, too_long, unlabelled, widened

SPAN = "an answer's start and end"
LABEL = "one label per example"
SAME = "a label per token"  # compared with the logits of the same token
NEXT = "the next token's label"  # where something precedes the text (an image, a prompt), its last logits predict the first label
SQUARED = "numbers"  # squared errors
BINARY = "several labels at once"  # binary cross-entropies

_DRAWS = 4  # random labelings of an example
_LEAST_CHANGE = 1e-3  # nats; if other labels change a loss by less, it is no evidence
_CHANCE = 0.5  # share of the labels that may equal the input by chance
_Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Losses and predictions for a batch.

    Attributes:
        loss: ``[batch]``, in nats; the mean over an example's labelled tokens.
        tokens: ``[batch]``, each example's weight in a mean: its labelled tokens (1 for one label per example, 2 for an
            answer's start and end); 1 where the model's own loss is used and is not a mean over labels.
        predictions: For each example, the predicted classes ``[tokens]``; empty where the model predicts no classes.
        targets: For each example, the labels ``[tokens]``, or the numbers to predict; empty where neither is compared.
        scores: For each example, what is compared with one label or several at once: logits ``[classes]``, or numbers; else empty.
    """

    loss: Tensor
    tokens: Tensor
    predictions: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class LabelUse:
    """How a model uses its labels.

    Attributes:
        convention: Such as `NEXT`; None if the model's own loss cannot be computed from its logits.
        own: Whether the model's own loss differs from the convention's, as by a router's term: then the model computes
            it, for one example at a time.
        needs_labels: Whether the model needs the labels to run.
        skipped: Without a ``convention``, if the model's own loss is a mean over labels: how many labels at the start
            of each example it skips. None if it is no such mean (transformers' CTC models sum or average over
            examples), or not known.
    """

    convention: str | None = None
    own: bool = False
    needs_labels: bool = False
    skipped: int | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics besides the loss: accuracy if logits are compared with classes, perplexity for a mean over labels."""
        if self.convention == SQUARED or (self.convention, self.skipped) == (None, None):
            return ()
        return ("accuracy", "perplexity") if self.convention else ("perplexity",)

    @property
    def classifies(self) -> bool:
        """Whether the model predicts classes that are the same for all examples, not places in a text."""
        return self.convention not in (None, SPAN, SQUARED)

    def of_real_tokens(self, model: nn.Module, batch: _Batch, rows: Rows) -> dict[str, Any]:
        """A batch without labels of padding, and without those that only padding predicts.

        A model's own loss may count these, and then depends on an example's batch. Batches of encoder-decoders stay as
        they are: their ``attention_mask`` is not of the tokens that the labels are of.
        """
        labels, mask = batch.get("labels"), rows.table(batch, "attention_mask")
        if self.needs_labels or is_encoder_decoder(model) or "decoder_input_ids" in batch:
            return dict(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or mask is None or labels.shape != mask.shape:
            return dict(batch)
        ahead = int(self.convention == NEXT) if self.convention else self.skipped or 0
        hidden = (mask == 0) | F.pad(mask[:, : mask.shape[1] - ahead] == 0, (ahead, 0))
        return {**batch, "labels": labels.masked_fill(hidden.to(labels.device) & (labels >= 0), IGNORED)}

    def weights(self, labels: Tensor) -> Tensor:
        """How much each example's own loss weighs in a mean: ``[examples, tokens]`` to ``[examples]``."""
        if self.skipped is None:
            return torch.ones(len(labels), dtype=torch.long, device=labels.device)
        return (labels[:, self.skipped :] != IGNORED).sum(1)


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


def outcome_of(convention: str | None, output: Any, batch: Mapping[str, Any]) -> Outcome:
    """Losses and predictions of a batch, from the model's output and the labels.

    Raises:
        HeadPruneError: Logits that do not fit the labels, or labels that are no classes of the model.
    """
    if convention not in possible_in(output, batch):
        raise _no_logits()
    if convention == SPAN:
        return _span(output, batch)
    logits, labels = logits_in(output), batch["labels"]
    assert logits is not None
    if convention in (SQUARED, BINARY):
        return _numbers(logits, labels, convention == BINARY)
    check_classes(logits, labels)
    if convention == LABEL:
        return replace(_classes(logits[:, None], labels.reshape(-1, 1)), scores=list(widened(logits)))
    before = logits.shape[1] - labels.shape[1]
    if convention == SAME:
        return _classes(logits[:, before:], labels)
    return _classes(logits[:, :-1], F.pad(labels, (before, 0), value=IGNORED)[:, 1:])


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


def _no_logits() -> HeadPruneError:
    return HeadPruneError("The model's output has no logits that fit its labels.", "Pass loss_fn=.")


def _span(output: Any, batch: Mapping[str, Any]) -> Outcome:
    """Question answering: the mean of the start's and the end's cross-entropy over the tokens, without padding."""
    logits = torch.stack([part_of(output, "start_logits"), part_of(output, "end_logits")], dim=1)
    labels = torch.stack([batch["start_positions"].flatten(), batch["end_positions"].flatten()], dim=1)
    unknown = (labels < 0) | (labels >= logits.shape[2])
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == logits[:, 0].shape:
        hidden = (mask.to(logits.device) == 0)[:, None].repeat(1, 2, 1)
        # A labelled place always counts.
        hidden = hidden.scatter(2, labels.masked_fill(unknown, 0)[..., None], False)
        logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    return _classes(logits, labels.masked_fill(unknown, IGNORED))


def _numbers(logits: Tensor, labels: Tensor, binary: bool) -> Outcome:
    """Squared errors, or binary cross-entropies for several labels at once; the mean over each example's numbers."""
    flat, wanted = (widened(t).reshape(len(t), -1) for t in (logits, labels))
    tokens = torch.full((len(logits),), labels[0].numel(), device=logits.device)
    if not binary:
        return Outcome(((flat - wanted) ** 2).mean(dim=1), tokens, targets=list(wanted), scores=list(flat))
    loss = F.binary_cross_entropy_with_logits(flat, wanted, reduction="none").mean(dim=1)
    return Outcome(loss, tokens, list((flat > 0).to(wanted).detach()), list(wanted), list(flat))


def _classes(logits: Tensor, labels: Tensor) -> Outcome:
    """Cross-entropy of ``logits`` [batch, tokens, classes] against ``labels`` [batch, tokens]."""
    counted = labels != IGNORED
    # In rows of classes: with the classes in the middle, a large vocabulary takes five times as long.
    rows = widened(logits).flatten(0, 1)
    loss = F.cross_entropy(rows, labels.long().flatten(), ignore_index=IGNORED, reduction="none").view(labels.shape)
    tokens = counted.sum(dim=1)
    guesses, known, which = (t.cpu() for t in (logits.detach().argmax(dim=-1), labels, counted))
    predictions, targets = ([row[own] for row, own in zip(rows, which, strict=True)] for rows in (guesses, known))
    return Outcome(loss.sum(dim=1) / tokens.clamp(min=1), tokens, predictions, targets)


# -- which convention is the model's own ---------------------------------------------------------------


def find_label_use(model: nn.Module, batches: Sequence[_Batch], rows: Rows) -> LabelUse:
    """Find how a model uses its labels, from its own loss on a few examples.

    Args:
        batches: All batches, with labels.
        rows: How examples lie in them.

    Raises:
        HeadPruneError: The model does not run on the examples, labels are no classes of the model, or the convention cannot be determined.
    """
    batch, row = _most_labelled(batches)
    example = rows.take(batch, [row])
    has_loss = any(takes(model, name) for name in LABELS if name in example)
    with torch.no_grad():
        output, needs = _output(model, example, has_loss)
        possible, logits = possible_in(output, example), logits_in(output)
        for each in batches if {LABEL, SAME} & {*possible} else ():
            try:
                check_classes(logits, each["labels"])
            except HeadPruneError:
                if not (has_loss and _losses(model, each, [], may_fail=True)):
                    raise
                possible = []  # the model's own loss ignores them
        real = LabelUse(needs_labels=needs, skipped=1).of_real_tokens
        example, batch = real(model, example, rows), real(model, batch, rows)
        labelings = _labelings(model, example) if SAME in possible else [example]
        # A model may not take every class as a label.
        found = (_losses(model, each, possible, may_fail=each is not example) for each in labelings)
        table = [losses for losses in found if losses] if has_loss else []
        if not table:
            return LabelUse(_by_labels(model, possible, batches), needs_labels=needs)
        rounding = 1e-4 if logits is None or logits.dtype in (torch.float32, torch.float64) else 2e-2
        convention, fits = _by_own_loss(model, torch.tensor(table, dtype=torch.float64), possible, rounding)
        if convention and fits and not _holds(model, convention, batch, rows, rounding):
            convention, fits = convention if len(possible) == 1 else None, False
        skipped = None if convention else _skipped(model, batch, row, rows, rounding)
        return LabelUse(convention, not fits, needs, skipped)


def _most_labelled(batches: Sequence[_Batch]) -> tuple[_Batch, int]:
    """The example with the most labels: its batch, and its number there."""
    labels = [batch.get("labels") for batch in batches]
    tables = [t if isinstance(t, Tensor) and t.ndim > 1 else torch.full((1, 1), IGNORED) for t in labels]
    counts = [(t != IGNORED).flatten(1).sum(1) for t in tables]
    best = max(range(len(batches)), key=lambda i: int(counts[i].max()))
    return batches[best], int(counts[best].argmax())


def _output(model: nn.Module, example: _Batch, has_loss: bool) -> tuple[Any, bool]:
    """The model's output for an example, and whether it needs the labels to run, as encoder-decoders do for their decoder's input."""
    if has_loss and not is_encoder_decoder(model):
        with suppress(Exception):  # an encoder-decoder within another module
            return call(model, unlabelled(example)), False
    return _labelled(model, example if has_loss else unlabelled(example)), has_loss


def _labelings(model: nn.Module, example: _Batch) -> Iterator[_Batch]:
    """An example with token labels, and copies of it with random labels and the same decoder input.

    They are needed because in a text that repeats one token (as for unknown words), all conventions give the same loss.
    """
    yield example
    labels = example["labels"]
    classes = torch.unique(labels[labels != IGNORED])
    if len(classes) == 1:
        classes = torch.cat([classes, classes + (-1 if int(classes) else 1)])
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if is_encoder_decoder(model) and make is not None and "decoder_input_ids" not in example:
        example = {**example, "decoder_input_ids": make(labels=labels)}
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS if len(classes) else 0):
        drawn = classes[torch.randint(len(classes), labels.shape, generator=generator).to(classes.device)]
        yield {**example, "labels": torch.where(labels == IGNORED, labels, drawn)}


def _by_own_loss(model: nn.Module, table: Tensor, possible: Sequence[str], rounding: float) -> tuple[str | None, bool]:
    """The convention that a model's own loss follows, if any, and whether it gives this loss; from `_losses`."""
    off = _off(table[:, 1:], table[:, :1], rounding)
    if bool((off[0] <= 1).any()):  # in half precision several may fit
        return possible[int(off.amax(0).where(off[0] <= 1, math.inf).argmin())], True
    if len(possible) == 1:  # one label per example, or the start and end of an answer: there is no choice
        return possible[0], False
    if SAME not in possible or len(torch.unique(table, dim=0)) < _DRAWS:  # any two losses lie on a line
        return _declared(model, possible), False
    # A router's loss, or smoothed labels, only add a factor and a constant to what other labels change.
    shows = (table - table.mean(0)).abs().amax(0)[1:] > _LEAST_CHANGE
    alike = table.T.corrcoef()[0, 1:].where(shows, -1).nan_to_num(-1)
    follows = float(alike.max()) > 1 - max(1e-2, 5 * rounding) ** 2 / 2
    return possible[int(alike.argmax())] if follows else None, False


def _off(losses: Tensor, own: Tensor, rounding: float) -> Tensor:
    """How far losses are from the model's own, in multiples of what rounding may do."""
    return ((losses - own).abs() / (min(rounding / 10, 1e-3) + rounding * own.abs())).nan_to_num(math.inf, math.inf)


def _holds(model: nn.Module, convention: str, batch: _Batch, rows: Rows, rounding: float) -> bool:
    """Whether a convention gives the model's own loss of a batch, or of each of its examples, if it is averaged otherwise."""

    def fits(part: _Batch) -> bool | None:
        losses = torch.tensor(_losses(model, part, [convention]), dtype=torch.float64)
        return bool(_off(losses[1], losses[0], rounding) <= 1) if len(losses) else None

    return bool(fits(batch)) or all(fits(one) is not False for one in rows.singles(batch))


def _skipped(model: nn.Module, batch: _Batch, first: int, rows: Rows, rounding: float) -> int | None:
    """`LabelUse.skipped`, from two examples, one of which keeps only its last label."""
    labels = rows.table(batch, "labels")
    if labels is None or labels.is_floating_point() or int((labels[first] != IGNORED).sum()) < 3:
        return None
    if labels.device.type != "cpu" and IGNORED not in labels:
        return None  # there, a model that does not know the mark of a missing label would end the process
    pair = rows.take(batch, [first, (first + 1) % len(labels)])
    pair["labels"][1, (pair["labels"][1] != IGNORED).nonzero()[:-1]] = IGNORED
    own, *each = (_losses(model, part, [], may_fail=True) for part in (pair, *rows.singles(pair)))
    if not own or not all(each):
        return None
    weights = torch.stack([LabelUse(skipped=skipped).weights(pair["labels"]) for skipped in (0, 1)]).cpu().double()
    means = (weights @ torch.tensor(each, dtype=torch.float64)).flatten() / weights.sum(1)
    off = _off(means, torch.tensor(own, dtype=torch.float64), rounding)
    return int(off.argmin()) if float(off.min()) <= 1 else None


def _by_labels(model: nn.Module, possible: Sequence[str], batches: Sequence[_Batch]) -> str:
    """The one convention that fits the labels, for a model without a loss of its own.

    Raises:
        HeadPruneError: There is none, or several.
    """
    if not possible:
        raise _no_logits()
    if declared := _declared(model, possible):
        return declared
    if SAME in possible:
        copied = [share for batch in batches if (share := _copied(batch)) is not None]
        # A text, of which the next tokens are predicted; or its tokens' classes.
        if copied and (min(copied) == 1 or max(copied) < _CHANCE):
            return NEXT if min(copied) == 1 else SAME
    elif possible[0] != SQUARED or any(bool((b["labels"] * (b["labels"] - 1)).any()) for b in batches):
        return possible[0]
    raise HeadPruneError(
        f"It cannot be told how {type(model).__name__} compares its logits with these labels, {' or '.join(possible)}: it has no "
        "loss of its own, or none that is finite on these examples.",
        "Pass loss_fn=, give forward an argument labels and let its output have a loss, or set config.problem_type. Leave out texts of "
        "one token: there is nothing to predict in them.",
    )


def _copied(batch: _Batch) -> float | None:
    """The share of labels (first tokens' aside) that equal the input token in their place; None without such input."""
    labels = batch["labels"]
    counted = labels[:, 1:] != IGNORED
    tokens = {k: v for k, v in unlabelled(batch).items() if not k.endswith(("mask", "type_ids"))}  # 1 is a class, too
    alike = [v for v in tokens.values() if isinstance(v, Tensor) and v.shape == labels.shape]
    shares = [float((v == labels)[:, 1:][counted].float().mean()) for v in alike if bool(counted.any())]
    return max(shares, default=None)


def _declared(model: nn.Module, possible: Sequence[str]) -> str | None:
    """The convention that the config declares, or the model itself as ``headprune_convention``."""
    by_config = SQUARED if regresses(model) else BINARY if gives_several(model) else None
    declared: str | None = getattr(model, "headprune_convention", None) or by_config
    return declared if declared in possible else None


def _labelled(model: nn.Module, example: _Batch) -> Any:
    try:
        return call(model, example)
    except Exception as error:
        raise HeadPruneError(
            f"The model does not run on an example with these labels: {type(error).__name__}: {first_line(error)}.",
            f"Check their type (floats for numbers and for several labels at once) and shape{too_long(model, example)}.",
        ) from error


def _losses(model: nn.Module, batch: _Batch, possible: Sequence[str], *, may_fail: bool = False) -> list[float]:
    """A batch's loss: the model's own, and that by each convention (infinite if the logits do not fit).

    Empty if no label counts; or, with ``may_fail``, if the model does not run on the batch.
    """
    with suppress(*([HeadPruneError] if may_fail else [])):
        output = _labelled(model, batch)
        own = part_of(output, "loss")
        if isinstance(own, Tensor) and bool(own.isfinite().all()):
            return [float(doubled(own).mean()), *(_mean_loss(each, output, batch) for each in possible)]
    return []


def _mean_loss(convention: str, output: Any, batch: _Batch) -> float:
    """The mean loss over labels; an answer may lie in padding, as in a model's own loss."""
    with suppress(HeadPruneError):
        outcome = outcome_of(convention, output, {k: v for k, v in batch.items() if k != "attention_mask"})
        return float((doubled(outcome.loss).cpu() * outcome.tokens.cpu()).sum() / outcome.tokens.sum())
    return math.inf
