"""Scores against brute force in float64, and against the mistakes of older tools."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from tests.support import problems
from tests.support.cases import without
from tests.support.causal import OwnLoss
from tests.support.checks import hooks
from tests.support.errors import refuses
from tests.support.plain import WIDTH, Attention
from tests.support.problems import double, per_example_loss, quick, scaled, small, split
from tests.support.zoo import ZOO, TorchEncoder, bert, labelled, llama, randomise, sizes, t5, text, wav2vec2

LOOKING = [  # at data
    "ablation", "mean-ablation", "resample-ablation", "gradient", "signed-gradient", "fisher", "l0", "dsp", "integrated-gradients",
    "shapley", "entropy", "confidence", "output-norm",
]  # fmt: skip
REAL_METHODS = [*LOOKING, "weight-norm"]
METHODS = [*REAL_METHODS, "random"]
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
def traced_llama() -> tuple[nn.Module, list[hp.AttentionLayer]]:
    config = tf.LlamaConfig(**sizes("sdpa", num_hidden_layers=2, num_key_value_heads=2))
    model = randomise(tf.LlamaForCausalLM(config))
    return model, hp.find_attention(model, text())


@pytest.mark.parametrize("method", EFFECTS)
@settings(max_examples=4)
@given(extra=st.integers(1, 6), rows=st.integers(1, 4), length=st.integers(2, 9), left=st.booleans())
def test_padding_adds_nothing(method: str, extra: int, rows: int, length: int, left: bool) -> None:
    """On either side: on the left, a label of the text's first token would be one that only padding predicts."""
    model, layers = traced_llama()
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

    def loss_fn(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, labels, reduction="none")

    whole = hp.score(model, [(x, y)], "ablation", loss_fn=loss_fn)
    parts = hp.score(model, [(x[:2], y[:2]), (x[2:], y[2:])], "ablation", loss_fn=loss_fn)
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
