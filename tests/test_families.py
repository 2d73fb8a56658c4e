"""Families that each need something of their own: what a trace must see, and what surgery must change, beside weights."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.families import built
from tests.support.zoo import randomise

# What is special about each. All are pruned in every layer, pruned again, and saved and loaded.
EXACT = {
    "olmo2": "a norm over all heads' queries and keys",
    "phi3": "reads the number of heads from the config",
    "gpt_bigcode": "one key/value head, in a fused projection",
    "deberta": "biases of their own for queries and values; relative positions through the same projections",
    "funnel": "positions as parameters in einsum",
    "xlnet": "every projection a parameter in einsum (declared)",
    "fsmt": "asserts that its input is as wide as its heads",
    "timesformer": "takes the head width from its input's shape",
    "longformer": "heads in the third dimension, windows",
    "parakeet_encoder": "relative positions in the mask of the fused attention",
    "moonshine": "config fields under other names",
    "deepseek_v3": "latent attention",
    "vit_mae": "draws random numbers in evaluation too",
    "swinv2": "a scale and a bias network per head",
    "table-transformer": "first queries are all zero",
    "gemma3n_audio": "heads counted in a module beside the attention",
    "minimax_m2": "grouped heads and a norm over all of them",
    "wav2vec2-conformer": "relative positions with biases per head",
    "bitnet": "a norm over all heads before W_O",
    "neomme": "an argument that is added to the heads' values",
    "inkling2_text": "a convolution that calls key/value heads its heads",
    "dab-detr": "queries that are projected outside the attention module",
    "zamba2": "several layers share their weights",
}  # fmt: skip


def answer(model: nn.Module, example: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return answers(call(model, example))


def unit(layer: hp.AttentionLayer) -> list[int]:
    return list(layer.units[-1]) if len(layer.units) > 1 else []


@pytest.mark.parametrize("name", EXACT)
def test_pruned_again_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, example = built(name)
    dense = copy.deepcopy(model)
    layers = hp.find_attention(model, example)
    drop = {a.name: unit(a) for a in layers if unit(a)}
    hp.prune(model, drop, example, layers=layers)
    with hp.mask(dense, drop, layers=layers):
        masked = answer(dense, example)
    for got, expected in zip(answer(model, example), masked, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    again = hp.find_attention(model, example)
    assert [a.num_heads for a in again] == [a.num_heads - len(unit(a)) for a in layers]
    hp.prune(model, {again[0].name: unit(again[0]) or [0]}, example)
    loaded = hp.load(hp.save(model, tmp_path / "pruned"))
    for got, expected in zip(answer(loaded, example), answer(model, example), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["ibert", "squeezebert", "doge"])
def test_masked_where_pruning_is_not_exact(name: str) -> None:
    model, example = built(name)
    layers = hp.find_attention(model, example)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    dense = answer(model, example)
    with hp.mask(model, {layers[0].name: [0]}, layers=layers):
        masked = answer(model, example)
    assert any((m - d).abs().max() > 1e-4 for m, d in zip(masked, dense, strict=True))
    with pytest.raises(hp.HeadPruneError, match=layers[0].name):
        hp.prune(model, {layers[0].name: list(layers[0].units[0])}, example, layers=layers)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_layers_without_attention_are_left_alone() -> None:
    model, example = built("qwen3_next")
    layers = hp.find_attention(model, example)
    assert 0 < len(layers) < model.config.num_hidden_layers


@pytest.mark.parametrize(("name", "kinds"), [
    ("gpt_oss", {"decoder"}), ("deepseek_v3", {"decoder"}), ("deberta", {"encoder"}), ("swinv2", {"encoder"}),
    ("bart", {"encoder", "decoder", "cross"}), ("detr", {"encoder", "cross"}),
])  # fmt: skip
def test_kinds(name: str, kinds: set[str]) -> None:
    model, example = built(name)
    assert {layer.kind for layer in hp.find_attention(model, example)} == kinds


@pytest.mark.parametrize("name", ["inkling2_text", "deepseek_v4", "convbert"])
def test_a_softmax_over_something_else_is_no_attention(name: str) -> None:
    model, example = built(name)
    layers = hp.find_attention(model, example)
    assert {layer.num_heads for layer in layers} <= {2, 4}
    assert all(layer.maskable for layer in layers)


# -- a class that headprune has no rule for ---------------------------------------------------


class EinsumAttention(nn.Module):
    """W_O is a parameter ``[heads, head_dim, width]``."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Parameter(torch.randn(heads, width // heads, width))

    def merge(self, attended: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhtd,hdw->btw", attended, self.out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v))


class TraceableAttention(EinsumAttention):
    def __init__(self, source: EinsumAttention) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.head_dim, self.qkv = source.num_heads, source.head_dim, source.qkv
        self.out = nn.Linear(1, 1, bias=False)
        self.out.weight = nn.Parameter(source.out.detach().flatten(0, 1).T)

    def merge(self, attended: torch.Tensor) -> torch.Tensor:
        return self.out(attended.transpose(1, 2).flatten(2))


def test_a_declared_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(nn.Sequential(EinsumAttention(), nn.LayerNorm(32), EinsumAttention(), nn.Linear(32, 3)))
    x = torch.randn(2, 5, 32)
    assert not any(layer.prunable for layer in hp.find_attention(model, x))
    monkeypatch.setattr("headprune.pruned.standins._RULES", {})
    hp.stand_in(EinsumAttention)(TraceableAttention)
    layers = hp.find_attention(model, x)
    assert [layer.prunable for layer in layers] == [True, True]
    with torch.no_grad(), hp.mask(model, {layers[0].name: [1, 2]}, layers=layers):
        masked = model(x)
    assert type(model[0]) is EinsumAttention
    hp.prune(model, {layers[0].name: [1, 2]}, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked)
    assert model[0].out.weight.shape == (32, 16)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.head = nn.Linear(16, 3)
        nn.init.normal_(self.encoder.self_attn.out_proj.weight, std=1e-3)  # a budget of 5 points can be met

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(1))


def test_what_support_a_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's own code, on a class that the code has never seen."""
    monkeypatch.setattr("headprune.pruned.standins._RULES", {})
    text = (Path(__file__).parents[1] / "docs" / "support-a-model.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    loader, other_loader = ([(torch.randn(100, 5, 16), torch.randint(3, (100,))) for _ in range(2)] for _ in range(2))
    names: dict[str, Any] = {
        "__name__": "yours", "nn": nn, "model": Classifier().eval(), "example": loader[0][0], "loader": loader, "other_loader": other_loader,
        "other_batches": [{"x": x, "labels": y} for x, y in other_loader],
    }  # fmt: skip
    for block in blocks:
        exec(block, names)
    assert names["model"][0].num_heads == 2
