"""Textbook classes are scored, masked and pruned without a rule."""

import copy

import pytest
import torch
import torch.nn.functional as F

import headprune as hp
from tests.support.checks import check
from tests.support.textbook import CLASSES, Classifier, HeadsFirst, hidden, made, tokens
from tests.support.zoo import randomise


@pytest.mark.parametrize("name", CLASSES)
def test_found(name: str) -> None:
    model, example = made(name)
    layers = hp.find_attention(model, example)
    assert all(layer.prunable for layer in layers), [layer.reason for layer in layers]
    assert {(a.num_heads, a.head_dim) for a in layers} == {(12, 64) if "bert" in name else (4, 8)}
    kinds = {"encoder-decoder": ["encoder"] * 2 + ["decoder", "cross"] * 2, "mingpt": ["decoder"] * 2}.get(
        name, ["encoder"] * 2
    )
    assert [layer.kind for layer in layers] == kinds


@pytest.mark.parametrize("name", CLASSES)
def test_pruned_some_and_all(name: str) -> None:
    model, example = made(name)
    layers = hp.find_attention(model, example)
    check(model, example, {a.name: [0, 2] if i % 2 else [1] for i, a in enumerate(layers)})
    check(model, example, {layers[0].name: list(range(layers[0].num_heads)), layers[-1].name: [1, 3]})
    again = check(model, example, {layers[0].name: [0]})
    check(again, example, {layers[0].name: [0, 1]})


@pytest.mark.parametrize("name", CLASSES)
def test_scored(name: str) -> None:
    model, example = made(name)
    inputs = example if isinstance(example, tuple) else (example,)
    texts = {"encoder-decoder": tokens(5, 2), "mingpt": tokens(8, 4)}
    labels = texts.get(name, torch.randint(0, 3, (3,)))

    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if out.ndim == 2:
            return F.cross_entropy(out, labels, reduction="none")
        return F.cross_entropy(out.transpose(1, 2), labels, reduction="none").mean(dim=1)

    for method in ("ablation", "gradient"):
        whole = hp.score(model, [(inputs, labels)], method, loss_fn=loss_fn)
        single = [(tuple(x[i : i + 1] for x in inputs), labels[i : i + 1]) for i in range(3)]
        parts = hp.score(model, single, method, loss_fn=loss_fn)
        torch.testing.assert_close(whole.flat(), parts.flat(), rtol=1e-3, atol=1e-5)
    copy.deepcopy(model)  # not if an attribute held the graph of a pass, as D2L's `attention_weights` would


def test_heads_first_in_the_batch_dimension() -> None:
    model = randomise(Classifier(HeadsFirst(), HeadsFirst(), 32, 3))
    layers = hp.find_attention(model, hidden(32))
    check(model, hidden(32), {layers[0].name: [1, 2], layers[1].name: [3]})
