"""The commands as a user types them: results, errors, exit codes, and what is left on disk."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf

import headprune as hp
from tests.support.commands import PRUNE, metrics_of, python, run, stderr_of
from tests.support.documents import opened
from tests.support.folders import common, sentences, tokenizer
from tests.support.zoo import randomise

pytestmark = pytest.mark.usefixtures("brief")
ROOT = Path(__file__).parent.parent
SCORED = {"scores.json", "run.json", "report.md", "report.html", "heads.json", "heads.png", "importance.png"}


@pytest.fixture(scope="session")
def pruned_once(tmp_path_factory: pytest.TempPathFactory, scored_once: Path) -> Path:
    """A folder in which `headprune score` and `headprune prune -k 4` have run."""
    folder = tmp_path_factory.mktemp("pruned")
    shutil.copytree(scored_once, folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(*PRUNE, 4, "--no-repair")
    return folder


@pytest.fixture
def pruned(here: Path, pruned_once: Path) -> Path:
    """The run in a test's own folder."""
    shutil.copytree(pruned_once, here, dirs_exist_ok=True)
    return here / "reports" / "tiny-bert-1"


@pytest.mark.drawn
def test_score_then_prune_then_report(scored: Path, bert_folder: Path) -> None:
    assert {p.name for p in scored.iterdir()} == SCORED
    run_ = opened(scored / "run.json")
    run_["environment"] |= {"device_name": "another machine", "threads": 77}
    (scored / "run.json").write_text(json.dumps(run_))
    result = run("prune", "--keep", "50%")
    assert "tiny-bert-1/report.md" in result.stdout
    assert "tiny-bert-1/report.html" in result.stdout
    pruned = {"tradeoff.png", "plan.json", "metrics.json", "orders.json", "report.npz", "pruned-4"}
    assert {p.name for p in scored.iterdir()} == SCORED | pruned
    (budget,) = metrics_of(scored)["budgets"]
    assert (budget["kept"], budget["total"]) == (4, 8)
    # What was saved is what was reported: measure it here, apart from the tool's own evaluation.
    model = hp.load(scored / "pruned-4")
    assert sum(p.numel() for p in model.parameters()) == budget["parameters"]
    tokenizer = tf.AutoTokenizer.from_pretrained(scored / "pruned-4")
    right = 0
    rows = sentences(40, 3)
    for row in rows:
        right += int(model(**tokenizer(row["text"], return_tensors="pt")).logits.argmax() == row["label"])
    assert budget["pruned"]["examples"] == len(rows)
    assert budget["pruned"]["metrics"]["accuracy"] == pytest.approx(right / len(rows))
    text = (scored / "report.md").read_text()
    assert f"{100 * right / len(rows):.1f} %" in text
    latency = text.split("## Latency")[1].split("## ")[0]
    assert f"{torch.get_num_threads()} thread" in latency
    assert "77 threads" not in latency  # times are of this machine, wherever the scores were made
    run("report", scored)
    assert (scored / "report.md").read_text() == text


def test_a_pruned_run_is_not_overwritten(pruned: Path, data_folder: Path) -> None:
    first = (pruned / "metrics.json").read_text()
    run(*PRUNE, 2, "--no-repair")  # goes to the next free folder
    assert (pruned / "metrics.json").read_text() == first
    assert (pruned.parent / "tiny-bert-2" / "pruned-2").is_dir()
    assert "was pruned before" in run(*PRUNE, 2, "-o", pruned, code=1).stderr
    run(*PRUNE, 2, "--no-repair", "-o", pruned, "--overwrite")
    assert metrics_of(pruned)["budgets"][0]["kept"] == 2
    for typed in ([*PRUNE, 1], ["score"]):  # which would remove the model
        assert "would be removed" in stderr_of(*typed, pruned, "-d", data_folder, "-o", pruned, "--overwrite", code=1)
    assert (pruned / "pruned-2").is_dir()


@pytest.mark.slow
@pytest.mark.drawn
def test_a_causal_lm_with_groups(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("score", llama_folder, "-d", data_folder, "-L", 20, "-o", here / "run", "-q")
    result = run("prune", "-k", 5, "-o", here / "run")
    assert "not 5" in result.stderr
    metrics = metrics_of(here / "run")
    assert metrics["metric"] == "perplexity"
    assert metrics["budgets"][0]["kept"] == 4
    hp.load(here / "run" / "pruned-5")
    written = metrics["generation"][0]
    assert written["cache"]["4 heads"] < written["cache"]["dense"]
    assert metrics["time"][0]["bounds"].keys() == {"4 heads", "no heads"}
    (also,) = metrics["also"]  # a text that comes with headprune
    assert (also["name"], also["data"]["examples"]) == ("plain-english.txt", 40)
    text = (here / "run" / "report.md").read_text()
    assert "## Written text" in text
    assert "`plain-english.txt`, 40 examples" in text
    assert "Generation, models in turn" in result.stdout


def test_dry_runs_write_nothing(here: Path, bert_folder: Path, data_folder: Path) -> None:
    assert "Nothing was written" in run("score", bert_folder, "-d", data_folder, "--dry-run").stdout
    assert not (here / "reports").exists()
    assert "Data:" in stderr_of("score", bert_folder, "-d", data_folder, "-L", 20, "-m", "gradient", "--json")
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    assert "keeps 4 of 8" in run("prune", "-k", 4, "--dry-run").stdout
    assert {p: p.stat().st_mtime_ns for p in here.rglob("*")} == before


def test_inspect(bert_folder: Path, llama_folder: Path) -> None:
    assert "bert.encoder.layer.1.attention.self" in run("inspect", bert_folder).stdout.replace("\n", "")
    document = json.loads(run("inspect", llama_folder, "--json", "-q").stdout)
    assert [a["num_kv_heads"] for a in document["layers"]] == [2, 2]


def test_a_layer_that_lost_all_heads_has_none(llama_folder: Path, data_folder: Path, here: Path) -> None:
    """What stays there for the cache was counted as heads, and had roles."""
    model = tf.LlamaForCausalLM.from_pretrained(llama_folder)
    hp.prune(model, {"model.layers.1.self_attn": [0, 1, 2, 3]}, {"input_ids": torch.tensor([[2, 5, 6, 7, 3]])})
    hp.save(model, here / "pruned")
    tokenizer().save_pretrained(here / "pruned")
    assert "LlamaForCausalLM: 4 heads" in run("inspect", "pruned").stdout
    run("score", "pruned", "-d", data_folder, "-m", "weight-norm", "-o", "run", "-q")
    assert json.loads((here / "run" / "run.json").read_text())["model"]["heads"] == 4
    assert [len(layer["heads"]) for layer in json.loads((here / "run" / "heads.json").read_text())["layers"]] == [4, 0]


def test_a_model_without_a_tokenizer(bert_folder: Path, data_folder: Path, here: Path) -> None:
    shutil.copytree(bert_folder, here / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "no tokenizer" in stderr_of("score", "model", "-d", data_folder, code=1)


def test_a_model_of_images_that_names_no_size(here: Path) -> None:
    """SegFormer's config has no image_size."""
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 4], "decoder_hidden_size": 8}
    tf.SegformerForImageClassification(tf.SegformerConfig(**sizes)).save_pretrained(here / "segformer")
    layers = json.loads(run("inspect", here / "segformer", "--json", "-q").stdout)["layers"]
    assert [layer["num_heads"] for layer in layers] == [1, 1, 2, 4]


def test_a_model_that_does_not_run_without_heads_is_refused_at_once(here: Path, data_folder: Path) -> None:
    """Longformer takes the width of all heads for that of its input where a token sees all; it was said when all was scored and searched."""
    config = tf.LongformerConfig(**common(attention_window=4))
    randomise(tf.LongformerForSequenceClassification(config)).save_pretrained(here / "long")
    tokenizer().save_pretrained(here / "long")
    error = stderr_of("prune", "long", "-d", data_folder, "-k", 2, "-L", 10, code=1)
    assert "8 heads have to stay" in error
    assert "the pruned model does not run" in error
    assert "scoring by" not in error


def test_a_model_that_changes_its_own_modules(here: Path, data_folder: Path) -> None:
    """BigBird turns to full attention at its first short text; a longer one then failed, and so did the saved model."""
    config = tf.BigBirdConfig(**common(block_size=1, num_random_blocks=1, num_labels=2))
    randomise(tf.BigBirdForSequenceClassification(config)).save_pretrained(here / "big")
    tokenizer().save_pretrained(here / "big")
    options = ("-d", data_folder, "-L", 20, "-b", 1)
    run("prune", "big", *options, "-k", 2, "-o", "run", "-q")
    assert json.loads((here / "run" / "pruned-2" / "config.json").read_text())["attention_type"] == "original_full"
    (table,) = json.loads(run("evaluate", "run/pruned-2", *options, "--json").stdout)["tables"]
    told = metrics_of(here / "run")["budgets"][0]["pruned"]["metrics"]
    assert {row["metric"]: row["value"] for row in table["values"]}["loss"] == pytest.approx(told["loss"], rel=1e-5)


@pytest.mark.parametrize(("status", "says"), [(None, "interrupted."), (130, "interrupted."), (143, "terminated."), (129, "terminated.")])  # fmt: skip
def test_what_stopped_a_run_is_said(
    status: int | None, says: str, monkeypatch: pytest.MonkeyPatch, bert_folder: Path, data_folder: Path, here: Path
) -> None:
    """In the words of README's exit codes."""

    stopped = hp.errors.Stopped(status) if status else KeyboardInterrupt
    monkeypatch.setattr("headprune.app.workflow.score", Mock(side_effect=stopped))
    assert f"headprune: {says}" in stderr_of("score", bert_folder, "-d", data_folder, code=status or 130)
    assert not list(here.rglob("*"))


def test_help_is_quick_and_needs_no_torch() -> None:
    """Time is the processor's, and loosely bounded: the machine may be busy. What makes help slow is what it imports."""
    code = (
        "import sys, time\nfrom headprune.cli import main\n"
        "for command in ([], ['score'], ['prune'], ['finetune'], ['bench'], ['demo']):\n"
        "    sys.argv = ['headprune', *command, '--help']\n    try: main()\n    except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'scipy', 'matplotlib', 'huggingface_hub', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)), time.process_time())"
    )
    imported, _, seconds = python("-c", code).stdout.splitlines()[-1].rpartition(" ")
    assert imported == "[]"
    assert float(seconds) < 3


@pytest.mark.parametrize(("own", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_threads_sleep_while_they_wait_unless_the_user_says_how(own: dict[str, str], spins: str) -> None:
    """It has no effect once torch is imported."""
    code = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules))\n"
        "sys.argv = ['headprune', '--version']\n"
        "import headprune.__main__ as launched\n"
        "launched.main()"
    )
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
    code = f"import os\nfor name in {names}: os.environ.pop(name, None)\nos.environ.update({own})\n{code}"
    assert python("-c", code).stdout.splitlines()[-1] == f"{spins} False"


def test_the_launcher() -> None:
    assert python("cli.py", "--version", env={"PYTHONPATH": ""}).stdout.startswith("headprune 0")


def test_hub_ids_go_through_the_hub(monkeypatch: pytest.MonkeyPatch, bert_folder: Path) -> None:
    """A Hub id, its revision and the trust flag reach transformers as they were given."""
    seen = []
    real = tf.AutoConfig.from_pretrained
    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", lambda s, **k: seen.append((s, k)) or real(bert_folder))
    assert "does not load" in stderr_of("inspect", "someone/some-model@v2", "--task", "causal-lm", code=1)
    assert seen == [("someone/some-model", {"revision": "v2", "trust_remote_code": False})]


def test_scoring_options(here: Path, bert_folder: Path, data_folder: Path) -> None:
    base = ["score", bert_folder, "-d", data_folder, "-L", 40, "-b", 16, "-q"]
    run(*base, "-m", "ablation:examples=8,keep=50%,memory=1GB,normalise", "-m", "fisher", "-o", "a")
    ablation, fisher = hp.scoring.load_scores(here / "a" / "scores.json")
    assert 2 < ablation.details["ablated"] < 20
    assert "L2 norm" in ablation.unit
    assert fisher.matrix is not None
    report = (here / "a" / "report.md").read_text()
    assert "gradients on all 40 examples" in report
    assert "## Agreement of the methods" in report
    assert "| random orders, 95 % within |" in report
    result = run(*base, "-m", "ablation", "-m", "l0:steps=5", "--distil", "-o", "b", "--json")
    document = json.loads(result.stdout)
    assert all("dense model" in s["details"]["loss"] for s in document["scores"])
    assert "no standard error: none from one training run" in (here / "b" / "report.md").read_text()
    run(*PRUNE, "50%", "--no-repair", "--scores", "b", "-o", "c")
    assert metrics_of(here / "c")["budgets"][0]["kept"] == 4


# -- what commands print: one document on stdout, progress with a time, and nothing that a model prints ------------


def test_every_command_gives_one_document(scored: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    quick = ["--scores", scored, "--strategy", "one-shot", "--no-repair"]
    base = [bert_folder, "-d", data_folder, "-L", 20]
    commands: dict[str, list[Any]] = {
        "layers": ["score", *base, "--dry-run"],
        "methods": ["prune", *base, "-k", 4, "-o", "new", "--strategy", "one-shot", "--dry-run"],
        "plans": ["prune", "-k", 4, *quick, "--dry-run"],
        "report": ["report", scored],
        "strategies": ["methods"],
        "model": ["inspect", bert_folder],
        "rows": ["bench", bert_folder, bert_folder, "--batch-sizes", 1, "--lengths", 8],
        "scores": ["score", *base, "-m", "random", "-o", "scored"],
        "budgets": ["prune", "-k", 4, *quick, "-o", "pruned"],
        "tables": ["evaluate", *base],
        "pairs": ["compare", "pruned", "pruned"],
    }
    for key, arguments in commands.items():
        assert key in json.loads(run(*arguments, "--json").stdout), arguments
        assert not (here / "new").exists()


def test_what_a_model_prints_stays_out_of_the_document(bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tf.AutoConfig.from_pretrained
    talking = lambda *given, **more: print("Hello from the model") or real(*given, **more)  # noqa: E731
    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", talking)
    result = run("inspect", bert_folder, "--json")
    assert json.loads(result.stdout)["model"] == str(bert_folder)
    assert "Hello from the model" in result.stderr


def test_what_methods_are_is_told_without_the_markup_of_docstrings() -> None:
    assert "`L(without the head) - L`" in (shown := " ".join(run("methods", "--json").stdout.split()))
    assert "``" not in shown
