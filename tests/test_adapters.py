"""Adapters beside a projection: cut with it when they run, and told when they do not."""

import copy
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.plain import HEADS, WIDTH, noise
from tests.support.zoo import bert, randomise


class Adapted(nn.Module):
    """A low-rank addition to a linear layer, on or off, as PEFT's LoRA is."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.on = base, True
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x)) if self.on else self.base_layer(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("where", ["q", "k", "v", "o"])
def test_an_adapter_that_is_off(where: str) -> None:
    """It was left as it was, and clashed with the cut layer once it was switched on."""
    model, x = randomise(nn.Sequential(Attention())), noise(2, 5, WIDTH)
    adapted = Adapted(getattr(model[0], where))
    setattr(model[0], where, adapted)
    adapted.on = False
    (layer,) = hp.find_attention(model, x)
    assert layer.maskable
    assert "adapter that is not active" in layer.reason
    with pytest.raises(hp.HeadPruneError, match=f"0.{where}.* does not run, but would no longer fit"):
        hp.prune(model, {"0": [1]}, x)
    adapted.on = True
    if where != "o":  # LoRA around W_O must be merged
        hp.prune(model, {"0": [1]}, x)
        model(x)


def test_what_else_does_not_run() -> None:
    """What is no part of a projection is not in the way."""
    model, x = randomise(nn.Sequential(Attention())), noise(2, 5, WIDTH)
    model[0].spare = nn.Linear(WIDTH, WIDTH)
    hp.prune(model, {"0": [1]}, x)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    dense, example = bert()
    if kind == "ia3":
        config = peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[])
    else:
        config = peft.LoraConfig(
            target_modules=["query", "value"], r=2, use_dora=kind == "dora", init_lora_weights=False
        )
    model = peft.get_peft_model(copy.deepcopy(dense), config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ia3" in name:
                p.normal_()
    with model.disable_adapter():
        layer = hp.find_attention(model, example)[0]
        with pytest.raises(hp.HeadPruneError, match="an adapter that is not active"):
            hp.prune(model, {layer.name: [0]}, example)
    hp.prune(model, {layer.name: [0]}, example)
    model(**example)


@pytest.mark.parametrize("pruned_first", [True, False])
def test_lora_merged_and_saved(pruned_first: bool, tmp_path: Path) -> None:
    """Around a pruned model or inside one, an emptied layer included; unmerged adapters are refused, since no one could load them."""
    peft = pytest.importorskip("peft")
    model, example = bert()
    plan = {"bert.encoder.layer.0.attention.self": [0, 1, 2, 3], "bert.encoder.layer.1.attention.self": [1]}
    config = peft.LoraConfig(target_modules=["query", "value"], r=2, init_lora_weights=False)
    if pruned_first:
        hp.prune(model, plan, example)
        adapted = peft.get_peft_model(model, config).eval()
    else:
        adapted = peft.get_peft_model(model, config).eval()
        hp.prune(adapted, {f"base_model.model.{name}": heads for name, heads in plan.items()}, example)
    with torch.no_grad():
        expected = adapted(**example).logits
    with pytest.raises(hp.HeadPruneError, match=r"merge_and_unload"):
        hp.save(adapted, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    again = hp.load(hp.save(adapted.merge_and_unload(), tmp_path / "m"))
    remote = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", trust_remote_code=True).eval()
    with torch.no_grad():
        for other in (again, remote):
            torch.testing.assert_close(other(**example).logits, expected, rtol=0, atol=1e-5)
