"""Runs of several processes that share out their work, as torchrun starts them.

``python -m tests.support.ranked`` reads jobs (JSON), one a line, from stdin: ``{"cwd", "size", "arguments"}`` for a command, or
``{"cwd", "size", "call", "given"}`` for ``module:function``, called with ``given`` in every process; what that gives is kept by
`torch.save`. With ``kill`` the process of rank ``kill[0]`` is killed before it puts the ``kill[1]``-th file in its place. Each
process is a fork of one that has loaded the libraries.
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
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.interrupted import ROOT, load

PATIENCE = 200  # seconds that a run may take


class Ranked:
    """What tests have of this module: the process that forks, from its first job to `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, size: int, **job: Any) -> list[dict[str, Any]]:
        """What became of each rank: ``{"status", "stderr", "stdout"}``; a status below 0 is a signal."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ranked"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=environment, cwd=ROOT,
            )  # fmt: skip
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps({"cwd": str(folder), "size": size, **job}) + "\n")
        asked.flush()
        answer = answers.readline()
        assert answer, "see its stderr"
        found: list[dict[str, Any]] = json.loads(answer)
        return found

    def call(self, folder: Path, size: int, function: str, **given: Any) -> list[Any]:
        """What a function gives in every process.

        Args:
            function: ``module:function``.
            given: What it is called with, as JSON can hold it.
        """
        import torch

        done = self.run(folder, size, call=function, given=given)
        assert [d["status"] for d in done] == [0] * size, "\n".join(d["stderr"] for d in done)
        return [torch.load(folder / f"given-{rank}.pt", weights_only=False) for rank in range(size)]

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _child(job: dict[str, Any], rank: int, port: int) -> None:
    signal.alarm(PATIENCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["cwd"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    size = str(job["size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if job.get("kill", [-1])[0] == rank:
        original, count = os.replace, 0

        def replace(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == job["kill"][1]:
                os.kill(os.getpid(), signal.SIGKILL)
            original(*arguments)

        os.replace = replace  # type: ignore[assignment]
    if "call" in job:
        import torch

        module, name = job["call"].split(":")
        torch.save(getattr(import_module(module), name)(**job["given"]), f"given-{rank}.pt")
        return
    sys.argv = ["headprune", *job["arguments"]]
    from headprune.cli import main

    main()


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        _child(job, rank, port)
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    waiting = {_fork(job, rank, port): rank for rank in range(job["size"])}
    statuses: dict[int, int] = {}
    began = time.monotonic()
    while waiting:
        pid, status = os.wait()
        if pid in waiting:
            statuses[waiting.pop(pid)] = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    folder = Path(job["cwd"])
    return [
        {"status": statuses[rank], "seconds": seconds, **{n: (folder / f"{n}-{rank}").read_text() for n in ("stdout", "stderr")}}
        for rank in range(job["size"])
    ]  # fmt: skip


if __name__ == "__main__":
    load()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
