"""A pruned model is saved as its stock class has it, wherever that class can state it; found out by trying."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import headprune as hp
from headprune.checkpoint import NotStockError, StockCounts, load_call, stock_config
from headprune.checkpoint.stock_config import stock_configs
from headprune.checkpoint.stock_model import to_stock
from headprune.inputs import call
from headprune.pruned import removed, structure_of
from headprune.surgery import answers
from tests.support.checks import same, state
from tests.support.even import even, even_plan, llama, mistral
from tests.support.zoo import ZOO, labelled, randomise, sizes, text

# name, heads or groups that go from every layer, whether others go from every second one, the layers: what stock classes hold
STOCK = [
    ("qwen3", 1, True, ""),
    ("llama", 1, True, ""),  # 4 of 6 heads: it divides the hidden size
    pytest.param("plain_llama", 2, True, "", marks=pytest.mark.slow),
    ("gemma", 1, True, ""),  # 3 of 4
    pytest.param("mistral", 1, True, "", marks=pytest.mark.slow),
    ("vit", 1, True, ""),
    ("t5", 1, False, ""),
    pytest.param("llava", 1, True, "language_model", marks=pytest.mark.slow),
]
NOT_STOCK = [
    ("plain_llama", 1, True, "", "multiple of the number"),  # 3 of 4
    ("t5", 1, True, "", "shared by 2 layers, and they keep different heads"),
    ("t5", 1, False, "encoder", "keep different shares|is \\["),
    ("bert", 2, True, "", "query.weight is"),
    pytest.param("gpt2", 2, False, "", "c_attn.weight is", marks=pytest.mark.slow),
    pytest.param("whisper", 2, True, "", "weight is", marks=pytest.mark.slow),
    ("clip", 2, True, "", "weight is"),
    pytest.param("llava", 1, True, "", "weight is|cannot state", marks=pytest.mark.slow),
]


def outputs(model: Any, example: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return answers(call(model, example))


def equal(a: Any, b: Any, example: Any) -> bool:
    pairs = zip(outputs(a, example), outputs(b, example), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(("name", "units", "shifted", "within"), STOCK)
def test_loads_without_any_option(name: str, units: int, shifted: bool, within: str, tmp_path: Path) -> None:
    """Bit by bit the same answers, from transformers and from headprune, which knows what went and prunes again."""
    model, example = even(name, units, shifted=shifted, within=within)
    before, structure, heads = state(model), structure_of(model), str(model.config)
    folder = hp.save(model, tmp_path / "m")
    assert same(model, before)  # the model in memory stays as it is
    assert structure_of(model) == structure
    assert str(model.config) == heads

    assert not (folder / "modeling_headprune.py").exists()
    config = json.loads((folder / "config.json").read_text())
    assert not {"auto_map", "headprune"} & config.keys()
    plain = type(model).from_pretrained(folder).eval()
    assert type(plain) is type(model)
    assert equal(model, plain, example)
    assert not load_call(folder).remote
    assert load_call(folder).code().endswith(".from_pretrained(folder)")

    again = hp.load(folder)
    assert type(again) is type(model)
    assert equal(model, again, example)
    assert removed(again) == removed(model)
    second = hp.save(again, tmp_path / "n")
    # transformers itself adds the type of a composite's parts to a config that it has read.
    for file in ("model.safetensors", "config.json") if name != "llava" else ("model.safetensors",):
        assert (folder / file).read_bytes() == (second / file).read_bytes(), file
    plan = even_plan(again, example, within=within)
    hp.prune(again, plan, example)
    third = hp.load(hp.save(again, tmp_path / "o"))
    assert equal(again, third, example)
    assert removed(third) == [*removed(model), plan]


@pytest.mark.parametrize(("name", "units", "shifted", "within", "why"), NOT_STOCK)
def test_what_no_stock_class_states(
    name: str, units: int, shifted: bool, within: str, why: str, tmp_path: Path
) -> None:
    model, example = even(name, units, shifted=shifted, within=within)
    with pytest.raises(NotStockError, match=why):
        to_stock(model)
    folder = hp.save(model, tmp_path / "m")
    loading = load_call(folder)
    assert loading.remote
    assert loading.why
    assert loading.code().endswith("(folder, trust_remote_code=True)")
    assert equal(model, hp.load(folder), example)


def test_uneven_and_emptied_models_are_refused_by_name(tmp_path: Path) -> None:
    model, example = ZOO["qwen3"]()
    names = [layer.name for layer in hp.find_attention(model, example)]
    hp.prune(model, {names[1]: [0, 1]}, example)
    with pytest.raises(
        NotStockError,
        match=r"layers\.0\.\S+ and \S+layers\.1\.\S+ keep different shares of their heads \(all, 1/2\)",
    ):
        to_stock(model)
    model, example = ZOO["vit"]()
    names = [layer.name for layer in hp.find_attention(model, example)]
    hp.prune(model, {names[1]: [0, 1, 2, 3]}, example)
    with pytest.raises(NotStockError, match="has no heads left"):
        to_stock(model)


WITHOUT = """
import sys, torch, transformers as tf
sys.modules["headprune"] = None
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    auto, example, expected = torch.load(folder + "-x")
    model = getattr(tf, auto).from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(model(**example).logits, expected), folder
    if model.can_generate() and "decoder_input_ids" not in example:
        ids = {k: v[:1, :5] for k, v in example.items()}
        kinds = [model.generate(**ids, max_new_tokens=6, do_sample=False, cache_implementation=c) for c in ("dynamic", "static")]
        assert torch.equal(*kinds)
"""


@pytest.mark.slow
def test_in_a_process_without_headprune(tmp_path: Path) -> None:
    """Also generation with a static cache, whose sizes come out of the config."""
    folders = []
    for name, shifted in (("qwen3", True), ("t5", False)):
        model, example = even(name, shifted=shifted)
        folder = hp.save(model, tmp_path / name)
        torch.save((load_call(folder).auto_class, example, outputs(model, example)[0]), f"{folder}-x")
        folders.append(str(folder))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", WITHOUT, *folders], check=True, cwd=tmp_path, env=environment)


def repaired(model: Any, example: Any, **more: Any) -> None:
    plan = even_plan(model, example)
    hp.repair(model, plan, [labelled(model, example, seed) for seed in range(2)], **more)
    for name, module in model.named_modules():
        if name.endswith("o_proj") and module.bias is not None:
            module.bias.data.normal_()
    hp.prune(model, plan, example)


def test_biases_of_a_repair_are_stated_by_a_flag_of_the_config(tmp_path: Path) -> None:
    """Llama's and Qwen3's config can give W_O a bias; with it come those of queries, keys and values, of zeros."""
    model, example = ZOO["llama"]()
    repaired(model, example)
    assert model.model.layers[0].self_attn.o_proj.bias is not None
    folder = hp.save(model, tmp_path / "m")
    plain = tf.LlamaForCausalLM.from_pretrained(folder).eval()
    assert plain.config.attention_bias
    assert not plain.model.layers[0].self_attn.q_proj.bias.any()
    assert equal(model, plain, example)
    assert equal(model, hp.load(folder), example)


def test_biases_that_a_class_has_no_place_for(tmp_path: Path) -> None:
    model, example = mistral()
    repaired(model, example)
    with pytest.raises(NotStockError, match=r"o_proj\.bias has no place \(a repair gave it\)"):
        to_stock(model)
    assert load_call(hp.save(model, tmp_path / "m")).remote
    model, example = mistral()
    repaired(model, example, biases=False)
    assert not load_call(hp.save(model, tmp_path / "n")).remote


def test_answers_are_compared_not_only_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with all the tensors of the model, that computes something else with them."""
    model, _ = even("qwen3")
    read = stock_config._as_read

    def other(config: Any) -> Any:
        made = read(config)
        made.rope_parameters = {**made.rope_parameters, "rope_theta": 100.0}
        return made

    monkeypatch.setattr(stock_config, "_as_read", other)
    assert list(stock_configs(model))
    with pytest.raises(NotStockError, match=r"computes another \S+inv_freq|gives other answers"):
        to_stock(model)
    monkeypatch.undo()

    def coarser(config: Any) -> Any:
        made = read(config)
        made.rms_norm_eps = 0.3
        return made

    monkeypatch.setattr(stock_config, "_as_read", coarser)
    with pytest.raises(NotStockError, match="gives other answers"):
        to_stock(model)


def test_weights_are_shared_not_copied() -> None:
    model, _ = even("qwen3")
    stock, own = to_stock(model), dict(model.named_parameters())
    assert all(p.data_ptr() == own[name].data_ptr() for name, p in stock.named_parameters())
    assert stock.lm_head.weight.data_ptr() == own["lm_head.weight"].data_ptr()


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "t5"])
def test_trainer(name: str, tmp_path: Path) -> None:
    """It loads what it saved into the model in memory, whose tensors must be those of the folder."""
    model, example = even(name)
    rows = [{k: v[i % len(v)] for k, v in labelled(model, example).items()} for i in range(4)]
    arguments = tf.TrainingArguments(
        str(tmp_path / "t"), max_steps=2, save_steps=1, eval_steps=1, eval_strategy="steps", save_strategy="steps",
        per_device_train_batch_size=4, load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = tf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "best"))
    model.eval()
    assert equal(model, hp.load(tmp_path / "best"), example)
    assert load_call(tmp_path / "best").remote == (name == "t5")
    if name == "llama":
        assert equal(model, tf.LlamaForCausalLM.from_pretrained(tmp_path / "best").eval(), example)
    folder = hp.save(model, tmp_path / "m")
    assert not load_call(folder).remote
    tf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train(
        resume_from_checkpoint=str(tmp_path / "t" / "checkpoint-1")
    )


def test_half_precision_keeps_its_type(tmp_path: Path) -> None:
    model, example = even("qwen3")
    model.to(torch.bfloat16)
    folder = hp.save(model, tmp_path / "m")
    assert not load_call(folder).remote
    plain = tf.Qwen3ForCausalLM.from_pretrained(folder).eval()
    assert plain.dtype == torch.bfloat16
    got, expected = outputs(plain, example)[0], outputs(model, example)[0]
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_folder_with_code_becomes_a_stock_one(tmp_path: Path) -> None:
    """Loaded by its own code, pruned until it is even, and saved over the old files."""
    model, example = ZOO["qwen3"]()
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0, 1]}, example)
    folder = hp.save(model, tmp_path / "m")
    remote = tf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    hp.prune(remote, {layer.name: [0, 1] for layer in layers[1:]}, example)
    remote.save_pretrained(folder)
    assert not (folder / "modeling_headprune.py").exists()
    assert equal(remote, tf.Qwen3ForCausalLM.from_pretrained(folder).eval(), example)


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 6, 10]), st.data())
def test_any_even_choice(kv: int, each: int, width: int, data: st.DataObject) -> None:
    """Whichever groups (or heads of each group) go, of any sizes: the stock class answers the same."""
    config = tf.Qwen3Config(
        **sizes("sdpa", num_attention_heads=kv * each, num_key_value_heads=kv, head_dim=width, num_hidden_layers=2)
    )
    model, example = randomise(tf.Qwen3ForCausalLM(config)), text()
    layers = hp.find_attention(model, example)
    left = data.draw(st.integers(1, len(layers[0].units)))
    plan = {}
    for layer in layers:
        units = data.draw(st.permutations(layer.units))
        plan[layer.name] = [h for unit in units[left:] for h in unit]
    hp.prune(model, plan, example)
    if left < len(layers[0].units):
        assert equal(model, to_stock(model), example)


def test_counts_that_a_class_can_have() -> None:
    model, example = llama(hidden=48, heads=6)
    layers = hp.find_attention(model, example)
    counts = StockCounts.of(model, layers)
    assert counts is not None
    able = [n for n in range(1, 7) if counts.config_without({a.name: list(range(n, 6)) for a in layers})]
    assert able == [1, 2, 3, 4, 6]
    assert StockCounts.of(torch.nn.Linear(2, 2), layers) is None


def test_a_field_that_differs_by_layer_is_no_field() -> None:
    """transformers raises an error of its own for it (diffusion_gemma), which is no AttributeError."""

    class ByLayer:
        hidden_size, num_heads = 32, 4

        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' may vary across layers")

    assert stock_config._widths([ByLayer()], {(0, "num_heads"): 2}) == {(0, "head_dim"): 8}
