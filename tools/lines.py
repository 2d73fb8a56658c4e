"""How much of headprune the fast tests run, by room: the section "lines" of docs/tests.md.

    python tools/lines.py                 one test file after the other, for 45 minutes at most; goes on where it was stopped
    python tools/lines.py --minutes 0     only writes what is known

Processes that the tests start are counted too. Test files that have not run yet can only add lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import coverage  # before benchmarks/ is on the path, whose coverage.py is another
import warm

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "lines"
TREE = CACHE / "tree"
CONFIG = f"""[run]
source = {TREE / "headprune"}
parallel = true
patch = subprocess
sigterm = true
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
"""


def state_of(file: Path) -> str:
    """A test file, what all tests use, and headprune."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "headprune").rglob("*.py"), *(ROOT / "tests" / "support").rglob("*.py"), file]):
        found.update(path.read_bytes())
    return found.hexdigest()


def run(tree: warm.Tree, file: str) -> int:
    """One test file under coverage.py; pytest's exit status."""
    data, name = CACHE / "data", Path(file).stem
    for old in data.glob(f"{name}.*"):
        old.unlink()
    imported = CACHE / "imported.json"

    def work() -> int:
        import pytest

        watch = coverage.Coverage(data_file=str(data / name), config_file=str(CACHE / "rc"))
        watch.start()
        code = pytest.main(["-q", *warm.OPTIONS[2:], f"--basetemp={tree.files}/t", file])
        watch.stop()
        watch.save()
        known = set(json.loads(imported.read_text())) if imported.exists() else set()
        imported.write_text(json.dumps(sorted(known | set(warm.foreign(tree.path)))))
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)

    if imported.exists():
        warm.warm_up(json.loads(imported.read_text()))
    how, code = warm.in_child(tree, work, 1800)
    return code if how == "exit" else -1


def measure(until: float) -> None:
    """Run what has not run since something changed."""
    (CACHE / "data").mkdir(parents=True, exist_ok=True)
    (CACHE / "rc").write_text(CONFIG, encoding="utf-8")
    stored = CACHE / "done.json"
    done = json.loads(stored.read_text()) if stored.exists() else {}
    states = {f"tests/{file.name}": state_of(file) for file in sorted((ROOT / "tests").glob("test_*.py"))}
    todo = [name for name, state in states.items() if done.get(name, {}).get("state") != state]
    if not todo or time.monotonic() > until:
        return
    tree = warm.Tree(ROOT, TREE, all_of_it=True)
    warm.prepare(tree)
    for name in todo:
        if time.monotonic() > until:
            print(f"{len([n for n in todo if n not in done])} test files are left; the same command goes on.")
            return
        start = time.monotonic()
        code = run(tree, name)
        done[name] = {"state": states[name], "code": code}
        stored.write_text(json.dumps(done))
        print(f"{name}: {'passed' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - start:.0f} s", flush=True)
        if code:
            print((tree.path / ".log").read_text(errors="replace")[-3000:], flush=True)


def text() -> str:
    """The section, from what has run."""
    done = json.loads((CACHE / "done.json").read_text())
    every = sorted(file.name for file in (ROOT / "tests").glob("test_*.py"))
    left = [name for name in every if f"tests/{name}" not in done]
    failed = [name.removeprefix("tests/") for name, found in done.items() if found["code"]]
    data = coverage.Coverage(data_file=str(CACHE / "combined"), config_file=str(CACHE / "rc"))
    data.combine([str(CACHE / "data")], keep=True)
    rooms: dict[str, list[int]] = {}
    files: list[tuple[float, str, int]] = []
    for path in sorted((TREE / "headprune").rglob("*.py")):
        _, lines, _, missing, _ = data.analysis2(str(path))
        if not lines:
            continue
        name = path.relative_to(TREE / "headprune")
        *folders, _ = name.parts
        found = rooms.setdefault(
            f"{'/'.join(folders[:2] if folders[:1] == ['app'] else folders[:1])}/".lstrip("/"), [0, 0]
        )
        found[0] += len(lines)
        found[1] += len(lines) - len(missing)
        files.append((1 - len(missing) / len(lines), str(name), len(missing)))
    of_all, ran = (sum(found[i] for found in rooms.values()) for i in (0, 1))
    rows = [f"| `{room or '*.py'}` | {of:,} | {n:,} | {n / of:.1%} |" for room, (of, n) in sorted(rooms.items())]
    least = [f"| `{name}` | {share:.1%} | {missing} |" for share, name, missing in sorted(files)[:10]]
    note = (
        f" {len(left)} test files had not run yet ({', '.join(f'`{n}`' for n in left)}); they can only add lines."
        if left
        else ""
    )
    note += f" In {', '.join(f'`{n}`' for n in failed)} a test failed." if failed else ""
    return f"""## Lines that the tests run

Made by `make lines` (`tools/lines.py`): coverage.py over the fast tests, and the processes that they start. **{ran:,} of {of_all:,}
statements run: {ran / of_all:.1%}.** The required share is 92 %. The slow tests (`make test-slow`) run more; they are not counted.{note}

| part of headprune | statements | run | share |
|---|---|---|---|
{chr(10).join(rows)}

<details><summary>The ten files of the least share</summary>

| file | share | statements that do not run |
|---|---|---|
{chr(10).join(least)}

</details>
"""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="stop after so long (45)")
    measure(time.monotonic() + 60 * parser.parse_args(given).minutes)
    sys.path.append(str(ROOT / "benchmarks"))
    from document import replace_section

    written = text()
    replace_section(ROOT / "docs" / "tests.md", "lines", written)
    print(written.split("**")[1])


if __name__ == "__main__":
    main()
