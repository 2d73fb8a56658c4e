"""run.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_serializer, field_validator

from headprune.app.documents.base import Count, Document, File
from headprune.app.documents.common import Cut, Environment
from headprune.app.options import Options


class LayerFacts(Document):
    """What a report says of an attention layer; see `headprune.AttentionLayer`."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    index: Count
    kind: str
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    prunable: bool
    reason: str


class ModelFacts(Document):
    """The dense model.

    Attributes:
        dtype: That it was computed in, such as ``"float32"``.
        attention: Its attention kernel, by transformers' name for it.
        parameters: How many it has, shared ones once.
        heads: In all of its layers.
        config, processor: Hashes of its config and of its tokenizer or image processor (`headprune.fingerprint`); "" in older files.
    """

    class_name: str = Field(validation_alias="class", serialization_alias="class")
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
        """What differs now of these hashes, in words; [] if that is not known, as under another version of transformers.

        Args:
            then: The environment that this was noted in.
        """
        import transformers

        if then.transformers != transformers.__version__:
            return []
        pairs = {"config": (self.config, config), "tokenizer or image processor": (self.processor, processor)}
        return [what for what, (before, now) in pairs.items() if before and now and before != now]


class Run(File):
    """How scores and plans were made.

    Attributes:
        commands: That scored, and that pruned.
        when: The first of them, UTC.
        seconds: That each of them took.
        options: As they were in effect; code is never trusted because a file says so.
        methods: That scored.
        columns: Of the dataset, by what they were used for.
        notes: What was guessed or left out on the way.
        folder: The run folder, as it was named when it was written.
        checksums: Of the documents that were written with this one, by their names.
    """

    kind = "run"

    commands: tuple[str, ...]
    when: str
    seconds: tuple[float, ...]
    options: Options
    methods: tuple[str, ...]
    environment: Environment
    parts: Cut
    columns: dict[str, str]
    notes: tuple[str, ...]
    model: ModelFacts
    folder: str = ""
    checksums: dict[str, str] = Field(default_factory=dict)

    @field_validator("options", mode="before")
    @classmethod
    def _without_trust(cls, options: Any) -> Any:
        """A folder from elsewhere must not allow that code runs."""
        return {**options, "trust_remote_code": False} if isinstance(options, Mapping) else options

    @field_serializer("options", mode="wrap")
    def _where_it_was_said(self, options: Options, written: Callable[[Options], dict[str, Any]]) -> dict[str, Any]:
        """Where weights go is in the file only if it was said: older files do not have it."""
        unsaid = {name for name in ("device_map", "device_memory", "offload_folder") if getattr(options, name) is None}
        return {key: value for key, value in written(options).items() if key not in unsaid}
