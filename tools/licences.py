"""docs/licences.md: the licence of everything that headprune is tested with, from the packages' own metadata.

    python tools/licences.py           # writes docs/licences.md
    python tools/licences.py --check   # 1 if it would differ

Run it where `constraints.txt` is installed (`make licences`). A package that is pinned but not installed here keeps the line that it has.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licences.md"
_LONGEST = 60  # characters of a licence's name; what is longer is a licence's text

_HEAD = """# Licences

headprune is under the Apache License 2.0. Made by `python tools/licences.py` (`make licences`) from the metadata of the packages that
[constraints.txt](../constraints.txt) pins: what they say of themselves, no legal advice. Only the packages that `pyproject.toml` lists as
dependencies, and theirs, are installed with headprune; the others are for exports and development.
"""


def main() -> None:
    page = written(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "")
    if "--check" in sys.argv[1:]:
        sys.exit(page != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


def written(before: str = "") -> str:
    """The page.

    Args:
        before: The page as it was, for packages that are not installed here.
    """
    needed = _needed("headprune", set())
    known = {cells[0]: cells[2] for cells in _rows(before) if len(cells) == 4}
    lines = [_HEAD, "## Python packages", "", "| package | version | licence | needed to run |", "|---|---|---|---|"]
    for pin in (ROOT / "constraints.txt").read_text().split():
        name, _, version = pin.partition("==")
        licence = _licence(name) or known.get(name, "not known: not installed where this was made")
        lines.append(f"| {name} | {version} | {licence} | {'yes' if _key(name) in needed else ''} |")
    return "\n".join(lines) + "\n"


def _rows(page: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip()[1:-1].split("|")] for line in page.splitlines() if line.startswith("| ")
    ]


def _key(name: str) -> str:
    """A package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _licence(name: str) -> str:
    """What an installed package says of its licence; "" if it is not installed."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return ""
    said = about.get("License-Expression") or ""
    classed = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License :: ")]
    told = (about.get("License") or "").strip()
    found = (
        said
        or ", ".join(c for c in classed if c != "OSI Approved")
        or (told if len(told) <= _LONGEST else told.splitlines()[0])
    )
    return found.strip().replace("|", "/")[:100] or "says nothing"


def _needed(name: str, found: set[str]) -> set[str]:
    """The packages that one needs to run, and those that they need, without extras."""
    try:
        asked = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return found
    for line in asked:
        requirement = Requirement(line)
        package = _key(requirement.name)
        here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and package not in found:
            found.add(package)
            _needed(package, found)
    return found


if __name__ == "__main__":
    main()
