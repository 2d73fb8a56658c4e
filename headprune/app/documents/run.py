"""run.json: the machine, the model, the examples and the options of a run; and finetune.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from headprune.app.data import DataParts, Part
from headprune.app.data.encoder import content_hash
from headprune.app.options import DataOptions, FinetuneOptions, Options
from headprune.attention import AttentionLayer
from headprune.documents import Count, File
from headprune.evaluation import Change, Measurement, interval


@dataclass(frozen=True)
class Environment:
    """Versions and hardware of a run.

    Attributes:
        device: As torch names it, such as ``"cpu"`` or ``"cuda:0"``.
        device_name: The processor's or the GPU's own name.
        threads: CPU threads that torch computes with.
    """

    headprune: str
    python: str
    torch: str
    transformers: str
    system: str
    device: str
    device_name: str
    threads: Count


@dataclass(frozen=True)
class Examples:
    """Identifies the examples of a part, to see later whether they are the same.

    Attributes:
        rows_hash: A hash of their row numbers in the split.
        content_hash: A hash of their token ids and labels; None for images and sounds, whose values may differ between machines.
        shortened: How many were truncated at their end, as they were too long.
    """

    split: str
    examples: Count
    rows_hash: str
    content_hash: str | None = None
    shortened: Count = 0

    @classmethod
    def of(cls, part: Part) -> Examples:
        # Token ids are the same everywhere; pixels and sounds may differ in their last digit between machines.
        content = part.content_hash if "input_ids" in part.features[0] else None
        return cls(part.split, len(part), content_hash(part.rows), content, part.shortened)

    def same(self, other: Examples) -> bool:
        """Whether these are the same examples, as far as both sides say."""
        known = None not in (self.content_hash, other.content_hash)
        same_rows = (self.split, self.examples, self.rows_hash) == (other.split, other.examples, other.rows_hash)
        return same_rows and (not known or self.content_hash == other.content_hash)


@dataclass(frozen=True)
class Cut:
    """How the data was cut into disjoint parts.

    Attributes:
        train: What a model was fine-tuned on; it may hold scored examples.
    """

    score: Examples
    choose: Examples
    report: Examples
    train: Examples | None = None

    @classmethod
    def of(cls, parts: DataParts, train: Part | None = None) -> Cut:
        score, choose, report = map(Examples.of, (parts.score, parts.choose, parts.report))
        return cls(score, choose, report, None if train is None else Examples.of(train))

    def same(self, other: Cut) -> bool:
        """Whether the three parts are the same."""
        return all(getattr(self, part).same(getattr(other, part)) for part in ("score", "choose", "report"))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model's metrics on one part, by name; ``low`` and ``high`` are the 95 % interval of the run's own metric."""

    metrics: dict[str, float]
    low: float
    high: float
    examples: Count

    @classmethod
    def of(cls, measurement: Measurement, metric: str) -> Measured:
        low, high = interval(measurement, metric)
        return Measured(metrics=measurement.metrics, low=low, high=high, examples=len(measurement))


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model was fine-tuned.

    Attributes:
        examples: Training examples per epoch.
        steps: Optimizer steps taken, of the ``planned`` ones.
        history: The choosing part's metrics by name, with ``step`` and ``epoch``: before training (step 0) and after every epoch.
        best: The step whose weights the model has; 0 if training did not make the model better.
        resumed: The step at which this run continued an interrupted one; None if it did not.
        seconds: The time of the training, without that of an interrupted run.
    """

    examples: Count
    steps: Count
    planned: Count
    history: tuple[dict[str, float], ...]
    best: Count
    resumed: Count | None
    seconds: float


@dataclass(frozen=True)
class LayerFacts:
    """What a report says of an attention layer; see `headprune.AttentionLayer`."""

    name: str
    index: Count
    kind: str
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    prunable: bool
    reason: str

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerFacts:
        return cls(*(getattr(layer, field.name) for field in fields(cls)))


@dataclass(frozen=True)
class ModelFacts:
    """The dense model.

    Attributes:
        class_name: Its class; the key in the file is ``class``.
        dtype: The dtype that it was computed in, such as ``"float32"``.
        attention: Its attention kernel, by transformers' name for it.
        parameters: The number of its parameters, shared ones counted once.
        heads: The number of heads in all of its layers.
        config, processor: Hashes of its config and of its tokenizer or image processor (`headprune.fingerprint`); "" in older files.
    """

    class_name: Annotated[str, Field(alias="class")]
    task: str
    metric: str
    dtype: str
    attention: str | None
    parameters: Count
    fingerprint: str
    heads: Count
    layers: tuple[LayerFacts, ...]
    config: str = ""
    processor: str = ""

    def other_now(self, then: Environment, config: str, processor: str = "") -> list[str]:
        """Which of config and processor have changed since; [] if unknown, as with another version of transformers.

        Args:
            then: The environment in which these hashes were made.
            config, processor: Their hashes now.
        """
        import transformers

        if then.transformers != transformers.__version__:
            return []
        pairs = {"config": (self.config, config), "tokenizer or image processor": (self.processor, processor)}
        return [what for what, (before, now) in pairs.items() if before and now and before != now]


def _without_trust(options: Any) -> Any:
    """The options with ``trust_remote_code`` off: a run folder from elsewhere must not allow code to run."""
    loading = options.get("loading") if isinstance(options, Mapping) else None
    return {**options, "loading": {**loading, "trust_remote_code": False}} if isinstance(loading, Mapping) else options


@dataclass(frozen=True, kw_only=True)
class Run(File):
    """How scores and plans were made.

    Attributes:
        commands: The command that scored, and the one that pruned.
        when: The time of the first command, UTC.
        seconds: The time that each command took.
        options: The options in effect; code is never trusted because a file says so.
        columns: The dataset's columns, by what they were used for.
        notes: What was guessed or left out on the way.
        folder: The run folder's path when it was written.
        checksums: Checksums of the documents that were written with this one, by file name.
    """

    kind: ClassVar[str] = "run"

    commands: tuple[str, ...]
    when: str
    seconds: tuple[float, ...]
    options: Annotated[Options, BeforeValidator(_without_trust)]
    environment: Environment
    parts: Cut
    columns: dict[str, str]
    notes: tuple[str, ...]
    model: ModelFacts
    folder: str = ""
    checksums: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingOptions(FinetuneOptions):
    """How `headprune finetune` trained; ``train_limit`` is the most examples it was allowed."""

    dtype: str = "float32"
    train_limit: Count | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneRecord(File):
    """How a pruned model was fine-tuned, and the result.

    Attributes:
        pruned, teacher: The models' folders or names.
        seconds: The time it took in all.
        models: The metrics of ``"dense"``, ``"pruned"`` and ``"finetuned"`` on the reporting part.
        changes: Paired by example: from the dense model to the ``"pruned"`` and the ``"finetuned"`` one; ``"gain"`` from the pruned to the fine-tuned one.
    """

    kind: ClassVar[str] = "finetune"

    command: str
    when: str
    environment: Environment
    pruned: str
    teacher: str
    task: str
    metric: str
    options: TrainingOptions
    data: DataOptions
    parts: Cut
    notes: tuple[str, ...]
    seconds: float
    training: Training
    models: dict[str, Measured]
    changes: dict[str, Change]
