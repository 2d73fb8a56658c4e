"""Pruned is masked, on every architecture; or the model is as it was."""

import copy

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headprune as hp
from headprune.inputs import call
from headprune.surgery import answers
from tests.support.checks import check, hooks
from tests.support.zoo import CASES, ZOO, TorchEncoder, bert, gpt2, llama, randomise, t5, text


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_one_unit_of_one_layer(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    layer = hp.find_attention(model, example)[1]
    pruned = check(model, example, {layer.name: list(layer.units[1])})
    left = {a.name: a.num_heads for a in hp.find_attention(pruned, example)}
    assert left[layer.name] == layer.num_heads - len(layer.units[1])


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_uneven_layers(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    layers = hp.find_attention(model, example)
    check(model, example, {a.name: [h for u in a.units[: 1 + i % 2] for h in u] for i, a in enumerate(layers)})


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_all_heads_of_a_layer(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    for layer in hp.find_attention(model, example)[:2]:
        check(model, example, {layer.name: list(range(layer.num_heads))})


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_all_heads_of_every_layer(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    check(model, example, {a.name: list(range(a.num_heads)) for a in hp.find_attention(model, example)})


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_pruned_model_can_be_pruned_again(name: str, attention: str) -> None:
    model, example = ZOO[name](attention)
    layers = hp.find_attention(model, example)
    once = check(model, example, {a.name: list(a.units[0]) for a in layers})
    again = hp.find_attention(once, example)
    twice = check(once, example, {a.name: list(a.units[-1]) for a in again})
    both = {  # the second prune counts heads within what the first one left
        a.name: sorted({*a.units[0], *([h for h in range(a.num_heads) if h not in a.units[0]][-len(b.units[-1]) :])})
        for a, b in zip(layers, again, strict=True)
    }
    at_once = check(model, example, both)
    with torch.no_grad():
        for x, y in zip(answers(call(twice, example)), answers(call(at_once, example)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_heads_of_bert(data: st.DataObject) -> None:
    model, example = bert(data.draw(st.sampled_from(["sdpa", "eager"])))
    layers = hp.find_attention(model, example)
    drop = {a.name: data.draw(st.lists(st.integers(0, 3), unique=True)) for a in layers}
    if any(drop.values()):
        check(model, example, drop)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "t5"])
def test_generation_with_a_cache(name: str) -> None:
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    drop = {a.name: list(range(a.num_heads)) if i == 0 else list(a.units[0]) for i, a in enumerate(layers)}
    pruned = check(model, example, drop)
    ids = {"input_ids": example["input_ids"][:2], "attention_mask": example["attention_mask"][:2]}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with hp.mask(model, drop, layers=layers):
        expected = model.generate(**ids, **options, use_cache=True)
    assert torch.equal(pruned.generate(**ids, **options, use_cache=True), expected)
    assert torch.equal(pruned.generate(**ids, **options, use_cache=False), expected)


def test_query_heads_of_equal_number_from_every_group() -> None:
    model, example = llama()
    layer = hp.find_attention(model, example)[1]
    pruned = check(model, example, {layer.name: [1, 2, 5]})
    after = hp.find_attention(pruned, example)[1]
    assert (after.num_heads, after.num_kv_heads) == (3, 3)


def test_uneven_groups_are_refused() -> None:
    model, example = llama()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hp.HeadPruneError, match="would keep 1, 2, 2 query heads"):
        hp.prune(model, {"model.layers.0.self_attn": [0]}, example)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_one_key_value_head() -> None:
    config = tf.LlamaConfig(
        vocab_size=100, hidden_size=32, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=2,
        intermediate_size=48, pad_token_id=0,
    )  # fmt: skip
    model = randomise(tf.LlamaForCausalLM(config))
    layer = hp.find_attention(model, text())[0]
    assert (layer.num_kv_heads, len(layer.units)) == (1, 4)
    check(model, text(), {layer.name: [0, 2, 3]})


def test_heads_as_many_as_features() -> None:
    """num_heads and head_dim are the same number: only their names tell them apart."""
    config = tf.BertConfig(
        vocab_size=100, hidden_size=64, num_attention_heads=8, num_hidden_layers=2, intermediate_size=48
    )
    model = randomise(tf.BertForSequenceClassification(config))
    layer = hp.find_attention(model, text())[0]
    check(model, text(), {layer.name: [0, 5, 6]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, example = bert()
    model.to(dtype)
    layer = hp.find_attention(model, example)[0]
    pruned = copy.deepcopy(model)
    hp.prune(pruned, {layer.name: [0, 2]}, example)
    assert {p.dtype for p in pruned.parameters()} == {dtype}


class Sneaky(nn.Module):
    """A model whose forward reads a head count that no one can see: pruning it must fail."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.o(out.transpose(1, 2).flatten(2)))


def test_a_failed_prune_restores_the_model_bit_for_bit() -> None:
    model = randomise(Sneaky())
    x = torch.randn(3, 5, 16)
    layers = hp.find_attention(model, x)
    state = copy.deepcopy(model.state_dict())
    parameters = {n: id(p) for n, p in model.named_parameters()}
    attributes = {n: dict(m.__dict__) for n, m in model.named_modules()}
    with pytest.raises(hp.PruneError, match="cannot be removed exactly"):
        hp.prune(model, {layers[0].name: [1]}, x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    for n, m in model.named_modules():
        assert {k: v for k, v in m.__dict__.items() if isinstance(v, int)} == {
            k: v for k, v in attributes[n].items() if isinstance(v, int)
        }
    assert hooks(model) == 0


def test_t5_failure_removes_the_bias_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = t5()
    layers = hp.find_attention(model, example)
    monkeypatch.setattr("headprune.surgery.proof.TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(hp.PruneError):
        hp.prune(model, {layers[0].name: [0], layers[2].name: [1]}, example)
    assert hooks(model) == 0
    assert "compute_bias" not in model.encoder.block[0].layer[0].SelfAttention.__dict__


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the wrong rows are cut, prune must notice."""
    from headprune.surgery import journal

    model, example = bert()
    layers = hp.find_attention(model, example)
    real = journal.surviving
    monkeypatch.setattr(journal, "surviving", lambda part, kept: real(part, [(h + 1) % 4 for h in kept]))
    with pytest.raises(hp.PruneError, match="differ from the masked model's"):
        # Shifting queries, keys, values and W_O alike would keep heads 1, 2: not the ones that were asked for.
        hp.prune(model, {layers[0].name: [2, 3]}, example)


def test_pruning_nothing() -> None:
    model, example = bert()
    before = copy.deepcopy(model.state_dict())
    hp.prune(model, {}, example)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_training_after_pruning() -> None:
    model, example = gpt2()
    layers = hp.find_attention(model, example)
    hp.prune(model, {a.name: [0] for a in layers}, example)
    model.train()
    model(**example, labels=example["input_ids"]).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "attn" in n)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_encoder_layouts(batch_first: bool, bias: bool) -> None:
    model = randomise(TorchEncoder(batch_first, bias))
    x = torch.randn(3, 6, 32)
    layers = hp.find_attention(model, x)
    pruned = check(model, x, {layers[0].name: [0, 2], layers[1].name: [0, 1, 2, 3]})
    assert pruned.encoder.layers[0].self_attn.num_heads == 2


class Scaled(nn.Module):
    """The tutorials' attention, whose softmax is scaled by the model's width: that number must not shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_size, self.heads = 32, 4
        self.queries, self.keys, self.values, self.fc_out = (nn.Linear(32, 32) for _ in range(4))
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = (p(x).reshape(*x.shape[:2], self.heads, 8) for p in (self.queries, self.keys, self.values))
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k)
        weights = torch.softmax(energy / self.embed_size**0.5, dim=3)
        return self.head(x + self.fc_out(torch.einsum("nhql,nlhd->nqhd", weights, v).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_that_only_scales_stays(dtype: torch.dtype) -> None:
    model = randomise(Scaled()).to(dtype)
    alike = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    layers = hp.find_attention(model, alike)
    dense = copy.deepcopy(model)
    hp.prune(model, {layers[0].name: [1, 2, 3]}, alike)
    assert model.embed_size == 32
    other = torch.randint(0, 50, (3, 9))
    with torch.no_grad(), hp.mask(dense, {layers[0].name: [1, 2, 3]}, layers=layers):
        torch.testing.assert_close(model(other), dense(other), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=2e-2)


def test_stale_layers_are_told() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    hp.prune(model, {layers[0].name: [0]}, example)
    with pytest.raises(hp.HeadPruneError, match="not as it was traced"):
        hp.prune(model, {layers[0].name: [1]}, example, layers=layers)


def test_nested_tensors_with_padding() -> None:
    """PyTorch's encoder turns padded batches into nested tensors, which only its fused kernel takes."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = randomise(nn.TransformerEncoder(layer, 2))
    assert model.use_nested_tensor
    x, padding = torch.randn(3, 6, 32), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    example = {"src": x, "src_key_padding_mask": padding}
    layers = hp.find_attention(model, x)
    with torch.no_grad(), hp.mask(model, {"layers.1.self_attn": [0, 2]}, layers=layers):
        masked = model(**example)
    assert model.use_nested_tensor
    hp.prune(model, {"layers.1.self_attn": [0, 2]}, x)
    with torch.no_grad():
        torch.testing.assert_close(model(**example)[~padding], masked[~padding], rtol=1e-4, atol=1e-5)


def test_new_modules_take_the_mode_of_the_old() -> None:
    model = randomise(TorchEncoder()).train()
    layers = hp.find_attention(model, torch.randn(2, 5, 32))
    hp.prune(model, {layers[0].name: [0]}, torch.randn(2, 5, 32))
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize(
    "plan", [None, [3], {"bert.encoder.layer.0.attention.self": 1.5}, {"bert.encoder.layer.0.attention.self": ["x"]}]
)
def test_what_is_no_plan(plan: object) -> None:
    model, example = bert()
    with pytest.raises(hp.HeadPruneError):
        hp.prune(model, plan, example)  # type: ignore[arg-type]


def test_an_interrupted_prune_restores_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    before = {n: id(p) for n, p in model.named_parameters()}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headprune.surgery.journal.Counts.changed", stop)
    with pytest.raises(KeyboardInterrupt):
        hp.prune(model, {layers[0].name: [0]}, example)
    assert {n: id(p) for n, p in model.named_parameters()} == before


def test_a_model_that_does_not_name_its_embeddings() -> None:
    """transformers raises NotImplementedError for some, CLIP among them."""

    class Silent(Scaled):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    model = randomise(Silent())
    example = {"input_ids": torch.randint(0, 50, (2, 6))}
    hp.prune(model, {hp.find_attention(model, example)[0].name: [1]}, example)
