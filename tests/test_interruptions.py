"""Runs that are killed, told to stop, out of disk, or two at once: nothing is lost or mixed, and the same command goes on."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import headprune as hp
from headprune.app.folders import Folder, claimed
from headprune.app.runs import RunFolder, choose_folder
from headprune.jsonio import read_json
from headprune.locks import BusyError, is_taken, locked
from tests.support.commands import run
from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.interrupted import Processes
from tests.support.zoo import randomise

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
PRUNE = ["prune", "m", "-d", "d", "-k", "2", "-k", "1", "-m", "gradient"]
QUICK = ["prune", "m", "-d", "d", "-k", "2", "-s", "one-shot", "-m", "weight-norm"]
SCORE = ["score", "m", "-d", "d", "-m", "weight-norm"]
COSTS = {
    "seconds", "passes", "latency", "time", "generation", "energy", "environment", "when", "commands", "checksum", "checksums",
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model ``m`` of one layer with four heads, and data ``d``."""
    folder = tmp_path_factory.mktemp("tiny")
    config = tf.BertConfig(**common(num_hidden_layers=1, hidden_size=16, intermediate_size=8))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(folder / "m")
    tokenizer().save_pretrained(folder / "m")
    for split, count, seed in (("train", 12, 1), ("validation", 8, 2), ("test", 10, 3)):
        write_jsonl(folder / "d" / f"{split}.jsonl", sentences(count, seed))
    return folder


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in; times are measured twice and not for a second."""
    from headprune import latency

    shutil.copytree(tiny, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    monkeypatch.setattr(latency, "bench", partial(latency.bench, min_runs=2, min_seconds=0.0))
    return tmp_path / "w"


def without_costs(value: Any) -> Any:
    """A document without what it says of time and effort."""
    if isinstance(value, dict):
        return {k: without_costs(v) for k, v in value.items() if k not in COSTS}
    if isinstance(value, list):
        return [without_costs(v) for v in value if not (isinstance(v, str) and "forward passes" in v)]
    return value


def results_of(folder: Path) -> dict[str, Any]:
    """All that a run gave: documents, bytes of checkpoints, names of the rest."""
    found: dict[str, Any] = {}
    for path in (p for p in sorted(folder.rglob("*")) if p.is_file()):
        name = str(path.relative_to(folder))
        document = path.suffix == ".json" and not name.startswith("pruned")
        whole = name.startswith("pruned") and path.name != "README.md"  # the card says times
        content = path.read_bytes() if whole else None
        found[name] = without_costs(json.loads(path.read_text())) if document else content
    return found


@pytest.fixture(scope="module")
def undisturbed(processes: Processes, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one whole run of `PRUNE` gives."""
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("whole") / "w")
    (done,) = processes.run({"cwd": str(folder), "arguments": PRUNE})
    assert done["status"] == 0, done["stderr"]
    return results_of(folder / "reports" / "m-1")


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def interrupted(command: list[str], monkeypatch: pytest.MonkeyPatch, where: str = "headprune.latency.bench") -> str:
    """What a command says that is told to stop when models are timed, after all other work."""
    with monkeypatch.context() as patch:
        patch.setattr(where, interrupt)
        return " ".join(run(*command, code=130).stderr.split())


# -- killed ------------------------------------------------------------------------------------


def test_killed_again_and_again(processes: Processes, here: Path, undisturbed: dict[str, Any]) -> None:
    """By SIGKILL, SIGTERM and Ctrl-C in turn; every rerun comes further, and at last all is as in one run."""
    job = {
        "cwd": str(here),
        "arguments": PRUNE,
        "stops": [4, 10, 12, 16, 45],
        "signals": [KILL, TERM, INT],
        "until": 12,
    }
    *stopped, last = processes.run(job)
    assert last["status"] == 0, last["stderr"]
    assert len(stopped) > 3
    assert {d["status"] for d in stopped} == {-KILL, 128 + TERM, 130}
    assert any("the same command continues there" in " ".join(d["stderr"].split()) for d in stopped)
    assert any("continuing with" in d["stderr"] for d in stopped)
    assert results_of(here / "reports" / "m-1") == undisturbed
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]


@pytest.mark.slow
def test_killed_at_every_rename_of_the_publication(
    processes: Processes, tiny: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Over an older run. Up to the first of them that is whole, then the new one is, whoever looks first."""

    def commit(run: dict[str, Any]) -> int:
        return next(n for n, name in enumerate(run["targets"], 1) if name.endswith(".ready"))

    # A folder with all of `PRUNE` computed, so that little is left to do, over what looks like an older run.
    here = shutil.copytree(tiny, tmp_path / "w")
    (whole,) = processes.run({"cwd": str(shutil.copytree(tiny, tmp_path / "count")), "arguments": PRUNE})
    (left,) = processes.run({"cwd": str(here), "arguments": PRUNE, "stop": commit(whole) - 8, "signal": KILL})
    assert left["status"] == -KILL
    for name in ("report.md", "plan-3.json"):
        (here / "reports" / "m-1" / name).write_text("older")
    command = [*PRUNE, "-o", "reports/m-1", "--overwrite"]
    (count,) = processes.run({"cwd": str(shutil.copytree(here, tmp_path / "n")), "arguments": command})
    first, last = commit(count), count["renames"]
    assert last - first > 8  # the documents, two models, the journal
    for stop in range(first - 2, last + 1):
        one = shutil.copytree(here, tmp_path / f"at-{stop}")
        (killed,) = processes.run({"cwd": str(one), "arguments": command, "stop": stop, "signal": KILL})
        assert killed["status"] == -KILL, (stop, killed["stderr"])
        folder = one / "reports" / "m-1"
        if stop <= first:
            assert (folder / "report.md").read_text() == "older"
        else:
            assert RunFolder(folder).read_metrics() is not None
        assert (folder / "plan-3.json").exists() == (stop <= first)
        (again,) = processes.run({"cwd": str(one), "arguments": command})
        assert again["status"] == 0, again["stderr"]
        assert results_of(folder) == undisturbed


def test_the_same_command_goes_on_and_another_goes_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "m-1/.unfinished: the same command continues there" in interrupted(QUICK, monkeypatch)
    assert not (here / "reports" / "m-1" / "run.json").exists()
    interrupted([*QUICK, "--no-repair"], monkeypatch)
    assert sorted(p.name for p in (here / "reports").iterdir()) == ["m-1", "m-2"]
    document = json.loads(run(*QUICK, "-q", "--json").stdout)
    assert document["folder"] == "reports/m-1"
    assert document["budgets"][0]["repair"]
    assert json.loads(run(*QUICK, "--no-repair", "--json").stdout)["folder"] == "reports/m-2"
    assert not list((here / "reports").rglob(".*"))


def test_a_wrong_command_leaves_its_scores_to_the_next(here: Path) -> None:
    command = ["prune", "m", "-d", "d", "-k", "2", "-m", "gradient", "-s", "one-shot"]
    assert "out of reach" in run(*command, "--protect", "L0", code=1).stderr
    assert "scoring by gradient" not in run(*command).stderr
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]


@pytest.mark.parametrize("option", [(), ("--no-resume",)])
def test_what_is_damaged_or_of_other_data_is_made_again(
    option: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(QUICK, monkeypatch)
    (work,) = (here / "reports" / "m-1" / ".unfinished").glob("prune-*")
    tokens = work / "content" / "pruned-2" / "tokenizer.json"
    whole = tokens.read_text()
    for path in (work / "content" / "pruned-2" / "model.safetensors", next(work.glob("dense-*.part"))):
        path.write_bytes(path.read_bytes()[:100])
    tokens.write_text(whole.replace('"good"', '"goof"', 1))
    said = run(*QUICK, *option).stderr
    assert "repairing" in said
    assert ("continuing with" in said) == (not option)
    hp.load(here / "reports" / "m-1" / "pruned-2")
    assert (here / "reports" / "m-1" / "pruned-2" / "tokenizer.json").read_text() == whole
    interrupted([*QUICK, "-o", "r"], monkeypatch)
    write_jsonl(here / "d" / "test.jsonl", sentences(14, 9))
    assert "is not used" in run(*QUICK, "-o", "r").stderr
    assert read_json(here / "r" / "metrics.json", "metrics")["dense"]["examples"] == 14


def other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({k: 3 * v for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_result_is_not_shown_again_for_another_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed just after the end, and typed again after another training: the old scores were shown as if they were new ones."""
    with monkeypatch.context() as patch:  # SIGKILL comes before the notes are removed
        patch.setattr("headprune.app.folders.Folder.clear_unfinished", lambda self: None)
        run(*SCORE)
        run(*SCORE, "-o", "r", "--overwrite")
        again = run(*SCORE)
        assert "reports/m-1" in again.stdout
        assert "scoring by" not in again.stderr
    before = (here / "r" / "scores.json").read_bytes()
    other_weights(here / "m")
    assert "reports/m-1 holds what this command made before" in " ".join(run(*SCORE, code=1).stderr.split())
    assert "reports/m-2" in run(*SCORE).stdout
    run(*SCORE, "-o", "r", "--overwrite")
    assert (here / "r" / "scores.json").read_bytes() != before


def test_who_reads_the_first_line_only_interrupts_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headprune score … | head -1`: notes of an unfinished run stayed, and `prune` took another folder."""

    def closed(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("headprune.cli.tables.print_scores", closed)
    run(*SCORE, code=1)
    assert not list((here / "reports").rglob(".*"))
    assert "pruned-2" in " ".join(run("prune", "-k", "2", "-s", "one-shot", "--no-repair").stdout.split())
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]


def test_the_demo_leaves_the_old_report_until_there_is_another(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headprune.app import demo

    monkeypatch.setattr(demo, "prepare", lambda *_: (here / "m", here / "d", 0.99))
    monkeypatch.setattr(demo, "KEEP", ("2",))
    old = here / "reports" / "demo"
    old.mkdir(parents=True)
    for name in ("report.md", "plan-18.json", "importance.png", "scores.json"):
        (old / name).write_text("committed")
    interrupted(["demo"], monkeypatch)
    assert [p.read_text() for p in old.iterdir() if p.is_file()] == ["committed"] * 4
    run("demo")
    assert "committed" not in (old / "report.md").read_text()
    assert not (old / "plan-18.json").exists()
    assert "has been run" in run("demo").stdout


# -- the disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device", "x"), RuntimeError("no such colour")]
)
def test_a_full_disk_leaves_the_old_report(error: Exception, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new results were put in its place without their report, which the disk had no room for. Any other error costs the report alone."""
    run(*QUICK, "-o", "r")
    before = {p.name: p.read_bytes() for p in (here / "r").iterdir() if p.is_file()}

    def failing(*_: Any) -> None:
        raise error

    again = [*QUICK, "-o", "r", "--overwrite", "-k", "3"]
    with monkeypatch.context() as patch:
        patch.setattr("headprune.app.report.figures.trade_off", failing)
        said = " ".join(run(*again, code=1).stderr.split())
    if isinstance(error, OSError):
        assert "No space left on the disk" in said
        assert {p.name: p.read_bytes() for p in (here / "r").iterdir() if p.is_file()} == before
        assert "continuing with" in run(*again).stderr
    else:
        assert "The report could not be written (RuntimeError: no such colour); all else is in r." in said
        assert not list((here / "r").rglob(".*"))
        run("report", here / "r")
    assert (here / "r" / "plan-3.json").exists()
    assert (here / "r" / "report.md").is_file()


def test_documents_of_two_runs_make_no_report(here: Path) -> None:
    """Copied from one folder to another, each whole: scores of another model gave a report, and of other data a prune."""
    run(*SCORE, "-o", "a")
    other_weights(here / "m")
    run(*SCORE, "-o", "b")
    for name in ("scores.json", "heads.json"):
        kept = (here / "a" / name).read_bytes()
        shutil.copy(here / "b" / name, here / "a" / name)
        said = " ".join(run("report", "a", code=1).stderr.split())
        assert f"a/{name} is another run's: a/run.json was not written with it." in said
        (here / "a" / name).write_bytes(kept)
    (here / "a" / "run.json").write_bytes((here / "b" / "run.json").read_bytes())
    assert "another run's" in " ".join(run("prune", "-k", "2", "--scores", "a", code=1).stderr.split())


def test_what_is_not_a_runs_own_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r")
    (folder.path / "pruned-4").mkdir(parents=True)
    for name in ("notes.txt", "plan-7.json", "run.json", "pruned-4/old"):
        (folder.path / name).write_text("old")
    with claimed(lambda: folder, "k", "c", say=print):
        content = folder.unfinished / "content"
        (content / "pruned-4").mkdir(parents=True)
        for name in ("run.json", "pruned-4/new", ".half-written", "pruned-4/.README.md.7.tmp"):
            (content / name).write_text("new")
        folder.publish(content, ["plan*.json", "pruned-*", "run.json"])
        assert folder.done_by("k")
    found = {str(p.relative_to(folder.path)): p.read_text() for p in folder.path.rglob("*") if p.is_file()}
    assert found == {"notes.txt": "old", "run.json": "new", "pruned-4/new": "new"}


# -- two at once -------------------------------------------------------------------------------------


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Another process that is writing ``tmp_path/r``."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            with Folder(tmp_path / "r").locked("headprune prune --keep 4"):
                os.write(told, b"x")
                time.sleep(600)
        finally:
            os._exit(0)
    os.read(ready, 1)
    yield pid
    kill(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, KILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_a_second_command_is_refused_and_says_who_is_there(holder: int, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    commands = (
        ["score", tiny / "m", "-d", tiny / "d", "-o", folder],
        ["prune", tiny / "m", "-d", tiny / "d", "-k", 4, "-o", folder, "--overwrite"],
        ["demo", "-o", folder],
    )
    for command in commands:
        (line,) = [x for x in run(*command, code=1).stderr.splitlines() if x.startswith("headprune: ")]
        assert f"process {holder} (`headprune prune --keep 4`, since 20" in line
    assert [p.name for p in folder.iterdir()] == [".lock"]
    shutil.copytree(Path(__file__).parent.parent / "reports" / "digits", folder, dirs_exist_ok=True)
    assert f"process {holder}" in run("report", folder, code=1).stderr
    kill(holder)
    assert (folder / ".lock").exists()  # stale now
    run("report", folder)
    assert not (folder / ".lock").exists()


def test_without_o_two_runs_never_take_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pids = []
    for n in range(6):
        pid = os.fork()
        if not pid:
            try:
                choose = partial(choose_folder, None, "m", False, str(n))
                with claimed(choose, str(n), "x", say=lambda _: None) as folder:
                    (tmp_path / f"took-{n}").write_text(folder.path.name)
                    time.sleep(0.3)
                    (folder.path / "run.json").write_text("{}")
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    assert sorted(p.read_text() for p in tmp_path.glob("took-*")) == [f"m-{n}" for n in range(1, 7)]


def test_what_another_process_writes_is_not_replaced(
    holder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuning in a run folder lost its training to a new run in its place."""
    folder = RunFolder(tmp_path)
    assert "pruned-*" in folder.parts
    content = folder.unfinished / "content"
    content.mkdir(parents=True)
    (content / "scores.json").write_text("{}")
    monkeypatch.setattr(RunFolder, "parts", ("r", "*.json"))
    with pytest.raises(BusyError, match=r"Another process is writing .*r, which a new result in"):
        folder.publish(content, folder.parts)
    with pytest.raises(BusyError, match="Another process"), claimed(lambda: folder, "key", "score", say=print):
        pytest.fail("it is known before the long work")
    assert (content / "scores.json").exists()
    kill(holder)
    folder.publish(content, folder.parts)
    assert (tmp_path / "scores.json").exists()
    assert not (tmp_path / "r").exists()


def test_where_there_are_no_locks_a_dead_process_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the lock then; on another machine's word, since nobody can look there."""
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path, dead = tmp_path / ".lock", os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    path.write_text(f"{os.getppid()}\nelsewhere\n")
    assert is_taken(path)
    with pytest.raises(BusyError, match=r"if it is surely gone, remove"), locked(path, "The folder", "x"):
        pass
    import platform

    path.write_text(f"{dead}\n{platform.node()}\n")
    with locked(path, "The folder", "x"):
        assert path.exists()
    assert not path.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(hp.HeadPruneError, match="cannot be written: Not a directory"),
        locked(tmp_path / "file" / "sub" / ".lock", "The folder", "x"),
    ):
        pass
