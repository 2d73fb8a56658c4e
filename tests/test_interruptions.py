"""Runs that are killed, or told to stop, or that fail in their last second: nothing is lost, and the same command goes on."""

import errno
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import headprune as hp
from tests.support.commands import run, stderr_of
from tests.support.folders import sentences, tiny_world, write_jsonl
from tests.support.interrupted import Processes, without_costs

pytestmark = pytest.mark.slow
KILL, TERM = signal.SIGKILL, signal.SIGTERM


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model ``m`` of one layer with four heads, and data ``d``."""
    return tiny_world(tmp_path_factory.mktemp("tiny"), (12, 8, 10), num_hidden_layers=1)


def copy(tiny: Path, folder: Path) -> Path:
    """The model and the data in a folder of a test's own, so that all paths in documents are alike."""
    shutil.copytree(tiny, folder)
    return folder


def results_of(folder: Path) -> dict[str, Any]:
    """All that a run gave: documents, bytes of checkpoints, names of the rest."""
    results: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file():
            results[name] = None
            if name.startswith("pruned"):
                results[name] = path.read_bytes() if path.name != "README.md" else None  # the card says times
            elif path.suffix == ".json":
                results[name] = without_costs(json.loads(path.read_text()))
    return results


PRUNE = ["prune", "m", "-d", "d", "-k", "2", "-k", "1", "-m", "gradient"]


def ran(processes: Processes, job: dict[str, Any], status: int = 0) -> dict[str, Any]:
    """What becomes of a process that ends so."""
    (done,) = processes.run(job)
    assert done["status"] == status, done["stderr"]
    return done


def commit(run: dict[str, Any]) -> int:
    """The rename from which on the new content counts."""
    return next(n for n, name in enumerate(run["targets"], 1) if name.endswith(".ready"))


@pytest.fixture(scope="module")
def undisturbed(processes: Processes, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one whole run of `PRUNE` gives."""
    here = copy(tiny, tmp_path_factory.mktemp("whole") / "w")
    ran(processes, {"cwd": str(here), "arguments": PRUNE})
    return results_of(here / "reports" / "m-1")


@pytest.mark.slow
def test_killed_again_and_again(processes: Processes, tiny: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """By SIGKILL and SIGTERM in turn; every rerun comes further, and at last all is as in one run."""
    here = copy(tiny, tmp_path / "w")
    job = {"cwd": str(here), "arguments": PRUNE, "stops": [4, 10, 12, 16, 45], "signals": [KILL, TERM], "until": 12}
    done = processes.run(job)
    statuses = [d["status"] for d in done]
    assert statuses[-1] == 0, done[-1]["stderr"]
    assert len(statuses) > 4
    assert set(statuses[:-1]) == {-KILL, 128 + TERM}
    stopped = next(d for d in done if d["status"] == 128 + TERM)
    assert "the same command continues there" in " ".join(stopped["stderr"].split())
    assert any("continuing with" in d["stderr"] for d in done)
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]
    assert results_of(here / "reports" / "m-1") == undisturbed


@pytest.mark.slow
def test_killed_at_renames(processes: Processes, tiny: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Over an older run. Up to the first of them that is whole, then the new one is, whoever looks first."""
    # A folder with all of `PRUNE` computed, so that little is left to do, over what looks like an older run.
    here = copy(tiny, tmp_path / "w")
    whole = ran(processes, {"cwd": str(copy(tiny, tmp_path / "count")), "arguments": PRUNE})
    ran(processes, {"cwd": str(here), "arguments": PRUNE, "stop": commit(whole) - 8, "signal": KILL}, -KILL)
    (here / "reports" / "m-1" / "report.md").write_text("older")
    (here / "reports" / "m-1" / "plan-3.json").write_text("older")
    command = [*PRUNE, "-o", "reports/m-1", "--overwrite"]
    count = ran(processes, {"cwd": str(copy(here, tmp_path / "n")), "arguments": command})
    first, last = commit(count), count["renames"]
    assert last - first > 8  # the documents, two models, the journal
    for stop in (first - 1, first, first + 1, (first + last) // 2, last):
        one = copy(here, tmp_path / f"at-{stop}")
        ran(processes, {"cwd": str(one), "arguments": command, "stop": stop, "signal": KILL}, -KILL)
        folder = one / "reports" / "m-1"
        assert (folder / "plan-3.json").exists() == (stop <= first)
        if stop <= first:
            assert (folder / "report.md").read_text() == "older"
        assert "2 heads" in ran(processes, {"cwd": str(one), "arguments": command})["stdout"]
        assert results_of(folder) == undisturbed


@pytest.mark.parametrize("command", ["score m -d d -m gradient -o r", "finetune reports/m/pruned-2 --epochs 1 -o r"])
def test_killed_while_files_are_moved(processes: Processes, tiny: Path, tmp_path: Path, command: str) -> None:
    here, job = copy(tiny, tmp_path / "w"), {"cwd": str(tmp_path / "w"), "arguments": command.split()}
    if command.startswith("finetune"):
        ran(processes, {**job, "arguments": [*QUICK, "--no-repair", "-o", "reports/m"]})
    whole = ran(processes, {**job, "cwd": str(copy(here, tmp_path / "count"))})
    ran(processes, {**job, "stop": commit(whole) + 2, "signal": KILL}, -KILL)
    ran(processes, job)
    assert results_of(here / job["arguments"][-1]) == results_of(tmp_path / "count" / job["arguments"][-1])


# -- in one process, stopped by hand ----------------------------------------------------------


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: None) -> Path:
    copy(tiny, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


QUICK = ["prune", "m", "-d", "d", "-k", "2", "-s", "one-shot", "-m", "weight-norm"]


TIMING, SCORING = "headprune.app.workflow.results.time_models", "headprune.app.workflow.score"
PICTURES = "headprune.app.pictures.png"


interrupt = Mock(side_effect=KeyboardInterrupt())


def stopped(*command: str, at: str = TIMING, how: Mock = interrupt, code: int = 130) -> str:
    """What a command says that is interrupted (or fails) when all but the times is done, or at another step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at, how)
        return stderr_of(*command, code=code)


def document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_without_o_the_same_command_goes_on_and_another_goes_elsewhere(here: Path) -> None:
    assert "m-1/.unfinished: the same command continues there" in stopped(*QUICK)
    assert not (here / "reports" / "m-1" / "run.json").exists()
    assert "The run in reports/m-1 has not ended" in stderr_of("report", "reports/m-1", code=1)
    stopped(*QUICK, "--no-repair")
    assert sorted(p.name for p in (here / "reports").iterdir()) == ["m-1", "m-2"]
    result = json.loads(run(*QUICK, "-q", "--json").stdout)
    assert result["folder"] == "reports/m-1"
    assert result["budgets"][0]["repair"]
    assert json.loads(run(*QUICK, "--no-repair", "--json").stdout)["folder"] == "reports/m-2"
    assert not list((here / "reports").rglob(".*"))


def test_a_wrong_command_leaves_its_folder_to_the_next(here: Path) -> None:
    """What it had found is of use: the scores are not made again."""
    command = ["prune", "m", "-d", "d", "-m", "gradient", "-s", "one-shot", "--target-params"]
    assert "out of reach" in stderr_of(*command, "1%", code=1)
    assert "scoring by gradient" not in run(*command, "95%").stderr
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]


def test_the_last_seconds_fail(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that no file can hold: it is said where, and nothing is computed again."""
    with monkeypatch.context() as patch:
        patch.setattr(TIMING, lambda *_: {"bound": object()})
        error = stderr_of(*QUICK, code=1)
    assert "bound is a object, which no file can hold" in " ".join(error.split())
    result = run(*QUICK)
    assert "continuing with" in result.stderr
    assert "repairing" not in result.stderr


def test_a_report_that_fails_loses_nothing(here: Path) -> None:
    error = stopped(*QUICK, "--no-repair", at=PICTURES, how=Mock(side_effect=RuntimeError("no such colour")), code=1)
    assert "The report could not be written (RuntimeError: no such colour); all else is in reports/m-1." in error
    folder = here / "reports" / "m-1"
    hp.load(folder / "pruned-2")
    assert not list(folder.rglob(".*"))
    run("report", folder)
    assert (folder / "report.md").is_file()


def cut_off(work: Path) -> None:
    (weights,) = work.glob("content/pruned-2/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    next(work.glob("dense-*.part")).write_text("cut off")


def other_token(work: Path) -> None:
    (tokens,) = work.glob("content/pruned-2/tokenizer.json")
    tokens.write_text(tokens.read_text().replace('"good"', '"goof"', 1))


@pytest.mark.parametrize("damage", [cut_off, other_token])
def test_damaged_work_is_made_again(damage: Callable[[Path], None], here: Path) -> None:
    stopped(*QUICK)
    damage(next((here / "reports" / "m-1" / ".unfinished").glob("prune-*")))
    assert "repairing" in stderr_of(*QUICK)
    folder = here / "reports" / "m-1" / "pruned-2"
    hp.load(folder)
    assert '"good"' in (folder / "tokenizer.json").read_text()


def test_other_data_is_never_mixed_in(here: Path) -> None:
    stopped(*QUICK, "--no-repair")
    write_jsonl(here / "d" / "test.jsonl", sentences(14, 9))
    assert "is not used" in stderr_of(*QUICK, "--no-repair")
    assert document(here / "reports" / "m-1" / "metrics.json")["dense"]["examples"] == 14


def test_a_plan_that_was_timed_is_of_its_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search was made anew on another one, and the pruned model and its figures were those of the old plan."""
    command = [*QUICK[:4], "--target-latency", "99.9%", *QUICK[6:]]
    stopped(*command, "--no-repair")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert "versions or machine have changed" in stderr_of(*command, "--no-repair")
    assert document(here / "reports" / "m-1" / "run.json")["environment"]["threads"] == 77


def other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({k: 3 * v for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


SCORE = ["score", "m", "-d", "d", "-m", "weight-norm"]


def test_a_result_is_not_shown_again_for_another_model(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed just after the end, and typed again after another training: the old scores were shown as if they were new ones."""
    monkeypatch.setattr("headprune.app.runs.Folder.clear_unfinished", lambda self: None)  # SIGKILL comes before
    run(*SCORE)
    again = run(*SCORE)
    assert "reports/m-1" in again.stdout
    assert "scoring by" not in again.stderr
    before = document(here / "reports" / "m-1" / "scores.json")
    other_weights(here / "m")
    assert "reports/m-1" in run(*SCORE).stdout
    assert document(here / "reports" / "m-1" / "scores.json") != before


def test_who_reads_the_first_line_only_interrupts_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headprune score … | head -1`: notes of an unfinished run stayed, and `prune` took another folder."""

    with monkeypatch.context() as patch:
        for name in ("print_scores", "print_pruned"):
            patch.setattr(f"headprune.cli.terminal.{name}", Mock(side_effect=BrokenPipeError()))
        run(*SCORE, code=1)
        assert not list((here / "reports").rglob(".*"))
        run("prune", "-k", "2", "-s", "one-shot", "--no-repair", code=1)
    assert [p.name for p in (here / "reports").iterdir()] == ["m-1"]
    assert not list((here / "reports").rglob(".*"))


def test_nothing_is_said_to_have_changed_where_nothing_was_finished(here: Path) -> None:
    gradient = [*SCORE[:-1], "gradient"]
    stopped(*gradient, at="headprune.app.workflow.write_heads")
    parts = [p for p in (here / "reports" / "m-1" / ".unfinished").glob("*-*/*") if p.is_file()]
    assert {p.suffix for p in parts} == {".part"}
    for part in parts:
        part.unlink()
    assert "not used" not in stderr_of(*gradient)


def test_a_report_that_is_interrupted_has_its_pictures(here: Path) -> None:
    run(*SCORE, "-m", "gradient")
    pictures = {p.name for p in (here / "reports" / "m-1").glob("*.png")}
    assert {"importance.png", "heads.png"} <= pictures
    for place in (PICTURES, "headprune.app.report.write_file"):
        stopped("report", "reports/m-1", at=place)
        assert {p.name for p in (here / "reports" / "m-1").glob("*.png")} == pictures


def test_the_demo_leaves_the_old_report_until_there_is_another(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(".headprune/digits/model")
    shutil.copytree(here / "m", model)
    monkeypatch.setattr("headprune.app.demo.prepare", lambda *_: (model, here / "d", 0.99))
    monkeypatch.setattr("headprune.app.demo.KEEP", ("2",))
    old = here / "reports" / "demo"
    old.mkdir(parents=True)
    for name in ("report.md", "plan-18.json", "importance.png", "scores.json"):
        (old / name).write_text("committed")
    for place in (SCORING, TIMING):
        stopped("demo", at=place)
        assert {p.read_text() for p in old.iterdir() if p.is_file()} == {"committed"}
        assert len([p for p in old.iterdir() if p.is_file()]) == 4
    run("demo")
    assert "committed" not in (old / "report.md").read_text()
    assert not (old / "plan-18.json").exists()
    assert "has been run" in run("demo").stdout


def test_what_is_not_a_runs_own_stays(here: Path) -> None:
    run(*SCORE, "-o", "r")
    (here / "r" / "pruned-4").mkdir()
    for name in ("notes.txt", "plan-7.json", "tradeoff.png", "metrics.json", "pruned-4/old"):
        (here / "r" / name).write_text("old")
    run(*SCORE, "-o", "r", "--overwrite")
    assert (here / "r" / "notes.txt").read_text() == "old"
    assert not {"plan-7.json", "tradeoff.png", "metrics.json", "pruned-4"} & {p.name for p in (here / "r").iterdir()}


def test_an_interruption_before_there_is_a_result(here: Path) -> None:
    assert "Nothing was written." in stopped(*SCORE, "-o", "r", at=SCORING)
    assert not (here / "r").exists()


def test_a_full_disk_leaves_the_old_report(here: Path) -> None:
    """The new results were put in its place without their report, which the disk had no room for."""
    quick = [*QUICK, "--no-repair", "-o", "r"]
    run(*quick)
    before = {p.name: p.read_bytes() for p in (here / "r").iterdir() if p.is_file()}
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left on the disk" in stopped(*quick, "--overwrite", "-k", "3", at=PICTURES, how=full, code=1)
    assert {p.name: p.read_bytes() for p in (here / "r").iterdir() if p.is_file()} == before
    assert "continuing with" in stderr_of(*quick, "--overwrite", "-k", "3")


def test_documents_of_two_runs_make_no_report(here: Path) -> None:
    """Copied from one folder to another, each whole: scores of another model gave a report, and of other data a prune."""
    run(*SCORE, "-o", "a")
    other_weights(here / "m")
    run(*SCORE, "-o", "b")
    for name in ("scores.json", "heads.json"):
        kept = (here / "a" / name).read_bytes()
        shutil.copy(here / "b" / name, here / "a" / name)
        said = stderr_of("report", "a", code=1)
        assert f"a/{name} is another run's: a/run.json was not written with it." in said
        (here / "a" / name).write_bytes(kept)
    (here / "a" / "run.json").write_bytes((here / "b" / "run.json").read_bytes())
    assert "another run's" in stderr_of("prune", "-k", "2", "--scores", "a", code=1)
