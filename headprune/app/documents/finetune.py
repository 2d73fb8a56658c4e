"""finetune.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from headprune.app.documents.run import Cut, Environment, Measured, Training
from headprune.app.options import DataOptions, FinetuneOptions
from headprune.documents import Count, File
from headprune.evaluation import Change


@dataclass(frozen=True)
class TrainingOptions(FinetuneOptions):
    """How `headprune finetune` trained; ``train_limit`` is the most examples it was allowed."""

    dtype: str = "float32"
    train_limit: Count | None = None


@dataclass(frozen=True, kw_only=True)
class FinetunedModels:
    """The three models on the reporting part."""

    dense: Measured
    pruned: Measured
    finetuned: Measured


@dataclass(frozen=True, kw_only=True)
class FinetunedChanges:
    """Paired changes: from the dense model to the pruned and to the fine-tuned one, and from the pruned to the fine-tuned one."""

    pruned: Change
    finetuned: Change
    gain: Change


@dataclass(frozen=True, kw_only=True)
class FinetuneRecord(File):
    """How a pruned model was fine-tuned, and what that gave.

    Attributes:
        pruned, teacher: The models' folders or names.
        seconds: The time it took in all.
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
    models: FinetunedModels
    changes: FinetunedChanges
