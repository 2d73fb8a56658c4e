"""Exchanges of heads in a plan, against every exchange there is."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headprune as hp
from headprune.attention import Heads
from headprune.planning import STRATEGIES, Constraints, Search
from headprune.planning.units import GROUPS, SLICES
from tests.support.checks import same, state
from tests.support.plans import check_plans, scores_of
from tests.support.problems import small


def matrix_of(size: int, seed: int, scale: float = 1.0) -> Tensor:
    g = torch.randn(5, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    off = g.T @ g / 5
    return torch.diag(off.diagonal()) + scale * (off - torch.diag(off.diagonal()))


def scored(shapes: list[tuple[int, int]], matrix: Tensor) -> hp.HeadScores:
    return replace(scores_of(shapes, matrix.diagonal().tolist()), matrix=matrix)


def cost(matrix: Tensor, chosen: Sequence[int]) -> float:
    return float(matrix[list(chosen)][:, list(chosen)].sum())


def flat(scores: hp.HeadScores, drop: Heads) -> list[int]:
    offsets, at = {}, 0
    for a in scores.layers:
        offsets[a.name], at = at, at + a.num_heads
    return sorted(offsets[n] + h for n, heads in drop.items() for h in heads)


def by_greed(matrix: Tensor, count: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [i for i in range(len(matrix)) if i not in chosen]
        chosen.append(min(rest, key=lambda i: cost(matrix, [*chosen, i])))
    return chosen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([[(4, 4)], [(3, 3), (4, 4)], [(2, 2), (3, 3), (2, 2)]]), st.data())
def test_swap_ends_where_no_exchange_helps(seed: int, shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    size = sum(h for h, _ in shapes)
    matrix = matrix_of(size, seed)
    scores = scored(shapes, matrix)
    keep = data.draw(st.integers(1, size - 1))
    gone = flat(scores, STRATEGIES["swap"].run(Search(scores.layers, scores), [keep]).plan(keep).drop)
    assert len(gone) == size - keep
    found = cost(matrix, gone)
    assert found <= cost(matrix, by_greed(matrix, size - keep)) + 1e-9
    for out, into in itertools.product(gone, set(range(size)) - set(gone)):
        assert found <= cost(matrix, [*(g for g in gone if g != out), into]) + 1e-9
    best = min(cost(matrix, c) for c in itertools.combinations(range(size), size - keep))
    assert found >= best - 1e-9
    if keep in (1, size - 1):  # one that goes, or one that stays: an exchange reaches every choice
        assert found == pytest.approx(best)


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_swap_is_best_where_heads_do_not_interact(seed: int, keep: int) -> None:
    matrix = matrix_of(8, seed, scale=0.0)
    scores = scored([(4, 4), (4, 4)], matrix)
    gone = flat(scores, STRATEGIES["swap"].run(Search(scores.layers, scores), [keep]).plan(keep).drop)
    best = min(cost(matrix, c) for c in itertools.combinations(range(8), 8 - keep))
    assert cost(matrix, gone) == pytest.approx(best)


def test_swap_undoes_what_greed_did() -> None:
    """The cheapest head first makes the cheapest pair impossible."""
    matrix = torch.tensor([[1.0, 2, 2], [2, 1.1, -0.9], [2, -0.9, 1.2]], dtype=torch.float64)
    assert sorted(by_greed(matrix, 2)) != [1, 2]
    scores = scored([(3, 3)], matrix)
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [1])
    assert order.plan(1).drop == {"l0": [1, 2]}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_swap_holds_budgets_and_constraints(data: st.DataObject) -> None:
    shapes = [(kv * data.draw(st.integers(1, 3)), kv) for kv in data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))]  # fmt: skip
    size = sum(h for h, _ in shapes)
    scores = scored(shapes, matrix_of(size, data.draw(st.integers(0, 999))))
    layers = scores.layers
    chosen = data.draw(st.sets(st.sampled_from([(a.name, h) for a in layers for h in range(a.num_heads)]), max_size=2))
    protect = {a.name: sorted(h for n, h in chosen if n == a.name) for a in layers}
    constraints = Constraints({n: h for n, h in protect.items() if h}, data.draw(st.integers(0, 2)))
    search = Search(layers, scores, constraints, data.draw(st.sampled_from([GROUPS, SLICES])))
    levels = data.draw(st.lists(st.integers(1, size), max_size=3))
    order = STRATEGIES["swap"].run(search, levels)
    assert order == STRATEGIES["swap"].run(search, levels)
    assert order.least == STRATEGIES["one-shot"].run(search, []).least
    check_plans(order, search)


def test_swap_counts_what_has_gone_before() -> None:
    """At the second level, heads that interact with those of the first cost more."""
    matrix = torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = 2
    scores = scored([(4, 4)], matrix)
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [3, 2])
    assert order.plan(3).drop == {"l0": [0]}
    assert order.plan(2).drop == {"l0": [0, 2]}


def test_swap_takes_what_makes_up_for_what_has_gone() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64))
    matrix[0, 3] = matrix[3, 0] = -2.5
    scores = scored([(4, 4)], matrix)
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [3, 2])
    assert order.plan(2).drop == {"l0": [0, 3]}


def test_swap_exchanges_whole_groups_below_a_level_that_they_cannot_meet() -> None:
    """Two of three groups of two go, though three heads could stay: the third must not go before they are exchanged."""
    matrix = torch.tensor([[1.0, 2, 2], [2, 1.1, -0.9], [2, -0.9, 1.2]], dtype=torch.float64)
    scores = scored([(6, 3)], torch.kron(matrix, torch.full((2, 2), 0.25, dtype=torch.float64)))
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [3])
    assert order.plan(3).drop == {"l0": [2, 3, 4, 5]}
    assert order.kept() == (6, 4, 2, 0)


def test_swap_needs_a_matrix() -> None:
    scores = scores_of([(4, 4)], [1, 2, 3, 4])
    for given_ in (scores, None):
        with pytest.raises(hp.HeadPruneError, match="do not weigh pairs") as error:
            STRATEGIES["swap"].run(Search(scores.layers, given_), [2])
        assert "fisher" in str(error.value.hint)


def test_swap_on_a_real_matrix_leaves_the_model_alone() -> None:
    model, batches = small()
    before = state(model)
    scores = hp.score(model, batches, "fisher")
    plan = hp.plan(scores, 3, "swap")
    assert plan.kept == 3
    assert same(model, before)
