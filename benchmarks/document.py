"""Documents of which each script writes its own part: between `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], others: str = "---:") -> list[str]:
    """Lines of a Markdown table; ``others`` aligns the columns after the first (by default as numbers)."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---", *[others] * (len(heads) - 1)], *rows)]


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name``; a file or section that is not there yet is added at the end.

    Raises:
        ValueError: The marks are there, but not once each and in order. Nothing is written then.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if first in text or last in text:
        raise ValueError(f"the text holds a mark of section {name!r} itself")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{first}\n\n{text.strip()}\n\n{last}"
    if first not in before and last not in before:
        after = f"{before.rstrip()}\n\n{section}\n" if before.strip() else f"{section}\n"
    else:
        if before.count(first) != 1 or before.count(last) != 1 or before.index(first) > before.index(last):
            raise ValueError(f"{path} does not hold {first} and {last} once each, in this order")
        after = before[: before.index(first)] + section + before[before.index(last) + len(last) :]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".part")
    written.write_text(after, encoding="utf-8")
    os.replace(written, path)
