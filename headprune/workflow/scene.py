"""What a run works on: options, a loaded model, its data and its layers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from headprune.attention import AttentionLayer
from headprune.data import DataOptions, Parts, load_parts
from headprune.errors import HeadPruneError
from headprune.inputs import first_rows
from headprune.models import LoadedModel, load_model
from headprune.scoring.base import Progress, Settings
from headprune.trace import find_attention


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        distil: Score by the divergence from the dense model's answers, not by the labels.
        keep: The budget that scoring should be sharpest at, where it cannot be sharp everywhere.
        scoring: What the scoring methods are told.
    """

    model: str
    data: DataOptions
    task: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    distil: bool = False
    keep: str | None = None
    scoring: Settings = field(default_factory=Settings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        scoring = Settings(**data.get("scoring", {}))
        return cls(**{**data, "data": DataOptions(**data["data"]), "scoring": scoring})


class Console(Protocol):
    """Where a run tells what it does."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def track(self, label: str) -> AbstractContextManager[Progress]:
        """A progress bar."""


@dataclass(frozen=True)
class Scene:
    """A loaded model with its data and its layers."""

    options: Options
    loaded: LoadedModel
    parts: Parts
    layers: list[AttentionLayer]

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def example(self) -> dict[str, Any]:
        """Two short examples of different length, for the trace and the proof."""
        return next(self.parts.score.batches(2))

    @property
    def metric(self) -> str:
        return self.loaded.task.metric

    @property
    def maskable(self) -> list[AttentionLayer]:
        """The layers that are scored, and that plans count."""
        return [layer for layer in self.layers if layer.maskable]

    def typical_input(self, batch: int = 1) -> dict[str, Any]:
        """Examples of median length, without labels where the model does not need them."""
        found: dict[str, Any] = self.parts.report.typical(min(batch, len(self.parts.report)))
        if len(self.parts.report) < batch:
            found = {k: torch.cat([v] * (batch // len(v) + 1))[:batch] for k, v in found.items()}
        found = first_rows(found, batch)
        if getattr(self.model.config, "is_encoder_decoder", False):
            return found
        return {k: v for k, v in found.items() if k not in ("labels", "start_positions", "end_positions")}


def open_scene(options: Options, console: Console) -> Scene:
    """Load the model and the data, and find the heads."""
    loaded = load_model(
        options.model, task=options.task, device=options.device, dtype=options.dtype, revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if getattr(loaded.config, "num_labels", 2) == 1 and loaded.task.metric == "accuracy":
        raise HeadPruneError(
            f"{options.model} has a regression head (one label), which the command line does not measure yet.",
            "Use the Python API: headprune.score(model, batches).",
        )
    device = next(loaded.model.parameters()).device
    console.say(f"{type(loaded.model).__name__} for {loaded.task.name} on {device}")
    parts = load_parts(options.data, loaded)
    columns = ", ".join(f"{what}: {name}" for what, name in parts.columns.items())
    sizes = ", ".join(f"{len(p)} to {p.name} ({p.split})" for p in (parts.score, parts.choose, parts.report))
    console.say(f"Data: {sizes}. Columns: {columns}.")
    for note in parts.notes:
        console.say(note)
    return Scene(options, loaded, parts, find_attention(loaded.model, next(parts.score.batches(2))))
