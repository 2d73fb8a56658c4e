"""How commands end: signals while they clean up, and outputs that take nothing or not every letter."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headprune.app.console import Console
from headprune.cli import session
from headprune.errors import HeadPruneError, explained, is_of_the_disk
from tests.support.interrupted import ROOT

SLOW_TO_CLEAN_UP = """
import os, signal, sys, time
from headprune.cli import session
def work():
    try:
        os.kill(os.getpid(), {first})
        time.sleep(9)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("clean")
session.run(work)
"""
LOST = """
import os, signal, time
from headprune.cli import session
class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def work():
    Thing()
    time.sleep(9)
    print("never")
session.run(work)
"""


def python(*arguments: str, **given: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **given.pop("env", {})}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
    )  # fmt: skip


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGXCPU])
def test_a_second_signal_does_not_stop_the_cleaning_up(first: signal.Signals) -> None:
    """`headprune export` left `.NAME.new` and `.NAME.lock` behind; and whatever the signal was, the status was that of Ctrl-C."""
    done = python("-c", SLOW_TO_CLEAN_UP.format(first=int(first)))
    assert (done.returncode, done.stdout, done.stderr) == (128 + first, "clean\n", "")


def test_a_signal_that_python_drops_is_sent_again() -> None:
    """In a destructor or a weak reference's callback, as torch has many: a fine-tuning went on to its end after Ctrl-C."""
    done = python("-c", LOST)
    assert (done.returncode, done.stdout) == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_stdout_that_is_full() -> None:
    """`headprune --version > /dev/full` ended in a traceback."""
    with open("/dev/full", "w") as full:
        done = python("-m", "headprune", "--version", stdout=full)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line == "headprune: What this command prints could not be written to stdout: No space left on device."
        assert python("-m", "headprune", "--version", stderr=full).stdout.startswith("headprune ")


class Full(io.StringIO):
    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_said_beside_the_work_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log on a full disk ended a run that had room for its results."""
    monkeypatch.setattr(sys, "stderr", session.Patient(Full()))
    Console().say("scoring …")
    print("and so on", file=sys.stderr)

    class Gone(Full):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        session.Patient(Gone()).write("…")


def test_a_full_stdout_is_not_told_as_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    for prints in (lambda c: c.result("a"), lambda c: c.show("a")):
        with pytest.raises(HeadPruneError, match="could not be written to stdout: No space left on device"):
            prints(Console())
    with pytest.raises(HeadPruneError, match="to stdout"):
        Console(as_json=True).document({})


def test_letters_that_an_encoding_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the C locale, and on Windows behind a pipe, a run that had done its work ended with a UnicodeEncodeError."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))

    def prints() -> None:
        Console().result("10 % ± 2 …")
        Console(as_json=True).document({"a": "± 电影 😀"})

    for name in ("stderr", "unraisablehook"):  # as they were, afterwards
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(session.Signals, "listen", lambda self: None)
    monkeypatch.setattr(session, "_close", lambda status: status)
    with pytest.raises(SystemExit) as ended:
        session.run(prints)
    assert ended.value.code == 0
    line, *document = sys.stdout.buffer.getvalue().decode("ascii").splitlines()  # type: ignore[attr-defined]
    assert line == "10 % ? 2 ?"
    assert json.loads("".join(document)) == {"a": "± 电影 😀"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "larger than this process may write"),
        (OSError(errno.EFBIG, "File too large", "a.gguf"), "larger than this process may write (a.gguf)"),
        (RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), "No space left on the disk"),
        (OSError("10240 requested and 8320 written"), "No space left on the disk"),
    ],
)  # fmt: skip
def test_what_libraries_say_where_nothing_more_fits(error: Exception, said: str) -> None:
    """safetensors' and NumPy's errors have no number: they were told as unexpected."""
    found = explained(error)
    assert found is not None
    assert said in found.args[0]
    assert is_of_the_disk(error)


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed while a shell was in it: `score` told it as unexpected."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path("reports").absolute()
    tmp_path.mkdir()
    found = explained(raised.value)
    assert found is not None
    assert "The current folder is gone" in found.args[0]
