"""Models and data that once got wrong scores, silently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.cases import without
from tests.support.causal import OwnLoss
from tests.support.errors import refuses
from tests.support.plain import WIDTH, Attention
from tests.support.problems import quick, small, split
from tests.support.zoo import bert, labelled, llama, randomise, sizes, text


class Plain(nn.Module):
    """Two layers and a classifier; ``x`` may be changed in between by what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Attention(), Attention(), nn.Linear(WIDTH, 3)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(x + self.first(x))
        return self.head((x + self.second(x)).mean(1))


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out, labels, reduction="none")


def pair(rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, WIDTH, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


@torch.no_grad()
def loss(model: nn.Module, batches: list[Any]) -> Tensor:
    """Each batch runs as it was given."""
    return torch.cat([cross_entropy(model(x), y) for x, y in batches]).mean().double()


class Capacity(Plain):
    """The first forty tokens of a batch are treated otherwise."""

    def between(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return torch.cat([flat[:40] * 2, flat[40:]]).view(x.shape)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> None:
        x.mul_((x.abs().amax(-1, keepdim=True) < 2.6).to(x.dtype))


class Written(Plain):
    """A module that writes into its argument and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = InPlace()

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        self.cut(x)
        return x


class Remembering(nn.Module):
    """Leaves something for a later layer, as shared key/value states do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.left = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        self.left = self.linear(x).mean(1, keepdim=True)
        return x


class Shared(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.third = Remembering(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = self.memory(x + self.first(x))
        x = x + self.second(x) + self.memory.left
        return self.head((x + self.third(x) * self.memory.left).mean(1))


class Mixing(Plain):
    """Every example sees the whole batch's mean: stacking would mix the gates."""

    def between(self, x: Tensor) -> Tensor:
        return x + x.mean(0)


class Sorting(Plain):
    """Puts its examples in the order of their sums while it works, as some pack by length."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort(stable=True)
        return super().forward(x[order])[order.argsort()]


@pytest.mark.parametrize("kind", [Plain, Capacity, Written, Shared, Mixing, Sorting])
@pytest.mark.parametrize("size", [1, 4, 12])
def test_replay_of_odd_modules(kind: type[Plain], size: int) -> None:
    model = randomise(kind())
    x, y = pair(12)
    order = x[:4].sum((1, 2)).argsort()
    x[:4] = x[:4][order]  # the first examples are in order: only the other batches show that a model sorts
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, 12, size)]
    scores = hp.score(model, batches, "ablation", loss_fn=cross_entropy)
    for layer in scores.layers:
        for head in (0, 2):
            expected = loss(without(model, scores.layers, {layer.name: [head]}), batches) - loss(model, batches)
            torch.testing.assert_close(scores.values[layer.name][head], expected, rtol=1e-4, atol=1e-5)


def test_layers_in_any_order() -> None:
    model = randomise(Plain())
    batch = pair()
    layers = hp.find_attention(model, batch[0])
    for name in ("shapley:permutations=4", "integrated-gradients:steps=16", "ablation"):
        a, b = (hp.score(model, [batch], name, loss_fn=cross_entropy, layers=some) for some in (layers, layers[::-1]))
        torch.testing.assert_close(a.flat().sum(), b.flat().sum(), rtol=1e-4, atol=1e-5)
    refuses("can be masked", hp.score, model, [batch], loss_fn=cross_entropy, layers=[])


def test_compiled_parts() -> None:
    model = randomise(Plain())
    batch = pair()
    expected = hp.score(model, [batch], "ablation", loss_fn=cross_entropy)
    model.first.qkv.compile(backend="eager")
    model.second.compile(backend="eager")
    model(batch[0])
    for name in ("ablation", "output-norm"):
        scores = hp.score(model, [batch], name, loss_fn=cross_entropy)
    again = hp.score(model, [batch], "ablation", loss_fn=cross_entropy)
    torch.testing.assert_close(again.flat(), expected.flat(), rtol=1e-4, atol=1e-6)
    assert scores.flat().isfinite().all()


class Packed(Attention):
    """Padding is cut out before W_O, whose rows are then no longer so many for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        out = self.attend(x, attn_mask=keep[:, None, None])
        back = torch.zeros_like(x)
        back[keep] = self.o(out[keep])
        return self.head((back + x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


@pytest.mark.parametrize("method", ["gradient", "fisher", "ablation", "integrated-gradients"])
def test_padding_that_is_cut_out_on_the_way(method: str) -> None:
    """Twelve tokens for three examples: four each, on average."""
    model = randomise(Packed())
    x, y = pair(3)
    x = torch.cat([x, x.flip(1)], 1)[:, :6]
    keep = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    ones = [((x[i : i + 1], keep[i : i + 1]), y[i : i + 1]) for i in range(3)]
    method, whole = quick(method, "steps=8"), [((x, keep), y)]
    batch, single = (hp.score(model, batches, method, loss_fn=cross_entropy) for batches in (whole, ones))
    torch.testing.assert_close(batch.flat(), single.flat(), rtol=1e-4, atol=1e-6)


def test_with_a_loss_of_ones_own_nothing_is_kept(tmp_path: Path) -> None:
    """Another process cannot know whether a function computes the same."""
    hp.score(randomise(Plain()), [pair()], "ablation", loss_fn=cross_entropy, work=tmp_path)
    assert not list(tmp_path.iterdir())


# -- losses --------------------------------------------------------------------------------------


def test_a_loss_of_its_own_that_the_first_example_does_not_show() -> None:
    """It shows only where labels are 0."""

    def ignoring_zero(logits: Tensor, labels: Tensor, inputs: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)

    model = OwnLoss(llama()[0], ignoring_zero)
    example = text(3, 8)
    example["attention_mask"][:] = 1
    labels = example["input_ids"].clone()
    labels[2, 5:] = 0
    batch = {**example, "labels": labels}
    one = hp.score(model, [batch], "ablation").flat()
    turned = hp.score(model, [{k: v.flip(0) for k, v in batch.items()}], "ablation").flat()
    torch.testing.assert_close(one, turned, rtol=1e-4, atol=1e-6)


def test_an_example_without_any_label_is_named() -> None:
    model, _ = llama()
    batch = labelled(model, text(3, 8))
    batch["labels"] = batch["labels"].clone()
    batch["labels"][1] = -100
    refuses("Example 1 of a batch has no label", hp.score, model, [batch], "ablation")


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
def test_divergence_of_every_kind_of_head(problem: str | None) -> None:
    """Classes by Kullback and Leibler, real numbers by their squares, several labels each by its own chance."""
    labels = 1 if problem == "regression" else 3
    config = tf.BertConfig(**{**sizes("sdpa", num_labels=labels), "problem_type": problem})
    model = randomise(tf.BertForSequenceClassification(config))
    example = text(4, 8)
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [example], "ablation", layers=layers)
    with torch.no_grad():
        dense = model(**example).logits.double()
        with hp.mask(model, {layers[1].name: [2]}, layers=layers):
            now = model(**example).logits.double()
    if labels == 1:
        expected = ((now - dense) ** 2).mean()
    elif problem is None:
        p, q = dense.softmax(-1), now.softmax(-1)
        expected = (p * (p / q).log()).sum(-1).mean()
    else:
        p, q = dense.sigmoid(), now.sigmoid()
        expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(-1).mean()
    torch.testing.assert_close(scores.values[layers[1].name][2], expected, rtol=1e-4, atol=1e-6)
    if problem:
        refuses("no gradient at the dense model", hp.score, model, [example], "gradient", layers=layers)


@pytest.mark.parametrize("method", ["gradient", "ablation"])
def test_drawn_labels_do_not_depend_on_batches_or_padding(method: str) -> None:
    model, _ = llama()
    example = text(4, 7)
    example["attention_mask"][:] = 1
    batches = [{k: v[i : i + 1] for k, v in example.items()} for i in range(4)]
    padded = {k: F.pad(v, (0, 3)) for k, v in example.items()}
    a, b, c = (hp.score(model, x, method).flat() for x in ([example], batches, [padded]))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)


def test_labels_in_some_batches_only() -> None:
    model, _ = bert()
    first, second = split(labelled(model, text(4, 7)), 2)
    del second["labels"]
    refuses("Batch 1 has no labels", hp.score, model, [first, second])
    refuses("Both a loss_fn and distil", hp.score, model, [first], distil=True, loss_fn=cross_entropy)


def test_the_unit_says_what_was_measured() -> None:
    """And a key that no module reads is said: labels under another name were left out, and the dense answers taken in their place."""
    model, (batch, *_) = small()
    bare = {k: v for k, v in batch.items() if k != "labels"}
    with pytest.raises(hp.HeadPruneError, match=r"takes no 'label'.*Rename the key to \"labels\""):
        hp.score(model, [{**bare, "label": batch["labels"]}], "ablation")
    refuses("takes no 'label'", hp.evaluate, model, [{**bare, "label": batch["labels"]}])
    with pytest.warns(UserWarning, match="takes no 'number', so it is not read"):
        scores = hp.score(model, [{**batch, "number": torch.arange(len(batch["labels"]))}], "ablation")
    assert scores.unit == "loss (nats) added when the head is removed"
    distilled = hp.score(model, [bare], "ablation")
    assert distilled.unit == "divergence (KL in nats) from the dense model's answers added when the head is removed"
    assert distilled.signed
    drawn = hp.score(model, [bare], "gradient")
    assert drawn.unit.startswith("loss (nats) of labels drawn from the dense model's answers per unit of gate")
    numbers = tf.BertForSequenceClassification(tf.BertConfig(**sizes("sdpa", num_labels=1)))
    labels = torch.randn(3)
    assert hp.score(numbers, [{**text(), "labels": labels}], "ablation").unit.startswith("squared error added")
    unit = hp.score(numbers, [text()], "ablation").unit
    assert unit.startswith("squared difference from the dense model's answers added")
