"""What the weights of a layer add up to: sums over queries, from which the figures of its heads are made.

Only sums are kept: of a long input, the weights are seen in parts (`headprune.seeing.maps.Weights.blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headprune.attention import AttentionLayer
from headprune.seeing.figures import HeadProfile
from headprune.seeing.maps import Weights
from headprune.seeing.sequences import Grid, Sequence
from headprune.seeing.weights import visible

REACH = 8  # relative positions that the largest weight is looked for at, on both sides
_FEW = 20  # queries below which a figure that only some queries have says nothing


@dataclass(frozen=True)
class Scene:
    """What a call of a layer sees.

    Attributes:
        queries, keys: What stands there.
        separators: Ids of tokens that separate texts.
        common: How often each token is in the data, by id; None where that is not counted.
        grid: Of the image that the model sees.
        pictured: Whether the positions are those of an image, with a grid that is known or not.
    """

    queries: Sequence
    keys: Sequence
    separators: Tensor
    common: Tensor | None = None
    grid: Grid | None = None
    pictured: bool = False


class Sums:
    """Sums over the queries of one layer."""

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer
        self.queries = 0
        self.total: dict[str, Tensor] = {}  # figure -> sums [heads]
        self.over: dict[str, Tensor] = {}  # figure -> what it is divided by, [heads]

    def add(self, weights: Weights, scene: Scene) -> None:
        """Add a call of the layer."""
        part = _Part(weights, scene)
        for start, some in weights.blocks():
            self._add(part, start, some)

    def merge(self, other: Sums) -> None:
        """Add the sums over other queries."""
        self.queries += other.queries
        for sums, more in ((self.total, other.total), (self.over, other.over)):
            for figure, found in more.items():
                sums[figure] = sums[figure] + found if figure in sums else found

    def add_repeated(self, weights: Weights, length: int) -> None:
        """Add a causal layer's call on ``length`` tokens that end the input twice."""
        queries = weights.shape[2]
        for start, some in weights.blocks():
            rows = torch.arange(start, start + some.shape[2], device=some.device)
            again = (rows >= queries - length).expand(some.shape[0], -1)
            for figure, back in (("duplicate", length), ("induction", length - 1)):
                keys = (rows - back).clamp(min=0)
                found = some.gather(-1, keys[:, None].expand(*some.shape[:3], 1)).squeeze(-1)
                self._mean(figure, found, again)

    def _add(self, part: _Part, start: int, weights: Tensor) -> None:
        """Add some queries: ``[examples, heads, queries, keys]``, from query ``start`` on."""
        if weights.shape[2] == 0:
            return
        if part.windows > 1:  # each window is like an example of its own
            weights = torch.stack(weights.chunk(part.windows, dim=2), dim=1).flatten(0, 1)
        count, every = weights.shape[2], weights.shape[3]
        rows = torch.arange(start, start + count, device=weights.device)
        tokens = part.tokens if part.aligned else every
        inside = weights[..., :tokens]
        seen = (weights > 0).any(dim=1)  # [examples, queries, keys]: no head looks at what is masked
        choices = seen.sum(dim=-1)
        # A query that sees one key, or none, says nothing about the head; padding neither.
        counted = (choices > 1) & part.real_queries[:, rows]
        self.queries += int(counted.sum())
        entropy = torch.special.entr(weights).sum(dim=-1)
        self._mean("entropy", entropy, counted)
        self._mean("evenness", entropy / choices.clamp(min=2).log()[:, None], counted)
        self._mean("largest", inside.amax(dim=-1), counted)
        if not part.ordered:
            return
        keys = seen[..., :tokens] & part.real_keys[:, None]
        if part.grid.before if part.grid is not None else not part.pictured:
            first = part.real_keys.int().argmax(dim=-1)
            share = inside.gather(-1, first[:, None, None, None].expand(-1, *inside.shape[1:3], 1)).squeeze(-1)
            self._mean("first", share, counted)
        ids = part.ids
        if ids is not None:
            marks = torch.isin(ids, part.separators.to(ids.device))[:, None] & keys
            self._mean("separator", _share(inside, marks), counted & marks.any(dim=-1))
        if part.candidates is not None:
            hits = part.candidates[:, None, None].expand_as(inside).gather(-1, inside.argmax(-1, keepdim=True))
            self._mean("rare", hits.squeeze(-1).double(), counted)
            chance = part.candidates.sum(-1) / part.real_keys.sum(-1).clamp(min=1)
            self._mean("rare_chance", chance[:, None, None].expand(hits.shape[:-1]), counted)
        if part.aligned:
            self._add_places(part, rows, inside, keys, counted)
            if tokens < every:
                self._mean("sink", weights[..., tokens:].sum(dim=-1), counted)
            if ids is not None:
                same = (
                    (ids[:, rows, None] == ids[:, None])
                    & keys
                    & (rows[:, None] != torch.arange(tokens, device=ids.device))
                )
                self._mean("same", _share(inside, same), counted & same.any(dim=-1))

    def _add_places(self, part: _Part, rows: Tensor, weights: Tensor, keys: Tensor, counted: Tensor) -> None:
        """What depends on where keys are from their query."""
        columns = torch.arange(weights.shape[-1], device=rows.device)
        away = columns - rows[:, None]  # [queries, keys]
        self._mean("itself", _share(weights, (away == 0).expand_as(keys)), counted)
        if part.grid is not None:
            places, patch = (t.to(rows.device) for t in part.grid.places(0, weights.shape[-1]))
            far = torch.cdist(places[rows], places)
            apart = patch[rows, None] & patch
        else:
            far, apart = away.abs().float(), torch.ones_like(away, dtype=torch.bool)
        if part.grid is not None or not part.pictured:
            counts = counted & apart.any(dim=-1)
            within = (apart & keys) * counts[..., None]  # [examples, queries, keys]
            shares = weights * within[:, None]
            self._sum("distance", (shares * far).sum(dim=-1), shares.sum(dim=-1))
            even = (within * far).sum(-1) / within.sum(-1).clamp(min=1)
            self._sum("even", even[:, None].expand(shares.shape[:3]), counts[:, None].expand(shares.shape[:3]))
        if part.pictured:
            return
        for name, step in (("previous", -1), ("next", 1)):
            if step < 0 or self.layer.kind != "decoder":
                there = (away == step) & keys
                self._mean(name, _share(weights, there), counted & there.any(dim=-1))
        largest = weights.argmax(dim=-1) - rows
        for step in range(-REACH, REACH + 1):
            self._mean(f"at {step}", (largest == step).double(), counted)

    def _mean(self, figure: str, values: Tensor, where: Tensor) -> None:
        """Add values ``[examples, heads, queries]`` of some queries ``[examples, queries]`` to a mean."""
        counts = where[:, None].expand_as(values)
        self._sum(figure, torch.where(counts, values, 0.0), counts)

    def _sum(self, figure: str, values: Tensor, over: Tensor) -> None:
        for sums, more in ((self.total, values), (self.over, over)):
            found = more.double().sum(dim=(0, 2)).cpu()
            sums[figure] = sums[figure] + found if figure in sums else found

    def figures(self) -> list[HeadProfile]:
        """The figures of every head; without a role yet."""
        return [self._of(h) for h in range(self.layer.num_heads)]

    def _of(self, head: int) -> HeadProfile:
        def mean(figure: str, fewest: float = 0.0) -> float | None:
            over = float(self.over[figure][head]) if figure in self.over else 0.0
            return float(self.total[figure][head]) / over if over > max(fewest, 0.0) else None

        found: dict[str, Any] = {
            figure: mean(figure)
            for figure in (
                "previous",
                "next",
                "itself",
                "first",
                "sink",
                "rare",
                "rare_chance",
                "induction",
                "duplicate",
            )
        }
        distance, even = mean("distance"), mean("even")
        at = {step: mean(f"at {step}") or 0.0 for step in range(-REACH, REACH + 1) if f"at {step}" in self.over}
        if at and any(at.values()):
            found["position"] = max(at, key=lambda step: at[step])
            found["pointing"] = at[found["position"]]
        return HeadProfile(
            queries=self.queries,
            entropy=mean("entropy") or 0.0,
            evenness=mean("evenness") or 0.0,
            largest=mean("largest") or 0.0,
            distance=distance,
            reach=distance / even if distance is not None and even else None,
            separator=mean("separator", min(_FEW, self.queries / 2) - 0.5),
            same=mean("same", _FEW - 0.5),
            **found,
        )


def _share(weights: Tensor, keys: Tensor) -> Tensor:
    """Shares ``[examples, heads, queries]`` of some keys ``[examples, queries, keys]``."""
    return (weights * keys[:, None]).sum(dim=-1)


class _Part:
    """What is known of a call, once for all of its blocks."""

    def __init__(self, weights: Weights, scene: Scene) -> None:
        layer, (examples, _, queries, every) = weights.layer, weights.shape
        self.windows, self.ordered = weights.windows, weights.ordered
        self.separators, self.pictured = scene.separators, scene.pictured
        device = self._device(weights)
        each = queries // self.windows
        alone = examples * self.windows
        self.aligned = self.ordered and layer.kind != "cross" and (each == every or self._ends_in_sinks(weights))
        self.tokens = each if self.aligned else every
        hidden = self.windows == 1 and self.ordered
        looked = visible(weights) if hidden else torch.ones(examples, every, dtype=torch.bool, device=device)
        looked = looked[:, : self.tokens] if self.windows == 1 else looked.new_ones(alone, every)
        keys = scene.queries if self.aligned else scene.keys  # without sinks
        # A layer may be on another device than the inputs.
        self.ids = keys.ids.to(device) if hidden and keys.ids is not None else None
        self.real_keys = keys.real.to(device) if hidden and keys.real is not None else looked
        if self.windows > 1:
            self.real_queries = torch.ones(alone, each, dtype=torch.bool, device=device)
        elif scene.queries.real is not None:
            self.real_queries = scene.queries.real.to(device)
        else:  # padding is what nobody looks at
            self.real_queries = looked if self.aligned else looked.new_ones(examples, each)
        self.candidates = None
        if self.ids is not None and scene.common is not None and layer.kind != "decoder":
            counts = scene.common.to(device)[self.ids].masked_fill(~self.real_keys, torch.iinfo(torch.long).max)
            if counts.shape[1] > 1:
                self.candidates = (counts <= counts.kthvalue(2, dim=-1, keepdim=True).values) & self.real_keys
        self.grid = scene.grid.of(self.tokens) if scene.grid is not None and self.aligned else None

    @staticmethod
    def _device(weights: Weights) -> torch.device:
        return next(weights.blocks(1))[1].device

    @staticmethod
    def _ends_in_sinks(weights: Weights) -> bool:
        """Whether keys beyond the queries' stand behind them, as attention sinks do: the first query of a causal layer shows it."""
        queries, keys = weights.shape[2] // weights.windows, weights.shape[3]
        if not 1 < queries < keys or weights.layer.kind != "decoder" or weights.windows > 1:
            return False
        return not bool(next(weights.blocks(1))[1][:, :, 0, 1:queries].any())
