"""A folder that is replaced as a whole, by one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headprune.errors import HeadPruneError, check_link
from headprune.locks import locked


@contextmanager
def replaced(path: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``path`` to write to; it takes the place of ``path`` when the block ends without an error.

    Raises:
        HeadPruneError: ``path`` exists and is not empty, and ``overwrite`` is False; or another process writes it.
    """
    check_link(path)
    with locked(path.with_name(f".{path.name}.lock"), f"The folder {path}", "headprune.save"):
        _recover(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
            raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
        new = path.with_name(f".{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed while it wrote
        new.mkdir()
        try:
            yield new
            _swap_in(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def recovered(path: Path) -> None:
    """Put a folder back whose replacement was cut short by a kill."""
    if not path.exists() and _old(path).exists():
        with locked(path.with_name(f".{path.name}.lock"), f"The folder {path}", "headprune.save"):
            _recover(path)


def _old(path: Path) -> Path:
    """Where a folder is while another takes its place."""
    return path.with_name(f".{path.name}.old")


def _swap_in(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; what was there goes only after the new folder is complete."""
    if path.exists():
        os.replace(path, _old(path))
    try:
        os.replace(new, path)
    finally:
        _recover(path)


def _recover(path: Path) -> None:
    """Finish a swap, also one that was killed: remove the old folder, or put it back if there is no new one."""
    old = _old(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        if old.is_file():
            old.unlink()
    elif old.exists():
        os.replace(old, path)
