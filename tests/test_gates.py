"""Masks, gates and prunes under torch.compile, autocast and checkpointing, with adapters, packed weights, in half precision, of torch's own attention."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from tests.support.cases import answer, made, without
from tests.support.checks import hooks, older_fingerprint, without_dropout
from tests.support.grouped import Shape, Stack
from tests.support.odd import LowRank
from tests.support.plain import WIDTH, noise
from tests.support.zoo import TorchEncoder, bert, labelled, randomise, text

FIRST, SECOND = (f"bert.encoder.layer.{i}.attention.self" for i in range(2))
X = noise(2, 5, WIDTH)


@pytest.mark.slow
def test_compiled_before_and_after() -> None:
    model, example = bert()
    layers, drop, compiled = hp.find_attention(model, example), {FIRST: [0, 2]}, torch.compile(model)
    dense = answer(compiled, example)
    with hp.mask(model, drop, layers=layers):
        masked = answer(model, example)
        assert torch.equal(answer(compiled, example), masked)  # compiled before the mask
    assert (dense - masked).abs().max() > 1e-3
    torch.testing.assert_close(answer(compiled, example), dense)
    hp.prune(compiled, {f"_orig_mod.{k}": v for k, v in drop.items()}, example)
    torch.testing.assert_close(answer(compiled, example), masked, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [("olmo2", "inductor"), ("timesformer", "aot_eager"), ("phi3", "aot_eager")]
)
def test_a_pruned_model_compiles(name: str, backend: str) -> None:
    """Selections, claimed widths and views of the config are what compilers may trip over: mostly when they trace."""
    model, example = made(name)
    layer = hp.find_attention(model, example)[0]
    hp.prune(model, {layer.name: list(layer.units[0])}, example)
    compiled = answer(torch.compile(model, backend=backend), example)
    torch.testing.assert_close(compiled, answer(model, example), rtol=1e-3, atol=1e-3)


def test_autocast() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    with torch.autocast("cpu", torch.bfloat16):
        expected = answer(without(model, layers, {SECOND: [1]}), example)
        with hp.mask(model, {SECOND: [1]}, layers=layers):
            torch.testing.assert_close(answer(model, example), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing(name: str) -> None:
    model, example = made(name)
    layer = hp.find_attention(model, example)[0]
    without_dropout(model)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        with hp.mask(model, {layer.name: [0, 1]}, layers=[layer]):
            model(**example).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


class Packed(nn.Module):
    """A linear layer with 8-bit weights, as quantisation libraries make them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Buffer(linear.weight.detach().abs().max() / 127)
        self.packed = nn.Buffer((linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.packed.to(x.dtype) * self.scale) + self.bias


def test_a_quantised_layer_is_masked_and_named() -> None:
    model, example = bert()
    attention = model.bert.encoder.layer[0].attention
    for name in ("query", "key", "value"):
        setattr(attention.self, name, Packed(getattr(attention.self, name)))
    attention.output.dense = Packed(attention.output.dense)
    layers = hp.find_attention(model, example)
    assert [layer.prunable for layer in layers] == [False, True, True]
    with hp.mask(model, {FIRST: [0]}, layers=layers):
        masked = answer(model, example)
    with pytest.raises(hp.HeadPruneError, match=f"{FIRST} cannot be pruned: .*quantised"):
        hp.prune(model, {FIRST: [0]}, example, layers=layers)
    attention.output.dense.packed[:, :8] = 0
    torch.testing.assert_close(answer(model, example), masked)


@pytest.mark.parametrize("where", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_an_adapter_that_is_off(where: str) -> None:
    """It was left as it was, and clashed with the cut layer once it was switched on."""
    model = Stack([Shape(4, 1, 8, True)], WIDTH)
    attention = model.layers[0]
    attention.spare = nn.Linear(WIDTH, WIDTH)  # what never runs is not in the way
    adapted = LowRank(getattr(attention, where))
    setattr(attention, where, adapted)
    randomise(model)
    adapted.on = False
    (layer,) = hp.find_attention(model, X)
    assert layer.maskable
    unfit = f"{where}.* does not run, but would no longer fit .an adapter that is not active"
    with pytest.raises(hp.HeadPruneError, match=unfit):
        hp.prune(model, {"L0": [1]}, X)
    adapted.on = True
    if where != "o_proj":  # around W_O it must be merged
        hp.prune(model, {"L0": [1]}, X)
        model(X)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_peft(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    dense, example = bert()
    config = peft.LoraConfig(target_modules=["query", "value"], r=2, use_dora=kind == "dora", init_lora_weights=False)
    if kind == "ia3":
        config = peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[], init_ia3_weights=False)
    model = peft.get_peft_model(dense, config).eval()
    with model.disable_adapter():
        layer = hp.find_attention(model, example)[0]
        with pytest.raises(hp.HeadPruneError, match="an adapter that is not active"):
            hp.prune(model, {layer.name: [0]}, example)
    with hp.mask(model, {layer.name: [0]}, example):
        masked = answer(model, example)
    hp.prune(model, {layer.name: [0]}, example)
    torch.testing.assert_close(answer(model, example), masked, rtol=1e-4, atol=1e-5)
    with pytest.raises(hp.HeadPruneError, match=r"merge_and_unload"):  # unmerged, no one could load it
        hp.save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    again = hp.load(hp.save(model.merge_and_unload(), tmp_path / "m"))
    torch.testing.assert_close(answer(again, example), masked, rtol=1e-4, atol=1e-5)


# -- torch's own attention, which calls W_O without calling the module -------------------------------


class Calling(nn.Module):
    """Calls it with options that may be changed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention: nn.Module = nn.MultiheadAttention(16, 4, **options)
        self.options: dict[str, Any] = {}

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(*given, **self.options)


@pytest.mark.parametrize(("batch_first", "bias", "zeros", "weights"), itertools.product([True, False], repeat=4))
@torch.no_grad()
def test_its_stand_in_answers_alike(batch_first: bool, bias: bool, zeros: bool, weights: bool) -> None:
    """A mask of no head puts the stand-in in its place, for as long as it lasts."""
    model = Calling(batch_first=batch_first, add_bias_kv=bias, add_zero_attn=zeros, kdim=12, vdim=20)
    randomise(model)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 5, width, generator=generator) for width in (16, 12, 20)]
    given = given if batch_first else [x.transpose(0, 1) for x in given]
    causal, each = nn.Transformer.generate_square_subsequent_mask(5), torch.rand(12, 5, 5, generator=generator) > 0.7
    each[:, :, 0] = False
    layers = hp.find_attention(model, tuple(given))
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    options = {"key_padding_mask": padding}, {"attn_mask": each}, {"average_attn_weights": False}
    for more in ({}, {"attn_mask": causal, "is_causal": True}, *options):
        model.options = {"need_weights": weights, **more}
        expected = model(*given)
        with hp.mask(model, {}, layers=layers):
            assert type(model.attention) is not nn.MultiheadAttention
            assert model.attention.out_proj.weight.data_ptr() != 0
            for got, wanted in zip(model(*given), expected, strict=True):
                assert (got is None) == (wanted is None)
                if got is not None:
                    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert type(model.attention) is nn.MultiheadAttention


@torch.no_grad()
def test_its_stand_in_takes_what_has_no_rows_and_shares_weights() -> None:
    model = randomise(Calling())
    x, place = torch.randn(5, 16), model.attention.in_proj_weight.data_ptr()
    expected = model(x, x, x)
    with hp.mask(model, {}, layers=hp.find_attention(model, (x, x, x))):
        assert model.attention.q_proj.weight.data_ptr() == place
        for got, wanted in zip(model(x, x, x), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    copy.deepcopy(model)


# -- half precision without rounding on the way, open gates without any trace -------------------------

HALVES = [torch.bfloat16, torch.float16]


def seen_by_output(model: nn.Module, example: Any, **mask: Any) -> Tensor:
    """What the first W_O reads."""
    seen: list[Tensor] = []
    handle = model.bert.encoder.layer[0].attention.output.dense.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )  # type: ignore[union-attr, index]
    answer(model, example)
    handle.remove()
    return seen[0]


def test_nothing_is_left_behind() -> None:
    model = TorchEncoder()
    layers = hp.find_attention(model, torch.randn(2, 5, 32))
    with pytest.raises(RuntimeError, match="boom"), hp.mask(model, {layers[0].name: [0]}, layers=layers):
        raise RuntimeError("boom")
    assert type(model.encoder.layers[0].self_attn) is nn.MultiheadAttention
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@torch.no_grad()
def test_a_mask_changes_no_bit_of_the_heads_that_stay(dtype: torch.dtype) -> None:
    model, example = bert()
    model.to(dtype)
    layers = hp.find_attention(model, example)
    dense, heads = answer(model, example), seen_by_output(model, example)
    with hp.mask(model, {layer.name: [] for layer in layers}, layers=layers):
        assert torch.equal(answer(model, example), dense)
    columns = [f for h in (0, 3) for f in layers[0].output_projection.features[h]]
    heads[..., columns] = 0
    with hp.mask(model, {FIRST: [0, 3]}, layers=layers):
        assert torch.equal(seen_by_output(model, example), heads)  # a hook that is set later sees what W_O reads
    assert hooks(model) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gates_derivative_is_not_rounded_on_the_way(dtype: torch.dtype) -> None:
    """The gradient scores, against the sums in float64 of what W_O reads times its slope; one gate for every example."""
    model, example = bert()
    model.to(dtype)
    batch = labelled(model, example)
    scores = hp.score(model, [batch], "gradient")
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        seen.append(args[0])

    places = [model.get_submodule(layer.output_projection.module) for layer in scores.layers]
    handles = [place.register_forward_pre_hook(note) for place in places]
    logits = model(**example).logits.float()
    torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum").backward()
    for hidden, value, handle in zip(seen, scores.values.values(), handles, strict=True):
        products = (hidden.double() * hidden.grad.double()).unflatten(-1, (4, 8))
        off = (value - products.sum((1, 3)).abs().mean(0)).abs()
        assert bool((off <= 1e-5 * products.abs().sum((1, 3)).mean(0)).all())
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scored_in_half", [False, True])
def test_scores_and_plans_serve_in_any_precision(dtype: torch.dtype, scored_in_half: bool) -> None:
    """A checkpoint in half precision is scored in float32 on a CPU, and was another model on a GPU; and the other way round."""
    half = bert()[0].to(dtype)
    wide = copy.deepcopy(half).float()
    scored, model = (half, wide) if scored_in_half else (wide, half)
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(3)]
    scores = hp.score(scored, batches, "gradient")
    plan = hp.plan(scores, 4)
    assert plan.model == hp.plan(hp.score(model, batches, "random"), 4).model
    hp.search(model, batches[:2], keep=4, choose=batches[2:], scores=scores, strategy="one-shot", repair=False)
    hp.prune(copy.deepcopy(model), plan)
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(copy.deepcopy(model), replace(plan, model="another"))
    hp.prune(copy.deepcopy(model), replace(plan, model=older_fingerprint(wide)))
    model.bert.embeddings.word_embeddings.weight.data[3, 3] += 1.0
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        hp.prune(model, plan)
