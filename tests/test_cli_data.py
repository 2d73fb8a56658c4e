"""What the command line says and does about data and scores that were made earlier."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import transformers as tf

import headprune as hp
from tests.support.commands import run, stderr_of
from tests.support.documents import FINETUNE, METRICS, TRAINED, opened, write_json
from tests.support.folders import WORDS, common, sentences, tokenizer, write_jsonl
from tests.support.stays import edit
from tests.support.zoo import randomise

QUICK = ["--strategy", "one-shot", "--no-repair"]


pytestmark = pytest.mark.usefixtures("brief", "here")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A scored run, never changed."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    run("score", bert_folder, "-d", data_folder, "-L", 20, "-m", "gradient", "-o", folder, "-q")
    return folder


# -- which model, which scores -----------------------------------------------------------------


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(bert_folder, folder)
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    randomise(model, seed=5).save_pretrained(folder)
    return folder


def test_scores_of_one_model_do_not_prune_another(made: Path, other_folder: Path, here: Path) -> None:
    result = run("prune", other_folder, "-k", 4, "--scores", made, *QUICK, code=1)
    assert f"of another model than {other_folder}" in result.stderr
    assert not list(here.iterdir())


def test_a_copy_of_the_scored_model_is_the_same(made: Path, bert_folder: Path, here: Path) -> None:
    """The weights decide, not the name; and it is the one that was named which is loaded."""
    copy = here / "copy"
    shutil.copytree(bert_folder, copy)
    document = json.loads(run("prune", copy, "-k", 4, "--scores", made, *QUICK, "--dry-run", "--json").stdout)
    assert document["plans"][0]["kept"] == 4
    run("prune", copy, "-k", 4, "--scores", made, *QUICK, "-o", "out", "-q")
    assert json.loads((here / "out" / "run.json").read_text())["options"]["model"] == str(copy)
    assert json.loads((here / "out" / "pruned-4" / "headprune.json").read_text())["about"]["from"] == str(copy)


def test_scores_that_do_not_fit_are_left_aside(made: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    """A command that says all was refused for an earlier run in `reports/`."""
    shutil.copytree(made, here / "reports" / "tiny-bert-1")
    whole = ["prune", bert_folder, "-d", data_folder, "-k", 4, "-s", "one-shot", "-m", "gradient"]
    for more in (["-L", 30], ["-m", "ablation:examples=8"], ["-m", "weight-norm"]):
        told = run(*whole, *more, "--dry-run")
        assert told.stderr.count("are left aside") == 1, (more, told.stderr)
        assert "Would score" in told.stdout
    assert "left aside" not in stderr_of(*whole, "-L", 20, "--dry-run")
    assert "another one" in stderr_of(*whole, "-L", 30, "--scores", made, "--dry-run", code=1)


def test_folders_that_are_no_runs_are_passed_over(made: Path, bert_folder: Path, here: Path) -> None:
    """The newest scores.json was taken for a run's, and there was no run.json beside it, or half of one."""
    shutil.copytree(made, here / "reports" / "run")
    for name, files in (("other", {"scores.json": "{}"}), ("cut", {"scores.json": "{}", "run.json": "{"})):
        for file, content in files.items():
            (here / "reports" / name).mkdir(exist_ok=True)
            (here / "reports" / name / file).write_text(content)
    for typed in ([], [bert_folder]):
        assert "Using the scores in reports/run" in run("prune", *typed, "-k", 4, *QUICK, "--dry-run").stderr
    shutil.rmtree("reports/run")
    assert "reports/cut/run.json is not readable" in stderr_of("prune", "-k", 4, code=1)
    shutil.rmtree("reports/cut")
    assert "There are no scores in reports" in stderr_of("prune", "-k", 4, code=1)


@pytest.mark.parametrize("flag", [["--distil"], ["--method", "gradient:normalise"]], ids=lambda f: f[0])
def test_options_for_scoring_are_not_ignored(flag: list[str], made: Path, here: Path) -> None:
    result = run("prune", "-k", 4, "--scores", made, *flag, code=1)
    assert f"{' '.join(flag)} has no use here: the scores in {made} are made already" in result.stderr


def test_scores_beside_are_not_taken_for_a_name_that_is_not_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    assert "no file or folder nope" in stderr_of("prune", "-k", 4, "--scores", "nope", code=1)


# -- how the data is cut -----------------------------------------------------------------------


def test_a_smaller_report_is_of_these_examples(made: Path, here: Path) -> None:
    run("prune", "-k", 4, "--scores", made, *QUICK, "--report-limit", 7, "-o", "out", "-q")
    document = json.loads((here / "out" / "run.json").read_text())
    assert document["parts"]["report"]["examples"] == 7
    assert document["options"]["data"]["report_limit"] == 7
    assert document["parts"]["score"] == json.loads((made / "run.json").read_text())["parts"]["score"]
    (budget,) = json.loads((here / "out" / "metrics.json").read_text())["budgets"]
    assert budget["pruned"]["examples"] == 7
    assert "from 7 others (`test`" in (here / "out" / "report.md").read_text()
    run("report", here / "out")
    run("prune", "-k", 4, "--scores", made, *QUICK, "--report-limit", 30, "-b", 4, "--dry-run")  # or larger


@pytest.mark.parametrize(("flag", "named"), [
    (["-L", 30], "--limit"), (["--seed", 3], "--seed"), (["--split", "validation"], "--split"), (["--max-length", 5], "--max-length"),
    (["-L", 10, "--seed", 3], "--limit and --seed"),
], ids=str)  # fmt: skip
def test_another_scoring_part_is_refused_for_the_true_reason(flag: list[Any], named: str, made: Path) -> None:
    error = stderr_of("prune", "-k", 4, "--scores", made, *QUICK, *flag, code=1)
    assert f"with {named} the scoring part is another one" in error
    assert f"Leave out {named}, or score again" in error


def test_data_that_has_changed_is_noticed(made: Path, data_folder: Path, here: Path) -> None:
    """As many rows as before, but others: row numbers alone would not tell."""
    shutil.copytree(data_folder, here / "data")
    shutil.copytree(made, here / "run")
    command = ["prune", "-k", 4, "--scores", "run", *QUICK]
    data = {**opened(here / "run" / "run.json")["options"]["data"], "dataset": "data"}
    edit(here / "run" / "run.json", options={**opened(here / "run" / "run.json")["options"], "data": data})
    assert "has changed" not in stderr_of(*command, "--dry-run")
    file = here / "data" / "test.jsonl"
    file.write_text(file.read_text().replace("good", "goof", 1))
    changed = "data has changed since it was scored: the examples to choose or to report on are different now."
    assert changed in stderr_of(*command, "--dry-run")
    assert "has changed" not in stderr_of(*command, "--report-limit", 10, "--dry-run")
    write_jsonl(here / "data" / "train.jsonl", sentences(60, 77))
    assert "data no longer holds the examples that were scored" in stderr_of(*command, code=1)
    shutil.copytree(made, here / "other")
    command[4] = "other"
    assert "--dataset the scoring part is another one" in stderr_of(*command, "-d", "data", code=1)


@pytest.fixture
def pruned(made: Path, here: Path, bert_folder: Path) -> Path:
    """A run with a pruned model, whose data has three splits."""
    folder = here / "run"
    shutil.copytree(made, folder)
    about = {"task": "sequence-classification", "from": str(bert_folder)}
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    hp.checkpoint.save(model, folder / "pruned-8", processor=tf.AutoTokenizer.from_pretrained(bert_folder), about=about)
    return folder


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> None:
    error = hp.HeadPruneError("training would begin")
    monkeypatch.setattr("headprune.app.finetune.finetune", Mock(side_effect=error))


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize("flag", [["-L", 10], ["-L", 28], ["--report-limit", 30], []], ids=str)
def test_finetune_with_other_limits_where_no_reported_example_was_used(flag: list[Any], pruned: Path) -> None:
    assert "training would begin" in stderr_of("finetune", pruned / "pruned-8", *flag, code=1)


def cut_by_seed(pruned: Path, here: Path, *limits: object) -> Path:
    """The same run, on one file that was cut by the seed."""
    data = write_jsonl(here / "one.jsonl", sentences(80, 9))
    run("score", pruned / "pruned-8", "-d", data, "-L", 12, *limits, "-m", "random", "-o", "cut", "-q")
    cut, document = opened(here / "cut" / "run.json"), opened(pruned / "run.json")
    document["options"]["data"], document["parts"] = cut["options"]["data"], cut["parts"]
    (pruned / "run.json").write_text(json.dumps(document))
    return data


def test_finetune_never_reports_what_chose_the_heads(pruned: Path, here: Path, stops: None) -> None:
    cut_by_seed(pruned, here)
    error = stderr_of("finetune", pruned / "pruned-8", "-L", 6, code=1)
    assert "With --limit, 12 of the 68 examples to report were used to score or choose the heads" in error
    assert "Leave out --limit" in error
    assert "training would begin" in stderr_of("finetune", pruned / "pruned-8", "--report-limit", 20, code=1)


@pytest.mark.parametrize("trained_by", ["finetune", "prune"])
def test_what_was_trained_on_is_not_reported(trained_by: str, pruned: Path, here: Path, stops: None) -> None:
    """One split, few reported: the rest was trained on. Reporting more of it later would report that."""
    cut_by_seed(pruned, here, "--report-limit", 20)
    source, document = pruned / "pruned-8", opened(pruned / "run.json")
    if trained_by == "finetune":
        cut = {"data": document["options"]["data"], "parts": document["parts"]}
        write_json(source / "finetune.json", "finetune", {**FINETUNE, **cut})
    else:
        budget = {**METRICS["budgets"][0], "checkpoint": "pruned-8", "finetune": TRAINED}
        write_json(pruned / "metrics.json", "metrics", {**METRICS, "budgets": [budget]})
    error = stderr_of("finetune", source, "--report-limit", 50, code=1)
    assert "was fine-tuned before; with --report-limit the data is cut differently" in error
    assert "training would begin" in stderr_of("finetune", source, "--report-limit", 20, code=1)


def test_finetune_on_a_copy_of_the_data_under_another_name(pruned: Path, here: Path, stops: None) -> None:
    data = cut_by_seed(pruned, here)
    shuffled = data.read_text().splitlines()[::-1]
    (here / "other.jsonl").write_text("\n".join(shuffled) + "\n")
    error = stderr_of("finetune", pruned / "pruned-8", "-d", "other.jsonl", code=1)
    assert "With --dataset, " in error
    assert "used to score or choose the heads" in error
    data.unlink()
    error = stderr_of("finetune", pruned / "pruned-8", "-d", "other.jsonl", code=1)
    assert "Whether reported examples were used to score or choose the heads is not known" in error
    assert "training would begin" in error


def test_finetune_on_data_that_has_changed(pruned: Path, here: Path, stops: None) -> None:
    data = cut_by_seed(pruned, here)
    write_jsonl(data, sentences(81, 10))
    assert "has changed since the model was pruned" in stderr_of("finetune", pruned / "pruned-8", code=1)


# -- what is scored where there are no scores -----------------------------------------------------


@pytest.mark.parametrize(("options", "methods"), [
    ([], ["gradient"]), (["--strategy", "one-shot"], ["ablation", "gradient"]), (["--strategy", "compensated"], []),
    (["-m", "ablation", "-m", "gradient"], ["ablation", "gradient"]),
], ids=str)  # fmt: skip
@patch("headprune.app.workflow.prune_run", side_effect=hp.HeadPruneError("enough"))
def test_prune_says_what_it_scores_by(
    instead: Mock, options: list[str], methods: list[str], bert_folder: Path, data_folder: Path
) -> None:
    error = stderr_of("prune", bert_folder, "-d", data_folder, "-k", 4, *options, code=1)
    assert instead.call_args.args[0].methods == tuple(methods)
    times = int(bool(methods) and "-m" not in options)
    assert error.count("There are no scores yet") == error.count(f"by {' and '.join(methods)} first") == times
    text = " ".join(run("prune", "--help").stdout.replace("│", " ").split())
    assert "heads are scored by gradient, which is enough for auto, or by ablation and gradient for another" in text


def test_a_run_that_does_not_say_what_it_scored(made: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    folder = here / "reports" / "x-1"
    shutil.copytree(made, folder)
    edit(folder / "run.json", options=None)
    assert "run.json is damaged" in stderr_of("prune", bert_folder, "-d", data_folder, "-k", 4, code=1)


def test_a_model_whose_config_changed_since_it_was_scored(bert_folder: Path, data_folder: Path, here: Path) -> None:
    """Its weights are the same, and its answers are not."""
    shutil.copytree(bert_folder, here / "m")
    run("score", "m", "-d", data_folder, "-L", 20, "-m", "random", "-o", "run", "-q")
    path = here / "m" / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | {"layer_norm_eps": 1e-3}))
    command = ["prune", "-k", 4, "--scores", "run", *QUICK]
    assert "The config of m has changed since run was scored" in stderr_of(*command, code=1)
    path.write_text(whole)
    words = here / "m" / "tokenizer.json"  # of a word that is in no example
    words.write_text(words.read_text().replace('"[MASK]": 4', '"[MASL]": 4'))
    assert "The tokenizer or image processor of m has changed since run was scored" in stderr_of(*command, code=1)


def test_questions_that_cannot_be_used_are_counted(here: Path) -> None:
    """Rows without an answer, and answers behind the cut, were left out without a word."""
    randomise(tf.BertForQuestionAnswering(tf.BertConfig(**common()))).save_pretrained("model")
    tokenizer().save_pretrained("model")

    def row(context: str, answer: str) -> dict[str, object]:
        start = [context.index(answer)] if answer else []
        return {
            "question": "good film",
            "context": context,
            "answers": {"text": [answer] * len(start), "answer_start": start},
        }

    rows = [row(f"the {a} plot was {b}", a) for a in WORDS[:4] for b in WORDS[4:9]]
    late, none = row(f"the {'film ' * 40} was great", "great"), row("the plot was dull", "")
    write_jsonl(here / "data" / "train.jsonl", [*rows, none, none])
    write_jsonl(here / "data" / "test.jsonl", [*[{**r, "question": "bad film"} for r in rows], late])
    said = stderr_of("score", "model", "-d", "data", "-m", "random", "-o", "run")
    assert "Data: 16 to score (train), 4 to choose (train), 20 to report (test); 3 rows left out. Columns:" in said
    left_out = (
        "Rows left out: 1 of 17 to score (1 without an answer); 1 of 5 to choose (1 without an answer); 1 of 21 to"
    )
    assert left_out in said
    assert "1 of 21 to report (1 with the answer behind the cut)" in (here / "run" / "report.md").read_text()


@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert"])
def test_sounds_are_classified_whatever_the_class_is_called(kind: str, here: Path) -> None:
    """Wav2Vec2ForSequenceClassification and its like were taken for classifiers of texts: every command failed."""
    config = getattr(tf, f"{kind}Config")(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, classifier_proj_size=16,
        id2label={0: "yes", 1: "no"}, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    randomise(getattr(tf, f"{kind}ForSequenceClassification")(config)).save_pretrained("model")
    listed = json.loads(run("inspect", "model", "--json").stdout)
    assert [layer["num_heads"] for layer in listed["layers"]] == [4, 4]
    if kind != "Hubert":
        return
    tf.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained("model")
    sounds = [{"array": [(i * j % 101) / 101 for j in range(400)], "sampling_rate": 16000} for i in range(2, 32)]
    rows: Any = [{"audio": sound, "label": ("no", "yes")[i % 2]} for i, sound in enumerate(sounds)]
    data = write_jsonl(here / "x.jsonl", rows)
    document = json.loads(run("score", "model", "-d", data, "-m", "gradient", "-q", "--json").stdout)
    assert json.loads((Path(document["folder"]) / "run.json").read_text())["model"]["task"] == "audio-classification"


def test_what_needs_no_label_works_without_labels(bert_folder: Path, here: Path) -> None:
    """Every command wanted a column of labels, also to score by the dense model's answers, or by what reads no loss."""
    rows: Any = [{"text": row["text"]} for row in sentences(30, seed=0)]
    plain = write_jsonl(here / "plain.jsonl", rows)
    odd = write_jsonl(here / "odd.jsonl", [{**row, "label": "of another task"} for row in rows])
    hidden = write_jsonl(here / "hidden.jsonl", [{**row, "label": -1} for row in rows])
    refused = run("score", bert_folder, "-d", plain, "-m", "ablation", code=1)
    assert "No column looks like the label" in refused.stderr
    assert "score --distil" in refused.stderr
    values = []
    for i, data in enumerate((plain, odd, hidden)):
        run("score", bert_folder, "-d", data, "-m", "ablation", "--distil", "-o", f"run{i}", "-q")
        (made,) = json.loads((here / f"run{i}" / "scores.json").read_text())["scores"]
        assert made["details"]["loss"].startswith("divergence")
        values.append(made["values"])
    assert values[0] == values[1] == values[2]
    run("score", bert_folder, "-d", plain, "-m", "entropy", "-m", "weight-norm", "-o", "other", "-q")


def test_base_models_are_looked_at(here: Path) -> None:
    """They were refused, since their class names no task: no head on top is needed to look at heads."""
    randomise(tf.BertModel(tf.BertConfig(**common()))).save_pretrained("bert")
    tokenizer().save_pretrained("bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    randomise(tf.ViTModel(tf.ViTConfig(**sizes, image_size=16, patch_size=4))).save_pretrained("vit")
    for name in ("bert", "vit"):
        layers = json.loads(run("inspect", name, "--json").stdout)["layers"]
        assert [layer["num_heads"] for layer in layers] == [4, 4]
    plain = write_jsonl(here / "plain.jsonl", [{"text": row["text"]} for row in sentences(30, seed=0)])
    for what in (["--text", "good film"], ["-d", plain]):
        shown = json.loads(run("show", "bert", *what, "--json").stdout)
        assert [len(layer["heads"]) for layer in shown["layers"]] == [4, 4]
    assert "Say it with --task" in stderr_of("score", "bert", "-d", plain, code=1)


@pytest.mark.slow
def test_a_folder_without_a_tokenizer_is_exported(bert_folder: Path, here: Path) -> None:
    pytest.importorskip("onnx")
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    example = dict(tokenizer()("good film is the plot", return_tensors="pt"))
    hp.prune(model, {"L0": [0]}, example)
    hp.save(model, here / "model")
    result = run("export", "model", "--to", "onnx")
    assert (here / "model.onnx").is_file()
    assert "tokenizer" in result.stderr


# -- second data ---------------------------------------------------------------------------------

SECOND = ("--strategy", "one-shot", "-m", "gradient", "-q")


def test_second_data_are_measured_and_change_nothing_else(here: Path, bert_folder: Path, data_folder: Path) -> None:
    rows: Any = [{"sentence": r["text"], "label": r["label"]} for r in sentences(30, seed=9)]
    other = write_jsonl(here / "other.jsonl", rows)
    ask = ("prune", bert_folder, "-d", data_folder, "-L", 20, "-k", 4, *SECOND)
    run(*ask, "-o", "plain")
    screen = run(*ask[:-1], "-o", "both", "--also", other, "--also", data_folder).stdout
    plain, both = (json.loads((here / name / "metrics.json").read_text()) for name in ("plain", "both"))
    assert [d["name"] for d in both["also"]] == [str(other), str(data_folder)]
    assert not plain.get("also")
    for key in ("pruned", "change", "drop", "random", "over_random"):
        assert plain["budgets"][0][key] == both["budgets"][0][key]
    first, second = both["budgets"][0]["also"]
    assert first["gain"]["examples"] == both["also"][0]["data"]["examples"] > 0
    assert second["pruned"]["metrics"] == both["budgets"][0]["pruned"]["metrics"]  # its test split is what is reported
    change = f"{100 * first['change']['value']:+.2f} points ({100 * first['change']['low']:+.2f} to"
    assert change in (here / "both" / "report.md").read_text().partition("## On other data")[2]
    assert str(other) in re.sub(r"\s", "", screen)
    assert opened(here / "both" / "run.json")["options"]["data"]["also"] == [str(other), str(data_folder)]


def test_second_data_that_are_not_there_or_do_not_fit(here: Path, bert_folder: Path, data_folder: Path) -> None:
    ask = ("prune", bert_folder, "-d", data_folder, "-L", 20, "-k", 4, "--strategy", "one-shot", "-m", "gradient")
    wrong = write_jsonl(here / "wrong.jsonl", [{"text": f"good {i}", "label": 7} for i in range(9)])
    assert "label 7 does not fit the model's head" in stderr_of(*ask, "--also", wrong, code=1)
    rows = [json.loads(line) for line in (data_folder / "train.jsonl").read_text().splitlines()]
    used = write_jsonl(here / "used.jsonl", rows)
    assert "repeating an input" in stderr_of(*ask[:4], "-L", 60, *ask[6:], "--also", used, code=1)
