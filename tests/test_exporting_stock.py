"""Folders for stock classes: even models as they are, others padded with heads of zeros."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import headprune as hp
from headprune.checkpoint import load_call
from headprune.cli import app
from headprune.exporting import FORMATS
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import same, state
from tests.support.even import MADE, even, even_plan, mistral
from tests.support.zoo import labelled


def uneven(name: str, emptied: bool) -> tuple[nn.Module, Any]:
    """Layers with one unit, with all but one, and with none or all."""
    model, example = MADE[name]()
    plan = {}
    for layer in hp.find_attention(model, example):
        units = [layer.units[1:], layer.units[:1], layer.units if emptied else ()][layer.index % 3]
        plan[layer.name] = sorted(h for unit in units for h in unit)
    hp.prune(model, plan, example)
    return model, example


def off(model: nn.Module, other: nn.Module, example: Any) -> float:
    """The largest difference of answers, as a share of their largest value."""
    with torch.no_grad():
        pairs = zip(answers(call(model, example)), answers(call(other, example)), strict=True)
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def check(model: Any, example: Any, folder: Path, tolerance: float = 1e-5) -> Any:
    """A stock class gives the answers without any option, and headprune knows of nothing that is gone."""
    config = json.loads((folder / "config.json").read_text())
    assert not {"auto_map", "headprune"} & config.keys()
    plain = type(model).from_pretrained(folder).eval()
    assert off(model, plain, example) <= tolerance
    assert off(model, hp.load(folder), example) <= tolerance
    return plain


FAMILIES = ["bert", "gpt2", "vit", "whisper", "t5", "llama", "qwen3"]
UNEVEN = [pytest.param(name, False, marks=pytest.mark.slow) for name in FAMILIES if name != "t5"]


@pytest.mark.parametrize(("name", "emptied"), [*((name, True) for name in FAMILIES), *UNEVEN, ("t5", False)])
def test_padded(name: str, emptied: bool, tmp_path: Path) -> None:
    model, example = uneven(name, emptied)
    before = state(model)
    done = hp.export(model, tmp_path / "m", "stock", pad=True)
    assert same(model, before)
    check(model, example, done.path)
    facts = done.facts
    assert done.proved
    assert facts["kept"] < facts["stored"] <= facts["dense"]
    assert f"Padding saves nothing: {facts['kept']} heads are kept, and {facts['stored']} are stored" in done.notes[0]
    assert done.summary.endswith("of the largest")
    card = (done.path / "README.md").read_text()
    assert "heads of zeros fill their places" in card
    assert "No attention head was removed" not in card
    again = hp.load(done.path)
    assert sum(a.num_heads for a in hp.find_attention(again, example)) == facts["stored"]


def test_padded_to_the_next_number_that_the_class_can_have(tmp_path: Path) -> None:
    """Llama's 6 heads: with 5 in the fullest layer there must be 6, with 4 there are 4."""
    from tests.support import even as made

    for kept, stored in (([5, 2], 12), ([4, 1], 8)):
        model, example = made.llama(hidden=48, heads=6)
        names = [layer.name for layer in hp.find_attention(model, example)]
        hp.prune(model, {name: list(range(6 - n)) for name, n in zip(names, kept, strict=True)}, example)
        done = hp.export(model, tmp_path / str(stored), "stock", pad=True)
        assert (done.facts["kept"], done.facts["stored"], done.facts["dense"]) == (sum(kept), stored, 12)
        check(model, example, done.path)


def test_even_models_are_not_padded(tmp_path: Path) -> None:
    model, example = even("qwen3")
    done = hp.export(model, tmp_path / "m", "stock", pad=True)
    assert "stored" not in done.facts
    assert done.notes == ()
    plain = check(model, example, done.path, 0)
    assert plain.config.num_attention_heads == 2
    dense, example = MADE["bert"]()
    check(dense, example, hp.export(dense, tmp_path / "n", "stock").path, 0)


def test_pruned_again_after_it_was_a_stock_one(tmp_path: Path) -> None:
    """Padding then counts heads as the config does that it was saved with."""
    model, example = even("qwen3")
    model = hp.load(hp.save(model, tmp_path / "m"))
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[1].name: list(range(layers[1].num_heads))}, example)
    done = hp.export(model, tmp_path / "n", "stock", pad=True)
    assert (done.facts["kept"], done.facts["stored"], done.facts["dense"]) == (4, 6, 6)
    check(model, example, done.path)


def test_without_pad_it_says_why_and_what_to_do(tmp_path: Path) -> None:
    model, _ = uneven("bert", emptied=True)
    with pytest.raises(hp.HeadPruneError, match=r"has no heads left.*--pad"):
        hp.export(model, tmp_path / "m", "stock")
    assert not list(tmp_path.glob("m*"))


def test_biases_of_a_repair(tmp_path: Path) -> None:
    """Llama's config has a flag for them; Mistral's has none."""

    def repaired(made: tuple[Any, Any]) -> tuple[Any, Any]:
        model, example = made
        plan = even_plan(model, example)
        plan.pop(next(iter(plan)))
        hp.repair(model, plan, [labelled(model, example, seed) for seed in range(2)])
        for name, module in model.named_modules():
            if name.endswith("o_proj") and module.bias is not None:
                module.bias.data.normal_()
        hp.prune(model, plan, example)
        return model, example

    model, example = repaired(MADE["llama"]())
    plain = check(model, example, hp.export(model, tmp_path / "m", "stock", pad=True).path)
    assert plain.config.attention_bias
    model, _ = repaired(mistral())
    with pytest.raises(hp.HeadPruneError, match=r"A repair gave \S+o_proj a bias, and no flag of its config"):
        hp.export(model, tmp_path / "n", "stock", pad=True)
    assert not list(tmp_path.glob("n*"))


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "vit"])
def test_in_half_precision(name: str, tmp_path: Path) -> None:
    model, example = uneven(name, emptied=True)
    done = hp.export(model, tmp_path / "m", "stock", dtype="bfloat16", pad=True)
    plain = type(model).from_pretrained(done.path).eval()
    assert plain.dtype == torch.bfloat16
    assert off(model, plain.float(), example) <= 0.05


def test_options_belong_to_formats(tmp_path: Path) -> None:
    model, _ = MADE["llama"]()
    assert FORMATS["stock"].options == ("pad",)
    with pytest.raises(hp.HeadPruneError, match=r"The format gguf has no option 'pad'\. Only stock has it"):
        hp.export(model, tmp_path / "m", "gguf", pad=True)
    with pytest.raises(hp.HeadPruneError, match=r"The format stock has no option 'wide'\. It has pad"):
        hp.export(model, tmp_path / "m", "stock", wide=True)


def test_on_the_command_line(bert_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers as tf

    monkeypatch.chdir(tmp_path)
    dense = tf.BertForSequenceClassification.from_pretrained(bert_folder).eval()
    layers = hp.find_attention(dense, example := {"input_ids": torch.tensor([[3, 4, 5]])})
    hp.prune(dense, {layers[0].name: [0]}, example)
    hp.save(dense, "pruned", processor=tf.AutoTokenizer.from_pretrained(bert_folder))
    refused = CliRunner().invoke(app, ["export", "pruned", "--to", "stock"])
    assert refused.exit_code == 1
    assert "--pad" in refused.stderr
    result = CliRunner().invoke(app, ["export", "pruned", "--to", "stock", "--pad"])
    assert result.exit_code == 0, result.stderr
    assert "Padding saves nothing" in result.stderr
    assert "loads with AutoModelForSequenceClassification.from_pretrained(folder)" in result.stdout
    check(dense, example, Path("pruned-stock"))
    assert tf.pipeline("text-classification", "pruned-stock")("yes")
    assert load_call("pruned").remote
    assert not load_call("pruned-stock").remote
