"""Shapley values against all subsets, integrated gradients against a plain integral, and both against the sum that must hold; planted heads."""

import copy
from collections.abc import Callable
from itertools import product
from math import comb
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.scoring.ablation import inclusion
from headprune.scoring.learned import _relaxed
from tests.support.brute import output_of
from tests.support.checks import hooks
from tests.support.odd import Convolutions
from tests.support.plain import WIDTH, Attention, model_of, noise
from tests.support.problems import TokensFirst, double, error_of, planted, quick, small, without
from tests.support.textbook import MinGPT, made
from tests.support.zoo import ZOO, TorchEncoder, bert, labelled, llama, randomise, text


@pytest.mark.parametrize("method", [
    "integrated-gradients:steps=64", "shapley:permutations=1", "shapley:permutations=6", "shapley:permutations=20",
])  # fmt: skip
def test_the_values_sum_to_what_all_heads_are_worth(method: str) -> None:
    """Completeness, or efficiency: on all examples, however few orders are drawn."""
    model, batches = small()
    s = hp.score(model, batches, method)
    dense = without(model, batches, [True] * 6)
    assert s.flat().sum().item() == pytest.approx(without(model, batches, [False] * 6) - dense, abs=1e-7)
    assert s.details["mean_loss"] == pytest.approx(dense, abs=1e-8)
    assert s.signed
    if "steps" in method:
        assert s.details["gap"] < 1e-6
    else:
        assert s.details["pairs"] == max(3, int(method.partition("=")[2]) // 6 * 3)


# -- Shapley values ------------------------------------------------------------------------------


def test_against_all_subsets() -> None:
    """64 models with columns of W_O zeroed, weighted as Shapley (1953) does."""
    model, batches = small()
    loss = {kept: without(model, batches, kept) for kept in product((False, True), repeat=6)}
    exact = torch.zeros(6, dtype=torch.float64)
    for kept in loss:
        for h in range(6):
            if kept[h]:
                less = (*kept[:h], False, *kept[h + 1 :])
                exact[h] += (loss[less] - loss[kept]) / (6 * comb(5, sum(less)))
    coarse, fine = (hp.score(model, batches, f"shapley:permutations={n}") for n in (30, 900))
    for s in (coarse, fine):
        assert ((s.flat() - exact).abs() < 4 * s.flat_stderr()).all()
    assert (fine.flat() - exact).abs().max() < 0.1 * (exact.max() - exact.min())
    assert fine.details["stopped_early"]


def test_the_standard_error_is_right() -> None:
    """On one batch, over 16 seeds: the values scatter as the error says."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    runs = [hp.score(model, batches[:1], "shapley:permutations=14", seed=s, layers=layers) for s in range(16)]
    scatter = torch.stack([s.flat() for s in runs]).std(dim=0)
    claimed = torch.stack([s.flat_stderr() ** 2 for s in runs]).mean(dim=0).sqrt()
    assert ((scatter / claimed > 0.6) & (scatter / claimed < 1.5)).all()


def test_one_pair_and_one_head() -> None:
    model, batches = small()
    s = hp.score(model, batches[:1], "shapley:permutations=2")
    assert s.flat_stderr().isnan().all()
    assert "single pair" in s.details["stderr"]
    model, batches = small(heads=1, layers=1)
    expected = without(model, batches, [False]) - without(model, batches, [True])
    assert hp.score(model, batches, "shapley").flat().item() == pytest.approx(expected)


# -- integrated gradients ------------------------------------------------------------------------


def test_against_the_trapezoid_rule() -> None:
    """200 points, W_O's columns scaled, the model's own loss."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    points = torch.linspace(0, 1, 201, dtype=torch.float64)
    slopes = []
    for at in points:
        gates = at.repeat(6).requires_grad_()
        weights = {}
        for layer, own in zip(layers, gates.split(3), strict=True):
            name = f"{layer.output_projection.module}.weight"
            weights[name] = model.get_parameter(name).detach() * own.repeat_interleave(8)
        rows = [len(b["labels"]) for b in batches]
        losses = [torch.func.functional_call(model, weights, (), b).loss for b in batches]
        loss = sum(x * n for x, n in zip(losses, rows, strict=True)) / sum(rows)
        slopes.append(torch.autograd.grad(loss, gates)[0])
    expected = -torch.trapezoid(torch.stack(slopes), points, dim=0)
    s = hp.score(model, batches, "integrated-gradients:steps=32", layers=layers)
    torch.testing.assert_close(s.flat(), expected, atol=2e-5, rtol=0)


def test_points_double_until_the_sum_is_right() -> None:
    model, batches = small()
    for fixed in (1, 3):
        coarse = hp.score(model, batches, f"integrated-gradients:steps={fixed}")
        assert coarse.details["steps"] == fixed
    assert coarse.details["gap"] > 0.01
    chosen, exact = (hp.score(model, batches, f"integrated-gradients{steps}") for steps in ("", ":steps=64"))
    assert chosen.details["gap"] <= 0.01
    assert chosen.details["steps"] in (8, 16, 32)
    torch.testing.assert_close(chosen.flat(), exact.flat(), atol=0.01, rtol=0.02)


# -- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gradient", "ablation", "fisher", "integrated-gradients"])
def test_half_precision(name: str) -> None:
    """bfloat16 gives float32's scores to its own precision, and sums them in float64."""
    model, _ = llama()
    batch = labelled(model, text(16, 8))
    full, half = (hp.score(m, [batch], quick(name, "steps=8")) for m in (model, copy.deepcopy(model).bfloat16()))
    assert half.flat().dtype == torch.float64
    assert ((half.flat() - full.flat()).abs() <= 0.1 * full.flat().abs().max()).all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
def test_gradient_checkpointing(name: str) -> None:
    """The same scores, from activations that are computed again: blocks run twice, with dropout off."""
    model, example = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    batch, layers = labelled(model, example), hp.find_attention(model, example)

    def scored() -> tuple[torch.Tensor, int]:
        """The scores, and how often the last layer ran."""
        runs: list[int] = []
        handle = model.get_submodule(layers[-1].module).register_forward_hook(lambda *_: runs.append(1))
        scores = hp.score(model, [batch], "gradient", layers=layers).flat()
        handle.remove()
        return scores, len(runs)

    expected, plain = scored()
    model.gradient_checkpointing_enable()
    scores, checkpointed = scored()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert checkpointed > plain


def test_examples_longer_than_the_model_allows() -> None:
    model, _ = bert()
    fits, long = labelled(model, text(2, 9)), labelled(model, text(2, 9))
    most = model.config.max_position_embeddings
    long = {**long, **{k: torch.ones(2, most + 3, dtype=torch.long) for k in ("input_ids", "attention_mask")}}
    for name in ("gradient", "ablation", "entropy", "l0"):
        with pytest.raises(hp.HeadPruneError, match=f"does not run on.*{most + 3} tokens.*{most} positions"):
            hp.score(model, [fits, long], quick(name, "steps=4"))


def test_a_single_example_has_no_standard_error_and_says_so() -> None:
    model, _ = bert()
    batch = labelled(model, text(1, 7))
    for name in ("gradient", "ablation", "entropy"):
        s = hp.score(model, [batch], name)
        assert s.flat_stderr().isnan().all()
        assert "single example" in s.details["stderr"]


DEAD, STRONG = [1, 4, 6], [0, 5]


@pytest.mark.parametrize(("keep", "seed"), [(None, 0), (5, 1), (3, 2)])
@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_planted_heads(method: str, keep: int | None, seed: int) -> None:
    """Heads that give nothing rank below all others, and those that give much are among the kept."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    s = hp.score(model, batches, f"{method}:keep={keep}" if keep else method, loss_fn=loss_fn, seed=seed)
    order = s.flat().argsort().tolist()
    assert set(order[:3]) == set(DEAD)
    assert set(STRONG) <= set(order[-(keep or 4) :])
    assert s.flat_stderr().isnan().all()
    assert "one training run" in s.details["stderr"]


@pytest.mark.parametrize("keep", [None, 1, 5])
def test_l0_keeps_as_many_as_it_is_told(keep: int | None) -> None:
    model, batches, loss_fn = planted(DEAD, STRONG)
    scores = hp.score(model, batches, f"l0:keep={keep},sparsity=9" if keep else "l0", loss_fn=loss_fn)
    assert scores.details["open"] == pytest.approx(4 if keep is None else keep, abs=0.3)


def test_l0_at_a_price() -> None:
    """The higher the price of a head, the fewer stay open; at none, those that help do."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    methods = [f"l0:sparsity={price},steps=300" for price in (0.0, 0.1, 100.0)]
    free, some, dear = (hp.score(model, batches, method, loss_fn=loss_fn) for method in methods)
    assert free.details["open"] > 7.5 > some.details["open"] > 1.9 > 0.5 > dear.details["open"]
    assert set(some.flat().argsort().tolist()[:3]) == set(DEAD)


# -- formulas in the open --------------------------------------------------------------------------


def test_inclusion_probabilities() -> None:
    size = torch.tensor([1.0, 2, 3, 100], dtype=torch.float64)
    pi = inclusion(size, 2.0)
    torch.testing.assert_close(pi, torch.tensor([1 / 6, 2 / 6, 3 / 6, 1], dtype=torch.float64))
    assert torch.equal(inclusion(size, 4.0), torch.ones(4, dtype=torch.float64))
    assert (inclusion(size, 2.5) >= inclusion(size, 1.5)).all()  # a larger sample holds the smaller one


def test_the_relaxed_draw() -> None:
    """Of two by hand; it sums to the count, never takes a head twice, and hardens to the largest keys."""
    keys = torch.tensor([[0.5, -0.3, 0.1]], dtype=torch.float64)
    first = torch.softmax(keys, -1)
    second = torch.exp(keys) * (1 - first)
    torch.testing.assert_close(_relaxed(keys, 2, 1.0), first + second / second.sum())
    keys = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperature in (1.0, 0.1):
        sums = _relaxed(keys, 4, temperature).sum(dim=1)
        torch.testing.assert_close(sums, torch.full((5,), 4.0, dtype=torch.float64))
    hard = torch.zeros_like(keys).scatter(1, keys.topk(4).indices, 1.0)
    torch.testing.assert_close(_relaxed(keys, 4, 1e-3), hard, atol=1e-6, rtol=0)


# -- entropy, confidence and norms, against what models and matrices say themselves -----------------

FAMILIES = ["bert", "gpt2", "llama", "vit", "t5"]
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": lambda p: (p * p.clamp(min=1e-30).log()).sum(-1),
    "confidence": lambda p: p.max(-1).values,
}
MEASURED = [*STATISTICS, "output-norm"]


def real_of(batch: Any, layer: hp.AttentionLayer, values: Tensor) -> Tensor:
    if "attention_mask" not in batch:
        return torch.ones(len(values), values.shape[2], dtype=torch.bool)
    if batch["labels"].ndim == 2 and layer.kind != "encoder" and batch["labels"].shape[1] == 5:  # T5's decoder
        return batch["labels"] != -100
    return batch["attention_mask"] == 1


def mean_over_tokens(values: Tensor, real: Tensor) -> Tensor:
    """``[heads]`` of ``[examples, heads, tokens]``, by loops."""
    rows = [values[i][:, real[i]].mean(dim=1) for i in range(len(values))]
    return torch.stack(rows)


def score(model: nn.Module, batches: Any, method: str, **more: Any) -> hp.HeadScores:
    return hp.score(model, batches if isinstance(batches, list) else [batches], method, **more)


@pytest.mark.parametrize("method", STATISTICS)
@pytest.mark.parametrize("name", [*FAMILIES, "swin", "d2l"])
def test_of_attention_against_its_weights(name: str, method: str) -> None:
    """Example by example; that the weights are those of the model itself is tested in `test_seeing.py`."""
    if name == "d2l":  # whose heads are in the batch dimension
        model, example = made("d2l")
        batch: Any = (example, torch.tensor([0, 1, 2]))
    else:
        model, example = double(name)
        batch = example
    s = score(model, batch, method, loss_fn=cross_entropy if name == "d2l" else None)
    assert hooks(model) == 0
    for layer_name, weights in hp.attention_weights(model, example, list(s.layers)).items():
        layer = next(layer for layer in s.layers if layer.name == layer_name)
        values = STATISTICS[method](weights.double())
        rows = mean_over_tokens(values, real_of(batch, layer, values))
        torch.testing.assert_close(s.values[layer.name], rows.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(s.stderr[layer.name], error_of(rows), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_against_slices_of_the_output_projection(name: str) -> None:
    model, batch = double(name)
    of_weights = score(model, batch, "weight-norm")
    assert of_weights.flat_stderr().isnan().all()
    assert "does not look at data" in of_weights.details["stderr"]
    s = score(model, batch, "output-norm")
    seen: dict[str, Tensor] = {}
    for a in s.layers:
        module = model.get_submodule(a.output_projection.module)
        module.register_forward_pre_hook(lambda m, args, n=a.name: seen.update({n: args[0]}))
    model(**batch)
    for layer in s.layers:
        matrix, _ = output_of(model, layer)
        parts = [matrix[list(own)] for own in layer.output_projection.features]
        torch.testing.assert_close(of_weights.values[layer.name], torch.stack([part.norm() for part in parts]))
        added = [
            seen[layer.name][..., list(own)] @ part
            for own, part in zip(layer.output_projection.features, parts, strict=True)
        ]
        norms = torch.stack([(x**2).sum(-1).sqrt() for x in added], dim=1)
        rows = mean_over_tokens(norms, real_of(batch, layer, norms))
        torch.testing.assert_close(s.values[layer.name], rows.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(s.stderr[layer.name], error_of(rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", MEASURED)
def test_padding_of_the_decoder_adds_nothing(method: str) -> None:
    """Also where the decoder is as long as the encoder's input, whose padding is elsewhere."""
    model, _ = ZOO["t5"]()
    labels = torch.randint(3, 90, (3, 5), generator=torch.Generator().manual_seed(4))
    batch = {**text(), "labels": labels}
    padded = {**batch, "labels": F.pad(labels, (0, 4), value=-100)}
    assert padded["labels"].shape == padded["input_ids"].shape
    a, b = score(model, batch, method), score(model, padded, method)
    torch.testing.assert_close(a.flat(), b.flat(), rtol=1e-4, atol=1e-6)


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    if out.ndim == 2:
        return F.cross_entropy(out, labels, reduction="none")
    return F.cross_entropy(out.transpose(1, 2), labels, reduction="none").mean(dim=1)


@pytest.mark.parametrize("method", MEASURED)
@pytest.mark.parametrize("name", ["linear names", "d2l", "mingpt", "encoder-decoder", "heads first", "torch"])
def test_textbook_classes(name: str, method: str) -> None:
    """Heads in the batch dimension, as D2L and others have them, in one batch and one by one."""
    model, example = made("heads first" if name == "torch" else name)
    if name == "torch":
        model = randomise(TorchEncoder(batch_first=False))
    inputs = example if isinstance(example, tuple) else (example,)
    tokens = {"encoder-decoder": 5, "mingpt": 8}.get(name)
    labels = torch.randint(0, 3, (3, tokens) if tokens else (3,), generator=torch.Generator().manual_seed(0))
    whole = score(model, (inputs, labels), method, loss_fn=cross_entropy)
    single = [(tuple(x[i : i + 1] for x in inputs), labels[i : i + 1]) for i in range(3)]
    parts = score(model, single, method, loss_fn=cross_entropy)
    torch.testing.assert_close(whole.flat(), parts.flat(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole.flat_stderr(), parts.flat_stderr(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", MEASURED)
def test_a_loss_without_a_gradient(method: str) -> None:
    """Only its value is told, such as whether the answer is wrong."""
    model, x, y = randomise(TokensFirst()), torch.randn(3, 3, 16), torch.tensor([0, 2, 1])
    a = score(model, (x, y), method, loss_fn=cross_entropy)
    b = score(model, (x, y), method, loss_fn=lambda out, labels: (out.argmax(-1) != labels).float())
    torch.testing.assert_close(a.flat(), b.flat(), rtol=1e-5, atol=1e-7)


def test_heads_without_an_output_projection() -> None:
    """minGPT's heads go into the residual stream as they are, so their own norm is what they add; there is no W_O to weigh."""
    model, ids = made("mingpt")
    assert isinstance(model, MinGPT)
    labels = torch.randint(0, 3, (3, 8))
    s = score(model, ((ids,), labels), "output-norm", loss_fn=cross_entropy)
    assert s.details["norm_before_output_projection"] == [layer.name for layer in s.layers]
    outputs: list[Tensor] = []
    model.blocks[0]["attn"].register_forward_hook(lambda m, a, out: outputs.append(out))
    model(ids)
    expected = outputs[0].view(3, 8, 4, 8).norm(dim=-1).mean((0, 1)).double()
    torch.testing.assert_close(s.values["blocks.0.attn"], expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(hp.HeadPruneError, match=r"Layer blocks\.0\.attn: no columns of an output projection"):
        score(model, ((ids,), labels), "weight-norm", loss_fn=cross_entropy)


@pytest.mark.parametrize("method", ["output-norm", "weight-norm"])
def test_a_weight_that_is_not_plain(method: str) -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.float(), self.bias)

    model, example = bert()
    layers = hp.find_attention(model, example)
    parent, name = layers[1].output_projection.module.rsplit(".", 1)
    packed = Packed(32, 32)
    packed.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    setattr(model.get_submodule(parent), name, packed)
    with pytest.raises(hp.HeadPruneError, match=rf"Layer {layers[1].name}: .* no plain weight matrix"):
        score(model, labelled(model, example), method, layers=layers)


def test_a_convolution_as_output_projection() -> None:
    """Norms of a W_O that is a convolution are those of the linear layer that it is."""

    linear, convolution = model_of(Attention), model_of(Convolutions)
    shapes = {name: p.shape for name, p in convolution.named_parameters()}
    convolution.load_state_dict({name: p.view(shapes[name]) for name, p in linear.named_parameters()})
    batch = noise(4, 6, WIDTH), torch.tensor([0, 1, 2, 0])[:, None].expand(4, 6)
    for method in (*MEASURED, "weight-norm"):
        a, b = (score(m, batch, method, loss_fn=cross_entropy) for m in (linear, convolution))
        torch.testing.assert_close(a.flat(), b.flat(), rtol=1e-5, atol=1e-7)


def test_calls_of_a_shared_layer_are_averaged() -> None:
    """ALBERT runs one layer several times."""
    config = tf.AlbertConfig(
        vocab_size=100, embedding_size=16, hidden_size=32, num_attention_heads=4, num_hidden_layers=3,
        intermediate_size=48, attn_implementation="eager",
    )  # fmt: skip
    model = randomise(tf.AlbertForSequenceClassification(config))
    batch = labelled(model, text())
    s = score(model, batch, "entropy")
    assert len(s.layers) == 1
    each = model(**batch, output_attentions=True).attentions
    values = torch.stack([STATISTICS["entropy"](w) for w in each]).mean(0)
    rows = mean_over_tokens(values, batch["attention_mask"] == 1)
    torch.testing.assert_close(s.flat(), rows.mean(0).double(), rtol=1e-4, atol=1e-6)
