"""Would the tests notice a wrong number? Small changes to the code of planning, surgery and repair, and what the tests say of each.

    python tools/mutations.py                   a random sample of 150 places for each room; goes on where it was stopped
    python tools/mutations.py --survivors       only those that no test noticed, once more: after tests were added
    python tools/mutations.py --room surgery --sample 400

The changes are cosmic-ray's (`pip install cosmic-ray coverage`), the tests those that CONTRIBUTING names for the room; of these, the fast
ones that run the changed line. Writes its section of docs/tests.md, with a reason for each survivor from tools/survivors.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("planning", "surgery", "repairing")
CACHE = ROOT / ".cache" / "mutations"
REASONS = ROOT / "tools" / "survivors.json"

import mutants as of  # noqa: E402
import warm  # noqa: E402


@dataclass(frozen=True)
class Room:
    """Part of headprune, and what guards it.

    Attributes:
        name: Of its folder.
        modules: Paths, relative to the root.
        tests: Files, relative to the root.
    """

    name: str
    modules: list[str]
    tests: list[str]


def room_named(name: str, root: Path = ROOT) -> Room:
    """A room by the table at the end of CONTRIBUTING.md."""
    for row in (root / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:-1]]
        if len(cells) == 2 and f"{name}/" in cells[0]:
            inside = [root / "headprune" / cell for cell in cells[0]]
            modules = [p for path in inside for p in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
            tests = [p for glob in cells[1] for p in sorted((root / "tests").glob(glob))]
            return Room(name, *([str(p.relative_to(root)) for p in paths] for paths in (modules, tests)))
    raise SystemExit(f"CONTRIBUTING.md has no row for {name}/.")


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


def reasons() -> dict[str, dict[str, Any]]:
    """Why some survive, by key: ``why``, and whether they are ``equivalent``."""
    return dict(json.loads(REASONS.read_text(encoding="utf-8"))) if REASONS.exists() else {}


class Results:
    """What became of each mutant, on disk as soon as it is known: a line each, the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.by_key: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                found = json.loads(line)
            except json.JSONDecodeError:  # cut off by a kill
                continue
            self.by_key[found["key"]] = found

    def todo(self, sample: Sequence[of.Mutant], again: bool) -> list[of.Mutant]:
        """What has not been tried yet; or (``again``) what no test noticed, and some could."""
        if again:
            hopeless = {key for key, reason in reasons().items() if reason["equivalent"]}
            return [
                m for m in sample if m.key in self.by_key and not self.by_key[m.key]["by"] and m.key not in hopeless
            ]
        return [m for m in sample if m.key not in self.by_key]

    def add(self, mutant: of.Mutant, by: str, tests: int, left: int, seconds: float) -> None:
        found = {**asdict(mutant), "by": by, "tests": tests, "left": left, "seconds": round(seconds, 1)}
        self.by_key[mutant.key] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, ensure_ascii=False) + "\n")


def guards(mutant: of.Mutant, source: str, base: dict[str, Any]) -> list[str]:
    """The tests that run a mutant, the quickest first. What happens on import, all of them run: first those that use what is changed.

    Where none runs it, all of them may still see it, as it is for a function that is called on import.
    """
    near, on_import = of.lines_around(source, mutant.where[0])
    lines, seconds = base["lines"].get(mutant.module, {}), base["seconds"]
    chosen = {test for line, tests in lines.items() if int(line) in near for test in tests} & set(seconds)
    return sorted(
        seconds if on_import or not chosen else chosen, key=lambda test: (test not in chosen, seconds[test], test)
    )


def baseline_of(room: Room, tree: warm.Tree) -> dict[str, Any]:
    """What the room's tests run: of files that have changed, measured again; of all, when what they all use has changed."""
    shared = [
        *(ROOT / "headprune").rglob("*.py"),
        *(ROOT / "tests" / "support").rglob("*.py"),
        ROOT / "tests" / "conftest.py",
    ]
    state, now = _hash(shared), {file: _hash([ROOT / file]) for file in room.tests}
    stored = CACHE / f"{room.name}-baseline.json"
    base: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    if base.get("state") != state:
        base = {"state": state, "files": {}, "seconds": {}, "lines": {}, "modules": []}
    if new := [file for file in room.tests if base["files"].get(file) != now[file]]:
        print(f"{room.name}: {len(new)} test files without any change …", flush=True)
        found = warm.baseline(tree, new)
        base["files"] = now

        def stays(test: str) -> bool:
            return (file := test.partition("::")[0]) in now and file not in new

        base["seconds"] = {t: s for t, s in base["seconds"].items() if stays(t)} | found["seconds"]
        lines: dict[str, dict[str, list[str]]] = {}
        for part, kept in ((base["lines"], stays), (found["lines"], bool)):
            for module, by_line in part.items():
                for line, tests in by_line.items():
                    lines.setdefault(module, {}).setdefault(line, []).extend(filter(kept, tests))
        base["lines"], base["modules"] = lines, list(dict.fromkeys([*base["modules"], *found["modules"]]))
        stored.write_text(json.dumps(base), encoding="utf-8")
    return base


def _hash(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()


def attempt(
    mutant: of.Mutant,
    tree: warm.Tree,
    results: Results,
    base: dict[str, Any],
    most: float,
    collected: warm.Collected | None,
) -> None:
    """Try one mutant with tests of at most ``most`` seconds, and note what became of it."""
    source = (tree.path / mutant.module).read_text(encoding="utf-8")
    every = guards(mutant, source, base)
    so_far = accumulate(base["seconds"][test] for test in every)
    tests = [test for i, (test, spent) in enumerate(zip(every, so_far, strict=True)) if not i or spent <= most]
    start, by = time.monotonic(), ""
    if tests:
        text, seconds = (
            of.mutated(source, mutant.operator, mutant.occurrence),
            sum(base["seconds"][test] for test in tests),
        )
        with tree.written(mutant.module, text):
            by = "elsewhere"
            if of.in_body(source, mutant.where[0]):
                by = collected.killed_by(mutant.module, mutant.function, text, tests, seconds)
            if by == "elsewhere":
                by = warm.killed_by(tree, tests, seconds)
    results.add(mutant, by, len(tests), len(every) - len(tests), time.monotonic() - start)
    said = f"noticed by {by}" if by else f"NOT NOTICED by {len(tests)} of {len(every)} tests"
    print(
        f"{mutant.module}:{mutant.where[0]} {mutant.before!r} -> {mutant.after!r}: {said} ({time.monotonic() - start:.1f} s)",
        flush=True,
    )


Found = tuple[Room, int, list[dict[str, Any]]]
"""A room, how many places it has, and what became of the mutants that were tried."""


def share_of(rooms: Iterable[Found]) -> str:
    """How many are noticed, with the interval."""
    every = [f for *_, found in rooms for f in found]
    killed = sum(bool(f["by"]) for f in every)
    low, high = wilson(killed, len(every))
    return f"{killed} of {len(every)} are noticed: {killed / max(1, len(every)):.1%} (95 % interval, by Wilson: {low:.1%} to {high:.1%})"


def text_of(found: Mapping[int, Sequence[Found]], known: Mapping[str, Any]) -> str:
    """The section of docs/tests.md, from samples by their seeds: the first is the one that tests were written for."""
    rows, listed = [], dict[str, str]()
    for seed, rooms in found.items():
        for room, count, tried in rooms:
            killed = sum(bool(f["by"]) for f in tried)
            low, high = wilson(killed, len(tried))
            survivors = sorted((f for f in tried if not f["by"]), key=lambda f: (f["module"], f["where"]))
            equal = sum(known.get(f["key"], {}).get("equivalent", False) for f in survivors)
            rows.append(
                f"| {seed} | `{room.name}/` | {count:,} | {len(tried)} | {killed} ({killed / max(1, len(tried)):.1%}) | {low:.1%} to {high:.1%} "
                f"| {len(survivors)} | {equal} |"
            )
            for f in survivors:
                why = known.get(f["key"], {}).get("why") or (
                    f"not looked at yet; {f['left']} slower tests were left out"
                    if f.get("left")
                    else "not looked at yet"
                )
                place = f"`{f['module'].removeprefix('headprune/')}:{f['where'][0]}` {f['function'].rpartition('.')[2]}"
                listed[f["key"]] = f"| {place} | {_code(f['before'])} | {_code(f['after'])} | {why} |"
    first, *others = found.items()
    fresh = "".join(
        f" Of a sample that nobody had looked at before it was tried (seed {seed}) {share_of(rooms)}."
        for seed, rooms in others
    )
    fresh = fresh or " Another seed gives a sample that nobody has looked at: `python tools/mutations.py --seed 1`."
    return f"""## Small mistakes that the tests notice

Made by `make mutations` (`tools/mutations.py`). [Cosmic-ray](https://github.com/sixty-north/cosmic-ray) changes one thing at a time: a number by one, `<` to
`<=` or `>`, `+` to `-` or `*`, `and` to `or`, `True` to `False`; it negates conditions, removes `not`, `-` and keyword arguments,
and empties loops. The fast tests that [CONTRIBUTING](../CONTRIBUTING.md#where-the-tests-are) names for the room, as far as they
run the changed line, must then fail. A place is a position in the code and a kind of change; at each drawn place one variant is tried.

**{share_of(first[1])}.** The required share is 85 %. Tests were written for what survived of this sample (seed {first[0]}), so it flatters.{fresh}
Equivalent changes, by which no result becomes another, count as survivors in every share here; the last column says how many they are.

| seed | room | places | tried | noticed | 95 % interval | not noticed | of these equivalent |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Left out by rule: annotations, `TYPE_CHECKING`, `assert`, `cast`, `frozen=` of dataclasses, `strict=` of `zip`, numbers from 50 on (a size by taste, of which
one more is as right), decorators, `==` made `is`, and operators of another kind in an operator's place (`+` made `<<`), which fail at once.

<details><summary>The {len(listed)} that no test notices, and why</summary>

| place | code | changed to | why no test notices |
|---|---|---|---|
{chr(10).join(listed.values())}

</details>
"""


def _code(text: str) -> str:
    short = text if len(text) <= 160 else text[:159] + "…"
    return f"`{short}`".replace("|", "\\|") if text else "(nothing)"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", choices=ROOMS, action="append", help="only this one; can be given several times")
    parser.add_argument("--sample", type=int, default=150, help="places for each room (150)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", action="store_true", help="try those again that no test noticed")
    parser.add_argument("--seconds", type=float, default=60, help="tests for each mutant, the quickest first (60)")
    parser.add_argument("--minutes", type=float, default=45, help="stop after so long (45)")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and run nothing")
    asked = parser.parse_args(given)
    until = time.monotonic() + 60 * asked.minutes
    rooms = [room_named(name) for name in asked.room or ROOMS]
    samples = {room.name: _sampled(room, asked.sample, asked.seed)[1] for room in rooms}
    if asked.list:
        for sample in samples.values():
            print(*(f"{m.module}:{m.where[0]} {m.before!r} -> {m.after!r}" for m in sample), sep="\n")
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    results = {room.name: Results(CACHE / f"{room.name}.jsonl") for room in rooms}
    todo = [(room, results[room.name].todo(samples[room.name], asked.survivors)) for room in rooms]
    if any(left for _, left in todo):
        tree = warm.Tree(ROOT, CACHE / "tree")
        warm.prepare(tree)
        bases = {room.name: baseline_of(room, tree) for room, left in todo if left}
        warm.warm_up([name for base in bases.values() for name in base["modules"]])
        collected = warm.Collected(tree, [file for room, left in todo if left for file in room.tests])
        # In turn, so that every room has a random sample whenever this is stopped.
        queue = sorted((i / len(left), room.name, i) for room, left in todo for i in range(len(left)))
        by_name = {room.name: left for room, left in todo}
        for done, (_, name, i) in enumerate(queue):
            if time.monotonic() > until:
                print(f"{len(queue) - done} are left; the same command goes on.")
                break
            attempt(by_name[name][i], tree, results[name], bases[name], asked.seconds, collected)
        collected.close()
    write(asked.sample, asked.seed)


def _sampled(room: Room, size: int, seed: int) -> tuple[int, list[of.Mutant]]:
    places = [place for module in room.modules for place in of.places(ROOT, module)]
    return len(places), of.sample(ROOT, places, size, seed)


def write(size: int, seed: int) -> None:
    """The section, from what is known by now; with other seeds' samples, by which nobody has written tests."""
    sys.path.append(str(ROOT / "benchmarks"))
    from document import replace_section

    stored = CACHE / "samples.json"
    sizes = {int(k): v for k, v in json.loads(stored.read_text()).items()} if stored.exists() else {}
    sizes[seed] = max(size, sizes.get(seed, 0))
    stored.write_text(json.dumps(sizes))
    found: dict[int, list[Found]] = {number: [] for number in sorted(sizes)}
    for name in ROOMS:
        room, results = room_named(name), Results(CACHE / f"{name}.jsonl").by_key
        places = [place for module in room.modules for place in of.places(ROOT, module)]
        for number, most in sizes.items():
            # Lines move: where a mutant is now is what counts.
            sample = of.sample(ROOT, places, most, number)
            known = [{**results[m.key], "where": m.where} for m in sample if m.key in results]
            found[number].append((room, len(places), known))
    replace_section(ROOT / "docs" / "tests.md", "mutations", text_of(found, reasons()))
    for number, rooms in found.items():
        print(f"seed {number}:")
        _say(rooms)


def _say(rooms: Iterable[Found]) -> None:
    for room, count, found in rooms:
        killed = sum(bool(f["by"]) for f in found)
        low, high = wilson(killed, len(found))
        print(f"{room.name}: {killed} of {len(found)} noticed ({low:.1%} to {high:.1%}), of {count} places")


if __name__ == "__main__":
    main()
