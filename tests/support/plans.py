"""Scores of made-up layers, and what holds for every plan: by the public names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.repairing import calibrate, fit_layers

Head = tuple[str, int]


def scores_of(
    shapes: Sequence[tuple[int, int]], values: Sequence[float], prunable: bool = True, matrix: Tensor | None = None
) -> hp.HeadScores:
    """Scores of layers ``l0``, ``l1``, … with so many heads and key/value heads."""
    layers = []
    for i, (heads, kv) in enumerate(shapes):
        size = heads // kv
        groups = tuple(tuple(range(g * size, g * size + size)) for g in range(kv)) if 1 < kv < heads else ()
        layers.append(hp.AttentionLayer(f"l{i}", i, "decoder", heads, kv, 8, groups, prunable))
    split = torch.split(torch.tensor(values, dtype=torch.float64), [heads for heads, _ in shapes])
    own = {layer.name: value for layer, value in zip(layers, split, strict=True)}
    errors = {name: value * 0 for name, value in own.items()}
    return hp.HeadScores("m", "u", own, errors, 1, tuple(layers), matrix=matrix)


@st.composite
def any_scores(draw: st.DrawFn, shared: bool = True) -> hp.HeadScores:
    """With a matrix of pairs, as ``fisher`` has it; ``shared``: heads may share key/value heads."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shapes = [(kv * draw(st.integers(1, 4)), kv) if shared else (kv, kv) for kv in counts]
    total = sum(heads for heads, _ in shapes)
    values = draw(st.lists(st.floats(-2, 2, width=32), min_size=total, max_size=total))
    slopes = torch.randn(4, total, dtype=torch.float64, generator=torch.Generator().manual_seed(total))
    return scores_of(shapes, values, matrix=slopes.T @ slopes)


@st.composite
def any_constraints(draw: st.DrawFn, layers: Sequence[hp.AttentionLayer]) -> dict[str, Any]:
    """Options of `headprune.plan` and `headprune.search`."""
    chosen = draw(st.sets(st.sampled_from([f"{a.name}.H{h}" for a in layers for h in range(a.num_heads)]), max_size=3))
    return {"protect": sorted(chosen), "min_heads_per_layer": draw(st.integers(0, 3))}


def gone(plan: hp.PruningPlan) -> set[Head]:
    """The heads of a plan."""
    return {(name, head) for name, heads in plan.drop.items() for head in heads}


def check_plan(
    plan: hp.PruningPlan, layers: Sequence[hp.AttentionLayer], protect: Iterable[str] = (), min_heads_per_layer: int = 0
) -> None:
    """A plan counts its heads, holds what was asked for, breaks no constraint, and can be pruned."""
    heads = gone(plan)
    assert plan.total == sum(layer.num_heads for layer in layers)
    assert plan.kept == plan.total - len(heads) <= plan.asked
    assert plan == plan.on(layers)
    assert not {f"{name}.H{head}" for name, head in heads} & set(protect)
    for layer in layers:
        lost = {head for name, head in heads if name == layer.name}
        assert layer.num_heads - len(lost) >= min(min_heads_per_layer, layer.num_heads)
        each = [len(lost & set(group)) for group in layer.groups]
        whole = all(count in (0, len(group)) for count, group in zip(each, layer.groups, strict=True))
        assert whole or len(set(each)) == 1


def check_nested(plans: Sequence[hp.PruningPlan]) -> None:
    """Heads that go from a larger model go from a smaller one too."""
    ordered = sorted(plans, key=lambda plan: -plan.kept)
    assert all(gone(larger) <= gone(smaller) for larger, smaller in itertools.pairwise(ordered))


@contextmanager
def refitted(model: nn.Module, batches: Sequence[Any], drop: Mapping[str, Sequence[int]]) -> Iterator[nn.Module]:
    """A copy in which the heads that stay are refitted, as a search compares plans: without the last step of repair."""
    other = copy.deepcopy(model)
    calibration = calibrate(other, hp.find_attention(other), batches)
    with calibration.applied(fit_layers(calibration, drop).by_module):
        yield other
