"""Modules whose values can be refitted, and modules whose values must stay as they are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from tests.support.checks import hooks, same, state
from tests.support.plain import HEADS, WIDTH, noise
from tests.support.repairs import check_promise, refit_of
from tests.support.zoo import randomise, text


class Attention(nn.Module):
    """Ordinary attention with a projection each, and a bias that is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def values(self, x: Tensor) -> Tensor:
        return self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k))
        return self.o(F.scaled_dot_product_attention(q, k, self.values(x)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Squashed(Attention):
    """A nonlinearity behind the values."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x).tanh()


class Normed(Attention):
    """A norm without weights behind every head's values, which does not care how they are turned."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x)
        return found * torch.rsqrt(found.square().mean(-1, keepdim=True) + 1e-6)


class Residual(Attention):
    """The values also go past W_O."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.3 * self.v(x)  # type: ignore[no-any-return]


class Lengths(Attention):
    """How long the values are goes past W_O, which does not care how they are turned."""

    def forward(self, x: Tensor) -> Tensor:
        length = self.v(x).square().mean(-1, keepdim=True)
        return super().forward(x) * (1 + length)  # type: ignore[no-any-return]


class Stretched(Attention):
    """A factor for every feature behind the values."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) * torch.linspace(0.5, 2, WIDTH // HEADS).to(x)


class Tied(Attention):
    """Values are keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.v))
        return self.o(F.scaled_dot_product_attention(q, v, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Two attentions and a classifier of every token."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.first, self.second, self.head = kind(), Attention(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.first(x), (WIDTH,))
        return self.head(x + self.second(x))  # type: ignore[no-any-return]


class Handed(Attention):
    """Its values are added to an earlier layer's, as in value residual learning (arXiv:2410.17897)."""

    earlier: Tensor

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) + self.earlier


class Later(Stack):
    """The second attention reads the first one's values as well."""

    def __init__(self) -> None:
        super().__init__(Attention)
        self.second = Handed()

    def forward(self, x: Tensor) -> Tensor:
        self.second.earlier = self.first.values(x)
        return super().forward(x)


def test_plain_modules_have_their_values_refitted() -> None:
    """What the others are compared with."""
    model, x = randomise(Stack(Attention)).double(), noise(6, 5, WIDTH).double()
    refit = refit_of(model, hp.find_attention(model, x), [x], ridge=0.1)
    weights = refit.fitted({"first": [1], "second": [0]})
    assert set(weights.by_module) == {"first.o", "first.v", "second.o", "second.v"}
    assert refit.reference.notes == ()


class Scaled(Attention):
    """A factor for every head behind the values, of which every token also gets some of the one before."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x) * torch.tensor([0.5, -1.0, 2.0, 3.0]).to(x)[:, None, None]
        return found + 0.5 * F.pad(found, (0, 0, 1, 0))[..., :-1, :]


@pytest.mark.parametrize("kind", [Attention, Scaled])
def test_what_is_linear_in_its_values_is_as_promised(kind: type[Attention]) -> None:
    model, x = randomise(Stack(kind)).double(), noise(20, 5, WIDTH).double()
    refit = refit_of(model, hp.find_attention(model, x), [x], ridge=0.01)
    weights = refit.fitted({"first": [1]})
    assert list(weights.by_module) == ["first.o", "first.v"]
    check_promise(refit, weights, x, None)


@pytest.mark.parametrize("kind", [Squashed, Normed, Residual, Lengths, Stretched, Tied])
def test_values_that_are_not_for_w_o_alone_stay(kind: type[Attention]) -> None:
    model, x = randomise(Stack(kind)).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    assert [a.name for a in layers] == ["first", "second"]
    before = state(model)
    refit = refit_of(model, layers, [x], ridge=0.1)
    drop: Heads = {"first": [1], "second": [0]}
    weights = refit.fitted(drop)
    assert same(model, before)
    assert hooks(model) == 0
    assert set(weights.by_module) == {"first.o", "second.o", "second.v"}
    assert weights.facts["first"].after < weights.facts["first"].before
    assert not weights.facts["first"].values
    alone = refit_of(model, layers, [x], ridge=0.1, values=False).fitted(drop)
    torch.testing.assert_close(weights.by_module["first.o"][0], alone.by_module["first.o"][0])
    (note,) = refit.reference.notes
    assert note.startswith("first keeps its old values")


def test_values_that_a_later_layer_reads_stay() -> None:
    """W_O's inputs there would change, which nobody has fitted it to."""
    model, x = randomise(Later()).double(), noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = refit_of(model, layers, [x], ridge=0.1)
    weights = refit.fitted({"first": [1]})
    assert list(weights.by_module) == ["first.o"]
    assert any("first keeps its old values" in n for n in refit.reference.notes)


def gemma(name: str) -> nn.Module:
    """Gemmas that norm their values."""
    common: dict[str, Any] = {
        "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 32, "hidden_size_per_layer_input": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8,
        "pad_token_id": 0, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    more: dict[str, dict[str, Any]] = {
        "Gemma3n": {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 2},
        "Gemma4": {"global_head_dim": 8},
    }
    if not hasattr(tf, f"{name}TextConfig"):
        pytest.skip("transformers is too old")
    config = getattr(tf, f"{name}TextConfig")(**common, **more[name])
    return randomise(getattr(tf, f"{name}ForCausalLM")(config)).double()


@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_values_behind_a_norm_stay(name: str) -> None:
    model, example = gemma(name), text()
    layers = hp.find_attention(model, example)
    refit = refit_of(model, layers, [example], ridge=0.1)
    weights = refit.fitted({layers[0].name: list(layers[0].units[0])})
    assert list(weights.by_module) == [refit.reference.projections[0].name]
    assert len(refit.reference.notes) == 2
