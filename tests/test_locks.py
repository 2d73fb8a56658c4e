"""A run's folder is one process's at a time, and whoever is dead holds nothing."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headprune.app.folders import Folder, claimed
from headprune.app.runs import PARTS, RunFolder, choose_folder
from headprune.errors import HeadPruneError
from headprune.locks import BusyError, Lock
from tests.support.commands import run


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
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_a_second_run_is_refused_and_says_who_is_there(
    holder: int, tmp_path: Path, bert_folder: Path, data_folder: Path
) -> None:
    folder = tmp_path / "r"
    commands = (
        ["score", bert_folder, "-d", data_folder, "-o", folder],
        ["prune", bert_folder, "-d", data_folder, "-k", 4, "-o", folder, "--overwrite"],
        ["demo", "-o", folder],
    )
    for command in commands:
        lines = run(*command, code=1).stderr.splitlines()
        (line,) = [line for line in lines if line.startswith("headprune: ")]
        assert f"process {holder} (`headprune prune --keep 4`, since 20" in line
    assert [p.name for p in folder.iterdir()] == [".lock"]
    shutil.copytree(Path(__file__).parent.parent / "reports" / "digits", folder, dirs_exist_ok=True)
    assert f"process {holder}" in run("report", folder, code=1).stderr
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert (folder / ".lock").exists()  # stale now
    run("report", folder)
    assert not (folder / ".lock").exists()


def test_without_o_two_runs_never_take_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken: list[str] = []

    def nested(left: int) -> None:
        pid = os.fork()
        if not pid:
            try:
                with claimed(
                    lambda: choose_folder(None, "m", False, str(left)), str(left), "x", say=lambda _: None
                ) as f:
                    (tmp_path / f"took-{left}").write_text(f.path.name)
                    time.sleep(0.3)
                    (f.path / "run.json").write_text("{}")
            finally:
                os._exit(0)
        pids.append(pid)

    pids: list[int] = []
    for n in range(6):
        nested(n)
    for pid in pids:
        os.waitpid(pid, 0)
    taken = sorted((tmp_path / f"took-{n}").read_text() for n in range(6))
    assert taken == [f"m-{n}" for n in range(1, 7)]


def test_where_there_are_no_locks_a_dead_process_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path = tmp_path / ".lock"

    def taken_by(**owner: Any) -> bool:
        path.write_text(json.dumps(owner))
        return Lock(path).taken()

    import platform

    from headprune.locks import _started

    pid, host = os.getppid(), platform.node()
    assert taken_by(pid=pid, host=host, started=_started(pid))
    assert not taken_by(pid=pid, host=host, started="1")  # the number was given anew
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    assert not taken_by(pid=dead, host=host, started="1")
    assert taken_by(pid=dead, host="elsewhere", started="1")
    with pytest.raises(BusyError, match=r"process \d+ on elsewhere .* if it is surely gone, remove"):
        Lock(path).take("The folder", "x")
    assert not taken_by()
    lock = Lock(path)
    lock.take("The folder", "x")
    lock.free()
    assert not path.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(HeadPruneError, match="cannot be written: Not a directory"):
        Lock(tmp_path / "file" / "sub" / ".lock").take("The folder", "x")


def test_what_another_process_writes_is_not_replaced(
    holder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuning in a run folder lost its training to a new run in its place."""
    folder = RunFolder(tmp_path)
    assert folder.parts == PARTS
    assert "pruned-*" in PARTS
    content = folder.unfinished / "content"
    content.mkdir(parents=True)
    (content / "scores.json").write_text("{}")
    monkeypatch.setattr(RunFolder, "parts", ("r", "*.json"))
    with pytest.raises(BusyError, match=r"Another process is writing .*r, which a new result in"):
        folder.publish(content, folder.parts)
    with pytest.raises(BusyError, match="Another process"), claimed(lambda: folder, "key", "score", say=print):
        pytest.fail("it is known before the long work")
    assert (content / "scores.json").exists()
    assert (tmp_path / "r" / ".lock").exists()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    folder.publish(content, folder.parts)
    assert (tmp_path / "scores.json").exists()
    assert not (tmp_path / "r").exists()
