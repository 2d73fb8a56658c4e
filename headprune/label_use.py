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

from headprune.batches import Rows
from headprune.conventions import (
    BINARY,
    CLASSES,
    SQUARED,
    Convention,
    conventions,
    logits_in,
    loss_in,
    no_logits,
    refuse_unknown,
    unknown_label,
)
from headprune.divergence import IGNORED, gives_several, regresses
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
        convention: None if the model's own loss cannot be computed from its logits.
        own: Whether the model's own loss is another one, or has more terms (such as a router's): then the model computes
            it, for one example at a time.
        needs_labels: Whether the model needs the labels to run.
        skipped: Without a ``convention``: how many labels at the start of each example the own loss does not count, a mean over
            labels; None if it is no such mean (transformers' CTC models sum or average over examples), or not known.
    """

    convention: Convention | None
    own: bool = False
    needs_labels: bool = False
    skipped: int | None = None

    @property
    def ahead(self) -> int:
        """How many tokens before its label a prediction is made, as far as that is known."""
        return self.convention.ahead if self.convention else self.skipped or 0

    def of_real_tokens(self, model: nn.Module, batch: _Batch, rows: Rows, ahead: int | None = None) -> dict[str, Any]:
        """A batch without labels of padding, and without those that only padding predicts, ``ahead`` tokens before them.

        A model's own loss may count them: then it changes with the batch that an example is in. An encoder-decoder's labels are not
        of the tokens that ``attention_mask`` is of.
        """
        labels, mask = batch.get("labels"), rows.table(batch, "attention_mask")
        if self.needs_labels or is_encoder_decoder(model) or "decoder_input_ids" in batch:
            return dict(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or mask is None or labels.shape != mask.shape:
            return dict(batch)
        ahead = self.ahead if ahead is None else ahead
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
    takes_labels = any(takes(model, name) for name in LABELS if name in example)
    with torch.no_grad():
        output, needs = _output(model, example, takes_labels)
        possible, logits = conventions(output, example), logits_in(output)
        close = (1e-4, 1e-5) if logits is None or logits.dtype in (torch.float32, torch.float64) else (2e-2, 1e-3)
        if logits is not None and possible and possible[0].what == CLASSES:
            odd = next((b for b in batches if unknown_label(b["labels"], logits.shape[-1]) is not None), None)
            if odd is not None:  # the model's own loss may ignore them
                if not takes_labels or _own_loss(model, odd) is None:
                    refuse_unknown(odd["labels"], logits.shape[-1])
                possible = []
        example, batch = (
            LabelUse(None, needs_labels=needs).of_real_tokens(model, b, rows, 1) for b in (example, batch)
        )
        use = _by_own_loss(model, example, output, possible, needs, close) if takes_labels else None
        if use is None:
            return LabelUse(_without_own_loss(model, possible, batches), needs_labels=needs)
        if use.convention is not None and not use.own and not _holds(model, use.convention, batch, rows, close):
            use = replace(use, convention=use.convention if len(possible) == 1 else None, own=True)
        return use if use.convention else replace(use, skipped=_skipped(model, batch, row, rows, close))


def _most_labelled(batches: Sequence[_Batch]) -> tuple[_Batch, int]:
    """The example with the most labels: its batch, and its number there."""
    batch, row, most = batches[0], 0, -1
    for each in batches:
        labels = each.get("labels")
        counts = (labels != IGNORED).flatten(1).sum(1) if isinstance(labels, Tensor) and labels.ndim > 1 else None
        if counts is not None and int(counts.max()) > most:
            batch, row, most = each, int(counts.argmax()), int(counts.max())
    return batch, row


def _labelings(model: nn.Module, example: _Batch, possible: Sequence[Convention]) -> Iterator[_Batch]:
    """An example; if its tokens have labels, also with these drawn at random, and its decoder's input as it was.

    In a text that repeats one token, which a tokenizer makes of words that it does not know, all conventions give the same loss.
    """
    yield example
    if not _per_token(possible):
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
    model: nn.Module, example: _Batch, plain: Any, possible: Sequence[Convention], needs: bool, close: _Close
) -> LabelUse | None:
    """The convention that gives the model's own loss, or what else is known of that loss; None if there is none.

    Args:
        plain: The model's output without labels; not used if the model needs them (``needs``).
    """
    losses: list[list[float]] = []  # [labelings, own loss and conventions]
    for number, labelled in enumerate(_labelings(model, example, possible)):
        with suppress(*([HeadPruneError] if number else [])):  # a model may not take every class as a label
            output = _labelled(model, labelled)
            if (own := loss_in(output)) is not None:  # else no label counts
                mine = (_loss_by(c, output if needs else plain, labelled) for c in possible)
                losses.append([float(own.double().mean()), *mine])
    if not losses:
        return None
    table = torch.tensor(losses, dtype=torch.float64)
    fits = _deviation(table[:1], close) <= 1
    if bool(fits.any()):
        return LabelUse(possible[int(_deviation(table, close).where(fits, math.inf).argmin())], needs_labels=needs)
    if len(possible) == 1:  # one label per example, or the start and end of an answer: there is no choice
        return LabelUse(possible[0], own=True, needs_labels=needs)
    convention = _followed(table, possible, close) if _per_token(possible) else _declared(model, possible)
    return LabelUse(convention, own=True, needs_labels=needs)


def _per_token(possible: Sequence[Convention]) -> bool:
    """Whether labels are those of tokens: their own, or the next ones'."""
    return len(possible) == 2 and possible[0].what == CLASSES


def _holds(model: nn.Module, convention: Convention, batch: _Batch, rows: Rows, close: _Close) -> bool:
    """Whether a convention gives the model's own loss of a batch, or of each of its examples, if it is averaged otherwise."""

    def near(part: _Batch) -> bool | None:
        output = _labelled(model, part)
        if (own := loss_in(output)) is None:
            return None
        outcome = convention.outcome(output, _unmasked(part))
        mine = (outcome.loss.double() * outcome.tokens).sum() / outcome.tokens.sum()
        return float(_deviation(torch.stack([own.double().mean(), mine])[None], close)) <= 1

    return bool(near(batch)) or all(near(row) is not False for row in rows.singles(batch))


def _deviation(table: Tensor, close: _Close) -> Tensor:
    """How far conventions are at most from the own loss ``[conventions]``, in multiples of what rounding may do."""
    own, mine = table[:, :1], table[:, 1:]
    return ((mine - own).abs() / (close[1] + close[0] * own.abs())).nan_to_num(math.inf, math.inf).amax(0)


def _followed(table: Tensor, possible: Sequence[Convention], close: _Close) -> Convention | None:
    """The convention whose loss changes with an example's labels as the own loss does.

    A router's loss, or smoothed labels, only add a factor and a constant to these changes.
    """
    if len(torch.unique(table, dim=0)) < _DRAWS:
        return None  # any two losses lie on a line
    own, *mine = (table - table.mean(0)).T
    rests = []
    for x in mine:
        slope = float(x @ own / (x @ x).clamp(min=1e-30))
        rest = float((own - slope * x).abs().max() / own.abs().max().clamp(min=1e-30))
        rests.append(rest if slope > 0 and float(x.abs().max()) > _LEAST_CHANGE else math.inf)
    return possible[rests.index(min(rests))] if min(rests) < max(1e-2, 5 * close[0]) else None


def _skipped(model: nn.Module, batch: _Batch, first: int, rows: Rows, close: _Close) -> int | None:
    """`LabelUse.skipped`, from two examples, one of which keeps only its last label."""
    labels = rows.table(batch, "labels")
    if labels is None or labels.is_floating_point() or int((labels[first] != IGNORED).sum()) < 3:
        return None
    if labels.device.type != "cpu" and IGNORED not in labels:
        return None  # a model that does not know the mark of a missing label would end the process there
    pair = rows.take(batch, [first, (first + 1) % len(labels)])
    pair["labels"][1, (pair["labels"][1] != IGNORED).nonzero()[:-1]] = IGNORED
    parts = [_own_loss(model, part) for part in (pair, *rows.singles(pair))]
    if None in parts:
        return None
    whole, *each = (float(part) for part in parts if part is not None)
    singles = torch.tensor(each, dtype=torch.float64)
    counts = torch.stack([LabelUse(None, skipped=skipped).weights(pair["labels"]) for skipped in (0, 1)])
    weights = counts.cpu().double()
    ways = torch.cat([weights @ singles / weights.sum(1), singles.mean(0, True), singles.sum(0, True)]) - whole
    best = int(ways.abs().argmin())
    return best if best < len(weights) and abs(float(ways[best])) <= close[1] + close[0] * abs(whole) else None


def _unmasked(batch: _Batch) -> dict[str, Any]:
    """A batch whose padding is not known, so that it is a place for an answer, as in a model's own loss."""
    return {key: value for key, value in batch.items() if key != "attention_mask"}


def _loss_by(convention: Convention, output: Any, example: _Batch) -> float:
    """An example's loss by a convention; infinite if its logits do not fit."""
    try:
        return float(convention.outcome(output, _unmasked(example)).loss[0])
    except HeadPruneError:
        return math.inf


def _without_own_loss(model: nn.Module, possible: Sequence[Convention], batches: Sequence[_Batch]) -> Convention:
    """The one convention that fits the labels.

    Raises:
        HeadPruneError: There is none, or several.
    """
    if not possible:
        raise no_logits()
    if _per_token(possible):
        copied = [share for batch in batches if (share := _copied(batch)) is not None]
        # A text, of which the next tokens are predicted; or its tokens' classes.
        if copied and (min(copied) == 1 or max(copied) < _CHANCE):
            return possible[int(min(copied) == 1)]
        raise HeadPruneError(
            f"It cannot be told which token's label the logits of {type(model).__name__} are compared with: it has no loss of its own, or "
            "none that is finite on these examples.",
            "Pass loss_fn=, or give forward an argument labels and let its output have a loss. Leave out texts of one token: there is "
            "nothing to predict in them.",
        )
    if possible[0].what == SQUARED and (declared := _declared(model, possible)) is not None:
        return declared
    if possible[0].what == SQUARED and all(bool(((b["labels"] == 0) | (b["labels"] == 1)).all()) for b in batches):
        raise HeadPruneError(
            f"Labels of 0.0 and 1.0 may be numbers or classes, and {type(model).__name__} has no loss of its own to tell.",
            "Pass loss_fn=, or set config.problem_type.",
        )
    return possible[0]


def _copied(batch: _Batch) -> float | None:
    """The share of labels, but for first tokens', that equal an input's token in their place; None if no input has their shape."""
    labels = batch["labels"]
    alike = [v for v in unlabelled(batch).values() if isinstance(v, Tensor) and v.shape == labels.shape]
    counted = labels[:, 1:] != IGNORED
    shares = [float((value == labels)[:, 1:][counted].float().mean()) for value in alike if bool(counted.any())]
    return max(shares, default=None)


def _declared(model: nn.Module, possible: Sequence[Convention]) -> Convention | None:
    """The convention that the config declares."""
    what = SQUARED if regresses(model) else BINARY if gives_several(model) else None
    return next((c for c in possible if c.what == what), None)


def _output(model: nn.Module, example: _Batch, takes_labels: bool) -> tuple[Any, bool]:
    """The model's output for an example, and whether it needs the labels to run, as encoder-decoders do for their decoder's input."""
    if takes_labels and not is_encoder_decoder(model):
        with suppress(Exception):  # an encoder-decoder within another module
            return call(model, unlabelled(example)), False
    return _labelled(model, example if takes_labels else unlabelled(example)), takes_labels


def _labelled(model: nn.Module, example: _Batch) -> Any:
    try:
        return call(model, example)
    except Exception as error:
        raise HeadPruneError(
            f"The model does not run on an example with these labels: {type(error).__name__}: {first_line(error)}.",
            f"Check their type (floats for numbers and for several labels at once) and shape{too_long(model, example)}.",
        ) from error


def _own_loss(model: nn.Module, batch: _Batch) -> Tensor | None:
    """The model's own loss of a batch; None if the model does not run on it, or gives none."""
    with suppress(HeadPruneError):
        return loss_in(_labelled(model, batch))
    return None
