"""Faults of machines, tried: commands that are killed, told to stop, run out of disk or memory, lose a rank; files that are damaged.

    python benchmarks/faults.py --work DIR     # writes docs/reliability.md; about 25 minutes on two idle cores; goes on where it was stopped
    python benchmarks/faults.py --quick        # a few of each, prints the tables and writes nothing; about a minute

Each trial is a tiny model's `score`, `prune`, `finetune` or `export`, with one fault at a place that is drawn at random. After it,
readers must find the old state or the new one, whole; the same command must go on (or an earlier line must have said what to do);
and what it gives at last must be what an undisturbed run gives, to the bit. Exit status 1 if any trial finds otherwise.

Disks are small file systems in memory and mounts that become read-only, so this runs as root, or in a namespace of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults_bits
import faults_machine
import faults_world as w

DOCUMENT = w.ROOT / "docs" / "reliability.md"
FULL = {"moments": 150, "fresh": 4, "renames": 40, "disk": 15, "read-only": 15, "memory": 12, "ranks": 6, "bits": 6}
QUICK = {"moments": 5, "fresh": 0, "renames": 5, "disk": 1, "read-only": 1, "memory": 1, "ranks": 1, "bits": 1}


class Results:
    """What trials found, a line of JSON each; trials that are there are not made again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"
        self.found: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # cut short
                    continue
                self.found[row["trial"]] = row

    def add(self, trial: str, make: Callable[[], dict[str, Any]]) -> None:
        if trial in self.found:
            return
        began = time.monotonic()
        row = {"trial": trial, **make(), "seconds": round(time.monotonic() - began, 1)}
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        self.found[trial] = row
        wrong = "" if row["fine"] else f"  WRONG: {row.get('why', '')}"
        print(f"{trial}: {row['outcome']} ({row['seconds']} s){wrong}", file=sys.stderr, flush=True)


def table(results: Results) -> str:
    """The machine's faults, a row for each kind and command."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results.found.values():
        if row["part"] != "bits":
            rows.setdefault((row["fault"], row["step"]), []).append(row)
    lines = [
        "| fault | command | tried | struck in time | looked at | old state whole | new state whole | continued, or said what to do | equal to the bit in the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (fault, step), found in sorted(rows.items(), key=lambda item: item[0][0].lower()):
        looked = sum("old" in row for row in found)
        count = Counter(key for row in found for key in ("struck", "old", "new", "went_on", "equal") if row.get(key))
        states = [
            str(n)
            for n in (len(found), count["struck"], looked, *(count[k] for k in ("old", "new", "went_on", "equal")))
        ]
        lines.append(f"| {fault} | {step} | {' | '.join(states)} |")
    return "\n".join(lines)


def bits_table(results: Results) -> str:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in results.found.values():
        if row["part"] == "bits":
            rows.setdefault(row["fault"], []).append(row)
    names = ("said", "made again", "no matter", "wrong")
    lines = [
        "| file | bits flipped | cut short | said in a line | made again, equal | changed nothing | a wrong number, unnoticed |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in rows.items():
        flips = sum(row["how"] == "flip" for row in found)
        count = Counter(row["outcome"] for row in found)
        lines.append(f"| {kind} | {flips} | {len(found) - flips} | {' | '.join(str(count[n]) for n in names)} |")
    return "\n".join(lines)


def document(results: Results, skipped: dict[str, str]) -> str:
    found = list(results.found.values())
    wrong = [row for row in found if not row["fine"]]
    machine, bits = (sum((row["part"] == "bits") == flag for row in found) for flag in (False, True))
    left_out = "".join(f"\n- Not tried on this machine: {name} ({why})." for name, why in skipped.items())
    verdict = (
        "In every one the old state or the new one was whole, the same command continued or one line said what to do, and the final result was that of an "
        "undisturbed run to the bit. No damaged file changed a number unnoticed."
        if not wrong
        else f"**{len(wrong)} of them did not end as they should: " + "; ".join(row["trial"] for row in wrong) + ".**"
    )
    return TEXT.format(
        machine=machine, bits=bits, verdict=verdict, table=table(results), files=bits_table(results), left_out=left_out,
        python=platform.python_version(), system=f"{platform.system()} {platform.release()}",
    )  # fmt: skip


TEXT = """# Reliability

<!-- Written by benchmarks/faults.py. -->

What happens to a run when the machine fails. {machine} faults were tried on `score`, `prune`, `finetune` and `export` of tiny models, and {bits} damaged
files. {verdict}

## Faults of the machine

{table}

- **struck in time**: the others came when the command was already through.
- **looked at**: often nobody looks before the command is typed again.
- **old state whole**, **new state whole**: what readers who look find after the fault: every document reads, every saved model loads and answers as it did. Half of the
  commands of *at a random moment* replace an older result (`--overwrite`); for the others the old state is that nothing is there.
- **continued, or said what to do**: a command that was not killed ended with one line and no traceback; typed again (once there was room, and the
  folder could be written), it ended well.
- **equal to the bit**: scores, plans, metrics, tensors and exported files, compared with those of a run without a fault. Times are not compared.

How each was made: `kill -9`, SIGTERM and Ctrl-C (SIGINT) come after a time drawn evenly between the beginning and the end of the command; *before a
file is put in place* kills with SIGKILL before a rename, since only renames change what readers see. *Disk full*: a file system in memory with too little room.
*Folder becomes read-only*: a read-only mount takes its place, at a random moment. *Out of memory*: a control group with 0.3 to 0.95 of the memory that the command needs. *A rank is lost*: one of two
processes, as torchrun starts them, is killed at a random moment; the other ends with one line, and the command runs again, with one process or two. *New processes* are
started by the shell; all others are forks of a process that has loaded torch and transformers.

## Damaged files

One bit at a random place, or the end cut off at a random place; then the command that reads the file.

{files}

- **said in a line**: the command ended with an error that names the file or the model, or a warning that does.
- **made again**: parts of an interrupted run are computed anew.
- **changed nothing**: the bit says nothing (such as a space), or the result was equal to the bit.

How it is noticed: every JSON document has a checksum of its content, which a plan may break (it is meant to be edited; a note says so); parts of interrupted runs have
one, and so has the state of a training. A saved model's weights are hashed, its other files have checksums in `headprune.json`, and its
answers are compared with stored ones. A run knows its dense model's weights and config and its examples by hash.

## What is not covered

- Your own model and data before their first use: a bit that flipped there earlier is not known.
- A saved model that transformers loads without headprune, and files for other engines (GGUF, ONNX, OpenVINO): they are read without a check. `headprune inspect FOLDER` checks a folder.
- Checksums are no signatures: see [security](../SECURITY.md).
- A machine that loses its power: documents are synced to the disk before they replace others (`fsync`), weights are not.
- More than one fault at once on one file, and errors of memory while it computes.{left_out}

Measured with Python {python} on {system}. Again: `python benchmarks/faults.py --work DIR`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where trials and their results are kept [a temporary folder]")
    parser.add_argument("--quick", action="store_true", help="a few of each; writes no document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one part: moments, renames, disk, read-only, memory, ranks, bits")
    options = parser.parse_args()
    faults_machine.own_mounts()
    with tempfile.TemporaryDirectory(prefix="headprune-faults-") as scratch:
        folder = (options.work or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results, skipped = run(folder, QUICK if options.quick else FULL, options)
    text = document(results, skipped)
    if options.quick or options.only:
        print(text)
    else:
        DOCUMENT.write_text(text, encoding="utf-8")
    if any(not row["fine"] for row in results.found.values()):
        sys.exit(1)


def run(folder: Path, counts: dict[str, int], options: argparse.Namespace) -> tuple[Results, dict[str, str]]:
    os.environ |= {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    os.environ["HEADPRUNE_FAULTS_SAID"] = str(folder / "said")
    (folder / "said").mkdir(exist_ok=True)
    w.load()
    results = Results(folder)
    base = faults_machine.Base(folder / "base")
    base.prepare()
    skipped: dict[str, str] = {}

    def parts() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        for part, trials in (*faults_machine.PARTS.items(), ("bits", faults_bits.trials)):
            if options.only in (None, part):
                yield from trials(base, counts, options.seed, skipped)

    for trial, make in parts():
        results.add(trial, make)
    return results, skipped


if __name__ == "__main__":
    main()
