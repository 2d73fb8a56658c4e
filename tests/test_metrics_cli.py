"""Every task's metrics by the command line, against a plain loop over the whole set and the libraries' own functions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import sacrebleu
import torch
import transformers as tf
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from seqeval.metrics import f1_score as entity_f1
from sklearn import metrics as sk

import headprune as hp
from headprune.app.models import task_of
from tests.support.brute import squad
from tests.support.commands import metrics_of, run, stderr_of
from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.stays import edit
from tests.support.zoo import randomise

pytestmark = pytest.mark.slow
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
COUNTED = {"train": 12, "validation": 6, "test": 24}
rng = np.random.default_rng(0)
Rows = list[dict[str, Any]]
Figures = dict[str, float]


def bert(head: str, **more: Any) -> Any:
    return randomise(getattr(tf, f"BertFor{head}")(tf.BertConfig(**common(**more))))


def outputs(model: Any, rows: Rows, *columns: str) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """Each row with its tokens, and the model's output for it alone."""
    for row in rows:
        split = isinstance(row[columns[0]], list)
        coded = tokenizer()(
            *(row[c] for c in columns), return_tensors="pt", is_split_into_words=split, return_offsets_mapping=True
        )
        offsets = coded.pop("offset_mapping")[0]
        with torch.no_grad():
            yield row, (coded, offsets), model(**coded)


def classes() -> tuple[Any, Rows]:
    return bert("SequenceClassification"), sentences(80, 0)


def of_classes(model: Any, rows: Rows) -> Figures:
    labels, logits = zip(*((row["label"], out.logits[0]) for row, _, out in outputs(model, rows, "text")), strict=True)
    chosen, share = [int(x.argmax()) for x in logits], [float(x.double().softmax(0)[1]) for x in logits]
    return {
        "matthews_corrcoef": sk.matthews_corrcoef(labels, chosen),
        "f1": sk.f1_score(labels, chosen),
        "roc_auc": sk.roc_auc_score(labels, share),
    }


def ratings() -> tuple[Any, Rows]:
    return bert("SequenceClassification", num_labels=1), [
        {**r, "label": len(str(r["text"])) / 7} for r in sentences(80, 1)
    ]


def of_ratings(model: Any, rows: Rows) -> Figures:
    x, y = zip(*((float(out.logits), row["label"]) for row, _, out in outputs(model, rows, "text")), strict=True)
    return {"spearman": stats.spearmanr(x, y).statistic, "neg_mean_absolute_error": -sk.mean_absolute_error(y, x)}


def entities() -> tuple[Any, Rows]:
    model = bert("TokenClassification", id2label=dict(enumerate(TAGS)), label2id={t: i for i, t in enumerate(TAGS)})
    words = [str(row["text"]).split() for row in sentences(80, 2)]
    return model, [{"tokens": w, "ner_tags": rng.integers(0, 5, len(w)).tolist()} for w in words]


def of_entities(model: Any, rows: Rows) -> Figures:
    found = [out.logits[0, 1:-1].argmax(1).tolist() for _, _, out in outputs(model, rows, "tokens")]
    names = [[[TAGS[i] for i in tags] for tags in side] for side in ([r["ner_tags"] for r in rows], found)]
    flat = [[i for tags in side for i in tags] for side in ([r["ner_tags"] for r in rows], found)]
    return {"seqeval": entity_f1(*names), "f1_weighted": sk.f1_score(*flat, average="weighted")}


def questions() -> tuple[Any, Rows]:
    rows = []
    for words in (str(row["text"]).split() for row in sentences(80, 3)):
        start = int(rng.integers(len(words)))
        answer, place = " ".join(words[start : start + 2]), len(" ".join([*words[:start], ""]))
        rows.append(
            {
                "question": "good film",
                "context": " ".join(words),
                "answers": {"text": [answer], "answer_start": [place]},
            }
        )
    return bert("QuestionAnswering"), rows


def of_questions(model: Any, rows: Rows) -> Figures:
    each = []
    for row, (coded, offsets), out in outputs(model, rows, "question", "context"):
        inside = [i for i, owner in enumerate(coded.sequence_ids()) if owner == 1]
        start, end = out.start_logits[0].double(), out.end_logits[0].double()
        best = max(
            ((i, j) for i in inside for j in inside if i <= j < i + 30), key=lambda p: float(start[p[0]] + end[p[1]])
        )
        text = row["context"][offsets[best[0]][0] : offsets[best[1]][1]]
        each.append(squad(text, row["answers"]["text"][0]))
    exact, f1 = np.mean(each, axis=0)
    return {"exact_match": exact, "squad_f1": f1}


def summaries() -> tuple[Any, Rows]:
    config = tf.T5Config(
        vocab_size=30, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48, decoder_start_token_id=0, eos_token_id=3
    )
    rows: Rows = [{"document": r["text"], "summary": " ".join(str(r["text"]).split()[:3])} for r in sentences(80, 4)]
    return randomise(tf.T5ForConditionalGeneration(config)), rows


def of_summaries(model: Any, rows: Rows) -> Figures:
    coder, written = tokenizer(), []
    for row in rows:
        coded = coder(row["document"], return_tensors="pt")
        tokens = model.generate(coded.input_ids, num_beams=2, max_new_tokens=6, do_sample=False)
        written.append(coder.decode(tokens[0], skip_special_tokens=True))
    right, rouge = [row["summary"] for row in rows], RougeScorer(["rougeL"])
    return {
        "bleu": sacrebleu.corpus_bleu(written, [right]).score, "chrf": sacrebleu.corpus_chrf(written, [right]).score,
        "rouge_l": np.mean([rouge.score(r, t)["rougeL"].fmeasure for r, t in zip(right, written, strict=True)]),
        "wer": jiwer.wer(right, written), "cer": jiwer.cer(right, written),
    }  # fmt: skip


EXTRACTOR = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)


def speech() -> tuple[Any, Rows]:
    config = tf.WhisperConfig(
        vocab_size=30, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=50, max_target_positions=32, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = randomise(tf.WhisperForConditionalGeneration(config))
    model.generation_config = tf.GenerationConfig(
        max_length=9, decoder_start_token_id=2, eos_token_id=3, pad_token_id=0
    )
    texts = [str(row["text"]) for row in sentences(50, 6)]
    return model, [
        {"audio": {"array": rng.normal(size=800).tolist(), "sampling_rate": 16000}, "text": t} for t in texts
    ]


def of_speech(model: Any, rows: Rows) -> Figures:
    coder, heard = tokenizer(), []
    for row in rows:
        features = EXTRACTOR(np.float32(row["audio"]["array"]), sampling_rate=16000, return_tensors="pt").input_features
        heard.append(coder.decode(model.generate(features)[0], skip_special_tokens=True))
    right = [row["text"] for row in rows]
    return {"wer": jiwer.wer(right, heard), "cer": jiwer.cer(right, heard)}


CASES: dict[str, Any] = {
    "classes": (classes, of_classes), "ratings": (ratings, of_ratings), "entities": (entities, of_entities),
    "questions": (questions, of_questions), "summaries": (summaries, of_summaries), "speech": (speech, of_speech),
}  # fmt: skip


def written(folder: Path, name: str) -> tuple[Any, Rows]:
    """A model's folder ``m``, and data ``d`` in three splits; the model, and the rows of ``test``."""
    model, rows = CASES[name][0]()
    model.save_pretrained(folder / "m")
    tokenizer().save_pretrained(folder / "m")
    if name == "speech":
        EXTRACTOR.save_pretrained(folder / "m")
    unique = list({str(row): row for row in rows}.values())
    for split, count in COUNTED.items():
        part, unique = unique[:count], unique[count:]
        write_jsonl(folder / "d" / f"{split}.jsonl", part)
    return model.eval(), part


@pytest.mark.parametrize("name", CASES)
def test_evaluate_gives_the_librarys_figures(name: str, here: Path) -> None:
    model, rows = written(here, name)
    wanted = CASES[name][1](model, rows)
    asked = [word for metric in wanted for word in ("--metric", metric)]
    more = ["--num-beams", 2, "--max-new-tokens", 6] if name == "summaries" else []
    table = json.loads(run("evaluate", "m", "m", "-d", "d", "-b", 5, "--json", *asked, *more).stdout)["tables"][0]
    assert table["examples"] == len(rows)
    values = {v["metric"]: v for v in table["values"]}  # of the second model, the same as the first
    for metric, value in wanted.items():
        exact = 1e-5 if name == "ratings" or metric == "roc_auc" else 1e-12  # float32 numbers differ by batch
        assert values[metric]["value"] == pytest.approx(value, abs=exact)
        assert values[metric]["change"]["value"] == 0
        assert values[metric]["low"] <= value <= values[metric]["high"]


@pytest.mark.parametrize(("name", "metric"), [("questions", "squad_f1"), ("summaries", "wer"), ("ratings", "")])
def test_a_run_is_about_the_first_metric(name: str, metric: str, here: Path, brief: None) -> None:
    """From the first sentence to the answers that changed. What is saved pads and truncates as the dense model's tokenizer does."""
    written(here, name)
    edit(here / "m" / "tokenizer_config.json", padding_side="left")
    asked = ["--metric", metric, "--metric", "loss"] if metric else []
    run("prune", "m", "-d", "d", "-s", "one-shot", "-k", 4, "-k", 6, "-o", "run", *asked)
    found, report = metrics_of(here / "run"), (here / "run" / "report.md").read_text()
    assert "|\nWith" not in report  # a table ends before the next one's title
    budget, first = found["budgets"][0], metric or "spearman"
    assert found["metric"] == budget["change"]["metric"] == first
    assert first in report.splitlines()[2]
    assert [change["metric"] for change in budget["changes"]] == ["loss"] * bool(metric)
    assert ("Answers that changed" in report) == bool(budget["answers"]) == bool(metric)
    for folder in (here / "run" / f"pruned-{kept}" for kept in (4, 6)):
        assert json.loads((folder / "tokenizer_config.json").read_text())["padding_side"] == "left"
        assert (folder / "tokenizer.json").read_bytes() == (here / "m" / "tokenizer.json").read_bytes()
    for answer in budget["answers"]:
        assert answer["dense"] != answer["pruned"]
        assert answer["reference"][0] in json.dumps(
            [json.loads(line) for line in (here / "d/test.jsonl").open()][answer["row"]]
        )
    again = json.loads(run("evaluate", "m", "run/pruned-4", "-d", "d", "--json", *asked).stdout)["tables"][0]["values"]
    change = next(v["change"] for v in again if v["metric"] == first and v["model"] == "run/pruned-4")
    assert change["value"] == pytest.approx(budget["change"]["value"])


@pytest.mark.parametrize("name", ["classes", "ratings", "entities", "questions"])
def test_an_exported_files_figures_are_the_models(name: str, here: Path) -> None:
    model, rows = written(here, name)
    wanted = CASES[name][1](model, rows)
    run("export", "m", "--to", "onnx", "-o", "m.onnx")
    asked = [word for metric in wanted for word in ("--metric", metric)]
    table = json.loads(run("evaluate", "m", "m.onnx", "-d", "d", "-b", 5, "--json", *asked).stdout)["tables"][0]
    values = {v["metric"]: v["value"] for v in table["values"] if v["model"] == "m.onnx"}
    assert {metric: values[metric] for metric in wanted} == pytest.approx(wanted, abs=1e-5)


def test_drops_are_of_the_first_metric(here: Path, brief: None) -> None:
    """What is generated for every plan would take too long, and is refused before the work."""
    written(here, "classes")
    run("prune", "m", "-d", "d", "-s", "one-shot", "--max-drop", 0.9, "-o", "run", "--metric", "f1")
    found = metrics_of(here / "run")
    assert found["curve_metric"] == "f1"
    written(here / "texts", "summaries")
    error = stderr_of(
        "prune", "texts/m", "-d", "texts/d", "-s", "one-shot", "--max-drop", 0.5, "--metric", "bleu", code=1
    )
    assert "bleu would be generated each time" in error


def evaluated(*more: object) -> dict[str, float]:
    table = json.loads(run("evaluate", "m", "-d", "d", "-b", 5, "--json", *more).stdout)["tables"][0]
    return {"examples": table["examples"], **{v["metric"]: v["value"] for v in table["values"]}}


def test_each_example_gets_one_text(here: Path) -> None:
    """Also where a model's generation_config asks for several, and for scores beside their tokens."""
    written(here, "summaries")
    asked = ("--metric", "wer", "--num-beams", 2, "--max-new-tokens", 6)
    alone = evaluated(*asked)
    config = here / "m" / "generation_config.json"
    several = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | several))
    assert evaluated(*asked) == alone


def test_rows_without_a_text_to_write_are_left_out(here: Path) -> None:
    written(here, "summaries")
    rows = [json.loads(line) for line in (here / "d/test.jsonl").open()]
    write_jsonl(here / "d" / "test.jsonl", [rows[0] | {"summary": None}, *rows[1:]])
    assert evaluated("--metric", "wer", "--max-new-tokens", 3)["examples"] == len(rows) - 1
    several = write_jsonl(here / "several.jsonl", [r | {"summary": [r["summary"]]} for r in rows])
    assert "no single text" in stderr_of("evaluate", "m", "-d", several, "--metric", "wer", code=1)


def test_answers_are_found_where_texts_are_padded_on_the_left(here: Path) -> None:
    written(here, "questions")
    right = evaluated("--metric", "squad_f1")
    config = here / "m" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"padding_side": "left"}))
    assert evaluated("--metric", "squad_f1") == right


def test_speech_is_written_without_timestamps() -> None:
    """Two timestamps in a row would send transformers back to the first one's time, for ever if it is 0."""
    model, rows = speech()
    model.generation_config.no_timestamps_token_id = 4  # all words are timestamps
    sounds = [np.float32(row["audio"]["array"]) for row in rows[:3]]
    features = EXTRACTOR(sounds, sampling_rate=16000, return_tensors="pt").input_features
    assert hp.Generation(tokenizer(), ["a"] * 3).read(model.eval(), {"input_features": features}, 0) == [""] * 3


def test_marian_writes_texts() -> None:
    assert task_of(tf.MarianConfig(architectures=["MarianMTModel"]), None, "m").name == "seq2seq"


@pytest.mark.parametrize("kind", ["DeiT", "Levit"])
def test_a_model_that_had_a_teacher_classifies_images(kind: str) -> None:
    config = getattr(tf, f"{kind}Config")(architectures=[f"{kind}ForImageClassificationWithTeacher"])
    assert task_of(config, None, "m").name == "image-classification"
