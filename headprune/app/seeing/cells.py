"""One head's attention as a table of numbers to be drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from headprune.app.documents import Heads, LayerProfile, Sample, SampleLayer
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def head_named(heads: Heads, text: str) -> tuple[LayerProfile, int]:
    """The layer and the number of a head such as ``L3.H7``.

    Raises:
        HeadPruneError: There is no such head, or it cannot be seen.
    """
    match = re.fullmatch(r"L(\d+)\.H(\d+)", text.strip(), re.IGNORECASE)
    layer = next((a for a in heads.layers if match and a.index == int(match[1])), None)
    if match is None or layer is None:
        there = ", ".join(f"L{a.index}" for a in heads.layers)
        raise HeadPruneError(f"{text!r} is no head of this model.", f"Write it as L3.H7; the layers are {there}.")
    if layer.unseen:
        raise HeadPruneError(f"{text}: {layer.unseen}", "Choose another layer.")
    if int(match[2]) >= len(layer.heads):
        raise HeadPruneError(
            f"Layer L{layer.index} has no head {match[2]}.", f"It has {len(layer.heads)}: 0 to {len(layer.heads) - 1}."
        )
    return layer, int(match[2])


def layer_of(sample: Sample, index: int) -> SampleLayer | None:
    """A sample's layer by its index; None where it was not seen."""
    return next((layer for layer in sample.layers if layer.layer == index), None)


def cells(sample: Sample, layer: SampleLayer) -> NDArray[np.float32]:
    """A table for each head: queries by keys; for an image whose rows are not all held, its patches as the first position sees
    them, each head scaled to its largest weight.
    """
    weights = layer.unpacked()
    grid = sample.positions[layer.keys].grid
    if layer.rows is None or grid is None:
        return weights
    patches = weights[:, 0, -grid[0] * grid[1] :]
    scaled: NDArray[np.float32] = patches / np.maximum(patches.max(axis=1, keepdims=True), 1e-9)
    return scaled.reshape(-1, *grid)


def resized(table: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """A table with other numbers of rows and columns; each new cell has the largest value of those it covers, so a line stays visible."""
    for axis, wanted in ((0, rows), (1, columns)):
        have = table.shape[axis]
        if wanted >= have:
            table = np.take(table, np.arange(wanted) * have // wanted, axis=axis)
        else:
            table = np.maximum.reduceat(table, np.arange(wanted) * have // wanted, axis=axis)
    return table


def by_role(heads: Heads) -> list[tuple[str, list[tuple[str, int]], str]]:
    """The roles, those of most heads first: the heads that have it (layer name, number), and the one that shows it best, in words."""
    members: dict[str, list[tuple[LayerProfile, int]]] = {}
    for layer in heads.layers:
        for h, profile in enumerate(layer.heads):
            members.setdefault(profile.role, []).append((layer, h))
    roles = []
    for role, of_role in sorted(members.items(), key=lambda item: -len(item[1])):
        layer, h = max(of_role, key=lambda head: head[0].heads[head[1]].clarity)
        addresses = [(layer.name, h) for layer, h in of_role]
        roles.append((role, addresses, f"L{layer.index}.H{h}: {layer.heads[h].because}"))
    return roles
