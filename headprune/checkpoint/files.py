"""Checksums of a folder's files beside the weights, whose bytes the model's fingerprint covers.

A bit that flips in the file of buffers may change answers at positions that no probe reaches, and one that flips in a tokenizer
changes every measurement, but not the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from headprune.probe import FILE as PROBE

_APART = ("README.md", "README-source.md", "headprune.json")


def checksums(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Of files of a folder: relative path with slashes -> checksum.

    Args:
        names: Which, where they are there; by default all but the weights, the cards (which people edit) and headprune.json itself.
    """
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        names = [name for name in names if name not in _APART]
    chosen = sorted(name for name in names if name == PROBE or not name.endswith(".safetensors"))
    return {name: _hash_of(folder / name) for name in chosen if (folder / name).is_file()}


def changed(folder: Path, saved: Mapping[str, str]) -> list[str]:
    """The files that are not as they were saved; those that are gone do not count."""
    inside = {name: text for name, text in saved.items() if not {"..", ""} & {*name.split("/")}}  # none elsewhere
    return [name for name, now in checksums(folder, inside).items() if now != inside[name]]


def _hash_of(file: Path) -> str:
    with open(file, "rb") as content:
        digest = hashlib.sha256()
        while part := content.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]
