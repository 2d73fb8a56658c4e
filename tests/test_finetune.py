"""Fine-tuning: its loss against references by hand, what it brings, its steps against a loop by hand, its choice of epoch, interruptions."""

import copy
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from accelerate.state import AcceleratorState, PartialState
from scipy.special import expit, softmax
from torch import nn

import headprune as hp
from headprune.app import finetune as room
from headprune.app.data import Part
from headprune.app.finetune import DistillationLoss, finetune
from headprune.app.options import FinetuneOptions, Mixture
from headprune.evaluation import Measurement
from headprune.fingerprint import fingerprint
from tests.support.causal import my_gpt, texts
from tests.support.checks import Interrupted, flip, older_fingerprint, without_dropout
from tests.support.commands import run, stderr_of
from tests.support.documents import opened
from tests.support.finetuning import pair, t5, tuned
from tests.support.folders import common, sentences
from tests.support.stays import edit
from tests.support.zoo import bert, gpt2, labelled, llama, randomise, text, vit

Batch = dict[str, torch.Tensor]


def batches(model: nn.Module, example: Any, count: int) -> list[Batch]:
    """Batches of other content than the example, of the same form."""
    result = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(100 + seed)
        shapes = {name: value.shape for name, value in example.items()}
        if "input_ids" in example:
            other = {"input_ids": torch.randint(3, 90, shapes["input_ids"], generator=generator)}
        else:
            other = {"pixel_values": torch.randn(shapes["pixel_values"], generator=generator)}
        result.append(labelled(model, {**example, **other}, seed))
    return result


def setting(steps: int = 4) -> tuple[nn.Module, nn.Module, list[Batch], list[Batch]]:
    dense, pruned, example = pair(bert())
    every = batches(dense, example, steps + 2)
    return dense, pruned, every[:steps], every[steps:]


# -- the loss: towards the dense model's answers -----------------------------------------------


@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.3, 0.5), (1.0, 3.0)])
def test_the_loss_of_a_classifier_by_hand(alpha: float, temperature: float) -> None:
    dense, pruned, example = pair(bert())
    dense, pruned = dense.double(), pruned.double()
    batch = labelled(dense, example)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        found = DistillationLoss(pruned, dense, Mixture(alpha, temperature), batch)(batch).numpy()
        z, t = pruned(**inputs).logits.numpy(), dense(**inputs).logits.numpy()
    p, q = softmax(t / temperature, -1), softmax(z / temperature, -1)
    divergence = temperature**2 * (p * (np.log(p) - np.log(q))).sum(-1)
    entropy = -np.log(softmax(z, -1)[np.arange(len(z)), batch["labels"].numpy()])
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
    loss = DistillationLoss(pruned, dense, mixture, batch)
    with torch.no_grad():
        found = loss(batch).numpy()
        now, known = (m(**example, output_hidden_states=True) for m in (pruned, dense))
    for row in range(3):
        real = example["attention_mask"][row].bool().numpy()
        z, t = now.logits[row].numpy(), known.logits[row].numpy()
        p, q = softmax(t / 2, -1), softmax(z / 2, -1)
        divergence = (4 * (p * np.log(p / q)).sum(-1))[real].mean()
        where = [i for i in range(7) if labels[row, i] >= 0]
        entropy = np.mean([-np.log(softmax(z[i], -1)[labels[row, i]]) for i in where]) if where else 0.0
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
        found = DistillationLoss(pruned, dense, Mixture(0.5, 2.0), batch)(batch).numpy()
        z, t = pruned(**example).logits.numpy(), dense(**example).logits.numpy()
    p, q, y = expit(t / 2), expit(z / 2), batch["labels"].numpy()
    divergence = 4 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(-1)
    entropy = -(y * np.log(expit(z)) + (1 - y) * np.log(1 - expit(z))).mean(-1)
    np.testing.assert_allclose(found, 0.5 * divergence + 0.5 * entropy, rtol=1e-6)


@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, t5])
def test_alpha_0_is_the_models_own_loss(make: Any) -> None:
    """In value and gradient, where every example has as many labelled tokens."""
    model, example = make()
    batch = labelled(model, {k: v[:2] for k, v in example.items()})
    if "labels" in batch and make is t5:
        batch["labels"] = batch["labels"].clamp(min=3)
    loss = DistillationLoss(model, model, Mixture(alpha=0.0), batch)
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
    loss = DistillationLoss(model, model, Mixture(1.0, 2.0, hidden_states=True), batch)(batch)
    assert loss.shape == (3,)
    assert loss.abs().max() < 1e-6


def test_alpha_1_reads_no_labels() -> None:
    dense, pruned, example = pair(bert())
    loss = DistillationLoss(pruned, dense, Mixture(alpha=1.0), example)
    batch = labelled(dense, example)
    assert torch.equal(loss(batch), loss({**batch, "labels": 1 - batch["labels"]}))
    with pytest.raises(hp.HeadPruneError, match="no labels"):
        DistillationLoss(pruned, dense, Mixture(alpha=0.9), example)


def test_question_answering_learns_where_the_answer_is() -> None:
    config = tf.BertConfig(**common())
    example = {k: v.clamp(max=29) for k, v in text(3, 9).items()}
    dense, pruned, _ = pair((randomise(tf.BertForQuestionAnswering(config)), example))
    batch = {**example, "start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 2, 4])}
    DistillationLoss(pruned, dense, Mixture(), batch)
    loss = DistillationLoss(pruned, dense, Mixture(alpha=1.0), batch)  # the labels' own loss counts padding
    with torch.no_grad():
        found = loss(batch)
        longer = {k: nn.functional.pad(v, (0, 3)) if v.ndim == 2 else v for k, v in batch.items()}
        torch.testing.assert_close(loss(longer), found)  # padding is no place for an answer
    assert found.min() > 0


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: DistillationLoss(bert()[0], _other(num_labels=3), Mixture(), labelled(*bert())), "logits are"),
    (lambda: DistillationLoss(bert()[0], _other(hidden_size=16, num_hidden_layers=3), Mixture(hidden_states=True), labelled(*bert())), "hidden states are"),
])  # fmt: skip
def test_what_cannot_be(wrong: Any, message: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=message):
        wrong()


def _other(**sizes: int) -> nn.Module:
    return randomise(tf.BertForSequenceClassification(tf.BertConfig(**common(vocab_size=100, **sizes))))


def test_fine_tuning_learns_what_is_measured() -> None:
    model, batch = randomise(my_gpt()), texts()
    loss = DistillationLoss(model, model, Mixture(alpha=0), batch)
    with torch.no_grad():
        for i, each in enumerate(loss(batch)):
            own = model(**{k: v[i : i + 1] for k, v in batch.items()}).loss
            torch.testing.assert_close(each, own, rtol=1e-5, atol=1e-6)


# -- training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [bert, llama, vit, t5])
def test_training_brings_the_pruned_model_nearer(make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of several families, with a whole layer gone: all but the weights is as it was, also in this process, and nothing is printed."""
    dense, pruned, example = pair(make(), {0: [0, 1]} if make is llama else None)
    made = batches(dense, example, 4)
    before = fingerprint(pruned), fingerprint(dense), pruned.config.to_dict()
    state = torch.get_rng_state(), dict(PartialState._shared_state), dict(AcceleratorState._shared_state)
    capfd.readouterr()
    options = FinetuneOptions(epochs=6, learning_rate=3e-3, patience=99)
    model, training = tuned(pruned, dense, made[:3], made[:3], tmp_path / "work", options)
    assert capfd.readouterr() == ("", "")
    assert (fingerprint(pruned), fingerprint(dense), pruned.config.to_dict()) == before
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (PartialState._shared_state, AcceleratorState._shared_state) == state[1:]
    assert not [name for name in os.environ if name.startswith("ACCELERATE_")]
    assert {p.name for p in tmp_path.iterdir()} == {"work"}
    sides = ([(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (model, pruned))
    assert next(sides) == next(sides)
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert model.config.to_dict() == before[2]
    losses = [DistillationLoss(m, dense, Mixture(), made[0]) for m in (pruned, model)]
    was, now = (sum(loss(b).mean().item() for b in made[:3]) for loss in losses)
    assert now < was
    assert training.best > 0
    hp.save(model, tmp_path / "model")
    again = hp.load(tmp_path / "model")
    assert torch.equal(again(**made[3]).logits, model(**made[3]).logits)


def test_labels_alone_and_a_plain_module(tmp_path: Path) -> None:
    model = randomise(nn.Linear(4, 3))
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    made = [{"input": a, "labels": b} for a, b in zip(x.split(4), x[:, :3].argmax(-1).split(4), strict=True)]
    options = FinetuneOptions(epochs=20, learning_rate=0.05, mixture=Mixture(alpha=0))
    _, training = tuned(model, model, made, made, tmp_path, options, metric="accuracy")
    assert training.history[-1]["loss"] < training.history[0]["loss"]


def test_the_steps_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    """AdamW with decay for matrices alone, gradients of at most norm 1, and a learning rate that rises for a tenth of the steps and then
    falls to 0. A batch's loss is the mean over its examples, also of the last one, which has fewer."""
    dense, pruned, example = pair(bert())
    pruned, dense = without_dropout(pruned).double(), dense.double()
    train = batches(dense, example, 4)
    features = [{k: v[i] for k, v in batch.items()} for batch in train for i in range(3)][:11]
    part = Part("train", "train", list(range(11)), features, torch.utils.data.default_collate, 4)
    seen: list[Batch] = []

    def collate(chosen: Any) -> Batch:
        seen.append(part.collate(chosen))
        return seen[-1]

    noting = Part("train", "train", part.rows, features, collate, 4)
    options = FinetuneOptions(epochs=4, learning_rate=1e-3, weight_decay=0.1, mixture=Mixture(0.3, 3.0), patience=9)
    model, training = finetune(pruned, dense, noting, part, options, tmp_path)
    assert training.best == training.steps == 12
    steps, mine = seen[-12:], copy.deepcopy(pruned)
    for epoch in range(4):
        rows = [row.tolist() for batch in steps[3 * epoch : 3 * epoch + 3] for row in batch["input_ids"]]
        assert sorted(rows) == sorted(f["input_ids"].tolist() for f in features)  # each once an epoch
    assert [len(batch["labels"]) for batch in steps] == [4, 4, 3] * 4
    groups = ({"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0})
    for name, parameter in mine.named_parameters():
        groups["norm" in name.lower() or name.endswith("bias")]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups)
    for step, batch in enumerate(steps):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        now, known = mine(**inputs).logits, dense(**inputs).logits.detach()
        p, q = (known / 3).softmax(-1), (now / 3).softmax(-1)
        loss = 0.3 * 9 * (p * (p / q).log()).sum(-1) - 0.7 * now.log_softmax(-1)[range(len(now)), batch["labels"]]
        mine.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(step / 2, (12 - step) / 10)
        optimizer.step()
    for (name, a), b in zip(model.named_parameters(), mine.parameters(), strict=True):
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, of which AdamW makes whole steps
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_single_step_changes_the_weights(tmp_path: Path) -> None:
    """Its learning rate was 0, that at which the rise begins; training was said to have made the model no better."""
    dense, pruned, train, choose = setting(1)
    _, training = tuned(pruned, dense, train, choose, tmp_path, FinetuneOptions(epochs=1, learning_rate=1e-3))
    before, after = (step["loss"] for step in training.history)
    assert (training.steps, before != after) == (1, True)


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[tuple[float, float]]) -> list[str]:
    """Evaluations that find these accuracies and losses; what the model was at each."""
    seen: list[str] = []

    def fake(model: nn.Module, *_: Any) -> Measurement:
        accuracy, loss = values[len(seen)]
        seen.append(fingerprint(model))
        metrics = {"accuracy": accuracy, "loss": loss, "perplexity": np.exp(loss)}
        return Measurement(metrics, np.zeros(0), np.zeros(0), np.zeros(0))

    monkeypatch.setattr(room, "evaluate", fake)
    return seen


@pytest.mark.parametrize(("values", "metric", "best", "epochs"), [
    ([(0.1, 9), (0.5, 8), (0.7, 7), (0.6, 6), (0.65, 5)], "accuracy", 2, 4),  # patience 2, so no fifth epoch
    ([(0.1, 9), (0.5, 8), (0.7, 7), (0.6, 6), (0.8, 5), (0.8, 4)], "accuracy", 5, 5),  # the loss where accuracy ties
    ([(0.1, 9), (0.5, 8), (0.7, 9), (0.6, 7), (0.8, 7.5), (0.8, 7.2)], "perplexity", 3, 5),
    ([(0.9, 9), (0.5, 8), (0.4, 7), (0.3, 6)], "accuracy", 0, 3),  # never better than before training
])  # fmt: skip
def test_the_best_epoch_is_kept(
    values: list[Any], metric: str, best: int, epochs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dense, pruned, train, choose = setting(2)
    seen = scripted(monkeypatch, values)
    model, training = tuned(pruned, dense, train, choose, tmp_path, FinetuneOptions(epochs=5), metric=metric)
    assert (training.best, training.steps) == (2 * best, 2 * epochs)
    assert fingerprint(model) == seen[best]
    assert len(set(seen)) == len(seen) == epochs + 1
    assert [h["epoch"] for h in training.history] == list(range(epochs + 1))


def test_half_precision(tmp_path: Path) -> None:
    """Weights in bfloat16 learn as those in float32 do: their steps add up in float32."""
    dense, pruned, train, _ = setting(4)
    options = FinetuneOptions(epochs=5, learning_rate=1e-4, mixture=Mixture(1.0, 2.0, True), patience=9)
    _, exact = tuned(without_dropout(pruned), dense, train, train, tmp_path / "float32", options)
    work = (pruned.bfloat16(), dense.bfloat16(), train, train)
    model, training = tuned(*work, tmp_path / "bfloat16", options)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    first, last = (exact.history[i]["loss"] for i in (0, -1))
    assert training.history[-1]["loss"] - last == pytest.approx(0, abs=0.4 * abs(first - last))
    with pytest.raises(hp.HeadPruneError, match="float16"):
        tuned(pruned.half(), dense, train, train, tmp_path)


def test_a_loss_that_bursts_is_told(tmp_path: Path) -> None:
    dense, pruned, train, choose = setting(2)
    dense.classifier.bias.data.fill_(float("nan"))
    with pytest.raises(hp.HeadPruneError, match=r"nan at step 1.*smaller --learning-rate"):
        tuned(pruned, dense, train, choose, tmp_path)


# -- interruptions ----------------------------------------------------------------------------


def stopping_at(step: int) -> Any:
    def progress(done: int, total: int, note: str = "") -> None:
        if done == step:
            raise Interrupted

    return progress


TWICE = FinetuneOptions(epochs=2, learning_rate=1e-3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Any]:
    """What a training of two epochs gives that nothing interrupts."""
    dense, pruned, train, choose = setting(4)
    return tuned(pruned, dense, train, choose, tmp_path_factory.mktemp("whole"), TWICE)


@pytest.mark.usefixtures("saved_every_step")
@pytest.mark.parametrize("stops", [[1, 4, 5], [2, 6, 8]])
def test_an_interrupted_training_gives_what_a_whole_one_gives(stops: list[int], whole: Any, tmp_path: Path) -> None:
    """Within an epoch, at its end, several times, at the very end; dropout is on. To the bit."""
    dense, pruned, train, choose = setting(4)
    assert pruned.config.hidden_dropout_prob > 0
    work = (pruned, dense, train, choose, tmp_path / "work", TWICE)
    for stop in stops:
        with pytest.raises(Interrupted):
            tuned(*work, progress=stopping_at(stop))
    said: list[str] = []
    model, training = tuned(*work, say=said.append)
    assert fingerprint(model) == fingerprint(whole[0])
    assert replace(training, resumed=None, seconds=0) == replace(whole[1], resumed=None, seconds=0)
    assert training.resumed == stops[-1] - 1
    assert f"from step {stops[-1] - 1}" in said[0]
    again = tuned(*work)  # killed after its end: there is no step to come
    assert fingerprint(again[0]) == fingerprint(model)
    assert (again[1].history, again[1].steps, again[1].resumed) == (training.history, 8, 8)


@pytest.mark.usefixtures("saved_every_step")
@pytest.mark.parametrize(("epochs", "killed"), [(2, 1), (2, 2), (1.5, 2)])
def test_a_kill_while_an_epoch_is_evaluated(epochs: float, killed: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The epoch's last step is done again: its weights may be the best, and a checkpoint before the evaluation would not say so."""
    dense, *rest = setting(4)
    options, evaluations, stop = replace(TWICE, epochs=epochs), iter(range(9)), stopping_at(killed)
    work = (rest[0], dense, *rest[1:])
    model, training = tuned(*work, tmp_path / "whole", options)
    monkeypatch.setattr(room, "evaluate", lambda *given: stop(next(evaluations), 9) or hp.evaluate(*given))
    with pytest.raises(Interrupted):
        tuned(*work, tmp_path / "work", options)
    again, continued = tuned(*work, tmp_path / "work", options)
    assert (continued.history, continued.best, fingerprint(again)) == (
        training.history,
        training.best,
        fingerprint(model),
    )
    assert continued.resumed


@pytest.mark.parametrize("epochs", [0.4, 1.5])
def test_parts_of_epochs(epochs: float, tmp_path: Path) -> None:
    dense, pruned, train, choose = setting(4)
    options = FinetuneOptions(epochs=epochs, learning_rate=1e-3)
    model, training = tuned(pruned, dense, train, choose, tmp_path, options)
    assert [(h["step"], h["epoch"]) for h in training.history][-1] == (training.steps, epochs) or epochs == 0.4
    assert (training.steps, training.planned) == (round(4 * epochs + 0.4), round(4 * epochs + 0.4))
    again = tuned(pruned, dense, train, choose, tmp_path, options)
    assert fingerprint(again[0]) == fingerprint(model)
    assert again[1].history == training.history


@pytest.mark.usefixtures("saved_every_step")
def test_others_work_is_never_mixed_in(tmp_path: Path) -> None:
    dense, pruned, train, choose = setting(3)
    options = FinetuneOptions(epochs=1, learning_rate=1e-3)
    with pytest.raises(Interrupted):
        tuned(pruned, dense, train, choose, tmp_path, options, progress=stopping_at(2))
    other = copy.deepcopy(pruned)
    other.classifier.bias.data += 1e-3
    taught = copy.deepcopy(dense)
    taught.classifier.bias.data += 1e-3
    relabelled = [{**b, "labels": 1 - b["labels"]} for b in train]
    for changed in (
        (other, dense, train, choose, tmp_path, options), (pruned, taught, train, choose, tmp_path, options),
        (pruned, dense, relabelled, choose, tmp_path, options), (pruned, dense, train, choose[:1], tmp_path, options),
        (pruned, dense, train, choose, tmp_path, FinetuneOptions(epochs=1, learning_rate=1e-3, seed=1)),
        (pruned, dense, train, choose, tmp_path, FinetuneOptions(epochs=1, learning_rate=1e-3, mixture=Mixture(temperature=3))),
    ):  # fmt: skip
        said: list[str] = []
        _, training = tuned(*changed, say=said.append)
        assert "not used, as the model" in said[0]
        assert training.resumed is None
    assert tuned(pruned, dense, train, choose, tmp_path, options)[1].resumed == 1


def cut_short(path: Path) -> None:
    """As a kill leaves it."""
    (path / "checksum.txt").unlink()


def flipped(path: Path) -> None:
    """One bit of the weights, which torch.load does not notice."""
    flip(path / "pytorch_model.bin", (path / "pytorch_model.bin").stat().st_size // 2)
    torch.load(path / "pytorch_model.bin", weights_only=True)


def swapped(path: Path) -> None:
    """No training's state: it would run code."""
    (path / "optimizer.pt").write_bytes(pickle.dumps(print, protocol=2))


@pytest.mark.usefixtures("saved_every_step")
@pytest.mark.parametrize(("damage", "all_of_them"), [(cut_short, False), (flipped, False), (swapped, True)])
def test_a_damaged_checkpoint_is_not_used(damage: Any, all_of_them: bool, whole: Any, tmp_path: Path) -> None:
    """But the one before it, or none: the result is that of a whole training."""
    dense, pruned, train, choose = setting(4)
    work = (pruned, dense, train, choose, tmp_path, TWICE)
    with pytest.raises(Interrupted):
        tuned(*work, progress=stopping_at(4))
    checkpoints = sorted(tmp_path.glob("*/checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-2", "checkpoint-3"]
    for path in checkpoints if all_of_them else checkpoints[1:]:
        damage(path)
    said: list[str] = []
    model, training = tuned(*work, say=said.append)
    assert training.resumed == (None if all_of_them else 2)
    assert ("is not used, as it is damaged" if all_of_them else "from step 2") in said[0]
    assert fingerprint(model) == fingerprint(whole[0])


@pytest.mark.usefixtures("saved_every_step")
def test_the_best_weights_outlive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second epoch is the best, and the training is interrupted in the third; patience goes on where it was."""
    dense, pruned, train, choose = setting(2)
    # The fourth and the last are from before training.
    seen = scripted(monkeypatch, [(0, loss) for loss in (9.0, 8.0, 1.0, 9.0, 5.0, 6.0, 9.0)])
    options = FinetuneOptions(epochs=9)
    with pytest.raises(Interrupted):
        tuned(pruned, dense, train, choose, tmp_path, options, progress=stopping_at(6))
    for resumed in (5, 8):
        model, training = tuned(pruned, dense, train, choose, tmp_path, options)
        assert (training.resumed, training.steps, training.best) == (resumed, 8, 4)
        assert fingerprint(model) == seen[2]


# -- `headprune finetune`, as it is typed, and stopped -----------------------------------------


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A run folder as `headprune prune --keep 4` leaves it, as far as finetune reads it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run("score", bert_folder, "-d", data_folder, "-L", 20, "-b", 8, "-m", "random", "-o", folder, "-q")
    _cut_heads(folder, bert_folder, {0: [1, 2], 1: [0, 3]})
    return folder


def _cut_heads(folder: Path, source: Path, removed: dict[int, list[int]], task: str = "SequenceClassification") -> None:
    model: Any = getattr(tf, f"AutoModelFor{task}").from_pretrained(source)
    if task == "ImageClassification":
        processor, example = tf.AutoImageProcessor.from_pretrained(source), {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        processor, ids = tf.AutoTokenizer.from_pretrained(source), torch.arange(10, 22).reshape(2, 6)
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    hp.prune(model, {f"L{layer}": heads for layer, heads in removed.items()}, example)
    about = {"task": re.sub(r"(?<=[a-z])(?=[A-Z])", "-", task).lower(), "from": str(source)}
    hp.save(model, folder / "pruned-4", processor=processor, about=about, example=example)


@pytest.fixture
def pruned_here(pruned_run: Path, here: Path) -> Path:
    shutil.copytree(pruned_run, here / "run")
    return here / "run"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_stored_as_the_pruned_model_is(half: torch.dtype, here: Path, bert_folder: Path, data_folder: Path) -> None:
    """It is trained in float32; stored so, it would be larger than the dense model in half precision was."""
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    model.to(half).save_pretrained("half")
    tf.AutoTokenizer.from_pretrained(bert_folder).save_pretrained("half")
    run("score", "half", "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _cut_heads(here / "run", here / "half", {0: [1]})
    result = run("finetune", "run", "--learning-rate", 1e-3, "--json")
    assert {p.dtype for p in hp.load(here / "run" / "pruned-4-finetuned").parameters()} == {half}
    assert "trained and measured in float32" in " ".join(json.loads(result.stdout)["notes"])
    if half == torch.bfloat16:
        run("finetune", "run", "--dtype", "bfloat16", "-o", "narrow", "-q")
        assert {p.dtype for p in hp.load(here / "narrow").parameters()} == {half}


def test_finetune(pruned_here: Path, bert_folder: Path) -> None:
    source = pruned_here / "pruned-4"
    result = run("finetune", pruned_here, "--epochs", 4, "--learning-rate", 5e-3, "--patience", 9, "--json")
    output = pruned_here / "pruned-4-finetuned"
    document = json.loads(result.stdout)
    assert document["folder"] == str(output)
    written = json.loads((output / "finetune.json").read_text())
    assert {**written, "folder": str(output)} == {
        **document,
        **{k: written[k] for k in ("headprune", "schema", "checksum")},
    }
    assert document["teacher"] == str(bert_folder)
    assert "60 examples to train on (train), of which 20 also scored" in result.stderr
    assert not list(pruned_here.glob(".*"))  # the work folder is gone, and what was in it
    model, before = hp.load(output), hp.load(source)
    assert [p.shape for p in model.parameters()] == [p.shape for p in before.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    # What was saved is what is reported: measured here, apart from the tool's own evaluation.
    tokenizer = tf.AutoTokenizer.from_pretrained(output)
    rows = sentences(40, 3)
    for name, m in (("finetuned", model), ("pruned", before)):
        right = [int(m(**tokenizer(r["text"], return_tensors="pt")).logits.argmax() == r["label"]) for r in rows]
        assert document["models"][name]["metrics"]["accuracy"] == pytest.approx(np.mean(right))
    gain = document["models"]["finetuned"]["metrics"]["accuracy"] - document["models"]["pruned"]["metrics"]["accuracy"]
    assert document["changes"]["gain"]["value"] == pytest.approx(gain)
    for file in ("finetune.md", "README.md"):
        assert f"{100 * np.mean(right):.1f} %" in (output / file).read_text()
    assert str(bert_folder.parent) not in (output / "README.md").read_text()  # it may be published
    # A fine-tuned model is a model: it can be fine-tuned again, and the dense one is still known.
    assert "exists" in stderr_of("finetune", source, code=1)
    again = run("finetune", output, "-d", document["data"]["dataset"], "-o", "again", "--json", "-q")
    assert json.loads(again.stdout)["teacher"] == str(bert_folder)
    run("finetune", source, "--overwrite", "--train-limit", 8, "-q")
    assert json.loads((output / "finetune.json").read_text())["training"]["examples"] == 8


def test_a_language_model_and_hidden_states(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("score", llama_folder, "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    _cut_heads(here / "run", llama_folder, {0: [0, 1], 1: [2, 3]}, "CausalLM")
    options = ("--learning-rate", 3e-3, "--epochs", 2, "--hidden-states", "--alpha", 0.5)
    document = json.loads(run("finetune", "run", *options, "--json", "-q").stdout)
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
    _cut_heads(here / "run", folder, {0: [0, 1]}, "ImageClassification")
    parts = json.loads(run("finetune", "run", "--json", "-q").stdout)["parts"]
    assert sum(parts[name]["examples"] for name in ("train", "choose", "report")) == 48


@pytest.mark.usefixtures("saved_every_step")
def test_control_c_then_no_resume(pruned_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: tf.Trainer, *_: Any) -> None:
        if self.state.global_step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headprune.app.finetune._Trainer.store_flos", stop)
        assert "interrupted" in stderr_of("finetune", "run", "--epochs", 3, code=130)
    assert (pruned_here / "pruned-4-finetuned" / ".unfinished" / "training").is_dir()
    result = run("finetune", "run", "--epochs", 3, "--no-resume", "--json")
    assert json.loads(result.stdout)["training"]["resumed"] is None
    assert not list(pruned_here.rglob(".*"))


@pytest.mark.parametrize("part", ["weights", "config", ""])
def test_a_dense_model_that_changed_since(part: str, pruned_here: Path, bert_folder: Path, here: Path) -> None:
    """It would teach, and be measured as the model that was pruned."""
    source = here / "m"
    shutil.copytree(bert_folder, source)
    edit(pruned_here / "run.json", options={**opened(pruned_here / "run.json")["options"], "model": str(source)})
    about = {**opened(pruned_here / "pruned-4" / "headprune.json")["about"], "from": str(source)}
    edit(pruned_here / "pruned-4" / "headprune.json", about=about)
    model = tf.AutoModelForSequenceClassification.from_pretrained(source)
    known = {**opened(pruned_here / "run.json")["model"], "fingerprint": older_fingerprint(model)}
    edit(pruned_here / "run.json", model=known)
    if not part:
        run("finetune", pruned_here / "pruned-4", "--epochs", 1)
        return
    if part == "weights":
        model.classifier.weight.data[0, 0] += 1e-3
        model.save_pretrained(source)
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    error = stderr_of("finetune", pruned_here / "pruned-4", "--epochs", 1, code=1)
    assert f"The {part} of {source} changed since the model was pruned" in error
    assert "--teacher" in error
