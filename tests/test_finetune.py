"""Fine-tuning: its loss against a reference by hand, its choice of epoch, its data, and interruptions."""

import copy
import json
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import headprune as hp
from headprune.app import finetune as room
from headprune.app.data import DataOptions, load_parts, load_train
from headprune.app.distillation import DistillationLoss, Mixture
from headprune.app.finetune import FinetuneOptions, finetune
from headprune.app.models import dummy_input, load_model
from headprune.evaluation import Measurement
from headprune.fingerprint import fingerprint
from tests import zoo
from tests.conftest import common, sentences, write_jsonl
from tests.interrupted import Processes
from tests.test_cli import run
from tests.zoo import bert, gpt2, labelled, llama, randomise, text, vit

ROOT = Path(__file__).parent.parent
Batch = dict[str, torch.Tensor]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def t5() -> Any:
    """Eager: transformers 5.0 has no other attention for it."""
    return zoo.t5("eager")


def pair(made: Any, removed: dict[int, list[int]] | None = None) -> tuple[nn.Module, nn.Module, Any]:
    """A dense model, the same pruned, and an example."""
    dense, example = made
    pruned = copy.deepcopy(dense)
    layers = hp.find_attention(dense, example)
    heads = removed or {0: [1], 1: list(range(layers[1].num_heads))}
    hp.prune(pruned, {layers[i].name: h for i, h in heads.items()}, example)
    return dense, pruned, example


def batches(model: nn.Module, example: Any, count: int) -> list[Batch]:
    """Batches of other content than the example, of the same form."""
    made = []
    for seed in range(count):
        new = dict(example)
        generator = torch.Generator().manual_seed(100 + seed)
        if "input_ids" in new:
            new["input_ids"] = torch.randint(3, 90, new["input_ids"].shape, generator=generator)
        else:
            new["pixel_values"] = torch.randn(new["pixel_values"].shape, generator=generator)
        made.append(labelled(model, new, seed))
    return made


def setting(steps: int = 4) -> tuple[nn.Module, nn.Module, list[Batch], list[Batch]]:
    dense, pruned, example = pair(bert())
    made = batches(dense, example, steps + 2)
    return dense, pruned, made[:steps], made[steps:]


# -- the loss ---------------------------------------------------------------------------------


def prepared(loss: DistillationLoss, batch: dict[str, Any]) -> DistillationLoss:
    loss.prepare(batch)
    return loss


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_loss_of_a_classifier_by_hand(alpha: float, temperature: float) -> None:
    dense, pruned, example = pair(bert())
    dense, pruned = dense.double(), pruned.double()
    batch = labelled(dense, example)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        found = prepared(DistillationLoss(pruned, dense, Mixture(alpha, temperature)), batch)(batch).numpy()
        z, t = pruned(**inputs).logits.numpy(), dense(**inputs).logits.numpy()
    p, q = softmax(t / temperature), softmax(z / temperature)
    divergence = temperature**2 * (p * (np.log(p) - np.log(q))).sum(-1)
    entropy = -np.log(softmax(z)[np.arange(len(z)), batch["labels"].numpy()])
    np.testing.assert_allclose(found, alpha * divergence + (1 - alpha) * entropy, rtol=1e-12)
    assert divergence.min() > 1e-4


def test_the_loss_of_tokens_by_hand() -> None:
    """Padding and tokens without a label add nothing; hidden states are compared layer by layer."""
    dense = randomise(tf.BertForTokenClassification(tf.BertConfig(**common(num_labels=5)))).double()
    example = {k: v.clamp(max=29) for k, v in text(3, 7).items()}
    dense, pruned, _ = pair((dense, example), {0: [1, 2]})
    labels = torch.tensor([[0, -100, 3, 4, 1, -100, 2], [-100] * 7, [1, 1, 1, 0, 0, -100, -100]])
    batch = {**example, "labels": labels}
    mixture = Mixture(0.4, 2.0, hidden_states=True)
    loss = DistillationLoss(pruned, dense, mixture)
    loss.prepare(batch)
    with torch.no_grad():
        found = loss(batch).numpy()
        now, known = (m(**example, output_hidden_states=True) for m in (pruned, dense))
    for row in range(3):
        real = example["attention_mask"][row].bool().numpy()
        z, t = now.logits[row].numpy(), known.logits[row].numpy()
        p, q = softmax(t / 2), softmax(z / 2)
        divergence = (4 * (p * np.log(p / q)).sum(-1))[real].mean()
        where = [i for i in range(7) if labels[row, i] >= 0]
        entropy = np.mean([-np.log(softmax(z[i])[labels[row, i]]) for i in where]) if where else 0.0
        hidden = [
            ((a[row].numpy() - b[row].numpy())[real] ** 2).mean() / (b[row].numpy()[real] ** 2).mean()
            for a, b in zip(now.hidden_states, known.hidden_states, strict=True)
        ]
        assert found[row] == pytest.approx(0.4 * divergence + 0.6 * entropy + np.mean(hidden), rel=1e-6)
    longer = {k: nn.functional.pad(v, (0, 3), value=-100 if k == "labels" else 0) for k, v in batch.items()}
    with torch.no_grad():
        np.testing.assert_allclose(loss(longer).numpy(), found, rtol=1e-6)


def test_several_labels_at_once_by_hand() -> None:
    config = tf.BertConfig(**common(num_labels=3, problem_type="multi_label_classification"))
    example = {k: v.clamp(max=29) for k, v in text(3, 7).items()}
    dense, pruned, _ = pair((randomise(tf.BertForSequenceClassification(config)).double(), example), {0: [1, 2]})
    batch = {**example, "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]).double()}
    with torch.no_grad():
        found = prepared(DistillationLoss(pruned, dense, Mixture(0.5, 2.0)), batch)(batch).numpy()
        z, t = pruned(**example).logits.numpy(), dense(**example).logits.numpy()

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    p, q, y = sigmoid(t / 2), sigmoid(z / 2), batch["labels"].numpy()
    divergence = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(-1)
    entropy = -(y * np.log(sigmoid(z)) + (1 - y) * np.log(1 - sigmoid(z))).mean(-1)
    np.testing.assert_allclose(found, 0.5 * divergence + 0.5 * entropy, rtol=1e-6)


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, t5])
def test_alpha_0_is_the_models_own_loss(make: Any) -> None:
    """In value and gradient, where every example has as many labelled tokens; no dense model is needed."""
    model, example = make()
    batch = labelled(model, {k: v[:2] for k, v in example.items()})
    if "labels" in batch and make is t5:
        batch["labels"] = batch["labels"].clamp(min=3)
    loss = DistillationLoss(model, None, Mixture(alpha=0.0))
    loss.prepare(batch)
    mine, own = loss(batch).mean(), model(**batch).loss
    assert mine.item() == pytest.approx(own.item(), rel=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    pairs = zip(
        torch.autograd.grad(mine, parameters, allow_unused=True),
        torch.autograd.grad(own, parameters, allow_unused=True), strict=True,
    )  # fmt: skip
    assert all((a is None and b is None) or torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("make", [bert, gpt2, vit, t5])
def test_a_student_like_its_teacher_loses_nothing(make: Any) -> None:
    model, example = make()
    batch = labelled(model, example)
    with torch.no_grad():
        loss = DistillationLoss(model, model, Mixture(1.0, 2.0, hidden_states=True))(batch)
    assert loss.shape == (3,)
    assert loss.abs().max() < 1e-6


def test_alpha_1_reads_no_labels() -> None:
    dense, pruned, example = pair(bert())
    loss = DistillationLoss(pruned, dense, Mixture(alpha=1.0))
    loss.prepare(example)
    batch = labelled(dense, example)
    assert torch.equal(loss(batch), loss({**batch, "labels": 1 - batch["labels"]}))
    with pytest.raises(hp.HeadPruneError, match="no labels"):
        DistillationLoss(pruned, dense, Mixture(alpha=0.9)).prepare(example)


def test_question_answering_learns_where_the_answer_is() -> None:
    config = tf.BertConfig(**common())
    example = {k: v.clamp(max=29) for k, v in text(3, 9).items()}
    dense, pruned, _ = pair((randomise(tf.BertForQuestionAnswering(config)), example))
    batch = {**example, "start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 2, 4])}
    DistillationLoss(pruned, dense, Mixture()).prepare(batch)
    loss = DistillationLoss(pruned, dense, Mixture(alpha=1.0))  # the labels' own loss counts padding
    with torch.no_grad():
        found = loss(batch)
        longer = {k: nn.functional.pad(v, (0, 3)) if v.ndim == 2 else v for k, v in batch.items()}
        torch.testing.assert_close(loss(longer), found)  # padding is no place for an answer
    assert found.min() > 0


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: Mixture(alpha=-0.1), "Alpha -0.1"), (lambda: Mixture(alpha=1.01), "Alpha 1.01"),
    (lambda: Mixture(temperature=0), "temperature 0"), (lambda: Mixture(temperature=float("nan")), "temperature nan"),
    (lambda: FinetuneOptions(epochs=0), "0 epochs"), (lambda: FinetuneOptions(learning_rate=-1), "learning rate -1"),
    (lambda: FinetuneOptions(patience=0), "patience"),
    (lambda: DistillationLoss(bert()[0], None, Mixture()), "no dense model"),
    (lambda: DistillationLoss(bert()[0], _more_classes(), Mixture()).prepare(labelled(*bert())), "logits are"),
    (lambda: DistillationLoss(bert()[0], _narrow(), Mixture(hidden_states=True)).prepare(labelled(*bert())), "hidden state is"),
])  # fmt: skip
def test_what_cannot_be(wrong: Any, message: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=message):
        wrong()


def _more_classes() -> nn.Module:
    return randomise(tf.BertForSequenceClassification(tf.BertConfig(**common(vocab_size=100, num_labels=3))))


def _narrow() -> nn.Module:
    return randomise(
        tf.BertForSequenceClassification(tf.BertConfig(**common(vocab_size=100, hidden_size=16, num_hidden_layers=3)))
    )


# -- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, t5])
def test_training_brings_the_pruned_model_nearer(make: Any, tmp_path: Path) -> None:
    """Of several families, with a whole layer gone: shapes, dtypes, the given models and what a file says are kept."""
    dense, pruned, example = pair(make(), {0: [0, 1]} if make is llama else None)
    made = batches(dense, example, 7)
    before = fingerprint(pruned), fingerprint(dense), torch.get_rng_state()
    config = pruned.config.to_dict()
    options = FinetuneOptions(epochs=8, learning_rate=3e-3, patience=99)
    done = finetune(pruned, dense, made[:6], made[:6], options)
    assert (fingerprint(pruned), fingerprint(dense)) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [(n, p.shape, p.dtype) for n, p in done.model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in pruned.named_parameters()
    ]
    assert not done.model.training
    assert {**done.model.config.to_dict(), "problem_type": None} == {**config, "problem_type": None}
    loss = [prepared(DistillationLoss(m, dense, Mixture()), made[0]) for m in (pruned, done.model)]
    with torch.no_grad():
        was, now = (sum(x(b).mean().item() for b in made[:6]) for x in loss)
    assert now < was
    assert done.best > 0
    hp.save(done.model, tmp_path / "model")
    again = hp.load(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(again(**made[6]).logits, done.model(**made[6]).logits)


def test_labels_alone_and_a_plain_module() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x)

    model = randomise(Plain())
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    made = [{"x": a, "labels": b} for a, b in zip(x.split(4), x[:, :3].argmax(-1).split(4), strict=True)]
    options = FinetuneOptions(epochs=20, learning_rate=0.05, mixture=Mixture(alpha=0))
    done = finetune(model, None, made, made, options, metric="accuracy")
    assert done.history[-1]["loss"] < done.history[0]["loss"]


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[tuple[float, float]]) -> list[str]:
    """Evaluations that find these accuracies and losses; what the model was at each."""
    seen: list[str] = []

    def fake(model: nn.Module, *_: Any) -> Measurement:
        accuracy, loss = values[len(seen)]
        seen.append(fingerprint(model))
        empty = np.zeros(0)
        return Measurement({"accuracy": accuracy, "loss": loss, "perplexity": np.exp(loss)}, empty, empty, empty)

    monkeypatch.setattr(room, "evaluate", fake)
    return seen


@pytest.mark.parametrize(("values", "metric", "best", "epochs"), [
    ([(0.1, 9), (0.5, 8), (0.7, 7), (0.6, 6), (0.65, 5)], "accuracy", 2, 4),  # patience 2, so no fifth epoch
    ([(0.1, 9), (0.5, 8), (0.7, 7), (0.6, 6), (0.8, 5), (0.8, 4)], "accuracy", 5, 5),  # the loss where accuracy ties
    ([(0.1, 9), (0.5, 8), (0.7, 9), (0.6, 7), (0.8, 7.5), (0.8, 7.2)], "perplexity", 3, 5),
    ([(0.9, 9), (0.5, 8), (0.4, 7), (0.3, 6)], "accuracy", 0, 3),  # never better than before training
    ([(0.1, 9), (0.2, 8), (0.3, 7), (0.4, 6), (0.5, 5), (0.6, 4)], "accuracy", 5, 5),
])  # fmt: skip
def test_the_best_epoch_is_kept(
    values: list[tuple[float, float]], metric: str, best: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, pruned, train, choose = setting(2)
    seen = scripted(monkeypatch, values)
    done = finetune(pruned, dense, train, choose, FinetuneOptions(epochs=5), metric=metric)
    assert (done.best, done.steps) == (2 * best, 2 * epochs)
    assert fingerprint(done.model) == seen[best]
    assert len(set(seen)) == len(seen) == epochs + 1
    assert [h["epoch"] for h in done.history] == list(range(epochs + 1))


def test_every_example_is_seen_once_an_epoch_in_batches_of_like_length(bert_folder: Path, data_folder: Path) -> None:
    loaded = load_model(str(bert_folder))
    options = DataOptions(str(data_folder), limit=20, batch_size=7)
    train, _ = load_train(options, loaded, load_parts(options, loaded))
    order = room._Order(train, FinetuneOptions(epochs=1.5, seed=3))
    assert len(order) == round(1.5 * 9)
    rows = [tuple(order[i]["input_ids"].shape) for i in range(9)]
    assert sum(n for n, _ in rows) == len(train) == 60
    assert order[9]["input_ids"].shape[0] > 0
    again = room._Order(train, FinetuneOptions(epochs=1.5, seed=3))
    assert all(torch.equal(again[i]["input_ids"], order[i]["input_ids"]) for i in (12, 3, 9, 0))
    other = room._Order(train, FinetuneOptions(seed=4))
    assert any(other[i]["input_ids"].shape != order[i]["input_ids"].shape for i in range(9)) or not torch.equal(
        other[0]["input_ids"], order[0]["input_ids"]
    )


def test_bfloat16_stays_bfloat16() -> None:
    dense, pruned, train, choose = setting(2)
    done = finetune(
        pruned.bfloat16(), dense.bfloat16(), train, choose, FinetuneOptions(mixture=Mixture(0.5, 2.0, True))
    )
    assert {p.dtype for p in done.model.parameters()} == {torch.bfloat16}


def test_a_loss_that_bursts_is_told() -> None:
    dense, pruned, train, choose = setting(2)
    with torch.no_grad():
        dense.classifier.bias.fill_(float("nan"))
    with pytest.raises(hp.HeadPruneError, match="smaller --learning-rate"):
        finetune(pruned, dense, train, choose)
    with pytest.raises(hp.HeadPruneError, match="float16"):
        finetune(pruned.half(), dense, train, choose)


# -- interruptions ----------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


def stopping_at(step: int) -> Any:
    def progress(done: int, total: int, note: str = "") -> None:
        if done == step:
            raise Interrupted

    return progress


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at every step."""
    monkeypatch.setattr(room, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(room, "_SAVE_SHARE", float("inf"))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("stops", [[1], [3], [4, 5], [2, 6, 8]])
def test_an_interrupted_training_gives_what_a_whole_one_gives(stops: list[int], tmp_path: Path) -> None:
    """Within an epoch, at its end, several times, at the very end; dropout is on."""
    dense, pruned, train, choose = setting(4)
    assert pruned.config.hidden_dropout_prob > 0
    options = FinetuneOptions(epochs=2, learning_rate=1e-3)
    whole = finetune(pruned, dense, train, choose, options)
    for stop in stops:
        with pytest.raises(Interrupted):
            finetune(pruned, dense, train, choose, options, work=tmp_path, progress=stopping_at(stop))
    said: list[str] = []
    done = finetune(pruned, dense, train, choose, options, work=tmp_path, say=said.append)
    assert fingerprint(done.model) == fingerprint(whole.model)
    assert (done.history, done.best, done.steps) == (whole.history, whole.best, whole.steps)
    if stops != [1]:
        assert done.resumed == stops[-1] - 1
        assert f"from step {stops[-1] - 1}" in said[0]


@pytest.mark.usefixtures("eager")
def test_others_work_is_never_mixed_in(tmp_path: Path) -> None:
    dense, pruned, train, choose = setting(3)
    options = FinetuneOptions(epochs=1, learning_rate=1e-3)
    with pytest.raises(Interrupted):
        finetune(pruned, dense, train, choose, options, work=tmp_path, progress=stopping_at(2))
    other = copy.deepcopy(pruned)
    other.classifier.bias.data += 1e-3
    taught = copy.deepcopy(dense)
    taught.classifier.bias.data += 1e-3
    relabelled = [{**b, "labels": 1 - b["labels"]} for b in train]
    for changed in (
        (other, dense, train, choose, options), (pruned, taught, train, choose, options),
        (pruned, dense, relabelled, choose, options), (pruned, dense, train, choose[:1], options),
        (pruned, dense, train, choose, FinetuneOptions(epochs=1, learning_rate=1e-3, seed=1)),
        (pruned, dense, train, choose, FinetuneOptions(epochs=1, learning_rate=1e-3, mixture=Mixture(temperature=3))),
    ):  # fmt: skip
        said: list[str] = []
        done = finetune(*changed, work=tmp_path, say=said.append)
        assert "not used" in said[0]
        assert done.resumed is None
    assert done.history == finetune(*changed).history
    assert finetune(pruned, dense, train, choose, options, work=tmp_path).resumed == 1


@pytest.mark.usefixtures("eager")
def test_a_save_that_is_cut_short_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, pruned, train, choose = setting(4)
    whole = finetune(pruned, dense, train, choose)
    original = torch.save

    def cut_short(state: dict[str, Any], file: Any) -> None:
        if state["step"] == 3:
            file.write(b"half of it")
            raise Interrupted
        original(state, file)

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(Interrupted):
        finetune(pruned, dense, train, choose, work=tmp_path)
    monkeypatch.setattr(torch, "save", original)
    done = finetune(pruned, dense, train, choose, work=tmp_path)
    assert done.resumed == 2
    assert fingerprint(done.model) == fingerprint(whole.model)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "damage", [lambda content: content[:-9], lambda _: b"", lambda _: pickle.dumps(print, protocol=2)]
)
def test_damaged_work_is_told(damage: Any, tmp_path: Path) -> None:
    """Cut short, empty, or something that is no training's state and would run code."""
    dense, pruned, train, choose = setting(3)
    with pytest.raises(Interrupted):
        finetune(pruned, dense, train, choose, work=tmp_path, progress=stopping_at(2))
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(hp.HeadPruneError, match="--no-resume"):
        finetune(pruned, dense, train, choose, work=tmp_path)


@pytest.mark.usefixtures("eager")
def test_the_best_weights_outlive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second epoch is the best, and the training is interrupted in the third."""
    dense, pruned, train, choose = setting(2)
    losses = {0: 9.0, 2: 8.0, 4: 1.0, 6: 5.0, 8: 6.0}
    best: list[str] = []
    steps = iter([0, 2, 4, 0, 6, 8])

    def fake(model: nn.Module, *_: Any) -> Measurement:
        step = next(steps)
        best.extend([fingerprint(model)] if step == 4 else [])
        return Measurement({"loss": losses[step]}, np.zeros(0), np.zeros(0), np.zeros(0))

    monkeypatch.setattr(room, "evaluate", fake)
    options = FinetuneOptions(epochs=9)
    with pytest.raises(Interrupted):
        finetune(pruned, dense, train, choose, options, work=tmp_path, progress=stopping_at(6))
    done = finetune(pruned, dense, train, choose, options, work=tmp_path)
    assert (done.resumed, done.steps, done.best) == (5, 8, 4)
    assert [fingerprint(done.model)] == best


def test_training_does_what_transformers_trainer_does(tmp_path: Path) -> None:
    """The same weights, without dropout: its optimizer, its schedule, its limit on gradients, its groups."""
    _, pruned, train, _ = setting(4)
    for module in pruned.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    options = FinetuneOptions(epochs=1, learning_rate=1e-3, weight_decay=0.1, mixture=Mixture(alpha=0.0))
    done = finetune(pruned, None, train, train, options)
    assert done.best == 4
    order = room._Order(train, options)
    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=1, learning_rate=1e-3, weight_decay=0.1,
        optim="adamw_torch", warmup_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    class Plain(tf.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return [order[i] for i in range(4)]

    model = copy.deepcopy(pruned)
    Plain(model=model, args=arguments, train_dataset=train).train()
    theirs = dict(model.named_parameters())
    for name, mine in done.model.named_parameters():
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which AdamW makes whole steps
            torch.testing.assert_close(mine, theirs[name], rtol=1e-4, atol=1e-6)


# -- the data ---------------------------------------------------------------------------------


def test_what_chooses_or_is_reported_is_never_trained_on(bert_folder: Path, tmp_path: Path) -> None:
    """Neither by row nor by content, whether there is one split or three."""
    loaded = load_model(str(bert_folder))
    rows = sentences(80, 5)
    write_jsonl(tmp_path / "one.jsonl", [*rows, *rows[:40]])  # every second row has a twin
    write_jsonl(tmp_path / "three" / "train.jsonl", [*sentences(60, 6), *rows[:30]])
    write_jsonl(tmp_path / "three" / "validation.jsonl", rows[:20])
    write_jsonl(tmp_path / "three" / "test.jsonl", rows[20:40])
    for source in ("one.jsonl", "three"):
        options = DataOptions(str(tmp_path / source), limit=16, report_limit=20)
        parts = load_parts(options, loaded)
        train, notes = load_train(options, loaded, parts)
        held_out = {str(f["input_ids"]) for p in (parts.choose, parts.report) for f in p.features}
        assert not held_out & {str(f["input_ids"]) for f in train.features}
        assert {p.split for p in (parts.choose, parts.report)} != {train.split} or not set(train.rows) & {
            *parts.choose.rows, *parts.report.rows
        }  # fmt: skip
        assert set(parts.score.rows) & set(train.rows)
        assert len(set(train.rows)) == len(train) > 20
        assert "left out" in notes[1]
        scored = int(re.search(r"of which (\d+) also scored", notes[0])[1])
        assert scored == len(set(train.rows) & set(parts.score.rows))
        fewer, _ = load_train(options, loaded, parts, 9)
        assert fewer.rows == train.rows[:9]
        assert fewer.content_hash() != train.content_hash()


def test_nothing_left_to_train_on(bert_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(bert_folder))
    rows = sentences(20, 5)
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    options = DataOptions(str(tmp_path), limit=8)
    write_jsonl(tmp_path / "train.jsonl", [*rows[:5], {"text": "a film", "label": 0}])
    parts = load_parts(options, loaded)
    parts.choose.features.extend(parts.score.features)
    with pytest.raises(hp.HeadPruneError, match="left to train on"):
        load_train(options, loaded, parts)


# -- the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A run folder as `headprune prune --keep 4` leaves it, as far as finetune reads it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run("score", bert_folder, "-d", data_folder, "-L", 20, "-b", 8, "-m", "random", "-o", folder, "-q")
    _prune_by_hand(folder, bert_folder, {0: [1, 2], 1: [0, 3]})
    return folder


def _prune_by_hand(folder: Path, source: Path, removed: dict[int, list[int]]) -> None:
    loaded = load_model(str(source))
    example = dummy_input(loaded, 2, 6)
    layers = hp.find_attention(loaded.model, example)
    hp.prune(loaded.model, {layers[i].name: heads for i, heads in removed.items()}, example)
    about = {"task": loaded.task.name, "from": str(source)}
    hp.save(loaded.model, folder / "pruned-4", processor=loaded.processor, about=about)


@pytest.fixture
def pruned_here(pruned_run: Path, here: Path) -> Path:
    shutil.copytree(pruned_run, here / "run")
    return here / "run"


def test_finetune(pruned_here: Path, bert_folder: Path) -> None:
    source = pruned_here / "pruned-4"
    result = run("finetune", pruned_here, "--epochs", 2, "--learning-rate", 1e-3, "--json")
    output = pruned_here / "pruned-4-finetuned"
    document = json.loads(result.stdout)
    assert document["folder"] == str(output)
    written = json.loads((output / "finetune.json").read_text())
    assert {k: v for k, v in document.items() if k != "folder"} == {
        k: v for k, v in written.items() if k not in ("headprune", "schema")
    }
    assert document["teacher"] == str(bert_folder)
    assert "60 examples to train on (train), of which 20 also scored" in result.stderr
    assert not list(pruned_here.glob(".*"))  # the work folder is gone, and what was in it
    model, before = hp.load(output), hp.load(source)
    assert [p.shape for p in model.parameters()] == [p.shape for p in before.parameters()]
    assert fingerprint(model) != fingerprint(before)
    # What was saved is what is reported: measured here, apart from the tool's own evaluation.
    tokenizer = tf.AutoTokenizer.from_pretrained(output)
    rows = sentences(40, 3)
    for name, m in (("finetuned", model), ("pruned", before)):
        with torch.no_grad():
            right = [int(m(**tokenizer(r["text"], return_tensors="pt")).logits.argmax() == r["label"]) for r in rows]
        assert document["models"][name]["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    gain = document["models"]["finetuned"]["metrics"]["accuracy"] - document["models"]["pruned"]["metrics"]["accuracy"]
    assert document["changes"]["gain"]["value"] == pytest.approx(gain)
    assert f"{100 * np.mean(right):.1f} %" in (output / "finetune.md").read_text()
    # A fine-tuned model is a model: it can be fine-tuned again, and the dense one is still known.
    assert "exists" in run("finetune", source, code=1).stderr
    again = run("finetune", output, "-d", document["data"]["dataset"], "-o", "again", "--json", "-q")
    assert json.loads(again.stdout)["teacher"] == str(bert_folder)
    run("finetune", source, "--overwrite", "--train-limit", 8, "-q")
    assert json.loads((output / "finetune.json").read_text())["training"]["examples"] == 8


def test_a_language_model_and_hidden_states(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("score", llama_folder, "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", llama_folder, {0: [0, 1], 1: [2, 3]})
    result = run(
        "finetune", "run", "--learning-rate", 3e-3, "--epochs", 2, "--hidden-states", "--alpha", 0.5, "--json", "-q"
    )
    document = json.loads(result.stdout)
    assert document["metric"] == "perplexity"
    assert document["changes"]["gain"]["value"] < 0
    assert "hidden states" in (here / "run" / "pruned-4-finetuned" / "finetune.md").read_text()


def test_images_are_read_when_they_are_needed(here: Path) -> None:
    import datasets
    from PIL import Image

    config = tf.ViTConfig(**{**vit()[0].config.to_dict(), "num_channels": 3})
    folder = here / "vit"
    randomise(tf.ViTForImageClassification(config)).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": 8, "width": 8}, do_resize=False).save_pretrained(folder)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(48)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=5)})
    labels = rng.integers(0, 5, 48).tolist()
    data = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    (here / "data").mkdir()
    data.to_parquet(str(here / "data" / "train.parquet"))
    run("score", folder, "-d", here / "data", "-L", 12, "-b", 4, "-m", "random", "-o", "run", "-q")
    _prune_by_hand(here / "run", folder, {0: [0, 1]})
    document = json.loads(run("finetune", "run", "--json", "-q").stdout)
    assert document["parts"]["train"]["examples"] == 48 - sum(
        document["parts"][p]["examples"] for p in ("choose", "report")
    )


KILLED = """
import os, signal
import headprune.app.finetune as f
f.SAVE_SECONDS, f._SAVE_SHARE = 0.0, float("inf")  # saves after every step
original = f._Training.save

def stop(self):
    if self.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self)

f._Training.save = stop
from headprune.cli import main
main()
"""


def test_sigkill(pruned_here: Path, processes: Processes) -> None:
    """Killed while it trains, the same command goes on, and gives what it would have given."""
    command = ["finetune", "run/pruned-4", "--epochs", "5", "--learning-rate", "1e-3", "--patience", "99"]
    run(*command, "-o", "whole", "-q")
    work = pruned_here.parent / "out" / ".unfinished" / "training"
    job = {"cwd": str(pruned_here.parent), "arguments": [*command, "-o", "out"]}
    (killed,) = processes.run({**job, "code": KILLED})
    assert killed["status"] == -signal.SIGKILL, killed["stderr"]
    assert {p.name for p in (pruned_here.parent / "out").iterdir()} == {".unfinished", ".lock"}
    assert work.is_dir()
    result = run(*command, "-o", "out", "--json")
    training = json.loads(result.stdout)["training"]
    assert training["resumed"] == 7
    assert "Continuing from step 7" in result.stderr
    out, whole = (hp.load(pruned_here.parent / name) for name in ("out", "whole"))
    assert [p.shape for p in out.parameters()] == [p.shape for p in hp.load(pruned_here / "pruned-4").parameters()]
    assert fingerprint(out) == fingerprint(whole)
    assert {p.name for p in pruned_here.parent.iterdir()} == {"run", "out", "whole", ".streams"}


@pytest.mark.usefixtures("eager")
def test_control_c_then_no_resume(pruned_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = room._Training.save

    def stop(self: Any) -> None:
        if self.step == 4:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(room._Training, "save", stop)
    assert "interrupted" in run("finetune", "run", code=130).stderr
    monkeypatch.setattr(room._Training, "save", original)
    assert (pruned_here / "pruned-4-finetuned" / ".unfinished" / "training").is_dir()
    result = run("finetune", "run", "--no-resume", "--json")
    assert json.loads(result.stdout)["training"]["resumed"] is None
    assert not list(pruned_here.rglob(".*"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "no folder nowhere"), (["{data}"], "holds no pruned model"),
    (["{bert}"], "holds no pruned model"), (["run", "--alpha", "2"], "Alpha 2"),
    (["run", "--temperature", "0"], "temperature 0"), (["run", "--epochs", "0"], "0 epochs"),
    (["run", "--learning-rate", "0"], "learning rate 0"), (["run", "--teacher", "nobody/nothing"], "no model 'nobody"),
    (["run", "--teacher", "{llama}"], "not trained for sequence"),
    (["run", "-o", "{data}"], "exists and is not empty"), (["run", "-o", "{data}", "--overwrite"], "did not write"),
    (["run", "--dtype", "float16"], "float16"), (["run", "--batch-size", "8", "--device", "cuda"], "no CUDA device"),
])  # fmt: skip
def test_mistakes_get_one_line(
    arguments: list[str], message: str, pruned_here: Path, bert_folder: Path, llama_folder: Path, data_folder: Path
) -> None:
    before = sorted(pruned_here.parent.rglob("*"))
    given = [a.format(bert=bert_folder, data=data_folder, llama=llama_folder) for a in arguments]
    result = run("finetune", *given, code=1)
    lines = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(pruned_here.parent.rglob("*")) == before


def test_more_mistakes(pruned_here: Path, data_folder: Path) -> None:
    lone = pruned_here.parent / "lone"
    shutil.copytree(pruned_here / "pruned-4", lone)
    assert "Name the dataset with -d" in run("finetune", lone, code=1).stderr
    sidecar = json.loads((lone / "headprune.json").read_text())
    sidecar["about"]["from"] = "gone/away"
    (lone / "headprune.json").write_text(json.dumps(sidecar))
    assert "--teacher" in run("finetune", lone, "-d", data_folder, code=1).stderr
    shutil.copytree(pruned_here / "pruned-4", pruned_here / "pruned-3")
    assert "2 pruned models (pruned-3, pruned-4)" in run("finetune", pruned_here, code=1).stderr
