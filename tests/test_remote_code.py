"""A saved folder loads by transformers alone, and never as a stock model with random weights."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import headprune as hp
from headprune.checkpoint import install_save_methods
from headprune.inputs import call
from headprune.pruned import add_biases
from headprune.surgery import answers
from tests.support.checks import pruned
from tests.support.zoo import ZOO, bert, gpt2

FAMILIES = [name for name in ZOO if name not in ("mha", "torch_transformer")]

# headprune cannot be imported there: what is loaded is the folder's own code.
WITHOUT = """
import json, sys, torch, transformers as tf
sys.modules["headprune"] = None
torch.set_num_threads(1)
tf.logging.set_verbosity_error()
from pathlib import Path
for folder in sys.argv[1:]:
    given = torch.load(folder + "-x")
    auto = getattr(tf, given["auto"])
    try:
        auto.from_pretrained(folder)
    except RuntimeError as error:
        assert "mismatch" in str(error), error
    else:
        raise AssertionError(f"{folder} loaded as a stock model")
    load = dict(trust_remote_code=True, attn_implementation=given["attention"])
    model = auto.from_pretrained(folder, **load)
    model.save_pretrained(folder + "-again", max_shard_size="40KB")
    again = auto.from_pretrained(folder + "-again", **load)
    for key, (a, b) in {k: (v, again.state_dict()[k]) for k, v in model.state_dict().items()}.items():
        assert torch.equal(a, b), key
    base = tf.AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        out = model.eval()(**given["example"])
    torch.save((type(model).__name__, type(base).__name__, {k: v for k, v in out.items() if torch.is_tensor(v)}), folder + "-y")
"""


def emptied(name: str) -> tuple[torch.nn.Module, Any]:
    """A model whose first layer has no heads, and whose second has lost the fewest that can go."""
    model, example = ZOO[name]()
    layers = [layer for layer in hp.find_attention(model, example) if layer.prunable]
    plan = {layers[0].name: list(range(layers[0].num_heads)), layers[1].name: list(layers[1].units[0])}
    hp.prune(model, plan, example)
    return model, example


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, Any]]:
    """By family: the model, its example, and what a process without headprune found."""
    here, made = tmp_path_factory.mktemp("folders"), {}
    for name in FAMILIES:
        for kind, (model, example) in (("uneven", pruned(name)), ("emptied", emptied(name))):
            folder = hp.save(model, here / f"{name}-{kind}")
            autos = json.loads((folder / "config.json").read_text())["auto_map"]
            auto = next(a for a, c in autos.items() if c.endswith(f".{type(model).__name__}"))
            given = {"auto": auto, "example": example, "attention": model.config._attn_implementation}
            torch.save(given, f"{folder}-x")
            made[folder.name] = folder, model, example
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(here / "modules")}
    folders = [str(folder) for folder, *_ in made.values()]
    subprocess.run(
        [sys.executable, "-c", WITHOUT, *folders], check=True, cwd=here, env={**environment, "PYTHONPATH": ""}
    )
    return {name: (model, example, torch.load(f"{folder}-y")) for name, (folder, model, example) in made.items()}


@pytest.mark.parametrize("kind", ["uneven", "emptied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_without_headprune(name: str, kind: str, loaded: dict[str, tuple[Any, Any, Any]]) -> None:
    """Bit by bit the same answers; stock loading is refused; saved again in shards and loaded again."""
    model, example, (cls, base, outputs) = loaded[f"{name}-{kind}"]
    assert cls == type(model).__name__
    assert base == type(model.base_model).__name__ or name == "t5"
    with torch.no_grad():
        expected = model(**example)
    for key, value in outputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[key]), key


def test_only_emptied_layers_do_not_load_as_stock(tmp_path: Path) -> None:
    """No weight of another shape is left: a stock class would fill the gaps with random numbers."""
    for name in ("vit", "bert"):
        model, example = ZOO[name]()
        layers = hp.find_attention(model, example)
        hp.prune(model, {layers[0].name: list(range(layers[0].num_heads))}, example)
        model.save_pretrained(tmp_path / name)
        with pytest.raises(RuntimeError, match="mismatch"):
            type(model).from_pretrained(tmp_path / name)
        again = hp.load(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(again(**example).logits, model(**example).logits)


def test_save_pretrained_writes_what_save_writes(tmp_path: Path) -> None:
    model, _ = pruned("bert")
    hp.save(model, tmp_path / "a")
    copy.deepcopy(model).save_pretrained(tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


def test_biases_that_a_repair_added_are_saved(tmp_path: Path) -> None:
    """Before anything is pruned, too: a stock class would leave them out without a word."""
    model, example = ZOO["llama"]()
    add_biases(model, ["model.layers.0.self_attn.o_proj"])
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.bias.normal_()
    install_save_methods(model)
    model.save_pretrained(tmp_path / "m")
    again = hp.load(tmp_path / "m")
    remote = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "m", trust_remote_code=True)
    with torch.no_grad():
        for other in (again, remote.eval()):
            assert torch.equal(other(**example).logits, model(**example).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_collected_outputs_are_each_layers_own(attention: str) -> None:
    """An emptied layer has an entry in attentions, so that what other layers attend to is at their own places.

    It is of no heads; where the model was pruned with eager attention, of the one head that stays with zero output.
    """
    model, example = bert(attention)
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: list(range(layers[0].num_heads)), layers[1].name: [0]}, example)
    model.set_attn_implementation("eager")
    out = model(**example, output_attentions=True, output_hidden_states=True)
    assert len(out.hidden_states) == len(layers) + 1
    heads = [weights.shape[1] for weights in out.attentions]
    assert heads == [int(attention == "eager"), layers[1].num_heads - 1, *(a.num_heads for a in layers[2:])]
    with torch.no_grad():
        hidden = model(**example, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(hidden, out.hidden_states, strict=True))


def test_pickled_whole() -> None:
    import io

    model, example = emptied("bert")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        for x, y in zip(answers(call(model, example)), answers(call(again, example)), strict=True):
            assert torch.equal(x, y)


def test_shards(tmp_path: Path) -> None:
    model, example = gpt2()
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0]}, example)
    hp.save(model, tmp_path / "m", max_shard_size="30KB")
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 1
    again = hp.load(tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(again(**example).logits, model(**example).logits)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    with pytest.raises(hp.HeadPruneError, match="another folder"):
        hp.load(tmp_path / "m")
