"""Which label each logit is compared with, against the models' own losses."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import headprune as hp
from headprune.app.data import DataOptions, load_parts
from headprune.app.distillation import DistillationLoss, Mixture
from headprune.app.models import TASKS, LoadedModel
from headprune.conventions import sees_ahead
from headprune.evaluation import evaluate
from headprune.losses import ExampleLoss
from tests.support.causal import VISION, Labelless, Tensors, Wrapped, gemma3, my_gpt, singles, text_config, texts, tiny
from tests.support.folders import sentences, tokenizer, write_jsonl
from tests.support.zoo import labelled, llama, randomise, t5


def llava() -> nn.Module:
    config = tf.LlavaConfig(
        text_config={"model_type": "llama", **text_config()}, vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
        image_token_index=29,
    )  # fmt: skip
    return tf.LlavaForConditionalGeneration(config)


def bart() -> nn.Module:
    config = tf.BartConfig(
        vocab_size=30, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, encoder_layers=1,
        encoder_attention_heads=2, encoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0, is_decoder=True,
        is_encoder_decoder=False,
    )  # fmt: skip
    return tf.BartForCausalLM(config)


def xlm(**more: Any) -> nn.Module:
    config = tf.XLMConfig(vocab_size=30, emb_dim=16, n_heads=2, n_layers=1, pad_index=0, **more)
    return tf.XLMWithLMHeadModel(config)


def xlnet() -> nn.Module:
    return tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=30, d_model=16, n_head=2, n_layer=1, d_inner=16))


# (model, how far ahead the labels are that its own loss compares with)
CAUSAL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gemma3": (gemma3, 1),
    "llava": (llava, 1),
    "subclass": (my_gpt, 1),
    "bart": (bart, 0),
    "xlm": (lambda: xlm(causal=True), 0),
    "xlnet": (xlnet, 0),
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
        own = float(model(**seen(batch, ahead)).loss)
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    found = evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, abs=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(own), rel=1e-4)
    known = seen(batch, ahead)["labels"][:, ahead:]
    right = (logits[:, : logits.shape[1] - ahead].argmax(-1) == known) & (known != -100)
    assert found.metrics["accuracy"] == pytest.approx(float(right.sum() / (known != -100).sum()))
    assert found.tokens.tolist() == (known != -100).sum(1).tolist()
    one_by_one = evaluate(model, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)])
    assert one_by_one.metrics["loss"] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("name", ["subclass", "xlnet"])
def test_half_precision(name: str) -> None:
    model, batch = randomise(CAUSAL[name][0]()).bfloat16(), texts()
    with torch.no_grad():
        own = float(model(**batch).loss)
    found = evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, rel=1e-2)
    assert "accuracy" in found.metrics


def test_evaluation_agrees_with_the_named_classes() -> None:
    """The same weights give the same numbers, whatever the class is called and whatever is around it."""
    model = randomise(my_gpt())
    batch = texts()
    plain = tf.GPT2LMHeadModel(model.config).eval()
    plain.load_state_dict(model.state_dict())
    expected = evaluate(plain, [batch]).metrics
    others = [model, Wrapped(plain), Labelless(plain), Tensors(plain), torch.compile(plain, backend="eager")]
    for other in others:
        assert evaluate(other, [batch]).metrics == pytest.approx(expected), type(other).__name__


def test_scores_agree_with_the_named_classes() -> None:
    model = randomise(my_gpt())
    batch = texts()
    plain = tf.GPT2LMHeadModel(model.config).eval()
    plain.load_state_dict(model.state_dict())
    expected = hp.score(plain, [batch], "gradient").flat()
    for other in (model, Wrapped(plain), Labelless(plain), Tensors(plain)):
        found = hp.score(other, [batch], "gradient")
        torch.testing.assert_close(found.flat(), expected, rtol=1e-5, atol=1e-7)
        losses = ExampleLoss(other)
        assert len(losses.prepare([batch])) == 1  # not one by one


def test_the_sweep_over_all_model_types_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make coverage` looks at every causal language model of transformers."""
    spec = importlib.util.spec_from_file_location(
        "sweep", Path(__file__).parents[1] / "benchmarks" / "coverage_types.py"
    )
    assert spec is not None
    assert spec.loader is not None
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    assert [sweep.loss_of(name) for name in ("gpt2", "bart", "vit")] == ["next", "same", ""]
    monkeypatch.setattr(sweep, "evaluate", lambda *_: evaluate(randomise(my_gpt()), [texts()]))
    assert sweep.loss_of("gpt2").startswith("WRONG")


# -- padding that has labels ----------------------------------------------------------------------


class Masking(Wrapped):
    """Leaves out the labels of padding itself, as Granite Speech and Qwen2-Audio do, and Gemma 3 did."""

    ahead = 1

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        if labels is None:
            return CausalLMOutput(logits=logits)
        real = attention_mask[:, self.ahead :] != 0
        loss = F.cross_entropy(logits[:, : logits.shape[1] - self.ahead][real], labels[:, self.ahead :][real])
        return CausalLMOutput(loss=loss, logits=logits)


class MaskingInPlace(Masking):
    ahead = 0


@pytest.mark.parametrize("kind", [Masking, MaskingInPlace])
@pytest.mark.parametrize("left", [False, True])
def test_padding_that_has_labels(kind: type[Masking], left: bool) -> None:
    model = kind(randomise(my_gpt()))
    batch = texts(left=left)
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        own = float(model(**seen(batch, kind.ahead)).loss)
    found = evaluate(model, [batch])
    assert found.metrics["loss"] == pytest.approx(own, abs=1e-5)
    real = batch["attention_mask"]
    assert found.tokens.sum() == (real[:, 1:] * real[:, :-1] if kind.ahead else real).sum()


def test_labels_of_padding_that_padding_predicts_do_not_count() -> None:
    """The model's own loss counts them."""
    model, batch = randomise(my_gpt()), texts()
    batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        own = float(model(**seen(batch, 1)).loss)
    assert evaluate(model, [batch]).metrics["loss"] == pytest.approx(own, abs=1e-5)


class Prompted(Wrapped):
    """Learned vectors before the text, as in prompt tuning: more logits than labels."""

    def __init__(self, inner: nn.Module, counts: bool) -> None:
        super().__init__(inner)
        self.prompt, self.counts = nn.Parameter(torch.randn(1, 3, 16)), counts

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        first = self.prompt.expand(len(input_ids), -1, -1)
        mask = F.pad(attention_mask, (3, 0), value=1)
        given = torch.cat([first, self.inner.transformer.wte(input_ids)], 1)
        if labels is not None:
            labels = F.pad(labels, (3, 0), value=-100)
            labels[:, 3] = labels[:, 3] if self.counts else -100
        return self.inner(inputs_embeds=given, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("counts", [False, True])
def test_more_logits_than_labels(counts: bool) -> None:
    model, batch = Prompted(randomise(my_gpt()), counts), texts()
    with torch.no_grad():
        own = float(model(**batch).loss)
    assert evaluate(model, [batch]).metrics["loss"] == pytest.approx(own, abs=1e-5)


# -- losses with more in them ---------------------------------------------------------------------


class Smoothed(Wrapped):
    """Smoothed labels, and something that has nothing to do with them."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        if labels is not None:
            flat = out.logits[:, :-1].flatten(0, 1)
            out.loss = F.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1) + out.logits.square().mean()
        return out


class Focal(Wrapped):
    """A loss that no cross-entropy is."""

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
        out = self.inner(**inputs)
        if labels is not None:
            flat = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
            out.loss = ((1 - (-flat).exp()) ** 2 * flat).sum() / (labels[:, 1:] != -100).sum()
        return out


def test_labels_are_found_behind_a_loss_with_more_in_it() -> None:
    inner, batch = randomise(my_gpt()), texts()
    model = Smoothed(inner)
    assert evaluate(model, [batch]).metrics == pytest.approx(evaluate(inner, [batch]).metrics)
    losses = ExampleLoss(model)  # what is scored is the model's own
    with torch.no_grad():
        for row in losses.prepare([batch]):
            assert float(losses(row)) == pytest.approx(float(model(**row).loss))


def test_no_accuracy_is_made_up_where_the_loss_is_none_that_is_known() -> None:
    model, batch = Focal(randomise(my_gpt())), texts()
    batch["labels"][:, 0] = -100  # so that labels and predictions are as many
    with torch.no_grad():
        own = float(model(**batch).loss)
    found = evaluate(model, [batch])
    assert found.metrics == pytest.approx({"loss": own, "perplexity": math.exp(own)}, rel=1e-4)
    mine = hp.score(model, [batch], "gradient").flat()
    assert mine.isfinite().all()


def test_labels_that_only_the_model_knows() -> None:
    """A loss of its own that ignores -1."""

    class Ignoring(Wrapped):
        def forward(self, labels: Tensor | None = None, **inputs: Any) -> Any:
            out = self.inner(**inputs)
            if labels is not None:
                out.loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
            return out

    model, batch = Ignoring(randomise(my_gpt())), texts(rows=3)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, -1)
    rows = singles(batch)
    with torch.no_grad():
        own = [float(model(**row).loss) for row in rows]
    found = evaluate(model, rows)
    assert found.loss.tolist() == pytest.approx(own, rel=1e-5)
    assert set(found.metrics) == {"loss"}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_text_that_repeats_one_token(name: str) -> None:
    """Such as one of words that the tokenizer does not know. Then every way to compare gives the same loss, up to rounding."""
    make, ahead = CAUSAL[name]
    ids = torch.full((2, length := 30), 5)
    ids[1] = 11
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    for seed in range(6):
        assert evaluate(randomise(make(), seed), [batch]).tokens.tolist() == [length - ahead] * 2


# -- no loss to compare with ----------------------------------------------------------------------


def test_labels_that_are_shifted_already() -> None:
    inner, batch = randomise(my_gpt()), texts()
    shifted = {**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    expected = evaluate(inner, [batch]).metrics
    assert evaluate(Labelless(inner), [shifted]).metrics == pytest.approx(expected)


def test_a_tagger_of_tokens_without_a_loss() -> None:
    """Causal or not, its labels are no copies of its input."""
    batch = texts()
    batch["labels"] = (batch["labels"] * 7 % 5).masked_fill(batch["labels"] == -100, -100)
    for inner in (my_gpt(), tf.BertForMaskedLM(tf.BertConfig(**tiny()))):
        model = Labelless(randomise(inner))
        with torch.no_grad():
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
        own = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        assert evaluate(model, [batch]).metrics["loss"] == pytest.approx(float(own), abs=1e-5)


class Embedded(Wrapped):
    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.inner(inputs_embeds=inputs_embeds).logits


def test_what_nothing_tells_is_refused() -> None:
    model = Embedded(randomise(my_gpt()))
    batch = {"inputs_embeds": torch.randn(3, 6, 16), "labels": torch.randint(3, 30, (3, 6))}
    for ask in (lambda: evaluate(model, [batch]), lambda: hp.score(model, [batch])):
        with pytest.raises(hp.HeadPruneError, match="cannot be told which token's label") as caught:
            ask()
        assert "loss_fn" in str(caught.value.hint)

    same = {"input_ids": (ids := torch.full((2, 7), 5)), "attention_mask": torch.ones_like(ids), "labels": ids}
    with pytest.raises(hp.HeadPruneError, match="cannot be told which token's label"):
        evaluate(Labelless(randomise(my_gpt())), [same])

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none").mean(1)

    given = evaluate(model, [batch], loss_fn=loss_fn)
    with torch.no_grad():
        assert given.metrics == {
            "loss": pytest.approx(float(loss_fn(model(batch["inputs_embeds"]), batch["labels"]).mean()))
        }


def test_nothing_to_compare_with() -> None:
    batch = texts()
    del batch["labels"]
    with pytest.raises(hp.HeadPruneError, match="have no labels"):
        evaluate(randomise(my_gpt()), [batch])


def test_what_sees_ahead() -> None:
    row = {k: v[-1:] for k, v in texts(left=False).items()}
    seen = {name: sees_ahead(randomise(make()), row) for name, (make, _) in CAUSAL.items()}
    assert {name for name, found in seen.items() if found} == {"xlnet", "bert"}


# -- other tasks ----------------------------------------------------------------------------------


def test_encoder_decoders_inside_another_module() -> None:
    model, example = t5()
    batch = labelled(model, example)
    with torch.no_grad():
        own = float(model(**batch).loss)
    expected = evaluate(model, [batch]).metrics
    assert expected["loss"] == pytest.approx(own, abs=1e-5)
    assert evaluate(Wrapped(model), [batch]).metrics == pytest.approx(expected)


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
    with torch.no_grad():
        own = float(model(**batch).loss)
        if kind[0] == "Q":  # of texts without their padding, which is no place for an answer
            sizes = batch["attention_mask"].sum(1).tolist()
            alone = [
                {k: v[i : i + 1, :n] if v.ndim == 2 else v[i : i + 1] for k, v in batch.items()}
                for i, n in enumerate(sizes)
            ]
            own = sum(float(model(**one).loss) for one in alone) / len(alone)
    expected = evaluate(model, [batch]).metrics
    assert expected["loss"] == pytest.approx(own, abs=1e-5)
    assert "accuracy" in expected
    assert evaluate(Wrapped(model), [batch]).metrics == pytest.approx(expected)
    assert evaluate(Labelless(model), [batch]).metrics == pytest.approx(expected)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped, Labelless])
def test_a_label_that_is_no_class_is_named(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(randomise(tf.BertForSequenceClassification(tf.BertConfig(**tiny(num_labels=3)))))
    batch = {**texts(), "labels": torch.tensor([0, 1, 2, 5])}
    for ask in (lambda: evaluate(model, [batch]), lambda: hp.score(model, [batch])):
        with pytest.raises(hp.HeadPruneError, match="Label 5 does not fit the model's head, which has 3 classes"):
            ask()


def test_fine_tuning_learns_what_is_measured() -> None:
    model, batch = randomise(my_gpt()), texts()
    loss = DistillationLoss(model, None, Mixture(alpha=0))
    loss.prepare(batch)
    with torch.no_grad():
        for i, each in enumerate(loss(batch)):
            own = model(**{k: v[i : i + 1] for k, v in batch.items()}).loss
            torch.testing.assert_close(each, own, rtol=1e-5, atol=1e-6)


# -- on the command line --------------------------------------------------------------------------


def parts_for(model: nn.Module, folder: Path) -> Any:
    loaded = LoadedModel(model, tokenizer(), TASKS["causal-lm"], "x", "x")
    return load_parts(DataOptions(str(write_jsonl(folder / "x.jsonl", sentences(12, seed=0)))), loaded)


def test_labels_are_the_next_tokens_whatever_the_models_own_loss(tmp_path: Path) -> None:
    """BART's decoder as a language model compares logits with labels in their place; on its input that measures nothing."""
    model = randomise(bart())
    parts = parts_for(model, tmp_path)
    batches = list(parts.report.batches(3))
    total = count = 0.0
    with torch.no_grad():
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            known = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
            total += float(F.cross_entropy(logits.mT, known, reduction="sum"))
            count += int((known != -100).sum())
    assert evaluate(model, batches).metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert "does not shift labels" in " ".join(parts.notes)
    other = parts_for(llama()[0], tmp_path)
    assert "does not shift labels" not in " ".join(other.notes)


@pytest.mark.parametrize("name", ["xlnet", "bert without is_decoder"])
def test_no_perplexity_of_what_the_model_sees(name: str, tmp_path: Path) -> None:
    model = xlnet() if name == "xlnet" else tf.BertLMHeadModel(tf.BertConfig(**tiny()))
    with pytest.raises(hp.HeadPruneError, match="sees the tokens behind each one"):
        parts_for(randomise(model), tmp_path)


def test_texts_of_one_token_are_told() -> None:
    """It was said that the model has no loss of its own."""
    ids = torch.arange(5, 9)[:, None]
    with pytest.raises(hp.HeadPruneError, match="none that is finite on these examples") as caught:
        evaluate(llama()[0], [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}])
    assert "texts of one token" in caught.value.hint
