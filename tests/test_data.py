"""Data: what can be read and what cannot, disjoint parts, columns, labels, every task's examples, and made-up variants of them."""

import copy
import json
import math
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import nn

import headprune as hp
from headprune.app.data import load_also, load_parts, load_train
from headprune.app.data.encoder import Classes
from headprune.app.data.reading import read_splits
from headprune.app.models import TASKS, LoadedModel, load_model, numbers_given
from headprune.app.options import DataOptions
from headprune.inputs import first_rows, scrambled, tensors, variants
from tests.support.causal import bart, gemma3, own_loss, regression, text_config, tiny, xlnet
from tests.support.folders import WORDS, common, sentences, tokenizer, write_jsonl
from tests.support.zoo import llama, randomise, text


def loaded_as(model: nn.Module, task: str = "sequence-classification", coder: Any = None) -> LoadedModel:
    return LoadedModel(model, coder or tokenizer(), TASKS[task], "x", "x")


def parts_of(model: Any, data: Path, **options: Any) -> Any:
    loaded = model if isinstance(model, LoadedModel) else load_model(str(model))
    return load_parts(DataOptions(str(data), **options), loaded)


def three(parts: Any) -> tuple[Any, Any, Any]:
    return parts.score, parts.choose, parts.report


def inputs(part: Any) -> set[tuple[int, ...]]:
    return {tuple(f["input_ids"]) for f in part.features}


@pytest.mark.parametrize("names", ["train", "train test", "train validation", "test", "validation test"])
@pytest.mark.parametrize("limit", [10, 1000])
def test_parts_are_disjoint(names: str, limit: int, bert_folder: Path, tmp_path: Path) -> None:
    for i, name in enumerate(names.split()):
        write_jsonl(tmp_path / f"{name}.jsonl", sentences(50, seed=i))
    parts = parts_of(bert_folder, tmp_path, limit=limit)
    assert all(len(part) > 0 for part in three(parts))
    for a, b in combinations(three(parts), 2):
        assert not inputs(a) & inputs(b)
        assert a.split != b.split or not set(a.rows) & set(b.rows)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_one_file_is_cut_by_seed(suffix: str, bert_folder: Path, tmp_path: Path) -> None:
    import pandas as pd

    path, frame = tmp_path / f"all.{suffix}", pd.DataFrame(sentences(100, seed=0))
    write: dict[str, Any] = {
        "jsonl": lambda: frame.to_json(path, orient="records", lines=True), "parquet": lambda: frame.to_parquet(path),
        "csv": lambda: frame.to_csv(path, index=False), "tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
    }  # fmt: skip
    write[suffix]()
    a, b, c = (parts_of(bert_folder, path, seed=s) for s in (0, 0, 1))
    assert a.report.rows == b.report.rows != c.report.rows
    assert len(a.score) + len(a.choose) + len(a.report) <= 100


def test_batches_hold_every_example_once(bert_folder: Path, data_folder: Path) -> None:
    part = parts_of(bert_folder, data_folder).report
    batches = list(part.batches(7))
    assert sum(len(b["labels"]) for b in batches) == len(part)
    assert len(part.typical(3)["labels"]) == 3
    lengths = [int(n) for b in batches for n in b["attention_mask"].sum(1)]
    assert lengths == sorted(lengths)
    assert all(len(b["labels"]) == 7 for b in batches[:-1])


def test_label_names(bert_folder: Path, tmp_path: Path) -> None:
    names = ("Positive", "negative")
    rows: Any = [{"sentence": row["text"], "sentiment": names[i % 2]} for i, row in enumerate(sentences(16, 0))]
    parts = parts_of(bert_folder, write_jsonl(tmp_path / "x.jsonl", rows))
    assert {f["labels"] for p in three(parts) for f in p.features} == {0, 1}
    assert parts.columns == {"text": "sentence", "label": "sentiment"}


MODELS: dict[str, Any] = {
    "sequence-classification": lambda: tf.BertForSequenceClassification(tf.BertConfig(**common())),
    "token-classification": lambda: tf.BertForTokenClassification(tf.BertConfig(**common(num_labels=3))),
    "question-answering": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**common())),
    "masked-lm": lambda: tf.BertForMaskedLM(tf.BertConfig(**common())),
    "causal-lm": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**common(num_key_value_heads=2))),
    "seq2seq": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=30, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48, decoder_start_token_id=0)
    ),
}
ANSWERS = WORDS[12:18]
ROWS: dict[str, list[dict[str, Any]]] = {
    "token-classification": [
        {"tokens": ["good", "film", w], "ner_tags": [1, 0, i % 3]} for i, w in enumerate(WORDS[:6])
    ],
    "question-answering": [
        {"question": "good film", "context": f"the {w} plot was fun", "answers": {"text": [w], "answer_start": [4]}}
        for w in ANSWERS
    ],
    "masked-lm": sentences(12, seed=0),
    "causal-lm": sentences(12, seed=0),
    "seq2seq": [{"document": f"{w} film is good", "summary": f"{w} good"} for w in WORDS[14:]],
}


def of_task(task: str, coder: Any = None) -> LoadedModel:
    return loaded_as(randomise(MODELS[task]()), task, coder)


def parts_of_rows(loaded: LoadedModel, rows: Any, folder: Path, **options: Any) -> Any:
    return parts_of(loaded, write_jsonl(folder / "x.jsonl", rows), **options)


def left_padding() -> Any:
    coder = tokenizer()
    coder.padding_side = "left"
    return coder


@pytest.mark.parametrize("task", ROWS)
def test_every_text_task_scores_with_the_models_own_loss(task: str, tmp_path: Path) -> None:
    loaded = of_task(task)
    model, parts = loaded.model, parts_of_rows(loaded, ROWS[task], tmp_path)
    (batch,) = list(parts.score.batches(100))
    measurement = hp.evaluate(model, [batch])
    assert "accuracy" in measurement.metrics  # our loss is the model's
    for i, loss in enumerate(measurement.loss):
        assert loss == pytest.approx(own_loss(model, {k: v[i : i + 1] for k, v in batch.items()}), rel=1e-4)
    assert torch.isfinite(hp.score(model, parts.score.batches(2)).flat()).all()


@pytest.mark.parametrize("columns", [None, "question, context"])
def test_answers_are_where_they_should_be(columns: str | None, tmp_path: Path) -> None:
    rows, texts = ROWS["question-answering"], tokenizer()
    parts = parts_of_rows(of_task("question-answering"), rows, tmp_path, text_column=columns)
    features = [f for part in three(parts) for f in part.features]
    answers = {texts.decode(f["input_ids"][f["start_positions"] : f["end_positions"] + 1]) for f in features}
    assert answers == set(ANSWERS)
    # "fun plot was", of which the cut left "fun", was scored and reported as "fun".
    longer = [
        {**row, "answers": {"text": [f"{w} plot was"], "answer_start": [4]}}
        for row, w in zip(rows, ANSWERS, strict=False)
    ]
    parts = parts_of_rows(of_task("question-answering"), [*rows, *longer], tmp_path, text_column=columns, max_length=7)
    left_out = sum(count for part in three(parts) for why, count in part.left_out.items() if "behind the cut" in why)
    assert left_out == len(longer)


@pytest.mark.parametrize("coder", [tokenizer, left_padding])
def test_masks_are_drawn_by_seed_and_row(coder: Any, tmp_path: Path) -> None:
    """And labels lie where the masked tokens do, whatever side is padded."""
    loaded = of_task("masked-lm", coder())
    first, again = (parts_of_rows(loaded, ROWS["masked-lm"], tmp_path).score for _ in range(2))
    assert first.features == again.features
    (batch,) = first.batches(99)
    assert (batch["attention_mask"] == 0).any()
    masked = batch["input_ids"] == 4
    assert masked.any(1).all()
    assert torch.equal(batch["labels"] != -100, masked)


def test_whisper_and_its_sound(tmp_path: Path) -> None:
    config = tf.WhisperConfig(
        vocab_size=30, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=50,
        max_target_positions=32, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
    )  # fmt: skip
    model = randomise(tf.WhisperForConditionalGeneration(config))
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)

    class Processor:
        feature_extractor = extractor
        tokenizer = tokenizer()

    generator = torch.Generator().manual_seed(0)
    sounds = [{"array": torch.randn(800, generator=generator).tolist(), "sampling_rate": 16000} for _ in range(6)]
    rows = [{"audio": sound, "text": f"{word} film"} for sound, word in zip(sounds, WORDS, strict=False)]
    rows[0]["text"] = "film " * 50  # cut at the decoder's positions
    parts = parts_of_rows(loaded_as(model, "speech-seq2seq", Processor()), rows, tmp_path)
    assert max(len(f["labels"]) for part in three(parts) for f in part.features) <= 32
    assert "Texts of more than 32 tokens were cut there (the most that the model takes)" in " ".join(parts.notes)
    scores = hp.score(model, parts.score.batches(2))
    assert [layer.kind for layer in scores.layers] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    assert torch.isfinite(scores.flat()).all()


@pytest.mark.parametrize(("masked", "norm"), [(False, "layer"), (True, "layer"), (True, "group")])
def test_padding_of_sound_that_the_model_sees(masked: bool, norm: str, tmp_path: Path) -> None:
    """For want of a mask, or by its first norm: a note says it, and batches are of similar length."""
    sounds = [{"array": [0.1 * (i % 7)] * (400 + 37 * (i * 11 % 30)), "sampling_rate": 16000} for i in range(30)]
    data = Path(write_jsonl(tmp_path / "d.jsonl", [{"audio": sound, "label": i % 2} for i, sound in enumerate(sounds)]))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    model = tf.Wav2Vec2ForSequenceClassification(tf.Wav2Vec2Config(**sizes, feat_extract_norm=norm))
    coder = tf.Wav2Vec2FeatureExtractor(return_attention_mask=masked)
    parts = parts_of(loaded_as(model, "audio-classification", coder), data, batch_size=4)
    noted = not masked or norm == "group"
    assert any("its answers depend on the batch" in note for note in parts.notes) == noted
    widths = [batch["input_values"].shape[1] for batch in parts.report.batches()]
    assert widths == sorted(widths)
    assert len(set(widths)) > 1


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_the_same_text_in_two_splits_is_used_once(task: str, tmp_path: Path) -> None:
    """Also where other tokens of it are masked."""
    write_jsonl(tmp_path / "train.jsonl", sentences(20, seed=0) * 5)
    write_jsonl(tmp_path / "test.jsonl", sentences(20, seed=0)[:10] + sentences(20, seed=5))
    write_jsonl(tmp_path / "validation.jsonl", sentences(20, seed=6))
    parts = parts_of(of_task(task), tmp_path, limit=80)

    def texts(part: Any) -> set[tuple[int, ...]]:
        pairs = [(f["input_ids"], f["labels"] if task == "masked-lm" else [-100] * 99) for f in part.features]
        return {tuple(t if label == -100 else label for t, label in zip(*pair, strict=False)) for pair in pairs}

    assert not texts(parts.score) & texts(parts.report)
    assert any("repeating an input" in note for note in parts.notes)


def test_left_padding_does_not_reach_language_models(tmp_path: Path) -> None:
    loaded = of_task("causal-lm", left_padding())
    parts = parts_of_rows(loaded, sentences(40, seed=0), tmp_path)
    one, many = (hp.evaluate(loaded.model, parts.report.batches(size)).metrics["perplexity"] for size in (1, 30))
    assert one == pytest.approx(many, rel=1e-4)
    assert loaded.processor.padding_side == "left"  # and it is saved so: batches are generated from
    assert loaded.processor.backend_tokenizer.truncation is None


def test_chats_are_written_out_by_the_chat_template(tmp_path: Path) -> None:
    coder = tokenizer()
    loaded = of_task("causal-lm", coder)
    said = [row["text"] for row in sentences(60, seed=0)]
    roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    chats: Any = [{"messages": roles[i : i + 2]} for i in range(0, 60, 2)]
    with pytest.raises(hp.HeadPruneError, match=r"Row 14 of .*'messages' holds chats, and .* has no chat template"):
        parts_of_rows(loaded, chats, tmp_path)
    coder.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.role[:0] + m.content + ' ' }}{% endfor %}"
    parts = parts_of_rows(loaded, chats, tmp_path)
    assert parts.columns == {"text": "messages"}
    assert sum("chat template" in note for note in parts.notes) == 1
    filled = (coder.apply_chat_template(c["messages"], tokenize=False) for c in chats)
    written = {tuple(coder(chat, add_special_tokens=False)["input_ids"]) for chat in filled}
    assert {tuple(f["input_ids"]) for part in (parts.score, parts.report) for f in part.features} <= written
    assert all(f["labels"] == f["input_ids"] for f in parts.score.features)
    coder.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(hp.HeadPruneError, match="refuses the chat: roles must alternate"):
        parts_of_rows(loaded, chats, tmp_path)


def test_roberta_has_fewer_positions_than_rows(tmp_path: Path) -> None:
    config = tf.RobertaConfig(**common(pad_token_id=1, max_position_embeddings=18))
    model = randomise(tf.RobertaForSequenceClassification(config))
    loaded = loaded_as(model)
    long = " ".join(r["text"] for r in sentences(20, seed=1))
    rows = [{**r, "text": f"{r['text']} {long}"} for r in sentences(30, seed=0)]
    parts = parts_of_rows(loaded, rows, tmp_path)
    assert max(parts.score.lengths()) == 16
    hp.score(model, parts.score.batches(4))
    with pytest.raises(hp.HeadPruneError) as caught:
        hp.score(model, [{**text(2, 17), "labels": torch.tensor([0, 1])}])
    assert "they have 17 tokens, the model has 16 positions" in caught.value.hint


def test_targets_are_padded_on_the_right_whatever_side_inputs_are(tmp_path: Path) -> None:
    """A decoder begins at the left: labels padded there would have it begin with nothing."""
    rows: Any = [{"document": " ".join(WORDS[: i + 1]), "summary": " ".join(WORDS[i:6])} for i in range(6)]
    (batch,) = list(parts_of_rows(of_task("seq2seq", left_padding()), rows, tmp_path).score.batches(9))
    padded, ignored = batch["attention_mask"] == 0, batch["labels"] == -100
    assert padded.any()
    assert ignored.any()
    assert not padded[:, -1].any()
    assert not ignored[:, 0].any()


def test_a_token_that_also_pads_is_still_predicted(tmp_path: Path) -> None:
    """Many language models pad with the end of text; where it is text, it counts."""
    texts = tokenizer()
    texts.pad_token = "[SEP]"  # the last of every text, too
    parts = parts_of_rows(of_task("causal-lm", texts), sentences(40, seed=0), tmp_path)
    (batch,) = list(parts.report.batches(99))
    assert (batch["attention_mask"] == 0).any()
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"] == 1)


@pytest.mark.parametrize("split", ["choose_split", "report_split"])
def test_a_split_that_is_named_for_two_parts_is_cut(split: str, bert_folder: Path, tmp_path: Path) -> None:
    """Naming the only split there is again left nothing to report on."""
    file = write_jsonl(tmp_path / "all.jsonl", sentences(60, seed=4))
    parts, usual = parts_of(bert_folder, file, **{split: "all"}), parts_of(bert_folder, file)
    assert [part.rows for part in three(parts)] == [part.rows for part in three(usual)]


@pytest.mark.parametrize("label", [[0, 1], [0, 2, 1], [1, -1, 0], [1, None, 0], 1])
def test_labels_for_several_classes_at_once(label: Any) -> None:
    """Labels of 2 or -1 were scored as they were: the loss of a class is of no use with them."""
    classes = Classes(tf.BertConfig(num_labels=3))
    with pytest.raises(hp.HeadPruneError, match="takes 3 numbers from 0 to 1"):
        classes.several(label, any_number=False)
    assert classes.several([0, 0.5, 1], any_number=False) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("label", [math.nan, math.inf])
def test_numbers_that_are_none_are_no_labels(label: float) -> None:
    """Of such a row, only its place in the sorted batches was named, and only by a command that came to its loss."""
    with pytest.raises(hp.HeadPruneError, match=f"label {label} does not fit"):
        Classes(tf.BertConfig(num_labels=1)).number(label)
    with pytest.raises(hp.HeadPruneError, match="takes 2 numbers"):
        Classes(tf.BertConfig(num_labels=2)).several([0.5, label], any_number=True)


def labels_of(loaded: LoadedModel, data: Path) -> tuple[list[Any], list[str]]:
    """The labels of every part's examples in their rows' order, as the model gets them; and the notes."""
    parts = parts_of(loaded, data)
    labels: dict[Any, Any] = {}
    for part in three(parts):
        labels |= {(part.split, row): f["labels"] for row, f in zip(part.rows, part.features, strict=True)}
    return [labels[at] for at in sorted(labels)], parts.notes


def text_classifier(**config: Any) -> LoadedModel:
    return loaded_as(tf.BertForSequenceClassification(tf.BertConfig(**common(**config))))


def stored(path: Path, names: Any, labels: Sequence[Any], *, several: bool = False) -> Path:
    """A dataset whose column of labels says what its numbers mean."""
    import datasets

    kind = datasets.ClassLabel(names=names)
    kinds = {"text": datasets.Value("string"), "label": datasets.List(kind) if several else kind}
    made = {"text": [f"{a} film {b}" for a, b in permutations(WORDS, 2)][: len(labels)], "label": labels}
    datasets.Dataset.from_dict(made, features=datasets.Features(kinds)).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(("model", "data", "expected"), [
    (["neg", "pos"], ["pos", "neg"], [1, 0]),
    (["NEGATIVE", "POSITIVE"], ["positive", "negative"], [1, 0]),
    (["a", "A"], ["A", "a"], [1, 0]),  # upper and lower case tell them apart
    (["x", "cat", "y", "dog"], ["cat", "dog"], [1, 3]),  # some of the model's classes
    (["2", "1"], ["1", "2"], [1, 0]),
    (["LABEL_0", "LABEL_1"], ["pos", "neg"], [0, 1]),  # the model has no names
    (["negative", "positive"], ["bad", "good"], [0, 1]),  # by their order, and it is said
    (["1", "2"], None, [0, 1]),  # numbers that the model names, as its training found them in the data
    (["-1", "0", "1", "2"], None, [2, 3]),  # were taken for the classes 1 and 2: 0 and 1
    (["0.0", "1.0", "2.0"], None, [1, 2]),
    (["1.0", "2.0", "3.0"], None, [0, 1]),
])  # fmt: skip
def test_classes_go_by_name(model: list[str], data: list[str] | None, expected: list[int], tmp_path: Path) -> None:
    """Numbers of a ClassLabel column were taken as the model's, whatever either of them calls its classes."""
    drawn = [0, 1, 1] * 8
    rows = [{**row, "label": label + 1} for row, label in zip(sentences(24, seed=0), drawn, strict=True)]
    path = stored(tmp_path / "d", data, drawn) if data else write_jsonl(tmp_path / "d.jsonl", rows)
    labels, notes = labels_of(text_classifier(id2label=dict(enumerate(model))), path)
    assert labels == [expected[i] for i in drawn]
    assert notes[0].startswith("There is no other split to report on: d")
    order = "Classes were matched by their order: the model (negative, positive) does not name the data's bad, good."
    assert notes[1:] == ([order] if data == ["bad", "good"] else [])


@pytest.mark.parametrize("column", ["label", "stars"])
def test_minus_one_may_be_a_class(column: str, tmp_path: Path) -> None:
    """A split whose first 50 labels were -1 was taken for one without labels, even where another column was named."""
    rows = [
        {"text": row["text"], "label": -1 if i < 60 or column == "stars" else 1, "stars": i % 2 * 2 - 1}
        for i, row in enumerate(sentences(90, seed=0))
    ]
    loaded = text_classifier(id2label={0: "-1", 1: "1"})
    parts = parts_of(
        loaded, Path(write_jsonl(tmp_path / "d.jsonl", rows)), label_column=None if column == "label" else column
    )
    for part in three(parts):
        assert [f["labels"] for f in part.features] == [(rows[row][column] + 1) // 2 for row in part.rows]


@pytest.mark.parametrize(("model", "data", "label"), [
    (["neg", "pos"], ["pos", "neg", "mixed"], "mixed"),  # by order it would be no class, or another
    (["cat", "dog", "bird"], ["dog", "cat", "horse"], "horse"),
    (["cat", "dog", "bird"], ["hat", "coat"], "hat"),
    (["A", "b"], ["a", "A"], "a"),
])  # fmt: skip
def test_other_classes_are_refused(model: list[str], data: list[str], label: str, tmp_path: Path) -> None:
    loaded = text_classifier(id2label=dict(enumerate(model)))
    with pytest.raises(hp.HeadPruneError, match=f"label '{label}' does not fit the model's head"):
        labels_of(loaded, stored(tmp_path / "d", data, [data.index(label)] * 9))


def test_several_named_classes_at_once(tmp_path: Path) -> None:
    """A list of classes was taken for a number for every class, where it was as long."""
    loaded = text_classifier(id2label={0: "joy", 1: "anger", 2: "fear"}, problem_type="multi_label_classification")
    data = stored(tmp_path / "d", ["anger", "fear", "joy"], [[0, 1, 0], [2], []] * 6, several=True)
    labels, _ = labels_of(loaded, data)
    assert labels == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]] * 6


def test_tags_of_words_go_by_name(tmp_path: Path) -> None:
    """The tags of CoNLL 2003 and of the usual models of it have different orders."""
    import datasets

    config = tf.BertConfig(**common(id2label={0: "O", 1: "B-MISC", 2: "B-PER"}))
    loaded = loaded_as(tf.BertForTokenClassification(config), "token-classification")
    words, tags = datasets.Value("string"), datasets.ClassLabel(names=["O", "B-PER", "B-MISC"])
    features = datasets.Features({"tokens": datasets.List(words), "ner_tags": datasets.List(tags)})
    rows = {"tokens": [[*pair] for pair in permutations(WORDS, 2)][:20], "ner_tags": [[1, 2], [2, 0]] * 10}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "d"))
    labels, _ = labels_of(loaded, tmp_path / "d")
    assert [row[1:3] for row in labels] == [[2, 1], [1, 0]] * 10


def test_splits_may_order_their_classes_differently(tmp_path: Path) -> None:
    import datasets

    names = {"train": ["pos", "neg"], "test": ["neg", "pos"]}
    paths = {split: str(stored(tmp_path / split, named, [0, 1] * 6)) for split, named in names.items()}
    splits = {split: datasets.load_from_disk(path) for split, path in paths.items()}
    splits["test"] = splits["test"].map(lambda row: {"text": f"very {row['text']}"})
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "d"))
    parts = parts_of(text_classifier(id2label={0: "neg", 1: "pos"}), tmp_path / "d")
    for part, numbers in ((parts.score, [1, 0]), (parts.report, [0, 1])):
        assert [f["labels"] for f in part.features] == [numbers[row % 2] for row in part.rows]


def test_folders_of_images_go_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    for n, name in enumerate(("cat", "dog")):
        for i in range(6):
            folder = tmp_path / "images" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (200 * n, i, 0)).save(folder / f"{i}.png")
    config = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        id2label={0: "dog", 1: "cat"},
    )  # fmt: skip
    processor = tf.ViTImageProcessor(size={"height": 8, "width": 8}, do_normalize=False)
    loaded = loaded_as(tf.ViTForImageClassification(config), "image-classification", processor)
    parts = parts_of(loaded, tmp_path / "images")
    features = [f for part in three(parts) for f in part.features]
    assert [f["labels"] for f in features] == [int(f["pixel_values"][0].max() <= 0.5) for f in features]
    shutil.copytree(tmp_path / "images", tmp_path / "train")
    monkeypatch.chdir(tmp_path)
    (also,) = load_also(DataOptions("images", also=("train",)), loaded, parts).also
    assert isinstance(also.features, list)  # encoded once: a name makes no second dataset one to train on


def test_images_of_several_shapes_are_refused_in_words(tmp_path: Path) -> None:
    """Of a processor that keeps proportions; the error was unexpected, and torch's."""
    from PIL import Image

    for i in range(10):
        folder = tmp_path / "images" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + i, 8), (10 * i, i, 0)).save(folder / f"{i}.png")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model = tf.Dinov2ForImageClassification(tf.Dinov2Config(**sizes, id2label={0: "cat", 1: "dog"}))
    processor = tf.BitImageProcessor(size={"shortest_edge": 8}, do_center_crop=False)
    parts = parts_of(loaded_as(model, "image-classification", processor), tmp_path / "images", batch_size=2)
    with pytest.raises(hp.HeadPruneError, match=r"pixel_values of several shapes, \[3, 8, \d+\] and \[3, 8, \d+\]"):
        list(parts.report.batches())
    assert len(list(parts.report.batches(1))) == len(parts.report)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "Siglip2", "ViT of one channel"])
def test_images_for_configs_of_several_parts_and_of_one_channel(kind: str, tmp_path: Path) -> None:
    """CLIP's and SigLIP's classifiers have num_channels in vision_config; an image of a wrong mode was no image for a model of one channel."""
    from PIL import Image

    for i, mode in enumerate(("RGB", "L", "RGBA", "P", "1", "LA") * 3):
        folder = tmp_path / "images" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + i, 8), (10 * i, i, 0)).convert(mode).save(folder / f"{i}.png")
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "patch_size": 4,
    }
    whole, square, names = {**vision, "image_size": 8}, {"height": 8, "width": 8}, {0: "dog", 1: "cat"}
    if kind == "Siglip2":
        config = tf.Siglip2Config(
            vision_config={**vision, "num_patches": 4}, text_config={"num_hidden_layers": 1}, id2label=names
        )
        model, processor = (
            tf.Siglip2ForImageClassification(config),
            tf.Siglip2ImageProcessor(patch_size=4, max_num_patches=4),
        )
    elif kind == "Siglip":
        model = tf.SiglipForImageClassification(tf.SiglipConfig(vision_config=whole, id2label=names))
        processor = tf.SiglipImageProcessor(size=square)
    elif kind == "CLIP":
        model = tf.CLIPForImageClassification(tf.CLIPConfig(vision_config=whole, id2label=names))
        processor = tf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=square)
    else:
        model = tf.ViTForImageClassification(tf.ViTConfig(**whole, num_channels=1, id2label=names))
        processor = tf.ViTImageProcessor(size=square, image_mean=[0.5], image_std=[0.5])
    parts = parts_of(loaded_as(randomise(model), "image-classification", processor), tmp_path / "images", batch_size=2)
    batches = list(parts.report.batches())
    with torch.no_grad():
        losses = [float(model(**batch).loss) * len(batch["labels"]) for batch in batches]
    assert hp.evaluate(model, batches).metrics["loss"] == pytest.approx(sum(losses) / len(parts.report), rel=1e-5)


# -- to train on ------------------------------------------------------------------------------


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
        used = {(part.split, row) for part in (parts.choose, parts.report) for row in part.rows}
        assert not used & {(train.split, row) for row in train.rows}
        assert set(parts.score.rows) & set(train.rows)
        assert len(set(train.rows)) == len(train) > 20
        assert notes[1].startswith("Rows left out")
        scored = int(re.search(r"of which (\d+) also scored", notes[0])[1])
        assert scored == len(set(train.rows) & set(parts.score.rows))
        fewer, _ = load_train(options, loaded, parts, 9)
        assert fewer.rows == train.rows[:9]
        assert fewer.content_hash != train.content_hash


def test_nothing_left_to_train_on(bert_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(bert_folder))
    rows = sentences(20, 5)
    write_jsonl(tmp_path / "train.jsonl", [*rows[:5], {"text": "a film", "label": 0}])
    for split in ("validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    options = DataOptions(str(tmp_path), limit=8)
    parts = load_parts(options, loaded)
    parts = replace(parts, choose=replace(parts.choose, inputs=(*parts.choose.inputs, *parts.score.inputs)))
    with pytest.raises(hp.HeadPruneError, match="left to train on"):
        load_train(options, loaded, parts)


# -- what a model's own loss compares --------------------------------------------------------------


def parts_for(model: nn.Module, folder: Path) -> Any:
    return parts_of_rows(loaded_as(model, "causal-lm"), sentences(12, seed=0), folder)


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
    assert hp.evaluate(model, batches).metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert "does not shift labels" in " ".join(parts.notes)
    assert "does not shift labels" not in " ".join(parts_for(llama()[0], tmp_path).notes)


@pytest.mark.parametrize("name", ["xlnet", "bert without is_decoder"])
def test_no_perplexity_of_what_the_model_sees(name: str, tmp_path: Path) -> None:
    model = xlnet() if name == "xlnet" else tf.BertLMHeadModel(tf.BertConfig(**tiny()))
    with pytest.raises(hp.HeadPruneError, match="sees the tokens behind each one"):
        parts_for(randomise(model), tmp_path)


def test_who_gives_numbers() -> None:
    def given(model: nn.Module, task: str = "sequence-classification") -> str | None:
        return numbers_given(loaded_as(model, task))

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
    assert hp.evaluate(loaded.model, [batch]).metrics["loss"] == pytest.approx(own_loss(model, batch), abs=1e-5)


def test_a_classifier_of_several_parts_gets_a_token_to_pad_with(tmp_path: Path) -> None:
    config = tf.Gemma3TextConfig(**{**text_config(num_labels=2), "pad_token_id": None})
    config.pad_token_id = None
    randomise(tf.Gemma3TextForSequenceClassification(config)).save_pretrained(tmp_path / "gemma")
    tokenizer().save_pretrained(tmp_path / "gemma")
    loaded = load_model(str(tmp_path / "gemma"))
    assert loaded.config.pad_token_id == 0
    assert F.softmax(loaded.model(input_ids=torch.randint(3, 28, (2, 6))).logits, -1).shape == (2, 2)


def test_texts_that_end_in_the_only_usual_padding_are_read_to_their_end(tmp_path: Path) -> None:
    config = tf.GPT2Config(vocab_size=len(tokenizer()), n_embd=16, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1)
    randomise(tf.GPT2ForSequenceClassification(config)).save_pretrained(tmp_path / "gpt")
    texts = tokenizer()
    texts.pad_token, texts.eos_token = None, "[SEP]"  # the last of every text
    texts.save_pretrained(tmp_path / "gpt")
    loaded = load_model(str(tmp_path / "gpt"))
    alone = tf.GPT2ForSequenceClassification.from_pretrained(tmp_path / "gpt").eval()
    batch = loaded.processor("the film", return_tensors="pt")
    batch.pop("token_type_ids", None)
    assert torch.equal(loaded.model(**batch).logits, alone(**batch).logits)


def test_padding_is_the_models_where_the_tokenizer_has_another(tmp_path: Path) -> None:
    """A decoder classifies by the last token that is not its config's padding."""
    config = tf.GPT2Config(
        vocab_size=len(tokenizer()),
        n_embd=16,
        n_layer=1,
        n_head=2,
        pad_token_id=1,
        eos_token_id=1,
        bos_token_id=1,
        num_labels=2,
    )
    randomise(tf.GPT2ForSequenceClassification(config)).save_pretrained(tmp_path / "gpt")
    tokenizer().save_pretrained(tmp_path / "gpt")  # it pads with 0
    rows = [{"text": "a", "label": 0}, {"text": "a a a a", "label": 1}] * 8
    rows = [{**row, "text": " ".join([row["text"], *"abcdefgh"[:i]])} for i, row in enumerate(rows)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    loaded = load_model(str(tmp_path / "gpt"))
    report = load_parts(DataOptions(str(tmp_path / "data.jsonl"), limit=2), loaded).report
    together, alone = (hp.evaluate(loaded.model, report.batches(size)).metrics["loss"] for size in (8, 1))
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("kind", "task", "side", "moved"), [
    ("gpt2", "sequence-classification", "left", True), ("bert", "sequence-classification", "left", True),
    ("bert", "token-classification", "left", True), ("bert", "masked-lm", "left", True),
    ("llama", "sequence-classification", "left", False), ("xlnet", "sequence-classification", "left", False),
    ("xlnet", "sequence-classification", "right", True), ("gpt2", "sequence-classification", "right", False),
])  # fmt: skip
def test_figures_do_not_depend_on_the_batch(kind: str, task: str, side: str, moved: bool, tmp_path: Path) -> None:
    """A GPT's accuracy was 89 % one by one and 70 % by 32, where the tokenizer padded on the left and positions were counted from there."""
    auto = {
        "sequence-classification": "SequenceClassification",
        "token-classification": "TokenClassification",
        "masked-lm": "MaskedLM",
    }
    few = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    own: dict[str, Any] = {
        "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16}, "xlnet": {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 24},
    }  # fmt: skip
    config = tf.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer()), pad_token_id=0, num_labels=2, **own.get(kind, few)
    )
    model = randomise(getattr(tf, f"AutoModelFor{auto[task]}").from_config(config))
    coder = tokenizer()
    coder.padding_side = side
    draw = random.Random(0)
    texts = [draw.choices(WORDS, k=1 + i % 8) for i in range(64)]
    rows: Any = [{"text": " ".join(words), "label": i % 2} for i, words in enumerate(texts)]
    if task == "token-classification":
        rows = [{"tokens": words, "tags": [len(word) % 2 for word in words]} for words in texts]
    parts = parts_of_rows(loaded_as(model, task, coder), rows, tmp_path)
    together, alone = (hp.evaluate(model, parts.score.batches(size)).metrics["loss"] for size in (64, 1))
    assert together == pytest.approx(alone, rel=1e-5)
    assert any("Texts are padded on the" in note for note in parts.notes) == moved
    assert coder.padding_side == side  # what is saved pads as before


def test_a_decoder_is_one_whatever_the_shortest_texts_are(tmp_path: Path) -> None:
    """Of a single token it cannot be told: a GPT was called an encoder, and a budget for its cache was refused."""
    config = tf.GPT2Config(vocab_size=len(tokenizer()), n_layer=1, n_head=2, n_embd=16, pad_token_id=0, num_labels=2)
    coder = tokenizer()
    coder.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
    draw = random.Random(0)
    rows: Any = [{"text": " ".join(draw.choices(WORDS, k=1 + i % 8)), "label": i % 2} for i in range(99)]
    model = randomise(tf.GPT2ForSequenceClassification(config))
    parts = parts_of_rows(loaded_as(model, coder=coder), rows, tmp_path)
    assert 1 in parts.score.lengths()
    (layer,) = hp.find_attention(model, parts.score.short(2))
    assert layer.kind == "decoder"


def test_what_depends_on_the_batch_says_so(tmp_path: Path) -> None:
    class NoMask(tf.BertForSequenceClassification):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels, **more)

    config = tf.BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    rows = sentences(40, seed=0)
    parts = parts_of_rows(loaded_as(randomise(NoMask(config)), "sequence-classification", tokenizer()), rows, tmp_path)
    assert any("depend on --batch-size" in note for note in parts.notes)


def test_texts_are_cut_at_the_positions_of_the_text_part(tmp_path: Path) -> None:
    model = randomise(gemma3())
    model.config.text_config.max_position_embeddings = 5
    rows: Any = [{"text": f"{w} good film was a the plot is fun"} for w in ANSWERS]
    parts = parts_of_rows(loaded_as(model, "causal-lm"), rows, tmp_path)
    assert {b["input_ids"].shape[1] for b in parts.score.batches(4)} == {5}


def test_nothing_is_trained_on_second_data(here: Path, bert_folder: Path, data_folder: Path) -> None:
    rows = [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    options = DataOptions(str(data_folder), limit=20, also=(str(write_jsonl(here / "some.jsonl", rows)),))
    loaded = load_model(str(bert_folder))
    parts = load_parts(options, loaded)
    beside = load_also(options, loaded, parts)
    (also,) = beside.also
    assert not set(also.inputs) & {*parts.score.inputs, *parts.choose.inputs}
    before, now = (load_train(options, loaded, p)[0] for p in (parts, beside))
    assert len(before) > len(now)
    assert set(map(repr, now.features)).isdisjoint(map(repr, also.features))


# -- what can be read ------------------------------------------------------------------------------------

LINES = [json.dumps(row) for row in sentences(60, 0)]
TABLE = ["text,label", *(f"text {i},1" for i in range(60))]


def with_line(lines: list[str], number: int, text: str) -> bytes:
    """The lines, of which one (from 1) is another."""
    return "".join(f"{line}\n" for line in [*lines[: number - 1], text, *lines[number:]]).encode()


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "cut": ("x.jsonl", with_line(LINES, 44, '{"text": "good", "label": '), "line 44: Expecting value: column 27"),
    "comma": ("x.jsonl", with_line(LINES, 44, '{"text": "a" "label": 1}'), "line 44: .*delimiter: column 14"),
    "after a blank line": ("x.jsonl", b"\n" + with_line(LINES, 44, "{"), "line 45: Expecting property name"),
    "a list": ("x.jsonl", with_line(LINES, 44, "[1, 2]"), "line 44: it is no JSON object"),
    "json with lines": ("x.json", with_line(LINES, 44, "{"), "JSON parse error: .* in row 43"),
    "json": ("x.json", b'[\n{"text": "a", "label": 1},\n{"text" "b"}\n]', "No ':' found .* at position 37"),
    "fields": ("x.csv", with_line(TABLE, 44, "good, but long,1"), "Expected 2 fields in line 44, saw 3"),
    "tabs": ("x.tsv", with_line([t.replace(",", "\t") for t in TABLE], 44, "a\tb\t1"), "2 fields in line 44, saw 3"),
    "quote": ("x.csv", with_line(TABLE, 44, '"good,1'), "EOF inside string starting at row 43"),
    "latin": ("x.csv", with_line(TABLE, 44, "schön,1").decode().encode("latin-1"), "line 44: .*in position 3"),
    "parquet": ("x.parquet", b"PAR1, but no more", "Parquet magic bytes not found"),
    "null": ("x.jsonl", with_line(LINES, 44, "null"), "line 44: it holds null"),  # pyarrow would crash
    "deep": ("x.jsonl", with_line(LINES, 44, "[" * 50_000 + "]" * 50_000), "line 44: .*more than 1,000 deep"),  # likewise
    "deep in lines": ("x.json", b'[{"text": 1, "label":\n' + b"[\n" * 2000 + b"]\n" * 2000 + b"}]", "line 1,00.: .* deep"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_the_broken_line_is_named(case: str, in_folder: bool, tmp_path: Path) -> None:
    name, content, message = BROKEN[case]
    data = tmp_path / "data"
    data.mkdir()
    if in_folder:
        name = f"train.{name.partition('.')[2]}"
        write_jsonl(data / "notes" / "fine.jsonl", sentences(3, 0))  # is not what is wrong
    (data / name).write_bytes(content)
    with pytest.raises(hp.HeadPruneError, match=message) as error:
        read_splits(str(data if in_folder else data / name))
    assert str(error.value).startswith(f"{data / name} cannot be read as a dataset: ")
    assert error.value.hint
    assert "\n" not in str(error.value)


def test_files_that_do_not_go_together_are_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i, row in enumerate(({"text": "a"}, {"more": "b", "than": "that"})):
        write_jsonl(tmp_path / "a" / f"train-{i}.jsonl", [row] * 3)
    with pytest.raises(hp.HeadPruneError, match=r"a cannot be read as a dataset: .*\. Check the files in it"):
        read_splits(str(tmp_path / "a"))


@pytest.mark.parametrize(("name", "text"), [
    ("x.jsonl", '\n{"text": "a\\nb"}\r\n\n{"text": "c"}'),
    ("x.json", '[\n {"text": "a"}\n]'),
    ("x.json", '{"text": "a"}\n{"text": "b"}\n'),
    ("x.csv", 'text,label\n"two\nlines, and a ""word""",1\n\nshort\n'),
    ("x.csv", "text\n0,a\n1,b\n"),  # row numbers without a name
    ("x.csv", "text,label\n" + "a" * 200_000 + ",1\n"),
    ("x.tsv", "text\tlabel\na, b\t1\n"),
    ("x.txt", "{\n"),
    ("x.jsonl", json.dumps({"text": "{[" * 2000}) + "\n"),  # brackets in texts
    ("x.jsonl", json.dumps({"text": "a", "more": [[1]] * 2000}) + "\n"),
    ("x.json", '[{"text":\nnull\n}, {"text": "a"}]'),
])  # fmt: skip
def test_what_can_be_read_is_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert len(read_splits(str(tmp_path / name))["all"]) > 0
    (tmp_path / "z.parquet").write_text("PAR1")
    with pytest.raises(hp.HeadPruneError) as error:
        read_splits(str(tmp_path))
    assert str(tmp_path / name) not in str(error.value)  # another file is broken


@pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
def test_words_for_nothing_are_texts(name: str, tmp_path: Path) -> None:
    """The reader of tables took "None", "null" and "NA" for missing, and the run was refused; an empty field is missing."""
    words = ["None", "null", "NA", "N/A", "n/a", "NULL"]
    rows = [("text", "label", "number"), *((word, word, "1.5") for word in words), ("good", "", "NaN")]
    (tmp_path / name).write_text("".join(("\t" if name.endswith("tsv") else ",").join(row) + "\n" for row in rows))
    for beside in ("README.md", ".gitattributes"):
        (tmp_path / beside).touch()
    for place, split in ((tmp_path / name, "all"), (tmp_path, "train")):
        read = read_splits(str(place))[split][:]
        assert read["text"] == [*words, "good"]
        assert read["label"] == [*words, None]
        assert read["number"][:6] == [1.5] * 6
    from PIL import Image

    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (4, 4)).save(images / "0.png")
    (images / "metadata.csv").write_text("file_name,label\n0.png,1\n")  # a table that is read by the reader of images
    assert read_splits(str(images))["train"]["label"][:] == [1]


def test_rows_are_named_by_the_split(bert_folder: Path, tmp_path: Path) -> None:
    rows: Any = [{"text": "good film", "label": 7 if i == 3 else 1} for i in range(8)]
    write_jsonl(tmp_path / "train.jsonl", sentences(40, 0))
    write_jsonl(tmp_path / "test.jsonl", rows)
    with pytest.raises(hp.HeadPruneError, match=r"^Row 3 of split 'test' \(the first is row 0\): label 7 does not"):
        parts_of(bert_folder, tmp_path)


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    """`datasets` takes names of files for patterns: data[1].jsonl was "no rows", and a*.jsonl could be another file."""
    for name in ("data[1].jsonl", "a*.jsonl", "b?.csv", "[x]/train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "good"}\n' if path.suffix == ".jsonl" else "text\ngood\n")
        (tmp_path / name.replace("*", "b").replace("?", "c")).with_suffix(path.suffix).touch()
        assert read_splits(str(path))["all"]["text"][:] == ["good"]
    with pytest.raises(hp.HeadPruneError, match=r"\*, \? and \[ are taken for patterns"):
        read_splits(str(tmp_path / "[x]"))
    lines = tmp_path / "a\nb"
    lines.mkdir()
    (lines / "train.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(hp.HeadPruneError, match="a name must be one line"):  # it was "no rows", too
        read_splits(str(lines))
    assert read_splits(str(lines / "train.jsonl"))["all"]["text"][:] == ["good"]


# -- examples that are varied for the proof ---------------------------------------------------------------


@st.composite
def examples(draw: st.DrawFn) -> Any:
    """Ids with a mask, ids alone, features in a tuple with a mask, or a bare tensor."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    features = torch.randn(rows, length, 4)
    ids = {**text(rows, length), "labels": torch.zeros(rows, length, dtype=torch.long)}
    padding = torch.zeros(rows, length, dtype=torch.bool)
    return draw(st.sampled_from([ids, {"input_ids": ids["input_ids"]}, (features, padding), (features,), features]))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@given(examples())
def test_variants_differ_in_shape_or_padding(example: Any) -> None:
    before = copy.deepcopy(example)
    for made in variants(example):
        assert type(made) is type(example)
        shapes = [t.shape for t in tensors(made)] != [t.shape for t in tensors(example)]
        assert shapes or not same(made, example)
    assert same(example, before)


def test_a_mask_longer_than_the_ids_stays_as_it_was() -> None:
    example = {"input_ids": torch.full((2, 6), 7), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    shorter = variants(example)[0]
    assert isinstance(shorter, dict)
    assert not shorter["attention_mask"][0, -1]
    assert bool((example["attention_mask"] == 1).all())


@given(examples())
def test_scrambled_has_other_content_in_the_same_places(example: Any) -> None:
    before = copy.deepcopy(example)
    for made in scrambled(example, 90):
        assert [(t.shape, t.dtype) for t in tensors(made)] == [(t.shape, t.dtype) for t in tensors(example)]
        if isinstance(example, dict):
            assert torch.equal(made["input_ids"] < 5, example["input_ids"] < 5)  # padding and ends stay where they are
            assert int(made["input_ids"].max()) < 90
    assert same(example, before)


def test_first_rows_of_what_is_nested() -> None:
    example = {"x": torch.arange(12).view(4, 3), "pair": (torch.arange(4), [torch.ones(4, 2)])}
    made = first_rows({**example, "scale": torch.tensor(2.0), "flag": True}, 2)
    assert torch.equal(made["x"], example["x"][:2])
    assert (len(made["pair"][0]), made["pair"][1][0].shape) == (2, (2, 2))
    assert (made["scale"], made["flag"]) == (2.0, True)
