"""Shapley values against all subsets, integrated gradients against a plain integral, and both against the sum that must hold."""

from itertools import product
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support.problems import small, without


def score(method: str, model: nn.Module, batches: list[dict[str, Tensor]], **more: Any) -> hp.HeadScores:
    return hp.score(model, batches, method, **more)


@pytest.mark.parametrize("method", [
    "integrated-gradients:steps=64", "shapley:permutations=1", "shapley:permutations=6", "shapley:permutations=20",
])  # fmt: skip
def test_the_values_sum_to_what_all_heads_are_worth(method: str) -> None:
    """Completeness, or efficiency: on all examples, however few orders are drawn."""
    model, batches = small()
    s = score(method, model, batches)
    dense = without(model, batches, [True] * 6)
    assert s.flat().sum().item() == pytest.approx(without(model, batches, [False] * 6) - dense, abs=1e-7)
    assert s.details["mean_loss"] == pytest.approx(dense, abs=1e-8)
    if "steps" in method:
        assert s.details["gap"] < 1e-6
    else:
        assert s.details["pairs"] == max(3, int(method.partition("=")[2]) // 6 * 3)


@pytest.mark.parametrize("method", ["integrated-gradients", "shapley:permutations=12"])
def test_progress(method: str) -> None:
    model, batches = small()
    calls: list[tuple[int, int, str]] = []
    score(method, model, batches, progress=lambda done, total, note="": calls.append((done, total, note)))
    steps = 6 if "shapley" in method else 3
    assert [call[:2] for call in calls] == [(i, steps) for i in range(1, steps + 1)]
    assert ("widest interval ±0." if "shapley" in method else "gap") in calls[-1][2]


# -- Shapley values ------------------------------------------------------------------------------


def test_against_all_subsets() -> None:
    """64 models with columns of W_O zeroed, weighted as Shapley (1953) does."""
    model, batches = small()
    loss = {kept: without(model, batches, kept) for kept in product((False, True), repeat=6)}
    exact = torch.zeros(6, dtype=torch.float64)
    for kept in loss:
        for h in range(6):
            if kept[h]:
                less = (*kept[:h], False, *kept[h + 1 :])
                exact[h] += (loss[less] - loss[kept]) / (6 * comb(5, sum(less)))
    coarse, fine = (score(f"shapley:permutations={n}", model, batches) for n in (30, 900))
    for s in (coarse, fine):
        assert ((s.flat() - exact).abs() < 4 * s.flat_stderr()).all()
    assert (fine.flat() - exact).abs().max() < 0.1 * (exact.max() - exact.min())
    assert fine.details["stopped_early"]


def test_the_standard_error_is_right() -> None:
    """On one batch, over 24 seeds: the values scatter as the error says."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    runs = [score("shapley:permutations=14", model, batches[:1], seed=s, layers=layers) for s in range(24)]
    scatter = torch.stack([s.flat() for s in runs]).std(dim=0)
    claimed = torch.stack([s.flat_stderr() ** 2 for s in runs]).mean(dim=0).sqrt()
    assert ((scatter / claimed > 0.6) & (scatter / claimed < 1.5)).all()


def test_one_pair_and_one_head() -> None:
    model, batches = small()
    s = score("shapley:permutations=2", model, batches[:1])
    assert s.flat_stderr().isnan().all()
    assert "single pair" in s.details["stderr"]
    model, batches = small(heads=1, layers=1)
    expected = without(model, batches, [False]) - without(model, batches, [True])
    assert score("shapley", model, batches).flat().item() == pytest.approx(expected)


# -- integrated gradients ------------------------------------------------------------------------


def test_against_the_trapezoid_rule() -> None:
    """200 points, W_O's columns scaled, the model's own loss."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    points = torch.linspace(0, 1, 201, dtype=torch.float64)
    slopes = []
    for at in points:
        gates = at.repeat(6).requires_grad_()
        weights = {}
        for layer, own in zip(layers, gates.split(3), strict=True):
            name = f"{layer.output_projection.module}.weight"
            weights[name] = model.get_parameter(name).detach() * own.repeat_interleave(8)
        rows = [len(b["labels"]) for b in batches]
        losses = [torch.func.functional_call(model, weights, (), b).loss for b in batches]
        loss = sum(x * n for x, n in zip(losses, rows, strict=True)) / sum(rows)
        slopes.append(torch.autograd.grad(loss, gates)[0])
    expected = -torch.trapezoid(torch.stack(slopes), points, dim=0)
    s = score("integrated-gradients:steps=32", model, batches, layers=layers)
    torch.testing.assert_close(s.flat(), expected, atol=2e-5, rtol=0)


def test_points_double_until_the_sum_is_right() -> None:
    model, batches = small()
    for fixed in (1, 3):
        coarse = score(f"integrated-gradients:steps={fixed}", model, batches)
        assert coarse.details["steps"] == fixed
    assert coarse.details["gap"] > 0.01
    chosen, exact = (score(f"integrated-gradients{steps}", model, batches) for steps in ("", ":steps=64"))
    assert chosen.details["gap"] <= 0.01
    assert chosen.details["steps"] in (8, 16, 32)
    torch.testing.assert_close(chosen.flat(), exact.flat(), atol=0.01, rtol=0.02)
