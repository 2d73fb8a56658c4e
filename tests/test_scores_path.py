"""Integrated gradients against sums that must hold, and against a plain integral without any gate."""

import pytest
import torch
import torch.nn.functional as F

import headprune as hp
from headprune.scoring import METHODS, Settings
from tests.support.problems import TokensFirst, check_resumes, duplicated, error_of, problem, scaled, small, without
from tests.support.zoo import randomise

NAME = "integrated-gradients"
run = METHODS[NAME].run


def test_completeness() -> None:
    model, batches = small()
    found = run(problem(model, batches, Settings(steps=64)))
    expected = without(model, batches, [False] * 6) - without(model, batches, [True] * 6)
    assert found.values.sum().item() == pytest.approx(expected, abs=1e-7)
    assert found.details["mean_loss"] == pytest.approx(without(model, batches, [True] * 6), abs=1e-8)
    assert found.details["gap"] < 1e-6
    torch.testing.assert_close(found.effects.mean(dim=0), found.values)
    torch.testing.assert_close(error_of(found.effects), found.stderr)


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
    found = run(problem(model, batches, Settings(steps=32)))
    torch.testing.assert_close(found.values, expected, atol=2e-5, rtol=0)


def test_points_double_until_the_sum_is_right() -> None:
    model, batches = small()
    for fixed in (1, 3):
        coarse = run(problem(model, batches, Settings(steps=fixed)))
        assert coarse.details["steps"] == fixed
    assert coarse.details["gap"] > 0.01
    chosen = run(problem(model, batches))
    assert chosen.details["gap"] <= 0.01
    assert chosen.details["steps"] in (8, 16, 32)
    exact = run(problem(model, batches, Settings(steps=64)))
    torch.testing.assert_close(chosen.values, exact.values, atol=0.01, rtol=0.02)


def test_dead_and_duplicate_heads() -> None:
    model, batches = small()
    model = scaled(duplicated(model), hp.find_attention(model, batches[0])[1], 2, 0.0)
    found = run(problem(model, batches))
    assert found.values[5] == 0
    assert found.values.abs().argmin() == 5
    torch.testing.assert_close(found.effects[:, 0], found.effects[:, 1], rtol=1e-9, atol=1e-12)


def test_examples_go_one_by_one_where_they_must() -> None:
    model = randomise(TokensFirst())
    x, y = torch.randn(3, 7, 16), torch.randint(0, 3, (3,))

    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, labels, reduction="none")

    single = [(x[i : i + 1], y[i : i + 1]) for i in range(3)]
    a, b = (run(problem(model, batches, loss_fn=loss_fn)) for batches in ([(x, y)], single))
    assert a.examples == b.examples == 3
    torch.testing.assert_close(a.values, b.values)


def test_it_goes_on_where_it_was() -> None:
    model, batches = small()
    check_resumes(NAME, lambda store: problem(model, batches, store=store), limit=2)


def test_progress() -> None:
    model, batches = small()
    heard = []
    run(problem(model, batches, progress=lambda done, total, note="": heard.append((done, total, "gap" in note))))
    assert heard == [(1, 3, True), (2, 3, True), (3, 3, True)]
