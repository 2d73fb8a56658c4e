"""Faults of the machine, a few of each: what benchmarks/faults.py tries, as docs/scale.md has it in full."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import faults
import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_few_faults_of_each_kind(tmp_path: Path) -> None:
    """With other draws each time; a trial that goes wrong names itself, and the seed makes it again."""
    seed = random.SystemRandom().randrange(1 << 30)
    namespace = faults.own_namespace()
    command = [sys.executable, "benchmarks/faults.py", "--quick", "--seed", str(seed), "--work", str(tmp_path)]
    mounts = {faults.MOUNTS: "1"} if namespace else {}
    here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **mounts}
    done = subprocess.run([*namespace, *command], cwd=ROOT, capture_output=True, text=True, env=here, check=False)
    assert done.returncode == 0, (seed, [line for line in done.stderr.splitlines() if "WRONG" in line] or done.stderr)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {row["trial"].split()[0] for row in rows} >= {"moment", "rename"}
    assert any("bits" in row for row in rows)
    assert all(row["fine"] for row in rows)


def test_a_trial_that_is_known_is_not_made_again(tmp_path: Path) -> None:
    first = faults.Results(tmp_path)
    first.add("a", lambda: {"bits": True, "fault": "f", "how": "cut", "outcome": "said", "fine": True})
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"trial": "b", "fi')  # killed here
    again = faults.Results(tmp_path)
    again.add("a", lambda: pytest.fail("made again"))
    again.found["c"] = {"fault": "g", "step": "score", "struck": True, "old": True, "equal": True}
    machine, files = faults.tables(again)
    assert "| f | 0 | 1 | 1 | 0 | 0 | 0 |" in files
    assert "| g | score | 1 | 1 | 1 | 1 | 0 | 0 | 1 |" in machine


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_what_damage_does(how: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(64))
    faults.damage(file, how, random.Random(1))
    found = file.read_bytes()
    assert sum(b.bit_count() for b in found) == (how == "flip")
    assert (len(found) < 64) == (how == "cut")


def test_where_documents_differ_and_how_a_command_should_end() -> None:
    assert "a 1: 3 instead of 2" in faults.difference({"a": [1, 3]}, {"a": [1, 2]})
    assert "only one has b" in faults.difference({"a": 1, "b": 1}, {"a": 1})
    for status, said, fine in (
        (1, "headprune: no\nheadprune: no\n", False),
        (1, "a note\nheadprune: no\n", True),
        (1, "Traceback (most recent call last)\nheadprune: no\n", False),
        (143, "", True),  # a signal before the command had begun
        (1, "", False),
    ):
        assert faults.clean({"status": status, "stderr": said}) == fine
