"""Replays: only what comes after a gate runs, tokens that no loss reads are left out, and the losses are a plain forward's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.batches import Rows
from headprune.losses import ExampleLoss
from headprune.running import evaluating, exact_attention
from headprune.scoring import calls
from headprune.scoring.base import Problem
from headprune.scoring.replay import Recording, Replay
from tests.support.zoo import bert, labelled, randomise, text, vit

_SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32}


def problem_of(model: nn.Module, batches: list[Any], losses: Callable[[Any], Tensor] | None = None) -> Problem:
    own = ExampleLoss(model)
    if losses is None:
        own.prepare(batches)
    layers = hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})
    return Problem(model, layers, [(b, Rows().size(b)) for b in batches], losses or own, 0, lambda *a: None)


def gpt2_classifier() -> nn.Module:
    return randomise(
        tf.GPT2ForSequenceClassification(tf.GPT2Config(n_layer=3, n_head=4, n_embd=16, vocab_size=100, pad_token_id=0))
    )


def llama_classifier() -> nn.Module:
    return randomise(
        tf.LlamaForSequenceClassification(
            tf.LlamaConfig(**_SMALL, num_key_value_heads=2, vocab_size=100, pad_token_id=0)
        )
    )


def check(problem: Problem) -> Replay:
    """That replays give plain forwards' losses for every head of every batch."""
    with evaluating(problem.model), exact_attention(problem.model), torch.no_grad():
        replay = Replay(problem)
        for batch, size in problem.batches:
            recording = replay.of(batch, size)
            for rows in torch.split(1 - torch.eye(problem.heads), [a.num_heads for a in problem.layers]):
                for row, mine in zip(rows, recording.losses(rows), strict=True):
                    drop = {k: (g == 0).nonzero().flatten().tolist() for k, g in problem.split(row).items()}
                    with hp.mask(problem.model, drop, layers=problem.layers):
                        torch.testing.assert_close(mine, problem.losses(batch).double(), rtol=1e-4, atol=1e-6)
    return replay


class Counting(nn.Module):
    """Counts the rows that go through a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.rows = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.rows += args[0].shape[0]
        return self.inner(*args, **kwargs)


def test_a_replay_runs_only_what_comes_after_the_gate() -> None:
    model, example = bert()
    blocks = model.bert.encoder.layer = nn.ModuleList(Counting(layer) for layer in model.bert.encoder.layer)
    batch = labelled(model, example)
    problem = problem_of(model, [batch])
    with evaluating(model), exact_attention(model), torch.no_grad():
        recording = Replay(problem).of(batch, 3)
        recording.doubtful.clear()  # the comparison with a plain forward runs every block
        for number, layer in enumerate(problem.layers):
            before = [block.rows for block in blocks]
            gates = torch.ones(2, problem.heads)
            gates[0, 4 * number] = gates[1, 4 * number + 1] = 0
            recording.losses(gates)
            ran = [block.rows - b for block, b in zip(blocks, before, strict=True)]
            assert ran == [0] * number + [6] * (len(ran) - number), layer.name
        mixed = torch.ones(1, problem.heads)
        mixed[0, [1, 9]] = 0
        expected = recording.plain(problem.split(mixed[0]))
        torch.testing.assert_close(recording.losses(mixed)[0], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(recording.losses(torch.ones(2, problem.heads)), recording.dense.expand(2, -1))


def test_memory_that_runs_out_halves_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = bert()
    batch = labelled(model, example)
    original, stacks, most = Recording.stacked, [], 1

    def greedy(self: Any, gates: Any, first: str) -> Tensor:
        stacks.append(len(next(iter(gates.values()))))
        if stacks[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, gates, first)

    with evaluating(model), exact_attention(model):
        problem = problem_of(model, [batch])
        study, gates = Replay(problem), 1 - torch.eye(problem.heads)[:4]
        recording = study.of(batch, 3)
        expected = recording.losses(gates)
        monkeypatch.setattr(Recording, "stacked", greedy)
        torch.testing.assert_close(recording.losses(gates), expected, rtol=1e-5, atol=1e-6)
        assert stacks == [4, 2, 1, 1, 1, 1]
        most = 0
        with pytest.raises(hp.HeadPruneError, match="--batch-size"):
            recording.losses(gates)


# -- tokens that no loss reads -------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, vit])
def test_the_last_blocks_feed_forward_layer_runs_for_the_first_token(make: Any) -> None:
    model, example = make()
    batch = labelled(model, example)
    seen: list[int] = []
    mlps = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > m.in_features]
    for mlp in (mlps[0], mlps[-1]):
        original = mlp.forward
        mlp.forward = lambda x, original=original: (seen.append(x.shape[1]), original(x))[1]  # type: ignore[method-assign]
    problem = problem_of(model, [batch])
    replay = check(problem)
    assert set(replay.tokens.values()) == {0}
    last = problem.layers[-1]
    with evaluating(model), torch.no_grad():
        recording = replay.of(batch, Rows().size(batch))
        recording.doubtful.clear()
        for layer, tokens in ((problem.layers[0], [5, 1]), (last, [1])):
            seen.clear()
            gates = torch.ones(1, problem.heads)
            gates[0, sum(a.num_heads for a in problem.layers[: problem.layers.index(layer)])] = 0.0
            recording.losses(gates)
            assert [n > 1 for n in seen] == [n > 1 for n in tokens]


def test_a_causal_classifier_reads_its_last_token() -> None:
    for model in (gpt2_classifier(), llama_classifier()):
        replay = check(problem_of(model, [labelled(model, {"input_ids": text(4, 7)["input_ids"]})]))
        assert set(replay.tokens.values()) == {-1}


def test_a_batch_that_reads_another_token_is_computed_whole() -> None:
    """The study sees a batch without padding; in the other one the last token that is none is elsewhere."""
    model = gpt2_classifier()
    full, padded = text(4, 7)["input_ids"].clamp(min=1), text(3, 7, seed=5)["input_ids"].clamp(min=1)
    padded[1, 4:] = 0
    replay = check(problem_of(model, [labelled(model, {"input_ids": ids}) for ids in (full, padded)]))
    assert not replay.tokens
    replay = check(problem_of(model, [labelled(model, {"input_ids": full})]))
    assert replay.tokens


def test_models_that_read_all_tokens_are_left_alone() -> None:
    config = tf.BertConfig(**_SMALL, vocab_size=100)
    for model in (tf.BertForTokenClassification(config), tf.BertForMaskedLM(config)):
        randomise(model)
        batch = text(4, 7)
        assert check(problem_of(model, [{**batch, "labels": batch["input_ids"] % 2}])).tokens == {}


class Mean(nn.Module):
    """A BERT that reads the mean over tokens, in a way that NaN does not get through."""

    def __init__(self, hide: bool) -> None:
        super().__init__()
        self.bert = randomise(tf.BertModel(tf.BertConfig(**_SMALL, vocab_size=100)))
        self.hide = hide

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.bert(input_ids).last_hidden_state
        return hidden[:, 0, :2] + 0.2 * (hidden.nan_to_num() if self.hide else hidden).mean(1)[:, :2]


@pytest.mark.parametrize("kind", ["mean", "mean without NaN", "wrong answers"])
def test_losses_that_read_all_tokens_or_hide_nan(kind: str) -> None:
    """The number of wrong answers is finite whatever the answers are, so nothing could say that a token is read."""
    model = bert()[0] if kind == "wrong answers" else Mean(hide="without" in kind)
    batch = {"input_ids": text(4, 7)["input_ids"], "labels": torch.tensor([0, 1, 0, 1])}

    def losses(b: Any) -> Tensor:
        out = model(b["input_ids"])
        if kind == "wrong answers":
            return (out.logits.argmax(-1) != b["labels"]).float()
        return nn.functional.cross_entropy(out, b["labels"], reduction="none")

    assert check(problem_of(model, [batch], losses)).tokens == {}


class Shared(nn.Module):
    """Whose first and last block have one feed-forward layer: by its name alone one could not tell which call reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.model = randomise(tf.BertForSequenceClassification(tf.BertConfig(**_SMALL, vocab_size=100)))
        layers = self.model.bert.encoder.layer
        layers[2].intermediate = layers[0].intermediate

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits


def test_modules_that_run_twice_are_not_cut() -> None:
    model = Shared()
    batch = {"input_ids": text(4, 7)["input_ids"], "labels": torch.tensor([0, 1, 0, 1])}

    def losses(b: Any) -> Tensor:
        return nn.functional.cross_entropy(model(b["input_ids"]), b["labels"], reduction="none")

    tokens = check(problem_of(model, [batch], losses)).tokens
    assert "model.bert.encoder.layer.2.output" in tokens
    assert not any("intermediate" in name for name in tokens)


@pytest.mark.parametrize("method", ["mean-ablation", "resample-ablation"])
def test_fills_see_all_tokens(method: str) -> None:
    """The same scores whether the last block is cut or not."""
    model, example = bert()
    batch = labelled(model, example)
    scores = []
    for tokens in (calls.TOKENS, ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "TOKENS", tokens)
            scores.append(hp.score(model, [batch], method, seed=3).flat())
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-7)


def test_a_routers_loss_does_not_end_the_scoring() -> None:
    """What looks for tokens that are not read calls modules once more, and a router's logits of those calls do not fit its own loss."""
    config = tf.MixtralConfig(
        **_SMALL, num_key_value_heads=2, vocab_size=100, num_local_experts=3, output_router_logits=True, pad_token_id=0,
    )  # fmt: skip
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
            each = (dense.exp() * (dense - now)).sum(-1)
            real = batch["attention_mask"]
            effects += ((each * real).sum(1) / real.sum(1)).tolist()
    assert float(found.values[layer.name][1]) == pytest.approx(sum(effects) / len(effects), rel=1e-3)
