"""Sampled Shapley values against all subsets, and against the axioms that define them."""

from itertools import product
from math import comb

import pytest
import torch

import headprune as hp
from headprune.scoring import METHODS, Settings
from tests.support.problems import check_resumes, duplicated, problem, scaled, small, without

run = METHODS["shapley"].run


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
    coarse, fine = (run(problem(model, batches, Settings(permutations=n))) for n in (30, 900))
    for found in (coarse, fine):
        assert ((found.values - exact).abs() < 4 * found.stderr).all()
    spread = exact.max() - exact.min()
    assert (fine.values - exact).abs().max() < 0.1 * spread
    assert fine.details["stopped_early"]


def test_the_standard_error_is_right() -> None:
    """On one batch, over 40 seeds: the values scatter as the error says."""
    model, batches = small()
    found = [run(problem(model, batches[:1], Settings(permutations=14), seed=s)) for s in range(40)]
    scatter = torch.stack([f.values for f in found]).std(dim=0)
    claimed = torch.stack([f.stderr**2 for f in found]).mean(dim=0).sqrt()
    assert ((scatter / claimed > 0.6) & (scatter / claimed < 1.5)).all()


@pytest.mark.parametrize("permutations", [1, 6, 20])
def test_efficiency(permutations: int) -> None:
    """The values sum to what all heads are worth on all examples, however few orders are drawn."""
    model, batches = small()
    found = run(problem(model, batches, Settings(permutations=permutations)))
    expected = without(model, batches, [False] * 6) - without(model, batches, [True] * 6)
    assert found.details["pairs"] == max(3, permutations // 6 * 3)
    assert found.values.sum().item() == pytest.approx(expected, abs=1e-8)
    assert found.details["mean_loss"] == pytest.approx(without(model, batches, [True] * 6), abs=1e-8)


def test_dead_and_duplicate_heads() -> None:
    model, batches = small()
    model = scaled(duplicated(model), hp.find_attention(model, batches[0])[1], 2, 0.0)
    found = run(problem(model, batches))
    assert found.values.abs().argmin() == 5
    assert found.values[5].abs() < 1e-12
    assert (found.values[0] - found.values[1]).abs() < 4 * (found.stderr[0] + found.stderr[1])


def test_one_pair_has_no_standard_error() -> None:
    model, batches = small()
    found = run(problem(model, batches[:1], Settings(permutations=2)))
    assert found.stderr.isnan().all()
    assert "single pair" in found.details["stderr"]


def test_one_head() -> None:
    model, batches = small(heads=1, layers=1)
    found = run(problem(model, batches))
    assert found.values.item() == pytest.approx(without(model, batches, [False]) - without(model, batches, [True]))


def test_only_the_seed_matters() -> None:
    model, batches = small()
    a, b, c = (run(problem(model, batches, Settings(permutations=6), seed=s)).values for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_it_goes_on_where_it_was() -> None:
    model, batches = small()
    settings = Settings(permutations=20)
    check_resumes("shapley", lambda store: problem(model, batches, settings, store), limit=4)


def test_progress() -> None:
    model, batches = small()
    heard = []
    settings = Settings(permutations=12)
    run(problem(model, batches, settings, progress=lambda done, total, note="": heard.append((done, total, note))))
    assert [h[:2] for h in heard] == [(i, 6) for i in range(1, 7)]
    assert heard[-1][2].startswith("widest interval ±0.")
