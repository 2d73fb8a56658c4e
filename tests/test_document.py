"""Sections of a document that several scripts write."""

from __future__ import annotations

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
