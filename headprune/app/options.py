"""What a run and a fine-tuning are asked for: values, as run folders note them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pydantic import StrictBool, StrictInt

from headprune.app import MAX_SEED
from headprune.app.data.options import DataOptions
from headprune.app.distillation import Mixture
from headprune.app.models import TASKS
from headprune.app.placing import placing_of
from headprune.errors import HeadPruneError
from headprune.plans import keep_of
from headprune.scoring.base import Settings


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        trust_remote_code: Whether code that comes with the model may run. Only a person says so, here and now.
        distil: Score by the divergence from the dense model's answers, not by the labels.
        keep: The budget that scoring should be sharpest at, where it cannot be sharp everywhere.
        scoring: What the scoring methods are told.
        device_map, device_memory, offload_folder: Where the weights of a model go that is larger than a device, as typed.
    """

    model: str
    data: DataOptions
    task: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: StrictInt = 0
    revision: str | None = None
    trust_remote_code: bool = False
    distil: StrictBool = False
    keep: str | None = None
    scoring: Settings = field(default_factory=Settings)
    device_map: str | None = None
    device_memory: str | None = None
    offload_folder: str | None = None

    def placing(self) -> dict[str, Any] | None:
        """Where the weights go, if not all onto one device.

        Raises:
            HeadPruneError: A device map or an amount of memory that is none.
        """
        return placing_of(self.device_map, self.device_memory, self.offload_folder)

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
        if self.placing() is not None and self.device != "auto":
            raise HeadPruneError("--device and --device-map both say where the model goes.", "Give one of them.")
        self.scoring.check()
        self.data.check()


@dataclass(frozen=True)
class FinetuneOptions:
    """How to train.

    Attributes:
        epochs: Passes over the training part; may be a fraction.
        learning_rate: The highest: it rises linearly over the first tenth of the steps, then falls linearly to 0.
        mixture: What the loss is made of.
        weight_decay: AdamW's, for weights of two or more dimensions (not for biases and norms).
        patience: Training stops after this many epochs without a better value on the choosing part.
        seed: For the order of the examples and for dropout.

    Raises:
        HeadPruneError: A value out of its range.
    """

    epochs: float = 1.0
    learning_rate: float = 3e-5
    mixture: Mixture = field(default_factory=Mixture)
    weight_decay: float = 0.01
    patience: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise HeadPruneError(f"Training cannot take {self.epochs:g} epochs.", "Choose a number above 0.")
        if not 0 < self.learning_rate < math.inf:
            raise HeadPruneError(
                f"There is no learning rate {self.learning_rate:g}.", "Choose one above 0, such as 3e-5."
            )
        if self.patience < 1:
            raise HeadPruneError(f"There is no patience of {self.patience} epochs.", "Choose 1 or more.")
