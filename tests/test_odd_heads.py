"""Heads that modules make in ways of their own, against brute force: a head's result zeroed before W_O."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headprune as hp
from tests.support.families import built
from tests.support.plain import HEADS, WIDTH, Attention, model_of, noise
from tests.support.zoo import randomise

SIZE = WIDTH // HEADS


class Differential(Attention):
    """Each head is the difference of two fused attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        first, second = (
            F.scaled_dot_product_attention(*halves, v) for halves in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        return self.o(self.joined(first - self.share * second))


class Talking(Attention):
    """Talking heads: each head's weights are a mixture of all heads' probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HEADS, HEADS, bias=False)

    def mixed(self, weights: Tensor) -> Tensor:
        return self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(self.joined(self.mixed((q @ k.mT / 3).softmax(-1)) @ v))


class TalkingByConvolution(Talking):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(HEADS, HEADS, 1)

    def mixed(self, weights: Tensor) -> Tensor:
        return self.mix(weights)


class Tables(Attention):
    """Projections are parameters ``[heads, width, features]``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(HEADS, WIDTH, SIZE) for _ in range(3))
        del self.qkv

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btw,hwd->bhtd", x, weight) for weight in self.weights)
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v)))


class QueryGroups(Attention):
    """As LitGPT: queries, keys and values of a group side by side, and ``n_query_groups`` groups."""

    groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_query_groups = HEADS, self.groups
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.groups) * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        each = self.n_head // self.n_query_groups
        qkv = self.qkv(x).view(*x.shape[:2], self.n_query_groups, each + 2, SIZE).permute(0, 2, 3, 1, 4)
        q, k, v = (t.flatten(1, 2) for t in qkv.split((each, 1, 1), 2))
        k, v = (t.repeat_interleave(each, 1) for t in (k, v))
        return self.o(self.joined(F.scaled_dot_product_attention(q, k, v)))


class QueryGroupsOfOne(QueryGroups):
    groups = HEADS


class KeyValueGroups(Attention):
    """As "Build a Large Language Model (From Scratch)": ``num_kv_groups`` counts the groups, ``group_size`` a group's heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_groups, self.group_size = 2, HEADS // 2
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE), nn.Linear(WIDTH, 2 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.num_heads, SIZE).transpose(1, 2)
        k, v = (p(x).view(*x.shape[:2], self.num_kv_groups, SIZE).transpose(1, 2) for p in (self.k, self.v))
        k, v = (t.repeat_interleave(self.group_size, 1) for t in (k, v))
        return self.o(self.joined((q @ k.mT / 3).softmax(-1) @ v))


class NormOfEach(Attention):
    """A group norm over single heads before W_O, as in RetNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def joined(self, result: Tensor) -> Tensor:
        normed = self.norm(result.transpose(1, 2).flatten(0, 1).flatten(1))
        return super().joined(normed.view(len(result), -1, *result.shape[1::2]).transpose(1, 2))


ALL = [Differential, Talking, TalkingByConvolution, Tables, QueryGroups, QueryGroupsOfOne, KeyValueGroups, NormOfEach]


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_each_head_is_found_once_and_masked_alone(kind: type[Attention]) -> None:
    model, x = model_of(kind).eval(), noise(2, 5, WIDTH)
    layers = hp.find_attention(model, x)
    groups = getattr(model[0], "n_query_groups", getattr(model[0], "num_kv_groups", HEADS))
    assert [(a.name, a.num_heads, a.num_kv_heads, a.head_dim) for a in layers] == [
        ("0", HEADS, groups, SIZE), ("2", HEADS, groups, SIZE),
    ]  # fmt: skip
    for layer in layers:
        for head in range(HEADS):
            brute = copy.deepcopy(model)
            brute.get_submodule(layer.name).kill = head
            with hp.mask(model, {layer.name: [head]}, layers=layers):
                torch.testing.assert_close(model(x), brute(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in ALL if not issubclass(kind, Talking)])
@torch.no_grad()
def test_such_heads_are_pruned(kind: type[Attention]) -> None:
    model, x, other = model_of(kind).eval(), noise(2, 5, WIDTH), noise(3, 9, WIDTH)
    layers = hp.find_attention(model, x)
    drop = {"0": list(layers[0].units[0]), "2": [h for unit in layers[1].units[1:] for h in unit]}
    with hp.mask(model, drop, layers=layers):
        masked = model(other)
    hp.prune(model, drop, x)
    torch.testing.assert_close(model(other), masked, rtol=1e-4, atol=1e-4)
    assert [a.num_heads for a in hp.find_attention(model, x)] == [HEADS - len(gone) for gone in drop.values()]


@pytest.mark.parametrize("kind", [Talking, TalkingByConvolution])
def test_talking_heads_are_not_pruned(kind: type[Attention]) -> None:
    model, x = model_of(kind), noise(2, 5, WIDTH)
    with pytest.raises(hp.HeadPruneError, match="something mixes them"):
        hp.prune(model, {"0": [1]}, x)


class Biased(Attention):
    """A bias of each head by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(15, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        return self.o(
            self.attend(x, attn_mask=self.table((place - place[:, None]).clamp(-7, 7) + 7).permute(2, 0, 1)[None])
        )


@torch.no_grad()
def test_a_layer_that_runs_twice_has_its_tables_cut() -> None:
    """As ALBERT shares its layer: the table that both calls read is one layer's own."""
    attention = Biased()
    model, x = randomise(nn.Sequential(attention, nn.LayerNorm(WIDTH), attention)).eval(), noise(2, 5, WIDTH)
    with hp.mask(model, {"0": [1, 2]}, x):
        masked = model(noise(3, 9, WIDTH))
    hp.prune(model, {"0": [1, 2]}, x)
    assert attention.table.weight.shape == (15, 2)
    torch.testing.assert_close(model(noise(3, 9, WIDTH)), masked, rtol=1e-4, atol=1e-4)


def test_a_second_stream_makes_no_key_value_groups() -> None:
    """ProphetNet's attention computes two streams with the same heads: one layer, of as many key/value heads."""
    model, example = built("prophetnet")
    layers = [a for a in hp.find_attention(model, example) if a.name.startswith("decoder")]
    assert [(a.name.rpartition(".")[2], a.num_heads, a.num_kv_heads) for a in layers] == 2 * [
        ("self_attn", 4, 4),
        ("cross_attn", 4, 4),
    ]


class Valued(Attention):
    """Values of a number of key/value heads, perhaps through a convolution; what is attended perhaps times a gate."""

    def __init__(self, kv: int, groups: int, gate: int, fused: bool) -> None:
        super().__init__()
        self.kv, self.fused, self.width = kv, fused, WIDTH // HEADS
        self.v = nn.Linear(WIDTH, kv * self.width)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups) if groups else None
        self.gate = nn.Linear(WIDTH, gate) if gate else None

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)[:2])
        v = self.v(x) if self.conv is None else self.conv(self.v(x).mT).mT
        v = v.unflatten(-1, (-1, self.width)).transpose(1, 2).expand(-1, self.num_heads, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v
        if self.gate is not None:
            gate = self.gate(x).sigmoid()
            out = out * gate.unflatten(-1, (-1, 1) if gate.shape[-1] == HEADS else (1, -1)).transpose(1, 2)
        return self.joined(out)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("kv", "groups", "gate"),
    [(4, 0, 1), (4, 0, 8), (4, 0, 4), (1, 0, 0), (1, 0, 1), (1, 0, 8), (1, 0, 4), (4, 1, 0), (4, 2, 0), (4, 4, 8)],
)
def test_key_value_heads_are_counted_by_their_values(kv: int, groups: int, gate: int, fused: bool) -> None:
    """A gate over all heads was taken for values, and a convolution for one key/value head: multi-query, where four were."""
    model, x = randomise(Valued(kv, groups, gate, fused)), noise(2, 5, WIDTH)
    (layer,) = hp.find_attention(model, x)
    assert layer.num_kv_heads == kv
    with hp.mask(model, {"": list(layer.units[0])}, layers=[layer]):
        expected = model(x)
    killed = copy.deepcopy(model)
    killed.o.weight.data[:, [f for h in layer.units[0] for f in range(8 * h, 8 * h + 8)]] = 0
    torch.testing.assert_close(killed(x), expected)
