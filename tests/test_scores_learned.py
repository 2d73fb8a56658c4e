"""Learned gates on models that say themselves which heads matter."""

import pytest

import headprune as hp
from tests.support.problems import planted

DEAD, STRONG = [1, 4, 6], [0, 5]


@pytest.mark.parametrize(("keep", "seed"), [(None, 0), (5, 1), (3, 2)])
@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_planted_heads(method: str, keep: int | None, seed: int) -> None:
    """Heads that give nothing rank below all others, and those that give much are among the kept."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    s = hp.score(model, batches, f"{method}:keep={keep}" if keep else method, loss_fn=loss_fn, seed=seed)
    order = s.flat().argsort().tolist()
    assert set(order[:3]) == set(DEAD)
    assert set(STRONG) <= set(order[-(keep or 4) :])
    assert s.flat_stderr().isnan().all()
    assert "one training run" in s.details["stderr"]


@pytest.mark.parametrize("keep", [None, 1, 2, 5, 8])
def test_l0_keeps_as_many_as_it_is_told(keep: int | None) -> None:
    model, batches, loss_fn = planted(DEAD, STRONG)
    scores = hp.score(model, batches, f"l0:keep={keep},sparsity=9" if keep else "l0", loss_fn=loss_fn)
    assert scores.details["open"] == pytest.approx(4 if keep is None else keep, abs=0.3)


def test_l0_at_a_price() -> None:
    """The higher the price of a head, the fewer stay open; at none, those that help do."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    methods = [f"l0:sparsity={price},steps=300" for price in (0.0, 0.1, 100.0)]
    free, some, dear = (hp.score(model, batches, method, loss_fn=loss_fn) for method in methods)
    assert free.details["open"] > 7.5 > some.details["open"] > 1.9 > 0.5 > dear.details["open"]
    assert set(some.flat().argsort().tolist()[:3]) == set(DEAD)
