"""Faults of the machine, for benchmarks/faults.py: each trial breaks one command in one way, looks, and types the command again."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults_world as w

Trials = Iterator[tuple[str, Callable[[], dict[str, Any]]]]
SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
CHAIN = ("score", "prune", "finetune", "export")
SPAN = 0.8  # of an undisturbed command's time, within which moments are drawn: it may be quicker the next time
ROOM = "64m"  # more than any command needs
_MOUNTS = "HEADPRUNE_FAULTS_MOUNTS"


def own_mounts() -> None:
    """Go on in a mount namespace of its own, so that no mount stays; in a user's own one where this is not root."""
    if _MOUNTS in os.environ or shutil.which("unshare") is None:
        return
    flags = "-m" if os.geteuid() == 0 else "-rm"
    if subprocess.run(["unshare", flags, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_MOUNTS] = "1"
        os.execvp("unshare", ["unshare", flags, sys.executable, *sys.argv])


def mount(*arguments: object) -> bool:
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@dataclass
class Base:
    """What undisturbed commands find and give: worlds before and after each step, over an older result, and what readers see there."""

    path: Path
    seen: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    renames: dict[str, int] = field(default_factory=dict)

    @property
    def scratch(self) -> Path:
        return self.path.parent / "world"

    def world(self, kind: str, step: str) -> Path:
        """The world ``before`` a step, ``after`` it, or with an ``old`` result of it."""
        return self.path / f"{kind} {step}"

    def prepare(self) -> None:
        """Make it, unless it is there."""
        from headprune.fingerprint import versions

        done, now = self.path / "done.json", list(versions())
        if done.exists():
            known = json.loads(done.read_text())
            if known.pop("versions") != now:
                sys.exit(
                    f"{self.path.parent} was begun by another version of headprune: name another folder with --work."
                )
            for name, value in known.items():
                setattr(self, name, value)
            return
        shutil.rmtree(self.path, ignore_errors=True)
        here = self.path / "here"
        here.mkdir(parents=True)
        ended = w.fork(here, lambda: w.make(Path())).ended()
        assert ended.status == 0, ended.said
        for step, arguments in w.STEPS.items():
            self._keep("before", step, here)
            old = w.copy(here, self.path / "was")
            self._run(old, w.OTHERWISE[step])
            self._keep("old", step, old)
            self.seconds[step] = self._run(here, arguments)
            self.renames[step] = len((w.beside() / "renames").read_text().splitlines())
            self._keep("after", step, here)
        two = w.copy(self.world("before", "prune"), self.path / "two")
        assert [e.status for e in ranks(two, w.STEPS["prune"], 2)] == [0, 0]
        self._keep("two after", "prune", two)
        done.write_text(
            json.dumps({"versions": now, "seen": self.seen, "seconds": self.seconds, "renames": self.renames})
        )

    def _run(self, world: Path, arguments: list[str]) -> float:
        ended = w.command(world, arguments).ended()
        assert ended.status == 0, (arguments, ended.said)
        return ended.seconds

    def _keep(self, kind: str, step: str, world: Path) -> None:
        found, why = w.view(world)
        assert found is not None, why
        self.seen[f"{kind} {step}"] = found
        w.copy(world, self.world(kind, step))


@dataclass
class Trial:
    """One command over one state."""

    base: Base
    step: str
    over: bool
    look: bool = True  # whether somebody reads before the command is typed again

    @property
    def arguments(self) -> list[str]:
        return [*w.STEPS[self.step], *(w.OVER[self.step] if self.over else [])]

    @property
    def start(self) -> str:
        return f"{'old' if self.over else 'before'} {self.step}"

    def world(self) -> Path:
        return w.copy(self.base.path / self.start, self.base.scratch)

    def verdict(
        self,
        part: str,
        fault: str,
        world: Path,
        ended: w.Ended,
        struck: bool,
        mend: Callable[[], Any] = bool,
        **more: Any,
    ) -> dict[str, Any]:
        """Look what is there, type the command again, and compare.

        Args:
            mend: Ends the fault.
            more: ``after``: what must be there at last; ``again``: how the command is typed again.
        """
        row: dict[str, Any] = {
            "part": part,
            "fault": fault,
            "step": self.step,
            "over": self.over,
            "struck": struck,
            "fine": False,
        }
        old, new = self.base.seen[self.start], more.get("after", self.base.seen[f"after {self.step}"])
        if ended.status >= 0 and not (ended.status == 0 or ended.clean):
            return row | {"outcome": "wrong", "why": f"status {ended.status}: {ended.said[-600:]}"}
        if self.look:
            found, why = w.view(world)
            row |= {"old": found == old, "new": found == new}
            if found not in (old, new):
                return row | {
                    "outcome": "wrong",
                    "why": f"neither state: {why[-600:] or difference(found, new)}, after: {ended.said[-300:]}",
                }
        mend()
        again = more.get("again", lambda: w.command(world, self.arguments).ended())()
        found, why = w.view(world)
        if again.status != 0 and not (again.clean and found == new):  # it may have been through when it was killed
            return row | {"outcome": "wrong", "why": f"again: {again.status}: {again.said[-600:]}"}
        row |= {"went_on": True, "equal": found == new}
        if found != new:
            return row | {"outcome": "wrong", "why": f"at last: {why[-600:] or difference(found, new)}"}
        return row | {"outcome": "as undisturbed" if struck else "came too late", "fine": True}


def difference(found: Any, expected: Any, where: str = "") -> str:
    """The first place where two documents differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if apart := found.keys() ^ expected.keys():
            return f"{where}: only one has {', '.join(sorted(apart))}"
        for key in expected:
            if found.get(key) != expected.get(key):
                return difference(found.get(key), expected.get(key), f"{where} {key}")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            if pair[0] != pair[1]:
                return difference(*pair, f"{where} {i}")
    return f"{where}: {found!r:.80} instead of {expected!r:.80}"


def drawn(part: str, number: int, seed: int) -> random.Random:
    return random.Random(f"{part} {number} {seed}")


def moments(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """A signal at a moment that is drawn; also to processes that the shell starts."""
    for number in range(counts["moments"]):

        def make(number: int = number) -> dict[str, Any]:
            rng = drawn("moments", number, seed)
            step, (name, sent) = list(w.STEPS)[number % len(w.STEPS)], list(SIGNALS.items())[number % 3]
            trial = Trial(base, step, rng.random() < 0.5, look=rng.random() < 0.5)
            world = trial.world()
            fork = w.command(world, trial.arguments)
            ended = fork.wait(rng.uniform(0, SPAN * base.seconds[step]))
            if struck := ended is None:
                os.kill(fork.pid, sent)
                ended = fork.ended()
            assert ended is not None
            return trial.verdict("moments", f"{name} at a random moment", world, ended, struck)

        yield f"moment {number}", make
    for number in range(counts["fresh"]):

        def fresh(number: int = number) -> dict[str, Any]:
            rng = drawn("fresh", number, seed)
            step, (name, sent) = ("score", "finetune")[number % 2], list(SIGNALS.items())[number % 3]
            trial = Trial(base, step, over=False)
            world = trial.world()
            environment = {**os.environ, "PYTHONPATH": str(w.ROOT), "COLUMNS": "2000"}
            process = subprocess.Popen(
                [sys.executable, "-m", "headprune", *trial.arguments], cwd=world, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            until = time.monotonic() + rng.uniform(
                4, 10 + base.seconds[step]
            )  # importing torch takes the first seconds
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            if struck := process.poll() is None:
                process.send_signal(sent)
            out, err = process.communicate()
            if sent == signal.SIGINT and process.returncode == -sent:
                err = ""  # Python's own, before the command listened
            return trial.verdict(
                "moments", f"{name}, a new process", world, w.Ended(process.returncode, err, out), struck
            )

        yield f"new process {number}", fresh


def renames(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """Killed before each file that is put in its place, over an older result."""
    every = [(step, n) for step in w.STEPS for n in range(1, base.renames[step] + 1)]
    some = counts["renames"]
    for step, n in every[:: max(1, len(every) // some)] if some else every:

        def make(step: str = step, n: int = n) -> dict[str, Any]:
            trial = Trial(base, step, over=True, look=n % 3 > 0)
            world = trial.world()
            ended = w.command(world, trial.arguments, before_rename=(n, signal.SIGKILL)).ended()
            return trial.verdict("renames", "kill -9 before a file is put in place", world, ended, ended.status < 0)

        yield f"rename {step} {n}", make


def size_of(folder: Path) -> int:
    """Bytes that a folder takes in a file system in memory."""
    return sum(4096 * (1 + (path.lstat().st_size + 4095) // 4096) for path in folder.rglob("*"))


def disk(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """A file system in memory with room for some of what a command writes."""
    probe = base.path / "mount"
    probe.mkdir(exist_ok=True)
    if _MOUNTS not in os.environ or not mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", probe):
        skipped["a full disk"] = "no file system can be mounted"
        return
    subprocess.run(["umount", probe], check=True)
    for number in range(counts["disk"]):

        def make(number: int = number) -> dict[str, Any]:
            rng = drawn("disk", number, seed)
            step = list(w.STEPS)[number % len(w.STEPS)]
            trial = Trial(base, step, over=rng.random() < 0.5)
            place = base.path.parent / "disk"
            place.mkdir(exist_ok=True)
            assert mount("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", place)
            try:
                world = w.copy(base.path / trial.start, place / "world")
                used = os.statvfs(place)
                taken = (used.f_blocks - used.f_bfree) * used.f_frsize
                needed = size_of(base.world("after", step)) - size_of(base.world("before", step))
                room = taken + int(rng.uniform(0.02, 1.0) * needed)
                assert mount("-o", f"remount,size={room}", place)
                ended = w.command(world, trial.arguments).ended()
                return trial.verdict(
                    "disk", "disk full", world, ended, ended.status != 0,
                    mend=lambda: mount("-o", f"remount,size={ROOM}", place),
                )  # fmt: skip
            finally:
                subprocess.run(["umount", "-l", place], check=True)

        yield f"disk {number}", make


def read_only(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """The mount that the results lie on becomes read-only."""
    if _MOUNTS not in os.environ:
        skipped["a folder that becomes read-only"] = "nothing can be mounted"
        return
    for number in range(counts["read-only"]):

        def make(number: int = number) -> dict[str, Any]:
            rng = drawn("read-only", number, seed)
            step = list(w.STEPS)[number % len(w.STEPS)]
            trial = Trial(base, step, over=rng.random() < 0.5)
            world = trial.world()
            reports, frozen = world / "reports", base.path.parent / "frozen"
            for folder in (reports, frozen):
                folder.mkdir(exist_ok=True)
            # A mount with open files, such as a lock, cannot be made read-only: another one that is takes its place.
            assert mount("--bind", reports, frozen)
            assert mount("-o", "remount,ro,bind", frozen)
            try:
                fork = w.command(world, trial.arguments)
                ended = fork.wait(rng.uniform(0, SPAN * base.seconds[step]))
                assert mount("--bind", frozen, reports)
                struck = ended is None
                ended = ended or fork.ended()
                return trial.verdict(
                    "read-only", "folder becomes read-only", world, ended, struck and ended.status != 0,
                    mend=lambda: subprocess.run(["umount", "-l", reports], check=True),
                )  # fmt: skip
            finally:
                subprocess.run(["umount", "-l", reports], check=False, capture_output=True)
                subprocess.run(["umount", "-l", frozen], check=True)

        yield f"read-only {number}", make


def group() -> Path | None:
    """A new control group for memory in this process's own; None where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, own = line.split(":", 2)
        root = Path("/sys/fs/cgroup", *(["memory"] if kinds == "memory" else []))
        limit = "memory.limit_in_bytes" if kinds == "memory" else "memory.max"
        if kinds not in ("memory", ""):
            continue
        made = root / own.lstrip("/") / f"headprune-faults-{os.getpid()}"
        try:
            made.mkdir(exist_ok=True)
            if (made / limit).exists():
                return made
            made.rmdir()
        except OSError:
            continue
    return None


def memory(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """A control group that has less memory than the command needs: the kernel kills it."""
    here = group()
    if here is None:
        skipped["running out of memory in a control group"] = "no group can be made"
        return
    here.rmdir()
    peaks: dict[str, int] = {}

    def within(world: Path, arguments: list[str], most: int | None) -> tuple[w.Ended, int]:
        folder = group()
        assert folder is not None
        first = (folder / "memory.limit_in_bytes").exists()
        if most is not None:
            (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(most))
        try:
            pid = lambda: (folder / "cgroup.procs").write_text(str(os.getpid()))  # noqa: E731
            ended = w.command(world, arguments, first=pid).ended()
            peak = folder / ("memory.max_usage_in_bytes" if first else "memory.peak")
            return ended, int(peak.read_text()) if peak.exists() else 1 << 27
        finally:
            folder.rmdir()

    for number in range(counts["memory"]):

        def make(number: int = number) -> dict[str, Any]:
            rng = drawn("memory", number, seed)
            step = CHAIN[number % len(CHAIN)]
            trial = Trial(base, step, over=rng.random() < 0.5)
            if step not in peaks:
                peaks[step] = within(Trial(base, step, over=False).world(), w.STEPS[step], None)[1]
            world = trial.world()
            ended, _ = within(world, trial.arguments, int(rng.uniform(0.3, 0.95) * peaks[step]))
            return trial.verdict("memory", "out of memory in a control group", world, ended, ended.status != 0)

        yield f"memory {number}", make


def ranks(world: Path, arguments: list[str], size: int, lose: tuple[int, float] | None = None) -> list[w.Ended]:
    """A command in several processes, as torchrun starts them.

    Args:
        lose: A rank that is killed, and after how many seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    forks = [
        w.command(world, arguments, environment={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, name=str(r))
        for r in range(size)
    ]
    early: dict[int, w.Ended] = {}
    if lose is not None:
        rank, seconds = lose
        if (ended := forks[rank].wait(seconds)) is None:
            os.kill(forks[rank].pid, signal.SIGKILL)
        else:
            early[rank] = ended
    return [early.get(r) or fork.ended() for r, fork in enumerate(forks)]


def lost(base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]) -> Trials:
    """One of two processes is killed; the command goes on with one, or with two where sums depend on how many there are."""
    for number in range(counts["ranks"]):

        def make(number: int = number) -> dict[str, Any]:
            rng = drawn("ranks", number, seed)
            step, size = ("score", 1 + number // 2 % 2) if number % 2 == 0 else ("prune", 2)
            trial = Trial(base, step, over=False)
            world = trial.world()
            gone = rng.randrange(2)
            ended = ranks(world, trial.arguments, 2, (gone, rng.uniform(0, 2 * SPAN * base.seconds[step])))
            struck = ended[gone].status == -signal.SIGKILL
            left = ended[1 - gone]
            if struck and left.status != 0 and not left.clean:
                left = w.Ended(70, f"rank {1 - gone}: {left.said}")
            again = lambda: next(iter(sorted(ranks(world, trial.arguments, size), key=lambda e: -abs(e.status))))  # noqa: E731
            after = base.seen["after score" if step == "score" else "two after prune"]
            return trial.verdict("ranks", "a rank is lost", world, left, struck, after=after, again=again)

        yield f"rank {number}", make


PARTS = {
    "moments": moments, "renames": renames, "disk": disk, "read-only": read_only, "memory": memory, "ranks": lost,
}  # fmt: skip
