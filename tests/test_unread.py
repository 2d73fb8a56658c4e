"""Replays: only what comes after a gate runs, tokens that no loss reads are left out, and the scores are those of plain forward passes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.zoo import ZOO, bert, labelled, randomise, text

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


def tokenwise(kind: Any) -> Case:
    batch = text(4, 7)
    return randomise(kind(tf.BertConfig(**WORDS))), [{**batch, "labels": batch["input_ids"] % 2}], None


def of_zoo(name: str) -> Case:
    return with_labels(*ZOO[name]())


def gpt2_classifier() -> nn.Module:
    return tf.GPT2ForSequenceClassification(
        tf.GPT2Config(n_layer=3, n_head=4, n_embd=16, vocab_size=100, pad_token_id=0)
    )


def two_lengths() -> Case:
    """The study sees a batch without padding; in the other one the last token that is none is elsewhere."""
    full, padded = (text(rows, 7, seed=rows)["input_ids"].clamp(min=1) for rows in (4, 3))
    padded[1, 4:] = 0
    return with_labels(gpt2_classifier(), {"input_ids": full}, {"input_ids": padded})


# A model, batches and the loss; and whether its last block's feed-forward layer runs for one token alone.
CASES: dict[str, tuple[Callable[[], Case], bool | None]] = {
    **{name: (partial(of_zoo, name), True if name in ("bert", "vit") else None) for name in ZOO if name not in ("mha", "torch_transformer")},
    "gpt2's last token": (lambda: with_labels(gpt2_classifier(), {"input_ids": text(4, 7)["input_ids"].clamp(min=1)}), True),
    "llama's last token": (lambda: with_labels(
        tf.LlamaForSequenceClassification(tf.LlamaConfig(**WORDS, num_key_value_heads=2)), {"input_ids": text(4, 7)["input_ids"]}), True),
    "another token": (two_lengths, False),
    "labels of tokens": (lambda: tokenwise(tf.BertForTokenClassification), False),
    "masked tokens": (lambda: tokenwise(tf.BertForMaskedLM), False),
    "mean": (lambda: (Mean(hide=False), PAIRS, cross_entropy), False),
    "mean without NaN": (lambda: (Mean(hide=True), PAIRS, cross_entropy), False),
    "wrong answers": (lambda: (bert()[0], PAIRS, wrong_answers), False),
    "a layer that runs twice": (lambda: (Shared(), PAIRS, cross_entropy), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_replayed_losses_are_those_of_plain_passes(name: str) -> None:
    """For every head of every batch; and where a loss reads one token, the last block's other tokens are left out."""
    make, cut = CASES[name]
    model, batches, loss_fn = make()
    tokens = [counted(module) for module in feed_forward(model)]
    scores = hp.score(model, batches, "ablation", loss_fn=loss_fn)
    assert scores.details["replayed"] == "every layer" or name not in ZOO
    once = [sum(calls) for calls in tokens]
    hp.score(model, batches * 2, "ablation", loss_fn=loss_fn, layers=scores.layers)
    more = [sum(calls) - 2 * n for calls, n in zip(tokens, once, strict=True)]  # what a batch more takes
    assert (
        cut is None or (more[-1] < more[0]) == cut
    )  # the last block runs for the heads of all three, the first one for its own
    dense = hp.evaluate(model, batches, loss_fn=loss_fn).loss
    for layer in scores.layers:
        for head, value in enumerate(scores.values[layer.name].tolist()):
            with hp.mask(model, {layer.name: [head]}, layers=scores.layers):
                masked = hp.evaluate(model, batches, loss_fn=loss_fn).loss
            assert value == pytest.approx(float((masked - dense).mean()), rel=1e-4, abs=1e-6), (layer.name, head)


def feed_forward(model: nn.Module) -> list[nn.Module]:
    """The modules that widen the hidden state, one of each block."""
    return [
        m
        for n, m in model.named_modules()
        if n.endswith("c_fc") or getattr(m, "out_features", 0) > getattr(m, "in_features", 99)
    ]


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
    scores = hp.score(model, [batch], "ablation", layers=expected.layers)
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
