"""What stands at the queries and keys of a layer: tokens of a text, padding, patches of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.batches import Rows
from headprune.divergence import IGNORED
from headprune.inputs import is_encoder_decoder


@dataclass(frozen=True)
class Sequence:
    """A sequence of every example of a batch; None for what is not known.

    Attributes:
        ids: Of its tokens, ``[examples, positions]``.
        real: Which positions are no padding, ``[examples, positions]``.
    """

    ids: Tensor | None = None
    real: Tensor | None = None

    def __len__(self) -> int:
        known = self.ids if self.ids is not None else self.real
        return 0 if known is None else known.shape[1]


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch.

    Attributes:
        source: What the model reads: a text, or nothing that is known of an image.
        target: What the decoder of an encoder-decoder reads; the source for any other model.
    """

    source: Sequence
    target: Sequence

    def queries(self, layer: AttentionLayer, count: int) -> Sequence:
        """What a layer attends from; nothing is known where it does not have that many positions."""
        return _fitting(self.source if layer.kind == "encoder" else self.target, count)

    def keys(self, layer: AttentionLayer, count: int) -> Sequence:
        """What it attends to."""
        return _fitting(self.target if layer.kind == "decoder" else self.source, count)


def _fitting(sequence: Sequence, count: int) -> Sequence:
    return sequence if len(sequence) == count else Sequence()


def sequences_of(model: nn.Module, inputs: Any, rows: Rows) -> Sequences:
    """The sequences that a model reads, as far as its arguments name them."""
    if not isinstance(inputs, Mapping):
        return Sequences(Sequence(), Sequence())
    source = _sequence(rows, inputs, "input_ids", "attention_mask")
    if not is_encoder_decoder(model):
        return Sequences(source, source)
    given: dict[str, Any] = {k: v for k, v in inputs.items() if k.startswith("decoder_")}
    labels = inputs.get("labels")
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if "decoder_input_ids" not in given and isinstance(labels, Tensor):
        given.setdefault("decoder_attention_mask", labels != IGNORED)
        if prepare is not None:
            given["decoder_input_ids"] = prepare(labels=labels)
    target = _sequence(rows, given, "decoder_input_ids", "decoder_attention_mask")
    return Sequences(source, target)


def _sequence(rows: Rows, inputs: Mapping[str, Any], ids: str, mask: str) -> Sequence:
    found, real = rows.table(inputs, ids), rows.table(inputs, mask)
    if found is not None and real is not None and found.shape != real.shape:
        real = None
    return Sequence(found, None if real is None else real != 0)


@dataclass(frozen=True)
class Grid:
    """The patches of an image as positions of a sequence.

    Attributes:
        rows, columns: Of patches.
        before: Positions before them, such as that of [CLS].
    """

    rows: int
    columns: int
    before: int = 0

    def of(self, positions: int) -> Grid | None:
        """The grid of a layer with so many positions, which may see larger patches, or windows; None if it has none."""
        if positions == self.before + self.rows * self.columns:
            return self
        for rows in range(1, isqrt(positions) + 1 if self.rows <= self.columns else positions + 1):
            if rows * self.columns % self.rows == 0 and rows * (rows * self.columns // self.rows) == positions:
                return Grid(rows, rows * self.columns // self.rows)
        side = isqrt(positions)
        return Grid(side, side) if side * side == positions else None

    def places(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Of some positions: row and column ``[count, 2]``, and which of them are patches ``[count]``."""
        each = torch.arange(start, start + count) - self.before
        places = torch.stack([each.div(self.columns, rounding_mode="floor"), each % self.columns], dim=-1).float()
        return places, each >= 0


_MOST_BEFORE = 16  # positions before the patches


@contextmanager
def finding_grid(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Rows and columns of what each convolution gives while the context lasts: one of them makes the patches."""
    found: list[tuple[int, int]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            found.append((output.shape[-2], output.shape[-1]))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def grid_among(found: list[tuple[int, int]], positions: int) -> Grid | None:
    """The one of these that has as many patches as a layer has positions, but for a few before them."""
    fitting = [Grid(r, c, positions - r * c) for r, c in found if 0 <= positions - r * c <= _MOST_BEFORE]
    return min(fitting, key=lambda grid: grid.before, default=None)
