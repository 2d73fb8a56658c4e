"""What the command line says and does about data and scores that were made earlier, and about what cannot be used."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from typer.testing import CliRunner

import headprune as hp
from headprune import latency
from headprune.app.data import DataOptions, load_parts
from headprune.app.models import load_model
from headprune.app.workflow.checks import same_parts
from headprune.cli import app
from tests.conftest import WORDS, sentences, write_jsonl
from tests.zoo import randomise

runner = CliRunner()
QUICK = ["--strategy", "one-shot", "--no-repair"]


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times do not matter here."""
    monkeypatch.setattr("headprune.latency.MIN_SECONDS", 0.001)
    monkeypatch.setattr(latency, "bench", partial(latency.bench, min_runs=1, min_seconds=0.001))


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
    assert f"another model's than {other_folder}" in result.stderr
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


@pytest.mark.parametrize("flag", [
    ["--distil"], ["--examples", "8"], ["--time", "3"], ["--max-memory", "1GB"], ["--normalise"], ["--steps", "3"],
    ["--permutations", "3"], ["--sparsity", "0.1"],
], ids=lambda f: f[0])  # fmt: skip
def test_options_for_scoring_are_not_ignored(flag: list[str], made: Path, here: Path) -> None:
    result = run("prune", "-k", 4, "--scores", made, *flag, code=1)
    assert f"{flag[0]} has no use here: the scores in {made} are made already" in result.stderr


def test_scores_beside_are_not_taken_for_a_name_that_is_not_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    assert "no file or folder nope" in run("prune", "-k", 4, "--scores", "nope", code=1).stderr


# -- how the data is cut -----------------------------------------------------------------------


@pytest.mark.parametrize("flag", [["--report-limit", 30], ["--report-limit", 5], ["-b", 4]], ids=str)
def test_the_reported_part_may_be_larger_or_smaller(flag: list[Any], made: Path, here: Path) -> None:
    run("prune", "-k", 4, "--scores", made, *QUICK, *flag, "--dry-run")


def test_a_smaller_report_is_of_these_examples(made: Path, here: Path) -> None:
    run("prune", "-k", 4, "--scores", made, *QUICK, "--report-limit", 7, "-o", "out", "-q")
    document = json.loads((here / "out" / "run.json").read_text())
    assert document["parts"]["report"]["examples"] == 7
    assert document["options"]["data"]["report_limit"] == 7
    assert document["parts"]["score"] == json.loads((made / "run.json").read_text())["parts"]["score"]
    (budget,) = json.loads((here / "out" / "metrics.json").read_text())["budgets"]
    assert budget["pruned"]["examples"] == 7
    assert "7 to report" in (here / "out" / "report.md").read_text()
    run("report", here / "out")


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        (["-L", 30], "--limit"),
        (["--seed", 3], "--seed"),
        (["--split", "validation"], "--split"),
        (["--max-length", 5], "--max-length"),
        (["-L", 10, "--seed", 3], "--limit and --seed"),
    ],
    ids=str,
)
def test_another_scoring_part_is_refused_for_the_true_reason(
    flag: list[Any], named: str, made: Path, here: Path
) -> None:
    error = run("prune", "-k", 4, "--scores", made, *QUICK, *flag, code=1).stderr
    assert f"with {named} the scoring part is another one" in error
    assert f"Leave out {named}, or score again" in error


def test_data_that_has_changed_is_noticed(made: Path, data_folder: Path, here: Path) -> None:
    """As many rows as before, but others: row numbers alone would not tell."""
    shutil.copytree(data_folder, here / "data")
    write_jsonl(here / "data" / "train.jsonl", sentences(60, 77))
    shutil.copytree(made, here / "run")
    assert (
        "--dataset the scoring part is another one"
        in run("prune", "-k", 4, "--scores", "run", "-d", here / "data", *QUICK, code=1).stderr
    )
    document = json.loads((here / "run" / "run.json").read_text())
    document["options"]["data"]["dataset"] = str(here / "data")
    (here / "run" / "run.json").write_text(json.dumps(document))
    error = run("prune", "-k", 4, "--scores", "run", *QUICK, code=1).stderr
    assert f"{here / 'data'} no longer holds the examples that were scored" in error


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
    def begin(*_: object, **__: object) -> None:
        raise hp.HeadPruneError("training would begin")

    monkeypatch.setattr("headprune.app.finetune_run.finetune", begin)


@pytest.mark.parametrize("flag", [["-L", 10], ["-L", 28], ["--report-limit", 30], []], ids=str)
def test_finetune_with_other_limits_where_no_reported_example_was_used(
    flag: list[Any], pruned: Path, stops: None
) -> None:
    assert "training would begin" in run("finetune", pruned / "pruned-8", *flag, code=1).stderr


def cut_by_seed(pruned: Path, here: Path) -> Path:
    """The same run, on one file that was cut by the seed."""
    data = write_jsonl(here / "one.jsonl", sentences(80, 9))
    document = json.loads((pruned / "run.json").read_text())
    document["options"]["data"] |= {"dataset": str(data), "limit": 12}
    parts = load_parts(DataOptions(str(data), limit=12), load_model(str(pruned / "pruned-8")))
    document["parts"] = parts.about()
    (pruned / "run.json").write_text(json.dumps(document))
    return data


def test_finetune_never_reports_what_chose_the_heads(pruned: Path, here: Path, stops: None) -> None:
    cut_by_seed(pruned, here)
    error = run("finetune", pruned / "pruned-8", "-L", 6, code=1).stderr
    assert "With --limit, 12 of the 68 examples to report scored or chose the heads" in error
    assert "Leave out --limit" in error
    assert "training would begin" in run("finetune", pruned / "pruned-8", "--report-limit", 20, code=1).stderr


@pytest.mark.parametrize("trained_by", ["finetune", "prune"])
def test_what_a_model_was_trained_on_before_is_not_reported(
    trained_by: str, pruned: Path, here: Path, stops: None
) -> None:
    """One split, few reported: the rest was trained on. Reporting more of it later would report that."""
    data = cut_by_seed(pruned, here)
    source = pruned / "pruned-8"
    options = DataOptions(str(data), limit=12, report_limit=20)
    parts = load_parts(options, load_model(str(source))).about()
    if trained_by == "finetune":
        document = {"headprune": "finetune", "schema": 1, "data": vars(options), "parts": parts}
        (source / "finetune.json").write_text(json.dumps(document))
    else:
        run_ = json.loads((pruned / "run.json").read_text())
        run_["options"]["data"] |= vars(options)
        (pruned / "run.json").write_text(json.dumps({**run_, "parts": parts}))
        budgets = [{"checkpoint": "pruned-8", "finetune": {"epochs": 1}}]
        (pruned / "metrics.json").write_text(json.dumps({"headprune": "metrics", "schema": 1, "budgets": budgets}))
    error = run("finetune", source, "--report-limit", 50, code=1).stderr
    assert "was fine-tuned before; with --report-limit the data is cut otherwise" in error
    assert "training would begin" in run("finetune", source, "--report-limit", 20, code=1).stderr


def test_finetune_on_a_copy_of_the_data_under_another_name(pruned: Path, here: Path, stops: None) -> None:
    data = cut_by_seed(pruned, here)
    shuffled = data.read_text().splitlines()[::-1]
    (here / "other.jsonl").write_text("\n".join(shuffled) + "\n")
    error = run("finetune", pruned / "pruned-8", "-d", "other.jsonl", code=1).stderr
    assert "With --dataset, " in error
    assert "scored or chose the heads" in error
    data.unlink()
    error = run("finetune", pruned / "pruned-8", "-d", "other.jsonl", code=1).stderr
    assert "Whether reported examples scored or chose the heads is not known" in error
    assert "training would begin" in error


def test_finetune_on_data_that_has_changed(pruned: Path, here: Path, stops: None) -> None:
    data = cut_by_seed(pruned, here)
    write_jsonl(data, sentences(81, 10))
    assert "is not what it was when the model was pruned" in run("finetune", pruned / "pruned-8", code=1).stderr


def test_documents_from_before_contents_were_noted(bert_folder: Path, data_folder: Path) -> None:
    parts = load_parts(DataOptions(str(data_folder), limit=10), load_model(str(bert_folder)))
    old = {n: {k: v for k, v in p.items() if k != "content_hash"} for n, p in parts.about().items()}
    assert same_parts({"parts": old}, parts)
    assert not same_parts({"parts": {**old, "choose": {**old["choose"], "rows_hash": "x"}}}, parts)
    assert not same_parts({"parts": {}}, parts)


# -- what is scored where there are no scores -----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "methods"),
    [
        ([], ["gradient"]),
        (["--strategy", "one-shot"], ["ablation", "gradient"]),
        (["-m", "ablation", "-m", "gradient"], ["ablation", "gradient"]),
        (["--strategy", "compensated"], []),
    ],
    ids=str,
)
def test_prune_says_what_it_scores_by(
    options: list[str], methods: list[str], bert_folder: Path, data_folder: Path, here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    used: list[Any] = []

    def instead(options: Any, goal: Any, methods: Any, *_: Any) -> None:
        used.append(methods)
        raise hp.HeadPruneError("enough")

    monkeypatch.setattr("headprune.app.workflow.prune_run", instead)
    error = run("prune", bert_folder, "-d", data_folder, "-k", 4, *options, code=1).stderr
    assert used == [methods]
    said = [line for line in error.splitlines() if "There are no scores yet" in line]
    assert len(said) == int(bool(methods) and "-m" not in options)
    assert all(f"scored by {' and '.join(methods)} first" in " ".join(error.split()) for _ in said)
    text = " ".join(run("prune", "--help").stdout.replace("│", " ").split())
    assert "heads are scored by gradient, which is enough for auto, or by ablation and gradient for another" in text


# -- models and data that cannot be used ------------------------------------------------------------


def damaged(bert_folder: Path, here: Path) -> tuple[Path, Any]:
    folder = here / "damaged"
    shutil.copytree(bert_folder, folder)
    return folder, tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)


@pytest.mark.parametrize("saved_by", ["transformers", "headprune"])
def test_weights_that_are_not_numbers_are_named(
    saved_by: str, bert_folder: Path, data_folder: Path, here: Path
) -> None:
    folder, model = damaged(bert_folder, here)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.key.weight[3, 5] = float("nan")
    if saved_by == "transformers":
        model.save_pretrained(folder)
    else:
        hp.checkpoint.save(model, folder, processor=tf.AutoTokenizer.from_pretrained(bert_folder), overwrite=True)
    error = run("score", folder, "-d", data_folder, code=1).stderr
    assert "1 of 1,024 values of bert.encoder.layer.1.attention.self.key.weight are NaN" in error
    assert "column" not in error


def test_infinite_weights_may_be_meant(bert_folder: Path, here: Path) -> None:
    folder, model = damaged(bert_folder, here)
    with torch.no_grad():
        model.classifier.bias[0] = -float("inf")
    model.save_pretrained(folder)
    load_model(str(folder))


@pytest.mark.parametrize("saved_by", ["transformers", "headprune"])
@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_cut_weights(saved_by: str, size: int, bert_folder: Path, data_folder: Path, here: Path) -> None:
    folder, model = damaged(bert_folder, here)
    if saved_by == "headprune":
        hp.checkpoint.save(model, folder, processor=tf.AutoTokenizer.from_pretrained(bert_folder), overwrite=True)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    error = run("score", folder, "-d", data_folder, code=1).stderr
    assert f"The weights in {folder} are damaged or cut short" in error
    assert "--task" not in error
    assert "unexpected" not in error


def test_texts_that_are_cut_are_counted(bert_folder: Path, here: Path) -> None:
    """In the terminal, in the run's document and in the report; each part by itself."""
    long = " ".join(WORDS * 3)  # 60 words, the model takes 32 tokens
    for i, (split, count, cut) in enumerate((("train", 20, 3), ("validation", 10, 0), ("test", 10, 2))):
        rows = sentences(count, i)
        for j in range(cut):
            rows[j]["text"] = f"{WORDS[2 * i + j]} {long}"
        write_jsonl(here / "data" / f"{split}.jsonl", rows)
    result = run("score", bert_folder, "-d", "data", "-m", "random", "-o", "run")
    note = (
        "Texts of more than 32 tokens were cut there (the most that the model takes): "
        "3 of 20 to score, 0 of 10 to choose, 2 of 10 to report."
    )
    assert note in " ".join(result.stderr.split())
    assert note in json.loads((here / "run" / "run.json").read_text())["notes"]
    assert note in (here / "run" / "report.md").read_text()
    parts = load_parts(DataOptions("data", max_length=16), load_model(str(bert_folder)))
    assert "Texts of more than 16 tokens were cut there (--max-length says where): 3 of 20" in parts.notes[-1]


def test_a_text_that_just_fits_is_not_cut(bert_folder: Path, here: Path) -> None:
    words = " ".join(["good"] * 29)
    rows: list[dict[str, object]] = [{"text": f"{words} {w}", "label": 1} for w in WORDS]
    write_jsonl(here / "data" / "train.jsonl", rows)
    parts = load_parts(DataOptions("data"), load_model(str(bert_folder)))
    assert max(parts.score.lengths()) == 32
    assert not any("cut there" in note for note in parts.notes)


def test_several_labels_an_example_can_be_read(here: Path) -> None:
    from headprune.app.data.cutting import hidden_labels

    class Rows:
        column_names = ("label",)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, rows: slice) -> dict[str, Any]:
            return {"label": [[0, 1], [1, 1]]}

    assert not hidden_labels(Rows())


# -- the disk ------------------------------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")


def wrapped(*_: object, **__: object) -> None:
    try:
        full()
    except OSError:
        raise RuntimeError("PytorchStreamWriter failed writing file") from None


def rust(*_: object, **__: object) -> None:
    from safetensors import SafetensorError

    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("how", [full, wrapped, rust], ids=lambda f: f.__name__)
@pytest.mark.parametrize("step", ["load_parts", "find_attention"])
def test_a_full_disk(
    how: Any, step: str, bert_folder: Path, data_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"headprune.app.workflow.scene.{step}", how)
    result = run("score", bert_folder, "-d", data_folder, "-q", "--json", code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith("headprune: No space left on the disk")
    assert "run the same command again" in line
    assert json.loads(result.stdout)["hint"].startswith("Free some")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError(errno.EPIPE, "Broken pipe")]
)
def test_a_stdout_that_takes_nothing(error: OSError, bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`> /dev/full` and `| head`: no traceback, whether the document is a result or an error."""

    def document(*_: object) -> None:
        raise error

    monkeypatch.setattr("headprune.app.console.Console.document", document)
    for command in (["inspect", bert_folder, "--json"], ["inspect", "", "--json"], ["inspect", "--json"]):
        result = runner.invoke(app, [str(a) for a in command])
        assert result.exit_code == (2 if command == ["inspect", "--json"] else 1)
        assert isinstance(result.exception, SystemExit), result.exception
        assert "unexpected" not in result.stderr


def test_memory_that_runs_out(bert_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("headprune.app.models.load_model", out)
    assert "Memory ran out. Use a smaller --batch-size" in run("inspect", bert_folder, code=1).stderr


def test_other_errors_of_the_system_say_which_file(
    bert_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere/file")

    monkeypatch.setattr("headprune.app.models.load_model", denied)
    assert "/somewhere/file cannot be read or written: Permission denied" in run("inspect", bert_folder, code=1).stderr


def test_an_unknown_error_stays_one(bert_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("headprune.app.models.load_model", broken)
    result = run("inspect", bert_folder, "--json", code=1)
    assert "ZeroDivisionError: division by zero (unexpected; add -v for the traceback)" in result.stderr
    assert json.loads(result.stdout)["error"] == "ZeroDivisionError: division by zero"


# -- documents and progress ------------------------------------------------------------------------------


def test_every_command_gives_one_document(made: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    shutil.copytree(made, here / "run")
    base = [bert_folder, "-d", data_folder, "-L", 20]
    commands: dict[str, list[Any]] = {
        "layers": ["score", *base, "--dry-run"],
        "methods": ["prune", *base, "-k", 4, "-o", "new", "--strategy", "one-shot", "--dry-run"],
        "plans": ["prune", "-k", 4, "--scores", "run", *QUICK, "--dry-run"],
        "report": ["report", "run"],
        "strategies": ["methods"],
        "model": ["inspect", bert_folder],
        "rows": ["bench", bert_folder, bert_folder, "--batch-sizes", 1, "--lengths", 8],
        "scores": ["score", *base, "-m", "random", "-o", "scored"],
        "budgets": ["prune", "-k", 4, "--scores", "run", *QUICK, "-o", "pruned"],
    }
    for key, arguments in commands.items():
        assert key in json.loads(run(*arguments, "--json").stdout), arguments
        assert not (here / "new").exists()


def test_what_a_model_prints_stays_out_of_the_document(
    bert_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_model

    def talking(*arguments: Any, **options: Any) -> Any:
        print("Hello from the model")
        return real(*arguments, **options)

    monkeypatch.setattr("headprune.app.models.load_model", talking)
    result = run("inspect", bert_folder, "--json")
    assert json.loads(result.stdout)["model"] == str(bert_folder)
    assert "Hello from the model" in result.stderr


def test_all_commands_take_the_same_flags() -> None:
    from typer.main import get_command

    command: Any = get_command(app)
    for name, one in command.commands.items():
        flags = {f for option in one.params for f in option.opts}
        assert {"--json", "--quiet", "-q", "--verbose", "-v"} <= flags, name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr("headprune.app.console.time.monotonic", lambda: now[0])
    return now


def test_progress_never_stands_without_a_time(clock: list[float]) -> None:
    """A step that takes minutes: the time left is known from the first step on, and falls while one waits."""
    from rich.progress import Progress

    from headprune.app.console import TimeLeft

    bars, column = Progress(get_time=lambda: clock[0]), TimeLeft()
    column.max_refresh = None
    bars.add_task("x", total=None)
    (task,) = bars.tasks

    def shown() -> str:
        return column.render(task).plain

    assert shown() == ""
    bars.update(task.id, completed=0, total=10, updated=clock[0])
    assert shown() == "0/10"
    clock[0] = 60.0
    bars.update(task.id, completed=1, total=10, updated=60.0)
    assert shown() == "1/10, 0:09:00 left"
    clock[0] = 100.0
    assert shown() == "1/10, 0:08:20 left"
    clock[0] = 5000.0
    assert shown() == "1/10, 0:00:00 left"
    bars.update(task.id, completed=10, total=10, updated=5000.0)
    assert shown() == "10/10, 0:00:00 left"


def test_the_bar_is_drawn_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console as RichConsole

    from headprune.app.console import Console

    console = Console()
    console.err = RichConsole(file=io.StringIO(), force_terminal=True, width=100)
    with console.track("working") as progress:
        progress(1, 3, "a note")
    drawn = console.err.file.getvalue()  # type: ignore[attr-defined]
    assert "1/3, 0:00:00 left" in drawn
    assert "a note" in drawn
    assert "-:--" not in drawn


def test_a_layer_is_shown_in_a_line(bert_folder: Path) -> None:
    from headprune.app.models import dummy_input

    loaded = load_model(str(bert_folder))
    for layer in hp.find_attention(loaded.model, dummy_input(loaded, 2, 8)):
        assert repr(layer) == f"AttentionLayer(L{layer.index} {layer.name!r}: encoder, 4 heads of 8)"
    long = hp.AttentionLayer("a.very.long.name." * 20, 104, "decoder", 128, 16, 256, prunable=False)
    assert len(repr(long)) <= 150
    assert "16 key/value, not prunable" in repr(long)


def test_a_perplexity_that_cannot_be_told_is_refused_before_the_long_work(
    llama_folder: Path, data_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of the model's own that is none of its logits, and is added up over texts."""
    forward = tf.LlamaForCausalLM.forward

    def summed(self: Any, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        out = forward(self, input_ids=input_ids, **more)
        if labels is not None:
            each = F.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="none")
            out.loss = ((1 - (-each).exp()) ** 2 * each).sum()
        return out

    def long(*_: object, **__: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", summed)
    for step in ("scoring.score", "pruning.evaluate", "targets.arrange"):
        monkeypatch.setattr(f"headprune.app.workflow.{step}", long)
    for more in ((), ("--dry-run",)):
        error = run("prune", llama_folder, "-d", data_folder, "--keep", 4, *more, code=1).stderr
        assert "cannot be measured: its own loss is not the cross-entropy of its logits" in " ".join(error.split())


def test_a_run_that_does_not_say_what_it_scored(made: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    for damage in ({}, {"options": None}, {"options": {"seed": 0}}):
        folder = here / "reports" / "x-1"
        shutil.copytree(made, folder, dirs_exist_ok=True)
        document = json.loads((folder / "run.json").read_text())
        del document["options"]
        (folder / "run.json").write_text(json.dumps({**document, **damage}))
        error = run("prune", bert_folder, "-d", data_folder, "-k", 4, code=1).stderr
        assert "run.json is damaged: it does not say which model was scored" in " ".join(error.split())
        assert "unexpected" not in error
