"""Masks and prunes under torch.compile, autocast, gradient checkpointing, generation, half precision, and without weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headprune as hp
from tests.support.families import built
from tests.support.zoo import ZOO, bert, gpt2, llama, t5


@pytest.mark.slow
def test_compiled_before_and_after() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    drop = {layers[0].name: [0, 2]}
    compiled = torch.compile(model)
    with torch.no_grad():
        dense = compiled(**example).logits
        with hp.mask(model, drop, layers=layers):
            masked = model(**example).logits
            assert torch.equal(compiled(**example).logits, masked)  # compiled before the mask
        assert (dense - masked).abs().max() > 1e-3
        torch.testing.assert_close(compiled(**example).logits, dense)
        hp.prune(compiled, {f"_orig_mod.{k}": v for k, v in drop.items()}, example)
        torch.testing.assert_close(compiled(**example).logits, masked, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo2", "timesformer", "phi3"])
def test_a_pruned_model_compiles(name: str) -> None:
    """Selections, told widths and views of the config are what compilers may trip over."""
    model, example = built(name)
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: list(layers[0].units[0])}, example, layers=layers)
    with torch.no_grad():
        expected = model(**example).last_hidden_state
        got = torch.compile(model)(**example).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_autocast() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    drop = {layers[1].name: [1]}
    zeroed = copy.deepcopy(model)
    columns = list(layers[1].output_projection.features[1])
    with torch.no_grad():
        zeroed.get_submodule(layers[1].output_projection.module).weight[:, columns] = 0
        with torch.autocast("cpu", torch.bfloat16):
            with hp.mask(model, drop, layers=layers):
                masked = model(**example).logits
            expected = zeroed(**example).logits
    torch.testing.assert_close(masked, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", [bert, gpt2, llama])
def test_gradient_checkpointing(family: Any) -> None:
    model, example = family()
    layers = hp.find_attention(model, example)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        with hp.mask(model, {layers[0].name: [0, 1]}, layers=layers):
            model(**example).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("family", [gpt2, llama, t5])
def test_generation_under_a_mask(family: Any) -> None:
    """With and without a cache, the masked model says the same."""
    model, example = family()
    layers = hp.find_attention(model, example)
    ids = {k: v[:2] for k, v in example.items() if not k.startswith("decoder")}
    with hp.mask(model, {a.name: list(a.units[0]) for a in layers}, layers=layers):
        made = [
            model.generate(**ids, max_new_tokens=6, do_sample=False, use_cache=c, pad_token_id=0) for c in (True, False)
        ]
    assert torch.equal(*made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, example = llama()
    model = model.to(dtype)
    layers = hp.find_attention(model, example)
    zeroed = copy.deepcopy(model)
    columns = [c for h in layers[0].units[0] for c in layers[0].output_projection.features[h]]
    with torch.no_grad():
        zeroed.get_submodule(layers[0].output_projection.module).weight[:, columns] = 0
        with hp.mask(model, {layers[0].name: list(layers[0].units[0])}, layers=layers):
            assert torch.equal(model(**example).logits, zeroed(**example).logits)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "t5", "vit"])
def test_traced_without_weights(name: str) -> None:
    """On the meta device the layers are the same, to the last feature."""
    model, example = ZOO[name]("sdpa")
    layers = hp.find_attention(model, example)
    empty = copy.deepcopy(model).to("meta")
    assert hp.find_attention(empty, example) == layers
    assert all(p.is_meta for p in empty.parameters())
    with pytest.raises(hp.HeadPruneError, match="has no numbers"):
        hp.prune(empty, {layers[0].name: list(layers[0].units[0])}, example, layers=layers)


class Packed(nn.Module):
    """A linear layer with 8-bit weights, as quantisation libraries make them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Buffer(linear.weight.detach().abs().max() / 127)
        self.packed = nn.Buffer((linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.packed.to(x.dtype) * self.scale) + self.bias


def test_a_quantised_layer_is_named() -> None:
    model, example = bert()
    attention = model.bert.encoder.layer[0].attention
    for holder, name in (
        (attention.self, "query"),
        (attention.self, "key"),
        (attention.self, "value"),
        (attention.output, "dense"),
    ):
        setattr(holder, name, Packed(getattr(holder, name)))
    layers = hp.find_attention(model, example)
    assert not layers[0].prunable
    assert "quantised" in layers[0].reason
    assert layers[1].prunable
    with torch.no_grad(), hp.mask(model, {layers[0].name: [0]}, layers=layers):
        masked = model(**example).logits
    attention.output.dense.packed[:, list(layers[0].output_projection.features[0])] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(**example).logits, masked)
    with pytest.raises(hp.HeadPruneError, match=f"{layers[0].name} cannot be pruned: .*quantised"):
        hp.prune(model, {layers[0].name: [0]}, example, layers=layers)
