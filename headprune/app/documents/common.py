"""What several documents hold: the machine, the examples, metrics, a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from headprune.app.data.part import OnDemand, Part, Parts, content_hash
from headprune.app.documents.base import Count, Document
from headprune.evaluation import Measurement, interval

if TYPE_CHECKING:
    from typing_extensions import Self


class Environment(Document):
    """Versions and hardware of a run.

    Attributes:
        device: As torch names it, such as ``"cpu"`` or ``"cuda:0"``.
        device_name: The processor's or the GPU's own name.
        threads: That torch computes with on the CPU.
    """

    headprune: str
    python: str
    torch: str
    transformers: str
    system: str
    device: str
    device_name: str
    threads: Count


class Examples(Document):
    """Which examples a part has: enough to see later whether they are the same.

    Attributes:
        rows_hash: Of their row numbers in the split.
        content_hash: Of their token ids and labels; not there for images and sounds, whose values may differ between machines.
        shortened: How many were cut at their end, since they were too long.
    """

    split: str
    examples: Count
    rows_hash: str
    content_hash: str | None = None
    shortened: Count = 0

    @classmethod
    def of(cls, part: Part) -> Self:
        # Token ids are the same everywhere; pixels and sounds may differ in their last digit between machines.
        texts = not isinstance(part.features, OnDemand) and "input_ids" in part.features[0]
        content: dict[str, Any] = {"content_hash": part.content_hash()} if texts else {}
        cut: dict[str, Any] = {"shortened": part.shortened} if part.shortened else {}
        return cls(split=part.split, examples=len(part), rows_hash=content_hash(part.rows), **content, **cut)

    def same(self, other: Examples) -> bool:
        """Whether these are the same examples, as far as both sides say."""
        known = None not in (self.content_hash, other.content_hash)
        same_rows = (self.split, self.examples, self.rows_hash) == (other.split, other.examples, other.rows_hash)
        return same_rows and (not known or self.content_hash == other.content_hash)


class Cut(Document):
    """How the data was cut into parts without a common example.

    Attributes:
        train: What a model was fine-tuned on; it may hold scored examples.
    """

    score: Examples
    choose: Examples
    report: Examples
    train: Examples | None = None

    @classmethod
    def of(cls, parts: Parts, train: Part | None = None) -> Self:
        given = {"score": parts.score, "choose": parts.choose, "report": parts.report, "train": train}
        return cls(**{name: Examples.of(part) for name, part in given.items() if part is not None})

    def same(self, other: Cut) -> bool:
        """Whether the three parts are the same."""
        mine, others = (self.score, self.choose, self.report), (other.score, other.choose, other.report)
        return all(a.same(b) for a, b in zip(mine, others, strict=True))


class Measured(Document):
    """A model's metrics on one part, by name; ``low`` and ``high`` are the 95 % interval of the run's own metric."""

    metrics: dict[str, float]
    low: float
    high: float
    examples: Count

    @classmethod
    def of(cls, measured: Measurement, metric: str) -> Self:
        low, high = interval(measured, metric)
        return cls(metrics=measured.metrics, low=low, high=high, examples=len(measured))


class Epoch(Document):
    """The choosing part's metrics (by name, beside these two) after an epoch; of step 0, before training."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    step: Count
    epoch: float

    @property
    def metrics(self) -> dict[str, float]:
        return self.__pydantic_extra__


class Training(Document):
    """How a model was fine-tuned; see `headprune.app.finetune.Finetuned`."""

    model_config = ConfigDict(from_attributes=True)

    examples: Count
    steps: Count
    planned: Count
    history: tuple[Epoch, ...]
    best: Count
    resumed: Count | None
    seconds: float
