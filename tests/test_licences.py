"""docs/licences.md names everything that is pinned."""

import runpy
from pathlib import Path

import pytest

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
