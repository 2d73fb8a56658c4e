"""LoRA around a pruned model, and a prune within LoRA."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from headprune.pruned import ghosts, removed
from tests.support.stays import MODELS, by_transformers, cases, changed, heads_gone, like, logits, off

peft = pytest.importorskip("peft")

TARGETS = {
    "bert": ["query", "value", "intermediate.dense"], "gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj", "up_proj"],
    "qwen3": ["q_proj", "k_proj"], "t5": ["q", "v"], "vit": ["q_proj", "v_proj"], "whisper": ["q_proj", "v_proj", "fc1"],
}  # fmt: skip


def lora(model: Any, targets: Any) -> Any:
    """Adapters that change the answers."""
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)).eval()


@pytest.mark.parametrize(("name", "kind"), cases(quick=["gpt2"]))
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_adapters_around_a_pruned_model(name: str, kind: str, tmp_path: Path) -> None:
    """Stored by PEFT, put on what headprune and what transformers load, merged, saved and loaded."""
    model, example = changed(name, kind)
    folder, adapted = hp.save(model, tmp_path / "base"), lora(copy.deepcopy(model), "all-linear")
    expected = logits(adapted, example)
    assert off(expected, logits(model, example)) > 1e-2
    adapted.save_pretrained(tmp_path / "adapters")
    layers = {a.name.removeprefix("base_model.model."): a for a in hp.find_attention(adapted, example)}
    assert not [name for name in ghosts(model) if layers[name].prunable]  # they looked like layers with a head to prune
    for number, base in enumerate((hp.load(folder), by_transformers(model, folder))):
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        assert torch.equal(logits(loaded, example), expected)
        merged = loaded.merge_and_unload()
        assert off(logits(merged, example), expected) < 1e-4
        again = hp.load(hp.save(merged, tmp_path / str(number)))
        assert torch.equal(logits(again, example), logits(merged, example))
        assert removed(again) == removed(model)


@pytest.mark.parametrize(("name", "kind"), [c for c in cases(quick=["llama"]) if "repaired" not in c.values])
def test_a_prune_within_adapters(name: str, kind: str, tmp_path: Path) -> None:
    """What the prune noted was on PEFT's wrapper: merged, the model no longer knew what it had lost, nor how to save itself."""
    model, example = MODELS[name]()
    adapted, plan = lora(model, TARGETS[name]), heads_gone(name, kind)
    within = {f"base_model.model.{layer}": heads for layer, heads in plan.items()}
    with hp.mask(adapted, within, example):
        masked = logits(adapted, example)
    hp.prune(adapted, within, example)
    assert off(logits(adapted, example), masked) < 1e-4
    assert removed(adapted) == [within]
    kept = {name.removeprefix("base_model.model.") for name in ghosts(adapted)}
    adapted.save_pretrained(tmp_path / "adapters")  # PEFT's own
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    merged = adapted.merge_and_unload()
    hp.save(merged, tmp_path / "a")
    merged.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "a" / "headprune.json").read_text())["removed"] == [plan]
    expected = logits(merged, example)
    assert off(expected, masked) < 1e-4
    for loaded in (hp.load(tmp_path / "a"), hp.load(tmp_path / "b"), by_transformers(merged, tmp_path / "b")):
        assert torch.equal(logits(loaded, example), expected)
        assert ghosts(loaded) == kept
    hp.find_attention(hp.load(tmp_path / "a"))  # on an input made up of the form that the prune was given


def test_biases_of_a_repair_within_adapters(tmp_path: Path) -> None:
    """They were noted on the wrapper, too."""
    model, example = MODELS["llama"]()
    adapted = lora(model, ["q_proj"])
    within = {f"base_model.model.{layer}": heads for layer, heads in heads_gone("llama", "uneven").items()}
    done = hp.repair(adapted, within, [like(example, seed) for seed in range(3)], values=False, mixtures=False)
    assert done.biases
    hp.prune(adapted, within, example)
    merged = adapted.merge_and_unload()
    assert torch.equal(logits(hp.load(hp.save(merged, tmp_path / "m")), example), logits(merged, example))
