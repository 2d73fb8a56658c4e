"""What stands at the queries and keys of a layer: tokens of a text, padding, patches of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.batches import Rows
from headprune.divergence import IGNORED
from headprune.inputs import is_encoder_decoder

_MOST_BEFORE = 16  # positions before the patches


@dataclass(frozen=True)
class TokenSequence:
    """A sequence of every example of a batch; None for what is not known.

    Attributes:
        ids: Of its tokens, ``[examples, positions]``.
        real: Which positions are no padding, ``[examples, positions]``.
    """

    ids: Tensor | None = None
    real: Tensor | None = None

    def if_length(self, count: int) -> TokenSequence:
        """This sequence if it has so many positions, else one of which nothing is known."""
        known = self.ids if self.ids is not None else self.real
        return self if known is not None and known.shape[1] == count else TokenSequence()


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch.

    Attributes:
        source: What the model reads: a text, or nothing that is known of an image.
        target: What the decoder of an encoder-decoder reads; the source for any other model.
    """

    source: TokenSequence
    target: TokenSequence

    def queries(self, layer: AttentionLayer, count: int) -> TokenSequence:
        """The sequence that a layer with so many queries attends from."""
        return (self.source if layer.kind == "encoder" else self.target).if_length(count)

    def keys(self, layer: AttentionLayer, count: int) -> TokenSequence:
        """The sequence that a layer with so many keys attends to."""
        return (self.target if layer.kind == "decoder" else self.source).if_length(count)


UNKNOWN_SEQUENCES = Sequences(TokenSequence(), TokenSequence())


def sequences_of(model: nn.Module, inputs: Any, rows: Rows) -> Sequences:
    """The sequences that a model reads, as far as its arguments name them."""

    def sequence(arguments: Any, prefix: str = "") -> TokenSequence:
        ids, mask = (rows.table(arguments, f"{prefix}{name}") for name in ("input_ids", "attention_mask"))
        fitting = mask is not None and (ids is None or ids.shape == mask.shape)
        return TokenSequence(ids, mask != 0 if mask is not None and fitting else None)

    source = sequence(inputs)
    if not isinstance(inputs, Mapping) or not is_encoder_decoder(model):
        return Sequences(source, source)
    decoder: dict[str, Any] = {k: v for k, v in inputs.items() if k.startswith("decoder_")}
    labels = inputs.get("labels")
    if "decoder_input_ids" not in decoder and isinstance(labels, Tensor):
        decoder.setdefault("decoder_attention_mask", labels != IGNORED)
        if prepare := getattr(model, "prepare_decoder_input_ids_from_labels", None):
            decoder["decoder_input_ids"] = prepare(labels=labels)
    return Sequences(source, sequence(decoder, "decoder_"))


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

    def places(self, count: int) -> tuple[Tensor, Tensor]:
        """Of the first ``count`` positions: row and column ``[count, 2]``, and which of them are patches ``[count]``."""
        patch = torch.arange(count) - self.before
        places = torch.stack([patch.div(self.columns, rounding_mode="floor"), patch % self.columns], dim=-1).float()
        return places, patch >= 0


def is_image(inputs: Any) -> bool:
    """Whether a model is given images: a batch of channels, rows and columns."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs] if isinstance(inputs, Tensor) else inputs
    return any(isinstance(t, Tensor) and t.ndim == 4 and t.is_floating_point() for t in values)


@contextmanager
def convolution_shapes(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Rows and columns of every convolution's output while the context lasts: one of them makes the patches."""
    shapes: list[tuple[int, int]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            shapes.append((output.shape[-2], output.shape[-1]))

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                stack.callback(module.register_forward_hook(note).remove)
        yield shapes


def grid_among(shapes: list[tuple[int, int]], positions: int) -> Grid | None:
    """The shape with as many patches as a layer has positions, but for a few before them."""
    fitting = [Grid(r, c, positions - r * c) for r, c in shapes if 0 <= positions - r * c <= _MOST_BEFORE]
    return min(fitting, key=lambda grid: grid.before, default=None)
