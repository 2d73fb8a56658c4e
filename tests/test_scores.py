"""Scores against brute force in float64, and against the mistakes of older tools."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.divergence import Fidelity
from headprune.scoring import METHODS
from tests.support import problems
from tests.support.cases import without
from tests.support.causal import OwnLoss
from tests.support.checks import hooks
from tests.support.errors import refuses
from tests.support.families import built
from tests.support.plain import WIDTH, Attention
from tests.support.problems import cross_entropy, double, per_example_loss, quick, scaled, small, split, unlabelled
from tests.support.zoo import ZOO, TorchEncoder, bert, labelled, llama, randomise, sizes, t5, text, wav2vec2

REAL_METHODS = [m for m in METHODS if m != "random"]
LOOKING = [m for m in REAL_METHODS if m != "weight-norm"]  # at data
MEANS = [m for m in REAL_METHODS if m not in ("shapley", "l0", "dsp")]  # over examples, each scored for itself
EFFECTS = [m for m in REAL_METHODS if m not in ("l0", "dsp")]  # what one head does, not its rank among others
WEIGHING = [m for m in EFFECTS if m not in ("entropy", "confidence")]  # what a head says, not where it looks


def slopes_of(model: nn.Module, layer: hp.AttentionLayer, row: dict[str, Any]) -> Tensor:
    """dL/dxi of one example for every head: xi multiplies columns of W_O, so it is what they and their slopes come to."""
    weight, plain = problems.output_weight(model, layer)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(per_example_loss(model, row), weight)
    columns = (weight * slope).sum(0 if plain else 1)
    return torch.stack([columns[list(own)].sum() for own in layer.output_projection.features])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
def test_against_brute_force(name: str) -> None:
    """Both methods, from copies of the model with scaled weights, example by example, in float64."""
    model, batch = double(name)
    layers, rows = hp.find_attention(model, batch), split(batch, 1)
    gradient = hp.score(model, [batch], "gradient", layers=layers)
    ablation = hp.score(model, [batch], "ablation", layers=layers)
    with torch.no_grad():
        dense = torch.stack([per_example_loss(model, r) for r in rows])
        for layer in (layers[0], layers[-1]):
            each = [slopes_of(model, layer, r).abs() for r in rows]
            for head in range(layer.num_heads):
                without = scaled(model, layer, head, 0.0)
                effect = torch.stack([per_example_loss(without, r) for r in rows]) - dense
                slope = torch.stack([slopes[head] for slopes in each])
                for scores, expected in ((ablation, effect), (gradient, slope)):
                    value, error = scores.values[layer.name][head], scores.stderr[layer.name][head]
                    torch.testing.assert_close(value, expected.mean(), rtol=1e-5, atol=1e-8)
                    torch.testing.assert_close(error, problems.error_of(expected[:, None])[0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", MEANS)
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_batch_size_and_order_do_not_matter(method: str, name: str) -> None:
    model, _ = ZOO[name]()
    example = text(rows=4, decoder=5 if name == "t5" else 0)
    batch = labelled(model, example)
    shuffled = {k: v[[2, 0, 3, 1]] for k, v in batch.items()}
    method_ = quick(method, "steps=8")  # how many points a path needs is seen batch by batch
    layers = hp.find_attention(model, example)[1:4]  # of T5 one of each kind
    reference = hp.score(model, split(batch, 1), method_, layers=layers)
    others = [split(batch, 3), split(batch, 4), split(shuffled, 2)]
    for other in others[:2] if method == "resample-ablation" else others:  # which draws by the number of the example
        s = hp.score(model, other, method_, layers=layers)
        torch.testing.assert_close(s.flat(), reference.flat(), rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(s.stderr, reference.stderr, rtol=1e-3, atol=2e-6, equal_nan=True)


@cache
@pytest.mark.parametrize("method", EFFECTS)
@settings(max_examples=4)
@given(extra=st.integers(1, 6), rows=st.integers(1, 4), length=st.integers(2, 9), left=st.booleans())
def test_padding_adds_nothing(method: str, extra: int, rows: int, length: int, left: bool) -> None:
    """On either side: on the left, a label of the text's first token would be one that only padding predicts."""
    config = tf.LlamaConfig(**sizes("sdpa", num_hidden_layers=2, num_key_value_heads=2))
    model = randomise(tf.LlamaForCausalLM(config))
    layers = hp.find_attention(model, text())
    batch = labelled(model, text(rows, max(length, 4)))
    fill = {"input_ids": 7, "attention_mask": 0, "labels": -100}
    padded = {k: F.pad(v, (extra, 0) if left else (0, extra), value=fill[k]) for k, v in batch.items()}
    a, b = (hp.score(model, [x], quick(method, "permutations=4", "steps=8"), layers=layers) for x in (batch, padded))
    torch.testing.assert_close(a.flat(), b.flat(), rtol=1e-4, atol=1e-4 * float(a.flat().abs().max()))


@pytest.mark.parametrize("answers", ["one", "frames", "unlabelled"])
def test_frames_of_padding_add_nothing(answers: str) -> None:
    """The mask of sound counts samples, and convolutions make frames of them: padded frames counted as real ones."""
    model = wav2vec2(tf.Wav2Vec2ForSequenceClassification if answers == "one" else tf.Wav2Vec2ForCTC)
    lengths, generator = (163, 240, 203), torch.Generator().manual_seed(0)
    mask = (torch.arange(240) < torch.tensor(lengths)[:, None]).long()
    whole = {"input_values": torch.randn(3, 240, generator=generator) * mask, "attention_mask": mask}
    if answers != "unlabelled":
        whole["labels"] = torch.tensor([[3, 4], [5, 6], [7, 8]]) if answers == "frames" else torch.tensor([0, 1, 0])
    singles = [
        {k: v[i : i + 1] if k == "labels" else v[i : i + 1, :n] for k, v in whole.items()}
        for i, n in enumerate(lengths)
    ]
    layers = hp.find_attention(model, problems.unlabelled([whole])[0])
    for method in ("ablation", "mean-ablation", "resample-ablation", "entropy", "confidence", "output-norm"):
        together, each = (hp.score(model, batches, method, layers=layers).flat() for batches in ([whole], singles))
        torch.testing.assert_close(together, each, rtol=1e-3, atol=1e-5, msg=method)


@pytest.mark.parametrize("method", WEIGHING)
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_a_planted_dead_head_ranks_last(method: str, name: str) -> None:
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    model = scaled(model, layers[1], 2, 0.0)
    s = hp.score(model, [labelled(model, example)], method, layers=layers)
    assert s.values[layers[1].name][2].abs() < 1e-6
    assert s.flat().abs().argmin() == layers[0].num_heads + 2


def test_pairs_with_a_loss_function() -> None:
    model = randomise(TorchEncoder())
    x, y = torch.randn(6, 5, 32), torch.randint(0, 3, (6,))
    whole = hp.score(model, [(x, y)], "ablation", loss_fn=cross_entropy)
    parts = hp.score(model, [(x[:2], y[:2]), (x[2:], y[2:])], "ablation", loss_fn=cross_entropy)
    torch.testing.assert_close(whole.flat(), parts.flat(), rtol=1e-4, atol=1e-6)
    assert whole.unit == "loss added when the head is removed"  # and not nats: nobody knows what the function returns
    assert whole.signed
    refuses("not one loss per example", hp.score, model, [(x, y)], loss_fn=F.cross_entropy)
    with pytest.raises(hp.HeadPruneError, match="loss_fn is str 'cross_entropy', which cannot be called"):
        hp.score(model, [(x, y)], loss_fn="cross_entropy")  # type: ignore[arg-type]
    refuses(r'A batch is a tuple.* such as {"x": inputs, "labels": labels}', hp.score, model, [(x, y)])


def test_the_model_is_left_alone() -> None:
    model, example = t5()
    model.train()
    batch = labelled(model, example)
    before = {n: p.clone() for n, p in model.named_parameters()}
    for method in METHODS:
        hp.score(model, [batch], quick(method, "permutations=4", "steps=8"))
    assert (model.training, model.config.use_cache, hooks(model)) == (True, True, 0)
    assert all(torch.equal(p, before[n]) and p.requires_grad and p.grad is None for n, p in model.named_parameters())


@pytest.mark.parametrize("method", LOOKING)
def test_the_example_with_a_bad_loss_is_named(method: str) -> None:
    model, _ = bert()
    batches = split({**text(6, 7), "labels": torch.arange(6)}, 2)

    def loss_fn(out: Any, labels: torch.Tensor) -> torch.Tensor:
        return torch.where(labels == 3, torch.inf, out.logits.square().mean(1))

    with pytest.raises(hp.HeadPruneError, match=r"example 3 \(in the order given\) is inf"):
        hp.score(model, batches, quick(method, "steps=8"), loss_fn=loss_fn)
    assert hooks(model) == 0
    assert all(p.requires_grad for p in model.parameters())


def test_scores_print_short() -> None:
    """The repr of 72 heads' scores had 3,600 characters."""
    model, batch = ZOO["bert"]()
    scores = hp.score(model, [batch], method="gradient")
    top = scores.top(2)
    assert [value for _, value, _ in top] == scores.flat().sort(descending=True).values[:2].tolist()
    assert top[0][0] in repr(scores)
    assert len(repr(scores)) < 200
    assert scores._repr_html_().count("<td") == 12
    (axis, _) = scores.plot().axes
    assert axis.get_title() == "gradient"


@pytest.mark.parametrize(
    "method", ["random", "l0:steps=9", "dsp:steps=9", "shapley:permutations=6", "resample-ablation"]
)
def test_only_the_seed_matters(method: str) -> None:
    model, batches = small()
    state = torch.get_rng_state()
    a, b, c = (hp.score(model, batches, method, seed=seed).flat() for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), state)


def test_files_and_agreement(tmp_path: Path) -> None:
    model, example = llama()
    s = hp.score(model, [labelled(model, example)], "fisher")
    s.save(tmp_path / "scores.json")
    back = hp.HeadScores.load(tmp_path / "scores.json")
    assert torch.equal(back.flat(), s.flat())
    assert (back.layers, back.model, back.details) == (s.layers, s.model, s.details)
    torch.testing.assert_close(back.matrix, s.matrix, rtol=1e-6, atol=1e-12)
    same = hp.agreement(s, back)
    assert (same.spearman, same.kendall, same.top_half) == (pytest.approx(1), pytest.approx(1), 1)
    for top in (-2, 0, len(s.labels()) + 1):
        refuses(f"top is {top}, and there are {len(s.labels())} heads", hp.agreement, s, back, top=top)
    for wrong in ("x", 2, True):
        dataclasses.replace(s, details={"reliability": wrong}).save(tmp_path / "edited.json")
        refuses("reliability is .*, which is no number", hp.HeadScores.load, tmp_path / "edited.json")


@pytest.mark.parametrize(("method", "seed", "message"), [
    ("random", -1, "seed is -1"), ("l0:keep=0", 0, "keep 0 leaves no head"), ("dsp:keep=99", 0, "keep 99 is more than all"),
    ("l0:pace=3", 0, "no setting 'pace'"), ("shapley:permutations=0", 0, "permutations is 0"),
])  # fmt: skip
def test_mistakes(method: str, seed: int, message: str) -> None:
    """Others are rows of `tests.support.bad_inputs`."""
    model, example = bert()
    refuses(message, hp.score, model, [labelled(model, example)], method, seed=seed)
    refuses("no examples", hp.score, model, [])


# -- models and data that once got wrong scores, silently -------------------------------------------


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


class OfLongTexts(Plain):
    """Short texts skip the second layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.head((x + self.second(x) if x.shape[1] > 4 else x).mean(1))


@pytest.mark.parametrize("method", [m for m in WEIGHING if m != "weight-norm"])
def test_a_layer_that_does_not_run_on_some_batch(method: str) -> None:
    """It has no effect there, and where it never runs none at all: three methods ended in a KeyError or a RuntimeError."""
    model, (x, y) = randomise(OfLongTexts()), pair()
    layers, scoring = hp.find_attention(model, x), quick(method, "permutations=4", "steps=8")
    scores = hp.score(model, [(x[:3], y[:3]), (x[3:, :3], y[3:])], scoring, loss_fn=cross_entropy, layers=layers)
    assert scores.flat().isfinite().all()
    assert scores.values["second"].abs().min() > 0
    never = hp.score(model, [(x[:, :3], y)], scoring, loss_fn=cross_entropy, layers=layers)
    assert never.values["second"].abs().max() < 1e-6  # on some processors a batch of another size is rounded otherwise
    assert never.values["first"].abs().min() > 0
    long = hp.score(model, [(x[:3], y[:3])], scoring, loss_fn=cross_entropy, layers=layers)
    if method in ("mean-ablation", "resample-ablation", "output-norm"):
        torch.testing.assert_close(scores.values["second"], long.values["second"] / 2, rtol=1e-4, atol=1e-7)


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

    def build(self) -> None:
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


def test_the_dense_model_does_not_diverge_from_itself() -> None:
    """The loss of drawn labels was given for the mean divergence."""
    model, batches = small()
    for method in ("ablation", "ablation:examples=2", "gradient", "fisher"):
        assert hp.score(model, batches, method, distil=True).details["mean_loss"] == pytest.approx(0, abs=1e-6)
        assert hp.score(model, batches, method).details["mean_loss"] > 0.1


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


# -- ablation: replayed against plain forwards, filled heads against changed biases, estimates against all examples --


def test_tiny_divergences_of_a_model_that_is_sure_are_replayed() -> None:
    """They are rounded like the logits that they are computed from: no relative error of theirs can be asked for."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = randomise(tf.BertForSequenceClassification(tf.BertConfig(vocab_size=100, num_labels=2, **sizes)))
    model.classifier.bias.data[0] += 8.0
    batches = [{"input_ids": ids} for ids in torch.randint(1, 100, (12, 24)).split(6)]
    scores = hp.score(model, batches, "ablation", distil=True)
    assert 0 < scores.flat().abs().max() < 0.01
    assert scores.details["replayed"] == "every layer"


# -- what comes in a head's place --------------------------------------------------------------


HEAD = 2  # of the second layer
ByHand = tuple[nn.Module, list[dict[str, Tensor]], hp.AttentionLayer, list[Tensor], list[Tensor], Tensor]


def by_hand(name: str, method: str) -> ByHand:
    """A model in float64, its examples one by one, a layer, what its W_O reads of each, their losses, and the score of its head."""
    model, batch = double(name)
    rows, layers, seen = split(batch, 1), hp.find_attention(model, batch), list[Tensor]()
    scores = hp.score(model, [batch], method, layers=layers, seed=3)
    assert scores.signed
    layer = layers[1 % len(layers)]
    output = model.get_submodule(layer.output_projection.module)
    handle = output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        dense = [per_example_loss(model, r) for r in rows]  # without padding
    handle.remove()
    return model, rows, layer, seen, dense, scores.values[layer.name][HEAD]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "albert"])
@torch.no_grad()
def test_mean_ablation_is_a_bias(name: str) -> None:
    """A head that gives its mean, over all calls of its layer, is a head that is gone, and W_O's bias that holds its mean."""
    model, rows, layer, seen, dense, found = by_hand(name, "mean-ablation")
    columns = list(layer.output_projection.features[HEAD])
    output = model.get_submodule(layer.output_projection.module)
    weight = output.weight if isinstance(output, nn.Linear) else output.weight.T
    shift = weight[:, columns] @ torch.cat(seen)[:, columns].mean(0)
    without = scaled(model, layer, HEAD, 0.0)
    other = without.get_submodule(layer.output_projection.module)
    other.register_forward_hook(lambda module, args, out: out + shift)
    effects = [per_example_loss(without, r) - loss for r, loss in zip(rows, dense, strict=True)]
    torch.testing.assert_close(found, torch.stack(effects).mean(), rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_resample_ablation_against_brute_force() -> None:
    """Draw the tokens here again, and put them into W_O's input by hand, example by example, in float64."""
    model, rows, layer, seen, dense, found = by_hand("bert", "resample-ablation")
    columns = list(layer.output_projection.features[HEAD])
    picked = [int(np.random.default_rng((3, i)).integers(len(tokens), size=1)[0]) for i, tokens in enumerate(seen)]
    pool = torch.stack([tokens[k] for tokens, k in zip(seen, picked, strict=True)])
    effects = []
    for i, row in enumerate(rows):
        # As many draws as the batch has tokens; those of padding are not looked at.
        drawn = np.random.default_rng((4, i)).integers(len(rows), size=row["input_ids"].shape[1])[: len(seen[i])]

        def put(module: nn.Module, args: Any, drawn: Any = drawn) -> tuple[Tensor]:
            hidden = args[0].clone()
            hidden[0][:, columns] = pool[drawn][:, columns]
            return (hidden,)

        handle = model.get_submodule(layer.output_projection.module).register_forward_pre_hook(put)
        effects.append(per_example_loss(model, row) - dense[i])
        handle.remove()
    torch.testing.assert_close(found, torch.stack(effects).mean(), rtol=1e-6, atol=1e-9)


# -- few examples ------------------------------------------------------------------------------


def many(rows: int = 96) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, _ = bert()
    return model, split(labelled(model, text(rows, 8)), 16)


DRAWS = 20  # of examples, for every head


@pytest.mark.slow
def test_few_examples_estimate_all_of_them() -> None:
    """Over draws the estimate is unbiased, and its interval covers the full-data value."""
    model, batches = many()
    layers = hp.find_attention(model, text())[1:]
    full = hp.score(model, batches, "ablation", layers=layers).flat()
    values, covered, spread = [], [], []
    for seed in range(DRAWS):
        s = hp.score(model, batches, "ablation:examples=24", layers=layers, seed=seed)
        assert 8 < s.details["ablated"] < 48
        error = torch.tensor(s.details["sampling_stderr"], dtype=torch.float64)
        values.append(s.flat())
        covered.append((s.flat() - full).abs() <= 2.07 * error)
        spread.append(error**2)
        assert (s.flat_stderr() >= error).all()
    mean, error = torch.stack(values).mean(0), torch.stack(values).std(0) / DRAWS**0.5
    assert ((mean - full).abs() <= 4 * error).all()
    assert torch.stack(covered).double().mean() >= 0.92
    stated, actual = torch.stack(spread).mean(), torch.stack(values).var(0).mean()
    assert 0.7 <= stated / actual <= 3


def test_few_examples_are_spent_at_the_cut() -> None:
    model, batches = many()
    s = hp.score(model, batches, "ablation:examples=24,keep=6")
    assert s.details["ablated_most"] > 1.05 * s.details["ablated"]
    assert hp.score(model, batches, "ablation:examples=96").details.get("ablated") is None  # all


def test_a_time_limit() -> None:
    model, batches = many()
    short = hp.score(model, batches, "ablation:time=0.3")
    assert short.details["ablated"] <= 96
    assert "as many as fitted into 0.3 s here" in short.details["estimated"]
    long = hp.score(model, batches, "ablation:time=1000")
    torch.testing.assert_close(long.flat(), hp.score(model, batches, "ablation").flat(), rtol=1e-4, atol=1e-6)
    assert max(long.details["sampling_stderr"]) == 0


# -- losses ------------------------------------------------------------------------------------


def test_normalised_scores() -> None:
    model, batch = double("bert")
    plain, unit = (hp.score(model, [batch], method) for method in ("gradient", "gradient:normalise"))
    for layer in plain.layers:
        norm = plain.values[layer.name].norm()
        torch.testing.assert_close(unit.values[layer.name], plain.values[layer.name] / norm)
        torch.testing.assert_close(unit.stderr[layer.name], plain.stderr[layer.name] / norm)
    assert "L2 norm" in unit.unit
    plain, unit = (hp.score(model, [batch], f"ablation:examples=2{more}") for more in ("", ",normalise"))
    ratio = torch.tensor(unit.details["sampling_stderr"]) / torch.tensor(plain.details["sampling_stderr"])
    torch.testing.assert_close(ratio.double(), unit.flat() / plain.flat(), rtol=1e-4, atol=0)
    plain, unit = (hp.score(model, [batch], method) for method in ("fisher", "fisher:normalise"))
    scale = (unit.flat() / plain.flat()).sqrt()  # of gates, whose Fisher matrix it is
    torch.testing.assert_close(unit.matrix, plain.matrix * scale * scale[:, None])
    torch.testing.assert_close(unit.matrix.diagonal(), unit.flat())


def test_fisher_and_signed_gradient_come_from_one_examples_gradients() -> None:
    model, batch = double("bert")
    rows = [hp.score(model, [r], "signed-gradient").flat() for r in split(batch, 1)]
    each = torch.stack(rows)
    signed, fisher = hp.score(model, [batch], "signed-gradient"), hp.score(model, [batch], "fisher")
    torch.testing.assert_close(signed.flat(), each.mean(0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(fisher.flat(), (each**2).mean(0), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(fisher.matrix, each.T @ each / 3, rtol=1e-3, atol=1e-6)


def test_scores_say_how_far_other_examples_would_order_the_heads_alike() -> None:
    model, batches = many()
    for method in ("ablation", "ablation:examples=24"):  # of few examples as of all
        s = hp.score(model, batches, method)
        assert 0 < s.details["reliability"] < 1
        assert f"a Spearman correlation of about {s.details['reliability']:.2f}" in s.stability
    sure, unsure, noise = (dataclasses.replace(s, details={"reliability": r}).stability for r in (0.9, 0.5, 0.0))
    assert "for 0.8, score on about 400; signs cancel here: gradient" in unsure  # 4 x 96, by Spearman and Brown
    assert "score" not in sure
    assert "more than" in noise
    assert not hp.score(model, batches, "weight-norm").stability
    assert not hp.score(model, batches[:1], "shapley:permutations=2").stability  # over orders, not examples


# -- replays: only what comes after a gate runs --------------------------------------------------------------

_SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32}
WORDS = {**_SMALL, "vocab_size": 100, "pad_token_id": 0}
Case = tuple[nn.Module, list[Any], Callable[[Any, Tensor], Tensor] | None]
PAIRS = [({"input_ids": text(4, 7)["input_ids"]}, torch.tensor([0, 1, 0, 1]))]


class SharedFeedForward(nn.Module):
    """Whose first and last block have one feed-forward layer: by its name alone one could not tell which call reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.model = randomise(tf.BertForSequenceClassification(tf.BertConfig(**WORDS)))
        layers = self.model.bert.encoder.layer
        layers[2].intermediate = layers[0].intermediate

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits


def with_labels(model: nn.Module, *examples: Any) -> Case:
    return randomise(model), [labelled(model, example) for example in examples], None


def labels_of_tokens() -> Case:
    batch, model = text(4, 7), randomise(tf.BertForTokenClassification(tf.BertConfig(**WORDS)))
    return model, [{**batch, "labels": batch["input_ids"] % 2}], None


def squares(output: Any, labels: Tensor) -> Tensor:
    return ((output[0] - labels) ** 2).flatten(1).mean(1)


def of_base(name: str) -> Case:
    """Its hidden states are compared with noise."""
    model, example = built(name)
    shape = model(**example)[0].shape
    return model, [{**example, "labels": torch.randn(shape, generator=torch.Generator().manual_seed(1))}], squares


def gpt2_classifier() -> nn.Module:
    config = tf.GPT2Config(n_layer=3, n_head=4, n_embd=16, vocab_size=100, pad_token_id=0)
    return tf.GPT2ForSequenceClassification(config)


def two_lengths() -> Case:
    """The study sees a batch without padding; in the other one the last token that is none is elsewhere."""
    full, padded = (text(rows, 7, seed=rows)["input_ids"].clamp(min=1) for rows in (4, 3))
    padded[1, 4:] = 0
    return with_labels(gpt2_classifier(), {"input_ids": full}, {"input_ids": padded})


# A model, batches and the loss.
CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda name=name: with_labels(*ZOO[name]())) for name in ("bert", "gpt2", "llama", "vit", "t5")},
    "another length": two_lengths,
    "labels of tokens": labels_of_tokens,
    "a layer that runs twice": lambda: (SharedFeedForward(), PAIRS, cross_entropy),
    # Layers that run several times, experts, windows.
    **{
        name: partial(of_base, name)
        for name in ("albert", "mixtral", "swin", "xlnet", "longformer", "gemma3_text", "bitnet")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_losses_are_those_of_plain_passes(name: str) -> None:
    """For every head of every batch."""
    model, batches, loss_fn = CASES[name]()
    every = hp.find_attention(model, unlabelled(batches)[0]) if loss_fn is squares else []
    scores = hp.score(model, batches, "ablation", loss_fn=loss_fn, layers=every[:1] + every[1:][-1:] or None)
    assert scores.details["replayed"] == "every layer" or name not in ZOO
    dense = hp.evaluate(model, batches, loss_fn=loss_fn).loss
    for layer in scores.layers:
        for head in range(0, layer.num_heads, 1 + layer.num_heads // 7):  # of many heads some
            with hp.mask(model, {layer.name: [head]}, layers=scores.layers):
                masked = hp.evaluate(model, batches, loss_fn=loss_fn).loss
            near = {"rel": 1e-3, "abs": 1e-5 * dense.mean()} if loss_fn is squares else {"rel": 1e-4, "abs": 1e-6}
            value = float(scores.values[layer.name][head])
            assert value == pytest.approx(float((masked - dense).mean()), **near), (layer.name, head)


def test_a_replay_runs_only_what_comes_after_the_gate() -> None:
    (model, batch), ran = double("bert"), list[int]()
    for i, block in enumerate(model.bert.encoder.layer):
        block.register_forward_pre_hook(lambda _, args, i=i: ran.extend([i] * len(args[0])))
    runs = []
    for batches in ([batch], [batch, batch]):
        ran.clear()
        hp.score(model, batches, "ablation")
        runs.append([ran.count(i) for i in range(3)])
    first, second, third = (two - one for one, two in zip(*runs, strict=True))  # of a batch more
    assert (second - first, third - second) == (12, 12)  # four heads, three examples


def test_memory_that_runs_out_halves_the_stack() -> None:
    model, batch = double("bert")
    expected = hp.score(model, [batch], "ablation")

    def note(_: nn.Module, args: Any) -> None:
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.bert.encoder.layer[2].register_forward_pre_hook(note)
    for method in ("ablation", "ablation:memory=1"):  # with little memory to begin with, too
        scores = hp.score(model, [batch], method, layers=expected.layers)
        torch.testing.assert_close(scores.flat(), expected.flat(), rtol=1e-4, atol=1e-6)


def test_a_routers_loss_does_not_end_the_scoring() -> None:
    """Its logits of calls that a replay skips or repeats need not fit the rest of its loss."""
    config = tf.MixtralConfig(**WORDS, num_key_value_heads=2, num_local_experts=3, output_router_logits=True)
    model = randomise(tf.MixtralForCausalLM(config))
    batches = [text(rows, 6, seed=rows) for rows in (2, 1)]
    found = hp.score(model, batches, "ablation", distil=True)
    layer = hp.find_attention(model, batches[0])[-1]
    effects = []
    with torch.no_grad():
        for batch in batches:
            dense = model(**batch).logits.log_softmax(-1)
            with hp.mask(model, {layer.name: [1]}):
                now = model(**batch).logits.log_softmax(-1)
            each, real = (dense.exp() * (dense - now)).sum(-1), batch["attention_mask"]
            effects += ((each * real).sum(1) / real.sum(1)).tolist()
    assert float(found.values[layer.name][1]) == pytest.approx(sum(effects) / len(effects), rel=1e-3)


def test_labels_at_once_that_only_the_labels_tell() -> None:
    """transformers sets problem_type when a model first sees such labels: repair read it before, and compared softmaxes."""
    config = tf.RobertaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
    )  # fmt: skip
    model = randomise(tf.RobertaForSequenceClassification(config))
    ids = torch.randint(5, 60, (6, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0]])
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}]
    fidelity = Fidelity(model, batches)
    with torch.no_grad():
        known = model(ids).logits.sigmoid()
        model.classifier.out_proj.weight.mul_(0.5)
        now = model(ids).logits.sigmoid()
    each = known * (known / now).log() + (1 - known) * ((1 - known) / (1 - now)).log()
    assert float(fidelity.each(nullcontext).mean()) == pytest.approx(float(each.sum(1).mean()), rel=1e-4)
