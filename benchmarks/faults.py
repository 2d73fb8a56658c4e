"""Faults of machines, tried: commands that are killed, told to stop, or run out of disk; files that are damaged.

    python benchmarks/faults.py --work DIR     # writes docs/scale.md; about half an hour on two idle cores; goes on where it was stopped
    python benchmarks/faults.py --quick        # a few of each, prints the tables and writes nothing; about two minutes

Each trial is a tiny model's `score`, `prune`, `finetune` or `export`, with one fault at a place that is drawn at random. After it,
readers must find the old state or the new one, whole; the same command must go on (or an earlier line must have said what to do);
and what it gives at last must be what an undisturbed run gives, to the bit. Exit status 1 if any trial finds otherwise.

Disks are small file systems in memory, so this runs as root, or in a namespace of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from document import replace_section

import headprune as hp
from headprune.app.runs import RunFolder
from tests.support.folders import tiny_world
from tests.support.interrupted import Processes, without_costs

ROOT = Path(__file__).resolve().parents[1]
FULL = {"moments": 150, "renames": 60, "disk": 15, "bits": 6}
QUICK = {"moments": 4, "renames": 4, "disk": 1, "bits": 1}
SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
MOUNTS = "HEADPRUNE_FAULTS_MOUNTS"
RUN, PRUNED, TUNED = "reports/m-1", "reports/m-1/pruned-3", "reports/m-1/pruned-3-finetuned"
EXPORTED = "reports/m-stock"
# What a user types, in this order, and with which other options an older result was made.
STEPS = {
    "score": "score m -d d -b 4 -m gradient -m ablation",
    "prune": "prune -k 3 -m gradient",
    "finetune": f"finetune {PRUNED} --epochs 2 --learning-rate 1e-3",
    "export": f"export m --to stock -o {EXPORTED}",
}
OLDER = {
    "score": f"{STEPS['score']} --seed 5",
    "prune": "prune -k 3 -m ablation",
    "finetune": f"{STEPS['finetune']} --seed 5",
    "export": f"{STEPS['export']} --dtype float16",
}
Row = dict[str, Any]
Trials = Iterator[tuple[str, Callable[[], Row]]]


# -- the world ------------------------------------------------------------------------------------------


def seen(world: Path) -> Any:
    """All that the commands gave, as readers find it: documents, folders that load, hashes of files; or why it does not read.

    Reports, cards and pictures say times, so only their names count.
    """
    found: dict[str, Any] = {}
    try:
        for folder in (world / RUN, world / TUNED):
            if folder.exists():
                RunFolder(folder).settle()
        for path in sorted((world / "reports").rglob("*")):
            name = path.relative_to(world).as_posix()
            if any(part.startswith(".") for part in path.relative_to(world).parts) or not path.is_file():
                continue  # hidden: left by a command that was killed
            if path.suffix == ".json" and not path.name.startswith(("tokenizer", "config", "generation")):
                found[name] = without_costs(json.loads(path.read_text()))
            elif path.suffix == ".safetensors" or (path.parent.name.startswith("pruned-") and path.suffix != ".md"):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[name] = None
            if path.name == "headprune.json":
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="headprune: ")
                    hp.load(path.parent)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found


def results_alone(found: Any) -> Any:
    """What was found without the tokenizer's files, their hashes and size: a key there that nobody reads is copied, and changes no result."""
    if isinstance(found, list):
        return [results_alone(each) for each in found]
    if not isinstance(found, dict):
        return found
    copied = ("checksum", "files", "size")
    return {key: results_alone(found[key]) for key in found if key not in copied and "/tokenizer" not in key}


def clean(ended: Row) -> bool:
    """Whether it ended as a command should that could not go on: one line and no traceback; nothing where a signal came early."""
    lines = [line for line in ended["stderr"].splitlines() if line.startswith("headprune: ")]
    early = ended["status"] in (130, 143) and not ended["stderr"].strip()
    return early or (ended["status"] > 0 and len(lines) == 1 and "Traceback" not in ended["stderr"])


class Base:
    """What undisturbed commands find and give: worlds before and after each step, over an older result, and what readers see there."""

    def __init__(self, home: Path) -> None:
        self.home, self.processes, self.seconds = home, Processes(), dict[str, float]()
        self.seen: dict[str, Any] = {}
        self.files = cache(self._files)
        self.undisturbed = cache(self._undisturbed)
        here = home / "here"
        here.mkdir(parents=True)
        tiny_world(here, (12, 8, 10), num_hidden_layers=1)
        for step, typed in STEPS.items():
            self._keep(f"before {step}", here)
            old = self.copy("before", step, "was")
            self.run(old, OLDER[step])
            self._keep(f"old {step}", old)
            began = time.monotonic()
            assert self.run(here, typed)["status"] == 0, step
            self.seconds[step] = time.monotonic() - began
            self._keep(f"after {step}", here)

    def _keep(self, name: str, world: Path) -> None:
        self.seen[name] = seen(world)
        assert isinstance(self.seen[name], dict), self.seen[name]
        shutil.copytree(world, self.home / name)

    def copy(self, kind: str, step: str, to: str = "world") -> Path:
        """A copy of a world: ``before`` a step, ``after`` it, or with an ``old`` result of it."""
        shutil.rmtree(self.home / to, ignore_errors=True)
        return Path(shutil.copytree(self.home / f"{kind} {step}", self.home / to))

    def run(self, world: Path, typed: str, **more: Any) -> Row:
        """Type a command.

        Args:
            more: ``stop`` and ``signal``: the process gets it before it puts its n-th file in place; ``code``: what runs instead.
        """
        (ended,) = self.processes.run({"cwd": str(world), "arguments": typed.split(), **more})
        return ended

    def _files(self, kind: str, step: str) -> int:
        """How many files an undisturbed command puts in place."""
        return self.run(self.copy(kind, step), typed(step, kind == "old"))["renames"]

    def _undisturbed(self, where: str, reads: str) -> Any:
        """What a reader finds in a world that nothing was done to."""
        state, _, step = where.partition(" ")
        if state == "left":  # by a command that was killed when most was done
            stop = max(2, 2 * self.files("before", step) // 3)
            self.run(self.copy("before", step), STEPS[step], stop=stop, signal=int(signal.SIGKILL))
            shutil.copytree(self.home / "world", self.home / where)
        found, ended = reading(self, reads, self.copy(state, step))
        assert ended["status"] == 0, (where, ended)
        return found


def typed(step: str, over: bool) -> str:
    more = f"-o {RUN} --overwrite" if step == "score" else "--overwrite"
    return f"{STEPS[step]} {more}" if over else STEPS[step]


def judged(base: Base, fault: str, step: str, over: bool, look: bool, world: Path, ended: Row, mend: Callable[[], Any] = bool) -> Row:  # fmt: skip
    """Look at what a disturbed command left, type it again, and compare.

    Args:
        look: Whether somebody reads before the command is typed again.
        mend: Ends the fault.
    """
    old, new = base.seen[f"{'old' if over else 'before'} {step}"], base.seen[f"after {step}"]
    row = {"fault": fault, "step": step, "struck": ended["status"] != 0, "fine": False, "outcome": "wrong"}
    if ended["status"] >= 0 and not (ended["status"] == 0 or clean(ended)):
        return row | {"why": f"status {ended['status']}: {ended['stderr'][-600:]}"}
    if look:
        found = seen(world)
        row |= {"old": found == old, "new": found == new}
        if found not in (old, new):
            return row | {"why": f"neither state: {found if isinstance(found, str) else difference(found, new)}"}
    mend()
    again = base.run(world, typed(step, over))
    found = seen(world)
    if again["status"] != 0 and not (clean(again) and found == new):  # it may have been through when it was killed
        return row | {"why": f"again: {again['status']}: {again['stderr'][-600:]}"}
    if found != new:
        return row | {"why": f"at last: {found if isinstance(found, str) else difference(found, new)}"}
    return row | {"went_on": True, "equal": True, "outcome": "as undisturbed", "fine": True}


def difference(found: Any, expected: Any, where: str = "") -> str:
    """The first place where two documents differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if apart := found.keys() ^ expected.keys():
            return f"{where}: only one has {', '.join(sorted(apart))}"
        pairs = [(found[key], expected[key], f"{where} {key}") for key in expected]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(a, b, f"{where} {i}") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return f"{where}: {found!r:.80} instead of {expected!r:.80}"
    return next((difference(a, b, place) for a, b, place in pairs if a != b), "")


# -- faults of the machine ------------------------------------------------------------------------------

TIMED = """
import os, threading
timer = threading.Timer({seconds}, os.kill, (os.getpid(), {signal}))
timer.daemon = True
timer.start()
from headprune.cli import main
main()
"""


def moment(base: Base, number: int, rng: random.Random) -> Row:
    """A signal at a moment that is drawn."""
    step, (name, sent) = list(STEPS)[number % len(STEPS)], list(SIGNALS.items())[number % 3]
    over, look = rng.random() < 0.5, rng.random() < 0.5
    world = base.copy("old" if over else "before", step)
    code = TIMED.format(seconds=rng.uniform(0.05, 0.8 * base.seconds[step]), signal=int(sent))
    ended = base.run(world, typed(step, over), code=code)
    return judged(base, f"{name} at a random moment", step, over, look, world, ended)


def rename(base: Base, number: int, rng: random.Random) -> Row:
    """Killed before a file that is put in its place, over an older result."""
    step = list(STEPS)[number % len(STEPS)]
    files, world = base.files("old", step), base.copy("old", step)
    ended = base.run(world, typed(step, True), stop=rng.randint(1, files), signal=int(signal.SIGKILL))
    return judged(base, "kill -9 before a file is put in place", step, True, number % 3 > 0, world, ended)


def mount(*arguments: object) -> bool:
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


def disk(base: Base, number: int, rng: random.Random) -> Row:
    """Results lie on a file system in memory with room for some of what a command writes."""
    step, over = list(STEPS)[number % len(STEPS)], rng.random() < 0.5
    world, place = base.copy("old" if over else "before", step), base.home / "world" / "reports"
    results = base.home / "results"
    place.mkdir(exist_ok=True)
    shutil.rmtree(results, ignore_errors=True)
    shutil.copytree(place, results)
    assert mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", place)
    try:
        shutil.copytree(results, place, dirs_exist_ok=True)
        used = os.statvfs(place)
        needed = sum(4096 + path.lstat().st_size for path in (base.home / f"after {step}" / "reports").rglob("*"))  # fmt: skip
        room = (used.f_blocks - used.f_bfree) * used.f_frsize + int(rng.uniform(0.02, 1.0) * needed)
        assert mount("-o", f"remount,size={room}", place)
        ended = base.run(world, typed(step, over))
        return judged(base, "disk full", step, over, True, world, ended, lambda: mount("-o", "remount,size=64m", place))  # fmt: skip
    finally:
        subprocess.run(["umount", "-l", place], check=True)


# -- damaged files --------------------------------------------------------------------------------------

# Of each kind: its name, the world that it lies in, its path there, and what reads it: a step, or a name in `readings`.
KINDS = (
    ("`scores.json`", "before prune", f"{RUN}/scores.json", "prune"),
    ("`run.json`", "before prune", f"{RUN}/run.json", "prune"),
    ("`scores.json`, `run.json`, `metrics.json`, `heads.json` (by `report`)", "after prune", f"{RUN}/*.json", "report"),
    ("`plan.json`", "after prune", f"{RUN}/plan.json", "plan"),
    ("pruned model: weights", "after prune", f"{PRUNED}/model.safetensors", "model"),
    ("pruned model: `headprune.json`", "after prune", f"{PRUNED}/headprune.json", "model"),
    ("pruned model: probe and buffers (`headprune.safetensors`)", "after prune", f"{PRUNED}/headprune.safetensors", "model"),
    ("pruned model: `config.json`", "after prune", f"{PRUNED}/config.json", "model"),
    ("pruned model: tokenizer", "after prune", f"{PRUNED}/tokenizer*.json", "model"),
    ("exported stock folder", "after export", f"{EXPORTED}/*[ng]*.*s*n*", "exported"),
    ("dense model's weights, after scoring", "before prune", "m/model.safetensors", "prune"),
    ("dense model's config, after scoring", "before prune", "m/config.json", "prune"),
    ("dense model's tokenizer, after scoring", "before prune", "m/tokenizer*.json", "prune"),
    ("data, after scoring", "before prune", "d/*.jsonl", "prune"),
    ("dense model's weights and config, before `finetune`", "before finetune", "m/*o*[gl].*s*", "finetune"),
    ("interrupted `score`", "left score", f"{RUN}/.unfinished/**/*.*", "score"),
    ("interrupted `prune`", "left prune", f"{RUN}/.unfinished/**/*.*", "prune"),
    ("interrupted `finetune`", "left finetune", f"{TUNED}/.unfinished/**/*.*", "finetune"),
)  # fmt: skip


def answers(folder: Path, world: Path) -> tuple[Any, Row]:
    """A saved model's losses on the data."""
    from headprune.app.data import load_parts
    from headprune.app.models import load_model
    from headprune.app.options import DataOptions, LoadOptions

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            loaded = load_model(str(folder), LoadOptions(device="cpu"))
            parts = load_parts(DataOptions(str(world / "d")), loaded)
            found = hp.evaluate(loaded.model, parts.report.batches()).loss.tolist()
        except hp.HeadPruneError as error:
            return None, {"status": 1, "stderr": f"headprune: {error}", "stdout": ""}
    told = [*map(str, (warning.message for warning in said)), *loaded.notes]
    return found, {"status": 0, "stderr": "\n".join(told), "stdout": ""}


def reading(base: Base, reads: str, world: Path) -> tuple[Any, Row]:
    """What a reader finds in a world, and how it ended."""
    if reads in ("model", "exported"):
        return answers(world / (PRUNED if reads == "model" else EXPORTED), world)
    if reads == "report":
        ended = base.run(world, f"report {RUN}")
        return [(world / RUN / name).read_text(errors="replace") for name in ("report.md", "report.html")], ended
    if reads == "plan":
        ended = base.run(world, f"prune --plan {RUN}/plan.json --dry-run --scores {RUN}")
        return ended["stdout"], ended
    ended = base.run(world, STEPS[reads])
    return seen(world), ended


def damage(file: Path, how: str, rng: random.Random) -> None:
    """Flip a bit, or cut the end off."""
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    file.write_bytes(bytes(content))


def damaged(base: Base, kind: tuple[str, str, str, str], how: str, rng: random.Random) -> Row:
    """Damage a file of a kind, and read it."""
    name, where, pattern, reads = kind
    expected = base.undisturbed(where, reads)
    world = base.copy(*where.split(" "))
    files = sorted(path for path in world.glob(pattern) if path.is_file() and path.stat().st_size)
    file = rng.choice(files)
    damage(file, how, rng)
    found, ended = reading(base, reads, world)
    row = {"fault": name, "step": reads, "how": how, "file": file.name, "bits": True, "fine": True}
    said = ended["stderr"] + ended["stdout"]
    if ended["status"] != 0:
        return row | {"outcome": "said" if clean(ended) else "wrong", "fine": clean(ended), "why": said[-400:]}
    if found == expected or (file.name.startswith("tokenizer") and results_alone(found) == results_alone(expected)):
        return row | {"outcome": "made again" if where.startswith("left") else "no matter"}
    if any(word in said for word in ("headprune: ", "was changed after", "has changed since")):
        return row | {"outcome": "said", "why": said[-400:]}
    return row | {"outcome": "wrong", "fine": False, "why": f"unnoticed: {str(found)[:300]} {said[-300:]}"}


def bits(base: Base, count: int, seed: int) -> Trials:
    for kind in KINDS if count > 1 else random.Random(seed).sample(KINDS, 5):
        for number, how in enumerate(["flip"] * count + ["cut"] * max(1, count * 3 // 8)):
            name = f"{kind[0]} {how} {number}"
            yield name, lambda kind=kind, how=how, name=name: damaged(base, kind, how, random.Random(f"{name} {seed}"))


def drawn(part: str, trial: Callable[[Base, int, random.Random], Row], base: Base, count: int, seed: int) -> Trials:
    """So many trials of a part, each with random numbers of its own; no disk is filled where none can be mounted."""
    for number in range(count if part != "disk" or MOUNTS in os.environ else 0):
        rng = random.Random(f"{part} {number} {seed}")
        yield f"{part.removesuffix('s')} {number}", partial(trial, base, number, rng)


DRAWN = {"moments": moment, "renames": rename, "disk": disk}
PARTS = {**{part: partial(drawn, part, trial) for part, trial in DRAWN.items()}, "bits": bits}


# -- the document ---------------------------------------------------------------------------------------


class Results:
    """What trials found, a line of JSON each; trials that are there are not made again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self.found: dict[str, Row] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if line.endswith("}"):  # else it is cut short
                row = json.loads(line)
                self.found[row["trial"]] = row

    def add(self, trial: str, make: Callable[[], Row]) -> None:
        if trial in self.found:
            return
        self.found[trial] = row = {"trial": trial, **make()}
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{trial}: {row['outcome']}", "" if row["fine"] else f"WRONG: {row['why']}", file=sys.stderr, flush=True)


def table(rows: list[Row], heads: str, key: Callable[[Row], tuple[str, ...]], counted: Callable[[list[Row]], list[int]]) -> str:  # fmt: skip
    """A row for each kind of fault, with how many of its trials ended in which way."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = [f"| {' | '.join((*name, *map(str, counted(found))))} |" for name, found in sorted(groups.items())]
    return "\n".join([f"| {heads} |", "|---" * (heads.count("|") + 1) + "|", *lines])


def tables(results: Results) -> tuple[str, str]:
    """Of the machine's faults, and of damaged files."""
    rows = list(results.found.values())

    def states(found: list[Row]) -> list[int]:
        looked = sum("old" in row for row in found)
        count = Counter(key for row in found for key in ("struck", "old", "new", "went_on", "equal") if row.get(key))
        return [len(found), count["struck"], looked, *(count[key] for key in ("old", "new", "went_on", "equal"))]

    def outcomes(found: list[Row]) -> list[int]:
        flips, count = sum(row["how"] == "flip" for row in found), Counter(row["outcome"] for row in found)
        return [flips, len(found) - flips, *(count[name] for name in ("said", "made again", "no matter", "wrong"))]

    machine = "fault | command | tried | struck in time | looked at | old state whole | new state whole | continued, or said what to do | equal to the bit in the end"
    files = "file | bits flipped | cut short | said in a line | made again, equal | changed nothing | a wrong number, unnoticed"
    return (
        table([row for row in rows if "bits" not in row], machine, lambda row: (row["fault"], row["step"]), states),
        table([row for row in rows if "bits" in row], files, lambda row: (row["fault"],), outcomes),
    )


def document(results: Results) -> str:
    """What docs/scale.md says of the trials."""
    wrong = [trial for trial, row in results.found.items() if not row["fine"]]
    verdict = (
        "In every one the old state or the new one was whole, the same command continued or one line said what to do, and the final result was that of an "
        "undisturbed run to the bit. No damaged file changed a number unnoticed."
    )
    if wrong:
        verdict = f"**{len(wrong)} of them did not end as they should: {'; '.join(wrong)}.**"
    machine, files = tables(results)
    bits = sum("bits" in row for row in results.found.values())
    tried = f"{len(results.found) - bits} faults of the machine, and {bits} damaged files. {verdict}"
    where = f"Measured with Python {platform.python_version()} on {platform.system()} {platform.release()}."
    return "\n\n".join([tried, machine, files, f"{where} Again: `python benchmarks/faults.py --work DIR`."])


def own_namespace() -> list[str]:
    """What to put before a command so that no mount of its stays; nothing where that cannot be had."""
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm"]
    return command if subprocess.run([*command, "true"], check=False).returncode == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where results are kept [a temporary folder]")
    parser.add_argument("--quick", action="store_true", help="a few of each; writes no document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="this part")
    options = parser.parse_args()
    if MOUNTS not in os.environ and (namespace := own_namespace()):
        os.environ[MOUNTS] = "1"
        os.execvp(namespace[0], [*namespace, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="headprune-faults-") as scratch:
        os.environ |= {
            "HF_DATASETS_CACHE": f"{scratch}/cache",
            "HF_MODULES_CACHE": f"{scratch}/modules",
            "COLUMNS": "2000",
        }
        folder = (options.work or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results, base = Results(folder), Base(Path(scratch) / "base")
        for part in options.only or PARTS:
            for trial, run in PARTS[part](base, (QUICK if options.quick else FULL)[part], options.seed):
                results.add(trial, run)
        base.processes.close()
    if options.quick or options.only:
        print("\n\n".join(tables(results)))
    else:
        replace_section(ROOT / "docs" / "scale.md", "faults", document(results))
    sys.exit(any(not row["fine"] for row in results.found.values()))


if __name__ == "__main__":
    main()
