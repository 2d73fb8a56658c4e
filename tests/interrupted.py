"""Runs headprune's commands in processes of their own, and stops them where a test wants it.

``python -m tests.interrupted`` reads jobs (JSON) from stdin: ``{"cwd", "arguments", "stop", "signal"}``. A job with ``stop``
n gets ``signal`` before the n-th file (or folder) is put in its place: what is on disk changes with these renames alone. One
with ``stops``, ``signals`` and ``until`` is run again, with these in turn, until it is through. Each run is a fork, so that
the libraries are loaded once.
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

ROOT = Path(__file__).parent.parent


def run_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each run: ``{"status", "stderr", "stdout", "seconds", "renames", "targets"}``; a status below 0 is a signal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupted"], input=json.dumps(jobs), capture_output=True, text=True,
        check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _child(job: dict[str, Any], streams: Path) -> None:
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
    from headprune.cli import main

    main()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    streams = Path(job["cwd"]) / ".streams"
    streams.mkdir(exist_ok=True)
    (streams / "targets").write_text("")
    pid = os.fork()
    if not pid:
        status = 70
        try:
            _child(job, streams)
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 0
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


def _load() -> None:
    """Import what commands need, and make timing and drawing quick."""
    from functools import partial

    import datasets  # noqa: F401
    import matplotlib.figure
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers as tf

    from headprune import finetune, finetune_run, latency, report, workflow  # noqa: F401

    torch.set_num_threads(1)
    for name in ("AutoTokenizer", "BertForSequenceClassification", "TrainingArguments"):
        getattr(tf, name)  # loaded when it is named
    latency.bench = partial(latency.bench, min_runs=2, min_seconds=0.0)
    matplotlib.figure.Figure.savefig = lambda self, path, **_: Path(path).write_bytes(b"")  # a third of the time


if __name__ == "__main__":
    signal.alarm(1200)
    _load()
    results = [found for job in json.load(sys.stdin) for found in _all_runs(job)]
    print(json.dumps(results))
