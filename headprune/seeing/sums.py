"""Sums over the queries of a layer, from which the figures of its heads are computed.

Only sums are kept: of a long input, the weights are seen in blocks (`headprune.seeing.maps.Weights.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.inputs import doubled
from headprune.seeing.maps import Weights
from headprune.seeing.roles import HeadProfile
from headprune.seeing.sequences import UNKNOWN_SEQUENCES, Grid, Sequences

REACH = 8  # relative positions that the largest weight is looked for at, on both sides
_FEW = 20  # queries below which a figure that only some queries have says nothing

Sums = dict[str, Tensor]
"""By figure, ``[2, heads]``: a sum over queries, and the number of queries (or the sum of weights) that it is divided by."""


@dataclass(frozen=True)
class LayerInput:
    """What is known of the positions that a call of a layer sees.

    Attributes:
        separators: Ids of tokens that separate texts.
        sequences: What the model reads there.
        frequencies: How often each token is in the data, by id; None where that is not counted.
        grid: Of the image that the model sees.
        is_image: Whether the positions are those of an image, with a grid that is known or not.
        repeated: How many tokens end the input twice; then induction and duplicate tokens are measured, and nothing else.
    """

    separators: Tensor | None = None
    sequences: Sequences = UNKNOWN_SEQUENCES
    frequencies: Tensor | None = None
    grid: Grid | None = None
    is_image: bool = False
    repeated: int = 0


def sums_of(weights: Weights, given: LayerInput) -> Sums:
    """The sums over all queries of a call."""
    call = _Call(weights, given)
    add = call.add_repeated if given.repeated else call.add
    for start, block in weights.blocks():
        add(start, block)
    return call.sums


def added(one: Sums, other: Sums) -> Sums:
    """The sums over the queries of both."""
    return one | {figure: one.get(figure, 0) + pair for figure, pair in other.items()}


def profile_of(sums: Sums, head: int) -> HeadProfile:
    """A head's figures; without a role yet."""
    pairs = {figure: pair[:, head].tolist() for figure, pair in sums.items()}
    queries = int(pairs.get("entropy", (0, 0))[1])
    least = {"separator": max(min(_FEW, queries / 2) - 0.5, 0), "same": _FEW - 0.5}
    means: dict[str, Any] = {f: total / over for f, (total, over) in pairs.items() if over > least.get(f, 0)}
    even = means.pop("even", None)
    reach = means["distance"] / even if "distance" in means and even else None
    at = {step: means.pop(f"at {step}") for step in range(-REACH, REACH + 1) if f"at {step}" in means}
    if any(at.values()):
        means["position"] = max(at, key=lambda step: at[step])
        means["pointing"] = at[means["position"]]
    return HeadProfile(queries, **{"entropy": 0.0, "evenness": 0.0, **means}, reach=reach)


class _Call:
    """One call of a layer: what stands at its positions, and the sums over its queries so far."""

    def __init__(self, weights: Weights, given: LayerInput) -> None:
        layer, windows, (examples, _, queries, keys) = weights.layer, weights.windows, weights.shape
        self.layer, self.windows, self.ordered, self.given = layer, windows, weights.ordered, given
        self.sums: Sums = {}
        first = next(weights.blocks(1))[1]  # of the first query
        rows, length, device = examples * windows, queries // windows, first.device  # maybe not the inputs' device
        plain = windows == 1 and weights.ordered
        # Keys beyond the queries' may stand behind them, as attention sinks do: the first query of a causal layer shows it.
        sinks = plain and layer.kind == "decoder" and 1 < queries < keys and not bool(first[:, :, 0, 1:queries].any())
        self.aligned = weights.ordered and layer.kind != "cross" and (length == keys or sinks)
        self.tokens = length if self.aligned else keys
        everywhere = torch.ones(rows, keys, dtype=torch.bool, device=device)
        visible = (weights.visible() if plain else everywhere)[:, : self.tokens]
        at_queries = given.sequences.queries(layer, queries)
        at_keys = at_queries if self.aligned else given.sequences.keys(layer, keys)  # without sinks
        self.ids = at_keys.ids.to(device) if plain and at_keys.ids is not None else None
        self.real_keys = at_keys.real.to(device) if plain and at_keys.real is not None else visible
        if windows == 1 and at_queries.real is not None:
            self.real_queries = at_queries.real.to(device)
        else:  # padding is what nobody looks at
            self.real_queries = visible if self.aligned else visible.new_ones(rows, length)
        self.rarest = None
        if self.ids is not None and given.frequencies is not None and layer.kind != "decoder":
            counts = given.frequencies.to(device)[self.ids].masked_fill(~self.real_keys, torch.iinfo(torch.long).max)
            if counts.shape[1] > 1:
                self.rarest = (counts <= counts.kthvalue(2, dim=-1, keepdim=True).values) & self.real_keys
        self.grid = given.grid.of(self.tokens) if given.grid is not None and self.aligned else None

    def add(self, start: int, weights: Tensor) -> None:
        """Add some queries: ``[examples, heads, queries, keys]``, from query ``start`` on."""
        if weights.shape[2] == 0:
            return
        if self.windows > 1:  # each window is like an example of its own
            weights = torch.stack(weights.chunk(self.windows, dim=2), dim=1).flatten(0, 1)
        rows = torch.arange(start, start + weights.shape[2], device=weights.device)
        inside = weights[..., : self.tokens]
        seen = (weights > 0).any(dim=1)  # [examples, queries, keys]: no head looks at what is masked
        choices = seen.sum(dim=-1)
        # A query that sees one key, or none, says nothing about the head; padding neither.
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
        """Add induction and duplicate tokens of some queries, those of a token's second occurrence."""
        if self.ids is None or not self.aligned:  # of other positions than the tokens'
            return
        rows, length = torch.arange(start, start + weights.shape[2], device=weights.device), self.given.repeated
        second = (rows >= self.tokens - length).expand(weights.shape[0], -1)
        for figure, back in (("duplicate", length), ("induction", length - 1)):
            _add_mean(self.sums, figure, _at(weights, (rows - back).clamp(min=0)[:, None]), second)

    def _add_places(self, rows: Tensor, weights: Tensor, keys: Tensor, counted: Tensor) -> None:
        """Add what depends on where keys are from their query."""
        steps = torch.arange(weights.shape[-1], device=rows.device) - rows[:, None]  # [queries, keys]
        _add_mean(self.sums, "itself", _share(weights, (steps == 0).expand_as(keys)), counted)
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
        """Add the share of some keys ``[examples, queries, keys]``, over the queries that have one of them."""
        _add_mean(self.sums, figure, _share(weights, keys), counted & keys.any(dim=-1))


def _share(weights: Tensor, keys: Tensor) -> Tensor:
    """Shares ``[examples, heads, queries]`` of some keys ``[examples, queries, keys]``."""
    return (weights * keys[:, None]).sum(dim=-1)


def _at(weights: Tensor, keys: Tensor) -> Tensor:
    """The weights ``[examples, heads, queries]`` of one key for every query."""
    return weights.gather(-1, keys.expand(*weights.shape[:3], 1)).squeeze(-1)


def _add_mean(sums: Sums, figure: str, values: Tensor, where: Tensor) -> None:
    """Add values ``[examples, heads, queries]`` of some queries ``[examples, queries]`` to a mean."""
    counts = where[:, None].expand_as(values)
    _add(sums, figure, torch.where(counts, values, 0.0), counts)


def _add(sums: Sums, figure: str, values: Tensor, over: Tensor) -> None:
    pair = torch.stack([doubled(t).sum(dim=(0, 2)) for t in (values, over)]).cpu()
    sums[figure] = sums.get(figure, 0) + pair
