"""What every task's encoder shares: columns, labels, and where texts are cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headprune.app.data.options import DataOptions
from headprune.app.models import LoadedModel
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError

LABEL_KEYS = ("labels", "start_positions", "end_positions")

# Usual names of the column of classes, the most telling first.
CLASS_COLUMNS = (
    "label", "labels", "class", "target", "sentiment", "category", "intent", "ner_tags", "pos_tags", "tags", "fine_label",
)  # fmt: skip


class Encoder:
    """Turns rows into features, and features into batches."""

    def __init__(self, options: DataOptions, loaded: LoadedModel, columns: Sequence[str]) -> None:
        self.options = options
        self.model = loaded.model
        self.config = loaded.config
        self.processor = loaded.processor
        self.available = list(columns)
        self.columns: dict[str, str] = {}
        self.notes: list[str] = []
        self.cut = False  # whether something of the last example was cut off
        self.setup()

    def setup(self) -> None:
        """Find the columns."""

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | None:
        """Features of one example; None if it cannot be used."""
        raise NotImplementedError

    def identity(self, feature: dict[str, Any]) -> Any:
        """What makes two examples the same input."""
        return {k: v for k, v in feature.items() if k not in LABEL_KEYS}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A padded batch."""
        return dict(self.collator(features))

    @cached_property
    def collator(self) -> Callable[[list[dict[str, Any]]], Mapping[str, Tensor]]:
        """What makes a batch: here inputs are padded to the longest, and there is a label (or a row of them) an example."""
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.processor)  # type: ignore[no-any-return]

    def column(self, what: str, flag: str, given: str | None, usual: Sequence[str]) -> str:
        """A column that was named, or the first with a usual name."""
        if given is not None:
            if given not in self.available:
                raise HeadPruneError(
                    f"There is no column {given!r} ({flag}).", f"The columns are {', '.join(self.available)}."
                )
            self.columns[what] = given
            return given
        for name in usual:
            if name in self.available:
                self.columns[what] = name
                return name
        raise HeadPruneError(
            f"No column looks like the {what}: the columns are {', '.join(self.available)}.", f"Name it with {flag}."
        )

    @cached_property
    def max_length(self) -> int:
        """Tokens per example: what was asked for, or 512, as far as the model allows."""
        return min(self.options.max_length or 512, self.most_tokens)

    @cached_property
    def most_tokens(self) -> int:
        """Tokens that the model and its tokenizer take."""
        limits = [sys.maxsize]
        tokenizer, table = (
            getattr(self.processor, "model_max_length", None),
            getattr(self.config.get_text_config(), "max_position_embeddings", None),
        )
        if isinstance(tokenizer, int):
            limits.append(tokenizer)
        if isinstance(table, int) and table > 0:
            limits.append(table - _first_position(self.model))
        return min(limits)

    @property
    def cut_note(self) -> str:
        """Where texts are cut, and why there."""
        why = "the most that the model takes" if self.max_length >= self.most_tokens else "--max-length says where"
        return f"Texts of more than {self.max_length} tokens were cut there ({why})"

    def shortened(self, encode: Callable[..., Any], limit: int | None = None, how: str | bool = True) -> Any:
        """What a tokenizer gives for an example, cut at ``limit`` (`max_length`); notes whether that took anything off.

        Args:
            encode: The tokenizer with its texts, ready to be called with ``truncation`` and ``max_length``.
            how: Its ``truncation``.
        """
        most = limit or self.max_length
        coded = encode(truncation=how, max_length=most)
        # Whole it is made only where that may matter: a long text takes as long again.
        if len(coded["input_ids"]) >= most and len(encode(truncation=False)["input_ids"]) > len(coded["input_ids"]):
            self.cut = True
        return coded


def _first_position(model: Any) -> int:
    """Rows of the position table that no token uses: RoBERTa starts after its padding index."""
    tables = (m for n, m in model.named_modules() if n.endswith("position_embeddings"))
    return max((t.padding_idx + 1 for t in tables if getattr(t, "padding_idx", None) is not None), default=0)


def class_of(value: Any, config: Any) -> int | float:
    """A label as the model's class: its number, or looked up by name.

    Raises:
        HeadPruneError: The model's head has no such class.
    """
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        if config.num_labels == 1:
            return float(value)
        if float(value).is_integer() and 0 <= value < config.num_labels:
            return int(value)
        raise HeadPruneError(
            f"label {value} does not fit the model's head, which has {config.num_labels} classes "
            f"(0 to {config.num_labels - 1}).",
            "Check --label-column, or that this is the data the model was trained on.",
        )
    names = {str(k).lower(): int(v) for k, v in config.label2id.items()}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    raise HeadPruneError(
        f"label {value!r} is none of the model's ({', '.join(list(config.label2id)[:6])}).",
        "Check --label-column, or use the classes' numbers.",
    )


def padded_labels(labels: Sequence[Sequence[int]]) -> Tensor:
    """Labels of different lengths as one tensor [examples, longest], what is missing ignored.

    It is always on the right, as decoders read from the left: transformers' collator goes by the inputs' side.
    """
    rows = [torch.tensor(row, dtype=torch.long) for row in labels]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
