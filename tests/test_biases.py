"""Per-head biases, tables, sinks and slopes are cut with their heads, without a rule for any architecture."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

import headprune as hp
from tests.support.checks import check, hooks
from tests.support.zoo import randomise, sizes, text


def beit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = tf.BeitConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, image_size=16, patch_size=8,
        num_channels=1, use_relative_position_bias=True, out_indices=[1],
    )  # fmt: skip
    pixels = torch.randn(3, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    return tf.BeitForImageClassification(config), {"pixel_values": pixels}


def bloom() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=100, hidden_size=32, n_head=4, n_layer=2)), text()


def mpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return tf.MptForCausalLM(tf.MptConfig(vocab_size=100, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2)), text()


def mpnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return tf.MPNetForSequenceClassification(tf.MPNetConfig(**sizes("eager"))), text()


def gpt_oss() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = tf.GptOssConfig(
        **sizes("eager", num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    )
    return tf.GptOssForCausalLM(config), text()


def umt5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = tf.UMT5Config(
        vocab_size=100, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48, decoder_start_token_id=0
    )
    return tf.UMT5ForConditionalGeneration(config), text(decoder=5)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "beit": beit, "bloom": bloom, "mpt": mpt, "mpnet": mpnet, "gpt_oss": gpt_oss, "umt5": umt5,
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, example = MODELS[name]()
    return randomise(model), example


@pytest.mark.parametrize("name", MODELS)
def test_some_and_all_and_again(name: str) -> None:
    model, example = made(name)
    layers = hp.find_attention(model, example)
    once = check(model, example, {a.name: list(a.units[i % 2]) for i, a in enumerate(layers)})
    again = hp.find_attention(once, example)
    check(once, example, {again[0].name: list(again[0].units[0])})
    check(model, example, {layers[0].name: list(range(layers[0].num_heads))})


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, example = made(name)
    layers = hp.find_attention(model, example)
    hp.prune(model, {a.name: list(a.units[i % 2]) for i, a in enumerate(layers)}, example)
    again = hp.load(hp.save(model, tmp_path / "m"))
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)
        assert torch.equal(copy.deepcopy(again)(**example).logits, model(**example).logits)


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt_oss"])
def test_generation_with_a_cache(name: str) -> None:
    model, example = made(name)
    layers = hp.find_attention(model, example)
    drop = {a.name: list(a.units[1]) for a in layers}
    pruned = check(model, example, drop)
    ids = {k: v[:2] for k, v in example.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with hp.mask(model, drop, layers=layers):
        expected = model.generate(**ids, **options)
    assert torch.equal(pruned.generate(**ids, **options), expected)


def test_a_failed_prune_removes_the_argument_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = made("bloom")
    layers = hp.find_attention(model, example)
    monkeypatch.setattr("headprune.surgery.proof.TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(hp.PruneError):
        hp.prune(model, {layers[0].name: [0]}, example)
    assert hooks(model) == 0


def test_frozen_parameters_stay_frozen() -> None:
    model, example = made("gpt_oss")
    for p in model.parameters():
        p.requires_grad_(False)
    layers = hp.find_attention(model, example)
    assert layers[0].tables
    assert not any(p.requires_grad for p in model.parameters())
    hp.prune(model, {layers[0].name: [0, 1]}, example)
    assert not any(p.requires_grad for p in model.parameters())
