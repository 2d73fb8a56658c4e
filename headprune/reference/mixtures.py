"""Further calibration examples: the first half of one text, and the second half of another.

A model often was trained on what it is calibrated with, and has overfitted it. Its answers to mixtures can be computed just as
well, and are more like its answers to examples that it has not seen. (Like CutMix, Yun et al. 2019, arXiv:1905.04899, but
for texts, and labels are not mixed: the dense model is asked. Halves of small images in one another's place made repair worse
in our benchmark, and on a language model, which had not seen its examples, nothing changed.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headprune.inputs import LABELS
from headprune.rows import Rows

BLOCK = 4  # examples that are mixed with one another only, so that they can be left out together
_TEXT = {"input_ids", "attention_mask", "token_type_ids"}


def blocks(size: int) -> Tensor:
    """The number of every row's block in a batch, ``[size]``: rows of one parity, as folds are (`headprune.reference.moments`)."""
    rows = torch.arange(size)
    return rows // 2 // BLOCK * 2 + rows % 2


def crossed(batch: Any, shift: int, rows: Rows) -> tuple[dict[str, Tensor], Tensor] | None:
    """Every text's beginning with the end of the one ``shift`` further in its block.

    Both are cut in the middle of where both have no padding.

    Args:
        batch: Calibration examples, with labels or without.
        shift: From 1.
        rows: How examples lie in the batch.

    Returns:
        The new examples, without labels, and the rows that they begin with; None where there are none, or it is not known
        how to cut.
    """
    if not isinstance(batch, Mapping):
        return None
    inputs = {k: v for k, v in batch.items() if k not in LABELS}
    if not all(isinstance(v, Tensor) and v.ndim == 2 for v in inputs.values()):
        return None
    if "input_ids" not in inputs or not inputs.keys() <= _TEXT or len({v.shape for v in inputs.values()}) > 1:
        return None
    if any(rows.table(inputs, name) is None for name in inputs):
        return None
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    block = blocks(len(real))
    pairs = [
        (int(row), int(own[(i + shift) % len(own)]))
        for own in (torch.nonzero(block == b).flatten() for b in range(int(block.max()) + 1))
        if len(own) > shift
        for i, row in enumerate(own)
    ]
    if not pairs:
        return None
    firsts, others = torch.tensor(sorted(pairs)).T
    both = (real[firsts] != 0) & (real[others] != 0)
    before = both.cumsum(1) * 2 <= both.sum(1, keepdim=True)
    return {name: torch.where(before, value[firsts], value[others]) for name, value in inputs.items()}, firsts
