"""Ablation: replayed against plain forwards, filled heads against changed biases, estimates against all examples; what a replay leaves out."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.families import built
from tests.support.problems import double, per_example_loss, scaled, split, unlabelled
from tests.support.zoo import ZOO, bert, labelled, randomise, text


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
    output = model.get_submodule(layers[1].output_projection.module)
    handle = output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        dense = [per_example_loss(model, r) for r in rows]  # without padding
    handle.remove()
    return model, rows, layers[1], seen, dense, scores.values[layers[1].name][HEAD]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@torch.no_grad()
def test_mean_ablation_is_a_bias(name: str) -> None:
    """A head that gives its mean is a head that is gone, and W_O's bias that holds its mean."""
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
    model, example = bert()
    batch = labelled(model, example)
    plain, unit = (hp.score(model, [batch], method) for method in ("gradient", "gradient:normalise"))
    for layer in plain.layers:
        norm = plain.values[layer.name].norm()
        torch.testing.assert_close(unit.values[layer.name], plain.values[layer.name] / norm)
        torch.testing.assert_close(unit.stderr[layer.name], plain.stderr[layer.name] / norm)
    assert "L2 norm" in unit.unit


def test_fisher_and_signed_gradient_come_from_one_examples_gradients() -> None:
    model, example = bert()
    batch = labelled(model, example)
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


# -- replays: only what comes after a gate runs, and tokens that no loss reads are left out ------------------

_SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32}
WORDS = {**_SMALL, "vocab_size": 100, "pad_token_id": 0}
Case = tuple[nn.Module, list[Any], Callable[[Any, Tensor], Tensor] | None]
PAIRS = [({"input_ids": text(4, 7)["input_ids"]}, torch.tensor([0, 1, 0, 1]))]


class Mean(nn.Module):
    """A BERT that reads the mean over tokens, perhaps in a way that NaN does not get through."""

    def __init__(self, hide: bool) -> None:
        super().__init__()
        self.bert, self.hide = randomise(tf.BertModel(tf.BertConfig(**WORDS))), hide

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.bert(input_ids).last_hidden_state
        return hidden[:, 0, :2] + 0.2 * (hidden.nan_to_num() if self.hide else hidden).mean(1)[:, :2]


class Shared(nn.Module):
    """Whose first and last block have one feed-forward layer: by its name alone one could not tell which call reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.model = randomise(tf.BertForSequenceClassification(tf.BertConfig(**WORDS)))
        layers = self.model.bert.encoder.layer
        layers[2].intermediate = layers[0].intermediate

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(getattr(output, "logits", output), labels, reduction="none")


def wrong_answers(output: Any, labels: Tensor) -> Tensor:
    """Finite whatever the answers are, so nothing can say that a token is read."""
    return (output.logits.argmax(-1) != labels).float()


def with_labels(model: nn.Module, *examples: Any) -> Case:
    return randomise(model), [labelled(model, example) for example in examples], None


def labels_of_tokens() -> Case:
    batch = text(4, 7)
    return (
        randomise(tf.BertForTokenClassification(tf.BertConfig(**WORDS))),
        [{**batch, "labels": batch["input_ids"] % 2}],
        None,
    )


def of_zoo(name: str) -> Case:
    return with_labels(*ZOO[name]())


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


# A model, batches and the loss; and whether its last block's feed-forward layer runs for one token alone.
CASES: dict[str, tuple[Callable[[], Case], bool | None]] = {
    **{name: (partial(of_zoo, name), True if name in ("bert", "vit") else None) for name in ("bert", "gpt2", "llama", "vit", "t5")},
    "gpt2's last token": (lambda: with_labels(gpt2_classifier(), {"input_ids": text(4, 7)["input_ids"].clamp(min=1)}), True),
    "llama's last token": (lambda: with_labels(
        tf.LlamaForSequenceClassification(tf.LlamaConfig(**WORDS, num_key_value_heads=2)), {"input_ids": text(4, 7)["input_ids"]}), True),
    "another token": (two_lengths, False),
    "labels of tokens": (labels_of_tokens, False),
    "mean": (lambda: (Mean(hide=False), PAIRS, cross_entropy), False),
    "mean without NaN": (lambda: (Mean(hide=True), PAIRS, cross_entropy), False),
    "wrong answers": (lambda: (bert()[0], PAIRS, wrong_answers), False),
    "a layer that runs twice": (lambda: (Shared(), PAIRS, cross_entropy), None),
    # Layers that run several times, experts, windows.
    **{name: (partial(of_base, name), None) for name in ("albert", "mixtral", "swin", "xlnet", "longformer", "gemma3_text", "bitnet")},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_replayed_losses_are_those_of_plain_passes(name: str) -> None:
    """For every head of every batch; and where a loss reads one token, the last block's other tokens are left out."""
    make, cut = CASES[name]
    model, batches, loss_fn = make()
    tokens = [counted(module) for module in feed_forward(model)]
    every = hp.find_attention(model, unlabelled(batches)[0]) if loss_fn is squares else []
    scores = hp.score(model, batches, "ablation", loss_fn=loss_fn, layers=every[:1] + every[1:][-1:] or None)
    assert scores.details["replayed"] == "every layer" or name not in ZOO
    if cut is not None:
        once = [sum(calls) for calls in tokens]
        hp.score(model, batches * 2, "ablation", loss_fn=loss_fn, layers=scores.layers)
        more = [sum(calls) - 2 * n for calls, n in zip(tokens, once, strict=True)]  # what a batch more takes
        assert (more[-1] < more[0]) == cut  # the last block runs for the heads of all three, the first one for its own
    dense = hp.evaluate(model, batches, loss_fn=loss_fn).loss
    for layer in scores.layers:
        for head in range(0, layer.num_heads, 1 + layer.num_heads // 7):  # of many heads some
            with hp.mask(model, {layer.name: [head]}, layers=scores.layers):
                masked = hp.evaluate(model, batches, loss_fn=loss_fn).loss
            near = {"rel": 1e-3, "abs": 1e-5 * dense.mean()} if loss_fn is squares else {"rel": 1e-4, "abs": 1e-6}
            value = float(scores.values[layer.name][head])
            assert value == pytest.approx(float((masked - dense).mean()), **near), (layer.name, head)


def feed_forward(model: nn.Module) -> list[nn.Module]:
    """The modules that widen the hidden state, one of each block."""
    wide = [n for n, m in model.named_modules() if getattr(m, "out_features", 0) > getattr(m, "in_features", 99)]
    return [m for n, m in model.named_modules() if n in wide or n.endswith("c_fc")]


def counted(module: nn.Module) -> list[int]:
    """How many tokens each call of a module computes (a hook would see all of them)."""
    calls, forward = list[int](), module.forward
    module.forward = lambda x: (calls.append(x.shape[0] * x.shape[1]), forward(x))[1]  # type: ignore[method-assign]
    return calls


def test_a_replay_runs_only_what_comes_after_the_gate() -> None:
    model, example = bert()
    batch, ran = labelled(model, example), list[int]()
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
    model, example = bert()
    batch = labelled(model, example)
    expected = hp.score(model, [batch], "ablation")

    def note(_: nn.Module, args: Any) -> None:
        if len(args[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.bert.encoder.layer[2].register_forward_pre_hook(note)
    for method in ("ablation", "ablation:memory=1"):  # with little memory to begin with, too
        scores = hp.score(model, [batch], method, layers=expected.layers)
        torch.testing.assert_close(scores.flat(), expected.flat(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["mean-ablation", "resample-ablation"])
def test_fills_see_all_tokens(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores whether the last block is cut or not."""
    model, example = bert()
    scores = [hp.score(model, [labelled(model, example)], method, seed=3).flat()]
    monkeypatch.setattr("headprune.scoring.calls.TOKENS", ())
    scores.append(hp.score(model, [labelled(model, example)], method, seed=3).flat())
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-7)


def test_a_routers_loss_does_not_end_the_scoring() -> None:
    """What looks for tokens that are not read calls modules once more, and a router's logits of those calls do not fit its own loss."""
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
