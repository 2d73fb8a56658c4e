"""Formulas of repair that its public names do not reach alone, in the open; and the dense model, measured once and never changed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from headprune import repairing
from headprune.attention import Heads
from headprune.repairing import answers, calibrate, calibration, checked_repair, directions, fit_layers, gauss_newton
from headprune.repairing import layers as layer_steps
from headprune.repairing.gauss_newton import longest
from headprune.repairing.steps import better
from tests.support import brute
from tests.support.checks import same, state


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_values_and_outputs_end_where_the_slopes_are_zero(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole squared error and both pulls, by autograd; every round is a gain, and the heads of a group share values."""
    (model, example), ridge = brute.model_of(name), 1.0
    layers = hp.find_attention(model, example)
    found = calibrate(model, layers, [example], mixtures=False)
    projection = found.projections[0]
    own, statistics = found.values[projection.name], found.statistics
    heads, rank = list(range(1, layers[0].num_heads)), statistics.directions.rank(projection.name)
    moments, width = statistics.moments[projection.name], own.head_dim
    index = directions.inputs_of_heads(projection, own, heads, rank).flatten()
    xx, xy, _ = (m.sum(0) for m in moments.rows_of(index))
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
        monkeypatch.setattr(layer_steps, "_ROUNDS", rounds)
        monkeypatch.setattr(layer_steps, "_STEPS", 30)
        along = statistics.directions.along[projection.name]
        fit = layer_steps.fit_values(moments, projection, own, heads, along, ridge)
        mixes = [fit.mixes[heads[groups.index(g)]] for g in kept]
        assert all(torch.equal(fit.mixes[h], mixes[kept.index(g)]) for h, g in zip(heads, groups, strict=True))
        assert fit.facts.after <= fit.facts.before
        return [torch.stack(mixes).requires_grad_(), fit.weight[own.columns[heads]].requires_grad_()]

    # Without any round W_O is fitted already.
    losses = [float(objective(old_mix, old_out)), *(float(objective(*fitted(rounds))) for rounds in (1, 2, 4))]
    assert losses == sorted(losses, reverse=True)
    start = [t.clone().requires_grad_() for t in (old_mix, old_out)]
    at_first = torch.autograd.grad(objective(*start), start)
    at_last = torch.autograd.grad(objective(*(end := fitted(200))), end)
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
    """They are orthonormal, and the longest products of eigenvectors."""

    def made(rows: int, wide: int) -> tuple[Tensor, Tensor]:
        return draw(rows, 3, wide) * torch.logspace(0, -1, wide), draw(2, rows, 3, 5)

    parts = [{"a": made(rows, 4), "b": made(rows, 6)} for rows in (7, 4)]
    each = {n: torch.cat([torch.einsum("nti,pnto->npio", *part[n]).flatten(0, 1) for part in parts]) for n in "ab"}
    gradients = torch.cat([g.flatten(1) for g in each.values()], dim=1)
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


# -- the calibration ----------------------------------------------------------------------------------

DROP: Heads = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def calibrated(classes: int = 3, **given: Any) -> repairing.Calibration:
    model, batches = brute.classifier(classes)
    return calibrate(model, hp.find_attention(model, batches[0]), batches, **given)


def sums(found: repairing.Calibration) -> dict[str, Tensor]:
    moments = found.statistics.moments.items()
    return {f"{name} {key}": value for name, own in moments for key, value in vars(own).items()}


def test_weights_are_applied_and_taken_out_to_the_bit() -> None:
    """Also within others, and with a removed head masked."""
    found = calibrated()
    model, before = found.model, state(found.model)
    first, second = fit_layers(found, {**DROP, "bert.encoder.layer.1.attention.self": [1]}), fit_layers(found, DROP)
    assert first.mixes
    assert first.ridges.keys() == first.fits.keys()
    with found.applied(second.by_module, DROP):
        alone = state(model)
    with found.applied(first.by_module):
        assert not same(model, before)
        with found.applied(second.by_module):
            assert same(model, alone)
        assert same(model, before)  # the dense model, whichever weights there were
    assert same(model, before)


def test_a_repair_does_not_depend_on_what_was_tried_before() -> None:
    alone = checked_repair(calibrated(), DROP)
    found = calibrated()
    fit_layers(found, {"bert.encoder.layer.0.attention.self": [0]})
    with found.applied(fit_layers(found, DROP).by_module):
        pass
    again = checked_repair(found, DROP)
    assert again.trials == alone.trials
    torch.testing.assert_close(dict(again.by_module), dict(alone.by_module), rtol=0, atol=0)


def test_where_nothing_is_refitted_nothing_is_measured() -> None:
    """The sums of all layers were gathered for a search without repair: at 8 billion parameters 17 GB."""
    found, passes = calibrated(repair=False), list[object]()
    handle = found.model.register_forward_pre_hook(lambda *given: passes.append(given))
    assert found.statistics.moments == found.statistics.directions.along == {}
    handle.remove()
    assert not passes
    assert found.statistics.passes == found.cost == 0


@pytest.mark.parametrize("shares", [2, 1, 0])
def test_as_many_directions_as_there_is_room_for(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * 2 * 8 * (24 + 3 * 8 * shares + 1) ** 2
    monkeypatch.setattr(directions, "_MOST", room - (not shares))
    found = calibrated(mixtures=False)
    weights = fit_layers(found, DROP)
    assert {m.xx.shape for m in found.statistics.moments.values()} == {(2, 25 + 24 * shares, 25 + 24 * shares)}
    assert {len(m) for mixes in weights.mixes.values() for m in mixes.values()} <= {8 + 8 * shares}
    assert any("would not fit into memory" in note for note in found.notes) == (not shares)
    assert bool(weights.mixes) == bool(shares)
    monkeypatch.setattr(directions, "_MOST_AT_ONCE", 1)  # a layer at a time
    parts = sums(calibrated(mixtures=False))
    assert all(torch.equal(value, parts[name]) for name, value in sums(found).items())


def test_many_examples_are_seen_in_part_and_have_fewer_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, count in ((63, 0), (64, 1), (96, 2)):  # there are 32 examples
        monkeypatch.setattr(calibration, "_MOST_EXAMPLES", room)
        assert {mixed.shift for mixed in calibrated().statistics.runner.mixtures} == set(range(1, count + 1))
    monkeypatch.setattr(answers, "MOST_ROWS", 24)
    known, _ = calibrated(mixtures=False).answers
    assert not isinstance(known, str)
    assert 0 < known.examples <= 24


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_one_example_is_both_folds_by_its_tokens(name: str) -> None:
    """As a search may have it. Where there is but one token, nothing says that other weights are better."""
    model, example = brute.model_of(name)
    layers, one = hp.find_attention(model, example), brute.rows_of(example, [0])
    found, padded, single = (
        fit_layers(calibrate(model, layers, [batch], mixtures=False), {"L1": [1]} | brute.some_heads(layers))
        for batch in (one, brute.padded(one, 3), {k: v[:, :1] for k, v in one.items()})
    )
    assert min(found.ridges.values()) < math.inf
    assert set(single.ridges.values()) == {math.inf}
    for name, (weight, _) in found.by_module.items():
        torch.testing.assert_close(padded.by_module[name][0], weight, rtol=1e-6, atol=1e-6)
