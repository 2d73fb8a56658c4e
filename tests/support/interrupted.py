"""Runs headprune's commands in processes of their own: stopped where a test wants it, or several that share out one command's work.

``python -m tests.support.interrupted`` reads jobs (JSON), one a line, from stdin: ``{"cwd", "arguments"}`` for a command, ``"code"``
instead of it, or ``"call"`` (``module:function``), called with ``"given"``; what that gives is kept by `torch.save`. With ``"size"`` so
many processes run it together, as torchrun starts them. One with ``"stop"`` n gets ``"signal"`` before the n-th file (or folder) is put in
its place, in the process of rank ``"rank"``: what is on disk changes with these renames alone. One with ``"stops"``, ``"signals"`` and
``"until"`` is run again, with these in turn, until it is through. Each process is a fork of one that has loaded the libraries and has
done nothing else, so that they are loaded once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds that a run may take
# What documents say of time and effort, and what depends on how often a command was typed.
COSTS = {
    "seconds", "passes", "latency", "time", "generation", "environment", "when", "resumed", "commands", "command", "checksum",
    "checksums",
}  # fmt: skip


def without_costs(value: Any) -> Any:
    """A document without what it says of time and effort."""
    if isinstance(value, dict):
        return {k: without_costs(v) for k, v in value.items() if k not in COSTS}
    if isinstance(value, list):
        return [without_costs(v) for v in value if not (isinstance(v, str) and "forward passes" in v)]
    return value


class Processes:
    """What tests have of this module: the process that forks, from its first job to `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        """What became of each process: ``{"status", "stderr", "stdout", "seconds", "renames", "targets"}``; a status below 0 is a signal."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.interrupted"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        results: list[dict[str, Any]] = []
        for job in jobs:
            questions.write(json.dumps(job) + "\n")
            questions.flush()
            answer = answers.readline()
            assert answer, "see its stderr"
            results += json.loads(answer)
        return results

    def call(self, folder: Path, size: int, function: str, **given: Any) -> list[Any]:
        """What a function gives in every one of several processes.

        Args:
            function: ``module:function``.
            given: What it is called with, as JSON can hold it.
        """
        import torch

        done = self.run({"cwd": str(folder), "size": size, "call": function, "given": given})
        assert [d["status"] for d in done] == [0] * size, "\n".join(d["stderr"] for d in done)
        return [torch.load(folder / f"given-{rank}.pt", weights_only=False) for rank in range(size)]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _child(job: dict[str, Any], streams: Path, rank: int, port: int) -> None:
    signal.alarm(PATIENCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    os.chdir(job["cwd"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(streams / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if port:
        size = str(job["size"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    original, count = os.replace, 0

    def replace(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with open(streams / f"targets-{rank}", "a") as file:
            file.write(f"{arguments[1]}\n")
        if count == job.get("stop") and rank == job.get("rank", 0):
            os.kill(os.getpid(), job.get("signal", signal.SIGKILL))
        original(*arguments)

    os.replace = replace  # type: ignore[assignment]
    if "call" in job:
        import torch

        module, name = job["call"].split(":")
        torch.save(getattr(import_module(module), name)(**job["given"]), f"given-{rank}.pt")
        return
    sys.argv = ["headprune", *job["arguments"]]
    exec(job.get("code", "from headprune.cli import main; main()"), {"__name__": "__main__"})


def _fork(job: dict[str, Any], streams: Path, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        _child(job, streams, rank, port)
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stderr__):
            stream.flush()
        os._exit(status)


def _run(job: dict[str, Any]) -> list[dict[str, Any]]:
    streams, ranks = Path(job["cwd"]) / ".streams", range(job.get("size", 1))
    streams.mkdir(exist_ok=True)
    for rank in ranks:
        (streams / f"targets-{rank}").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if "size" in job else 0
    pids, began = {_fork(job, streams, rank, port): rank for rank in ranks}, time.monotonic()
    results: dict[int, dict[str, Any]] = {}
    while len(results) < len(pids):
        pid, waited, usage = os.wait3(0)
        if (rank := pids.get(pid)) is None:
            continue
        texts = {name: (streams / f"{name}-{rank}").read_text() for name in ("stdout", "stderr")}
        targets = (streams / f"targets-{rank}").read_text().splitlines()
        results[rank] = {
            "status": os.waitstatus_to_exitcode(waited), "seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "waited": time.monotonic() - began, "renames": len(targets), "targets": targets, **texts,
        }  # fmt: skip
    return [results[rank] for rank in ranks]


def _all_runs(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "until" not in job:
        yield from _run(job)
        return
    for n in range(job["until"]):
        stop, number = job["stops"][n % len(job["stops"])], job["signals"][n % len(job["signals"])]
        (done,) = _run({**job, "stop": stop, "signal": number})
        yield done
        if done["status"] == 0:
            return


def load() -> None:
    """Import what commands need, and make timing and drawing quick."""
    import gc
    from functools import partial

    import datasets  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch
    import transformers as tf

    from headprune import latency, timing
    from headprune.app import finetune, finetune_run, report, workflow  # noqa: F401

    torch.set_num_threads(1)
    for name in ("AutoTokenizer", "BertForSequenceClassification", "TrainingArguments"):
        getattr(tf, name)  # loaded when it is named
    latency.bench, latency.MIN_SECONDS = partial(latency.bench, min_runs=2, min_seconds=0.0), 0.0
    timing.MIN_PASSES = 1
    gc.freeze()  # timing collects garbage; the libraries stay


if __name__ == "__main__":
    load()
    for line in sys.stdin:
        print(json.dumps(list(_all_runs(json.loads(line)))), flush=True)
