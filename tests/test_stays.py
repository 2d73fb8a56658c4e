"""A pruned model generates, compiles, runs in half precision, quantised and with adapters, as the dense one does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

import headprune as hp
from tests.support.errors import refuses
from tests.support.stays import MODELS, by_transformers, cases, changed, heads_gone, like, logits, off, sidecar
from tests.support.zoo import labelled

HALVES = {torch.bfloat16: 3e-2, torch.float16: 4e-3}  # what their rounding may change


# -- generation -----------------------------------------------------------------------------------


def prompt(example: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row, longer than the sliding windows."""
    if "input_features" in example:
        return {"input_features": example["input_features"][:1]}
    return {"input_ids": example["input_ids"][:2].reshape(1, -1)}


def generated(model: Any, given: dict[str, Tensor], **how: Any) -> list[int]:
    how |= {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    how |= {"pad_token_id": 0, "repetition_penalty": 4.0}
    # What Whisper returns starts with the start token or not.
    tokens: list[int] = model.generate(**given, **how)[0, -10:].tolist()
    return tokens


@pytest.mark.parametrize(("name", "kind"), cases(["gpt2", "llama", "qwen3", "t5", "whisper", "sliding"]))
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


# -- torch.compile --------------------------------------------------------------------------------

# The repaired models are uneven in the same way as the uneven ones.
COMPILED = [c.values for c in cases(quick=[]) if "uneven" not in c.values]


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        *(pytest.param(*c, "eager", marks=() if c in (("llama", "emptied"), ("vit", "emptied")) else pytest.mark.slow) for c in COMPILED),
        pytest.param("bert", "emptied", "inductor", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_compiled_in_one_graph(name: str, kind: str, backend: str) -> None:
    """As the dense model; at a graph break `fullgraph` fails."""
    model, example = changed(name, kind)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled, example), logits(model, example), rtol=1e-4, atol=1e-4)


# -- half precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("name", "kind"), cases(quick=["t5", "whisper"]))
@pytest.mark.filterwarnings("error:headprune")
def test_half_precision(name: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Converted, or loaded so, saved and loaded: the answers of the dense model in half precision with the heads masked.

    What weights a repair gave is in no dense model: there it is the answers in float32. Folders of models that do not cast
    their inputs, such as Whisper's, held no answers to compare with.
    """
    model, example = changed(name, kind)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
    folder, full = hp.save(model, tmp_path / "m"), logits(model, example)
    dense, _ = MODELS[name]()
    with hp.mask(dense.to(dtype), heads_gone(name, kind), given):
        expected = logits(dense, given) if kind != "repaired" else full
    for number, half in enumerate((model.to(dtype), by_transformers(folder, dtype=dtype))):
        answers = logits(half, given)
        assert answers.dtype == dtype
        assert off(answers, expected) < HALVES[dtype] * (1 if kind != "repaired" else 3)
        assert 0 < off(answers, full) < 3 * HALVES[dtype]
        again = hp.save(half, tmp_path / str(number), example=given)
        assert torch.equal(logits(hp.load(again), given), answers)
    # Transformers loads in the types that were saved, rotary frequencies in float32.
    assert torch.equal(logits(by_transformers(again), given), answers)


# -- int8 -----------------------------------------------------------------------------------------


def int8(model: nn.Module) -> Any:
    """The model with torchao's int8 weights in its linear layers."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert any(is_wrapper(p) for p in model.parameters())
    return model


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


def as_rounded(quantised: Any, model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    """The answers by plain arithmetic on the numbers that a quantised model holds, each the nearest of 255 steps a row."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_wrapper(held := quantised.get_submodule(name).weight):
            found, dense = held.dequantize(), module.weight.detach()
            assert bool(((found - dense).abs() <= 0.51 * dense.abs().amax(1, keepdim=True) / 127).all()), name
            module.weight = nn.Parameter(found)
    return logits(model, example)


@pytest.mark.parametrize(("name", "kind"), cases(quick=["bert", "llama", "t5"]))
def test_int8(name: str, kind: str, tmp_path: Path) -> None:
    """A pruned model is quantised as any other: an emptied layer crashed torchao. transformers stores and loads it, too."""
    model, example = changed(name, kind)
    quantised = int8(copy.deepcopy(model))
    torch.testing.assert_close(logits(quantised, example), as_rounded(quantised, model, example), rtol=1e-4, atol=1e-4)
    assert 1e-3 < off(logits(quantised, example), logits(model, example)) < 0.3
    if name not in ("bert", "llama", "t5", "vit"):
        return
    config = tf.TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    loaded = by_transformers(hp.save(model, tmp_path / "m"), quantization_config=config)
    assert any(is_wrapper(p) for p in loaded.parameters())
    torch.testing.assert_close(logits(loaded, example), as_rounded(loaded, model, example), rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "m")
    assert torch.equal(logits(by_transformers(tmp_path / "m"), example), logits(loaded, example))


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("how", ["torchao", torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(how: Any, name: str, tmp_path: Path) -> None:
    """In a sentence; scores are for whatever runs. float8 was pruned, and torchao's tensors were a traceback in repair and save."""

    def quantised(model: nn.Module) -> nn.Module:
        return int8(model) if how == "torchao" else packed(model, how)

    dense, example = MODELS[name]()
    model, drop = quantised(copy.deepcopy(dense)), heads_gone(name, "uneven")
    expected = logits(model, example)
    for work in (lambda: hp.prune(model, drop, example), lambda: hp.prune(model, heads_gone(name, "emptied"), example),
                 lambda: hp.search(model, [like(example, 1), like(example, 2)], keep="50%", distil=True)):  # fmt: skip
        refuses("quantised", work)
    assert not hp.repair(model, drop, [example]).layers
    for each in (model, quantised(changed(name, "uneven")[0])):
        refuses(r"quantised .*before you quantise", hp.save, each, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model, example), expected)
    if how == "torchao":
        assert torch.isfinite(hp.score(model, [labelled(dense, example)], method="ablation").flat()).all()
        with hp.mask(model, drop, example):
            assert not torch.equal(logits(model, example), expected)


def test_what_else_is_quantised_is_in_no_ones_way() -> None:
    """GPT-2's attention is of Conv1D, which torchao leaves alone: only its head is quantised."""
    model, example = MODELS["gpt2"]()
    assert hp.prune(int8(model), heads_gone("gpt2", "uneven"), example).difference < 1e-4


# -- adapters -------------------------------------------------------------------------------------

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"], "gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "up_proj"],
    "qwen3": ["q_proj", "k_proj"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"], "whisper": ["q_proj", "v_proj", "fc1"],
}  # fmt: skip


def lora(model: Any, targets: Any) -> Any:
    """Adapters that change the answers."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()


@pytest.mark.parametrize(("name", "kind"), cases(quick=["gpt2"]))
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_adapters_around_a_pruned_model(name: str, kind: str, tmp_path: Path) -> None:
    """Stored by PEFT, put on what headprune and what transformers load, merged, saved and loaded."""
    model, example = changed(name, kind)
    folder, adapted = hp.save(model, tmp_path / "base"), lora(copy.deepcopy(model), "all-linear")
    expected, known = logits(adapted, example), sidecar(folder)
    assert off(expected, logits(model, example)) > 1e-2
    refuses("adapters are not merged", hp.save, adapted, tmp_path / "adapted")
    adapted.save_pretrained(tmp_path / "adapters")
    layers = {a.name.removeprefix("base_model.model."): a for a in hp.find_attention(adapted, example)}
    # They looked like layers with a head to prune.
    assert not any(layers[name].prunable for name in known["structure"]["ghosts"])
    for number, base in enumerate((hp.load(folder), by_transformers(folder))):
        loaded = pytest.importorskip("peft").PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        assert torch.equal(logits(loaded, example), expected)
        merged = loaded.merge_and_unload()
        assert off(logits(merged, example), expected) < 1e-4
        again = hp.save(merged, tmp_path / str(number))
        assert torch.equal(logits(hp.load(again), example), logits(merged, example))
        assert sidecar(again)["removed"] == known["removed"]


@pytest.mark.parametrize(("name", "kind"), [*cases(quick=["llama"])])
def test_a_prune_within_adapters(name: str, kind: str, tmp_path: Path) -> None:
    """What the prune (or repair) noted was on PEFT's wrapper: merged, the model no longer knew what it had lost, nor how to save itself."""
    model, example = MODELS[name]()
    adapted, plan = lora(model, TARGETS[name]), heads_gone(name, kind)
    within = {f"base_model.model.{layer}": heads for layer, heads in plan.items()}
    if kind == "repaired":
        hp.repair(adapted, within, [like(example, seed) for seed in range(3)], values=False, mixtures=False)
    with hp.mask(adapted, within, example):
        masked = logits(adapted, example)
    hp.prune(adapted, within, example)
    assert off(logits(adapted, example), masked) < 1e-4
    adapted.save_pretrained(tmp_path / "adapters")  # PEFT's own
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    merged = adapted.merge_and_unload()
    expected = logits(merged, example)
    assert off(expected, masked) < 1e-4
    hp.save(merged, tmp_path / "a")
    merged.save_pretrained(tmp_path / "b")
    assert sidecar(tmp_path / "a")["removed"] == [plan]
    for loaded in (hp.load(tmp_path / "a"), hp.load(tmp_path / "b"), by_transformers(tmp_path / "b")):
        assert torch.equal(logits(loaded, example), expected)
    hp.find_attention(hp.load(tmp_path / "a"))  # on an input made up of the form that the prune was given
