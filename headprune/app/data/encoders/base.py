"""What the encoders of all tasks share: columns, labels, and the length of texts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headprune.app.data.encoders.classes import Classes
from headprune.app.models import LoadedModel
from headprune.app.options import DataOptions
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.inputs import LABELS

# Usual names of the column of classes, the clearest first.
CLASS_COLUMNS = (
    "label", "labels", "class", "target", "sentiment", "category", "intent", "ner_tags", "pos_tags", "tags", "fine_label",
)  # fmt: skip


class Encoder:
    """Turns rows into features, and features into batches.

    Args:
        features: The columns, each with its type in the dataset.
        labelled: Whether every example must have a label; else those that are there are still taken.
    """

    def __init__(
        self, options: DataOptions, loaded: LoadedModel, features: Mapping[str, Any], labelled: bool = True
    ) -> None:
        self.options, self.labelled = options, labelled
        self.model = loaded.model
        self.config = loaded.config
        self.processor = loaded.processor
        self.available = list(features)
        self.columns: dict[str, str] = {}
        self.notes: list[str] = []
        self.cut = False  # whether something of the last example was cut off
        self.label: str | None = None  # the column of classes, or of answers
        self.setup()
        self.read(features)

    def setup(self) -> None:
        """Find the columns."""

    def read(self, features: Mapping[str, Any]) -> None:
        """Take rows of a split with these columns from now on: each may have an order of classes of its own."""
        self.classes = Classes(self.config, features.get(self.columns.get("label", "")))
        if self.classes.note and self.classes.note not in self.notes:
            self.notes.append(self.classes.note)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | str:
        """Features of one example; or why it cannot be used, in a few words."""
        raise NotImplementedError

    def identity(self, feature: dict[str, Any]) -> Any:
        """What makes two examples the same input."""
        return {k: v for k, v in feature.items() if k not in LABELS}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch: inputs are padded to the longest; each example has one label, or one row of labels."""
        from transformers import DataCollatorWithPadding

        return dict(DataCollatorWithPadding(self.processor)(features))

    def column(self, what: str, flag: str, given: str | None, usual: Sequence[str]) -> str:
        """The column that the user named, or the first with a usual name.

        Args:
            what: What it holds, for messages and reports.
            flag: The option that names it.
            given: That option's value, if there is one.
            usual: Usual names.

        Raises:
            HeadPruneError: There is no such column.
        """
        there = ", ".join(self.available)
        if given is not None and given not in self.available:
            raise HeadPruneError(f"There is no column {given!r} ({flag}).", f"The columns are {there}.")
        found = given or next((name for name in usual if name in self.available), None)
        if found is None:
            raise HeadPruneError(f"No column looks like the {what}: the columns are {there}.", f"Name it with {flag}.")
        self.columns[what] = found
        return found

    def label_column(self, usual: Sequence[str] = CLASS_COLUMNS, what: str = "label") -> str | None:
        """The column of the labels; None if there is none, and need not be."""
        given = self.options.label_column
        if given is None and not set(usual) & set(self.available):
            if not self.labelled:
                return None
            raise HeadPruneError(
                f"No column looks like the {what}: the columns are {', '.join(self.available)}.",
                "Name it with --label-column; `score --distil` needs none.",
            )
        return self.column(what, "--label-column", given, usual)

    def labels(self, example: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
        """A label under the name that models take it by; nothing where there is none that fits, and need not be."""
        if self.label is None:
            return {}
        try:
            return {"labels": make(example[self.label])}
        except HeadPruneError:
            if self.labelled:
                raise
            return {}

    @cached_property
    def max_length(self) -> int:
        """Tokens per example, at most: as asked for, or 512; never more than the model accepts."""
        return min(self.options.max_length or 512, self.most_tokens)

    @cached_property
    def most_tokens(self) -> int:
        """Tokens per example that the model and its tokenizer accept."""
        tokenizer = getattr(self.processor, "model_max_length", None)
        limits = [tokenizer if isinstance(tokenizer, int) else sys.maxsize]
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            limits.append(positions - _first_position(self.model))
        return min(limits)

    @property
    def cut_note(self) -> str:
        """For notes: at which length texts were cut, and why."""
        why = "the most that the model takes" if self.max_length >= self.most_tokens else "--max-length says where"
        return f"Texts of more than {self.max_length} tokens were cut there ({why})"

    def shortened(self, encode: Callable[..., Any], limit: int | None = None, how: str | bool = True) -> Any:
        """A tokenizer's encoding of an example, cut at ``limit`` tokens (default `max_length`); sets `cut` if it was longer.

        Args:
            encode: The tokenizer with its texts, ready to be called with ``truncation`` and ``max_length``.
            how: Its ``truncation``.
        """
        most = limit or self.max_length
        coded = encode(truncation=how, max_length=most)
        # The whole text is encoded only where that may matter: it takes the same time again.
        if len(coded["input_ids"]) >= most and len(encode(truncation=False)["input_ids"]) > len(coded["input_ids"]):
            self.cut = True
        return coded


def _first_position(model: Any) -> int:
    """Rows of the position table that no token uses: RoBERTa starts after its padding index."""
    tables = (m for n, m in model.named_modules() if n.endswith("position_embeddings"))
    return max((t.padding_idx + 1 for t in tables if getattr(t, "padding_idx", None) is not None), default=0)


def padded_labels(labels: Sequence[Sequence[int]]) -> Tensor:
    """Labels of different lengths as one tensor [examples, longest], padded with `IGNORED`.

    Always padded on the right, as decoders read from the left: transformers' collator pads on the inputs' side.
    """
    rows = [torch.tensor(row, dtype=torch.long) for row in labels]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
