"""One suite for every model of `tests/support/cases.py`: masked is the brute force, pruned is masked, loaded is saved, refused is untouched.

Only public names are used; the brute force (`cases.without`) zeroes blocks of W_O's input, and knows nothing of the trace.
"""

import copy
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import headprune as hp
from tests.support import zoo
from tests.support.cases import answer, facts, is_built, made, other, without
from tests.support.grouped import Stack, stacks

FACTS = facts()
MASKED = [name for name, row in FACTS.items() if row["only_masked"]]
PRUNED = [name for name in FACTS if name not in MASKED]
SMALL = [name for name in PRUNED if not is_built(name) and "eager" not in name]
NO_BLOCKS = {"xlnet", "convbert", "zamba2"}  # whose heads are no blocks of W_O's input, or which share weights
Drop = dict[str, list[int]]


def everything(model: nn.Module) -> dict[str, Any]:
    """What a trace, a mask and a refused prune must leave as it is: modules, tensors, their flags, numbers and hooks."""
    return {
        name: (
            type(module), module.training, {k: v for k, v in vars(module).items() if isinstance(v, int | str | float)},
            [(k, id(t), t._version, t.requires_grad, t.grad) for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None],
            len(module._forward_hooks), len(module._forward_pre_hooks), "compute_bias" in vars(module),
        )
        for name, module in model.named_modules()
    }  # fmt: skip


def same(got: Tensor, expected: Tensor, share: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=share * max(1.0, float(expected.abs().max())))


def some(layers: list[hp.AttentionLayer], name: str) -> Drop:
    """Heads of every layer, drawn at random, but not all of a layer."""
    draw, drop = random.Random(name), {}
    for layer in layers:
        units = draw.sample(layer.units, draw.randint(1, len(layer.units) - 1)) if len(layer.units) > 1 else []
        drop[layer.name] = sorted(h for unit in units for h in unit)
    return drop


def without_layers(layers: list[hp.AttentionLayer], name: str) -> Drop:
    """All heads of the first and of the last layer, others of the rest."""
    every = {a.name: list(range(a.num_heads)) for a in layers}
    return {**some(layers, name), layers[0].name: every[layers[0].name], layers[-1].name: every[layers[-1].name]}


def no_heads(layers: list[hp.AttentionLayer], name: str) -> Drop:
    return {a.name: list(range(a.num_heads)) for a in layers}


def found_and_masked(name: str) -> tuple[nn.Module, Any, list[hp.AttentionLayer]]:
    """A trace finds what the table says, a mask is the brute force, and both leave the model as it was."""
    (model, example), row = made(name), FACTS[name]
    before = everything(model)
    layers = hp.find_attention(model, example)
    assert "".join("c" if a.kind == "cross" else a.kind[0] for a in layers) == row["layers"]
    assert [a.index for a in layers] == list(range(len(layers)))
    for layer in layers:
        found = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
        wanted = (row["heads"], row["key_value_heads"], row["width"])
        assert all(w in ("*", str(n)) for n, w in zip(found, wanted, strict=True)), found
        assert layer.maskable
        assert layer.prunable or name in MASKED, layer.reason
        assert not layer.prunable or layer.output_projection.module.endswith(tuple(row["output"].split("|")))
        assert hp.AttentionLayer.from_json(json.loads(json.dumps(layer.to_json()))) == layer
    drop = {a.name: heads for a in layers if (heads := some(layers, name)[a.name])}
    with hp.mask(model, drop, layers=layers):
        masked = answer(model, example)
    assert everything(model) == before
    assert (masked - answer(model, example)).abs().max() > 1e-3
    if name not in NO_BLOCKS and layers[0].output_projection:
        same(masked, answer(without(model, layers, drop), example))
    return model, example, layers


def loaded(model: nn.Module, name: str, folder: Path) -> list[nn.Module]:
    """What headprune loads of a saved model, and what transformers does by the code in the folder."""
    if not isinstance(model, tf.PreTrainedModel):
        return [hp.load(hp.save(model, folder), made(name)[0])]
    models: list[nn.Module] = [hp.load(hp.save(model, folder))]
    autos = json.loads((folder / "config.json").read_text()).get("auto_map", {})
    own = next((auto for auto, cls in autos.items() if cls.endswith(f".{type(model).__name__}")), None)
    return models + ([getattr(tf, own).from_pretrained(folder, trust_remote_code=True)] if own else [])


TAKE_LONG = {"zamba2", "inkling2_text", "swinv2", "xlnet", "dab-detr", "neomme", "gemma3n_audio", "detr"}
WAYS = [
    *(pytest.param(name, some, marks=[pytest.mark.slow] * (name in TAKE_LONG)) for name in PRUNED),
    *((name, way) for name in SMALL for way in (without_layers, no_heads)),
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_pruned_is_masked_and_loaded_is_saved(name: str, way: Callable[..., Drop], tmp_path: Path) -> None:
    """On the example and on an input that the proof has not seen; then once more, counted within what is left."""
    if way is some:
        model, example, layers = found_and_masked(name)
    else:
        model, example = made(name)
        layers = hp.find_attention(model, example)
    dense, drop = copy.deepcopy(model), way(layers, name)
    proof = hp.prune(model, drop, example, layers=layers)
    assert proof.difference <= proof.tolerance
    for batch in (example, other(example)):
        with hp.mask(dense, drop, layers=layers):
            same(answer(model, batch), answer(dense, batch))
    found = hp.find_attention(model, example)
    assert not any(a.maskable for a in found if a.name in proof.ghosts)  # a ghost is no head
    left = {a.name: a for a in found if a.prunable}
    stay = {a.name: [h for h in range(a.num_heads) if h not in drop[a.name]] for a in layers}
    for layer in layers:  # one head of a 3-D softmax is not told from other softmaxes
        kept = left[layer.name].num_heads if layer.name in left else min(len(stay[layer.name]), 1)
        assert kept == len(stay[layer.name]) or layer.name in proof.ghosts
    if way is some:
        again = {a.name: list(a.units[-1]) for a in left.values() if len(a.units) > 1}
        again = again if not is_built(name) else dict(list(again.items())[:1])
        drop = {n: sorted({*heads, *(stay[n][h] for h in again.get(n, ()))}) for n, heads in drop.items()}
        hp.prune(model, again, example, layers=found)
        with hp.mask(dense, drop, layers=layers):
            same(answer(model, other(example)), answer(dense, other(example)))
    models = loaded(model, name, tmp_path / "pruned")
    for each in models:
        same(answer(each, example), answer(model, example), 1e-5)
    if isinstance(model, tf.PreTrainedModel) and model.can_generate() and "input_ids" in example:
        ids = {k: v[:2] for k, v in example.items() if not k.startswith("decoder")}
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        with hp.mask(dense, drop, layers=layers):
            expected = dense.generate(**ids, **options)
        for each, cache in itertools.product((model, *models), (True, False)):
            assert torch.equal(each.generate(**ids, **options, use_cache=cache), expected)


class Counting(nn.Module):
    """Answers otherwise as soon as it has fewer parameters: no prune of it can be proved."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any, **named: Any) -> Tensor:
        output = self.model(*given, **named)
        return (output if isinstance(output, Tensor) else output[0]) + sum(p.numel() for p in self.parameters())


@pytest.mark.parametrize("name", [n for n in SMALL if n[0].islower()])
def test_a_refused_prune_changes_nothing(name: str) -> None:
    inner, example = made(name)
    for p in inner.parameters():
        p.requires_grad_(p.ndim > 1)
    model = Counting(inner.train())
    before, layers = everything(model), hp.find_attention(model, example)
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, without_layers(layers, name), example, layers=layers)
    assert everything(model) == before


@pytest.mark.parametrize("name", MASKED)
def test_heads_that_are_only_masked(name: str) -> None:
    model, example, layers = found_and_masked(name)
    before = everything(model)
    with pytest.raises(hp.HeadPruneError, match=f"{layers[0].name} .*{FACTS[name]['only_masked']}"):
        hp.prune(model, {layers[0].name: list(layers[0].units[0])}, example, layers=layers)
    assert everything(model) == before


@pytest.mark.parametrize("name", [*zoo.ZOO, "falcon", "gpt_oss"])
def test_traced_without_weights(name: str) -> None:
    """On the meta device the layers are the same, to the last feature."""
    model, example = made(name)
    layers = hp.find_attention(model, example)
    empty = copy.deepcopy(model).to("meta")
    assert hp.find_attention(empty, example) == layers
    assert all(p.is_meta for p in empty.parameters())
    with pytest.raises(hp.HeadPruneError, match="has no numbers"):
        hp.prune(empty, {layers[0].name: list(layers[0].units[0])}, example, layers=layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["bert", "llama", "d2l", "mha"])
def test_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, example = made(name)
    given = example[0] if isinstance(example, tuple) else example
    example = (given.to(dtype), *example[1:]) if isinstance(example, tuple) else example
    model.to(dtype)
    layers = hp.find_attention(model, example)
    drop = some(layers, name)
    with hp.mask(model, drop, layers=layers):
        masked = answer(model, example)
    assert name == "mha" or torch.equal(masked, answer(without(model, layers, drop), example))
    hp.prune(model, drop, example, layers=layers)
    assert {p.dtype for p in model.parameters()} == {dtype}
    same(answer(model, example), masked, {torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype])


@settings(max_examples=18)
@given(stacks(), st.data())
def test_any_heads_of_any_plain_attention(drawn: tuple[Stack, Tensor, Drop], data: st.DataObject) -> None:
    """Masked and pruned, at once or one unit of every layer first, is the brute force, and as small as its shapes say."""
    model, x, drop = drawn
    layers = hp.find_attention(model, x)
    expected = answer(without(model, layers, drop), x)
    with hp.mask(model, drop, layers=layers):
        same(answer(model, x), expected, 1e-12)
    first = {a.name: list(data.draw(st.sampled_from(whole))) for a in layers
             if (whole := [u for u in a.units if set(u) <= set(drop[a.name])]) and len(drop[a.name]) < a.num_heads}  # fmt: skip
    stay = {a.name: [h for h in range(a.num_heads) if h not in first.get(a.name, ())] for a in layers}
    second = {name: [stay[name].index(h) for h in heads if h in stay[name]] for name, heads in drop.items()}
    outside = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("layers."))
    for steps in ([drop], [first, second]):
        pruned = copy.deepcopy(model)
        for step in steps:
            assert hp.prune(pruned, step, x).difference <= 1e-9
        same(answer(pruned, x), expected, 1e-9)
        sizes = [shape.parameters(model.width, set(drop[f"layers.{i}"])) for i, shape in enumerate(model.shapes)]
        assert sum(p.numel() for p in pruned.parameters()) == sum(sizes) + outside


def test_what_an_older_folders_code_has_loaded_is_pruned_and_saved(older: Path, tmp_path: Path) -> None:
    """Its modules run that code's hooks, which read what this version gives them."""
    folder = older / "5.0.0" / "t5"
    model = tf.AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
    example = load_file(folder.with_suffix(".safetensors"))
    example.pop("logits")
    dense, layers = copy.deepcopy(model), hp.find_attention(model, example)
    drop = {a.name: [0] for a in layers if len(a.units) > 1 and a.prunable}
    assert len(drop) > 3
    hp.prune(model, drop, example, layers=layers)
    with hp.mask(dense, drop, layers=layers):
        same(answer(model, example), answer(dense, example))
    for loaded in (hp.load(hp.save(model, tmp_path / "again")), copy.deepcopy(model)):
        assert torch.equal(answer(loaded, example), answer(model, example))
