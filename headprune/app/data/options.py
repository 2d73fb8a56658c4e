"""Where the data is and how to read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headprune.app import MAX_SEED
from headprune.app.data.reading import check_local
from headprune.errors import HeadPruneError


@dataclass(frozen=True)
class DataOptions:
    """Where the data is and how to read it.

    Attributes:
        also: Second datasets, on which models are only measured.
    """

    dataset: str
    subset: str | None = None
    split: str | None = None
    choose_split: str | None = None
    report_split: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    limit: int = 512
    report_limit: int = 2000
    max_length: int | None = None
    batch_size: int = 32
    seed: int = 0
    also: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what cannot be right, before anything is loaded.

        Raises:
            HeadPruneError: A number out of its range; no such file or folder, or an empty one.
        """
        least = {"limit": 2, "report_limit": 2, "max_length": 2, "batch_size": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= (MAX_SEED if name == "seed" else math.inf):
                most = f" to {MAX_SEED}" if name == "seed" else " or more"
                raise HeadPruneError(f"--{name.replace('_', '-')} is {value}.", f"Give {low}{most}.")
        if self.text_column is not None and self.text_column.count(",") > 1:
            raise HeadPruneError(
                f"--text-column {self.text_column} names more than two columns.", "Name one, or two for pairs."
            )
        for dataset in (self.dataset, *self.also):
            check_local(dataset)
