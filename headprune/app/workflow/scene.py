"""What a run works on: a loaded model, its data and its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.app.data import DataParts, load_parts
from headprune.app.models import LoadedModel, load_model, numbers_given
from headprune.app.options import Options
from headprune.app.placing import placed
from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.fingerprint import fingerprint
from headprune.inputs import first_rows
from headprune.parallel import current
from headprune.plan_search import SearchConsole
from headprune.scoring import method_named
from headprune.scoring.base import method_and_settings
from headprune.trace import find_attention

Console = SearchConsole
"""Where a run tells what it does."""


@dataclass(frozen=True)
class Scene:
    """A loaded model with its data and its layers."""

    options: Options
    loaded: LoadedModel
    parts: DataParts
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


def open_scene(options: Options, console: Console, *, labelled: bool | None = True) -> Scene:
    """Load the model and the data, and find the heads.

    Args:
        labelled: Whether labels must be there; None: only if one of the scoring methods reads them, and not by `Options.distil`.
    """
    options.check()
    if options.loading.device_map is not None and current().size > 1:
        raise HeadPruneError(
            "--device-map spreads one model over all devices, which several processes would each do.",
            "Start one process, or leave out --device-map: each process then takes a device.",
        )
    loaded = load_model(options.model, options.loading)
    if (numbers := numbers_given(loaded)) is not None:
        raise HeadPruneError(
            f"{options.model} has a regression head ({numbers}), which the command line does not measure yet.",
            "Use the Python API: headprune.score(model, batches).",
        )
    console.say(f"{type(loaded.model).__name__} for {loaded.task.name} on {placed(loaded.model)}")
    if labelled is None:
        methods = [method_named(method_and_settings(text)[0]) for text in options.methods]
        labelled = not options.distil and any(method.loss for method in methods)
    parts = load_parts(options.data, loaded, labelled)
    columns = ", ".join(f"{what}: {name}" for what, name in parts.columns.items())
    sizes = ", ".join(f"{len(p)} to {p.name} ({p.split})" for p in (parts.score, parts.choose, parts.report))
    unused = sum(sum(p.left_out.values()) for p in (parts.score, parts.choose, parts.report))
    console.say(f"Data: {sizes}{f'; {unused} rows left out' if unused else ''}. Columns: {columns}.")
    parts.notes.extend(loaded.notes)
    for note in parts.notes:
        console.say(note)
    current().agree("a model", lambda: fingerprint(loaded.model))
    current().agree("examples", lambda: [part.content_hash() for part in (parts.score, parts.choose, parts.report)])
    return Scene(options, loaded, parts, find_attention(loaded.model, next(parts.score.batches(2))))
