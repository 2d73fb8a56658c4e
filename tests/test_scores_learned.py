"""Learned gates on models that say themselves which heads matter."""

import pytest
import torch

import headprune as hp
from headprune.scoring import METHODS, Settings
from headprune.scoring.learned import _relaxed
from tests.support.problems import check_resumes, planted, problem, small

DEAD, STRONG = [1, 4, 6], [0, 5]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [None, 5, 3])
@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_planted_heads(method: str, keep: int | None, seed: int) -> None:
    """Heads that give nothing rank below all others, and those that give much are among the kept."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    s = hp.score(model, batches, method, loss_fn=loss_fn, seed=seed, settings=Settings(keep=keep)).flat()
    order = s.argsort().tolist()
    assert set(order[:3]) == set(DEAD)
    assert set(STRONG) <= set(order[-(keep or 4) :])


@pytest.mark.parametrize("keep", [None, 1, 2, 5, 8])
def test_l0_keeps_as_many_as_it_is_told(keep: int | None) -> None:
    model, batches, loss_fn = planted(DEAD, STRONG)
    found = METHODS["l0"].run(
        problem(model, batches, Settings(keep=keep, sparsity=9.0 if keep else None), loss_fn=loss_fn)
    )
    assert found.details["open"] == pytest.approx(4 if keep is None else keep, abs=0.3)


def test_l0_at_a_price() -> None:
    """The higher the price of a head, the fewer stay open; at none, those that help do."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    settings = [Settings(sparsity=price, steps=300) for price in (0.0, 0.1, 100.0)]
    free, some, dear = (METHODS["l0"].run(problem(model, batches, s, loss_fn=loss_fn)) for s in settings)
    assert free.details["open"] > 7.5 > some.details["open"] > 1.9 > 0.5 > dear.details["open"]
    assert set(some.values.argsort().tolist()[:3]) == set(DEAD)


@pytest.mark.parametrize("keep", [0, 9])
def test_a_budget_of_no_head_or_of_more_than_there_are(keep: int) -> None:
    model, batches = small()
    with pytest.raises(hp.HeadPruneError, match=f"keep {keep} (leaves no head|is more than all)"):
        METHODS["l0"].run(problem(model, batches, Settings(keep=keep, steps=30)))


@pytest.mark.parametrize("keep", [1, 6])
@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_any_budget(method: str, keep: int) -> None:
    model, batches = small()
    found = METHODS[method].run(problem(model, batches, Settings(keep=keep, steps=30)))
    assert found.values.isfinite().all()
    assert found.stderr.isnan().all()
    assert "one training run" in found.details["stderr"]


def test_the_relaxed_draw() -> None:
    """Sums to the count, never takes a head twice, and hardens to the largest keys."""
    keys = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.1):
        soft = _relaxed(keys, 4, temperature)
        torch.testing.assert_close(soft.sum(dim=1), torch.full((5,), 4.0, dtype=torch.float64))
    hard = torch.zeros_like(keys).scatter(1, keys.topk(4).indices, 1.0)
    torch.testing.assert_close(_relaxed(keys, 4, 1e-3), hard, atol=1e-6, rtol=0)


def test_the_relaxed_draw_of_two_by_hand() -> None:
    keys = torch.tensor([[0.5, -0.3, 0.1]], dtype=torch.float64)
    first = torch.softmax(keys, -1)
    second = torch.exp(keys) * (1 - first)
    torch.testing.assert_close(_relaxed(keys, 2, 1.0), first + second / second.sum())


@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_only_the_seed_matters(method: str) -> None:
    model, batches = small()
    settings = Settings(steps=10)
    torch.manual_seed(1)
    a = METHODS[method].run(problem(model, batches, settings)).values
    state = torch.get_rng_state()
    b, c = (METHODS[method].run(problem(model, batches, settings, seed=s)).values for s in (0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_it_goes_on_where_it_was(method: str) -> None:
    model, batches = small()
    check_resumes(method, lambda store: problem(model, batches, Settings(steps=60), store), limit=2)
