"""Every row of `tests.support.bad_inputs`: one line that says what is wrong and where, the exit code, and nothing written.

Then models, data, disks and processes that cannot be used: what is said, and which file it is; and how commands end.
"""

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import safetensors
import torch
import torch.nn.functional as F
import transformers as tf
from typer.testing import CliRunner

import headprune as hp
from headprune import cli
from tests.support.bad_files import DATA, MODELS, PYTHON, SAVED, Call
from tests.support.bad_inputs import DOCUMENTS, FILES, GONE, LATER, TYPED, Row
from tests.support.commands import all_options, invoke, python, run, stderr_of
from tests.support.documents import opened, write_run
from tests.support.folders import WORDS, sentences, write_jsonl
from tests.support.zoo import bert

pytestmark = pytest.mark.usefixtures("brief", "here")


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def put(folder: Path, make: dict[str, Any]) -> None:
    """Change a folder as a row says."""
    for name, given in make.items():
        path = folder / name
        if given is None:
            path.unlink(missing_ok=True)
        elif isinstance(given, tuple):
            where, value = given
            document = opened(path)
            inner = document
            for step in where[:-1]:
                inner = inner[step]
            if value is GONE:
                del inner[where[-1]]
            else:
                inner[where[-1]] = value
            path.write_text(json.dumps(document))
        elif isinstance(given, int | bytes):
            path.write_bytes(path.read_bytes()[:given] if isinstance(given, int) else given)
        else:
            path.write_text(given)


def check(row: Row, here: Path, again: bool = False, **places: Path) -> None:
    """Try a row; ``again`` for a JSON document: what the first one leaves must not change what is said."""
    if "gguf" in row.typed:
        pytest.importorskip("gguf")  # without it, that is what is said first
    before = contents(here)
    typed = [a.format(here=here, **places) if "{" in a else a for a in row.typed]
    result = invoke(*typed)
    assert result.exit_code == row.code, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert not result.stdout.strip()
    lines = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
    if row.code == 1 or lines:
        (said,) = lines
        assert result.stderr.rstrip().endswith(said)  # it is the last, and has no second line
        assert "unexpected" not in said, said
        assert len(said) < 1000 + sum(map(len, row.typed))
    else:
        said = " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())
        assert "Error" in said
    assert said.isprintable()
    assert re.search(row.says, said), said
    assert contents(here) == before
    if again:
        result = invoke(typed[0], "--json", *typed[1:])
        assert result.exit_code == row.code
        document = json.loads(result.stdout)
        assert set(document) == {"error", "hint"}
        assert document["error"]
        assert contents(here) == before


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights must not be loaded."""
    for place in ("transformers.PreTrainedModel.from_pretrained", "headprune.checkpoint.loading._fill"):
        monkeypatch.setattr(place, Mock(side_effect=AssertionError("weights were loaded")))


def named(value: Any) -> str:
    return value.name.encode("ascii", "replace").decode()[:90] if isinstance(value, Row) else ""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders that are not what is asked for."""
    root = tmp_path_factory.mktemp("files")
    (root / "nothing").mkdir()
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for split in ("train", "validation", "test"):
        write_jsonl(root / "same" / f"{split}.jsonl", [{"text": "good film", "label": 1}] * 8)
    write_jsonl(root / "few.jsonl", sentences(2, 0))
    return root


@pytest.mark.parametrize("row", TYPED, ids=named)
def test_what_is_typed(row: Row, here: Path, files: Path, bert_folder: Path, data_folder: Path, unloaded: None) -> None:
    check(row, here, again=True, bert=bert_folder, data=data_folder, files=files)


@pytest.mark.parametrize("row", LATER, ids=named)
def test_what_only_the_model_tells(
    row: Row, here: Path, files: Path, bert_folder: Path, llama_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for step in ("app.workflow.score", "app.workflow.scene.evaluate", "plan_search.arrange"):
        monkeypatch.setattr(f"headprune.{step}", Mock(side_effect=AssertionError("the long work began")))
    check(row, here, bert=bert_folder, llama=llama_folder, data=data_folder, files=files)


def test_every_option_is_in_the_table() -> None:
    """A new option gets a row, or a reason here."""
    any_text = {
        "--subset", "--split", "--choose-split", "--report-split", "--label-column", "--teacher", "--train-limit", "--text"
    }  # fmt: skip
    tried = {a.partition("=")[0] for row in [*TYPED, *LATER] for a in row.typed if a.startswith("-")}
    for name, flags, takes_value in all_options():
        assert not takes_value or (tried | any_text) & flags, (name, flags)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's documents, without a run."""
    return write_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def pruned_folder(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path) -> Path:
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    example = {"input_ids": torch.arange(10, 20)[None], "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    hp.prune(model, {"L0": [0, 1]}, example)
    tokenizer = tf.AutoTokenizer.from_pretrained(bert_folder)
    about = {"task": "sequence-classification", "from": str(bert_folder)}
    return hp.checkpoint.save(model, tmp_path_factory.mktemp("saved") / "pruned-6", processor=tokenizer, about=about)


def quick(row: Row) -> bool:
    """One of each kind."""
    return all(isinstance(given, int) for given in row.make.values())


STARTS = {"run_folder": DOCUMENTS, "": DATA, "bert_folder": MODELS, "pruned_folder": SAVED}
CHANGED = [
    pytest.param(start, row, id=named(row), marks=[] if start == "run_folder" or quick(row) else pytest.mark.slow)
    for start, table in STARTS.items()
    for row in table
]


@pytest.mark.parametrize(("start", "row"), CHANGED)
def test_what_lies_in_a_folder(
    start: str, row: Row, here: Path, bert_folder: Path, llama_folder: Path, data_folder: Path,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run's documents, data, a model or what headprune saved, with something changed."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here.parent / "cache")
    made = here / "made"
    if start:
        shutil.copytree(request.getfixturevalue(start), made)
    else:
        made.mkdir()
    if start == "run_folder":
        request.getfixturevalue("unloaded")
    put(made, row.make)
    check(row, here, made=made, pruned=made, bert=bert_folder, llama=llama_folder, data=data_folder)


def test_these_documents_are_right_as_they_are(here: Path, run_folder: Path) -> None:
    """Else every change to them would be refused for another reason."""
    shutil.copytree(run_folder, here / "made")
    assert invoke("report", "made").exit_code == 0
    assert len(hp.HeadScores.load("made/scores.json").flat()) == 4


@pytest.mark.parametrize(("name", "call", "says"), PYTHON, ids=[name for name, *_ in PYTHON])
def test_python(name: str, call: Call, says: str, here: Path) -> None:
    if "gguf" in name:
        pytest.importorskip("gguf")
    model, example = bert()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(hp.HeadPruneError, match=says) as error:
        call(hp, model, example)
    assert "\n" not in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not contents(here)


# -- models and data that cannot be used ------------------------------------------------------------


def damaged(bert_folder: Path) -> tuple[Path, Any]:
    folder = Path("damaged")
    shutil.copytree(bert_folder, folder)
    return folder, tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)


@pytest.mark.parametrize("saved_by", ["transformers", "headprune"])
def test_weights_that_are_not_numbers_are_named(saved_by: str, bert_folder: Path, data_folder: Path) -> None:
    folder, model = damaged(bert_folder)
    model.bert.encoder.layer[1].attention.self.key.weight.data[3, 5] = float("nan")
    if saved_by == "transformers":
        model.save_pretrained(folder)
    else:
        hp.checkpoint.save(model, folder, processor=tf.AutoTokenizer.from_pretrained(bert_folder), overwrite=True)
    error = stderr_of("score", folder, "-d", data_folder, code=1)
    assert "1 of 1,024 values of bert.encoder.layer.1.attention.self.key.weight are NaN" in error
    assert "column" not in error


def test_a_run_folder_stands_for_the_pruned_model_in_it(bert_folder: Path, here: Path) -> None:
    run_folder, model = here / "run", tf.AutoModelForSequenceClassification.from_pretrained(bert_folder)
    run_folder.mkdir()
    (run_folder / "run.json").write_text("{}")
    assert "holds no pruned model" in stderr_of("inspect", run_folder, code=1)
    hp.save(model, run_folder / "pruned-7")
    assert "the model in it that was pruned already, pruned-7, is taken" in stderr_of("inspect", run_folder)
    shutil.copytree(run_folder / "pruned-7", run_folder / "pruned-10")
    assert "2 pruned models (pruned-7, pruned-10)" in stderr_of("export", run_folder, "--to", "gguf", code=1)


def test_infinite_weights_may_be_meant(bert_folder: Path) -> None:
    folder, model = damaged(bert_folder)
    model.classifier.bias.data[0] = -float("inf")
    model.save_pretrained(folder)
    run("inspect", folder)


def test_texts_that_are_cut_are_counted(bert_folder: Path, here: Path) -> None:
    """In the terminal, in the run's document and in the report; each part by itself."""
    long = " ".join(WORDS * 3)  # 60 words, the model takes 32 tokens
    for i, (split, count, cut) in enumerate((("train", 20, 3), ("validation", 10, 0), ("test", 10, 2))):
        rows = sentences(count, i)
        for j in range(cut):
            rows[j]["text"] = f"{WORDS[2 * i + j]} {long}"
        write_jsonl(here / "data" / f"{split}.jsonl", rows)
    result = run("score", bert_folder, "-d", "data", "-m", "random", "-o", "run")
    parts = "3 of 20 to score, 0 of 10 to choose, 2 of 10 to report"
    note = f"Texts of more than 32 tokens were cut there (the most that the model takes): {parts}."
    assert note in " ".join(result.stderr.split())
    assert note in json.loads((here / "run" / "run.json").read_text())["notes"]
    assert note in (here / "run" / "report.md").read_text()
    said = stderr_of("score", bert_folder, "-d", "data", "-m", "random", "--max-length", 16, "-o", "cut")
    assert "Texts of more than 16 tokens were cut there (--max-length says where): 3 of 20" in said
    words = " ".join(["good"] * 29)
    just_fits: list[dict[str, object]] = [{"text": f"{words} {w}", "label": 1} for w in WORDS]
    data = write_jsonl(here / "fits.jsonl", just_fits)
    assert "cut there" not in stderr_of("score", bert_folder, "-d", data, "-m", "random", "-o", "fits")


# -- the disk ------------------------------------------------------------------------------------------


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/file")
WRAPPED = RuntimeError("PytorchStreamWriter failed writing file")
WRAPPED.__context__ = FULL


@pytest.mark.parametrize("error", [FULL, BrokenPipeError(errno.EPIPE, "Broken pipe")], ids=str)
def test_a_stdout_that_takes_nothing(error: OSError, bert_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`> /dev/full` and `| head`: no traceback, whether the document is a result or an error."""

    monkeypatch.setattr("headprune.cli.terminal.Console.document", Mock(side_effect=error))
    for command in (["inspect", bert_folder, "--json"], ["inspect", "", "--json"], ["inspect", "--json"]):
        result = invoke(*map(str, command))
        assert result.exit_code == (2 if command == ["inspect", "--json"] else 1)
        assert isinstance(result.exception, SystemExit), result.exception
        assert "unexpected" not in result.stderr


def test_a_link_that_leads_nowhere(bert_folder: Path, data_folder: Path, here: Path) -> None:
    """It was said to exist; as a place to write to it is neither there nor can it be made."""
    link = here / "results"
    link.symlink_to(here / "disk" / "results")
    for place in (link, link / "run"):
        for command in (["score", bert_folder, "-d", data_folder], ["export", bert_folder, "--to", "stock"]):
            said = stderr_of(*command, "-o", place, code=1)
            assert f"{link} is a link to {here / 'disk' / 'results'}, which is not there." in said
    with pytest.raises(hp.HeadPruneError, match="is a link to"):
        hp.save(bert()[0], link)
    assert link.is_symlink()
    assert list(here.iterdir()) == [link]


ROOM, LARGER = "No space left on the disk", "larger than this process may write"


@pytest.mark.parametrize(("error", "says"), [
    (FULL, ROOM), (WRAPPED, ROOM), (safetensors.SafetensorError("I/O error: No space left on device (os error 28)"), ROOM),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 248704 vs 248592"), ROOM),  # torch.save, given a path
    # safetensors' and NumPy's errors have no number: they were told as unexpected
    (RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), ROOM),
    (OSError("10240 requested and 8320 written"), ROOM),
    (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), LARGER),
    (OSError(errno.EFBIG, "File too large", "a.gguf"), f"{LARGER} (a.gguf)"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:115] DefaultCPUAllocator: can't allocate memory"), "Memory ran out. Use a smaller --batch-size"),
    (PermissionError(errno.EACCES, "Permission denied", "/somewhere/file"), "/somewhere/file cannot be read or written: Permission denied"),
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero (unexpected; add -v for the traceback)"),
], ids=str)  # fmt: skip
def test_errors_of_the_machine_and_unknown_ones(error: Exception, says: str) -> None:
    with patch("headprune.app.models.load_model", side_effect=error):
        result = run("inspect", "m", "-q", "--json", code=1)
    (line,) = result.stderr.splitlines()
    assert says in line
    told = json.loads(result.stdout)
    assert told["error"] in line
    assert ("run the same command again" in line and told["hint"].startswith("Free some")) == (says == ROOM)


def test_an_unknown_perplexity_is_refused(llama_folder: Path, data_folder: Path, monkeypatch: Any) -> None:
    """A loss of the model's own that is none of its logits, and is added up over texts."""
    forward = tf.LlamaForCausalLM.forward

    def summed(self: Any, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        out = forward(self, input_ids=input_ids, **more)
        if labels is not None:
            each = F.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:], reduction="none")
            out.loss = ((1 - (-each).exp()) ** 2 * each).sum()
        return out

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", summed)
    for step in ("workflow.score", "workflow.scene.evaluate", "workflow.search.arrange"):
        monkeypatch.setattr(f"headprune.app.{step}", Mock(side_effect=AssertionError("the long work began")))
    for more in ((), ("--dry-run",)):
        error = stderr_of("prune", llama_folder, "-d", data_folder, "--keep", 4, *more, code=1)
        assert "cannot be measured: its own loss is not the cross-entropy of its logits" in " ".join(error.split())


@pytest.mark.parametrize("typed", [
    "inspect NAME", "score NAME -d d", "score bert -d NAME", "score bert -d d -o NAME", "export bert --to stock -o NAME",
])  # fmt: skip
def test_a_name_that_is_no_text_is_refused_before_the_work(typed: str, bert_folder: Path, data_folder: Path) -> None:
    """A run into such a folder ended at the moment of saving."""
    name = os.fsdecode(b"n\xff")
    Path(name).mkdir()
    places = {"NAME": name, "bert": str(bert_folder), "d": str(data_folder)}
    line = stderr_of(*(places.get(word, word) for word in typed.split()), code=1)
    assert "is not UTF-8" in line
    assert "unexpected" not in line
    assert not list(Path(name).iterdir())


@pytest.mark.parametrize(("error", "message"), [
    (PermissionError(errno.EACCES, "Permission denied", "/cache/text"), "/cache/text cannot be read or written: Permission denied."),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on the disk"),
])  # fmt: skip
def test_the_cache_of_data_is_not_the_data(error: OSError, message: str, bert_folder: Path, data_folder: Path) -> None:
    with patch("datasets.load_dataset", side_effect=error):
        said = stderr_of("score", bert_folder, "-d", data_folder, "-m", "random", code=1)
    assert message in said
    assert "HF_HOME" in said
    assert "Check the files" not in said


# -- the process's own surroundings -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "environment", "code", "says"), [
    ("inspect ./gone", {"PYTHONOPTIMIZE": "2"}, 1, "This Python drops docstrings"),  # not even `headprune methods` ran
    ("score ./gone 2>/dev/full", {}, 1, "headprune: No dataset was given"),  # said on stdout
    ("score ./gone >/dev/full 2>/dev/full", {}, 1, ""),  # the code alone says it
    ("score --json >&-", {}, 2, "headprune: Missing argument"),
])  # fmt: skip
def test_odd_processes(typed: str, environment: dict[str, str], code: int, says: str) -> None:
    done = subprocess.run(
        f"exec {sys.executable} -m headprune {typed}", shell=True, capture_output=True, text=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in said) == (code, False), said
    assert says in said


def test_notebooks_and_libraries_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook `!headprune` inherits the name of a backend, which stopped every picture; and torchao, which transformers imports, warns."""
    monkeypatch.setenv("MPLBACKEND", "module://of_a_notebook.inline")
    run("methods")
    assert "MPLBACKEND" not in os.environ
    assert not any(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in ("torchao", "torch.utils._pytree"))


# -- how commands end: signals while they clean up, outputs that take nothing or not every letter ----------------

SLOW_TO_CLEAN_UP = """
import os, signal, sys, time
from headprune import cli
def work():
    try:
        os.kill(os.getpid(), {first})
        time.sleep(9)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("clean")
cli.session.run(work)
"""
LOST = """
import os, signal, time
from headprune import cli
class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def work():
    Thing()
    time.sleep(9)
    print("never")
cli.session.run(work)
"""

EARLY = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from headprune.cli import main
main()
"""

SAYS_SOMETHING = """
import sys
from headprune import cli
def work():
    print("scoring …", file=sys.stderr)
    print("done ±")
cli.session.run(work)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGXCPU])
def test_a_second_signal_does_not_stop_the_cleaning_up(first: signal.Signals) -> None:
    """`headprune export` left `.NAME.new` and `.NAME.lock` behind; and whatever the signal was, the status was that of Ctrl-C."""
    done = python("-c", SLOW_TO_CLEAN_UP.format(first=int(first)))
    assert (done.returncode, done.stdout, done.stderr) == (128 + first, "clean\n", "")


def test_a_signal_that_python_drops_is_sent_again() -> None:
    """In a destructor or a weak reference's callback, as torch has many: a fine-tuning went on to its end after Ctrl-C."""
    done = python("-c", LOST)
    assert (done.returncode, done.stdout) == (130, "")


def test_ctrl_c_while_the_command_is_loaded() -> None:
    """In the first third of a second it ended in a traceback."""
    done = python("-c", EARLY)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_an_output_that_is_full() -> None:
    """`headprune --version > /dev/full` ended in a traceback; a log on a full disk ended a run that had room for its results."""
    with open("/dev/full", "w") as full:
        for command in (["-m", "headprune", "--version"], ["-c", SAYS_SOMETHING]):
            done = python(*command, stdout=full)
            assert done.returncode == 1
            said = "headprune: What this command prints could not be written to stdout: No space left on device."
            assert done.stderr.splitlines()[-1].startswith(said)
        assert python("-c", SAYS_SOMETHING, stderr=full).stdout == "done ±\n"


def test_letters_that_an_encoding_has_not() -> None:
    """In the C locale, and on Windows behind a pipe, a run that had done its work ended with a UnicodeEncodeError."""
    done = python("-c", SAYS_SOMETHING, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "done ?\n")
    runners = (CliRunner(charset=charset) for charset in ("ascii", "utf-8"))
    ascii_only, any_letter = (runner.invoke(cli.app, ["methods", "--json"]) for runner in runners)
    assert ascii_only.stdout.isascii()
    assert not any_letter.stdout.isascii()
    assert json.loads(ascii_only.stdout) == json.loads(any_letter.stdout)


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed while a shell was in it: `score` told it as unexpected."""
    monkeypatch.setattr("headprune.app.models.load_model", lambda *_, **__: Path("reports").absolute())
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    try:
        assert "The current folder is gone" in stderr_of("inspect", "m", code=1)
    finally:
        tmp_path.mkdir()
