"""The scripts beside headprune: sections of documents, licences, and the tool that measures the tests."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import mutations
import pytest
from document import replace_section


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    path = tmp_path / "docs" / "b.md"
    replace_section(path, "first", "one")
    path.write_text("# Title\n\n" + path.read_text() + "\nBy hand.\n")
    replace_section(path, "second", "two")
    replace_section(path, "first", r"three \1 | x |")
    assert path.read_text() == (
        "# Title\n\n<!-- first -->\n\nthree \\1 | x |\n\n<!-- /first -->\n\nBy hand.\n\n"
        "<!-- second -->\n\ntwo\n\n<!-- /second -->\n"
    )
    before = path.read_text()
    replace_section(path, "second", "two")
    assert path.read_text() == before


@pytest.mark.parametrize("broken", ["<!-- a -->\n", "<!-- /a --><!-- a -->\n", "<!-- a --><!-- a --><!-- /a -->\n"])
def test_broken_marks_are_refused_and_nothing_is_written(tmp_path, broken):
    path = tmp_path / "b.md"
    path.write_text(broken)
    with pytest.raises(ValueError, match="once each"):
        replace_section(path, "a", "new")
    assert path.read_text() == broken


ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "licences.md").read_text()


def test_every_pinned_package_has_a_line() -> None:
    for pin in (ROOT / "constraints.txt").read_text().split():
        name, _, version = pin.partition("==")
        assert f"| {name} | {version} | " in PAGE, f"{pin}: run `make licences`"
    assert not [line for line in PAGE.splitlines() if "not known" in line and line.endswith("| yes |")]


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "licences.py"))["written"](PAGE) == PAGE


def test_shares() -> None:
    assert [round(end, 3) for end in mutations.wilson(90, 100)] == [0.826, 0.945]
    assert mutations.wilson(0, 0) == (0.0, 1.0)
    low, high = mutations.wilson(5, 5)
    assert low < high == 1.0


@pytest.mark.parametrize("room", list(mutations.ROOMS))
def test_the_tests_of_a_room_guard_it(room: str, tmp_path: Path) -> None:
    """The room is that of the file that differs; its patterns name tests, and cosmic-ray.toml names the room."""
    for tree in ("copy", "original"):
        for name in mutations.ROOMS:
            (tmp_path / tree / "headprune" / name).mkdir(parents=True)
            (tmp_path / tree / "headprune" / name / "a.py").write_text("a = 1\n")
    (tmp_path / "copy" / "headprune" / room / "a.py").write_text("a = 2\n")
    assert mutations.changed(tmp_path / "copy", tmp_path / "original") == room
    assert mutations.changed(tmp_path / "copy", tmp_path / "copy") == ""
    assert all(list((ROOT / "tests").glob(pattern)) for pattern in mutations.ROOMS[room])
    assert f'"headprune/{room}"' in (ROOT / "cosmic-ray.toml").read_text()


def test_what_the_document_says() -> None:
    def item(module: str) -> SimpleNamespace:
        return SimpleNamespace(mutations=(SimpleNamespace(module_path=f"headprune/{module}", start_pos=(3, 4)),))

    diff = "--- a\n+++ b\n@@ @@\n-    if a | b:\n+    if not a | b:"
    found = [
        (item("planning/order.py"), SimpleNamespace(is_killed=True, diff="")),
        (item("surgery/proof.py"), SimpleNamespace(is_killed=False, diff=diff)),
        (item("surgery/proof.py"), None),
    ]
    text = mutations.section(found)
    assert "**1 (50.0%, 9.5% to 90.5%) of 2 are noticed.**" in text
    assert "| `planning/` | 1 | 1 | 1 (100.0%" in text
    assert "| `surgery/` | 2 | 1 | 0 (0.0%" in text
    assert "| `surgery/proof.py:3` | `if a \\| b:` | `if not a \\| b:` |" in text
