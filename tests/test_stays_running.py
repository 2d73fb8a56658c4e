"""A pruned model generates, compiles, runs in half precision and quantised, as the dense one does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.fingerprint import is_wrapper
from tests.support.stays import (
    MODELS,
    by_transformers,
    cases,
    changed,
    heads_gone,
    like,
    logits,
    off,
)
from tests.support.zoo import labelled

HALVES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}  # what their rounding may change


# -- generation -----------------------------------------------------------------------------------

GENERATING = ["gpt2", "llama", "qwen3", "t5", "whisper", "sliding"]


def prompt(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row, longer than the sliding windows."""
    if "input_features" in example:
        return {"input_features": example["input_features"][:1]}
    return {"input_ids": example["input_ids"][:2].reshape(1, -1)}


def generated(model: Any, given: dict[str, Tensor], **how: Any) -> list[int]:
    fixed = {
        "max_new_tokens": 10,
        "min_new_tokens": 10,
        "do_sample": False,
        "pad_token_id": 0,
        "repetition_penalty": 4.0,
    }
    found = model.generate(**given, **fixed, **how)
    return found[0, -10:].tolist()  # what Whisper returns starts with the start token or not


@pytest.mark.parametrize(("name", "kind"), cases(GENERATING))
def test_generation(name: str, kind: str) -> None:
    """With every cache, the tokens that come without one."""
    model, example = changed(name, kind)
    given, (dense, _) = prompt(example), MODELS[name]()
    alone, beams = generated(model, given, use_cache=False), generated(model, given, use_cache=False, num_beams=3)
    assert len(set(alone)) > 4
    for cache in ("dynamic", "static"):
        how: dict[str, Any] = {"cache_implementation": cache, "disable_compile": True}
        assert generated(model, given, **how) == alone, cache
        assert generated(model, given, num_beams=3, **how) == beams, cache
    assert generated(dense, given, assistant_model=model) == generated(dense, given, use_cache=False)
    assert generated(model, given, assistant_model=dense) == alone
    assert generated(model, given, prompt_lookup_num_tokens=3) == alone


def test_the_sliding_cache_slides() -> None:
    """What the model of that name is there for."""
    model, example = changed("sliding", "emptied")
    with torch.no_grad():
        cache = model(**prompt(example), use_cache=True).past_key_values
    lengths = [layer.keys.shape[2] for layer in cache.layers]
    assert lengths[0] == lengths[2] < lengths[1] == prompt(example)["input_ids"].shape[1]
    assert [layer.keys.shape[1] for layer in cache.layers] == [1, 2, 1]  # key/value heads; the first has a ghost


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [c for c in cases(quick=["llama", "vit"]) if "uneven" not in c.values])
def test_compiled_in_one_graph(name: str, kind: str) -> None:
    """As the dense model; at a graph break `fullgraph` fails. The repaired models are uneven in the same way."""
    model, example = changed(name, kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, example), logits(model, example))


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model, example = changed("bert", "emptied")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(logits(compiled, example), logits(model, example), rtol=1e-4, atol=1e-4)


# -- half precision -------------------------------------------------------------------------------


def cast(example: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("name", "kind"), cases(quick=["t5", "whisper"]))
@pytest.mark.filterwarnings("error:headprune")
def test_half_precision(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Converted, or loaded so, saved and loaded: the answers of the dense model in half precision with the heads masked.

    What weights a repair gave is in no dense model: there it is the answers in float32. Folders of models that do not cast
    their inputs, such as Whisper's, held no answers to compare with.
    """
    model, example = changed(name, kind)
    given, folder = cast(example, dtype), hp.save(model, tmp_path / "m")
    full = expected = logits(model, example)
    if kind != "repaired":
        dense, _ = MODELS[name]()
        dense = dense.to(dtype)
        with hp.mask(dense, heads_gone(name, kind), given):
            expected = logits(dense, given)
    most = HALVES[dtype] * (1 if kind != "repaired" else 3)
    converted, loaded = model.to(dtype), by_transformers(model, folder, dtype=dtype)
    for number, half in enumerate((converted, loaded)):
        answers = logits(half, given)
        assert answers.dtype == dtype
        assert off(answers, expected) < most
        assert 0 < off(answers, full) < 3 * HALVES[dtype]
        again = hp.load(hp.save(half, tmp_path / str(number), example=given))
        assert torch.equal(logits(again, given), answers)
    # Transformers loads in the types that were saved, rotary frequencies in float32.
    assert torch.equal(logits(by_transformers(model, tmp_path / "1"), given), logits(loaded, given))


# -- int8 -----------------------------------------------------------------------------------------


def int8(model: nn.Module) -> Any:
    """The model with torchao's int8 weights in its linear layers."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert any(is_wrapper(p) for p in model.parameters())
    return model


def as_rounded(quantised: Any, model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    """The answers by plain arithmetic on the numbers that a quantised model holds, each the nearest of 255 steps a row."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_wrapper(held := quantised.get_submodule(name).weight):
            found, dense = held.dequantize(), module.weight.detach()
            step = dense.abs().amax(1, keepdim=True) / 127
            assert bool(((found - dense).abs() <= 0.51 * step).all()), name
            module.weight = nn.Parameter(found)
    return logits(model, example)


@pytest.mark.parametrize(("name", "kind"), cases())
def test_int8(name: str, kind: str) -> None:
    """A pruned model is quantised as any other: an emptied layer crashed torchao."""
    model, example = changed(name, kind)
    quantised = int8(copy.deepcopy(model))
    answers, expected = logits(quantised, example), as_rounded(quantised, model, example)
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-4)
    assert 1e-3 < off(answers, logits(model, example)) < 0.3


@pytest.mark.parametrize(("name", "kind"), cases(["bert", "llama", "t5", "vit"], quick=["llama"]))
def test_int8_as_transformers_loads_it(name: str, kind: str, tmp_path: Path) -> None:
    """It also stores and loads what it quantised."""
    torchao = pytest.importorskip("torchao.quantization")
    model, example = changed(name, kind)
    options = {"quantization_config": tf.TorchAoConfig(torchao.Int8WeightOnlyConfig())}
    loaded = by_transformers(model, hp.save(model, tmp_path / "a"), **options)
    assert any(is_wrapper(p) for p in loaded.parameters())
    torch.testing.assert_close(logits(loaded, example), as_rounded(loaded, model, example), rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(by_transformers(model, tmp_path / "b"), example), logits(loaded, example))


def packed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Linear weights of one byte, with a scale beside them, as bitsandbytes and float8 checkpoints have them."""

    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Packed
            module.scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter((module.weight.detach() / module.scale).to(dtype), requires_grad=False)
    return model


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("how", ["torchao", torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(how: Any, name: str, tmp_path: Path) -> None:
    """In a sentence; scores are for whatever runs. float8 was pruned, and torchao's tensors were a traceback in repair and save."""
    dense, example = MODELS[name]()
    batch = labelled(dense, example)
    model = int8(dense) if how == "torchao" else packed(dense, how)
    expected = logits(model, example)
    for kind in ("uneven", "emptied"):
        with pytest.raises(hp.HeadPruneError, match="quantised"):
            hp.prune(model, heads_gone(name, kind), example)
    with pytest.raises(hp.HeadPruneError, match="quantised"):
        hp.search(model, [like(example, 1)], keep="50%", distil=True)
    assert not hp.repair(model, heads_gone(name, "uneven"), [example]).layers
    for write in (lambda path: hp.save(model, path), lambda path: hp.save(packed_pruned(name, how), path)):
        with pytest.raises(hp.HeadPruneError, match=r"quantised .*before you quantise"):
            write(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, example), expected)
    if how == "torchao":
        scores = hp.score(model, [batch], method="ablation").flat()
        assert torch.isfinite(scores).all()
        with hp.mask(model, heads_gone(name, "uneven"), example):
            assert not torch.equal(logits(model, example), expected)


def packed_pruned(name: str, how: Any) -> nn.Module:
    model, _ = changed(name, "uneven")
    return int8(model) if how == "torchao" else packed(model, how)


def test_what_else_is_quantised_is_in_no_ones_way() -> None:
    """GPT-2's attention is of Conv1D, which torchao leaves alone: only its head is quantised."""
    model, example = MODELS["gpt2"]()
    proof = hp.prune(int8(model), heads_gone("gpt2", "uneven"), example)
    assert proof.difference < 1e-4
