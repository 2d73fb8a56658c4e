"""Shapley values against all subsets, integrated gradients against a plain integral, and both against the sum that must hold; planted heads."""

import copy
from itertools import product
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.scoring.learned import _relaxed
from headprune.scoring.sampled import inclusion
from tests.support.problems import planted, quick, small, without
from tests.support.zoo import ZOO, bert, labelled, llama, text


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
    assert s.signed
    if "steps" in method:
        assert s.details["gap"] < 1e-6
    else:
        assert s.details["pairs"] == max(3, int(method.partition("=")[2]) // 6 * 3)


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


# -- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gradient", "ablation", "fisher", "integrated-gradients"])
def test_half_precision(name: str) -> None:
    """bfloat16 gives float32's scores to its own precision, and sums them in float64."""
    model, _ = llama()
    batch = labelled(model, text(16, 8))
    full, half = (hp.score(m, [batch], quick(name, "steps=8")) for m in (model, copy.deepcopy(model).bfloat16()))
    assert half.flat().dtype == torch.float64
    assert ((half.flat() - full.flat()).abs() <= 0.1 * full.flat().abs().max()).all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
def test_gradient_checkpointing(name: str) -> None:
    """The same scores, from activations that are computed again: blocks run twice, with dropout off."""
    model, example = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    batch, layers = labelled(model, example), hp.find_attention(model, example)

    def scored() -> tuple[torch.Tensor, int]:
        """The scores, and how often the last layer ran."""
        runs: list[int] = []
        handle = model.get_submodule(layers[-1].module).register_forward_hook(lambda *_: runs.append(1))
        scores = hp.score(model, [batch], "gradient", layers=layers).flat()
        handle.remove()
        return scores, len(runs)

    expected, plain = scored()
    model.gradient_checkpointing_enable()
    scores, checkpointed = scored()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert checkpointed > plain


def test_examples_longer_than_the_model_allows() -> None:
    model, _ = bert()
    fits, long = labelled(model, text(2, 9)), labelled(model, text(2, 9))
    most = model.config.max_position_embeddings
    long = {**long, **{k: torch.ones(2, most + 3, dtype=torch.long) for k in ("input_ids", "attention_mask")}}
    for name in ("gradient", "ablation", "entropy", "l0"):
        with pytest.raises(hp.HeadPruneError, match=f"does not run on.*{most + 3} tokens.*{most} positions"):
            hp.score(model, [fits, long], quick(name, "steps=4"))


def test_a_single_example_has_no_standard_error_and_says_so() -> None:
    model, _ = bert()
    batch = labelled(model, text(1, 7))
    for name in ("gradient", "ablation", "entropy"):
        s = hp.score(model, [batch], name)
        assert s.flat_stderr().isnan().all()
        assert "single example" in s.details["stderr"]


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


# -- formulas in the open --------------------------------------------------------------------------


def test_inclusion_probabilities() -> None:
    size = torch.tensor([1.0, 2, 3, 100], dtype=torch.float64)
    pi = inclusion(size, 2.0)
    torch.testing.assert_close(pi, torch.tensor([1 / 6, 2 / 6, 3 / 6, 1], dtype=torch.float64))
    assert torch.equal(inclusion(size, 4.0), torch.ones(4, dtype=torch.float64))
    assert (inclusion(size, 2.5) >= inclusion(size, 1.5)).all()  # a larger sample holds the smaller one


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
