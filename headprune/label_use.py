"""How a model uses its labels: which convention gives the model's own loss, checked once on one or two examples.

Names of classes do not count. A model whose own loss is another one computes it itself, for one example at a time; one without a loss
of its own needs ``loss_fn`` where more than one convention is possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headprune import conventions
from headprune.batches import Rows
from headprune.divergence import IGNORED, gives_several, part_of, regresses
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import LABELS, call, is_encoder_decoder, takes, too_long, unlabelled

_DRAWS = 4  # other labels that an example is given
_LEAST_CHANGE = 1e-3  # nats; a loss that other labels change by less shows nothing
_CHANCE = 0.5  # share of the labels that may equal the input by chance
_Batch = Mapping[str, Any]
_Close = tuple[float, float]  # what rounding may do to a loss: relative and absolute


@dataclass(frozen=True)
class LabelUse:
    """How a model uses its labels.

    Attributes:
        convention: One of `headprune.conventions`; None if the model's own loss cannot be computed from its logits.
        own: Whether the model's own loss is another one, or has more terms (such as a router's): then the model computes
            it, for one example at a time.
        needs_labels: Whether the model needs the labels to run.
        skipped: Without a ``convention``: how many labels at the start of each example the own loss does not count, a mean over
            labels; None if it is no such mean (transformers' CTC models sum or average over examples), or not known.
    """

    convention: str | None
    own: bool = False
    needs_labels: bool = False
    skipped: int | None = None

    def of_real_tokens(self, model: nn.Module, batch: _Batch, rows: Rows) -> dict[str, Any]:
        """A batch without labels of padding, and without those that only padding predicts.

        A model's own loss may count them: then it changes with the batch that an example is in. An encoder-decoder's labels are not
        of the tokens that ``attention_mask`` is of.
        """
        labels, mask = batch.get("labels"), rows.table(batch, "attention_mask")
        if self.needs_labels or is_encoder_decoder(model) or "decoder_input_ids" in batch:
            return dict(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or mask is None or labels.shape != mask.shape:
            return dict(batch)
        ahead = int(self.convention == conventions.NEXT) if self.convention else self.skipped or 0
        hidden = (mask == 0) | F.pad(mask[:, : mask.shape[1] - ahead] == 0, (ahead, 0))
        return {**batch, "labels": labels.masked_fill(hidden.to(labels.device) & (labels >= 0), IGNORED)}

    def weights(self, labels: Tensor) -> Tensor:
        """How much each example's own loss weighs in a mean: ``[examples, tokens]`` to ``[examples]``."""
        if self.skipped is None:
            return torch.ones(len(labels), dtype=torch.long, device=labels.device)
        return (labels[:, self.skipped :] != IGNORED).sum(1)


def find_label_use(model: nn.Module, batches: Sequence[_Batch], rows: Rows) -> LabelUse:
    """How a model uses its labels, by its own loss of a few examples.

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
        possible, logits = conventions.possible_in(output, example), conventions.logits_in(output)
        close = (1e-4, 1e-5) if logits is None or logits.dtype in (torch.float32, torch.float64) else (2e-2, 1e-3)
        for each in batches if {conventions.LABEL, conventions.SAME} & set(possible) else ():
            try:
                conventions.check_classes(logits, each["labels"])
            except HeadPruneError:
                if not has_loss or _own_loss(model, each) is None:
                    raise
                possible = []  # the model's own loss ignores them
        first = LabelUse(None, needs_labels=needs, skipped=1)
        example, batch = (first.of_real_tokens(model, b, rows) for b in (example, batch))
        use = _by_own_loss(model, example, possible, needs, close) if has_loss else None
        if use is None:
            return LabelUse(_by_labels(model, possible, batches), needs_labels=needs)
        if use.convention and not use.own and not _holds(model, use.convention, batch, rows, close):
            use = replace(use, convention=use.convention if len(possible) == 1 else None, own=True)
        return use if use.convention else replace(use, skipped=_skipped(model, batch, row, rows, close))


def _most_labelled(batches: Sequence[_Batch]) -> tuple[_Batch, int]:
    """The example with the most labels: its batch, and its number there."""
    best, most = (batches[0], 0), -1
    for batch in batches:
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.ndim > 1:
            counts = (labels != IGNORED).flatten(1).sum(1)
            if int(counts.max()) > most:
                best, most = (batch, int(counts.argmax())), int(counts.max())
    return best


def _output(model: nn.Module, example: _Batch, has_loss: bool) -> tuple[Any, bool]:
    """The model's output for an example, and whether it needs the labels to run, as encoder-decoders do for their decoder's input."""
    if has_loss and not is_encoder_decoder(model):
        with suppress(Exception):  # an encoder-decoder within another module
            return call(model, unlabelled(example)), False
    return _labelled(model, example if has_loss else unlabelled(example)), has_loss


def _labelings(model: nn.Module, example: _Batch, per_token: bool) -> Iterator[_Batch]:
    """An example; if its tokens have labels, also with these drawn at random, and its decoder's input as it was.

    In a text that repeats one token, which a tokenizer makes of words that it does not know, all conventions give the same loss.
    """
    yield example
    if not per_token:
        return
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


def _by_own_loss(
    model: nn.Module, example: _Batch, possible: Sequence[str], needs: bool, close: _Close
) -> LabelUse | None:
    """The convention that gives the model's own loss, or what else is known of that loss; None if there is none."""
    rows: list[list[float]] = []
    for number, labelled in enumerate(_labelings(model, example, conventions.SAME in possible)):
        with suppress(*([HeadPruneError] if number else [])):  # a model may not take every class as a label
            rows += filter(None, [_losses(model, labelled, possible)])
    if not rows:
        return None
    off = _off(rows, close)
    if bool((fits := off[0] <= 1).any()):
        return LabelUse(possible[int(off.amax(0).where(fits, math.inf).argmin())], needs_labels=needs)
    if len(possible) == 1:  # one label per example, or the start and end of an answer: there is no choice
        return LabelUse(possible[0], own=True, needs_labels=needs)
    convention = _followed(rows, possible, close) if conventions.SAME in possible else _declared(model, possible)
    return LabelUse(convention, own=True, needs_labels=needs)


def _off(rows: Sequence[Sequence[float]], close: _Close) -> Tensor:
    """How far losses are from the model's own, the first of every row, in multiples of what rounding may do."""
    table = torch.tensor(rows, dtype=torch.float64)
    own, mine = table[:, :1], table[:, 1:]
    return ((mine - own).abs() / (close[1] + close[0] * own.abs())).nan_to_num(math.inf, math.inf)


def _followed(losses: Sequence[Sequence[float]], possible: Sequence[str], close: _Close) -> str | None:
    """The convention whose loss changes with an example's labels as the own loss does.

    A router's loss, or smoothed labels, only add a factor and a constant to these changes.
    """
    table = torch.tensor(losses, dtype=torch.float64)
    if len(torch.unique(table, dim=0)) < _DRAWS:
        return None  # any two losses lie on a line
    own, *mine = (table - table.mean(0)).T
    rests = []
    for x in mine:
        slope = float(x @ own / (x @ x).clamp(min=1e-30))
        rest = float((own - slope * x).abs().max() / own.abs().max().clamp(min=1e-30))
        rests.append(rest if slope > 0 and float(x.abs().max()) > _LEAST_CHANGE else math.inf)
    return possible[rests.index(min(rests))] if min(rests) < max(1e-2, 5 * close[0]) else None


def _holds(model: nn.Module, convention: str, batch: _Batch, rows: Rows, close: _Close) -> bool:
    """Whether a convention gives the model's own loss of a batch, or of each of its examples, if it is averaged otherwise."""

    whole = _losses(model, batch, [convention])
    if whole is not None and bool(_off([whole], close) <= 1):
        return True
    each = [own for one in rows.singles(batch) if (own := _losses(model, one, [convention])) is not None]
    return not each or bool((_off(each, close) <= 1).all())


def _skipped(model: nn.Module, batch: _Batch, first: int, rows: Rows, close: _Close) -> int | None:
    """`LabelUse.skipped`, from two examples, one of which keeps only its last label."""
    labels = rows.table(batch, "labels")
    if labels is None or labels.is_floating_point() or int((labels[first] != IGNORED).sum()) < 3:
        return None
    if labels.device.type != "cpu" and IGNORED not in labels:
        return None  # a model that does not know the mark of a missing label would end the process there
    pair = rows.take(batch, [first, (first + 1) % len(labels)])
    pair["labels"][1, (pair["labels"][1] != IGNORED).nonzero()[:-1]] = IGNORED
    losses = [loss for part in (pair, *rows.singles(pair)) if (loss := _own_loss(model, part)) is not None]
    if len(losses) < 3:
        return None
    each = torch.tensor(losses[1:], dtype=torch.float64)
    weights = [LabelUse(None, skipped=skipped).weights(pair["labels"]).cpu().double() for skipped in (0, 1)]
    means = [float(weight @ each / weight.sum()) for weight in weights]
    off = _off([[losses[0], *means]], close)[0]
    return int(off.argmin()) if float(off.min()) <= 1 else None


def _by_labels(model: nn.Module, possible: Sequence[str], batches: Sequence[_Batch]) -> str:
    """The one convention that fits the labels, for a model without a loss of its own.

    Raises:
        HeadPruneError: There is none, or several.
    """
    if not possible:
        raise conventions.no_logits()
    if conventions.SAME in possible:
        copied = [share for batch in batches if (share := _copied(batch)) is not None]
        # A text, of which the next tokens are predicted; or its tokens' classes.
        if copied and (min(copied) == 1 or max(copied) < _CHANCE):
            return conventions.NEXT if min(copied) == 1 else conventions.SAME
    elif (declared := _declared(model, possible)) is not None:
        return declared
    elif possible[0] != conventions.SQUARED or any(
        bool(((b["labels"] != 0) & (b["labels"] != 1)).any()) for b in batches
    ):
        return possible[0]
    raise HeadPruneError(
        f"It cannot be told how {type(model).__name__} compares its logits with these labels, {' or '.join(possible)}: it has no "
        "loss of its own, or none that is finite on these examples.",
        "Pass loss_fn=, give forward an argument labels and let its output have a loss, or set config.problem_type. Leave out texts of "
        "one token: there is nothing to predict in them.",
    )


def _copied(batch: _Batch) -> float | None:
    """The share of labels, but for first tokens', that equal an input's token in their place; None if no input has their shape."""
    labels = batch["labels"]
    alike = [v for v in unlabelled(batch).values() if isinstance(v, Tensor) and v.shape == labels.shape]
    counted = labels[:, 1:] != IGNORED
    shares = [float((value == labels)[:, 1:][counted].float().mean()) for value in alike if bool(counted.any())]
    return max(shares, default=None)


def _declared(model: nn.Module, possible: Sequence[str]) -> str | None:
    """The convention that the config declares."""
    declared = conventions.SQUARED if regresses(model) else conventions.BINARY if gives_several(model) else None
    return declared if declared in possible else None


def _labelled(model: nn.Module, example: _Batch) -> Any:
    try:
        return call(model, example)
    except Exception as error:
        raise HeadPruneError(
            f"The model does not run on an example with these labels: {type(error).__name__}: {first_line(error)}.",
            f"Check their type (floats for numbers and for several labels at once) and shape{too_long(model, example)}.",
        ) from error


def _losses(model: nn.Module, batch: _Batch, possible: Sequence[str]) -> list[float] | None:
    """A batch's loss: the model's own, and that by each convention (infinite if the logits do not fit); None if no label counts."""
    output = _labelled(model, batch)
    own = part_of(output, "loss")
    if not isinstance(own, Tensor) or not bool(own.isfinite().all()):
        return None
    losses = [float(own.double().mean())]
    # Padding is a place for an answer, as in a model's own loss.
    unmasked = {key: value for key, value in batch.items() if key != "attention_mask"}
    for convention in possible:
        try:
            outcome = conventions.outcome_of(convention, output, unmasked)
            losses.append(float((outcome.loss.double() * outcome.tokens).sum() / outcome.tokens.sum()))
        except HeadPruneError:
            losses.append(math.inf)
    return losses


def _own_loss(model: nn.Module, batch: _Batch) -> float | None:
    """The model's own loss of a batch; None if the model does not run on it, or gives none."""
    with suppress(HeadPruneError):
        return next(iter(_losses(model, batch, []) or ()), None)
    return None
