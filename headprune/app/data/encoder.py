"""What encodes a dataset's rows for a task's model: the columns, the labels, the length of texts, and batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headprune.app.data.classes import Classes
from headprune.app.models import LoadedModel, positions_of
from headprune.app.options import DataOptions
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.inputs import unlabelled

Row = Mapping[str, Any]
Feature = dict[str, Any]
OPTIONAL = ("label", "answers")  # what examples may lack where no label is needed


@dataclass(frozen=True)
class Encoding:
    """How the examples of a task are encoded.

    Attributes:
        encode: Features of a row with this number; or why it cannot be used, in a few words.
        columns: Usual names of the columns, by what they hold: the inputs, then what is predicted, if that has a column.
        labels: ``""``: one label an example; ``"input"``: one a token, padded on the inputs' side; ``"right"``: a decoder's text, padded
            on the right, as decoders read from the left.
        pads: Whether inputs are padded by the processor; else all have one shape.
        masks: Whether labels are what the inputs were before they were masked.
        prepare: Checks the model and the tokenizer, and gives a note on what is measured; "" for none.
    """

    encode: Callable[[Encoder, Row, int], Feature | str]
    columns: Mapping[str, tuple[str, ...]]
    labels: str = ""
    pads: bool = True
    masks: bool = False
    prepare: Callable[[Encoder], str] = lambda _: ""


class Encoder:
    """Turns rows into features, and features into batches.

    Args:
        splits: The dataset's, by name.
        labelled: Whether every example must have a label; else those that are there are still taken.

    Attributes:
        columns: Those that are used, by what they hold; a pair is joined by a comma.
        notes: What a reader should know.
        cut: Whether something of the last example was cut off.
    """

    def __init__(
        self, encoding: Encoding, options: DataOptions, loaded: LoadedModel, splits: Mapping[str, Any], labelled: bool
    ) -> None:
        self.encoding, self.options, self.splits, self.labelled = encoding, options, splits, labelled
        self.model, self.config, self.processor = loaded.model, loaded.config, loaded.processor
        self.columns: dict[str, str] = {}
        features = next(iter(splits.values())).features
        for what, usual in encoding.columns.items():
            if column := self._column(what, usual, list(features)):
                self.columns[what] = column
        self.label = next((self.columns[what] for what in OPTIONAL if what in self.columns), None)
        self.shifted = False  # whether labels are the next tokens
        self.cut = False
        self.notes = list(filter(None, [encoding.prepare(self)]))
        self.read(features)

    def _column(self, what: str, usual: Sequence[str], there: Sequence[str]) -> str:
        """The column that the user named, or the first with a usual name; "" for labels that are not needed and not there.

        Raises:
            HeadPruneError: There is no such column.
        """
        is_input, optional = not self.columns, what in OPTIONAL
        flag = "--text-column" if is_input else "--label-column"
        given = self.options.text_column if is_input else self.options.label_column
        known = (name for name in usual if name not in self.columns.values() and {*name.split(",")} <= {*there})
        column = given or next(known, "")
        if not column and optional and not self.labelled:
            return ""
        names = [name.strip() for name in column.split(",")] if is_input else [column]
        listed = f"the columns are {', '.join(there)}"
        if not column:
            more = " (two for pairs: premise,hypothesis)" if "," in usual[0] else ""
            more = "; `score --distil` needs none" if optional else more
            raise HeadPruneError(f"No column looks like the {what}: {listed}.", f"Name it with {flag}{more}.")
        if wrong := [name for name in names if name not in there]:
            raise HeadPruneError(f"There is no column {wrong[0]!r} ({flag}): {listed}.", f"Name another with {flag}.")
        return ",".join(names)

    def read(self, features: Mapping[str, Any]) -> None:
        """Use the columns of another split from now on: its labels may number the classes in another order."""
        self.classes = Classes(self.config, features.get(self.columns.get("label", "")))
        if self.classes.note and self.classes.note not in self.notes:
            self.notes.append(self.classes.note)

    def encode(self, row: Row, number: int) -> Feature | str:
        """Features of one row; or why it cannot be used, in a few words."""
        self.cut = False
        return self.encoding.encode(self, row, number)

    def identity(self, feature: Feature) -> Any:
        """What makes two examples the same input; of a masked text the text before it was masked."""
        if not self.encoding.masks:
            return unlabelled(feature)
        pairs = zip(feature["input_ids"], feature["labels"], strict=True)
        return [token if label == IGNORED else label for token, label in pairs]

    def collate(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """A batch: inputs are padded to the longest; each example has one label, or one row of labels, padded with `IGNORED`."""
        from transformers import DataCollatorWithPadding, default_data_collator

        labels = [feature["labels"] for feature in features if "labels" in feature]
        inputs = [{k: v for k, v in feature.items() if k != "labels"} for feature in features]
        collator = DataCollatorWithPadding(self.processor) if self.encoding.pads else default_data_collator
        batch = dict(collator(inputs))
        if not labels:
            return batch
        if not self.encoding.labels:
            return {**batch, "labels": torch.tensor(labels)}
        # transformers' collator would pad a decoder's labels on the inputs' side.
        side = self.processor.padding_side if self.encoding.labels == "input" else "right"
        rows = [torch.tensor(row, dtype=torch.long) for row in labels]
        padded = pad_sequence(rows, batch_first=True, padding_value=IGNORED, padding_side=side)
        return {**batch, "labels": padded}

    # -- for the functions of tasks ------------------------------------------------------------------------

    def inputs(self, row: Row) -> list[Any]:
        """What a row has in the columns of the input."""
        return [row[name] for name in next(iter(self.columns.values())).split(",")]

    def holds_no(self, what: str, hint: str) -> HeadPruneError:
        """The error for a row whose input is of another kind."""
        return HeadPruneError(f"column {next(iter(self.columns.values()))!r} holds no {what}.", hint)

    def tokens(self, row: Row) -> Feature:
        """A text, or a pair of texts, as tokens."""
        texts = self.inputs(row)
        if any(not isinstance(text, str) for text in texts):
            raise self.holds_no("text", "Name another with --text-column.")
        return dict(self.truncate(*texts))

    def labels(self, row: Row, make: Callable[[Any], Any]) -> Feature:
        """``{"labels": …}`` for a model; {} for a row without a usable label, where labels are not required."""
        if self.label is None:
            return {}
        try:
            return {"labels": make(row[self.label])}
        except HeadPruneError:
            if self.labelled:
                raise
            return {}

    @cached_property
    def max_length(self) -> int:
        """Tokens per example, at most: as asked for, or 512; never more than the model accepts."""
        return min(self.options.max_length or 512, self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        tokenizer = getattr(self.processor, "model_max_length", None)
        return min(tokenizer if isinstance(tokenizer, int) else sys.maxsize, positions_of(self.model) or sys.maxsize)

    @property
    def cut_note(self) -> str:
        """For notes: at which length texts were cut, and why."""
        why = "the most that the model takes" if self.max_length >= self._most_tokens else "--max-length says where"
        return f"Texts of more than {self.max_length} tokens were cut there ({why})"

    def truncate(
        self, *texts: Any, tokenizer: Any = None, limit: int | None = None, how: str | bool = True, **options: Any
    ) -> Any:
        """A tokenizer's encoding of an example, cut at ``limit`` tokens (default `max_length`); sets `cut` if it was longer.

        Args:
            tokenizer: The processor by default.
            how: Its ``truncation``.
            options: Its further arguments.
        """
        encode = partial(tokenizer or self.processor, *texts, **options)
        most = limit or self.max_length
        coded = encode(truncation=how, max_length=most)
        # The whole text is encoded only where that may matter: it takes the same time again.
        if len(coded["input_ids"]) >= most and len(encode(truncation=False)["input_ids"]) > len(coded["input_ids"]):
            self.cut = True
        return coded
