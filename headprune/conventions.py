"""How a model compares logits with labels, found by measuring: names of classes do not count.

Every way that the shapes allow is compared with the model's own loss on a few examples. If a model has no loss of its own,
what it can see decides: a causal model whose labels are its own input predicts the next token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headprune.divergence import IGNORED, gives_several, regresses
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import LABELS, call, is_encoder_decoder, takes, too_long
from headprune.outcome import (
    BINARY,
    SPAN,
    SQUARED,
    TOKENS,
    Convention,
    conventions,
    is_wide,
    logits_in,
    loss_in,
    no_logits,
    refuse_unknown,
    unknown_label,
)
from headprune.reduction import CLOSE, CLOSE_HALF, Reduction

_ORDERS = 4  # orders of an example's labels, to see how a loss that has more terms changes with them
_FOLLOWED = 3  # examples whose labels are reordered
_LEAST_SHIFT = 1e-3  # nats; a loss that another order changes by less shows nothing
_SOME = 0.5  # share of the labels that may equal the input by chance
_Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """What was found out about a model and its labels.

    Attributes:
        convention: None if the model's own loss cannot be computed from its logits.
        own: Whether the model's own loss is another one, or has more terms (such as a router's): then the model computes
            it, for one example at a time.
        gives_labels: Whether the model needs the labels to run.
        reduction: Without a ``convention``: how the own loss of a batch is computed from those of its examples
            (`headprune.reduction.find_reduction`); None if that cannot be found out.
    """

    convention: Convention | None
    own: bool = False
    gives_labels: bool = False
    reduction: Reduction | None = None


def find(model: nn.Module, batches: Sequence[_Batch], rows: Sequence[_Batch]) -> Found:
    """How a model compares logits with labels.

    Args:
        batches: All batches, with labels.
        rows: Single examples of them, to measure on.

    Raises:
        HeadPruneError: The model does not run on the examples, labels are no classes of the model, or the way cannot be found.
    """
    with torch.no_grad():
        found = _found(model, batches, rows)
    if found.convention is not None and found.convention.what == SPAN:
        # The model's own loss counts padding as places for an answer, so that it changes with the batch that an example is in.
        found = replace(found, convention=replace(found.convention, masked=True))
    return found


def _found(model: nn.Module, batches: Sequence[_Batch], rows: Sequence[_Batch]) -> Found:
    asks = any(takes(model, name) for name in LABELS if name in rows[0])
    first, gives = _first(model, rows[0], asks)
    _refuse_whole_numbers(model, first, batches)
    # Only if padding has labels does it matter whether they count.
    able = [c for c in conventions(first, rows[0]) if not c.masked or any(hides_labels(row) for row in rows)]
    if able and _has_others(model, first, batches, asks):
        return Found(None, own=True, gives_labels=gives)
    if asks and (found := _by_loss(model, first, rows, able, gives)) is not None:
        return found
    return Found(_by_inputs(model, able, batches, rows, gives), gives_labels=gives)


def hidden_labels(batch: _Batch) -> Tensor | None:
    """Which labels ``[batch, tokens]`` belong to tokens that the attention mask leaves out; None if that is not known."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if not isinstance(labels, Tensor) or not isinstance(mask, Tensor) or labels.shape != mask.shape:
        return None
    return (labels != IGNORED) & (mask == 0)


def hides_labels(batch: _Batch) -> bool:
    """Whether tokens that the attention mask leaves out have labels."""
    hidden = hidden_labels(batch)
    return hidden is not None and bool(hidden.any())


def unlabelled(batch: _Batch) -> dict[str, Any]:
    """A batch without its labels."""
    return {k: v for k, v in batch.items() if k not in LABELS}


def sees_ahead(model: nn.Module, example: _Batch, *, gives_labels: bool = False) -> bool | None:
    """Whether logits depend on tokens behind their own; None if that cannot be tried.

    Args:
        example: One example; its last token is replaced by another.
    """
    logits, mask = logits_in(_run(model, example, gives_labels)), example.get("attention_mask")
    like = example.get("labels", example.get("input_ids"))
    if logits is None or logits.ndim != 3 or not isinstance(like, Tensor) or logits.shape[1] < like.shape[-1]:
        return None
    real = like.shape[-1]
    if isinstance(mask, Tensor) and mask.shape == like.shape and bool(mask.any()):
        real = int(mask[0].nonzero().max()) + 1
    tokens = {
        name: _exchanged(value, real - 1)
        for name, value in example.items()
        if name not in LABELS and isinstance(value, Tensor) and value.shape[:2] == like.shape
        and not any(word in name for word in ("mask", "position", "type"))
    }  # fmt: skip
    if real < 2 or not tokens:
        return None
    try:
        other = logits_in(_run(model, {**example, **tokens}, gives_labels))
    except Exception:  # for instance if the new token announces an image, and there is none
        return None
    assert other is not None
    before = logits.shape[1] - like.shape[-1] + real - 1
    apart = (other - logits)[:, :before].abs().max()
    return bool(apart > (1e-5 if is_wide(logits) else 1e-3) * logits.abs().max())


def _exchanged(value: Tensor, place: int) -> Tensor:
    """Other content at one token of every row."""
    made = value.clone()
    if value.is_floating_point():
        made[:, place] = 1 - value[:, place]
        return made
    before = value[0, :place]
    others = before[before != value[0, place]]
    last = int(value[0, place])
    made[:, place] = int(others[-1]) if len(others) else last - 1 if last else 1
    return made


# -- models with a loss of their own -------------------------------------------------------------


def _by_loss(
    model: nn.Module, first: Any, rows: Sequence[_Batch], able: Sequence[Convention], gives: bool
) -> Found | None:
    """The way that gives the model's own loss, or what else was found out about it; None if there is no such loss."""
    worst, wide = [0.0] * len(able), True
    told: list[_Batch] = []
    alike = True
    for i, row in enumerate(rows):
        output = _asked(model, row)
        own = loss_in(output)
        if i == 0:  # the same logits with labels as without them: then one run gives both loss and logits
            alike = gives or _alike(first, output)
        if not isinstance(own, Tensor) or not bool(own.isfinite().all()):
            continue  # such as that of an example without a label
        told.append(row)
        shown = output if alike else _run(model, row, gives)
        wide &= is_wide(shown)
        worst = [max(w, _apart(c, row, shown, own)) for c, w in zip(able, worst, strict=True)]
    if not told:
        return None
    if able and min(worst) <= 1:
        fitting = [c for c, w in sorted(zip(able, worst, strict=True), key=lambda pair: pair[1]) if w <= 1]
        return Found(_told_apart(model, told, fitting, gives, alike), gives_labels=gives)
    if len(able) == 1:  # one label per example, or the start and end of an answer: there is no choice
        return Found(able[0], own=True, gives_labels=gives)
    if able and able[0].what == TOKENS:
        return Found(_followed(model, told, able, wide), own=True, gives_labels=gives)
    return Found(_declared(model, able), own=True, gives_labels=gives)


def _told_apart(
    model: nn.Module, rows: Sequence[_Batch], able: Sequence[Convention], gives: bool, alike: bool
) -> Convention:
    """Of several ways that give the model's own loss, the one that also does for labels drawn at random.

    In a text that repeats one token, which a tokenizer makes of words that it does not know, every way gives the same loss. The dense model
    and the pruned one must not differ in which one rounding favours.
    """
    if len(able) == 1 or able[0].what != TOKENS:
        return able[0]
    generator = torch.Generator().manual_seed(0)
    worst = [0.0] * len(able)
    for row in sorted(rows, key=lambda row: (not hides_labels(row), -int((row["labels"] != IGNORED).sum())))[
        :_FOLLOWED
    ]:
        labels, fixed = row["labels"], _with_decoder_inputs(model, row)
        logits = logits_in(_run(model, fixed, gives))
        assert logits is not None
        drawn = torch.randint(logits.shape[-1], labels.shape, generator=generator).to(labels)
        batch = {**fixed, "labels": torch.where(labels == IGNORED, labels, drawn)}
        try:
            output = call(model, batch)
        except Exception:  # of a model that does not take every class as a label
            return able[0]
        own = loss_in(output)
        if isinstance(own, Tensor) and bool(own.isfinite().all()):
            shown = output if alike else _run(model, batch, gives)
            worst = [max(w, _apart(c, batch, shown, own)) for c, w in zip(able, worst, strict=True)]
    return able[worst.index(min(worst))]


def _apart(convention: Convention, row: _Batch, output: Any, own: Tensor) -> float:
    """How far a convention's loss is from the model's own, as a multiple of what is allowed; infinity if there is none."""
    try:
        mine = convention.outcome(output, row).loss[0]
    except HeadPruneError:
        return math.inf
    relative, absolute = CLOSE if is_wide(output) else CLOSE_HALF
    known = own.double().mean().to(mine.device)
    found = float((mine.double() - known).abs() / (absolute + relative * known.abs()))
    return math.inf if math.isnan(found) else found


def _alike(a: Any, b: Any) -> bool:
    if "start_logits" in a if isinstance(a, Mapping) else hasattr(a, "start_logits"):
        return True
    x, y = logits_in(a), logits_in(b)
    return x is not None and y is not None and x.shape == y.shape and torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def _followed(model: nn.Module, rows: Sequence[_Batch], able: Sequence[Convention], wide: bool) -> Convention | None:
    """The way whose loss changes as the model's own loss does when an example's labels are reordered.

    A router's loss, or smoothed labels, only add a factor and a constant to these changes.
    """
    generator = torch.Generator().manual_seed(0)
    losses: list[list[list[float]]] = []  # [examples, orders, the own loss and every convention's]
    for row in sorted(rows, key=lambda row: -int((row["labels"] != IGNORED).sum()))[:_FOLLOWED]:
        fixed = _with_decoder_inputs(model, row)
        places = (row["labels"][0] != IGNORED).nonzero().flatten().cpu()
        orders = []
        for _ in range(_ORDERS):
            labels = row["labels"].clone()
            labels[0, places] = labels[0, places[torch.randperm(len(places), generator=generator)]]
            batch = {**fixed, "labels": labels}
            output = call(model, batch)
            if logits_in(output) is None:
                return None
            orders.append([float(loss_in(output).mean()), *(float(c.outcome(output, batch).loss[0]) for c in able)])
        losses.append(orders)
    table = torch.tensor(losses, dtype=torch.float64)
    own, *mine = (table - table.mean(1, keepdim=True)).flatten(0, 1).T
    rests = []
    for x in mine:
        slope = float(x @ own / (x @ x).clamp(min=1e-30))
        rest = float((own - slope * x).abs().max() / own.abs().max().clamp(min=1e-30))
        rests.append(rest if slope > 0 and float(x.abs().max()) > _LEAST_SHIFT else math.inf)
    return able[rests.index(min(rests))] if min(rests) < (1e-2 if wide else 0.1) else None


def _with_decoder_inputs(model: nn.Module, row: _Batch) -> dict[str, Any]:
    """An example whose decoder input stays the same when its labels change."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if not is_encoder_decoder(model) or make is None or "decoder_input_ids" in row:
        return dict(row)
    return {**row, "decoder_input_ids": make(labels=row["labels"])}


# -- models without one --------------------------------------------------------------------------


def _by_inputs(
    model: nn.Module, able: Sequence[Convention], batches: Sequence[_Batch], rows: Sequence[_Batch], gives: bool
) -> Convention:
    """The one way that fits the labels.

    Raises:
        HeadPruneError: There is none, or several.
    """
    able = [c for c in able if not c.masked and not c.prompted]
    if not able:
        raise no_logits()
    if able[0].what in (SQUARED, BINARY):
        return _numbers(model, able, batches)
    if able[0].what != TOKENS:
        return able[0]
    here, further = able
    assert (here.ahead, further.ahead) == (0, 1)
    longest = max(rows, key=lambda row: int((row["labels"] != IGNORED).sum()))
    ahead = sees_ahead(model, longest, gives_labels=gives)
    if ahead:
        return here  # the model sees the next token, so it does not predict it
    same, shifted = _copied(batches, 0), _copied(batches, 1)
    if ahead is not None and same is not None and shifted is not None:
        if same == 1 and shifted < 1:
            return further
        if (shifted == 1 and same < 1) or max(same, shifted) < _SOME:
            return (
                here  # labels that were shifted already, or that are no copies of the input but classes of the tokens
            )
    raise HeadPruneError(
        f"It cannot be told which token's label the logits of {type(model).__name__} are compared with: it has no loss of its own, or "
        "none that is finite on these examples.",
        "Pass loss_fn=, or give forward an argument labels and let its output have a loss. Leave out texts of one token: there is "
        "nothing to predict in them.",
    )


def _copied(batches: Sequence[_Batch], ahead: int) -> float | None:
    """The share of labels that equal the input's token ``ahead`` places later; None if no input has the labels' shape."""
    best: float | None = None
    names = [
        name
        for name, value in batches[0].items()
        if name not in LABELS and isinstance(value, Tensor) and not value.is_floating_point() and "mask" not in name
    ]
    for name in names:
        hits = total = 0
        for batch in batches:
            value, labels = batch.get(name), batch["labels"]
            if not isinstance(value, Tensor) or value.shape != labels.shape:
                break
            labels = labels[:, : labels.shape[1] - ahead]
            counted = labels != IGNORED
            hits += int(((value[:, ahead:] == labels) & counted).sum())
            total += int(counted.sum())
        else:
            best = max(best or 0.0, hits / total if total else 0.0)
    return best


def _numbers(model: nn.Module, able: Sequence[Convention], batches: Sequence[_Batch]) -> Convention:
    """Squared errors, or what the config declares.

    Raises:
        HeadPruneError: The labels are all 0 or 1, so they may be classes, and the config declares nothing.
    """
    if (declared := _declared(model, able)) is not None:
        return declared
    if all(bool(((b["labels"] == 0) | (b["labels"] == 1)).all()) for b in batches):
        raise HeadPruneError(
            f"Labels of 0.0 and 1.0 may be numbers or classes, and {type(model).__name__} has no loss of its own to tell.",
            "Pass loss_fn=, or set config.problem_type.",
        )
    return Convention(SQUARED)


def _declared(model: nn.Module, able: Sequence[Convention]) -> Convention | None:
    """The way that the config declares."""
    what = SQUARED if regresses(model) else BINARY if gives_several(model) else None
    return next((c for c in able if c.what == what), None)


# -- running the model ---------------------------------------------------------------------------


def _run(model: nn.Module, batch: _Batch, gives_labels: bool) -> Any:
    return call(model, batch if gives_labels else unlabelled(batch))


def _first(model: nn.Module, row: _Batch, asks: bool) -> tuple[Any, bool]:
    """The model's output for an example, and whether it needs the labels to run.

    Encoder-decoders do: they make their decoder's input from them.
    """
    if not is_encoder_decoder(model):
        try:
            return call(model, unlabelled(row)), False
        except Exception as error:
            if not asks:
                raise _does_not_run(model, row, error) from error
    return _asked(model, row), True


def _asked(model: nn.Module, row: _Batch) -> Any:
    """The model's output for an example with its labels."""
    try:
        return call(model, row)
    except Exception as error:
        raise _does_not_run(model, row, error) from error


def _does_not_run(model: nn.Module, row: _Batch, error: Exception) -> HeadPruneError:
    return HeadPruneError(
        f"The model does not run on an example with these labels: {type(error).__name__}: {first_line(error)}.",
        f"Check their type and shape{too_long(model, row)}.",
    )


def _refuse_whole_numbers(model: nn.Module, first: Any, batches: Sequence[_Batch]) -> None:
    """Refuse labels that are whole numbers, if the head gives real numbers."""
    logits = logits_in(first)
    several = gives_several(model)
    if logits is None or logits.ndim != 2 or not (logits.shape[1] == 1 or several or regresses(model)):
        return
    labels = [batch.get("labels") for batch in batches]
    if any(isinstance(t, Tensor) and not t.is_floating_point() for t in labels):
        raise HeadPruneError(
            "The labels are whole numbers, but the model's head wants real ones "
            f"({'several labels at once' if several else 'regression'}).",
            "Pass them as floats.",
        )


def _has_others(model: nn.Module, first: Any, batches: Sequence[_Batch], asks: bool) -> bool:
    """Whether some labels are no classes, but the model's own loss accepts them (and perhaps ignores them).

    Raises:
        HeadPruneError: It does not accept them.
    """
    if (logits := logits_in(first)) is None:
        return False
    for batch in batches:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            continue
        if unknown_label(labels, logits.shape[-1]) is not None:
            if asks and _knows(model, batch):
                return True
            refuse_unknown(labels, logits.shape[-1])
    return False


def _knows(model: nn.Module, batch: _Batch) -> bool:
    try:
        own = loss_in(call(model, batch))
    except Exception:
        return False
    return isinstance(own, Tensor) and bool(own.isfinite().all())
