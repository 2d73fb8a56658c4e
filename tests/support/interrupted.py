"""Runs headprune's commands in processes of their own, and stops them where a test wants it.

``python -m tests.support.interrupted`` reads jobs (JSON), one a line, from stdin: ``{"cwd", "arguments", "stop", "signal"}``. A job with
``stop`` n gets ``signal`` before the n-th file (or folder) is put in its place: what is on disk changes with these renames
alone. One with ``stops``, ``signals`` and ``until`` is run again, with these in turn, until it is through. One with ``code`` runs
that instead of the command. Each run is a fork of a process that has loaded the libraries and has done nothing else, so that
they are loaded once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds that a run may take


class Processes:
    """What tests have of this module: the process that forks, from its first job to `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        """What became of each run: ``{"status", "stderr", "stdout", "seconds", "renames", "targets"}``; a status below 0 is a signal."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.interrupted"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        found: list[dict[str, Any]] = []
        for job in jobs:
            asked.write(json.dumps(job) + "\n")
            asked.flush()
            answer = answers.readline()
            assert answer, "see its stderr"
            found += json.loads(answer)
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _child(job: dict[str, Any], streams: Path) -> None:
    signal.alarm(PATIENCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    os.chdir(job["cwd"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(streams / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    original, count = os.replace, 0

    def replace(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with open(streams / "targets", "a") as file:
            file.write(f"{arguments[1]}\n")
        if count == job.get("stop"):
            os.kill(os.getpid(), job["signal"])
        original(*arguments)

    os.replace = replace  # type: ignore[assignment]
    sys.argv = ["headprune", *job["arguments"]]
    exec(job.get("code", "from headprune.cli import main; main()"), {"__name__": "__main__"})


def _run(job: dict[str, Any]) -> dict[str, Any]:
    streams = Path(job["cwd"]) / ".streams"
    streams.mkdir(exist_ok=True)
    (streams / "targets").write_text("")
    pid = os.fork()
    if not pid:
        status = 70
        try:
            _child(job, streams)
            status = 0
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, waited, usage = os.wait4(pid, 0)
    status = os.waitstatus_to_exitcode(waited)
    texts = {name: (streams / name).read_text() for name in ("stdout", "stderr")}
    seconds = round(usage.ru_utime + usage.ru_stime, 2)
    targets = (streams / "targets").read_text().splitlines()
    return {"status": status, "seconds": seconds, "renames": len(targets), "targets": targets, **texts}


def _all_runs(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "until" not in job:
        yield _run(job)
        return
    for n in range(job["until"]):
        stop, number = job["stops"][n % len(job["stops"])], job["signals"][n % len(job["signals"])]
        yield (found := _run({**job, "stop": stop, "signal": number}))
        if found["status"] == 0:
            return


def load() -> None:
    """Import what commands need, and make timing and drawing quick."""
    from functools import partial

    import datasets  # noqa: F401
    import matplotlib.figure
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers as tf

    from headprune import latency
    from headprune.app import finetune, finetune_run, report, workflow  # noqa: F401
    from headprune.timing import decoding, shares

    torch.set_num_threads(1)
    for name in ("AutoTokenizer", "BertForSequenceClassification", "TrainingArguments"):
        getattr(tf, name)  # loaded when it is named
    latency.bench, latency.MIN_SECONDS = partial(latency.bench, min_runs=2, min_seconds=0.0), 0.0
    shares.MIN_PASSES = decoding.MIN_ROUNDS = 1
    matplotlib.figure.Figure.savefig = lambda self, path, **_: Path(path).write_bytes(b"")  # a third of the time


if __name__ == "__main__":
    load()
    for line in sys.stdin:
        print(json.dumps(list(_all_runs(json.loads(line)))), flush=True)
