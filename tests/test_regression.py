"""Heads that give several real numbers: squared errors everywhere, no classes made up."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.app.data import DataOptions
from headprune.app.models import TASKS, LoadedModel, load_model, numbers_given
from headprune.app.options import Options
from headprune.app.workflow.scene import open_scene
from headprune.batches import Rows
from headprune.divergence import Divergence, Fidelity
from headprune.evaluation import evaluate
from headprune.reference.token_weights import probe_of
from headprune.repairing import repair
from tests.support.causal import Labelless, gemma3, text_config, tiny
from tests.support.folders import tokenizer, write_jsonl
from tests.support.zoo import randomise, text


def regression(problem: str | None = "regression", targets: int = 3) -> nn.Module:
    config = tf.BertConfig(**tiny(num_labels=targets), problem_type=problem)
    return randomise(tf.BertForSequenceClassification(config))


def batch_of(rows: int = 5, targets: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = {k: v.clamp(max=29) for k, v in text(rows, 7).items()}
    return {**ids, "labels": torch.randn(rows, targets, generator=generator)}


@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("labels", ["any", "from 0 to 1"])
def test_evaluation_and_scores_are_of_squared_errors(targets: int, labels: str) -> None:
    model, batch = regression(targets=targets), batch_of(targets=targets)
    if labels != "any":
        batch["labels"] = batch["labels"].sigmoid()
    with torch.no_grad():
        own = float(model(**batch).loss)
    assert evaluate(model, [batch]).metrics == {"loss": pytest.approx(own, rel=1e-5)}
    layers = hp.find_attention(model, batch)
    scores = hp.score(model, [batch], "ablation", layers=layers)
    with torch.no_grad(), hp.mask(model, {layers[0].name: [1]}, layers=layers):
        without = float(model(**batch).loss)
    assert float(scores.values[layers[0].name][1]) == pytest.approx(without - own, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("problem", "targets"), [("regression", 3), (None, 1)])
def test_a_loss_is_no_answer(problem: str | None, targets: int) -> None:
    """Labelled batches let the model compute its loss, a tensor without dimensions: search and repair must not take it for an answer."""
    model, batches = regression(problem, targets), [batch_of(8, targets)]
    bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    layers = hp.find_attention(model, bare[0])
    states = []
    for given in (batches, bare):
        pruned = copy.deepcopy(model)
        hp.repair(pruned, {layers[0].name: [1]}, given)
        states.append(pruned.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
    kept = hp.search(model, batches, keep=3, effort="low", choose=[batch_of(6, targets)])
    assert sum(map(len, kept[0].drop.values())) == sum(layer.num_heads for layer in layers) - 3


def test_several_labels_at_once_are_still_classes() -> None:
    model = regression("multi_label_classification")
    batch = batch_of()
    batch["labels"] = (batch["labels"] > 0).float()
    with torch.no_grad():
        out = model(**batch)
    found = evaluate(model, [batch]).metrics
    assert found["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(((out.logits > 0) == (batch["labels"] > 0)).float().mean()))


@pytest.mark.parametrize("labels", ["numbers", "zeros and ones"])
def test_numbers_without_a_loss_to_compare_with(labels: str) -> None:
    inner, batch = regression(), batch_of()
    model = Labelless(inner)  # has no config that says what it is
    if labels == "numbers":
        assert evaluate(model, [batch]).metrics == pytest.approx(evaluate(inner, [batch]).metrics)
        return
    batch["labels"] = (batch["labels"] > 0).float()
    with pytest.raises(hp.HeadPruneError, match="may be numbers or classes"):
        evaluate(model, [batch])


def test_whole_numbers_for_real_ones_are_refused() -> None:
    model, batch = regression(), batch_of()
    batch["labels"] = batch["labels"].round().long()
    for ask in (lambda: evaluate(model, [batch]), lambda: hp.score(model, [batch])):
        with pytest.raises(hp.HeadPruneError, match=r"head wants real ones \(regression\)"):
            ask()
    plain = Labelless(regression(targets=1))
    with pytest.raises(hp.HeadPruneError, match="head wants real ones"):
        evaluate(plain, [{**batch, "labels": torch.tensor([0, 1, 0, 1, 1])}])


def test_answers_are_compared_as_numbers() -> None:
    """Without labels, in what plans are told apart by, and in repair."""
    model, batch = regression(), batch_of()
    example = {k: v for k, v in batch.items() if k != "labels"}
    layers = hp.find_attention(model, example)
    drop = {layers[1].name: [0]}
    fidelity = Fidelity(model, [example])
    with torch.no_grad(), hp.mask(model, {}, layers=layers):
        known = model(**example).logits
    with torch.no_grad(), hp.mask(model, drop, layers=layers):
        now = model(**example).logits
        apart = float(((now - known) ** 2).sum(-1).mean())
        assert fidelity.divergence() == pytest.approx(apart, rel=1e-4)
    scores = hp.score(model, [example], "ablation", layers=layers)
    assert float(scores.values[layers[1].name][0]) == pytest.approx(apart, rel=1e-4)
    assert scores.details["loss"] == "squared difference from the dense model's answers"


def test_pruned_and_repaired_it_is_no_further_from_the_dense_model() -> None:
    model, batch = regression().double(), {**batch_of(60), "labels": batch_of(60)["labels"].double()}
    example = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        known = model(**example).logits
        # All answers moved alike: what no difference between "classes" shows.
        model.classifier.weight.copy_(model.classifier.weight[:1].expand_as(model.classifier.weight).clone())
        known = model(**example).logits
    layers = hp.find_attention(model, example)
    drop = {layers[1].name: [0]}
    with torch.no_grad(), hp.mask(model, drop, layers=layers):
        before = float((model(**example).logits - known).square().mean())
    repair(model, drop, [example], layers=layers)
    hp.prune(model, drop, example, layers=layers)
    with torch.no_grad():
        assert float((model(**example).logits - known).square().mean()) < 0.5 * before


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_what_heads_are_ranked_by_is_the_fisher_information_of_such_answers(problem: str) -> None:
    """Of numbers the identity; of a yes or no its variance."""
    model, batch = regression(problem), batch_of(400)
    logits = torch.randn(1, 3).expand(400, 3).clone().requires_grad_()
    output = tf.modeling_outputs.SequenceClassifierOutput(logits=logits)
    (slope,) = torch.autograd.grad(probe_of(model, output, batch, 0, Rows()), logits)
    chance = logits[0].detach().sigmoid()
    expected = torch.ones(3) if problem == "regression" else chance * (1 - chance)
    found = slope.T @ slope / 400
    torch.testing.assert_close(found.diagonal(), expected, rtol=0.25, atol=0)
    assert (found - found.diagonal().diag()).abs().max() < 0.2 * float(expected.max())


def test_divergence_of_three_numbers() -> None:
    known, now = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.5, 2.5, 3.5]])
    assert float(Divergence(regression(), 0).between(known, now, {})) == pytest.approx(0.75)


def test_the_command_line_says_that_it_measures_no_regression(tmp_path: Path) -> None:
    model = regression()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows: list[dict[str, Any]] = [{"text": "good film", "label": [0.5, 1.0, -2.0]}] * 6
    data = DataOptions(str(write_jsonl(tmp_path / "x.jsonl", rows)))

    class Silent:
        def say(self, text: str) -> None:
            pass

    with pytest.raises(hp.HeadPruneError, match=r"has a regression head \(3 numbers\)"):
        open_scene(Options(str(tmp_path / "model"), data), Silent())  # type: ignore[arg-type]


def test_who_gives_numbers() -> None:
    def given(model: nn.Module, task: str = "sequence-classification") -> str | None:
        return numbers_given(LoadedModel(model, None, TASKS[task], "x", "x"))

    assert given(regression()) == "3 numbers"
    assert given(regression(targets=1)) == "1 number"
    assert given(regression(None)) is None
    assert given(tf.BertForQuestionAnswering(tf.BertConfig(**tiny(num_labels=1))), "question-answering") is None


# -- configs of several parts -----------------------------------------------------------------------


def test_gemma_3_loads_and_can_be_padded(tmp_path: Path) -> None:
    model = randomise(gemma3())
    assert not hasattr(model.config, "pad_token_id")
    folder = tmp_path / "gemma"
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    loaded = load_model(str(folder))
    assert loaded.task.name == "causal-lm"  # not seq2seq, though it is called ForConditionalGeneration
    assert loaded.config.get_text_config().pad_token_id == 0
    batch = {"input_ids": torch.randint(3, 28, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        assert evaluate(loaded.model, [batch]).metrics["loss"] == pytest.approx(float(model(**batch).loss), abs=1e-5)


def test_a_classifier_of_several_parts_gets_a_token_to_pad_with(tmp_path: Path) -> None:
    config = tf.Gemma3TextConfig(**{**text_config(num_labels=2), "pad_token_id": None})
    config.pad_token_id = None
    randomise(tf.Gemma3TextForSequenceClassification(config)).save_pretrained(tmp_path / "gemma")
    tokenizer().save_pretrained(tmp_path / "gemma")
    loaded = load_model(str(tmp_path / "gemma"))
    assert loaded.config.pad_token_id == 0
    with torch.no_grad():
        assert F.softmax(loaded.model(input_ids=torch.randint(3, 28, (2, 6))).logits, -1).shape == (2, 2)


def test_texts_are_cut_at_the_positions_of_the_text_part(tmp_path: Path) -> None:
    from headprune.app.data import load_parts

    model = randomise(gemma3())
    model.config.text_config.max_position_embeddings = 5
    loaded = LoadedModel(model, tokenizer(), TASKS["causal-lm"], "x", "x")
    rows: list[dict[str, Any]] = [
        {"text": f"{w} good film was a the plot is fun"} for w in ("one", "two", "sad", "dull", "four", "three")
    ]
    parts = load_parts(DataOptions(str(write_jsonl(tmp_path / "x.jsonl", rows))), loaded)
    assert {b["input_ids"].shape[1] for b in parts.score.batches(4)} == {5}


def test_scores_of_a_model_with_a_stand_in_are_its_own() -> None:
    """While scores are made, Gemma 3's image part has other names for its weights."""
    from headprune.fingerprint import fingerprint

    model = randomise(gemma3())
    batch = {"input_ids": torch.randint(3, 28, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    scores = hp.score(model, [{**batch, "labels": batch["input_ids"]}], "gradient")
    assert scores.model == fingerprint(model)
    hp.plan(scores, 2).check_model(model)
