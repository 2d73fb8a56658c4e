"""Repair of output projections against brute force: the same regression on the stacked tokens, by another solver."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import headprune as hp
from tests.support import brute
from tests.support.checks import same, state
from tests.support.problems import duplicated, small
from tests.support.zoo import text

ROWS = {"llama": 16}  # of fewer examples nothing can be learnt that serves others
MODELS = ("bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer", "albert")


def check_regression(model: nn.Module, example: Any, drop: Any, ridge: float | None) -> None:
    """W_O is what the regression gives, nothing else has changed, and the result says so."""
    layers = hp.find_attention(model, example)
    mended, done = brute.repaired(model, drop, example, ridge=ridge, values=False, mixtures=False, answers=False)
    assert [(t.step, t.kept) for t in done.trials] == [("output projections", True)]
    assert done.layers.keys() == drop.keys()
    tokens, changed = brute.tokens_of(model, layers, [example]), set()
    for layer in (a for a in layers if a.name in drop):
        assert layer.output_projection
        changed |= {f"{layer.output_projection.module}.{part}" for part in ("weight", "bias")}
        kept = brute.columns_of(layer, brute.kept_heads(layer, drop))
        gone = brute.columns_of(layer, drop[layer.name])
        (weight, bias), (found, found_bias) = brute.output_of(model, layer), brute.output_of(mended, layer)
        has_bias = found_bias is not None
        assert (layer.output_projection.module in done.biases) == (bias is None and has_bias)
        start = weight.new_zeros(weight.shape[1]) if bias is None else bias
        own = replace(tokens[layer.name], x=tokens[layer.name].x[:, kept])
        facts = done.layers[layer.name]
        assert facts.ridge == (brute.best_ridge(own, weight[kept], start, has_bias) if ridge is None else ridge)
        expected = brute.ridge_regression(own, weight[kept], start, facts.ridge, has_bias)
        torch.testing.assert_close(found[kept], expected[0], rtol=1e-6, atol=1e-7)
        assert found_bias is None or torch.allclose(found_bias, expected[1], rtol=1e-6, atol=1e-7)
        assert gone
        assert not found[gone].any()
        assert facts.before == pytest.approx(own.error(own.x @ weight[kept] + start), rel=1e-6)
        assert facts.after == pytest.approx(own.error(own.x @ expected[0] + expected[1]), rel=1e-6, abs=1e-9)
        assert facts.after <= facts.before
    before, now = state(model), state(mended)
    assert {name for name in now if name not in before or not torch.equal(now[name], before[name])} <= changed


@pytest.mark.parametrize("ridge", [None, 1e-3])
@pytest.mark.parametrize("name", MODELS)
def test_the_fit_is_the_regression(name: str, ridge: float | None) -> None:
    model, example = brute.model_of(name, ROWS.get(name, 6))
    check_regression(model, example, brute.some_heads(hp.find_attention(model, example)), ridge)


def test_tokens_may_come_before_the_examples() -> None:
    model, example = brute.model_of("tokens first")
    check_regression(model, example, brute.some_heads(hp.find_attention(model, example)), 0.1)


@pytest.mark.parametrize("given", ["mask", "labels"])
def test_a_decoder_and_its_encoder_have_padding_of_their_own(given: str) -> None:
    """As long as each other, so that the shapes do not tell."""
    model, example = brute.model_of("t5")[0], text(6, 6, decoder=6)
    real = torch.arange(6) < torch.tensor([3, 6, 6, 2, 6, 6])[:, None]
    if given == "mask":
        example["decoder_attention_mask"] = real.long()
    else:
        example["labels"] = example.pop("decoder_input_ids").masked_fill(~real, -100)
    check_regression(model, example, brute.some_heads(hp.find_attention(model, example)), 0.1)


@pytest.mark.parametrize(("drop", "name"), [({}, "bert"), ({"L0": []}, "llama")])
def test_nothing_removed_nothing_changed(drop: Any, name: str) -> None:
    model, example = brute.model_of(name)
    mended, done = brute.repaired(model, drop, example)
    assert same(mended, state(model))
    assert done == hp.Repair({}, 6, 0, 0, notes=done.notes)


@pytest.mark.parametrize(("ridge", "most"), [(None, 1e-3), (1e-8, 1e-5)])
def test_a_duplicate_is_made_up_for(ridge: float | None, most: float) -> None:
    model, batches = small()
    duplicated(model)
    with torch.no_grad():  # brute.alike, but used otherwise
        model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] *= -0.3  # type: ignore[union-attr, index]
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [1]}
    dense = brute.logits(model, batches[0])
    with hp.mask(model, drop, layers=layers):
        assert (brute.logits(model, batches[0]) - dense).abs().max() > 20 * most
    for answers in (False, True):  # the last step leaves it so
        mended, _ = brute.repaired(model, drop, *batches, ridge=ridge, values=False, answers=answers)
        assert (brute.logits(mended, batches[0]) - dense).abs().max() < most


# -- batches and padding --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ridge"), [
    ("bert", None), ("gpt2", 0.1), ("llama", 0.1), ("t5", 0.1), ("vit", None), ("mha", 0.1), ("xlnet", None),
    ("xlnet, square", 0.1), ("answering", None),
])  # fmt: skip
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    """All three steps; of cross-attention, the values' tokens are the encoder's."""
    model, example = brute.model_of(name)
    drop, choose = brute.some_heads(hp.find_attention(model, example)), [brute.batch_of(brute.repeated(example))]

    def weights(*batches: Any) -> tuple[nn.Module, hp.Repair]:
        return brute.repaired(model, drop, *batches, ridge=ridge, choose=choose)

    whole, done = weights(example)
    assert done.trials[0].kept
    others = [[brute.rows_of(example, i) for i in ([0], [1, 2], [3, 4, 5])]]
    if name in ("bert", "gpt2", "t5", "answering"):
        others.append([brute.padded(example, 4)])
    if name == "llama":  # whose positions only count relatively
        others.append([brute.padded(example, 3, left=True)])
    for batches in others:
        mended, other = weights(*batches)
        brute.alike(mended, whole, 1e-5)
        assert [t.kept for t in other.trials] == [t.kept for t in done.trials]
        assert {n: f.ridge for n, f in other.layers.items()} == {n: f.ridge for n, f in done.layers.items()}


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_two_repairs_are_the_same_to_the_bit(name: str) -> None:
    model, example = brute.model_of(name)
    drop = brute.some_heads(hp.find_attention(model, example))
    torch.manual_seed(1)
    first, done = brute.repaired(model, drop, example)
    torch.manual_seed(2)
    second, again = brute.repaired(model, drop, example)
    assert same(first, state(second))
    assert done == again
    assert done.trials


def test_the_batch_size_changes_nothing_with_mixtures() -> None:
    model, (whole,) = brute.classifier(2, rows=(32,))
    drop = {"L0": [0], "L1": [1]}
    parts = [brute.rows_of(whole, slice(i, i + 10)) for i in range(0, 32, 10)]
    choose = [brute.rows_of(whole, torch.arange(128) % 32)]
    expected, done = brute.repaired(model, drop, whole, choose=choose)
    found, _ = brute.repaired(model, drop, *parts, choose=choose)
    assert done.mixtures == 64
    assert done.to_json()["mixtures"] == 64
    assert done.trials[0].kept
    brute.alike(found, expected, 1e-5)


@pytest.mark.parametrize("biases", [True, False])
def test_a_bias_is_added_where_it_may_be(biases: bool) -> None:
    model, example = brute.model_of("llama")
    mended, done = brute.repaired(model, {"L0": [0, 1]}, example, ridge=0.1, biases=biases)
    assert len(done.biases) == biases
    assert (len(list(mended.parameters())) - len(list(model.parameters()))) == biases
