"""Gates, by the hook itself: one for each example, in half precision without rounding on the way, open ones without any trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.fingerprint import identity, known_as
from headprune.gates import gated
from tests.support.cases import answer
from tests.support.checks import hooks
from tests.support.zoo import TorchEncoder, bert, labelled, text

HALVES = [torch.bfloat16, torch.float16]
FIRST = "bert.encoder.layer.0.attention.self"


@contextmanager
def before_output(model: nn.Module, layer: hp.AttentionLayer, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Notes what W_O reads, behind the gates of an outer context."""
    module = model.get_submodule(layer.output_projection.module)
    handle = module.register_forward_pre_hook(lambda _, args: note(args[0]))
    yield
    handle.remove()


def test_one_gate_per_example_and_nothing_left_behind() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    gate = torch.ones(3, 4)
    gate[1, 2] = 0
    dense = answer(model, example)
    with gated(model, layers, {FIRST: gate}):
        got = answer(model, example)
    with hp.mask(model, {FIRST: [2]}, layers=layers):
        masked = answer(model, example)
    torch.testing.assert_close(got, torch.stack([dense[0], masked[1], dense[2]]))
    encoder = TorchEncoder()
    found = hp.find_attention(encoder, torch.randn(2, 5, 32))
    with pytest.raises(RuntimeError, match="boom"), hp.mask(encoder, {found[0].name: [0]}, layers=found):
        raise RuntimeError("boom")
    assert type(encoder.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert hooks(encoder) == hooks(model) == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@torch.no_grad()
def test_open_gates_change_no_bit_and_half_open_ones_round_once(dtype: torch.dtype) -> None:
    model, example = bert()
    model.to(dtype)
    layers = hp.find_attention(model, example)
    dense = answer(model, example)
    for shape in ((4,), (3, 4)):
        for fill in (None, {a.name: lambda hidden, gates: hidden.flip(0) * 3 for a in layers}):
            with gated(model, layers, {a.name: torch.ones(shape, dtype=torch.float64) for a in layers}, fill):
                assert torch.equal(answer(model, example), dense)
    seen: list[Tensor] = []
    with before_output(model, layers[0], seen.append):
        answer(model, example)
    with (
        gated(model, layers, {FIRST: torch.full((4,), 0.3, dtype=torch.float64)}),
        before_output(model, layers[0], seen.append),
    ):
        answer(model, example)
    assert torch.equal(seen[1], (seen[0].float() * 0.3).to(dtype))
    with (
        gated(
            model, layers, {FIRST: torch.zeros(4)}, {FIRST: lambda hidden, gates: torch.full_like(hidden, 2 + gates)}
        ),
        before_output(model, layers[0], seen.append),
    ):
        answer(model, example)
    assert seen[2].eq(2).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gates_derivative_is_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    """Against the sum in float64 of what W_O reads times its slope, both taken from the very same pass."""
    model, example = bert()
    layer = hp.find_attention(model.to(dtype), example)[0]
    gate, seen = torch.ones(3, 4, dtype=torch.float64, requires_grad=True), []

    def note(hidden: Tensor) -> None:
        hidden.retain_grad()
        seen.append(hidden)

    with gated(model, [layer], {layer.name: gate}), before_output(model, layer, note):
        model(**example).logits.float()[:, 0].sum().backward()
    products = (seen[0].double() * seen[0].grad.double()).unflatten(-1, (4, 8))
    off = (gate.grad - products.sum((1, 3))).abs()
    assert bool((off <= 1e-5 * products.abs().sum((1, 3))).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scored_in_half", [False, True])
def test_scores_and_plans_serve_in_any_precision(dtype: torch.dtype, scored_in_half: bool) -> None:
    """A checkpoint in half precision is scored in float32 on a CPU, and was another model on a GPU; and the other way round."""
    half = bert()[0].to(dtype)
    wide = copy.deepcopy(half).float()
    scored, model = (half, wide) if scored_in_half else (wide, half)
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(3)]
    scores = hp.score(scored, batches, "gradient")
    assert hp.plan(scores, 4).model == identity(half) == identity(wide)
    hp.search(model, batches[:2], keep=4, choose=batches[2:], scores=scores, strategy="one-shot", repair=False)
    for noted in known_as(model):  # of these, a plan of an earlier version noted the exact one
        hp.prune(copy.deepcopy(model), replace(hp.plan(scores, 4), model=noted))
    model.bert.embeddings.word_embeddings.weight.data[3, 3] += 1.0
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(model, hp.plan(scores, 4))
