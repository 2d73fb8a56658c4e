"""The loss of fine-tuning towards the dense model's answers, against references by hand."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from scipy.special import expit, softmax
from torch import nn

import headprune as hp
from headprune.app.distillation import DistillationLoss
from headprune.app.options import Mixture
from tests.support.causal import my_gpt, texts
from tests.support.finetuning import pair, t5
from tests.support.folders import common
from tests.support.zoo import bert, gpt2, labelled, llama, randomise, text, vit


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
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
    """In value and gradient, where every example has as many labelled tokens; no dense model is needed."""
    model, example = make()
    batch = labelled(model, {k: v[:2] for k, v in example.items()})
    if "labels" in batch and make is t5:
        batch["labels"] = batch["labels"].clamp(min=3)
    loss = DistillationLoss(model, None, Mixture(alpha=0.0), batch)
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
    (lambda: DistillationLoss(bert()[0], None, Mixture(), labelled(*bert())), "no dense model"),
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
    loss = DistillationLoss(model, None, Mixture(alpha=0), batch)
    with torch.no_grad():
        for i, each in enumerate(loss(batch)):
            own = model(**{k: v[i : i + 1] for k, v in batch.items()}).loss
            torch.testing.assert_close(each, own, rtol=1e-5, atol=1e-6)
