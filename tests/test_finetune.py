"""Fine-tuning: what it brings, its choice of epoch, its batches, and interruptions."""

import copy
import pickle
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
from headprune.app.options import FinetuneOptions
from headprune.app.models import load_model
from headprune.evaluation import Measurement
from headprune.fingerprint import fingerprint
from tests.support.finetuning import pair, t5, tuned
from tests.support.zoo import bert, gpt2, labelled, llama, randomise, vit

ROOT = Path(__file__).parent.parent
Batch = dict[str, torch.Tensor]


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


@pytest.mark.usefixtures("saved_every_step")
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


@pytest.mark.usefixtures("saved_every_step")
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


@pytest.mark.usefixtures("saved_every_step")
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


@pytest.mark.usefixtures("saved_every_step")
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


@pytest.mark.usefixtures("saved_every_step")
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


@pytest.mark.usefixtures("saved_every_step")
def test_a_flipped_bit_in_the_state_is_noticed(tmp_path: Path) -> None:
    """torch.load compares no checksum: the weights that came back were others."""
    dense, pruned, train, choose = setting(4)
    with pytest.raises(Interrupted):
        finetune(pruned, dense, train, choose, work=tmp_path, progress=stopping_at(2))
    (file,) = tmp_path.glob("*.pt")
    whole = file.read_bytes()
    before = pruned.classifier.weight.detach().numpy().tobytes()[:8]
    content = bytearray(whole)
    content[max(whole.find(before), len(whole) // 3)] ^= 0x10
    file.write_bytes(bytes(content))
    torch.load(file, weights_only=True)  # it is none the wiser
    with pytest.raises(hp.HeadPruneError, match=r"is damaged.*Start again with --no-resume"):
        finetune(pruned, dense, train, choose, work=tmp_path)
