"""How near a changed model's answers stay: against sums by hand, and what cannot be known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import headprune as hp
from headprune import divergence
from headprune.divergence import Fidelity
from headprune.gates import mask
from tests.support import zoo
from tests.support.problems import small


def test_the_divergence_is_the_mean_over_examples() -> None:
    model, batches = small()
    model.train()  # dropout must not be heard
    found = Fidelity(model, batches)
    assert found.known
    assert found.divergence() == 0
    layers = hp.find_attention(model, batches[0])
    drop = {layers[0].name: [0, 2], layers[1].name: [1]}
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            before = model(**batch).logits.softmax(-1)
            with mask(model, drop, layers=layers):
                after = model(**batch).logits.softmax(-1)
            for p, q in zip(before, after, strict=True):
                total += float((p * (p / q).log()).sum())
                count += 1
    with mask(model, drop, layers=layers):
        assert found.divergence() == pytest.approx(total / count, rel=1e-9)
    assert found.divergence() == 0


def test_answers_too_many_to_keep_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small()
    size = sum(len(batch["labels"]) for batch in batches) * 2 * 8
    monkeypatch.setattr(divergence, "MOST", size)
    assert Fidelity(model, batches).known
    monkeypatch.setattr(divergence, "MOST", size - 1)
    assert not Fidelity(model, batches).known


def test_a_model_without_logits_is_not_known() -> None:
    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"hidden": x}

    assert not Fidelity(nn.ModuleList([Bare()])[0], [{"x": torch.ones(2, 3)}]).known


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_other_models(name: str) -> None:
    model, example = getattr(zoo, name)()
    batch = zoo.labelled(model, example) if name != "gpt2" else {**example, "labels": example["input_ids"]}
    found = Fidelity(model, [batch])
    assert found.known
    assert found.divergence() == 0
    layer = next(layer for layer in hp.find_attention(model, example) if layer.maskable)
    with mask(model, {layer.name: [0]}, layers=[layer]):
        assert found.divergence() > 0


def test_rounding_is_no_difference() -> None:
    """An order whose plan gives the dense answers but for rounding was preferred by many orders of magnitude to another such order."""
    model, batches = small()
    model.float()
    found = Fidelity(model, batches)
    assert found.log_divergence() == pytest.approx(math.log(1e-7))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7)
    assert found.divergence() >= 0
    assert found.log_divergence() == pytest.approx(math.log(1e-7), abs=1.0)
    model.double()
    assert Fidelity(model, batches).log_divergence() == pytest.approx(math.log(1e-12))
