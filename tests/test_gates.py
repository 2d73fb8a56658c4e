"""Masks and gates: half precision without rounding on the way, open gates without any trace, and scores for any precision."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support.cases import answer
from tests.support.checks import hooks
from tests.support.zoo import TorchEncoder, bert, labelled, text

HALVES = [torch.bfloat16, torch.float16]
FIRST = "bert.encoder.layer.0.attention.self"


def seen_by_output(model: nn.Module, example: Any, **mask: Any) -> Tensor:
    """What the first W_O reads."""
    seen: list[Tensor] = []
    handle = model.bert.encoder.layer[0].attention.output.dense.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )  # type: ignore[union-attr, index]
    answer(model, example)
    handle.remove()
    return seen[0]


def test_nothing_is_left_behind() -> None:
    model = TorchEncoder()
    layers = hp.find_attention(model, torch.randn(2, 5, 32))
    with pytest.raises(RuntimeError, match="boom"), hp.mask(model, {layers[0].name: [0]}, layers=layers):
        raise RuntimeError("boom")
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@torch.no_grad()
def test_a_mask_changes_no_bit_of_the_heads_that_stay(dtype: torch.dtype) -> None:
    model, example = bert()
    model.to(dtype)
    layers = hp.find_attention(model, example)
    dense, heads = answer(model, example), seen_by_output(model, example)
    with hp.mask(model, {layer.name: [] for layer in layers}, layers=layers):
        assert torch.equal(answer(model, example), dense)
    columns = [f for h in (0, 3) for f in layers[0].output_projection.features[h]]
    heads[..., columns] = 0
    with hp.mask(model, {FIRST: [0, 3]}, layers=layers):
        assert torch.equal(seen_by_output(model, example), heads)  # a hook that is set later sees what W_O reads
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gates_derivative_is_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    """The gradient scores, against the sums in float64 of what W_O reads times its slope; one gate for every example."""
    model, example = bert()
    model.to(dtype)
    batch = labelled(model, example)
    scores = hp.score(model, [batch], "gradient")
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        seen.append(args[0])

    places = [model.get_submodule(layer.output_projection.module) for layer in scores.layers]
    handles = [place.register_forward_pre_hook(note) for place in places]
    logits = model(**example).logits.float()
    torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum").backward()
    for hidden, value, handle in zip(seen, scores.values.values(), handles, strict=True):
        products = (hidden.double() * hidden.grad.double()).unflatten(-1, (4, 8))
        off = (value - products.sum((1, 3)).abs().mean(0)).abs()
        assert bool((off <= 1e-5 * products.abs().sum((1, 3)).mean(0)).all())
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scored_in_half", [False, True])
def test_scores_and_plans_serve_in_any_precision(dtype: torch.dtype, scored_in_half: bool) -> None:
    """A checkpoint in half precision is scored in float32 on a CPU, and was another model on a GPU; and the other way round."""
    half = bert()[0].to(dtype)
    wide = copy.deepcopy(half).float()
    scored, model = (half, wide) if scored_in_half else (wide, half)
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(3)]
    scores = hp.score(scored, batches, "gradient")
    plan = hp.plan(scores, 4)
    assert plan.model == hp.plan(hp.score(model, batches, "random"), 4).model
    hp.search(model, batches[:2], keep=4, choose=batches[2:], scores=scores, strategy="one-shot", repair=False)
    hp.prune(copy.deepcopy(model), plan)
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(copy.deepcopy(model), replace(plan, model="another"))
    model.bert.embeddings.word_embeddings.weight.data[3, 3] += 1.0
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(model, plan)
