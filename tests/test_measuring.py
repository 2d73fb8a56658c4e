"""`headprune evaluate` and `headprune compare`, by the command line: each figure against a loop by hand."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from sacrebleu import corpus_bleu
from scipy.stats import t as student
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import headprune as hp
from tests.support.commands import PRUNE, metrics_of, run, stderr_of
from tests.support.folders import WORDS, common, sentences, tokenizer, write_jsonl
from tests.support.zoo import randomise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief", "here")]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}"""
GROUP = "group: both\ntask: [choice, twin]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"


def paired(differences: np.ndarray, weights: np.ndarray, least: float = 0.0) -> tuple[float, float, float]:
    """The mean of differences and its interval, by the formula of `headprune.uncertainty`."""
    n, mean = len(differences), differences.sum() / weights.sum()
    errors = [abs(d - mean * w) for d, w in zip(differences, weights, strict=True)]
    half = (
        math.sqrt(sum(e**2 for e in errors) + 2 * max(*errors, least) ** 2) / weights.sum() * student.ppf(0.975, n - 1)
    )
    return mean, mean - half, mean + half


def changes(typed: Any) -> dict[tuple[str, str, str], Any]:
    """What `evaluate` gives, by table, metric and model."""
    tables = json.loads(run(*typed, "--json", "-q").stdout)["tables"]
    return {(t["name"], v["metric"], v["model"]): v for t in tables for v in t["values"]}


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model ``dense`` and with four heads less ``pruned``, and tasks of ours in ``tasks``."""
    folder = tmp_path_factory.mktemp("writers")
    model, words = randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**common()))), tokenizer()
    words.backend_tokenizer.post_processor = None
    words.bos_token, words.eos_token = "[CLS]", "[SEP]"
    hp.save(model, folder / "dense", processor=words)
    hp.prune(model, {"L0": [0, 1], "L1": [2, 3]}, {"input_ids": torch.arange(5, 20)[None]})
    hp.save(model, folder / "pruned", processor=words)
    rows = [{"text": r["text"], "choices": [f"{a} {b} {a}", c], "answer": int(i % 3 == 0)}
            for i, (r, a, b, c) in enumerate(zip(sentences(20, 7), WORDS, WORDS[3:], WORDS[1:], strict=False))]  # fmt: skip
    data, asked = write_jsonl(folder / "tasks" / "rows.jsonl", rows), {"data": "", "more": "doc_to_choice: choices"}
    asked |= {"data": data, "kind": "multiple_choice", "text": "{{text}}", "target": "answer"}
    rolling = {"data": data, "kind": "loglikelihood_rolling", "text": "", "target": "{{text}}", "more": ""}
    writing = "generation_kwargs: {max_gen_toks: 8, until: [x]}\nmetric_list: [{metric: bleu}]"
    texts = {
        "choice": TASK.format(name="choice", **asked), "twin": TASK.format(name="twin", **asked), "both": GROUP,
        "uneven": GROUP.replace("both", "uneven").replace("[choice, twin]", "[few, other]").replace("true", "false"),
        "few": TASK.format(name="few", **asked | {"more": "doc_to_choice: choices\nprocess_docs: !function few.few"}),
        "other": TASK.format(name="other", **asked),
        "rolling": TASK.format(name="rolling", **rolling),
        "writing": TASK.format(name="writing", **rolling | {"kind": "generate_until", "text": "{{text}}", "more": writing}),
        "gone": TASK.format(name="gone", **asked | {"data": "gone.jsonl"}),
    }  # fmt: skip
    (folder / "tasks" / "few.py").write_text("def few(docs):\n    return docs.select(range(6))\n")
    for name, text in texts.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def likelihood(model: Any, before: list[int], after: list[int]) -> float:
    ids = torch.tensor([before + after])
    return float(
        model(ids).logits.double().log_softmax(-1)[0, -len(after) - 1 : -1].gather(1, ids[:, -len(after) :].T).sum()
    )


def bleu_of(pairs: list[tuple[str, str]]) -> float:
    written, right = zip(*pairs, strict=True)
    return corpus_bleu(list(written), [list(right)]).score


@torch.no_grad()
def test_tasks_are_the_sums_of_their_documents(writers: Path) -> None:
    names = [str(writers / name) for name in ("dense", "pruned")]
    own = ["--include-path", writers / "tasks", "-b", 1]
    values = changes(["evaluate", *names, "--tasks", "both,uneven,rolling,writing", *own])
    docs = [json.loads(line) for line in (writers / "tasks" / "rows.jsonl").read_text().splitlines()]
    encode = tokenizer().convert_tokens_to_ids
    right, lost = [], []
    for name in names:
        model = hp.load(name)
        texts = [encode(doc["text"].split()) for doc in docs]
        choices = [
            [likelihood(model, t, encode(c.split())) for c in d["choices"]] for t, d in zip(texts, docs, strict=True)
        ]
        right.append(
            np.array([np.argmax(each) == doc["answer"] for each, doc in zip(choices, docs, strict=True)], float)
        )
        lost.append(np.array([-likelihood(model, [2], text) for text in texts]))
    words, ones = np.array([len(doc["text"].split()) for doc in docs]), np.ones(len(docs))
    for i, name in enumerate(names):
        assert values["choice", "acc", name]["value"] == pytest.approx(right[i].mean(), abs=1e-12)
        assert values["rolling", "word_perplexity", name]["value"] == pytest.approx(
            math.exp(lost[i].sum() / words.sum())
        )
    for task, times in (("choice", 1), ("both", 2)):  # a group's documents are those of its tasks
        change = values[task, "acc", names[1]]["change"]
        by_hand = paired(np.tile(right[1] - right[0], times), np.tile(ones, times), 1.0)
        assert (change["value"], change["low"], change["high"]) == pytest.approx(by_hand)
    change = values["rolling", "word_perplexity", names[1]]["change"]
    by_hand = tuple(map(math.expm1, paired(lost[1] - lost[0], words)))
    assert (change["value"], change["low"], change["high"]) == pytest.approx(by_hand, rel=1e-4)
    assert change["verdict"] == ("worse" if by_hand[1] > 0 else "better" if by_hand[2] < 0 else "no measurable change")
    texts, moves, score = [doc["text"] for doc in docs], [], []
    for name in names:
        model, words_of = hp.load(name), tf.AutoTokenizer.from_pretrained(name)
        asked = [words_of(text, return_tensors="pt") for text in texts]
        ids = [model.generate(**a, max_new_tokens=8, do_sample=False, eos_token_id=[2, 3])[0] for a in asked]
        new = [own[a["input_ids"].shape[1] :] for own, a in zip(ids, asked, strict=True)]
        pairs = [*zip(words_of.batch_decode(new, skip_special_tokens=True), texts, strict=True)]
        without = [bleu_of(pairs[:i] + pairs[i + 1 :]) for i in range(len(docs))]
        moves.append((len(docs) - 1) * (np.mean(without) - np.array(without)))
        score.append(bleu_of(pairs))
    bleu, half = values["writing", "bleu", names[1]], paired(moves[1] - moves[0], ones)[2]
    assert (bleu["value"], bleu["change"]["value"]) == pytest.approx((score[1], score[1] - score[0]))
    assert bleu["low"] >= 0 < half
    assert bleu["change"]["high"] - bleu["change"]["value"] == pytest.approx(half)
    assert "is not known" in values["uneven", "acc", names[1]]["note"]
    first = changes(["evaluate", names[0], "--tasks", "choice", *own, "--task-limit", 7])
    assert first["choice", "acc", names[0]]["value"] == pytest.approx(right[0][:7].mean())


def test_prune_reports_tasks(writers: Path, data_folder: Path, here: Path) -> None:
    own = ["--tasks", "choice", "--include-path", writers / "tasks", "--task-limit", 12]
    run(*PRUNE, 4, writers / "dense", "-d", data_folder, "-L", 20, "-m", "weight-norm", "--no-repair", "-o", "r", *own)
    (table,) = metrics_of(here / "r")["tasks"]
    values = changes(["evaluate", writers / "dense", here / "r", *own])
    names = {"dense": str(writers / "dense"), "4 heads": str(here / "r")}
    assert [v | {"model": names[v["model"]]} for v in table["values"]] == [*values.values()]
    assert "`choice`, 12 documents" in (here / "r" / "report.md").read_text()


def test_what_no_task_can_do_is_one_line(
    writers: Path, bert_folder: Path, llama_folder: Path, data_folder: Path, monkeypatch: Any
) -> None:
    own = ["--tasks", "choice", "--include-path", writers / "tasks"]
    assert "gone cannot be loaded" in stderr_of("evaluate", writers / "dense", *own[:1], "gone", *own[2:], code=1)
    assert "hellaswag cannot be loaded" in stderr_of("evaluate", writers / "dense", "--tasks", "hellaswag", code=1)
    assert "for models that write text" in stderr_of("evaluate", bert_folder, *own, code=1)
    assert "no token for the end" in stderr_of("evaluate", llama_folder, *own, code=1)
    twice = ["-k", 4, "-d", data_folder, "-m", "weight-norm", *own[:1], "both,choice", *own[2:], "--dry-run"]
    told = stderr_of("prune", writers / "dense", *twice, code=1)  # before anything is scored
    assert "found in both 'both' and 'choice'" in told
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "headprune[lm-eval]"' in stderr_of("evaluate", writers / "dense", *own, code=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """Runs ``a`` and ``b`` that report on the same examples, ``c`` on fewer by another seed, and ``d`` on others."""
    folder = tmp_path_factory.mktemp("runs")
    options = {
        "a": [],
        "b": ["--no-repair"],
        "c": ["--report-limit", 25, "--seed", 1],
        "d": ["--report-split", "validation"],
    }
    for name, more in options.items():
        run(*PRUNE, 3, bert_folder, "-d", data_folder, "-L", 40, "-m", "weight-norm", "-o", folder / name, *more)
    return folder


def correct(folder: Path) -> np.ndarray:
    """Whether a saved model is right, for each sentence of the test split."""
    model, words, rows = hp.load(folder), tf.AutoTokenizer.from_pretrained(folder), sentences(40, 3)
    guesses = [int(model(**words(row["text"], return_tensors="pt", truncation=True)).logits.argmax()) for row in rows]
    return np.array([guess == row["label"] for guess, row in zip(guesses, rows, strict=True)], float)


def test_a_run_names_the_methods_that_it_scored_by(runs: Path, bert_folder: Path, data_folder: Path) -> None:
    """A run that `prune` scored itself named none, and `compare` told it from one that `score` had scored alike."""
    run("score", bert_folder, "-d", data_folder, "-L", 40, "-m", "weight-norm", "-o", "scored", "-q")
    run(*PRUNE, 3, "-o", "scored")
    told = json.loads(run("compare", runs / "a", "scored", "--json").stdout)
    assert told["options"] == {}
    assert json.loads((runs / "a" / "run.json").read_text())["options"]["methods"] == ["weight-norm"]


def test_evaluate_gives_what_prune_reports(runs: Path, bert_folder: Path, data_folder: Path) -> None:
    """Also of a file for another engine, in that engine."""
    run("export", runs / "a", "--to", "onnx", "-o", "a.onnx", "-q")
    typed = ["evaluate", bert_folder, runs / "a", "a.onnx", runs / "c", "-d", data_folder, "-L", 40]
    values = changes(typed)
    told = metrics_of(runs / "a")
    (budget,) = told["budgets"]
    for model, measured, change in (
        (bert_folder, told["dense"], None), (runs / "a", budget["pruned"], budget["change"]), ("a.onnx", budget["pruned"], budget["change"])
    ):  # fmt: skip
        value = values[str(data_folder), "accuracy", str(model)]
        got = {"value": value["value"], "low": value["low"], "high": value["high"]}
        assert got == {"value": measured["metrics"]["accuracy"], "low": measured["low"], "high": measured["high"]}
        assert value["change"] == change
    said = run(*typed).stdout
    assert f"{100 * budget['pruned']['metrics']['accuracy']:.1f} %" in said
    assert "were used to score or choose" not in said


@pytest.mark.parametrize(("rows", "batch"), [("mixed", 1), ("mixed", 16), ("ones", 16)])
def test_a_files_words_are_compared_as_its_models_are(rows: str, batch: int) -> None:
    """What a class 1 and the 1s of a mask have in common was taken for a text: files were refused, or predicted "the next token"."""
    randomise(tf.BertForTokenClassification(tf.BertConfig(**common(num_labels=2)))).save_pretrained("words")
    tokenizer().save_pretrained("words")
    data = [str(row["text"]).split() for row in sentences(40, 3)]
    labels = [[int(rows == "ones" or word in WORDS[:8]) for word in text] for text in data]
    write_jsonl(Path("w.jsonl"), [{"tokens": text, "labels": own} for text, own in zip(data, labels, strict=True)])
    run("export", "words", "--to", "onnx", "-o", "words.onnx", "-q")
    values = changes(["evaluate", "words", "words.onnx", "-d", "w.jsonl", "-b", batch])
    for metric in ("accuracy", "loss"):
        model, file = (values["w.jsonl", metric, name]["value"] for name in ("words", "words.onnx"))
        assert file == pytest.approx(model, rel=1e-5)


def test_other_tokenizers_are_paired_by_row(runs: Path, data_folder: Path) -> None:
    """A tokenizer of letters sorts texts otherwise by length; and a run's own options say which examples are held out."""
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?# abcdefghijklmnopqrstuvwxyz")}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="#", unk_token="?", model_max_length=32)
    hp.save(randomise(tf.BertForSequenceClassification(tf.BertConfig(**common()))), "letters", processor=letters)
    Path("run.json").write_text("{}")  # not of a run of ours
    values = changes(["evaluate", runs / "a", "letters", "-d", data_folder, "-L", 40])
    by_hand = paired(correct(Path("letters")) - correct(runs / "a" / "pruned-3"), np.ones(40), 1.0)
    change = values[str(data_folder), "accuracy", "letters"]["change"]
    assert [change[key] for key in ("value", "low", "high")] == pytest.approx(by_hand)
    typed = ["evaluate", runs / "a", "-d", data_folder, "-L", 20, "--report-split", "train"]
    assert re.search(r"\d+ of the \d+ examples were used to score or choose", " ".join(run(*typed).stdout.split()))


def test_examples_that_a_model_was_trained_on_are_counted(bert_folder: Path, data_folder: Path) -> None:
    """Of those that neither score nor choose nothing was said; nor of any, outside of the run's folder."""
    run(*PRUNE, 4, bert_folder, "-d", data_folder, "-L", 20, "-m", "weight-norm", "--finetune", 1, "-o", "run")
    run("finetune", "run", "-o", "elsewhere", "--train-limit", 30, "-q")
    for name, limit, seen in (
        ("run", 20, "40 of the 40"),
        ("elsewhere", 20, "10 of the 40"),
        ("elsewhere", 10, "20 of the 50"),
    ):
        said = run("evaluate", name, "-d", data_folder, "-L", limit, "--report-split", "train").stdout
        assert f"{seen} examples were used to score or choose the heads of {name}, or to train it" in " ".join(
            said.split()
        )
        assert "or to train it" not in run("evaluate", name, "-d", data_folder, "-L", 20).stdout


def test_runs_are_paired_where_their_examples_are_the_same(runs: Path) -> None:
    document = json.loads(run("compare", runs / "a", runs / "b", "--json").stdout)
    (pair,) = document["pairs"]
    by_hand = paired(correct(runs / "b" / "pruned-3") - correct(runs / "a" / "pruned-3"), np.ones(40), 1.0)
    assert pair["paired"]
    assert [pair["change"][key] for key in ("value", "low", "high")] == pytest.approx(by_hand)
    assert document["options"] == {"repair": ["yes", "no"]}
    document = json.loads(run("compare", runs / "a", runs / "c", "--json").stdout)
    (pair,), rows = document["pairs"], np.load(runs / "c" / "report.npz")["rows"]  # in another order than in a
    by_hand = paired((correct(runs / "c" / "pruned-3") - correct(runs / "a" / "pruned-3"))[rows], np.ones(25), 1.0)
    assert [pair["change"][key] for key in ("value", "low", "high")] == pytest.approx(by_hand)
    assert pair["paired"]
    said = run("compare", runs / "a", runs / "c").stdout
    assert "of the 25 examples that both runs report on, of 40 and 25" in said
    assert re.search("report_limit +2000 +25", said)


def test_runs_without_equal_numbers_of_heads_are_paired_by_size(runs: Path, here: Path) -> None:
    run(*PRUNE, 5, "--scores", runs / "b", "--no-repair", "-o", "five")
    document = json.loads(run("compare", runs / "b", "five", "--json").stdout)
    assert [(pair["first"], pair["second"]) for pair in document["pairs"]] == [("pruned-3", "pruned-5")]
    assert any("No two models keep as many heads" in note for note in document["notes"])
    assert document["options"] == {"budgets": ["keep 3", "keep 5"]}


def test_runs_without_common_examples_are_independent(runs: Path) -> None:
    folders = (runs / "a", runs / "d")
    document = json.loads(run("compare", *folders, "--json").stdout)
    (pair,), halves = document["pairs"], [m["budgets"][0]["pruned"] for m in map(metrics_of, folders)]
    half = math.hypot(*((m["high"] - m["low"]) / 2 for m in halves))
    value = halves[1]["metrics"]["accuracy"] - halves[0]["metrics"]["accuracy"]
    assert not pair["paired"]
    assert [pair["change"][key] for key in ("value", "low", "high")] == pytest.approx(
        [value, value - half, value + half]
    )
    assert "nothing is paired" in run("compare", *folders).stdout


def test_runs_are_not_paired_where_labels_have_changed(bert_folder: Path, data_folder: Path, here: Path) -> None:
    """Equal models differed by points, "paired", where rows and inputs were the same and labels were not."""
    shutil.copytree(data_folder, "data")
    for name in ("a", "b"):
        run(*PRUNE, 3, bert_folder, "-d", "data", "-m", "weight-norm", "-o", name)
        rows = [json.loads(line) for line in Path("data/test.jsonl").read_text().splitlines()]
        write_jsonl(Path("data/test.jsonl"), [{**row, "label": 1 - row["label"]} for row in rows])
    document = json.loads(run("compare", "a", "b", "--json").stdout)
    assert not document["pairs"][0]["paired"]
    assert document["notes"][0].startswith("The runs report on different examples or labels")


def test_metrics_that_are_no_means_are_paired_on_the_same_examples(
    bert_folder: Path, data_folder: Path, here: Path
) -> None:
    for name, more in (("a", []), ("b", ["--no-repair"]), ("c", ["--report-limit", 5])):
        run(*PRUNE, 3, bert_folder, "-d", data_folder, "-o", name, "--metric", "f1_macro", *more)
    assert json.loads(run("compare", "a", "b", "--json").stdout)["pairs"][0]["paired"]
    document = json.loads(run("compare", "a", "c", "--json").stdout)
    (note,), (pair,) = document["notes"], document["pairs"]
    assert note.startswith("f1_macro is no mean over examples, and the runs report on others")
    ends = [
        [m["low"], m["metrics"]["f1_macro"], m["high"]]
        for m in (metrics_of(here / name)["budgets"][0]["pruned"] for name in "ac")
    ]
    assert ends[1][0] == 0  # an interval that ends there was taken to be as narrow as it looks
    half = math.hypot(*(max(np.diff(each)) for each in ends))
    assert pair["change"]["high"] - pair["change"]["value"] == pytest.approx(half)
    Path("b/report.npz").unlink()
    (note,) = json.loads(run("compare", "a", "b", "--json").stdout)["notes"]
    assert note.startswith("b has no report.npz")


def test_values_of_another_run_are_refused(runs: Path, here: Path) -> None:
    for name, content in (("a", b"no arrays"), ("b", (runs / "c" / "report.npz").read_bytes())):
        kept = (runs / name / "report.npz").read_bytes()
        (runs / name / "report.npz").write_bytes(content)
        assert "another run's" in stderr_of("compare", runs / "a", runs / "b", code=1)
        (runs / name / "report.npz").write_bytes(kept)
