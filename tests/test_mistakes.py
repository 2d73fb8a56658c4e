"""Wrong values and wrong files, for every option of every command: one line that says what is wrong, and nothing written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headprune.cli import app
from tests.support.folders import sentences, write_jsonl

runner = CliRunner()

SCORES = '{"headprune": "scores", "schema": 1, "layers": [], "scores": []}'
REMOTE = {
    "model_type": "made-up", "architectures": ["MadeUpForSequenceClassification"],
    "auto_map": {"AutoConfig": "made_up.Config", "AutoModelForSequenceClassification": "made_up.Model"},
}  # fmt: skip


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that are not what is asked for."""
    root = tmp_path_factory.mktemp("files")
    (root / "nothing").mkdir()
    texts = {
        "empty.jsonl": "", "empty.json": "", "cut.json": '{"headprune": "plan", "sch', "data.xyz": "a,b\n1,2\n",
        "other.json": SCORES, "plan-schema.json": '{"headprune": "plan", "schema": 9, "drop": {}}',
        "plan-no-drop.json": '{"headprune": "plan", "schema": 1}',
        "plan-list.json": '{"headprune": "plan", "schema": 1, "drop": [1, 2]}',
        "plan-float.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": [1.5]}}',
        "plan-text.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": "all"}}',
        "plan-huge.json": '{"headprune": "plan", "schema": 1, "drop": {"L0": [1]}, "kept": 1e999}',
        "not-a-dict.json": "[]", "größe.json": "{}",
        "run-damaged/scores.json": "{", "run-empty/scores.json": SCORES, "run-schema/run.json": '{"headprune": "run", "schema": 7}',
        "run-bare/run.json": '{"headprune": "run", "schema": 1}', "run-cut/run.json": '{"headprune": "run", "sche',
        "run-other/run.json": '{"headprune": "scores", "schema": 1}', "run-nothing/run.json": "",
        "config-empty/config.json": "", "config-cut/config.json": '{"model_type": "be',
        "config-list/config.json": "[]", "config-unknown/config.json": '{"model_type": "nothing-known"}',
        "config-remote/config.json": json.dumps(REMOTE),
        "config-kernel/config.json": json.dumps({
            "model_type": "bert", "architectures": ["BertForSequenceClassification"], "attn_implementation": "someone/attention",
        }),
        "sidecar-cut/config.json": '{"model_type": "bert", "architectures": ["BertForSequenceClassification"]}',
        "sidecar-cut/headprune.json": '{"headprune": "checkpo',
        "sidecar-schema/headprune.json": '{"headprune": "checkpoint", "schema": 3}',
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    for name in ("binary.json", "binary.jsonl", "run-binary/run.json", "config-binary/config.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(bytes(range(256)))
    return root


SCORE = ["score", "{bert}", "-d", "{data}"]
PRUNE = ["prune", "{bert}", "-d", "{data}"]
ALSO = [*PRUNE, "-k", "4", "--also"]
BENCH = ["bench", "{bert}", "{bert}"]
HUGE = "99999999999999999999"

# (what is typed, what stderr says, exit code). None of these may load a model.
EARLY: list[tuple[list[str], str, int]] = [
    # second data that are none
    ([*ALSO, "{files}/gone.jsonl"], "There is no file or folder", 1),
    ([*ALSO, "{files}/empty.jsonl"], "empty.jsonl is empty", 1),
    ([*ALSO, " "], "names no dataset", 1),
    ([*PRUNE, "-k", "4", "--export", "tflite"], "There is no export format 'tflite'", 1),
    # where the weights go
    (["score", "{bert}", "-d", "{data}", "--device-map", "nowhere"], "There is no device map 'nowhere'", 1),
    (["score", "{bert}", "-d", "{data}", "--device-memory", "5"], "no use without --device-map", 1),
    (["score", "{bert}", "-d", "{data}", "--offload-folder", "x"], "--offload-folder is gone", 2),
    (["score", "{bert}", "-d", "{data}", "--device-map", "auto", "--device-memory", "5"], "no amount for each device", 1),
    # a model that is none
    (["score", "", "-d", "{data}"], "No model was named", 1),
    (["score", "  ", "-d", "{data}"], "No model was named", 1),
    (["score", "{files}/data.xyz", "-d", "{data}"], "data.xyz is a file", 1),
    (["score", "{files}/nothing", "-d", "{data}"], "without a config.json", 1),
    (["score", "{files}/config-empty", "-d", "{data}"], "config-empty", 1),
    (["score", "{files}/config-cut", "-d", "{data}"], "config-cut", 1),
    (["score", "{files}/config-binary", "-d", "{data}"], "config-binary", 1),
    (["score", "{files}/config-list", "-d", "{data}"], "config-list", 1),
    (["score", "{files}/config-unknown", "-d", "{data}"], "nothing-known", 1),
    (["score", "{files}/config-remote", "-d", "{data}"], "add --trust-remote-code", 1),
    (["inspect", "{files}/config-remote"], "add --trust-remote-code", 1),
    (["inspect", "{files}/config-kernel"], "attention kernel someone/attention", 1),
    (["inspect", "{files}/sidecar-cut"], "headprune.json is not readable", 1),
    (["inspect", "größe/modèl"], "no model 'größe/modèl'", 1),
    (["inspect", "x" * 5000], "There is no model", 1),
    ([*SCORE, "--revision", "v1"], "MODEL@REVISION", 2),
    # data
    (["score", "{bert}"], "No dataset was given", 1),
    (["score", "{bert}", "-d", ""], "No dataset was given", 1),
    (["score", "{bert}", "-d", "nope.jsonl"], "no file or folder nope.jsonl", 1),
    (["score", "{bert}", "-d", "./nope"], "no file or folder ./nope", 1),
    (["score", "{bert}", "-d", "/nope/größe"], "no file or folder /nope/größe", 1),
    (["score", "{bert}", "-d", "x" * 5000], "cannot be read: File name too long", 1),
    (["score", "{bert}", "-d", "{files}/empty.jsonl"], "empty.jsonl is empty", 1),
    (["score", "{bert}", "-d", "{files}/nothing"], "nothing is empty", 1),
    (["score", "{bert}", "-d", "{files}/data.xyz"], "no data file that headprune reads", 1),
    ([*SCORE, "--text-column", "a,b,c"], "more than two columns", 1),
    ([*SCORE, "-L", "none"], "Error", 2),
    ([*SCORE, "-L", "1"], "Error", 2),
    ([*SCORE, "-L", "-5"], "Error", 2),
    ([*SCORE, "--report-limit", "0"], "Error", 2),
    ([*SCORE, "--max-length", "1"], "Error", 2),
    ([*SCORE, "-b", "0"], "Error", 2),
    # numbers and names
    ([*SCORE, "--seed", HUGE], "Error", 2),
    ([*SCORE, "--seed", "-1"], "Error", 2),
    ([*SCORE, "--keep", "36"], "-m l0:keep=36", 2),
    ([*SCORE, "-m", "guess"], "no scoring method 'guess'", 1),
    ([*SCORE, "-m", ""], "no scoring method ''", 1),
    ([*SCORE, "--time", "60"], "-m ablation:time=60", 2),
    ([*SCORE, "-m", "ablation:time=nan"], "time to spend", 1),
    ([*SCORE, "-m", "ablation:time=0"], "time to spend", 1),
    ([*SCORE, "-m", "ablation:examples=1"], "examples is 1", 1),
    ([*SCORE, "-m", "l0:sparsity=nan"], "sparsity is nan", 1),
    ([*SCORE, "-m", "l0:sparsity=inf"], "sparsity is inf", 1),
    ([*SCORE, "-m", "l0:steps=0"], "steps is 0", 1),
    ([*SCORE, "-m", "l0:steps=some"], "l0:steps=64", 1),
    ([*SCORE, "-m", "shapley:permutations=-1"], "permutations is -1", 1),
    ([*SCORE, "-m", "shapley:turns=3"], "no setting 'turns'", 1),
    ([*SCORE, "-m", "l0:keep=none"], "keep none", 1),
    ([*SCORE, "-m", "ablation:memory=lots"], "memory=4GB", 1),
    ([*SCORE, "-m", "ablation:memory=" + "9" * 400 + "GB"], "memory=4GB", 1),
    ([*SCORE, "-m", "ablation:memory="], "memory=4GB", 1),
    ([*SCORE, "-m", "gradient", "-m", "gradient:normalise"], "there twice", 1),
    ([*SCORE, "--task", "cooking"], "no task 'cooking'", 1),
    ([*SCORE, "--task", ""], "no task ''", 1),
    ([*SCORE, "--device", "toaster"], "no device 'toaster'", 1),
    ([*SCORE, "--device", "meta"], "no device 'meta'", 1),
    ([*SCORE, "--device", "cuda:77"], "CUDA device|no device", 1),
    ([*SCORE, "--dtype", "int3"], "no dtype 'int3'", 1),
    # folders
    ([*SCORE, "-o", "{files}/data.xyz"], "is a file", 1),
    ([*SCORE, "-o", "{files}/data.xyz/run"], "cannot be written|is a file", 1),
    ([*SCORE, "-o", "/proc/nothing/run"], "cannot be written", 1),
    ([*SCORE, "-o", "y" * 300], "cannot be written|too long", 1),
    ([*PRUNE, "-k", "4", "-o", "/proc/nothing/run"], "cannot be written", 1),
    # budgets
    (["prune"], "How many heads to keep", 1),
    (["export", "{bert}", "--to", "luck"], "no export format", 1),
    (["export", "{bert}", "--to", "gguf", "--dtype", "int3"], "int3", 1),
    ([*PRUNE, "--keep", "abc"], "keep abc is not a number of heads", 1),
    ([*PRUNE, "--keep", "½"], "is not a number of heads", 1),
    ([*PRUNE, "--keep", "2", "--keep", "1.5"], "keep 1.5 is not a number of heads", 1),
    ([*PRUNE, "--keep", "0"], "leaves no head", 1),
    ([*PRUNE, "--keep", "100%"], "keeps all heads", 1),
    ([*PRUNE, "--keep", "1.0"], "keeps all heads", 1),
    ([*PRUNE, "--keep", "150%"], r"more than all heads\. Keep fewer", 1),
    ([*PRUNE, "--target-latency", "100%"], "met by the dense model", 1),
    ([*PRUNE, "--target-latency", "soon"], "is no budget", 1),
    ([*PRUNE, "--target-latency", "-5"], "is no budget", 1),
    ([*PRUNE, "--target-flops", "nan"], "is no budget", 1),
    ([*PRUNE, "--target-flops", "1" + "0" * 400], "is no budget", 1),
    ([*PRUNE, "--target-params", "0"], "is no budget", 1),
    ([*PRUNE, "--target-params", "200%"], "met by the dense model", 1),
    ([*PRUNE, "--target-kv-cache", "10parsec"], "is no budget", 1),
    ([*PRUNE, "--max-drop", "5"], "did you mean 5%", 1),
    ([*PRUNE, "--max-drop", "-0.1"], "is no budget", 1),
    ([*PRUNE, "--keep", "2", "--max-drop", "0.1"], "different kinds of budget", 1),
    ([*PRUNE, "--keep", "2", "--strategy", "luck"], "no strategy 'luck'", 1),
    ([*PRUNE, "--keep", "2", "--effort", "some"], "no effort 'some'", 1),
    ([*PRUNE, "--keep", "2", "-m", "luck"], "no scoring method 'luck'", 1),
    ([*PRUNE, "--keep", "2", "--strategy", "compensated", "-m", "gradient"], "takes no scores", 1),
    ([*PRUNE, "--keep", "2", "--strategy", "compensated", "--distil"], "takes no scores", 1),
    ([*PRUNE, "--keep", "2", "--min-heads-per-layer", "-1"], "Error", 2),
    ([*PRUNE, "--keep", "2", "--finetune", "0"], "no number of epochs", 1),
    ([*PRUNE, "--keep", "2", "--finetune", "nan"], "no number of epochs", 1),
    ([*PRUNE, "--keep", "2", "--finetune", "inf"], "no number of epochs", 1),
    # plans and scores
    ([*PRUNE, "--plan", "nope.json"], "no file nope.json", 1),
    ([*PRUNE, "--plan", "{files}/nothing"], "not readable", 1),
    ([*PRUNE, "--plan", "{files}/empty.json"], "not readable", 1),
    ([*PRUNE, "--plan", "{files}/cut.json"], "not readable", 1),
    ([*PRUNE, "--plan", "{files}/binary.json"], "not readable", 1),
    ([*PRUNE, "--plan", "{files}/not-a-dict.json"], "does not hold headprune's plan", 1),
    ([*PRUNE, "--plan", "{files}/größe.json"], "größe.json does not hold", 1),
    ([*PRUNE, "--plan", "{files}/other.json"], "does not hold headprune's plan", 1),
    ([*PRUNE, "--plan", "{files}/plan-schema.json"], "has format 9", 1),
    ([*PRUNE, "--plan", "{files}/plan-no-drop.json"], "damaged plan", 1),
    ([*PRUNE, "--plan", "{files}/plan-list.json"], "damaged plan", 1),
    ([*PRUNE, "--plan", "{files}/plan-float.json"], "no list of heads", 1),
    ([*PRUNE, "--plan", "{files}/plan-text.json"], "no list of heads", 1),
    ([*PRUNE, "--plan", "{files}/plan-huge.json"], "damaged plan", 1),
    (["prune", "-k", "4"], "There are no scores in reports", 1),
    (["prune", "-k", "4", "--scores", "nope"], "no file or folder nope", 1),
    (["prune", "-k", "4", "--scores", "{data}/test.jsonl"], "is not a run's scores.json", 1),
    (["prune", "-k", "4", "--scores", "{files}/nothing"], "no file .*scores.json", 1),
    (["prune", "-k", "4", "--scores", "{files}/run-damaged"], "scores.json is not readable", 1),
    (["prune", "-k", "4", "--scores", "{files}/run-empty/scores.json"], "holds no scores", 1),
    # the other commands
    (["finetune", "nope"], "no folder nope", 1),
    (["finetune", "{files}/data.xyz"], "no folder", 1),
    (["finetune", "{files}/nothing"], "holds no pruned model", 1),
    (["finetune", "{files}/nothing", "--epochs", "0"], "0 epochs", 1),
    (["finetune", "{files}/nothing", "--epochs", "nan"], "nan epochs", 1),
    (["finetune", "{files}/nothing", "--learning-rate", "-1"], "learning rate", 1),
    (["finetune", "{files}/nothing", "--temperature", "0"], "temperature", 1),
    (["finetune", "{files}/nothing", "--alpha", "2"], "alpha|weight", 1),
    (["finetune", "{files}/nothing", "--patience", "0"], "patience", 1),
    (["finetune", "{files}/nothing", "--epochs", "1e300"], r"1e\+300 epochs", 1),
    (["finetune", "{files}/nothing", "--seed", HUGE], f"--seed is {HUGE}. Give 0 to", 1),
    (["finetune", "{files}/sidecar-schema"], "has format 3|Name the dataset|does not say", 1),
    (["report", "nope"], "no folder nope", 1),
    (["report", "{files}/data.xyz"], "no folder", 1),
    (["report", "{files}/nothing"], "is not a run's folder", 1),
    (["report", "{files}/run-nothing"], "run.json is not readable", 1),
    (["report", "{files}/run-cut"], "run.json is not readable", 1),
    (["report", "{files}/run-binary"], "run.json is not readable", 1),
    (["report", "{files}/run-other"], "does not hold headprune's run", 1),
    (["report", "{files}/run-schema"], "has format 7", 1),
    (["report", "{files}/run-bare"], "run.json is damaged, or of another version: commands is missing", 1),
    ([*BENCH, "--lengths", "long"], "no list of numbers", 1),
    ([*BENCH, "--lengths", "8,,9"], "no list of numbers", 1),
    ([*BENCH, "--lengths", "0"], "no list of numbers", 1),
    ([*BENCH, "--lengths", HUGE], "no list of numbers", 1),
    ([*BENCH, "--batch-sizes", "-1"], "no list of numbers", 1),
    ([*BENCH, "--batch-sizes", ""], "no list of numbers", 1),
    (["bench", "", "{bert}"], "No model was named", 1),
    ([*BENCH, "--seed", HUGE], "Error", 2),
    (["methods", "--everything"], "Error", 2),
    (["cook"], "Error", 2),
]  # fmt: skip


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights must not be loaded."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)
    monkeypatch.setattr("headprune.checkpoint.loading._fill", loaded)
    return


def typed(arguments: list[str], **places: Path) -> list[str]:
    return [a.format(**places) if "{" in a else a for a in arguments]


def check(arguments: list[str], says: str, code: int, here: Path) -> None:
    import re

    if "gguf" in arguments:
        pytest.importorskip("gguf")  # without it, that is what is said first
    before = sorted(here.rglob("*"))
    plain = runner.invoke(app, arguments)
    assert plain.exit_code == code, (plain.stdout, plain.stderr, plain.exception)
    assert plain.stdout == ""
    assert re.search(says, " ".join(plain.stderr.split())), plain.stderr
    if code == 1:
        lines = [line for line in plain.stderr.splitlines() if line.startswith("headprune: ")]
        assert len(lines) == 1, plain.stderr
        assert "unexpected" not in lines[0]
        assert re.search(says, lines[0]), lines[0]
    asked = runner.invoke(app, [*arguments, "--json"])
    assert asked.exit_code == code
    document = json.loads(asked.stdout)
    assert set(document) == {"error", "hint"}
    assert document["error"]
    for result in (plain, asked):
        assert "Traceback" not in result.stderr
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "says", "code"), EARLY, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else ""
)
def test_a_mistake_is_told_before_anything_is_loaded(
    arguments: list[str],
    says: str,
    code: int,
    here: Path,
    files: Path,
    bert_folder: Path,
    data_folder: Path,
    unloaded: None,
) -> None:
    check(typed(arguments, bert=bert_folder, data=data_folder, files=files), says, code, here)


# What only the loaded model can tell, but before any long work.
LATER: list[tuple[list[str], str]] = [
    (["show", "{bert}", "--image", "{files}/gone.png"], "it takes no image. Use --text"),
    (["show", "{bert}", "--text", "a", "--head", "H"], "'H' is no head of this model. Write it as L3.H7"),
    ([*PRUNE, "-L", "10", "--keep", "8"], "keeps all 8 heads, so there is nothing to prune"),
    ([*PRUNE, "-L", "10", "--keep", "2", "--keep", "9"], "more than all 8 heads"),
    ([*PRUNE, "-L", "10", "--keep", "1%"], "leaves no head"),
    ([*PRUNE, "-L", "10", "--keep", "4", "--protect", "L7"], "no attention layer named 'L7'"),
    ([*PRUNE, "-L", "10", "--keep", "4", "--protect", "L0.H9"], "no head 9"),
    ([*PRUNE, "-L", "10", "--target-params", "1G"], "met by the dense model .* so there is nothing to prune"),
    ([*PRUNE, "-L", "10", "--target-flops", "1T"], "met by the dense model"),
    ([*PRUNE, "-L", "10", "--target-latency", "60000"], "met by the dense model"),
    ([*PRUNE, "-L", "10", "--target-kv-cache", "50%"], "no key/value cache"),
    ([*PRUNE, "-L", "10", "--max-drop", "1"], "asks for nothing"),
    ([*PRUNE, "-L", "10", "--plan", "{plans}/none.json"], "drops no head"),
    ([*PRUNE, "-L", "10", "--plan", "{plans}/nowhere.json"], "no attention layer named 'L9'"),
    ([*SCORE, "--max-length", "2"], "repeat an input of an earlier part.* more than 2 tokens were cut"),
    (["score", "{bert}", "-d", "{plans}/same"], "repeat an input of an earlier part"),
    (["score", "{bert}", "-d", "{plans}/few.jsonl"], "too few rows"),
    (["score", "{bert}", "-d", "{files}/binary.jsonl"], "cannot be read as a dataset"),
    ([*BENCH, "--lengths", "8,5000"], "does not take texts of 5,000 tokens: it has 64 positions. Use --lengths up to 64"),
]  # fmt: skip


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    (root / "none.json").write_text('{"headprune": "plan", "schema": 1, "drop": {"L0": []}}')
    (root / "nowhere.json").write_text('{"headprune": "plan", "schema": 1, "drop": {"L9": [0]}}')
    same: list[dict[str, object]] = [{"text": "good film", "label": 1}] * 8
    for split in ("train", "validation", "test"):
        write_jsonl(root / "same" / f"{split}.jsonl", same)
    write_jsonl(root / "few.jsonl", sentences(2, 0))
    return root


@pytest.mark.parametrize(("arguments", "says"), LATER, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "")
def test_a_mistake_is_told_before_the_long_work(
    arguments: list[str],
    says: str,
    here: Path,
    files: Path,
    plans: Path,
    bert_folder: Path,
    data_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def long(*_: object, **__: object) -> None:
        raise AssertionError("the long work began")

    for step in ("app.workflow.scoring.score", "app.workflow.results.evaluate", "plan_search.arrange"):
        monkeypatch.setattr(f"headprune.{step}", long)
    given = typed(arguments, bert=bert_folder, data=data_folder, files=files, plans=plans)
    check(given, says, 1, here)


def test_every_option_is_in_the_table() -> None:
    """A new option gets a line above, or a reason here."""
    from typer.main import get_command

    any_text = {
        "--subset",
        "--split",
        "--choose-split",
        "--report-split",
        "--label-column",
        "--teacher",
        "--train-limit",
        "--text",
    }
    command: Any = get_command(app)
    tried = {a for arguments, *_ in [*EARLY, *LATER] for a in arguments if a.startswith("-")}
    for name, one in command.commands.items():
        for option in one.params:
            takes_value = option.param_type_name == "option" and not option.is_flag
            assert not takes_value or tried & set(option.opts) or any_text & set(option.opts), (name, option.opts)
