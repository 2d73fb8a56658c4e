"""Masking is exact, per head, and leaves nothing behind."""

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.gates import gated
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import hooks
from tests.support.zoo import CASES, ZOO, TorchEncoder, bert


@pytest.mark.parametrize(("name", "attention"), CASES)
@torch.no_grad()
def test_mask_is_zeroed_columns_of_the_output_projection(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    layers = hp.find_attention(model, example)
    layer = layers[-1]
    with hp.mask(model, {layer.name: [1, 3]}, example):
        masked = answers(call(model, example))
    dense = answers(call(model, example))
    # Brute force: the head's columns of W_O, set to zero.
    module = model.get_submodule(layer.output_projection.module)
    columns = [i for h in (1, 3) for i in range(h * layer.head_dim, (h + 1) * layer.head_dim)]
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T  # Conv1D stores the transpose
    weight[:, columns] = 0
    for got, expected in zip(masked, answers(call(model, example)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert any((m - d).abs().max() > 1e-3 * d.abs().max() for m, d in zip(masked, dense, strict=True))
    assert hooks(model) == 0


@torch.no_grad()
def test_gates_of_one_change_nothing() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    with gated(model, layers, {a.name: torch.ones(3, a.num_heads) for a in layers}):
        gated_logits = model(**example).logits
    assert torch.equal(gated_logits, model(**example).logits)


@torch.no_grad()
def test_one_gate_per_example() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    gate = torch.ones(3, 4)
    gate[1, 2] = 0
    with gated(model, layers, {layers[0].name: gate}):
        got = model(**example).logits
    dense = model(**example).logits
    with hp.mask(model, {layers[0].name: [2]}, layers=layers):
        masked = model(**example).logits
    torch.testing.assert_close(got, torch.stack([dense[0], masked[1], dense[2]]))


def test_nothing_stays_after_an_exception() -> None:
    model = TorchEncoder()
    example = (torch.randn(2, 5, 32),)
    layers = hp.find_attention(model, example)
    with pytest.raises(RuntimeError, match="boom"), hp.mask(model, {layers[0].name: [0]}, layers=layers):
        raise RuntimeError("boom")
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert hooks(model) == 0


@pytest.mark.parametrize(("heads", "message"), [
    ({"nowhere": [0]}, "no attention layer named 'nowhere'"),
    ({"bert.encoder.layer.0.attention.self": [4]}, "has no head 4"),
    ({"bert.encoder.layer.0.attention.self": [-1]}, "has no head -1"),
    ({"bert.encoder.layer.0.attention.self": [1, 1]}, "head 1 is listed twice"),
])  # fmt: skip
def test_wrong_heads(heads: dict[str, list[int]], message: str) -> None:
    model, example = bert()
    with pytest.raises(hp.HeadPruneError, match=message), hp.mask(model, heads, example):
        pass
