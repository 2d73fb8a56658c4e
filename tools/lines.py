"""How much of headprune the fast tests run, by room: the section "lines" of docs/tests.md.

    python tools/lines.py                 runs all fast tests under coverage.py in one process (ten to twenty minutes), then writes
    python tools/lines.py --again         writes from what the last run found

Processes that the tests start are counted too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import coverage  # before benchmarks/ is on the path, whose coverage.py is another

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "lines"

sys.path.append(str(ROOT / "benchmarks"))
from document import replace_section  # noqa: E402

CONFIG = f"""[run]
source = {ROOT / "headprune"}
data_file = {CACHE / "data"}
parallel = true
patch = subprocess
sigterm = true
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
"""


def measure() -> int:
    """Run the fast tests; pytest's exit status."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob("data*"):
        old.unlink()
    (CACHE / "rc").write_text(CONFIG, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "coverage",
        "run",
        f"--rcfile={CACHE / 'rc'}",
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
    ]
    code = subprocess.run([*command, "-p", "no:cacheprovider"], cwd=ROOT, env=environment).returncode
    subprocess.run(
        [sys.executable, "-m", "coverage", "combine", f"--rcfile={CACHE / 'rc'}", "-q"], cwd=ROOT, check=True
    )
    return code


def text() -> str:
    """The section, from the last run."""
    data = coverage.Coverage(data_file=str(CACHE / "data"), config_file=str(CACHE / "rc"))
    data.load()
    rooms: dict[str, list[int]] = {}
    worst: list[tuple[float, str, int]] = []
    for path in sorted((ROOT / "headprune").rglob("*.py")):
        _, lines, _, missing, _ = data.analysis2(str(path))
        if not lines:
            continue
        name = path.relative_to(ROOT / "headprune")
        parts = name.parts
        room = "/".join(
            parts[:2] if parts[0] == "app" and len(parts) > 2 else parts[:1] if len(parts) > 1 else ["*.py"]
        )
        found = rooms.setdefault(room if "." in room else f"{room}/", [0, 0])
        found[0] += len(lines)
        found[1] += len(lines) - len(missing)
        worst.append((1 - len(missing) / len(lines), str(name), len(missing)))
    lines_in_all, run = (sum(found[i] for found in rooms.values()) for i in (0, 1))
    rows = "\n".join(f"| `{room}` | {of:,} | {n:,} | {n / of:.1%} |" for room, (of, n) in sorted(rooms.items()))
    least = "\n".join(f"| `{name}` | {share:.1%} | {missing} |" for share, name, missing in sorted(worst)[:10])
    return f"""## Lines that the tests run

Made by `make lines` (`tools/lines.py`): coverage.py over the fast tests, and the processes that they start. **{run:,} of {lines_in_all:,}
statements run: {run / lines_in_all:.1%}.** The required share is 92 %. The slow tests (`make test-slow`) run more; they are not counted.

| part of headprune | statements | run | share |
|---|---|---|---|
{rows}

<details><summary>The ten files of the least share</summary>

| file | share | statements that do not run |
|---|---|---|
{least}

</details>
"""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="write the section from the last run")
    code = 0 if parser.parse_args(given).again else measure()
    written = text()
    replace_section(ROOT / "docs" / "tests.md", "lines", written)
    print(written.split("**")[1])
    if code:
        raise SystemExit(f"pytest ended with {code}: some tests failed, so some lines may be missing.")


if __name__ == "__main__":
    main()
