"""Textbook classes are scored, masked and pruned without a rule."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headprune as hp
from tests.support.checks import check
from tests.support.textbook import CLASSES, BertSelfAttention, Classifier, HeadsFirst, hidden, made, tokens
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


class Head(nn.Module):
    """A head is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) @ self.key(x).mT / 8**0.5).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    """Their results side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(4)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def test_heads_that_are_modules_are_told() -> None:
    """They were not seen, and beside another layer left out without a word."""
    model = randomise(nn.Sequential(Heads(), nn.LayerNorm(32), BertSelfAttention(1, 4, 8)))
    layers = hp.find_attention(model, hidden(32))
    assert [(a.name, a.num_heads, a.prunable) for a in layers] == [
        *((f"0.heads.{i}", 1, False) for i in range(4)), ("2", 4, True),
    ]  # fmt: skip
    assert all("a head by itself in a list of modules" in a.reason for a in layers[:4])
    check(model, hidden(32), {"2": [1]})
    with pytest.raises(hp.HeadPruneError, match=r"0\.heads\.0 cannot be pruned: it is a head by itself"):
        hp.prune(model, {"0.heads.0": [0]}, hidden(32))
    assert [a.prunable for a in hp.find_attention(Heads(), hidden(32))] == [False] * 4
