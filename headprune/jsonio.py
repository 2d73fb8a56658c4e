"""JSON files that are never half-written, and that say what they hold."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from headprune.errors import HeadPruneError

SCHEMA = 1


def write_text(path: Path, text: str) -> None:
    """Write to a temporary name beside ``path``, then rename: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, kind: str, data: dict[str, Any]) -> None:
    """Write a document that `read_json` recognises as a ``kind``."""
    document = {"headprune": kind, "schema": SCHEMA, **data}
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(
        path, _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text) + "\n"
    )


# Whole numbers in a list go on one line, as a person would write the heads of a layer. JSON escapes line ends within
# strings, so what spans lines is never part of one.
_NUMBERS = re.compile(r"\[\n\s*-?\d+(?:,\n\s*-?\d+)*\n\s*\]")


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a document of headprune's.

    Raises:
        HeadPruneError: No such file, not JSON, or not a ``kind``.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadPruneError(f"There is no file {path}.", f"headprune writes {kind} as {path.name}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HeadPruneError(
            f"{path} is not readable as JSON ({error}).", "Make it again, or pass another file."
        ) from None
    if not isinstance(data, dict) or data.get("headprune") != kind:
        raise HeadPruneError(f"{path} does not hold headprune's {kind}.", "Pass a file that headprune wrote.")
    if data.get("schema") != SCHEMA:
        raise HeadPruneError(
            f"{path} has format {data.get('schema')!r}; this headprune reads {SCHEMA}.",
            "Make it again with this version.",
        )
    return data
