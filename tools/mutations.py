"""Would the tests notice a wrong number? Cosmic-ray changes small things in planning, surgery and repair, and runs the tests of that room.

    python tools/mutations.py --minutes 45    # at random places (cosmic-ray.toml), on a copy of the checkout; goes on where it was stopped

Writes .cache/mutations/report.md. A session begins anew when the code of these rooms has changed.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "mutations"
ROOMS = {  # the fast tests that guard each room
    "planning": ("test_plan*.py", "test_search*.py", "test_effects.py"),
    "surgery": ("test_surgery*.py", "test_conformance.py"),
    "repairing": ("test_repair*.py", "test_effects.py"),
}


def wilson(good: int, of_all: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score.

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    if not of_all:
        return 0.0, 1.0
    share, square = good / of_all, z * z / of_all
    middle, half = share + square / 2, z * math.sqrt(share * (1 - share) / of_all + square / of_all / 4)
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def changed(tree: Path, original: Path) -> str:
    """The room of the first file of the rooms that is another one in a copy; "" if all are the same."""
    now, before = (
        {
            file.relative_to(root): file.read_bytes()
            for room in ROOMS
            for file in (root / "headprune" / room).rglob("*.py")
        }
        for root in (tree, original)
    )
    return next((path.parts[1] for path in {**now, **before} if now.get(path) != before.get(path)), "")


def test() -> int:
    """Run the tests of the room that cosmic-ray has changed; called in the copy."""
    room = changed(ROOT, ROOT.parents[2]) or "planning"
    files = [str(path) for glob in ROOMS[room] for path in sorted((ROOT / "tests").glob(glob))]
    options = ["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", "-W", "ignore"]
    return subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False).returncode


def run(minutes: float) -> Path:
    """Try changes for so long; gives cosmic-ray's session."""
    tree, before, session = CACHE / "tree", CACHE / "before", CACHE / "session.sqlite"
    if changed(ROOT, before):
        shutil.rmtree(CACHE, ignore_errors=True)
        for room in ROOMS:
            shutil.copytree(ROOT / "headprune" / room, before / "headprune" / room)
    shutil.rmtree(tree, ignore_errors=True)  # a change may be left in it
    tree.mkdir(parents=True)
    subprocess.run(f"git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t {tree}", shell=True, cwd=ROOT)
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PYTHONPATH": str(tree), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}

    def called(*words: object, most: float | None = None) -> None:
        command = [str(tools / str(words[0])), *map(str, words[1:])]
        subprocess.run(command, cwd=tree, env=environment, check=True, timeout=most)

    if not session.exists():
        called("cosmic-ray", "init", "cosmic-ray.toml", session)
        called("cr-filter-operators", session, "cosmic-ray.toml")
    try:
        called("cosmic-ray", "exec", "cosmic-ray.toml", session, most=60 * minutes)
    except subprocess.TimeoutExpired:
        print("The same command goes on.")
    return session


def section(results: Iterable[tuple[Any, Any]]) -> str:
    """The report, from cosmic-ray's pairs of a change and its result."""
    counts, survivors = {room: [0, 0, 0] for room in ROOMS}, []  # places, tried, noticed
    for item, result in results:
        (mutation,) = item.mutations
        count = counts[Path(mutation.module_path).parts[1]]
        count[0] += 1
        if result is not None:
            count[1] += 1
            count[2] += result.is_killed
            if not result.is_killed:
                lines = [line[1:].strip() for line in (result.diff or "").splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]  # fmt: skip
                where = f"{Path(mutation.module_path).relative_to('headprune')}:{mutation.start_pos[0]}"
                survivors.append(f"| `{where}` | {' | '.join(_code(line) for line in lines[:2])} |")
    tried, noticed = (sum(count[i] for count in counts.values()) for i in (1, 2))
    rows = [f"| `{room}/` | {count[0]:,} | {count[1]} | {_share(*count[1:])} |" for room, count in counts.items()]
    return "\n".join([
        "## Small mistakes that the tests notice", "",
        "Made by `make mutations` ([cosmic-ray](https://github.com/sixty-north/cosmic-ray), with `cosmic-ray.toml`). One thing is changed at a time, at random: a number by one, `<` to "
        "`<=` or `>`, `+` to `-` or `*`, `and` to `or`; conditions are negated, `not` and keyword arguments removed, loops emptied. The fast tests of the room must then fail.", "",
        f"**{_share(tried, noticed)} of {tried} are noticed.** The required share is 85 %. Changes by which no result becomes another count as not noticed.", "",
        "| room | changes | tried | noticed (95 % interval, by Wilson) |", "|---|---|---|---|", *rows, "",
        "<details><summary>What no test noticed</summary>", "", "| place | code | changed to |", "|---|---|---|", *sorted(survivors), "", "</details>",
    ])  # fmt: skip


def _share(tried: int, noticed: int) -> str:
    low, high = wilson(noticed, tried)
    return f"{noticed} ({noticed / max(1, tried):.1%}, {low:.1%} to {high:.1%})"


def _code(text: str) -> str:
    return f"`{text[:159]}`".replace("|", "\\|")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="stop after so long (45)")
    parser.add_argument("--test", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    if asked.test:
        return test()
    session = run(asked.minutes)
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome

    with use_db(session, WorkDB.Mode.open) as found:
        done = [pair for pair in found.completed_work_items if pair[1].worker_outcome != WorkerOutcome.SKIPPED]
        text = section([*done, *((item, None) for item in found.pending_work_items)])
    (CACHE / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
