"""Scores of made-up layers, and what holds for every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

import headprune as hp
from headprune.attention import AttentionLayer, Heads, check_possible
from headprune.planning import Constraints, Order, Search
from headprune.planning.units import GROUPS, SLICES, Unit


def scores_of(shapes: list[tuple[int, int]], values: list[float], prunable: bool = True) -> hp.HeadScores:
    layers = tuple(
        AttentionLayer(
            f"l{i}",
            i,
            "decoder",
            h,
            kv,
            8,
            () if kv in (1, h) else tuple(tuple(range(g * h // kv, (g + 1) * h // kv)) for g in range(kv)),
            prunable,
        )
        for i, (h, kv) in enumerate(shapes)
    )
    split = torch.split(torch.tensor(values, dtype=torch.float64), [h for h, _ in shapes])
    return hp.HeadScores(
        "m", "u", {a.name: v for a, v in zip(layers, split, strict=True)}, {a.name: v * 0 for a, v in zip(layers, split, strict=True)},
        1, layers,
    )  # fmt: skip


@st.composite
def any_scores(draw: st.DrawFn) -> hp.HeadScores:
    shapes = [
        (kv * draw(st.integers(1, 4)), kv)
        for kv in draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    ]
    total = sum(h for h, _ in shapes)
    values = draw(st.lists(st.floats(-2, 2, width=32), min_size=total, max_size=total))
    return scores_of(shapes, values)


@st.composite
def any_search(draw: st.DrawFn) -> Search:
    scores = draw(any_scores())
    heads = [(a.name, h) for a in scores.layers for h in range(a.num_heads)]
    chosen = draw(st.sets(st.sampled_from(heads), max_size=3))
    protect = {a.name: sorted(h for n, h in chosen if n == a.name) for a in scores.layers}
    constraints = Constraints({n: h for n, h in protect.items() if h}, draw(st.integers(0, 3)))
    total = len(scores.flat())
    slopes = torch.randn(4, total, dtype=torch.float64, generator=torch.Generator().manual_seed(total))
    scores = replace(scores, matrix=slopes.T @ slopes)  # as `fisher` has it
    return Search(scores.layers, scores, constraints, draw(st.sampled_from([GROUPS, SLICES])))


def check_plans(order: Order, search: Search) -> None:
    """Every budget within reach has a plan that holds it, among the larger ones' heads, and breaks no constraint."""
    last: set[tuple[str, int]] = set()
    for keep in range(order.total, order.least - 1, -1):
        plan = order.plan(keep)
        dropped = {(n, h) for n, heads in plan.drop.items() for h in heads}
        assert last <= dropped
        assert plan.kept == order.total - len(dropped) <= keep == plan.asked
        assert plan == plan.on(search.layers)
        for layer in search.layers:
            gone = plan.drop.get(layer.name, [])
            assert not set(gone) & search.constraints.protected(layer)
            assert layer.num_heads - len(gone) >= min(search.constraints.min_heads, layer.num_heads)
            check_possible(layer, gone)
        last = dropped


def units_for(layers: Sequence[hp.AttentionLayer], drop: Heads, single: bool = False) -> list[Unit]:
    """Everything that is still there, in groups or as single heads."""
    return [
        Unit(0.0, i, heads)
        for i, a in enumerate(layers)
        for heads in (tuple((h,) for h in range(a.num_heads)) if single else a.units)
        if not set(heads) & set(drop.get(a.name, ()))
    ]
