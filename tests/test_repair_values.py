"""Repair with values: what it gives on planted heads, the weights it makes, and modules whose values must stay as they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support import brute
from tests.support.checks import hooks, same, state
from tests.support.plain import HEADS, WIDTH, noise
from tests.support.problems import small
from tests.support.zoo import randomise, text


@torch.no_grad()
def test_a_head_takes_the_values_of_one_that_attends_alike() -> None:
    """Three rounds come close, on examples that it was not fitted to; W_O alone does not."""
    model, _ = small()
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    for p in (attention.self.query, attention.self.key):
        p.weight[8:16], p.bias[8:16] = p.weight[:8], p.bias[:8]
    attention.output.dense.weight[:, :8] = 0  # head 0 attends as head 1 does, and is of no use
    batches, other = [text(20, 7, seed=s) for s in (1, 2, 3)], text(10, 7, seed=9)
    drop, far = {"L0": [1]}, {}
    for values in (False, True):
        mended, done = brute.repaired(model, drop, *batches, ridge=1e-9, values=values)
        assert [facts.values for facts in done.layers.values()] == [values]
        far[values] = float((brute.logits(mended, other) - brute.logits(model, other)).abs().max())
        hp.prune(mended, drop, other)
        assert float((brute.logits(mended, other) - brute.logits(model, other)).abs().max()) == pytest.approx(
            far[values], rel=1e-3
        )
    assert far[True] < 0.03
    assert far[False] > 0.5


def check_values(model: nn.Module, example: Any, ridge: float = 0.01) -> None:
    """Of the first layer: the model's error is as promised, and W_O is the regression on what the new values give."""
    layer = hp.find_attention(model, example)[0]
    drop = {layer.name: list(layer.units[1 % len(layer.units)])}
    mended, done = brute.repaired(model, drop, example, ridge=ridge, mixtures=False)
    assert layer.values
    facts = done.layers[layer.name]
    assert facts.values
    assert facts.ridge == ridge
    before, after = (brute.tokens_of(m, [layer], [example])[layer.name] for m in (model, mended))
    assert before.error(after.y) == pytest.approx(facts.after, rel=1e-5, abs=1e-9)
    _, alone = brute.repaired(model, drop, example, ridge=ridge, mixtures=False, values=False)
    assert facts.before == pytest.approx(alone.layers[layer.name].before, rel=1e-6)
    assert facts.after < alone.layers[layer.name].after
    # W_O, for the inputs that there are now; the pull goes by those that there were.
    kept = brute.columns_of(layer, brute.kept_heads(layer, drop))
    (old, bias), (found, found_bias) = brute.output_of(model, layer), brute.output_of(mended, layer)
    has_bias, start = found_bias is not None, torch.zeros(old.shape[1]).double() if bias is None else bias
    x, share = before.x[:, kept], before.share
    mean = (share * x).sum(0) if has_bias else 0
    variance = float((share * (x - mean) ** 2).sum(0).mean())
    tokens = replace(before, x=after.x[:, kept])
    weight, free = brute.ridge_regression(tokens, old[kept], start, ridge, has_bias, variance)
    torch.testing.assert_close(found[kept], weight, rtol=1e-6, atol=1e-7)
    assert found_bias is None or torch.allclose(found_bias, free, rtol=1e-6, atol=1e-7)
    # Of a fused projection only the values of heads that stay have changed.
    (old, _), (now, _) = (brute.matrix(m, layer.values.module) for m in (model, mended))
    changed = {f for f in range(old.shape[1]) if not torch.equal(old[:, f], now[:, f])}
    assert changed == {f for h in brute.kept_heads(layer, drop) for f in layer.values.features[h]}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha"])
def test_the_model_gives_what_the_fit_promised(name: str) -> None:
    check_values(*brute.model_of(name))


@pytest.mark.parametrize("kv", [1, 4])
def test_values_are_refitted_where_that_is_better_on_examples_held_out(kv: int) -> None:
    """What has one key/value head has no other values to take over."""
    config = tf.LlamaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv, head_dim=4,
        intermediate_size=48, pad_token_id=0,
    )  # fmt: skip
    model, example = randomise(tf.LlamaForCausalLM(config)).double(), text(20, 9)
    _, done = brute.repaired(model, {"L0": [1], "L1": [1]}, example)
    _, alone = brute.repaired(model, {"L0": [1], "L1": [1]}, example, values=False)
    assert [facts.values for facts in done.layers.values()] == [kv == 4] * 2
    for name, facts in alone.layers.items():
        assert kv == 4 or done.layers[name].after == pytest.approx(facts.after)
    assert [t.step for t in done.trials] == ["output projections", "values"][: 1 + (kv == 4)]


def test_an_infinite_ridge_leaves_weights_alone() -> None:
    model, example = brute.model_of("bert")
    mended, done = brute.repaired(model, {"L1": [1]}, example, ridge=float("inf"))
    assert not any(trial.kept for trial in done.trials)
    changed = [n for n, p in mended.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert changed == ["bert.encoder.layer.1.attention.output.dense.weight"]  # the columns of head 1


@pytest.mark.parametrize("ridge", [None, 1e-9])
def test_heads_that_give_nothing_and_layers_without_heads(ridge: float | None) -> None:
    """A head's values are all zero: nothing to attend to but what is made anew. And a layer with a bias at most."""
    model, example = brute.model_of("bert")
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    with torch.no_grad():
        attention.self.value.weight[:8] = 0
        attention.self.value.bias[:8] = 0
        attention.output.dense.weight[:, :8] = 0
    mended, done = brute.repaired(
        model, {"L0": [1], "L1": [0, 1, 2, 3]}, example, ridge=ridge, mixtures=False, answers=False
    )
    assert any(trial.kept for trial in done.trials)
    assert all(p.isfinite().all() for p in mended.parameters())
    layer = hp.find_attention(model, example)[1]
    weight, bias = brute.output_of(mended, layer)
    assert not weight.any()
    tokens = brute.tokens_of(model, [layer], [example])[layer.name]
    torch.testing.assert_close(bias, (tokens.share * tokens.y).sum(0))
    assert not done.layers[layer.name].values


# -- modules -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Ordinary attention with a projection each, and a bias that is not small."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def values(self, x: Tensor) -> Tensor:
        return self.split(self.v, x)

    def forward(self, x: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(self.split(self.q, x), self.split(self.k, x), self.values(x))
        return self.o(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Scaled(Attention):
    """A factor for every head behind the values, of which every token also gets some of the one before."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x) * torch.tensor([0.5, -1.0, 2.0, 3.0]).to(x)[:, None, None]
        return found + 0.5 * F.pad(found, (0, 0, 1, 0))[..., :-1, :]


class Normed(Attention):
    """A norm without weights behind every head's values, which does not care how they are turned."""

    def values(self, x: Tensor) -> Tensor:
        found = super().values(x)
        return found * torch.rsqrt(found.square().mean(-1, keepdim=True) + 1e-6)


class Lengths(Attention):
    """How long the values are also goes past W_O, which does not care how they are turned."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.v(x).square().mean(-1, keepdim=True))  # type: ignore[no-any-return]


class Stretched(Attention):
    """A factor for every feature behind the values."""

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) * torch.linspace(0.5, 2, WIDTH // HEADS).to(x)


class Tied(Attention):
    """Values are keys."""

    def values(self, x: Tensor) -> Tensor:
        return self.split(self.k, x)


class Handed(Attention):
    """Its values are added to an earlier layer's, as in value residual learning (arXiv:2410.17897)."""

    earlier: Tensor

    def values(self, x: Tensor) -> Tensor:
        return super().values(x) + self.earlier


class Stack(nn.Module):
    """Two attentions and a classifier of every token."""

    def __init__(self, first: type[Attention], second: type[Attention] = Attention) -> None:
        super().__init__()
        self.first, self.second, self.head = first(), second(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.second, Handed):
            self.second.earlier = self.first.values(x)
        x = F.layer_norm(x + self.first(x), (WIDTH,))
        return self.head(x + self.second(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Attention, Scaled])
def test_what_is_linear_in_its_values_is_as_promised(kind: type[Attention]) -> None:
    check_values(randomise(Stack(kind)).double(), noise(20, 5, WIDTH).double())


@pytest.mark.parametrize("kind", [Normed, Lengths, Stretched, Tied, Handed])
def test_values_that_are_not_for_w_o_alone_stay(kind: type[Attention]) -> None:
    """Nor those that a later layer reads: W_O's inputs there would change, which nobody has fitted it to."""
    stack = Stack(Attention, Handed) if kind is Handed else Stack(kind)
    model, x = randomise(stack).double(), noise(6, 5, WIDTH).double()
    drop: brute.Drop = {"first": [1], "second": [0]}
    mended, done = brute.repaired(model, drop, x, ridge=0.1)
    alone, _ = brute.repaired(model, drop, x, ridge=0.1, values=False)
    assert hooks(mended) == 0
    assert any(note.startswith("first keeps its old values") for note in done.notes)
    assert [t.step for t in done.trials] == ["output projections", "values"][: 1 + (kind is not Handed)]  # the second's
    assert not done.layers["first"].values
    assert done.layers["first"].after < done.layers["first"].before
    assert same(mended.first, state(alone.first))  # type: ignore[arg-type]
