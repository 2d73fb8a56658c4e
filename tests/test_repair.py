"""Repair of output projections against brute force: the same regression on the stacked tokens, by another solver."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support import brute
from tests.support.checks import same, state
from tests.support.zoo import text

ROWS = {"llama": 16}  # of fewer examples nothing can be learnt that serves others
MODELS = (
    "regression",
    "multi_label_classification",
    "bert",
    "gpt2",
    "llama",
    "vit",
    "t5",
    "mha",
    "torch_transformer",
    "albert",
)


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


# -- mixtures ------------------------------------------------------------------------------------------

LENGTHS = [12, 7, 9, 12, 4, 3, 12, 2, 10, 12, 11, 5, 6]


def texts(left: bool) -> dict[str, Tensor]:
    generator, places = torch.Generator().manual_seed(0), torch.arange(12)
    lengths = torch.tensor(LENGTHS)[:, None]
    real = places >= 12 - lengths if left else places < lengths
    ids = torch.randint(3, 100, real.shape, generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long()}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("size", [13, 5])
def test_the_first_half_of_one_and_the_second_of_another(size: int, left: bool) -> None:
    """Of the same block of four and the same fold; W_O is fitted to them too, on whichever side padding is."""
    model, _ = brute.classifier(2)
    layer, drop = hp.find_attention(model, texts(left))[0], {"bert.encoder.layer.0.attention.self": [1]}
    whole, seen = texts(left), list[dict[str, Tensor]]()
    batches = [brute.rows_of(whole, slice(i, i + size)) for i in range(0, 13, size)]
    model.register_forward_pre_hook(lambda module, args, given: seen.append(given), with_kwargs=True)
    choose = [brute.repeated(whole)]
    mended, done = brute.repaired(model, drop, *batches, choose=choose, ridge=0.1, values=False, answers=False)
    assert done.trials[0].kept

    def tokens(batch: dict[str, Tensor]) -> list[list[int]]:
        return [
            ids[real.bool()].tolist() for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]

    expected, known = {1: list[list[int]](), 2: list[list[int]]()}, tokens(whole)
    for shift, own in expected.items():
        for row, first in enumerate(known):
            block = [other for other in range(13) if other % 2 == row % 2 and other // 8 == row // 8]
            if len(block) > shift:
                second = known[block[(block.index(row) + shift) % len(block)]]
                half = min(len(first), len(second)) // 2
                own.append(first[:half] + second[half:])
    assert done.mixtures == done.to_json()["mixtures"] == len(expected[1]) + len(expected[2])
    every = expected[1] + expected[2]
    once = {str(given["input_ids"]): given for given in seen if all(text in every for text in tokens(given))}
    mixed = list(once.values())
    for row in (row for given in mixed for row in given["attention_mask"].tolist()):
        assert row == sorted(row, reverse=not left)
    assert [text for given in mixed for text in tokens(given)] == every
    kept, (old, bias) = brute.columns_of(layer, brute.kept_heads(layer, drop)), brute.output_of(model, layer)
    all_tokens = brute.tokens_of(model, [layer], [*batches, *mixed])[layer.name]
    own_tokens = replace(all_tokens, x=all_tokens.x[:, kept])
    weight, free = brute.ridge_regression(own_tokens, old[kept], bias, 0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(brute.output_of(mended, layer)[0][kept], weight)
    torch.testing.assert_close(brute.output_of(mended, layer)[1], free)


@pytest.mark.parametrize("kind", ["vit", "llama", "places", "causal", "two"])
def test_others_have_none(kind: str) -> None:
    """Pictures, several answers a text, what it is not known how to cut, and texts that are alone in their block."""
    if kind in ("vit", "llama"):
        model, example = brute.model_of(kind)
    else:
        model, (example,) = brute.classifier(2, rows=(12,))
    if kind == "places":
        example["position_ids"] = torch.arange(7)[None].expand(12, 7)
    if kind == "causal":
        example["attention_mask"] = torch.ones(12, 1, 7, 7)
    _, done = brute.repaired(model, {"L0": list(hp.find_attention(model, example)[0].units[0])}, example, answers=False)
    assert bool(done.mixtures) == (kind == "two")


@pytest.mark.parametrize("error", [ValueError, KeyError, torch.OutOfMemoryError])
def test_a_model_that_does_not_take_them_has_none(error: type[Exception]) -> None:
    """Memory that ran out is no such model."""
    model, batches = brute.classifier(3)
    example_ids = {tuple(row.tolist()) for batch in batches for row in batch["input_ids"]}

    def particular(module: Any, args: Any, given: dict[str, Tensor]) -> None:
        if len(given["input_ids"]) > 4 and not {tuple(row.tolist()) for row in given["input_ids"]} <= example_ids:
            raise error("All examples must end alike")

    layers = hp.find_attention(model, batches[0])
    model.register_forward_pre_hook(particular, with_kwargs=True)
    if error is torch.OutOfMemoryError:
        with pytest.raises(torch.OutOfMemoryError):
            hp.repair(model, {"L0": [1]}, batches, layers=layers)
    else:
        assert hp.repair(model, {"L0": [1]}, batches, layers=layers).mixtures == 0
