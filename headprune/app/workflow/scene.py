"""What a run works on: options, a loaded model, its data and its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

import torch
from torch import nn

from headprune.app import MAX_SEED
from headprune.app.data import DataOptions, Parts, load_parts
from headprune.app.models import TASKS, LoadedModel, load_model, numbers_given
from headprune.attention import AttentionLayer
from headprune.errors import HeadPruneError
from headprune.inputs import first_rows
from headprune.plans import keep_of
from headprune.scoring.base import Settings
from headprune.searching import Listener
from headprune.trace import find_attention


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        trust_remote_code: Whether code that comes with the model may run. Only a person says so, here and now.
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
    def from_json(cls, data: Any) -> Options:
        """Options as a run noted them, but for ``trust_remote_code``: a folder from elsewhere must not grant that.

        Raises:
            HeadPruneError: Not such options.
        """
        known = _checked(cls, data, without=("data", "scoring", "trust_remote_code"))
        parts = {
            "data": _checked(DataOptions, data.get("data")),
            "scoring": _checked(Settings, data.get("scoring", {})),
        }
        return cls(**known, data=DataOptions(**parts["data"]), scoring=Settings(**parts["scoring"]))

    @classmethod
    def of_run(cls, run: Mapping[str, Any], where: object) -> Options:
        """The options in a run's document.

        Raises:
            HeadPruneError: It has none, or they are damaged.
        """
        try:
            return cls.from_json(run.get("options"))
        except HeadPruneError as error:
            raise HeadPruneError(f"{where} is damaged: {error.args[0]}", "Score again.") from None

    def check(self) -> None:
        """Refuse what is surely wrong, before anything is loaded.

        Raises:
            HeadPruneError: A number out of its range, no such task, or no such file.
        """
        if not 0 <= self.seed <= MAX_SEED:
            raise HeadPruneError(f"--seed is {self.seed}.", f"Give 0 to {MAX_SEED}.")
        if self.task is not None and self.task not in TASKS:
            raise HeadPruneError(f"There is no task {self.task!r}.", f"Use one of {', '.join(TASKS)}.")
        if self.keep is not None:
            keep_of(self.keep)
        self.scoring.check()
        self.data.check()


_Kind = TypeVar("_Kind")


def _checked(kind: type[_Kind], data: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass in a document, all of the right type."""
    if not isinstance(data, Mapping):
        raise HeadPruneError(f"{kind.__name__} are {type(data).__name__}, not names with values.")
    hints, found = get_type_hints(kind), {}
    declared = {f.name: f for f in fields(kind) if f.name not in without}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(declared) - set(without)):
        raise HeadPruneError(f"this headprune has no option {unknown[0]!r}.")
    for name, own in declared.items():
        if name not in data:
            if own.default is MISSING and own.default_factory is MISSING:
                raise HeadPruneError(f"the option {name!r} is missing.")
            continue
        value, hint = data[name], hints[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        right = isinstance(value, bool) if hint is bool else isinstance(value, hint) and not isinstance(value, bool)
        if not right and not (whole and isinstance(1.0, hint)):
            raise HeadPruneError(f"the option {name!r} is {value!r}.")
        found[name] = value
    return found


Console = Listener
"""Where a run tells what it does."""


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
    options.check()
    loaded = load_model(
        options.model, task=options.task, device=options.device, dtype=options.dtype, revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if (numbers := numbers_given(loaded)) is not None:
        raise HeadPruneError(
            f"{options.model} has a regression head ({numbers}), which the command line does not measure yet.",
            "Use the Python API: headprune.score(model, batches).",
        )
    device = next(loaded.model.parameters()).device
    console.say(f"{type(loaded.model).__name__} for {loaded.task.name} on {device}")
    parts = load_parts(options.data, loaded)
    columns = ", ".join(f"{what}: {name}" for what, name in parts.columns.items())
    sizes = ", ".join(f"{len(p)} to {p.name} ({p.split})" for p in (parts.score, parts.choose, parts.report))
    console.say(f"Data: {sizes}. Columns: {columns}.")
    parts.notes.extend(loaded.notes)
    for note in parts.notes:
        console.say(note)
    return Scene(options, loaded, parts, find_attention(loaded.model, next(parts.score.batches(2))))
