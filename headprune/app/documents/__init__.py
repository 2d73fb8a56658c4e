"""A dataclass for each JSON file of a run folder, to write, read and report it (`headprune.documents`).

`Run` is run.json, `Metrics` is metrics.json, `FinetuneRecord` is finetune.json, and `Heads`, below, is heads.json: what each head of the
dense model does. The library itself writes and reads the files of scores and plans (`headprune.scoring.HeadScores`,
`headprune.plans.PruningPlan`). A key that changes its name or meaning needs a new `headprune.files.SCHEMA`.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headprune.app.documents.metrics import *  # noqa: F403 - every class there is a document, or part of one
from headprune.app.documents.run import *  # noqa: F403
from headprune.app.documents.values import *  # noqa: F403
from headprune.documents import Count, File
from headprune.errors import HeadPruneError
from headprune.seeing import HeadProfile


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What the heads of a layer do.

    Attributes:
        name: The layer's name, as in run.json.
        index: The layer's number: head 7 of layer 3 is shown as ``L3.H7``.
        kind: ``"encoder"``, ``"decoder"`` or ``"cross"``.
        heads: A profile of each of the layer's heads; () if its attention weights could not be read.
        unseen: Why they could not be read; "" if they could.
    """

    name: str
    index: Count
    kind: str
    heads: tuple[HeadProfile, ...]
    unseen: str = ""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The tokens or image patches at the positions of a sequence of queries or keys.

    Attributes:
        labels: A label to show for each position: a text's token, with its space as ``·`` or as the tokenizer writes it, or for
            an image ``"[CLS]"`` and ``"row,column"``.
        grid: Rows and columns of an image's patches, which are the last ``rows * columns`` positions; None for a text.
        image: The image itself as the model sees it, small, as a ``data:image/png;base64,…`` URI; None for a text.
    """

    labels: tuple[str, ...]
    grid: tuple[Count, Count] | None = None
    image: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleLayer:
    """The attention of a layer's heads in one example.

    Attributes:
        layer: The layer's index, as in `LayerProfile`.
        queries, keys: The names of their positions in `Sample.positions`.
        rows: The query positions that are stored, if not all are (an image has too many); None for all.
        shape: Heads, stored queries, keys.
        weights: Bytes in base64, in the order of ``shape`` (keys fastest): each a weight divided by ``scale``, times 255, rounded.
        scale: The weight that 255 stands for: 1; or with ``rows`` the layer's largest weight, as weights are small then.
    """

    layer: Count
    queries: str
    keys: str
    rows: tuple[Count, ...] | None = None
    shape: tuple[Count, Count, Count]
    weights: str
    scale: float = 1.0

    @classmethod
    def packed(
        cls, layer: int, weights: NDArray[np.float32], queries: str, keys: str, rows: tuple[int, ...] | None = None
    ) -> SampleLayer:
        """From weights ``[heads, queries, keys]`` between 0 and 1."""
        scale = 1.0 if rows is None else float(weights.max()) or 1.0
        data = base64.b64encode(np.rint(weights / scale * 255).astype(np.uint8).tobytes()).decode()
        size: Any = weights.shape
        return cls(layer=layer, queries=queries, keys=keys, rows=rows, shape=size, weights=data, scale=scale)

    def unpacked(self) -> NDArray[np.float32]:
        """The weights ``[heads, queries, keys]``, to within ``scale / 510``."""
        data = np.frombuffer(base64.b64decode(self.weights), np.uint8).reshape(self.shape)
        return np.multiply(data, self.scale / 255, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The attention of all layers in one example.

    Attributes:
        title: The beginning of the text; "" for other inputs.
        positions: The positions of each sequence, by a name such as ``"input"``, or ``"source"`` and ``"target"``.
        layers: The layers whose weights could be read.
    """

    title: str
    positions: dict[str, Positions]
    layers: tuple[SampleLayer, ...]

    def layer(self, index: int) -> SampleLayer | None:
        """The layer with this index; None if its weights could not be read."""
        return next((layer for layer in self.layers if layer.layer == index), None)


@dataclass(frozen=True, kw_only=True)
class Heads(File):
    """What the dense model's heads do, on examples of the scoring part.

    Attributes:
        examples, tokens: How many of each the profiles are computed from.
        repeated: Sequences of repeated random tokens from which induction and duplicate-token scores are computed; 0 for none.
        unit: The unit of distances: ``"tokens"`` or ``"patches"``.
    """

    kind: ClassVar[str] = "heads"

    examples: Count
    tokens: Count
    repeated: Count = 0
    unit: str
    layers: tuple[LayerProfile, ...]
    samples: tuple[Sample, ...]


def head_named(heads: Heads, text: str) -> tuple[LayerProfile, int]:
    """The layer and the number of a head such as ``L3.H7``.

    Raises:
        HeadPruneError: There is no such head, or its attention weights could not be read.
    """
    match = re.fullmatch(r"L(\d+)\.H(\d+)", text.strip(), re.IGNORECASE)
    layer = next((a for a in heads.layers if match and a.index == int(match[1])), None)
    if match is None or layer is None:
        there = ", ".join(f"L{a.index}" for a in heads.layers)
        raise HeadPruneError(f"{text!r} is no head of this model.", f"Write it as L3.H7; the layers are {there}.")
    if layer.unseen:
        raise HeadPruneError(f"{text}: {layer.unseen}", "Choose another layer.")
    number, count = int(match[2]), len(layer.heads)
    if number >= count:
        raise HeadPruneError(f"Layer L{layer.index} has no head {number}.", f"It has {count}: 0 to {count - 1}.")
    return layer, number


def by_role(heads: Heads) -> list[tuple[str, list[tuple[str, int]], str]]:
    """The roles, most frequent first, each with its heads (layer name, number) and the clearest of them, in words."""
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
