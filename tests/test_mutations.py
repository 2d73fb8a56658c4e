"""The tools that measure the tests: what they change, what they leave alone, and what they count."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import mutants
import mutations
import pytest
import warm

SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT: int = 3
Pair = tuple[int, int]
SIZE = 64


def add(a: int | None, b: int = 1) -> int | None:
    """Sum."""
    assert a != SIZE
    for x, y in zip([a], [b], strict=True):
        if x < y:
            return x - y
    return cast(int | str, a + b)


class Thing:
    part = 2

    def half(self) -> float:
        return (
            1
            / self.part
        )
'''


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(("text", "part", "hidden"), [
    ("LIMIT:", "int", True), ("LIMIT:", "3", False), ("Pair =", "int", True), ("SIZE =", "64", True), ("def add", "int | None, ", True),
    ("def add", "1)", False), ("def add", "int | None:", True), ("assert", "!=", True), ("zip", "strict=True", True), ("zip", "[a]", False),
    ("if x <", "<", False), ("cast(", "int | str", True), ("cast(", "a + b", False), ("part = ", "2", False),
])  # fmt: skip
def test_what_no_test_can_see_is_left_out(text: str, part: str, hidden: bool) -> None:
    line = line_of(text)
    where = line, SOURCE.splitlines()[line - 1].index(part)
    assert any(first <= where < last for first, last in mutants.unseen(SOURCE)) is hidden


@pytest.mark.parametrize(("text", "first", "last", "on_import"), [
    ("if x <", "if x <", "if x <", False), ("return x -", "return x -", "return x -", False), ("def add", '"""Sum', "return cast", False),
    ("            / self", "return (", "        )", False), ("LIMIT", "", "", True), ("part = 2", "", "", True), ("SIZE", "assert", "assert", True),
])  # fmt: skip
def test_the_lines_that_tell_which_tests_run_a_change(text: str, first: str, last: str, on_import: bool) -> None:
    near, importing = mutants.lines_around(SOURCE, line_of(text))
    assert importing is on_import
    end = len(SOURCE.splitlines()) if last == "        )" else line_of(last) if last else 0
    assert near == (set(range(line_of(first), end + 1)) if first else set())


def test_a_sample_is_the_same_each_time_and_changes_one_thing(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray")
    (tmp_path / "m.py").write_text(SOURCE)
    places = mutants.places(tmp_path, "m.py")
    every = mutants.sample(tmp_path, places, 100, seed=0)
    assert len({m.key for m in every}) == len(every) == len(places) > 5
    assert mutants.sample(tmp_path, places, 3, seed=0) == every[:3]
    assert {"return x - y", "if x < y:", "return cast(int | str, a + b)"} <= {m.before for m in every}
    for mutant in every:
        changed = mutants.mutated(SOURCE, mutant.operator, mutant.occurrence)
        compile(changed, "m", "exec")
        assert mutant.after != mutant.before in " ".join(map(str.strip, SOURCE.splitlines()))
    # A line above moves places, and renames none.
    (tmp_path / "m.py").write_text('"""More."""\n' + SOURCE)
    assert {p.key for p in mutants.places(tmp_path, "m.py")} == {p.key for p in places}


def test_rooms_are_those_of_contributing() -> None:
    for name in mutations.ROOMS:
        room = mutations.room_named(name)
        assert f"headprune/{name}/__init__.py" in room.modules
        assert all((mutations.ROOT / path).is_file() for path in (*room.modules, *room.tests))
        assert len(room.tests) >= 5


@pytest.mark.parametrize(
    ("good", "of", "low", "high"), [(90, 100, 0.826, 0.945), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (0, 0, 0, 1)]
)
def test_intervals(good: int, of: int, low: float, high: float) -> None:
    """Against published values of Wilson's interval."""
    assert mutations.wilson(good, of) == pytest.approx((low, high), abs=5e-4)


def mutant(key: str) -> mutants.Mutant:
    return mutants.Mutant(key, "headprune/plans.py", "core/AddNot", 0, (3, 4), "plan", "if a | b:", "if not a | b:")


def test_results_stay_though_the_last_line_was_cut_off(tmp_path: Path) -> None:
    results = mutations.Results(tmp_path / "r.jsonl")
    for key, by in (("a", "tests/test_x.py::test"), ("b", ""), ("c", "")):
        results.add(mutant(key), by, 3, 0, 1.0)
    with results.path.open("a") as file:
        file.write('{"key": "d", "by"')
    again = mutations.Results(results.path)
    sample = [mutant(key) for key in "abcd"]
    assert [m.key for m in again.todo(sample, again=False)] == ["d"]
    assert [m.key for m in again.todo(sample, again=True)] == ["b", "c"]
    again.path.write_text(again.path.read_text().rpartition("\n")[0] + "\n")
    again.add(mutant("b"), "time", 3, 0, 1.0)  # noticed later: the last line counts
    assert [m.key for m in mutations.Results(results.path).todo(sample, again=True)] == ["c"]


def test_the_document_counts_survivors_and_says_why() -> None:
    room = mutations.Room("planning", ["headprune/plans.py"], [])
    found: list[dict[str, Any]] = [
        {**vars(mutant(key)), "by": by, "tests": 1} for key, by in (("a", "t"), ("b", "time"), ("c", ""), ("d", ""))
    ]
    text = mutations.text_of(
        {0: [(room, 50, found)], 1: [(room, 50, found[:1])]}, {"c": {"equivalent": True, "why": "the same"}}
    )
    assert "**2 of 4 are noticed: 50.0%" in text
    assert "| 0 | `planning/` | 50 | 4 | 2 (50.0%) | 15.0% to 85.0% | 2 | 1 |" in text
    assert "nobody had looked at before it was tried (seed 1) 1 of 1 are noticed: 100.0%" in text
    assert "| `plans.py:3` plan | `if a \\| b:` | `if not a \\| b:` | the same |" in text
    assert text.count("not looked at yet") == 1


def test_tests_run_in_a_fork(tmp_path: Path) -> None:
    tree = warm.Tree.__new__(warm.Tree)
    tree.root, tree.path, tree.files = tmp_path, tmp_path, tmp_path / "files"
    tree.files.mkdir()
    (tmp_path / "m.py").write_text("a = 1\n")
    with tree.written("m.py", "a = 2\n"):
        assert (tmp_path / "m.py").read_text() == "a = 2\n"
        assert warm.in_child(tree, lambda: 3, 20) == ("exit", 3)

        def crash() -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def busy() -> int:
            while True:
                pass

        assert warm.in_child(tree, crash, 20) == ("signal", signal.SIGKILL)
        assert warm.in_child(tree, busy, 0.5) == ("time", 0)
    assert (tmp_path / "m.py").read_text() == "a = 1\n"
