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
from torch import nn

import headprune as hp
from tests.support import problems
from tests.support.checks import hooks
from tests.support.errors import refuses
from tests.support.problems import double, per_example_loss, quick, small, split
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


class Loss(nn.Module):
    """A model's loss on one example, as a module, so that `functional_call` can replace a weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: dict[str, Any]) -> torch.Tensor:
        return per_example_loss(self.model, row)


def slope_of(model: nn.Module, layer: hp.AttentionLayer, head: int, row: dict[str, Any]) -> torch.Tensor:
    """dL/dxi of one example, by scaling the head's columns of W_O with a number that has a gradient."""
    weight, plain = problems.output_weight(model, layer)
    belongs = torch.zeros(weight.shape[1] if plain else weight.shape[0], dtype=weight.dtype)
    belongs[list(layer.output_projection.features[head])] = 1
    with torch.enable_grad():
        factor = torch.ones((), dtype=weight.dtype, requires_grad=True)
        gates = 1 + belongs * (factor - 1)
        gated = weight.detach() * (gates if plain else gates[:, None])
        name = f"model.{layer.output_projection.module}.weight"
        loss = torch.func.functional_call(Loss(model), {name: gated}, (row,))
        return torch.autograd.grad(loss, factor)[0]


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
            for head in range(layer.num_heads):
                without = problems.scaled(model, layer, head, 0.0)
                effect = torch.stack([per_example_loss(without, r) for r in rows]) - dense
                slope = torch.stack([slope_of(model, layer, head, r) for r in rows]).abs()
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
    layers = hp.find_attention(model, example)
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
@settings(max_examples=6)
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
@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_a_planted_dead_head_ranks_last(method: str, name: str) -> None:
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    model = problems.scaled(model, layers[1], 2, 0.0)
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
    assert len(repr(scores)) < 200
    assert "12 heads in 3 layers" in repr(scores)
    top = scores.top(2)
    assert [value for _, value, _ in top] == scores.flat().sort(descending=True).values[:2].tolist()
    assert top[0][0] in repr(scores)
    assert len(scores.top()) == 10
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
