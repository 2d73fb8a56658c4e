"""run.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_validator

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

    @field_validator("options", mode="before")
    @classmethod
    def _without_trust(cls, options: Any) -> Any:
        """A folder from elsewhere must not allow that code runs."""
        return {**options, "trust_remote_code": False} if isinstance(options, Mapping) else options
