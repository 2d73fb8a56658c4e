"""What the trace says of single models beside the table of the conformance suite, and what it refuses, in which words."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support import odd
from tests.support.cases import answer, made, without
from tests.support.errors import refuses
from tests.support.plain import HEADS, SIZE, WIDTH, Attention, model_of, noise
from tests.support.zoo import TorchEncoder, bert, gpt2, randomise

X = noise(2, 5, WIDTH)


@pytest.mark.parametrize(("kind", "reason"), [
    (odd.OwnWeight, "is not called as a module"), (odd.OutputTwice, "is also called on other data"),
    (odd.TwoOutputs, "reach 0.o2 past the output projection 0.o"), (odd.OutputEach, "two output projections, 0.o and 0.o2"),
    (odd.Hidden, "hides its heads; declare a stand-in"), (odd.Summed, "mixed before they reach 1.qkv"),
])  # fmt: skip
def test_heads_that_cannot_be_removed(kind: type[Attention], reason: str) -> None:
    model = nn.Sequential(randomise(kind()), Attention())
    first, second = hp.find_attention(model, X)
    assert reason in first.reason
    assert [(a.num_heads, a.prunable) for a in (first, second)] == [(HEADS, False), (HEADS, True)]
    with pytest.raises(hp.HeadPruneError, match="Layer 0 cannot be masked"), hp.mask(model, {"0": [1]}, X):
        pass


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kv", "groups", "gate"), [
    (4, 0, 1), (4, 0, 8), (4, 0, 4), (1, 0, 0), (1, 0, 1), (1, 0, 8), (1, 0, 4), (4, 1, 0), (4, 2, 0), (4, 4, 8),
])  # fmt: skip
def test_key_value_heads_are_counted_by_their_values(kv: int, groups: int, gate: int, fused: bool) -> None:
    """A gate over all heads was taken for values, and a convolution for one key/value head: multi-query, where four were."""
    model = nn.Sequential(randomise(odd.Valued(kv, groups, gate, fused)))
    (layer,) = hp.find_attention(model, X)
    assert layer.num_kv_heads == kv
    drop = {"0": list(layer.units[0])}
    with hp.mask(model, drop, layers=[layer]):
        torch.testing.assert_close(answer(model, X), answer(without(model, [layer], drop), X))


class Both(Attention):
    """Two attentions, each with a W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        del self.qkv, self.o

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):  # not called as modules: all happens in this one
            x = part.o(part.attend(x))
        return x


class Head(nn.Module):
    """A head is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.query(x) @ self.key(x).mT / 8**0.5).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def test_several_attentions_in_a_module_and_a_module_for_each_head() -> None:
    layers = hp.find_attention(randomise(Both()), X)
    assert [a.output_projection.module for a in layers] == ["first.o", "second.o"]
    assert "several attentions" in layers[1].reason
    model = randomise(nn.Sequential(Heads(), nn.LayerNorm(WIDTH), Attention()))
    layers = hp.find_attention(model, X)
    assert [(a.name, a.num_heads, a.prunable) for a in layers] == [
        *((f"0.heads.{i}", 1, False) for i in range(HEADS)), ("2", HEADS, True),
    ]  # fmt: skip
    refuses(r"0\.heads\.0 cannot be pruned: it is a head by itself", hp.prune, model, {"0.heads.0": [0]}, X)


class Rectified(Attention):
    """One head behind a ReLU, which leaves every example other features."""

    def attend(self, x: Tensor, **mask: Any) -> Tensor:
        q, k, v = self.qkv(x).relu().chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Listed(nn.Module):
    """A list of layers."""

    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(("kind", "heads", "reason"), [
    (odd.Pooling, HEADS, r"its scores have shape \(2, 4, 5\), without a dimension of queries"),  # was "a head by itself in a list"
    (Rectified, 0, r"its query has shape \(2, 5, 32\), in which no heads can be told apart"),  # two examples were two heads
])  # fmt: skip
def test_heads_that_cannot_be_told_apart(kind: type[Attention], heads: int, reason: str) -> None:
    for layer in hp.find_attention(randomise(Listed(kind)), X):
        assert (layer.num_heads, layer.maskable) == (heads, False)
        assert re.fullmatch(reason, layer.reason)


class Scaled(Attention):
    """A scale for each head."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        return q * self.scale, k, v


def test_a_model_that_is_the_attention_module_itself() -> None:
    """Its name is empty: its table was missed, and messages named no layer."""
    model = randomise(Scaled())
    (layer,) = hp.find_attention(model, X)
    assert [table.name for table in layer.tables] == ["scale"]
    with hp.mask(model, {"": [1]}, layers=[layer]):
        masked = answer(model, X)
    hp.prune(model, {"": [1]}, X)
    torch.testing.assert_close(answer(model, X), masked)
    refuses("Layer L0 has no head 9", hp.prune, model, {"": [9]}, X)
    refuses("Layer L0 cannot be pruned: its output projection", hp.prune, randomise(odd.OwnWeight()), {"": [1]}, X)


class ByKeyword(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(bias=self.bias, weight=self.weight, input=x)


class ConvolvedByKeyword(nn.Conv1d):
    def __init__(self, *size: int) -> None:
        super().__init__(*size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(bias=self.bias, weight=self.weight, input=x.mT).mT


@pytest.mark.parametrize("kind", [ByKeyword, ConvolvedByKeyword])
def test_linear_layers_called_by_keywords(kind: type[nn.Module]) -> None:
    class Own(Attention):
        def build(self) -> None:
            self.qkv, self.o = kind(WIDTH, 3 * WIDTH), kind(WIDTH, WIDTH)

    (layer,) = hp.find_attention(nn.Sequential(randomise(Own())), X)
    assert (layer.prunable, layer.head_dim) == (True, SIZE)
    assert [part.module for part in layer.projections] == ["0.qkv"]


@pytest.mark.parametrize("blocked", [-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf"), -1.0])
def test_a_causal_mask_of_any_large_number(blocked: float) -> None:
    class Causal(Attention):
        def forward(self, x: Tensor) -> Tensor:
            later = torch.full((x.shape[1], x.shape[1]), blocked).triu(1)
            return self.o(self.attend(x, attn_mask=later))

    (layer,) = hp.find_attention(nn.Sequential(Causal()), X)
    assert layer.kind == ("encoder" if blocked == -1 else "decoder")


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gate(x).softmax(-1))


@pytest.mark.parametrize(("model", "example", "message"), [
    (Router(), X, "no softmax attention"), (nn.Linear(WIDTH, 4), X, "no softmax attention"),
    (nn.Sequential(Attention(), torch.jit.script(nn.LayerNorm(WIDTH))), X, "1 .RecursiveScriptModule. is TorchScript"),
    (bert()[0], {"pixel_values": X}, "does not run on the example"), (Attention(), X[..., :7], "does not run on the example"),
    (nn.Linear(2, 2), None, "not known what Linear takes"), ("gpt2", X, "not a torch.nn.Module"),
])  # fmt: skip
def test_what_cannot_be_traced(model: Any, example: Any, message: str) -> None:
    refuses(message, hp.find_attention, model, example)


def test_experts_of_a_mixture_are_no_heads() -> None:
    """JetMoE's queries come from experts' matrices in one parameter; from the second layer on tokens were taken for heads."""
    model, example = made("jetmoe")
    layers = hp.find_attention(model, example)
    heads = model.config.num_attention_heads
    assert [(a.num_heads, a.num_kv_heads, a.maskable) for a in layers] == [(heads, 2, False)] * 2
    assert all(a.reason.endswith(f"{a.name}.experts.output_linear") for a in layers)


def test_a_second_stream_makes_no_key_value_groups() -> None:
    """ProphetNet's attention computes two streams with the same heads: one layer, of as many key/value heads."""
    layers = [a for a in hp.find_attention(*made("prophetnet")) if a.name.startswith("decoder")]
    assert [(a.num_heads, a.num_kv_heads) for a in layers] == [(4, 4)] * 4


def test_one_token_cannot_tell_a_direction() -> None:
    """A stub in place of a decoder's attention would break its cache, and one token looks like an encoder's."""
    one = {"input_ids": torch.tensor([[5], [6]])}
    assert {layer.bypass for layer in hp.find_attention(gpt2()[0], one)} == {"ghost"}


class Remembering(Attention):
    """Writes into a buffer, replaces one, appends to a list, and notes its output."""

    def build(self) -> None:
        self.cache, self.last, self.maps = nn.Buffer(torch.zeros(4, HEADS, 16, 8)), nn.Buffer(torch.zeros(1)), []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.cache[: len(x), :, : x.shape[1]] = k
        self.last = k.mean(2)
        self.maps.append(q)
        heads = nn.functional.scaled_dot_product_attention(q, self.cache[: len(x), :, : x.shape[1]], v)
        self.noted = self.o(self.joined(heads))
        return self.noted


def test_a_trace_leaves_buffers_lists_and_attributes_alone() -> None:
    model = model_of(Remembering)
    held = [model[0].cache, model[0].last]
    assert len(hp.find_attention(model, X)) == 2
    assert [id(model[0].cache), id(model[0].last)] == [id(t) for t in held]
    assert not any(t.requires_grad or t.any() for t in held)
    assert model[0].maps == []
    assert not hasattr(model[0], "noted")
    copy.deepcopy(model)


def test_a_model_that_reads_its_own_hidden_states_answers_as_before() -> None:
    """transformers puts its capturing hooks up on the first run; taken back by half, they are put up twice."""

    class Penultimate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.out = bert()[0].bert, nn.Linear(32, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            states = self.bert(input_ids, attention_mask, output_hidden_states=True).hidden_states
            assert len(states) == 1 + len(self.bert.encoder.layer)
            return self.out(states[-2].mean(1))

    model, example = Penultimate().eval(), bert()[1]
    layers = hp.find_attention(model, example)  # its first run
    before = model(**example)
    hp.find_attention(model, example)
    assert torch.equal(model(**example), before)
    hp.prune(model, {layers[0].name: [1]}, example)
    assert model(**example).shape == before.shape


def test_inference_mode() -> None:
    """Weights made in it are refused by autograd, so headprune says so."""
    layers, batches = hp.find_attention(model_of(Attention), X), [(X, torch.zeros(2))]
    with torch.inference_mode():
        made_inside = model_of(Attention)
    for inside in (False, True):
        with torch.inference_mode(inside):
            for attempt in (
                lambda: hp.find_attention(made_inside, X),
                lambda: hp.prune(made_inside, {"0": [1]}, X),
                lambda: hp.score(made_inside, batches, loss_fn=lambda out, _: out.sum((1, 2)), layers=layers),
                lambda: hp.repair(made_inside, {"0": [1]}, batches, layers=layers),
            ):
                refuses("made in torch", attempt)
    hp.prune(made_inside, {"0": [1]}, X, layers=layers)  # which takes no derivatives
    with torch.no_grad():
        assert made_inside(X).isfinite().all()


@pytest.mark.parametrize("large", [100, 10**6])
@pytest.mark.parametrize("name", ["falcon", "bert"])
def test_large_weights_on_the_meta_device(name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the place of a meta weight is known by its memory: its transpose is another tensor."""
    monkeypatch.setattr("headprune.trace._LARGE", large)
    model, example = made(name)
    assert hp.find_attention(copy.deepcopy(model).to("meta"), example) == hp.find_attention(model, example)


@pytest.mark.parametrize("multi_query", [True, False])
def test_a_linear_layer_that_adds_its_bias_by_itself(multi_query: bool) -> None:
    """Falcon's: its bias was taken for a table of the heads, too, and cut twice. Falcon-RW was refused after the whole search."""
    config = tf.FalconConfig(
        vocab_size=60, hidden_size=40, num_hidden_layers=2, num_attention_heads=5, bias=True, alibi=True, multi_query=multi_query,
        new_decoder_architecture=False, parallel_attn=False,
    )  # fmt: skip
    model = randomise(tf.FalconForCausalLM(config))
    example = {"input_ids": torch.arange(5, 19).reshape(2, 7)}
    first, second = hp.find_attention(model, example)
    assert not first.tables
    dense = copy.deepcopy(model)
    dense.transformer.h[1].self_attention.dense.weight.data[:, [*range(8, 16), *range(24, 32)]] = 0
    hp.prune(model, {second.name: [1, 3]}, example)
    with torch.no_grad():
        torch.testing.assert_close(model(**example).logits, dense(**example).logits)


def test_a_subclass_of_torchs_attention_is_seen() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = TorchEncoder()
    model.encoder.layers[0].self_attn = Own(32, 4, batch_first=True)
    assert [a.prunable for a in hp.find_attention(randomise(model), X)] == [True, True]


@pytest.mark.parametrize("clamped", [1, 4])
def test_scales_of_heads_at_their_clamp(clamped: int) -> None:
    """Their gradient is zero, so Swin V2's were not found once one had reached its clamp: refused after the whole search."""
    config = tf.Swinv2Config(
        image_size=8, patch_size=2, embed_dim=16, depths=[1], num_heads=[4], window_size=4, num_labels=2
    )
    model, example = randomise(tf.Swinv2ForImageClassification(config)), {"pixel_values": noise(2, 3, 8, 8)}
    attention = model.swinv2.encoder.layers[0].blocks[0].attention
    attention.self.logit_scale.data.fill_(2.0)[:clamped] = 5.0
    (layer,) = hp.find_attention(model, example)
    dense = copy.deepcopy(model)
    dense.swinv2.encoder.layers[0].blocks[0].attention.output.dense.weight.data[:, [*range(4), *range(8, 12)]] = 0
    hp.prune(model, {layer.name: [0, 2]}, example)
    assert attention.self.logit_scale.shape == (2, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(model(**example).logits, dense(**example).logits)


def test_what_support_a_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's own code: a declared stand-in, on a class that headprune has never seen."""
    monkeypatch.setattr("headprune.pruned.modules._RULES", {})
    text = (Path(__file__).parents[1] / "docs" / "support-a-model.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    loader, other_loader = ([(torch.randn(100, 5, 32), torch.randint(3, (100,))) for _ in range(2)] for _ in range(2))
    names: dict[str, Any] = {
        "__name__": "yours", "nn": nn, "model": TorchEncoder().eval(), "example": loader[0][0], "loader": loader, "other_loader": other_loader,
        "other_batches": [{"x": x, "labels": y} for x, y in other_loader],
    }  # fmt: skip
    for block in blocks:
        exec(block, names)
    model, x = names["model"], names["x"]
    assert model[0].num_heads == 2
    with torch.no_grad(), hp.mask(model, {"2": [1]}, x):
        assert type(model[2]) is not names["EinsumAttention"]
    assert type(model[2]) is names["EinsumAttention"]
