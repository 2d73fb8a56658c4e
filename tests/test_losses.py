"""The loss of each example, against the models' own losses: which label each logit is compared with, and what does not count."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.batches import Rows
from headprune.conventions import find_label_use
from headprune.losses import ExampleLoss
from tests.support import causal
from tests.support.causal import Labelless, OwnLoss, Wrapped, my_gpt, own_loss, regression, singles, texts, tiny
from tests.support.errors import refuses
from tests.support.zoo import labelled, llama, randomise, t5, text, wav2vec2

# (model, how far ahead the labels are that its own loss compares with)
CAUSAL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gemma3": (causal.gemma3, 1),
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**tiny())), 1),
    "subclass": (my_gpt, 1),
    "bart": (causal.bart, 0),
    "xlnet": (causal.xlnet, 0),
    "bert": (lambda: tf.BertForMaskedLM(tf.BertConfig(**tiny())), 0),
    "bert decoder": (lambda: tf.BertLMHeadModel(tf.BertConfig(**tiny(is_decoder=True))), 1),
}


def seen(batch: dict[str, Tensor], ahead: int) -> dict[str, Tensor]:
    """Without the labels that only padding predicts, which a model's own loss counts."""
    labels = batch["labels"].clone()
    for row, real in zip(labels, batch["attention_mask"], strict=True):
        for at in range(ahead, len(row)):
            if ahead and not real[at - ahead]:
                row[at] = -100
    return {**batch, "labels": labels}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("left", [False, True])
def test_evaluation_measures_the_models_own_loss(name: str, left: bool) -> None:
    make, ahead = CAUSAL[name]
    model, batch = randomise(make()), texts(left=left)
    with torch.no_grad():
        own = own_loss(model, seen(batch, ahead))
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    found = hp.evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, abs=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(own), rel=1e-4)
    known = seen(batch, ahead)["labels"][:, ahead:]
    right = (logits[:, : logits.shape[1] - ahead].argmax(-1) == known) & (known != -100)
    assert found.metrics["accuracy"] == pytest.approx(float(right.sum() / (known != -100).sum()))
    assert found.tokens.tolist() == (known != -100).sum(1).tolist()
    assert hp.evaluate(model, singles(batch)).metrics["loss"] == pytest.approx(own, abs=1e-4)
    # The model's own loss counts labels of padding, so that it changes with the batch that an example is in.
    counted = hp.evaluate(model, [{**batch, "labels": batch["input_ids"]}])
    assert counted.loss.tolist() == found.loss.tolist()
    assert counted.tokens.tolist() == found.tokens.tolist()


def test_half_precision_of_logits_that_say_little() -> None:
    """Both ways to compare give the model's own loss up to rounding, as Cohere's do with random weights: the nearer one counts."""
    model, batch = randomise(my_gpt()), texts()
    model.transformer.ln_f.weight.data *= 0.02
    model.transformer.ln_f.bias.data *= 0.02
    found = hp.evaluate(model.bfloat16(), [batch])
    assert found.tokens.tolist() == ((batch["labels"] != -100).sum(1) - 1).tolist()


class Scaled(nn.Module):
    """Its logits say next to nothing; its loss, of half precision if asked for, has another term, and is of labels below a limit."""

    def __init__(self, kind: torch.dtype, term: float, limit: int = 50, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.term, self.limit = nn.Embedding(50, 50, dtype=kind), term, limit
        nn.init.normal_(self.embed.weight, std=scale, generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.embed(input_ids)
        if labels is None:
            return {"logits": logits}
        assert int(labels.max()) < self.limit, "too large a label"
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss + self.term}


def test_a_loss_that_labels_hardly_change_shows_no_convention() -> None:
    """Rounding alone was taken for a likeness."""
    for seed in range(9):
        ids = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": ids, "labels": ids}
        assert find_label_use(Scaled(torch.float32, 1.0, scale=1e-4), [batch], Rows()).convention is None


def test_a_small_term_of_a_loss_in_half_precision_is_no_rounding() -> None:
    """Of a model that is almost always right the loss is small, too."""
    model = Scaled(torch.bfloat16, 0.0015)
    model.embed.weight.data = 20 * torch.eye(50, dtype=torch.bfloat16)
    batch = {name: torch.arange(18).view(2, 9) for name in ("input_ids", "labels")}
    assert find_label_use(model, [batch], Rows()).own


def test_labels_that_only_the_model_refuses() -> None:
    """They were passed over where other examples' labels were taken."""
    ids = torch.arange(18).view(2, 9)
    with pytest.raises(
        hp.HeadPruneError, match="does not run on an example with these labels: AssertionError: too large"
    ):
        hp.evaluate(Scaled(torch.float32, 0.0, limit=17), [{"input_ids": ids, "labels": ids}])


def test_evaluation_agrees_with_the_named_classes() -> None:
    """The same weights give the same numbers, whatever the class is called and whatever is around it."""
    model = randomise(my_gpt())
    batch = texts()
    plain = tf.GPT2LMHeadModel(model.config).eval()
    plain.load_state_dict(model.state_dict())
    expected = hp.evaluate(plain, [batch]).metrics
    others = [model, Wrapped(plain), Labelless(plain), causal.Tensors(plain), torch.compile(plain, backend="eager")]
    for other in others:
        assert hp.evaluate(other, [batch]).metrics == pytest.approx(expected), type(other).__name__
    scores = hp.score(plain, [batch], "gradient").flat()
    for other in others[:-1]:
        torch.testing.assert_close(hp.score(other, [batch], "gradient").flat(), scores, rtol=1e-5, atol=1e-7)


# -- padding that has labels ----------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_padding_that_has_labels(ahead: int, left: bool) -> None:
    """The model leaves them out itself, as Granite Speech and Qwen2-Audio do, and Gemma 3 did."""

    def masking(logits: Tensor, labels: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        real = inputs["attention_mask"][:, ahead:] != 0
        return F.cross_entropy(logits[:, : logits.shape[1] - ahead][real], labels[:, ahead:][real])

    model, batch = OwnLoss(randomise(my_gpt()), masking), texts(left=left)
    batch["labels"] = batch["input_ids"]
    own = own_loss(model, seen(batch, ahead))
    found = hp.evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, abs=1e-5)
    real = batch["attention_mask"]
    assert found.tokens.sum() == (real[:, 1:] * real[:, :-1] if ahead else real).sum()


class Prompted(Wrapped):
    """Learned vectors before the text, as in prompt tuning: more logits than labels."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.prompt = nn.Parameter(torch.randn(1, 3, 16))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        first = self.prompt.expand(len(input_ids), -1, -1)
        mask = F.pad(attention_mask, (3, 0), value=1)
        given = torch.cat([first, self.inner.transformer.wte(input_ids)], 1)
        if labels is not None:
            labels = F.pad(labels, (3, 0), value=-100)
        return self.inner(inputs_embeds=given, attention_mask=mask, labels=labels)


def test_more_logits_than_labels() -> None:
    """The last of the learned vectors predicts the text's first token."""
    model, batch = Prompted(randomise(my_gpt())), texts()
    own = own_loss(model, batch)
    found = hp.evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, abs=1e-5)
    assert "accuracy" in found.metrics


# -- losses with more in them ---------------------------------------------------------------------


def test_labels_are_found_behind_a_loss_with_more_in_it() -> None:
    """Smoothed labels, and something that has nothing to do with them."""

    def smoothed(logits: Tensor, labels: Tensor, inputs: Any) -> Tensor:
        flat = logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1) + logits.square().mean()

    inner, batch = randomise(my_gpt()), texts()
    model = OwnLoss(inner, smoothed)
    assert hp.evaluate(model, [batch]).metrics == pytest.approx(hp.evaluate(inner, [batch]).metrics)
    own = [own_loss(model, row) for row in singles(batch)]  # what is scored is the model's own
    assert hp.score(model, [batch], "ablation").details["mean_loss"] == pytest.approx(sum(own) / len(own))


def test_labels_that_only_the_model_knows() -> None:
    """A loss of its own that ignores -1."""

    ignoring = partial(F.cross_entropy, ignore_index=-1)
    model, batch = OwnLoss(randomise(my_gpt()), lambda x, y, _: ignoring(x.flatten(0, 1), y.flatten())), texts(rows=3)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    rows = singles(batch)
    own = [own_loss(model, row) for row in rows]
    found = hp.evaluate(model, rows)
    assert found.loss.tolist() == pytest.approx(own, rel=1e-5)
    assert set(found.metrics) == {"loss"}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_text_that_repeats_one_token(name: str) -> None:
    """Such as one of words that the tokenizer does not know. Then every way to compare gives the same loss, up to rounding."""
    make, ahead = CAUSAL[name]
    ids = torch.full((2, length := 30), 5)
    ids[1] = 11
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    for seed in range(3):
        assert hp.evaluate(randomise(make(), seed), [batch]).tokens.tolist() == [length - ahead] * 2


# -- no loss to compare with ----------------------------------------------------------------------


def test_labels_that_are_shifted_already() -> None:
    inner, batch = randomise(my_gpt()), texts()
    shifted = {**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    assert hp.evaluate(Labelless(inner), [shifted]).metrics == pytest.approx(hp.evaluate(inner, [batch]).metrics)


def test_a_tagger_of_tokens_without_a_loss() -> None:
    """Causal or not, its labels are no copies of its input."""
    batch = texts()
    batch["labels"] = (batch["labels"] * 7 % 5).masked_fill(batch["labels"] == -100, -100)
    for inner in (my_gpt(), tf.BertForMaskedLM(tf.BertConfig(**tiny()))):
        model = Labelless(randomise(inner))
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        own = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert hp.evaluate(model, [batch]).metrics["loss"] == pytest.approx(float(own), abs=1e-5)


class Embedded(Wrapped):
    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.inner(inputs_embeds=inputs_embeds).logits


def test_what_nothing_tells_is_refused() -> None:
    model = Embedded(randomise(my_gpt()))
    batch = {"inputs_embeds": torch.randn(3, 6, 16), "labels": torch.randint(3, 30, (3, 6))}
    for ask in (lambda: hp.evaluate(model, [batch]), lambda: hp.score(model, [batch])):
        refuses(r"cannot be told how Embedded compares its logits.*Pass loss_fn=", ask)
    refuses("have no labels", hp.evaluate, model, [{"inputs_embeds": batch["inputs_embeds"]}])

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").mean(1)

    given = hp.evaluate(model, [batch], loss_fn=loss_fn)
    own = float(loss_fn(model(batch["inputs_embeds"]), batch["labels"]).mean())
    assert given.metrics == {"loss": pytest.approx(own)}


# -- other tasks ----------------------------------------------------------------------------------


def test_encoder_decoders_inside_another_module() -> None:
    model, example = t5()
    batch = labelled(model, example)
    own = own_loss(model, batch)
    expected = hp.evaluate(model, [batch]).metrics
    assert expected["loss"] == pytest.approx(own, abs=1e-5)
    assert hp.evaluate(Wrapped(model), [batch]).metrics == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["TokenClassification", "QuestionAnswering", "SequenceClassification"])
def test_bert_heads_inside_another_module(kind: str) -> None:
    model = randomise(getattr(tf, f"BertFor{kind}")(tf.BertConfig(**tiny(num_labels=2 if kind[0] == "Q" else 3))))
    batch = texts()
    labels = {
        "TokenClassification": {"labels": batch["labels"].clamp(max=2)},
        "QuestionAnswering": {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([2, 1, 3, 3])},
        "SequenceClassification": {"labels": torch.tensor([0, 1, 2, 1])},
    }[kind]  # fmt: skip
    batch = {**{k: v for k, v in batch.items() if k != "labels"}, **labels}
    own = own_loss(model, batch)
    if kind[0] == "Q":  # of texts without their padding, which is no place for an answer; it was one
        sizes = batch["attention_mask"].sum(1).tolist()
        alone = [
            {k: v[i : i + 1, :n] if v.ndim == 2 else v[i : i + 1] for k, v in batch.items()}
            for i, n in enumerate(sizes)
        ]
        own = sum(own_loss(model, one) for one in alone) / len(alone)
        assert hp.evaluate(model, alone).correct.tolist() == hp.evaluate(model, [batch]).correct.tolist()
        for method in ("ablation", "gradient"):
            together, each = (hp.score(model, batches, method).flat() for batches in ([batch], alone))
            torch.testing.assert_close(together, each, rtol=1e-3, atol=1e-7)
    expected = hp.evaluate(model, [batch]).metrics
    assert expected["loss"] == pytest.approx(own, abs=1e-5)
    assert "accuracy" in expected
    assert ("f1_macro" in expected) == (kind[0] != "Q")  # places in texts are no classes
    assert hp.evaluate(Wrapped(model), [batch]).metrics == pytest.approx(expected)
    assert hp.evaluate(Labelless(model), [batch]).metrics == pytest.approx(expected)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped, Labelless])
def test_a_label_that_is_no_class_is_named(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(randomise(tf.BertForSequenceClassification(tf.BertConfig(**tiny(num_labels=3)))))
    batch = {**texts(), "labels": torch.tensor([0, 1, 2, 5])}
    for ask in (lambda: hp.evaluate(model, [batch]), lambda: hp.score(model, [batch])):
        refuses("Label 5 does not fit the model's head, which has 3 classes", ask)


def test_one_loss_of_several_examples_is_no_loss_fns() -> None:
    """The error said what loss_fn returned, and there was none."""
    model, example = llama()
    error = refuses("not one loss per example", ExampleLoss(model).outcome, labelled(model, example))
    assert str(error).startswith(f"The loss of {len(example['input_ids'])} examples is (1,)")


def test_texts_of_one_token_are_told() -> None:
    """It was said that the model has no loss of its own."""
    ids = torch.arange(5, 9)[:, None]
    with pytest.raises(hp.HeadPruneError, match="none that is finite on these examples") as caught:
        hp.evaluate(llama()[0], [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}])
    assert "texts of one token" in caught.value.hint


# -- how a loss that is not known is averaged over examples and labels ---------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_ctc_models_examples_count_alike_whatever_their_labels(reduction: str, alone: bool) -> None:
    model, generator = wav2vec2(tf.Wav2Vec2ForCTC, ctc_loss_reduction=reduction), torch.Generator().manual_seed(0)
    labels = torch.randint(1, 12, (4, 10), generator=generator)
    labels[torch.arange(10) >= torch.tensor([3, 10, 5, 8])[:, None]] = -100
    batch = {"input_values": torch.randn(4, 1600, generator=generator), "labels": labels}
    own = own_loss(model, batch) / (4 if reduction == "sum" else 1)
    found = hp.evaluate(model, singles(batch) if alone else [batch])
    assert found.metrics == {"loss": pytest.approx(own, rel=1e-4)}  # and no perplexity
    assert found.tokens.tolist() == [1] * 4


def reduced(kind: str, logits: Tensor, labels: Tensor, inputs: Any) -> Tensor:
    """A focal loss, averaged in some way."""
    flat = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    focal, counts = ((1 - (-flat).exp()) ** 2 * flat).sum(1), (labels[:, 1:] != -100).sum(1)
    if kind == "other":  # the longest text's
        return (focal / counts)[counts.argmax()]
    return {"labels": focal.sum() / counts.sum(), "examples": (focal / counts).mean(), "sum": focal.sum()}[kind]


def test_a_custom_loss_of_every_label() -> None:
    def every(logits: Tensor, labels: Tensor, inputs: Any) -> Tensor:
        return reduced("labels", F.pad(logits, (0, 0, 0, 1)), F.pad(labels, (1, 0), value=-100), inputs)

    model, batch = OwnLoss(randomise(my_gpt()), every), texts()
    found = hp.evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own_loss(model, batch), rel=1e-4)
    assert found.tokens.tolist() == (batch["labels"] != -100).sum(1).tolist()


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("kind", ["labels", "examples", "sum", "other"])
def test_how_a_custom_loss_is_averaged_is_measured(kind: str, equal: bool) -> None:
    """Texts of one length too. The first label is predicted by nothing, so it does not weigh."""
    model, batch = OwnLoss(randomise(my_gpt()), partial(reduced, kind)), texts()
    if equal:
        batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    losses = [own_loss(model, row) for row in singles(batch)]
    own = own_loss(model, batch)
    found = hp.evaluate(model, [batch])
    if kind == "labels":
        assert found.metrics == pytest.approx({"loss": own, "perplexity": math.exp(own)}, rel=1e-4)
        assert found.tokens.tolist() == (batch["labels"][:, 1:] != -100).sum(1).tolist()
    else:
        assert found.metrics == {"loss": pytest.approx(sum(losses) / 4, rel=1e-4)}
    assert found.loss.tolist() == pytest.approx(losses, rel=1e-4)


def test_a_loss_of_labels_and_of_texts_is_no_mean_over_labels() -> None:
    """BERT's before fine-tuning: masked tokens, and whether one sentence follows the other."""
    model, batch = randomise(tf.BertForPreTraining(tf.BertConfig(**tiny()))), texts()
    batch["next_sentence_label"] = torch.tensor([0, 1, 1, 0])
    own = [own_loss(model, row) for row in singles(batch)]
    assert hp.evaluate(model, [batch]).metrics == {"loss": pytest.approx(sum(own) / 4, rel=1e-4)}


def test_where_it_cannot_be_measured_each_example_counts_once() -> None:
    """One label each: every mean is the same, and nothing says that the loss is one of labels."""
    model, batch = OwnLoss(randomise(my_gpt()), partial(reduced, "labels")), texts()
    batch["labels"][:, [0, 1, *range(3, 8)]] = -100
    assert set(hp.evaluate(model, [batch]).metrics) == {"loss"}


def test_a_loss_that_is_only_an_attribute_counts() -> None:
    """In older versions of transformers, ``output.loss = …`` sets no entry where there was no loss before."""

    class Attribute(OwnLoss):
        def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
            out = self.inner(**inputs)
            if labels is not None:
                object.__setattr__(out, "loss", self.loss(out.logits, labels, inputs))
            return out

    model, batch = Attribute(randomise(my_gpt()), partial(reduced, "labels")), texts()
    out = model(**batch)
    assert "loss" not in out
    assert hp.evaluate(model, [batch]).metrics["loss"] == pytest.approx(float(out.loss), rel=1e-4)


# -- heads that give several real numbers ----------------------------------------------------------


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
    own = own_loss(model, batch)
    assert hp.evaluate(model, [batch]).metrics == {"loss": pytest.approx(own, rel=1e-5)}
    layers = hp.find_attention(model, batch)
    scores = hp.score(model, [batch], "ablation", layers=layers)
    with torch.no_grad(), hp.mask(model, {layers[0].name: [1]}, layers=layers):
        without = own_loss(model, batch)
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
    out, found = model(**batch), hp.evaluate(model, [batch]).metrics
    assert found["loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float(((out.logits > 0) == (batch["labels"] > 0)).float().mean()))


def test_numbers_without_a_loss_to_compare_with() -> None:
    inner, batch = regression(), batch_of()
    model = Labelless(inner)  # has no config that says what it is
    assert hp.evaluate(model, [batch]).metrics == pytest.approx(hp.evaluate(inner, [batch]).metrics)
    batch["labels"] = (batch["labels"] > 0).float()
    refuses("numbers or several labels at once", hp.evaluate, model, [batch])


def test_whole_numbers_for_real_ones() -> None:
    """The model's own loss takes them, or says that it does not; they are never classes."""
    batch = batch_of()
    batch["labels"] = batch["labels"].round().long().clamp(0, 1)
    model = regression()
    assert hp.evaluate(model, [batch]).metrics == {"loss": pytest.approx(own_loss(model, batch), rel=1e-5)}
    for ask in (hp.evaluate, hp.score):
        with pytest.raises(hp.HeadPruneError, match="does not run on an example with these labels") as caught:
            ask(regression("multi_label_classification"), [batch])
        assert "floats for numbers and for several labels" in caught.value.hint
    one = {**batch, "labels": torch.zeros(5, dtype=torch.long)}
    assert set(hp.evaluate(regression(None, targets=1), [one]).metrics) == {"loss"}
    refuses("no logits that fit its labels", hp.evaluate, Labelless(regression(targets=1)), [one])


def test_scores_of_a_model_with_a_stand_in_are_its_own() -> None:
    """While scores are made, Gemma 3's image part has other names for its weights."""
    model = randomise(causal.gemma3())
    batch = {"input_ids": torch.randint(3, 28, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    hp.plan(hp.score(model, [{**batch, "labels": batch["input_ids"]}], "gradient"), 2).check_model(model)
