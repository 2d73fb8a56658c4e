"""Plans with one number of heads for all layers, within what the model's stock class can represent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from headprune.attention import AttentionLayer
from headprune.checkpoint import StockCounts, pattern
from headprune.planning.order import Order, Unit
from headprune.planning.strategies import Search, strategy
from headprune.pruned import SharedPositionBias


@dataclass(frozen=True)
class _LayerGroup:
    """Layers that keep the same number of heads.

    Attributes:
        layers: Their positions.
        rows: Units in the order of removal, one of every layer in a row.
        stops: Numbers of removed rows after which the stock class can represent the model.
    """

    layers: list[int]
    rows: list[tuple[Unit, ...]]
    stops: list[int]


@strategy("uniform")
def uniform(search: Search, levels: Sequence[int]) -> Order:
    """The same number of heads in every layer, as the stock class can represent it; in each, the most important ones.

    Which numbers the class can represent is tried on copies of the model without weights; each step leads to the next
    such number. Layers that share something for each head (T5's position bias) lose the same heads, those with the
    lowest total score. Parts of the model that the class cannot represent with fewer heads (such as the image encoder
    of a vision-language model) keep all. If that holds for all parts, or without a model (`headprune.plan`), a step
    takes one unit from every layer with equal numbers of heads and groups.
    """
    columns = search.units()
    groups = _alike(search, range(len(search.layers)), lambda layer: (layer.num_heads, layer.num_kv_heads))
    counts = StockCounts.of(search.model, search.layers)
    parts = [part for same in groups for part in _representable(search, counts, same, columns)] if counts else []
    stays, notes, in_stock = list[str](), list[str](), bool(parts)
    if counts and parts:
        there = {i for part in parts for i in part.layers}
        if left := [layer.name for i, layer in enumerate(search.layers) if i not in there and layer.prunable]:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            stays.append(f"{left[0]}{more}: {counts.name} cannot have another number of heads there")
        if any(part.stops[-1] < len(part.rows) for part in parts):
            stays.append(f"{counts.name} cannot have fewer heads in every layer")
        if not counts.has_place_for_biases():
            notes += [f"{counts.name} has no place for biases that its output projections lack, so repair adds none."]
        notes += [_possible(search, counts, part, len(parts) > 1) for part in parts]
    else:
        rows = [_rows(same, columns) for same in groups]
        parts = [_LayerGroup(same, r, list(range(1, len(r) + 1))) for same, r in zip(groups, rows, strict=True)]
        if counts:
            fixed = f"{counts.name} cannot have another number of heads"
            notes.append(f"{fixed}, so the folder loads with trust_remote_code=True.")
    queue: list[tuple[float, int, list[Unit]]] = []
    for part in parts:
        heads = search.layers[part.layers[0]].num_heads
        lengths = [len(columns[i]) for i in part.layers]
        if min(lengths) < max(lengths):  # the layer that must keep most decides for all
            held = search.layers[part.layers[lengths.index(min(lengths))]].name
            stays.append(f"{held} can lose no more, and every layer keeps as many")
        for start, stop in zip([0, *part.stops], part.stops, strict=False):
            sizes = [len(row[0].heads) for row in part.rows[:stop]]
            middle = (sum(sizes[:start]) + sum(sizes)) / 2 / heads
            queue.append((middle, part.layers[0], [unit for row in part.rows[start:stop] for unit in row]))
    steps = [search.step(*units) for *_, units in sorted(queue)]
    return replace(search.order(steps, "uniform", *notes, stays=stays), stock=in_stock)


def _representable(
    search: Search, counts: StockCounts, same: list[int], columns: Sequence[list[Unit]]
) -> list[_LayerGroup]:
    """Groups of these layers that the stock class can have with fewer heads: all layers together, else kind by kind."""
    whole = _best(search, counts, same, columns)
    if whole.stops:
        return [whole]
    kinds = _kinds(search, same)
    return [part for kind in kinds if len(kinds) > 1 and (part := _best(search, counts, kind, columns)).stops]


def _alike(search: Search, positions: Iterable[int], trait: Callable[[AttentionLayer], Hashable]) -> list[list[int]]:
    """Positions of layers, grouped by a trait."""
    groups: dict[Hashable, list[int]] = {}
    for i in positions:
        groups.setdefault(trait(search.layers[i]), []).append(i)
    return list(groups.values())


def _kinds(search: Search, positions: Sequence[int]) -> list[list[int]]:
    """Positions of layers, grouped by name without its numbers."""
    return _alike(search, positions, lambda layer: pattern(layer.name))


def _best(search: Search, counts: StockCounts, layers: list[int], columns: Sequence[list[Unit]]) -> _LayerGroup:
    """Each layer's least important heads; or the same heads in layers of a kind, if more numbers are possible so."""

    def layer_group(kinds: Sequence[Sequence[int]]) -> _LayerGroup:
        rows = _rows(layers, _same_heads_by_kind(columns, kinds))
        possible = cache(
            lambda stop: counts.config_without(search.step(*(unit for row in rows[:stop] for unit in row))) is not None
        )
        few = {1, len(rows) // 2, len(rows) - 1, len(rows)}  # if none of these is possible, no number is tried
        stops = range(1, len(rows) + 1) if any(possible(stop) for stop in few if 0 < stop <= len(rows)) else ()
        return _LayerGroup(layers, rows, [stop for stop in stops if possible(stop)])

    free, kinds = layer_group([]), [kind for kind in _kinds(search, layers) if _may_share(search, kind)]
    if not kinds or len((best := layer_group(kinds)).stops) <= len(free.stops):
        return free
    for kind in list(kinds):  # not every kind may have to lose the same heads
        others = [k for k in kinds if k != kind]
        if (part := layer_group(others)).stops == best.stops:
            kinds, best = others, part
    return best


def _may_share(search: Search, layers: Sequence[int]) -> bool:
    """Whether these layers may share an input that has a part for each head, such as T5's position bias."""
    of = [search.layers[i] for i in layers]
    assert search.model is not None
    return any(a.arguments or SharedPositionBias.needed_by(search.model.get_submodule(a.module)) for a in of)


def _same_heads_by_kind(columns: Sequence[list[Unit]], kinds: Sequence[Sequence[int]]) -> list[list[Unit]]:
    """The layers' units, where layers of one of these kinds lose the same heads: ranked by the sum of their scores."""
    tied = list(columns)
    for kind in kinds:
        scores = [{unit.heads: unit.score for unit in columns[i]} for i in kind]
        common = [heads for heads in scores[0] if all(heads in own for own in scores)]
        ranked = sorted(common, key=lambda heads: (sum(own[heads] for own in scores), heads))
        for i, own in zip(kind, scores, strict=True):
            tied[i] = [Unit(own[heads], i, heads) for heads in ranked]
    return tied


def _rows(layers: Sequence[int], columns: Sequence[list[Unit]]) -> list[tuple[Unit, ...]]:
    return list(zip(*(columns[i] for i in layers), strict=False))


def _possible(search: Search, counts: StockCounts, part: _LayerGroup, several: bool) -> str:
    """A sentence that lists the numbers of heads that the class can have."""
    first = search.layers[part.layers[0]]
    kept = [first.num_heads - sum(len(row[0].heads) for row in part.rows[:stop]) for stop in (0, *part.stops)]
    where = f"layers such as {first.name}" if several else "every layer"
    return f"{counts.name} can have {', '.join(map(str, kept))} heads in {where}."
