"""How commands end: signals while they clean up, and outputs that take nothing or not every letter."""

import errno
import json
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from headprune import cli
from tests.support.commands import python, run

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

SAYS_SOMETHING = """
import sys
from headprune import cli
def work():
    print("scoring …", file=sys.stderr)
    print("done")
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_an_output_that_is_full() -> None:
    """`headprune --version > /dev/full` ended in a traceback; a log on a full disk ended a run that had room for its results."""
    with open("/dev/full", "w") as full:
        for command in (["--version"], ["methods"]):
            done = python("-m", "headprune", *command, stdout=full)
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert line.startswith(
                "headprune: What this command prints could not be written to stdout: No space left on device."
            )
        assert python("-c", SAYS_SOMETHING, stderr=full).stdout == "done\n"


def test_letters_that_an_encoding_has_not() -> None:
    """In the C locale, and on Windows behind a pipe, a run that had done its work ended with a UnicodeEncodeError."""
    done = python("-m", "headprune", "methods", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout.isascii()) == (0, True)
    ascii_only, any_letter = (
        CliRunner(charset=charset).invoke(cli.app, ["methods", "--json"]) for charset in ("ascii", "utf-8")
    )
    assert ascii_only.stdout.isascii()
    assert not any_letter.stdout.isascii()
    assert json.loads(ascii_only.stdout) == json.loads(any_letter.stdout)


@pytest.mark.parametrize(("error", "said"), [
    (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "larger than this process may write"),
    (OSError(errno.EFBIG, "File too large", "a.gguf"), "larger than this process may write (a.gguf)"),
    (RuntimeError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"), "No space left on the disk"),
    (OSError("10240 requested and 8320 written"), "No space left on the disk"),
])  # fmt: skip
def test_what_libraries_say_where_nothing_more_fits(error: Exception, said: str) -> None:
    """safetensors' and NumPy's errors have no number: they were told as unexpected."""
    with patch("headprune.app.models.load_model", side_effect=error):
        assert said in " ".join(run("inspect", "m", code=1).stderr.split())


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed while a shell was in it: `score` told it as unexpected."""
    monkeypatch.setattr("headprune.app.models.load_model", lambda *_, **__: Path("reports").absolute())
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    try:
        assert "The current folder is gone" in run("inspect", "m", code=1).stderr
    finally:
        tmp_path.mkdir()
