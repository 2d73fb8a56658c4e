"""How a model's own loss of a batch is computed from those of its examples, found by measuring.

Cross-entropy is averaged over all labels of a batch, so a long example weighs more than a short one. Other losses are not:
transformers' CTC models sum or average the losses of examples. Names of classes and the config do not count: pairs of examples
are run together and alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headprune.batches import Rows
from headprune.divergence import IGNORED
from headprune.inputs import call
from headprune.memory import is_out_of_memory
from headprune.outcome import is_wide, loss_in

LABELS_MEAN, EXAMPLES_MEAN, SUM = "mean over labels", "mean over examples", "sum over examples"
CLOSE, CLOSE_HALF = (1e-4, 1e-5), (2e-2, 1e-3)  # relative and absolute, by dtype
_BATCHES, _FIRST = 3, 4  # batches that pairs are taken of; labels that a pair's first example keeps
_Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Reduction:
    """How the loss of a batch is computed from its examples' losses.

    Attributes:
        kind: `LABELS_MEAN`, `EXAMPLES_MEAN` or `SUM`.
        unread: Of `LABELS_MEAN`: how many labels at the start of each example do not count (1 if each label is predicted
            from those before it).
    """

    kind: str
    unread: int = 0

    def weights(self, labels: Tensor) -> Tensor:
        """How much each example weighs in a mean: ``[examples, tokens]`` to ``[examples]``."""
        if self.kind != LABELS_MEAN:
            return torch.ones(len(labels), dtype=torch.long, device=labels.device)
        return (labels[:, self.unread :] != IGNORED).sum(1)

    def of_pair(self, labels: Tensor, first: float, second: float) -> float:
        """The loss of two examples, from that of each."""
        if self.kind == SUM:
            return first + second
        a, b = self.weights(labels).tolist()
        return (a * first + b * second) / (a + b) if a + b else math.nan


_KNOWN = (Reduction(LABELS_MEAN), Reduction(LABELS_MEAN, 1), Reduction(EXAMPLES_MEAN), Reduction(SUM))


def find_reduction(model: nn.Module, batches: Sequence[_Batch], rows: Rows) -> Reduction | None:
    """How a model's own loss is computed from its examples'; None if it is none of the known ways, or not clear.

    Args:
        batches: With labels.
        rows: How examples lie in them.
    """
    worst = [0.0] * len(_KNOWN)
    told = 0
    with torch.no_grad():
        for pair in _pairs(model, batches, rows):
            losses = [_own(model, batch) for batch in (pair, rows.take(pair, [0]), rows.take(pair, [1]))]
            (together, wide), (first, _), (second, _) = losses
            if not all(math.isfinite(loss) for loss, _ in losses):
                continue
            told += 1
            relative, absolute = CLOSE if wide else CLOSE_HALF
            for i, known in enumerate(_KNOWN):
                apart = abs(known.of_pair(pair["labels"], first, second) - together)
                worst[i] = max(worst[i], apart / (absolute + relative * abs(together)))
    near = [i for i, apart in enumerate(worst) if apart <= 1]  # NaN is not
    if not told or len({_KNOWN[i].kind for i in near}) != 1:
        return None
    return _KNOWN[min(near, key=worst.__getitem__)]


def _pairs(model: nn.Module, batches: Sequence[_Batch], rows: Rows) -> Iterator[_Batch]:
    """Batches of two examples with different numbers of labels.

    The first keeps its first few labels, and the second its last one: so the numbers differ even for examples of one length.
    All labels stay if the model might not accept the mark of a missing label.
    """
    tables = [rows.table(batch, "labels") for batch in batches]
    known = [t for t in tables if t is not None and not t.is_floating_point()]
    marked = any(bool((t == IGNORED).any()) for t in known)
    others = any(bool(((t < 0) & (t != IGNORED)).any()) for t in known)
    for batch, labels in list(zip(batches, tables, strict=True))[:: max(1, len(batches) // _BATCHES)][:_BATCHES]:
        if labels is None or labels.is_floating_point():
            continue
        # On a GPU, an index out of range would end the whole process.
        cut = not others and (marked or labels.device.type == "cpu")
        size = rows.size(batch)
        for i, j in dict.fromkeys(((0, size // 2), (size - 1, 0))):
            pair = rows.take(batch, [i, j])
            yield {**pair, "labels": _cut(pair["labels"])} if cut else pair


def _cut(labels: Tensor) -> Tensor:
    made = torch.full_like(labels, IGNORED)
    for i, kept in enumerate((slice(0, _FIRST), slice(-1, None))):
        places = (labels[i] != IGNORED).nonzero().flatten()[kept]
        made[i, places] = labels[i, places]
    return made


def _own(model: nn.Module, batch: _Batch) -> tuple[float, bool]:
    """A model's own loss, and whether it has full precision; NaN if the model does not run."""
    try:
        output = call(model, batch)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return math.nan, True
    loss = loss_in(output)
    found = float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
    return found, is_wide(output)
