"""Entropy, confidence and norms against what models and matrices say themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.checks import hooks
from tests.support.odd import Convolutions
from tests.support.plain import WIDTH, Attention, model_of, noise
from tests.support.problems import TokensFirst, double, error_of, output_weight
from tests.support.textbook import Classifier, HeadsFirst, MinGPT, made
from tests.support.zoo import ZOO, TorchEncoder, bert, labelled, randomise, text

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
def test_output_norm_against_slices_of_the_output_projection(name: str) -> None:
    model, batch = double(name)
    s = score(model, batch, "output-norm")
    seen: dict[str, Tensor] = {}
    for a in s.layers:
        module = model.get_submodule(a.output_projection.module)
        module.register_forward_pre_hook(lambda m, args, n=a.name: seen.update({n: args[0]}))
    model(**batch)
    for layer in s.layers:
        weight, plain = output_weight(model, layer)
        matrix = weight.detach() if plain else weight.detach().T
        added = [seen[layer.name][..., list(own)] @ matrix[:, list(own)].T for own in layer.output_projection.features]
        norms = torch.stack([(x**2).sum(-1).sqrt() for x in added], dim=1)
        rows = mean_over_tokens(norms, real_of(batch, layer, norms))
        torch.testing.assert_close(s.values[layer.name], rows.mean(0), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(s.stderr[layer.name], error_of(rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_norm_against_slices_of_the_output_projection(name: str) -> None:
    model, batch = double(name)
    s = score(model, batch, "weight-norm")
    for layer in s.layers:
        weight, plain = output_weight(model, layer)
        for head, own in enumerate(layer.output_projection.features):
            part = weight[:, list(own)] if plain else weight[list(own)]
            torch.testing.assert_close(s.values[layer.name][head], (part.detach() ** 2).sum().sqrt())
    assert s.flat_stderr().isnan().all()
    assert "does not look at data" in s.details["stderr"]


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
    x = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(0))
    if name == "heads first":
        torch.manual_seed(0)
        model, example = randomise(Classifier(HeadsFirst(), HeadsFirst(), 32, 3)), x
    elif name == "torch":
        model, example = randomise(TorchEncoder(batch_first=False)), x
    else:
        model, example = made(name)
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
