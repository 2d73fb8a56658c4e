"""Formulas of repair that its public names do not reach alone, against the same in the open."""

import math
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import headprune as hp
from headprune.batches import Rows
from headprune.repairing import calibrate, gauss_newton, values
from headprune.repairing.checks import better
from headprune.repairing.coordinates import longest
from headprune.repairing.directions import inputs_of_heads
from headprune.repairing.probes import probe_of
from tests.support import brute
from tests.support.zoo import text


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("ridge", [0.1, 1.0])
def test_values_and_outputs_end_where_the_slopes_are_zero(
    name: str, ridge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole squared error and both pulls, by autograd; every round is a gain, and the heads of a group share values."""
    model, example = brute.model_of(name)
    layers = hp.find_attention(model, example)
    calibration = calibrate(model, layers, [example], mixtures=False)
    projection = calibration.projections[0]
    own, statistics = calibration.values[projection.name], calibration.statistics
    heads, rank = list(range(1, layers[0].num_heads)), statistics.directions.rank(projection.name)
    moments, width = statistics.moments[projection.name], own.head_dim
    index = inputs_of_heads(projection, own, heads, rank).flatten()
    xx, xy = (m.sum(0) for m in moments.rows_of(index))
    groups = [own.owner[h] for h in heads]
    kept = sorted(set(groups))
    old_out = projection.weight[own.columns[heads]]
    old_mix = torch.eye(width + rank, width).double().expand(len(kept), -1, -1)
    tokens, (mean, mean_y) = xx[-1, -1], (xx[-1, :-1] / xx[-1, -1], xy[-1] / xx[-1, -1])
    a = xx[:-1, :-1] / tokens - torch.outer(mean, mean)
    c = xy[:-1] / tokens - torch.outer(mean, mean_y)
    spread = a.diagonal().view(len(heads), -1)
    pulls = spread[:, :width].mean(), spread.mean() * old_out.square().sum(2).mean() * len(heads) / len(kept)

    def objective(mix: Tensor, out: Tensor) -> Tensor:
        w = torch.cat([mix[kept.index(g)] @ out[i] for i, g in enumerate(groups)])
        error = moments.yy.sum() / tokens - mean_y.square().sum() - 2 * (w * c).sum() + (w * (a @ w)).sum()
        pull = pulls[0] * (out - old_out).square().sum() + pulls[1] * (mix - old_mix).square().sum()
        return error + ridge * pull

    def fitted(rounds: int) -> list[Tensor]:
        monkeypatch.setattr(values, "_ROUNDS", rounds)
        monkeypatch.setattr(values, "_STEPS", 30)
        fit = values.fit_values(moments, projection, own, heads, rank, ridge)
        mixes = [fit.mixes[heads[groups.index(g)]] for g in kept]
        assert all(torch.equal(fit.mixes[h], mixes[kept.index(g)]) for h, g in zip(heads, groups, strict=True))
        assert fit.facts.after <= fit.facts.before
        return [torch.stack(mixes).requires_grad_(), fit.weight[own.columns[heads]].requires_grad_()]

    # Without any round W_O is fitted already.
    losses = [float(objective(old_mix, old_out)), *(float(objective(*fitted(rounds))) for rounds in (1, 2, 4))]
    assert losses == sorted(losses, reverse=True)
    at_first = torch.autograd.grad(objective(*(start := [t.clone().requires_grad_() for t in (old_mix, old_out)])), start)
    at_last = torch.autograd.grad(objective(*(end := fitted(400))), end)
    for first, last in zip(at_first, at_last, strict=True):
        assert last.abs().max() < 1e-4 * first.abs().max()


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_is_the_ridge_regression(some: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strengths that are compared on some rows only, gradients far below 1, and noise in what is lacking."""
    j = draw(200, 300) * torch.logspace(0, -2, 300) * 1e-12
    y = 1e12 * j @ draw(300, seed=1)
    lacking = (y + y.std() * draw(200, seed=2)).view(100, 2)
    monkeypatch.setattr(gauss_newton, "_MOST_TRIED", 100 if some else 1000)
    found = gauss_newton.solved(j.to(dtype), lacking, torch.arange(100))
    assert found
    unit = float(j.square().sum(1).mean())
    kernel = j @ j.T / unit
    expected = j.T @ torch.linalg.solve(kernel + found[1] * torch.eye(200).double(), lacking.flatten()) / unit
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert found[2] < float(lacking.square().mean().sqrt())
    assert gauss_newton.solved(torch.eye(200).to(dtype), draw(100, 2), torch.arange(100)) is None  # nothing but noise


def test_coordinates_are_what_gradients_are_longest_along() -> None:
    """All of them keep every inner product; some are orthonormal, and the longest products of eigenvectors."""
    parts: list[dict[str, tuple[Tensor, Tensor]]] = [
        {n: (draw(rows, 3, wide) * torch.logspace(0, -1, wide), draw(2, rows, 3, 5)) for n, wide in (("a", 4), ("b", 6))}
        for rows in (7, 4)
    ]
    each = {
        n: torch.cat([torch.einsum("nti,pnto->npio", *part[n]).flatten(0, 1) for part in parts]) for n in ("a", "b")
    }
    gradients, alpha = torch.cat([g.flatten(1) for g in each.values()], dim=1), draw(22)
    every = longest(parts)
    rows = torch.cat([every.of(part) for part in parts])
    torch.testing.assert_close(rows @ rows.T, gradients @ gradients.T)
    for name, matrix in every.matrices(rows.T @ alpha).items():
        torch.testing.assert_close(matrix, torch.einsum("r,rio->io", alpha, each[name]))
    some = longest(parts, 11)
    axes = [some.matrices(one) for one in torch.eye(11, dtype=torch.float64)]
    flat = torch.stack([torch.cat([axis[name].flatten() for name in each]) for axis in axes])
    torch.testing.assert_close(flat @ flat.T, torch.eye(11, dtype=torch.float64))
    along = torch.cat([some.of(part) for part in parts])
    torch.testing.assert_close(along, gradients @ flat.T)
    lengths = []
    for name, own in each.items():
        left, right = (torch.linalg.svd(torch.cat([p[name][i].flatten(0, -2) for p in parts]))[2] for i in (0, 1))
        lengths.append((left @ own @ right.T).square().sum(0).flatten())
    best = torch.cat(lengths).sort(descending=True).values
    torch.testing.assert_close(along.square().sum(), best[:11].sum())


@pytest.mark.parametrize(("before", "after", "kept"), [
    ([4.0] * 200, [1.0] * 200, True), ([1.0] * 200, [4.0] * 200, False), ([1.0] * 8, [1.0] * 8, False),
    ([4.0, 5.0, 4.0, 5.0] * 2, [1.0, 1.0, 2.0, 1.0] * 2, True), ([1.0] * 8, [math.nan] * 8, False),
    ([100.0] + [1.0] * 199, [0.0] + [1.2] * 199, True),  # the mean falls by one example: with many, it decides
    ([100.0] + [1.0] * 49, [0.0] + [1.2] * 49, False),  # with few, so much by one alone may be chance
    ([1.5] * 8, [40.0] + [0.7] * 7, False),  # seven gain, and one is lost: the mean decides
])  # fmt: skip
def test_what_counts_as_better(before: list[float], after: list[float], kept: bool) -> None:
    assert better(torch.tensor(before).double(), torch.tensor(after).double()) is kept


def test_chance_is_not_believed() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (2, 8, 40, 99):
        believed = sum(better(*torch.rand(2, n, generator=generator, dtype=torch.float64)) for _ in range(400))
        assert believed <= 400 * (n / 100) ** 1.5 / 2 + 20  # and what chance adds


@pytest.mark.parametrize("kind", ["classes", "regression", "multi_label_classification"])
def test_the_probe_is_the_fisher_information(kind: str) -> None:
    """On average the square of its slope: of classes diag(p) - p p^T, of numbers the identity, of a yes or no its variance."""
    config = tf.BertConfig(num_labels=3, problem_type=None if kind == "classes" else kind)
    model: Any = torch.nn.Module()
    model.config = config
    logits = draw(1, 3).expand(2000, 3).clone().requires_grad_()
    output = tf.modeling_outputs.SequenceClassifierOutput(logits=logits)
    (slope,) = torch.autograd.grad(probe_of(model, output, text(2000, 4), 0, Rows()), logits)
    row = logits[0].detach()
    chance, one = row.softmax(-1), torch.eye(3, dtype=torch.float64)
    expected = {
        "classes": chance.diag() - torch.outer(chance, chance), "regression": one,
        "multi_label_classification": (row.sigmoid() * (1 - row.sigmoid())).diag(),
    }[kind]  # fmt: skip
    torch.testing.assert_close(slope.T @ slope / 2000, expected, rtol=0, atol=0.1 * float(expected.max()))
