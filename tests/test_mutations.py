"""The tool that measures the tests: which room it finds changed, and what it says of what it tried."""

from pathlib import Path
from types import SimpleNamespace

import mutations
import pytest

ROOT = Path(__file__).parents[1]


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
