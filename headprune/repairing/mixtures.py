"""Further calibration examples: the first half of one text, and the second half of another.

A model often was trained on what it is calibrated with, and has overfitted it. Its answers to mixtures can be computed just as
well, and are more like its answers to examples that it has not seen. (Like CutMix, Yun et al. 2019, arXiv:1905.04899, but
for texts, and labels are not mixed: the dense model is asked. Halves of small images in one another's place made repair worse
in our benchmark, and on a language model, which had not seen its examples, nothing changed.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headprune.batches import Rows
from headprune.inputs import LABELS

BLOCK = 4  # examples that are mixed with one another only, so that they can be left out together
_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class Mixed:
    """A batch of mixtures.

    Attributes:
        inputs: Without labels.
        firsts: The numbers of the examples that they begin with, ``[mixtures]``.
        shift: How far apart the two were in their block.
    """

    inputs: dict[str, Tensor]
    firsts: Tensor
    shift: int


def block_of(number: Tensor) -> Tensor:
    """The number of an example's block: of one parity, as folds are (`headprune.repairing.moments`)."""
    return number // 2 // BLOCK * 2 + number % 2


def mixed_texts(batches: Sequence[Any], rows: Rows, times: int, padding: int) -> list[Mixed]:
    """Every text's first half with the second half of each of the ``times`` next ones in its block.

    Both are cut in the middle of the shorter one. Which texts are mixed depends on their numbers alone, not on the batches that they come in.

    Args:
        batches: Calibration examples, with labels or without.
        rows: How examples lie in the batches.
        padding: The token to fill up with.

    Returns:
        Those of one shift behind one another, on the CPU, as many in a batch as in the one that they begin in; none where it is not known how to cut.
    """
    texts: list[dict[str, Tensor]] = []
    for batch in batches:
        cut = _texts(batch, rows)
        if cut is None:
            return []
        texts += cut
    block = block_of(torch.arange(len(texts))).tolist()
    members: dict[int, list[int]] = {}
    for number in range(len(texts)):
        members.setdefault(block[number], []).append(number)
    left = any(_is_left_padded(batch) for batch in batches)
    found = []
    for shift in range(1, times + 1):
        first = 0
        for batch in batches:
            numbers = range(first, first := first + rows.size(batch))
            pairs = [
                (number, own[(own.index(number) + shift) % len(own)])
                for number in numbers
                if len(own := members[block[number]]) > shift
            ]
            if pairs:
                mixed = [_mixed(texts[one], texts[other]) for one, other in pairs]
                inputs = {
                    name: _padded([text[name] for text in mixed], padding if name == "input_ids" else 0, left)
                    for name in mixed[0]
                }
                found.append(Mixed(inputs, torch.tensor([one for one, _ in pairs]), shift))
    return found


def _texts(batch: Any, rows: Rows) -> list[dict[str, Tensor]] | None:
    """Of every example the tokens that are no padding, by the input's name."""
    if not isinstance(batch, Mapping):
        return None
    inputs = {k: v for k, v in batch.items() if k not in LABELS}
    if not all(isinstance(v, Tensor) and v.ndim == 2 for v in inputs.values()):
        return None
    if "input_ids" not in inputs or not inputs.keys() <= _TEXT or len({v.shape for v in inputs.values()}) > 1:
        return None
    if any(rows.table(inputs, name) is None for name in inputs):
        return None
    inputs = {name: value.cpu() for name, value in inputs.items()}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])) != 0
    return [{name: value[i, real[i]] for name, value in inputs.items()} for i in range(len(real))]


def _mixed(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cut = min(len(one["input_ids"]), len(other["input_ids"])) // 2
    return {name: torch.cat([one[name][:cut], other[name][cut:]]) for name in one}


def _is_left_padded(batch: Mapping[str, Tensor]) -> bool:
    mask = batch.get("attention_mask")
    return mask is not None and bool((mask[:, 0] == 0).any())


def _padded(texts: Sequence[Tensor], value: int, left: bool) -> Tensor:
    return pad_sequence(list(texts), batch_first=True, padding_value=value, padding_side="left" if left else "right")
