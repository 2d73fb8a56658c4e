"""Sums over a layer's queries, from which its heads' figures are computed; and the tokens or patches at its queries and keys.

Only sums are kept; the weights of a long input are read in blocks (`headprune.seeing.maps.Weights.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.batches import Rows
from headprune.divergence import IGNORED
from headprune.inputs import doubled, is_encoder_decoder
from headprune.running import wrapped
from headprune.seeing.maps import Weights

_MOST_BEFORE = 16  # the most positions before the patches
REACH = 8  # the largest relative position, on both sides, at which the largest weight is looked for

Sums = dict[str, Tensor]
"""Figure -> ``[2, heads]``: a sum over queries, and its divisor: the number of queries (or the sum of weights)."""


# -- the positions of queries and keys: tokens of a text, padding, patches of an image ------------------------


@dataclass(frozen=True)
class TokenSequence:
    """The token sequences of a batch; None for what is not known.

    Attributes:
        ids: Token ids, ``[examples, positions]``.
        real: Mask of the real (non-padding) positions, ``[examples, positions]``.
    """

    ids: Tensor | None = None
    real: Tensor | None = None

    def if_length(self, count: int) -> TokenSequence:
        """This sequence if it has ``count`` positions, otherwise an unknown one."""
        known = self.ids if self.ids is not None else self.real
        return self if known is not None and known.shape[1] == count else TokenSequence()


Sequences = dict[str, TokenSequence]
"""The sequences of a batch by name: ``"input"``; or of an encoder-decoder ``"source"`` and ``"target"``, the decoder's input."""


def names_of(layer: AttentionLayer, sequences: Sequences) -> tuple[str, str]:
    """The names of the sequences of a layer's queries and keys."""
    if "input" in sequences:
        return "input", "input"
    return "source" if layer.kind == "encoder" else "target", "target" if layer.kind == "decoder" else "source"


def sequences_of(model: nn.Module, inputs: Any, rows: Rows) -> Sequences:
    """The sequences in a model's inputs, as far as its arguments' names show them."""

    def sequence(arguments: Any, prefix: str = "") -> TokenSequence:
        ids, mask = (rows.table(arguments, f"{prefix}{name}") for name in ("input_ids", "attention_mask"))
        fitting = mask is not None and (ids is None or ids.shape == mask.shape)
        return TokenSequence(ids, mask != 0 if mask is not None and fitting else None)

    source = sequence(inputs)
    if not isinstance(inputs, Mapping) or not is_encoder_decoder(model):
        return {"input": source}
    decoder: dict[str, Any] = {k: v for k, v in inputs.items() if k.startswith("decoder_")}
    labels = inputs.get("labels")
    if "decoder_input_ids" not in decoder and isinstance(labels, Tensor):
        decoder.setdefault("decoder_attention_mask", labels != IGNORED)
        if prepare := getattr(model, "prepare_decoder_input_ids_from_labels", None):
            decoder["decoder_input_ids"] = prepare(labels=labels)
    return {"source": source, "target": sequence(decoder, "decoder_")}


@dataclass(frozen=True)
class Grid:
    """The patches of an image as positions of a sequence.

    Attributes:
        rows, columns: Numbers of rows and columns of patches.
        before: Number of positions before the patches, such as that of [CLS].
    """

    rows: int
    columns: int
    before: int = 0

    def of(self, positions: int) -> Grid | None:
        """The grid of a layer with this many positions, which may have larger patches or windows; None if no grid fits."""
        if positions == self.before + self.rows * self.columns:
            return self
        for rows in range(1, isqrt(positions) + 1 if self.rows <= self.columns else positions + 1):
            if rows * self.columns % self.rows == 0 and rows * (rows * self.columns // self.rows) == positions:
                return Grid(rows, rows * self.columns // self.rows)
        side = isqrt(positions)
        return Grid(side, side) if side * side == positions else None

    def places(self, count: int) -> tuple[Tensor, Tensor]:
        """Row and column ``[count, 2]`` of the first ``count`` positions, and which of them are patches ``[count]``."""
        patch = torch.arange(count) - self.before
        places = torch.stack([patch.div(self.columns, rounding_mode="floor"), patch % self.columns], dim=-1).float()
        return places, patch >= 0


def is_image(inputs: Any) -> bool:
    """Whether the inputs hold images: a float tensor of batch, channels, rows and columns."""
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs] if isinstance(inputs, Tensor) else inputs
    return any(isinstance(t, Tensor) and t.ndim == 4 and t.is_floating_point() for t in values)


@contextmanager
def patch_grids(model: nn.Module) -> Iterator[Callable[[int], Grid | None]]:
    """Watch a model's convolutions while the context lasts; one of them makes the patches of an image.

    Yields:
        A function: the number of a layer's positions -> the grid that has as many patches, except a few positions before them.
    """
    shapes: list[tuple[int, int]] = []

    def note(name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if isinstance(output, Tensor) and output.ndim == 4:
            shapes.append((output.shape[-2], output.shape[-1]))
        return output

    def grid_of(positions: int) -> Grid | None:
        fitting = [Grid(r, c, positions - r * c) for r, c in shapes if 0 <= positions - r * c <= _MOST_BEFORE]
        return min(fitting, key=lambda grid: grid.before, default=None)

    with wrapped({name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}, note):
        yield grid_of


# -- sums over queries ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerInput:
    """What is known about the positions in a call of a layer.

    Attributes:
        sequences: The model's token sequences.
        is_image: Whether the positions are those of an image, with a known grid or not.
        grid: The patch grid of the image.
        separators: Ids of tokens that separate texts.
        frequencies: How often each token occurs in the data, by id; None if not counted.
        repeated: If not 0, the input ends with this many tokens, twice; then only induction and duplicate tokens are measured.
    """

    sequences: Sequences
    is_image: bool
    grid: Grid | None = None
    separators: Tensor | None = None
    frequencies: Tensor | None = None
    repeated: int = 0


def sums_of(weights: Weights, given: LayerInput) -> Sums:
    """The sums over all queries of one call of a layer."""
    call = _Call(weights, given)
    add = call.add_repeated if given.repeated else call.add
    for start, block in weights.blocks():
        add(start, block)
    return call.sums


def added(one: Sums, other: Sums) -> Sums:
    """Add two `Sums`; figures may be missing in one of them."""
    return one | {figure: one.get(figure, 0) + pair for figure, pair in other.items()}


class _Call:
    """One call of a layer: the tokens or patches at its positions, and the sums over its queries so far."""

    def __init__(self, weights: Weights, given: LayerInput) -> None:
        layer, windows, (examples, _, queries, keys) = weights.layer, weights.windows, weights.shape
        self.layer, self.windows, self.ordered, self.given = layer, windows, weights.ordered, given
        self.sums: Sums = {}
        first = next(weights.blocks(1))[1]  # of the first query
        rows, length, device = examples * windows, queries // windows, first.device  # maybe not the inputs' device
        plain = windows == 1 and weights.ordered
        # Extra keys may follow the tokens' keys, as attention sinks do: the first query of a causal layer shows it.
        sinks = plain and layer.kind == "decoder" and 1 < queries < keys and not bool(first[:, :, 0, 1:queries].any())
        self.aligned = weights.ordered and layer.kind != "cross" and (length == keys or sinks)
        self.tokens = length if self.aligned else keys
        everywhere = torch.ones(rows, keys, dtype=torch.bool, device=device)
        visible = (weights.visible() if plain else everywhere)[:, : self.tokens]
        ours, theirs = (given.sequences[name] for name in names_of(layer, given.sequences))
        at_queries = ours.if_length(queries)
        at_keys = at_queries if self.aligned else theirs.if_length(keys)  # without sinks
        self.ids = at_keys.ids.to(device) if plain and at_keys.ids is not None else None
        self.real_keys = at_keys.real.to(device) if plain and at_keys.real is not None else visible
        if windows == 1 and at_queries.real is not None:
            self.real_queries = at_queries.real.to(device)
        else:  # padding: keys that no query attends to
            self.real_queries = visible if self.aligned else visible.new_ones(rows, length)
        self.rarest = None
        if self.ids is not None and given.frequencies is not None and layer.kind != "decoder":
            counts = given.frequencies.to(device)[self.ids].masked_fill(~self.real_keys, torch.iinfo(torch.long).max)
            if counts.shape[1] > 1:
                self.rarest = (counts <= counts.kthvalue(2, dim=-1, keepdim=True).values) & self.real_keys
        self.grid = given.grid.of(self.tokens) if given.grid is not None and self.aligned else None

    def add(self, start: int, weights: Tensor) -> None:
        """Add the weights of some queries, ``[examples, heads, queries, keys]``, from query ``start`` on."""
        if weights.shape[2] == 0:
            return
        if self.windows > 1:  # each window is like an example of its own
            weights = torch.stack(weights.chunk(self.windows, dim=2), dim=1).flatten(0, 1)
        rows = torch.arange(start, start + weights.shape[2], device=weights.device)
        inside = weights[..., : self.tokens]
        seen = (weights > 0).any(dim=1)  # [examples, queries, keys]: masked keys get 0 from all heads
        choices = seen.sum(dim=-1)
        # Leave out padding, and queries that see at most one key: they say nothing about the head.
        counted = (choices > 1) & self.real_queries[:, rows]
        entropy = torch.special.entr(weights).sum(dim=-1)
        _add_mean(self.sums, "entropy", entropy, counted)
        _add_mean(self.sums, "evenness", entropy / choices.clamp(min=2).log()[:, None], counted)
        _add_mean(self.sums, "largest", inside.amax(dim=-1), counted)
        if not self.ordered:
            return
        keys = seen[..., : self.tokens] & self.real_keys[:, None]
        if self.grid.before if self.grid is not None else not self.given.is_image:
            first = self.real_keys.int().argmax(dim=-1)
            _add_mean(self.sums, "first", _at(inside, first[:, None, None, None]), counted)
        if self.rarest is not None:
            hits = self.rarest[:, None, None].expand_as(inside).gather(-1, inside.argmax(-1, keepdim=True)).squeeze(-1)
            chance = self.rarest.sum(-1) / self.real_keys.sum(-1).clamp(min=1)
            _add_mean(self.sums, "rare", hits.double(), counted)
            _add_mean(self.sums, "rare_chance", chance[:, None, None].expand(hits.shape), counted)
        if self.ids is not None and self.given.separators is not None:
            separators = torch.isin(self.ids, self.given.separators.to(self.ids.device))[:, None] & keys
            self._add_share("separator", inside, separators, counted)
        if not self.aligned:
            return
        self._add_places(rows, inside, keys, counted)
        if self.tokens < weights.shape[3]:
            _add_mean(self.sums, "sink", weights[..., self.tokens :].sum(dim=-1), counted)
        if self.ids is not None:
            elsewhere = rows[:, None] != torch.arange(self.tokens, device=rows.device)
            same = (self.ids[:, rows, None] == self.ids[:, None]) & keys & elsewhere
            self._add_share("same", inside, same, counted)

    def add_repeated(self, start: int, weights: Tensor) -> None:
        """Add the induction and duplicate figures of some queries, counting only tokens' second occurrences."""
        if self.ids is None or not self.aligned:  # positions are not the tokens
            return
        rows, length = torch.arange(start, start + weights.shape[2], device=weights.device), self.given.repeated
        second = (rows >= self.tokens - length).expand(weights.shape[0], -1)
        for figure, back in (("duplicate", length), ("induction", length - 1)):
            _add_mean(self.sums, figure, _at(weights, (rows - back).clamp(min=0)[:, None]), second)

    def _add_places(self, rows: Tensor, weights: Tensor, keys: Tensor, counted: Tensor) -> None:
        """Add the figures that depend on the keys' positions relative to their query."""
        steps = torch.arange(weights.shape[-1], device=rows.device) - rows[:, None]  # [queries, keys]
        self._add_share("itself", weights, (steps == 0).expand_as(keys), counted)
        distances, placed = steps.abs().float(), torch.ones_like(steps, dtype=torch.bool)
        if self.grid is not None:
            places, patch = (t.to(rows.device) for t in self.grid.places(weights.shape[-1]))
            distances, placed = torch.cdist(places[rows], places), patch[rows, None] & patch
        if self.grid is not None or not self.given.is_image:
            counts = counted & placed.any(dim=-1)
            within = (placed & keys) * counts[..., None]  # [examples, queries, keys]
            shares = weights * within[:, None]
            _add(self.sums, "distance", (shares * distances).sum(dim=-1), shares.sum(dim=-1))
            even = (within * distances).sum(-1) / within.sum(-1).clamp(min=1)
            _add(self.sums, "even", even[:, None].expand(shares.shape[:3]), counts[:, None].expand(shares.shape[:3]))
        if self.given.is_image:
            return
        self._add_share("previous", weights, (steps == -1) & keys, counted)
        if self.layer.kind != "decoder":
            self._add_share("next", weights, (steps == 1) & keys, counted)
        largest = weights.argmax(dim=-1) - rows
        for step in range(-REACH, REACH + 1):
            _add_mean(self.sums, f"at {step}", (largest == step).double(), counted)

    def _add_share(self, figure: str, weights: Tensor, keys: Tensor, counted: Tensor) -> None:
        """Add the share of attention that goes to ``keys`` (mask ``[examples, queries, keys]``), over queries that have any."""
        _add_mean(self.sums, figure, (weights * keys[:, None]).sum(dim=-1), counted & keys.any(dim=-1))


def _at(weights: Tensor, keys: Tensor) -> Tensor:
    """Every query's weight on one key, ``[examples, heads, queries]``."""
    return weights.gather(-1, keys.expand(*weights.shape[:3], 1)).squeeze(-1)


def _add_mean(sums: Sums, figure: str, values: Tensor, where: Tensor) -> None:
    """Add values ``[examples, heads, queries]`` to a mean, for the queries in the mask ``where`` ``[examples, queries]``."""
    counts = where[:, None].expand_as(values)
    _add(sums, figure, torch.where(counts, values, 0.0), counts)


def _add(sums: Sums, figure: str, values: Tensor, over: Tensor) -> None:
    pair = torch.stack([doubled(t).sum(dim=(0, 2)) for t in (values, over)]).cpu()
    sums[figure] = sums.get(figure, 0) + pair
