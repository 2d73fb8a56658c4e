"""How much of headprune the fast tests run, by room: the section "lines" of docs/tests.md.

    python tools/lines.py               runs the fast tests under pytest-cov; about ten minutes
    python tools/lines.py --json FILE   only writes what a run has found: pytest … --cov=headprune --cov-report=json:FILE

Processes that the tests start are counted, too (`tool.coverage` in pyproject.toml).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
REQUIRED = 92


def measured(jobs: int) -> dict[str, Any]:
    """coverage.py's report on the fast tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        tests = ["-q", "-n", str(jobs), "--dist", "worksteal", "-m", "not slow"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *tests, "--cov=headprune", f"--cov-report=json:{report}"],
            cwd=ROOT,
            check=True,
        )
        found: dict[str, Any] = json.loads(report.read_text())
    return found


def section(found: dict[str, Any]) -> str:
    """The section of docs/tests.md."""
    rooms: dict[str, list[int]] = {}
    files = []
    for path, file in found["files"].items():
        name = path.removeprefix("headprune/")
        of, ran = file["summary"]["num_statements"], file["summary"]["covered_lines"]
        if not of:
            continue
        *folders, _ = name.split("/")
        room = "/".join(folders[:2] if folders[:1] == ["app"] else folders[:1])
        counts = rooms.setdefault(f"{room}/" if room else "*.py", [0, 0])
        counts[0] += of
        counts[1] += ran
        files.append((ran / of, name, of - ran))
    of, ran = (sum(counts[i] for counts in rooms.values()) for i in (0, 1))
    rows = [f"| `{room}` | {n:,} | {k:,} | {k / n:.1%} |" for room, (n, k) in sorted(rooms.items())]
    least = [f"| `{name}` | {share:.1%} | {left} |" for share, name, left in sorted(files)[:10]]
    return "\n".join([
        "## Lines that the tests run",
        "",
        "Made by `make lines` (`tools/lines.py`): coverage.py over the fast tests, and the processes that they start.",
        f"**{ran:,} of {of:,} statements run: {ran / of:.1%}.** The required share is {REQUIRED} %. The slow tests (`make test-slow`) run more; "
        "they are not counted.",
        "",
        "| part of headprune | statements | run | share |",
        "|---|---|---|---|",
        *rows,
        "",
        "<details><summary>The ten files of the least share</summary>",
        "",
        "| file | share | statements that do not run |",
        "|---|---|---|",
        *least,
        "",
        "</details>",
    ])  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    from document import replace_section

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="what a run has found")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    asked = parser.parse_args(given)
    written = section(measured(asked.jobs) if asked.json is None else json.loads(asked.json.read_text()))
    replace_section(ROOT / "docs" / "tests.md", "lines", written)
    print(written.split("**")[1])


if __name__ == "__main__":
    main()
