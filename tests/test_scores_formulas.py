"""Formulas inside of scoring methods, by hand."""

import torch

from headprune.scoring.learned import _relaxed
from headprune.scoring.sampled import inclusion


def test_inclusion_probabilities() -> None:
    size = torch.tensor([1.0, 2, 3, 100], dtype=torch.float64)
    pi = inclusion(size, 2.0)
    torch.testing.assert_close(pi, torch.tensor([1 / 6, 2 / 6, 3 / 6, 1], dtype=torch.float64))
    assert torch.equal(inclusion(size, 4.0), torch.ones(4, dtype=torch.float64))
    small, large = inclusion(size, 1.5), inclusion(size, 2.5)
    assert (large >= small).all()  # a larger sample holds the smaller one


def test_the_relaxed_draw() -> None:
    """Of two by hand; it sums to the count, never takes a head twice, and hardens to the largest keys."""
    keys = torch.tensor([[0.5, -0.3, 0.1]], dtype=torch.float64)
    first = torch.softmax(keys, -1)
    second = torch.exp(keys) * (1 - first)
    torch.testing.assert_close(_relaxed(keys, 2, 1.0), first + second / second.sum())
    keys = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.1):
        sums = _relaxed(keys, 4, temperature).sum(dim=1)
        torch.testing.assert_close(sums, torch.full((5,), 4.0, dtype=torch.float64))
    hard = torch.zeros_like(keys).scatter(1, keys.topk(4).indices, 1.0)
    torch.testing.assert_close(_relaxed(keys, 4, 1e-3), hard, atol=1e-6, rtol=0)
