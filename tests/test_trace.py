"""Tracing finds the right heads, and leaves the model as it was."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.checks import hooks
from tests.support.families import built
from tests.support.plain import HEADS, WIDTH, Attention, model_of, noise
from tests.support.zoo import CASES, ZOO, TorchEncoder, bert, gpt2, llama, randomise, t5, text


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_architecture_is_found(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    layers = hp.find_attention(model, example)
    assert all(layer.prunable for layer in layers), [layer.reason for layer in layers]
    assert [layer.index for layer in layers] == list(range(len(layers)))
    expected = {"llama": (6, 3, 8), "qwen3": (4, 2, 16)}.get(name, (4, 4, 8))
    assert {(a.num_heads, a.num_kv_heads, a.head_dim) for a in layers} == {expected}
    assert hooks(model) == 0


@pytest.mark.parametrize(("name", "kinds"), [
    ("bert", ["encoder"] * 3), ("gpt2", ["decoder"] * 3), ("llama", ["decoder"] * 3),
    ("t5", ["encoder"] * 2 + ["decoder", "cross"] * 2), ("torch_transformer", ["encoder"] * 2 + ["encoder", "cross"] * 2),
])  # fmt: skip
def test_kinds(name: str, kinds: list[str]) -> None:
    # nn.Transformer without a target mask really is bidirectional in its decoder.
    model, example = ZOO[name]()
    assert [layer.kind for layer in hp.find_attention(model, example)] == kinds


def test_rows_of_separate_projections() -> None:
    model, example = bert()
    layer = hp.find_attention(model, example)[1]
    rows = tuple(tuple(range(8 * h, 8 * h + 8)) for h in range(4))
    assert layer.name == "bert.encoder.layer.1.attention.self"
    assert {p.module.rsplit(".", 1)[1]: p.features for p in layer.projections} == {
        "query": rows, "key": rows, "value": rows,
    }  # fmt: skip
    assert layer.output_projection is not None
    assert layer.output_projection.features == rows


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_a_fused_projection(attention: str) -> None:
    model, example = gpt2(attention)
    (qkv,) = hp.find_attention(model, example)[0].projections
    assert qkv.module == "transformer.h.0.attn.c_attn"
    for h, features in enumerate(qkv.features):
        assert features == tuple(i + 32 * part for part in range(3) for i in range(8 * h, 8 * h + 8))


def test_groups_share_rows() -> None:
    model, example = llama()
    layer = hp.find_attention(model, example)[0]
    assert layer.units == ((0, 1), (2, 3), (4, 5))
    key = next(p for p in layer.projections if p.module.endswith("k_proj"))
    assert [f[0] for f in key.features] == [0, 0, 8, 8, 16, 16]


def test_shared_module_is_one_layer() -> None:
    config = tf.AlbertConfig(
        vocab_size=100,
        embedding_size=16,
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=3,
        intermediate_size=48,
    )
    model = randomise(tf.AlbertForSequenceClassification(config))
    (layer,) = hp.find_attention(model, text())
    assert layer.num_heads == 4


def test_norm_over_all_heads_is_kept_whole() -> None:
    config = tf.Olmo2Config(
        vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, pad_token_id=0
    )
    model = randomise(tf.Olmo2ForCausalLM(config))
    layers = hp.find_attention(model, text())
    assert {s.module.rpartition(".")[2] for s in layers[0].selections} == {"q_norm", "k_norm"}
    hp.prune(model, {layers[0].name: [1, 2]}, text())
    again = hp.find_attention(model, text())
    assert [layer.num_heads for layer in again] == [2, 4]
    hp.prune(model, {again[0].name: [1], again[1].name: [0]}, text())
    assert model.model.layers[0].self_attn.q_norm.weight.numel() == 32
    assert model.model.layers[0].self_attn.v_proj.weight.shape == (8, 32)


def test_modes_weights_and_gradients_are_left_alone() -> None:
    model, example = t5()
    model.train()
    model.encoder.block[0].eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    hp.find_attention(model, example)
    assert model.training
    assert not model.encoder.block[0].training
    assert all(torch.equal(p, before[n]) and p.grad is None and p.requires_grad for n, p in model.named_parameters())


def test_stand_ins_do_not_stay() -> None:
    model = TorchEncoder()
    hp.find_attention(model, (torch.randn(2, 5, 32),))
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention


def test_no_attention() -> None:
    with pytest.raises(hp.HeadPruneError, match="no softmax attention"):
        hp.find_attention(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))


def test_a_router_is_no_attention() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.out = nn.Linear(8, 4), nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.gate(x).softmax(-1))

    with pytest.raises(hp.HeadPruneError, match="no softmax attention"):
        hp.find_attention(Router(), torch.randn(2, 3, 8))


def test_wrong_example() -> None:
    model, _ = bert()
    with pytest.raises(hp.HeadPruneError, match="does not run on the example"):
        hp.find_attention(model, {"pixel_values": torch.randn(1, 3, 8, 8)})
    assert hooks(model) == 0


def test_layer_survives_json() -> None:
    model, example = llama()
    for layer in hp.find_attention(model, example):
        assert hp.AttentionLayer.from_json(layer.to_json()) == layer


def test_one_token_cannot_tell_a_direction() -> None:
    """A stub in place of a decoder's attention would break its cache, and one token looks like an encoder's."""
    model, _ = gpt2()
    one = {"input_ids": torch.tensor([[5], [6]])}
    assert {layer.bypass for layer in hp.find_attention(model, one)} == {"ghost"}


def test_a_result_with_two_output_projections() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({n: nn.Linear(16, 16) for n in "qkv"})
            self.o1, self.o2 = nn.Linear(16, 16), nn.Linear(16, 16)

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (self.attention[n](x).unflatten(-1, (4, 4)).transpose(1, 2) for n in "qkv")
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o1(self.attend(x)) + self.o2(self.attend(x))

    model = Two()
    (layer,) = hp.find_attention(model, torch.randn(2, 3, 16))
    assert not layer.prunable
    assert not layer.maskable
    assert "two output projections" in layer.reason


class Bare(nn.Module):
    """Attention without W_O."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = 4, 16
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("after", [0, 1])
def test_a_linear_that_reads_the_residual_stream_is_no_output_projection(after: int) -> None:
    """The heads go on past it: zeros at its input would not remove them, and would remove what was there before."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = Bare(), nn.Linear(16, 16)
            self.head = nn.ModuleList(nn.Linear(16, 3) for _ in range(after))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(x)
            x = x + self.mlp(x).relu()
            return self.head[0](x) if after else x

    model, x = randomise(Residual()), torch.randn(2, 5, 16)
    (layer,) = hp.find_attention(model, x)
    assert layer.concatenates
    with torch.no_grad(), hp.mask(model, {layer.name: [1, 2]}, layers=[layer]):
        masked = model(x)
    brute = copy.deepcopy(model)
    with torch.no_grad():
        brute.attention.qkv.weight[36:44] = 0  # the values of heads 1 and 2
        brute.attention.qkv.bias[36:44] = 0
        torch.testing.assert_close(masked, brute(x))
    hp.prune(model, {layer.name: [1, 2]}, x, layers=[layer])
    with torch.no_grad():
        torch.testing.assert_close(model(x), masked)


def test_a_result_that_goes_two_ways() -> None:
    class Ways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o1, self.o2 = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.o1(attended) + self.o2(attended)

    (layer,) = hp.find_attention(Ways(), torch.randn(2, 3, 16))
    assert not layer.maskable
    assert "reach o2 past the output projection o1" in layer.reason


def test_two_attentions_in_one_module_are_both_told() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.ModuleDict({n: nn.Linear(16, 16) for n in ("q1", "k1", "v1", "o1", "q2", "k2", "v2", "o2")})

        def attend(self, x: torch.Tensor, n: str) -> torch.Tensor:
            q, k, v = (self.p[c + n](x).unflatten(-1, (4, 4)).transpose(1, 2) for c in "qkv")
            return self.p["o" + n](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attend(x + self.attend(x, "1"), "2")

    layers = hp.find_attention(Both(), torch.randn(2, 3, 16))
    assert [layer.output_projection.module for layer in layers] == ["p.o1", "p.o2"]
    assert "several attentions" in layers[1].reason


def test_interleaved_groups() -> None:
    class Interleaved(nn.Module):
        """Keys repeated as (0, 1, 0, 1), not (0, 0, 1, 1)."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2).repeat(1, 2, 1, 1) for p in (self.k, self.v))
            return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = nn.Sequential(Interleaved(), nn.Linear(16, 4))
    x = torch.randn(2, 5, 16)
    (layer,) = hp.find_attention(model, x)
    assert layer.units == ((0, 2), (1, 3))
    hp.prune(model, {"0": [0, 2]}, x)


def test_a_transposed_weight_is_a_linear_layer() -> None:
    """Falcon multiplies by ``weight.T`` instead of calling F.linear."""
    config = tf.FalconConfig(
        vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, new_decoder_architecture=False,
        multi_query=True, parallel_attn=True,
    )  # fmt: skip
    layers = hp.find_attention(randomise(tf.FalconForCausalLM(config)), text())
    assert [layer.output_projection.module for layer in layers] == [
        f"transformer.h.{i}.self_attention.dense" for i in range(2)
    ]


@pytest.mark.parametrize("large", [100, 10**6])
@pytest.mark.parametrize("heads", [{"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_a_transposed_weight_on_the_meta_device(
    heads: dict[str, Any], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes the place of a meta weight is known by its memory too: its transpose is another tensor."""
    monkeypatch.setattr("headprune.trace.meta._LARGE", large)
    config = tf.FalconConfig(vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, **heads)
    with torch.device("meta"):
        model = tf.FalconForCausalLM(config)
    assert hp.find_attention(model, text()) == hp.find_attention(randomise(tf.FalconForCausalLM(config)), text())


def test_a_ghost_is_no_head() -> None:
    model, example = gpt2()
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0, 1, 2, 3]}, example)
    first, *rest = hp.find_attention(model, example)
    assert not first.prunable
    assert not first.maskable
    assert "zero output" in first.reason
    assert sum(layer.num_heads for layer in rest) == 8


def test_attributes_do_not_keep_the_trace() -> None:
    class Noting(TorchEncoder):
        def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
            self.last = super().forward(x, padding)
            return self.last

    model = Noting()
    hp.find_attention(model, torch.randn(2, 5, 32))
    assert not hasattr(model, "last")


def test_a_model_that_reads_its_own_hidden_states_answers_as_before() -> None:
    """transformers puts its capturing hooks up on the first run; taken back by half, they are put up twice."""

    class Penultimate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.out = ZOO["bert"]()[0].bert, nn.Linear(32, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            states = self.bert(input_ids, attention_mask, output_hidden_states=True).hidden_states
            assert len(states) == 1 + len(self.bert.encoder.layer)
            return self.out(states[-2].mean(1))

    model = Penultimate().eval()
    example = {k: v for k, v in ZOO["bert"]()[1].items() if k in ("input_ids", "attention_mask")}
    layers = hp.find_attention(model, example)  # its first run
    with torch.no_grad():
        before = model(**example)
        hp.find_attention(model, example)
        assert torch.equal(model(**example), before)
        hp.prune(model, {layers[0].name: [1]}, example)
        assert model(**example).shape == before.shape


def test_a_layer_is_shown_in_a_line(bert_folder: Path) -> None:
    from headprune.app.models import dummy_input, load_model

    loaded = load_model(str(bert_folder))
    for layer in hp.find_attention(loaded.model, dummy_input(loaded, 2, 8)):
        assert repr(layer) == f"AttentionLayer(L{layer.index} {layer.name!r}: encoder, 4 heads of 8)"
    long = hp.AttentionLayer("a.very.long.name." * 20, 104, "decoder", 128, 16, 256, prunable=False)
    assert len(repr(long)) <= 150
    assert "16 key/value, not prunable" in repr(long)


def test_a_mixture_of_attention_heads_has_as_many_in_every_layer() -> None:
    """JetMoE's queries come from experts' matrices in one parameter; from the second layer on tokens were taken for heads."""
    model, example = built("jetmoe")
    layers = hp.find_attention(model, example)
    assert [(a.num_heads, a.num_kv_heads) for a in layers] == [(model.config.num_attention_heads, 2)] * 2
    assert all(a.reason.endswith(f"{a.name}.experts.output_linear") for a in layers)
    assert {len(heads) for heads in hp.profile_heads(model, [example], layers).values()} == {layers[0].num_heads}


class Unseen(Attention):
    """Queries, keys and values of all heads by one parameter, behind a ReLU that leaves every token other features."""

    def __init__(self) -> None:
        super().__init__()
        del self.qkv
        self.before, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(3, HEADS, WIDTH, WIDTH // HEADS))

    def attend(self, x: torch.Tensor, **mask: Any) -> torch.Tensor:
        q, k, v = torch.einsum("btc,nhcd->nbhtd", self.before(x).relu(), self.weight)
        return self.joined(F.scaled_dot_product_attention(q, k, v, **mask))


def test_tokens_are_no_heads() -> None:
    model, x = model_of(Unseen), noise(2, 6, WIDTH)
    assert [a.num_heads for a in hp.find_attention(model, x)] == [HEADS] * 2
