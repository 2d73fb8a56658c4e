"""heads.json."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headprune.documents import Count, File
from headprune.seeing import HeadProfile


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What the heads of a layer do.

    Attributes:
        name: As in run.json.
        index: People see head 7 of index 3 as ``L3.H7``.
        kind: ``"encoder"``, ``"decoder"`` or ``"cross"``.
        heads: One for each of the dense model's heads; () if they could not be seen.
        unseen: Why not; "" if they could.
    """

    name: str
    index: Count
    kind: str
    heads: tuple[HeadProfile, ...]
    unseen: str = ""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What stands at the positions of a sequence that is attended from or to.

    Attributes:
        labels: One for each position, to be shown: a token of a text with its space as ``·`` or as the tokenizer writes it, or for
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
        layer: Its index; the same as in the profiles.
        queries, keys: Which of the sample's ``positions`` these are.
        rows: The positions of the queries that are held, where those are not all (an image has too many); None if they are all.
        shape: Heads, queries that are held, keys.
        weights: Bytes in base64, in the order of ``shape`` (keys fastest): each a weight divided by ``scale``, times 255, rounded.
        scale: The weight that 255 stands for: 1, or the largest of the layer where the rows of an image are not all held, whose
            weights are small.
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

    def __post_init__(self) -> None:
        if len(base64.b64decode(self.weights)) != math.prod(self.shape):
            raise ValueError("weights do not have the shape that is given")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One example as the heads see it.

    Attributes:
        title: For people: the beginning of the text, or the image's name.
        positions: By a name such as ``"input"``, or ``"source"`` and ``"target"``.
        layers: Those whose weights could be had.
        shortened: Whether the example was cut to be shown.
    """

    title: str
    positions: dict[str, Positions]
    layers: tuple[SampleLayer, ...]
    shortened: bool = False

    def layer(self, index: int) -> SampleLayer | None:
        """The layer of this index; None where it was not seen."""
        return next((layer for layer in self.layers if layer.layer == index), None)

    def __post_init__(self) -> None:
        for layer in self.layers:
            for name in (layer.queries, layer.keys):
                if name not in self.positions:
                    raise ValueError(f"layer {layer.layer} has no positions {name!r:.60}")
            held = len(self.positions[layer.queries].labels) if layer.rows is None else len(layer.rows)
            if layer.shape[1:] != (held, len(self.positions[layer.keys].labels)):
                raise ValueError(f"layer {layer.layer} does not have the shape of its positions")


@dataclass(frozen=True, kw_only=True)
class Heads(File):
    """What the dense model's heads do, on examples of the scoring part.

    Attributes:
        examples, tokens: What the profiles rest on.
        repeated: Sequences of repeated random tokens that induction and duplicate-token scores rest on; 0 where there are none.
        unit: Of distances: ``"tokens"`` or ``"patches"``.
        seconds: That it took.
    """

    kind: ClassVar[str] = "heads"

    examples: Count
    tokens: Count
    repeated: Count = 0
    unit: str
    layers: tuple[LayerProfile, ...]
    samples: tuple[Sample, ...]
    seconds: float = 0.0
