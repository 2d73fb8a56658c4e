"""Encoded examples of one purpose, and batches of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from headprune.files import digest


@dataclass(frozen=True)
class Part:
    """Encoded examples of one purpose.

    Attributes:
        name: ``"score"``, ``"choose"``, ``"report"`` or ``"train"``; of a second dataset, its own.
        split: The split they are from.
        rows: Their row numbers in that split.
        features: One dict of plain lists or tensors per example; images and sounds to train on are encoded when they are read.
        batch_size: Examples per batch.
        inputs: A hash of every example's input, where parts were cut by it.
        shortened: How many were cut to the length that the model accepts, or that was asked for.
        left_out: How many rows could not be used, by the reason.
    """

    name: str
    split: str
    rows: list[int]
    features: Sequence[dict[str, Any]]
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    batch_size: int
    inputs: tuple[str, ...] = ()
    shortened: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def purpose(self) -> str:
        """In words, such as ``"to score"``."""
        return f"to {self.name if self.name in ('score', 'choose', 'report', 'train') else 'measure'}"

    @property
    def reasons(self) -> str:
        """Why rows were left out, with their numbers; "" if none were."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())

    def lengths(self) -> list[int]:
        """Tokens per example (1 where there are none)."""
        if isinstance(self.features, OnDemand):
            return [1] * len(self)
        return [len(f["input_ids"]) if "input_ids" in f else 1 for f in self.features]

    def order(self) -> list[int]:
        """Examples by length, so that a batch holds little padding."""
        lengths = self.lengths()
        return sorted(range(len(self)), key=lambda i: (lengths[i], i))

    def batches(self, batch_size: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Padded batches in the order of `order`."""
        order, size = self.order(), batch_size or self.batch_size
        for start in range(0, len(order), size):
            yield self.collate([self.features[i] for i in order[start : start + size]])

    def typical(self, count: int) -> dict[str, Tensor]:
        """A batch of the ``count`` examples whose length is nearest to the median."""
        order = self.order()
        middle = max(0, min(len(order) // 2 - count // 2, len(order) - count))
        return self.collate([self.features[i] for i in order[middle : middle + count]])

    @cached_property
    def content_hash(self) -> str:
        """A hash of every example, labels included."""
        if isinstance(self.features, OnDemand):
            return content_hash(self.features.hashes)
        return content_hash([content_hash(feature) for feature in self.features])


@dataclass(frozen=True)
class DataParts:
    """The three disjoint parts, the columns that were guessed, and notes on what was left out.

    Attributes:
        also: Second datasets, to which nothing is fitted; they share no input with the first two parts.
    """

    score: Part
    choose: Part
    report: Part
    columns: dict[str, str]
    notes: list[str] = field(default_factory=list)
    also: tuple[Part, ...] = ()


@dataclass(frozen=True)
class OnDemand(Sequence[dict[str, Any]]):
    """Features that are encoded each time they are read: images and sounds of a whole split may not fit in memory.

    Attributes:
        encode: Features of a row by its number.
        hashes: Of the features of each of the ``rows``.
    """

    encode: Callable[[int], Any]
    rows: list[int]
    hashes: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.encode(self.rows[index])


def content_hash(value: Any) -> str:
    """A hash of plain values and tensors: equal where they are equal."""

    def plain(x: Any) -> Any:
        return digest([x.numpy().tobytes()], 64) if isinstance(x, Tensor) else str(x)

    return digest(json.dumps(value, default=plain, sort_keys=True))
