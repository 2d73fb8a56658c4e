"""What the encoders of all tasks share: columns, labels as the model's classes, and the length of texts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headprune.app.models import LoadedModel
from headprune.app.options import DataOptions
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.inputs import LABELS


class Classes:
    """The classes of a model, and the labels of a dataset's column as their numbers.

    A name counts more than a number: the numbers of a folder of images, or of any other ClassLabel column, have the dataset's own
    order, and the model's ``id2label`` may have another.

    Args:
        config: The model's.
        feature: The column's type in the dataset (a feature of ``datasets``, or a list of them); None where it is not known.

    Attributes:
        note: Which names are not the model's, though their order was taken for the model's; "" for none.
    """

    def __init__(self, config: Any, feature: Any = None) -> None:
        self.count: int = config.num_labels
        self.names = _names_of(config)
        self._exact, self._loose = _unique(self.names, str), _unique(self.names, str.casefold)
        self._counting = all(name.isdecimal() for name in self.names.values())
        while (inner := getattr(feature, "feature", None)) is not None:  # a label for every word, or several for a text
            feature = inner
        is_bool = getattr(feature, "dtype", None) == "bool"
        self._data = ["False", "True"] if is_bool else list(getattr(feature, "names", None) or ())
        self._numbers = [self._named(name) for name in self._data]
        if len(known := [n for n in self._numbers if n is not None]) > len(set(known)):  # of them "A" and "a" are two
            self._numbers = [self._exact.get(name) for name in self._data]
        self._all_named, self.note = None not in self._numbers, ""
        if not self._all_named:
            self._by_order()

    def _by_order(self) -> None:
        """Take the data's order where nothing speaks against it; else rows of classes that the model does not name are refused."""
        alike, generic = len(self._data) == self.count, _generic(self.names)
        if any(n not in (None, i) for i, n in enumerate(self._numbers)) or not (alike or generic):
            return
        if not (alike and generic):
            others = [name for name, number in zip(self._data, self._numbers, strict=True) if number is None]
            self.note = f"Classes were matched by their order: the model ({_few(self.names.values())}) does not name the data's {_few(others)}."
        self._numbers = [i if i < self.count else None for i in range(len(self._data))]

    def _named(self, name: str) -> int | None:
        """The class of that name; upper and lower case are the same where that leaves no doubt."""
        return self._exact.get(name, self._loose.get(name.casefold()))

    def number(self, value: Any) -> int | float:
        """A label as the model's class.

        Raises:
            HeadPruneError: The model's head has no such class.
        """
        if self.count == 1 and isinstance(value, int | float):
            return float(value)
        number = None
        if isinstance(value, str):
            number = self._named(value)
        elif isinstance(value, int | float) and float(value).is_integer():
            at = int(value)
            if self._data and 0 <= at < len(self._data):
                number, value = self._numbers[at], self._data[at]
            elif self._counting:  # names such as "1" to "5" are what the data held in training
                number = self._exact.get(str(at))
            elif not self._data and 0 <= at < self.count:
                number = at
        if number is not None:
            return number
        if isinstance(value, int | float) and not self._counting:
            raise HeadPruneError(
                f"label {value} does not fit the model's head, which has {self.count} classes (0 to {self.count - 1}).",
                "Check --label-column, or that this is the data the model was trained on.",
            )
        raise HeadPruneError(
            f"label {value!r} is none of the model's ({_few(self.names.values())}).",
            "Check --label-column, or name the classes in the data as the model does (id2label in its config.json).",
        )

    def several(self, value: Any, *, any_number: bool) -> list[float]:
        """A label for several classes at once as the model takes it: a number for each class.

        Args:
            value: These numbers; or, where the column's type names classes, a list of those that hold.
            any_number: Whether numbers need not lie between 0 and 1.

        Raises:
            HeadPruneError: Not as many numbers as the model has classes, or others.
        """
        if isinstance(value, list) and self._data and (self._all_named or len(self._data) > 2):
            held = {self.number(each) for each in value}
            return [float(i in held) for i in range(self.count)]
        fits = isinstance(value, list) and len(value) == self.count
        if not fits or not all(isinstance(x, int | float) and (any_number or 0 <= x <= 1) for x in value):
            raise HeadPruneError(
                f"label {value} does not fit the model's head, which takes {self.count} numbers"
                f"{'' if any_number else ' from 0 to 1'}.",
                "Give a 0 or a 1 for each of the model's classes, in their order.",
            )
        return [float(x) for x in value]


def _names_of(config: Any) -> dict[int, str]:
    """The classes' names by number: a config's ``id2label``, or its ``label2id`` where only that was set."""
    names = {int(i): str(name) for i, name in config.id2label.items()}
    backwards: Mapping[str, int] = getattr(config, "label2id", None) or {}
    if _generic(names) and len(backwards) == len(names):
        return {int(i): str(name) for name, i in backwards.items()}
    return names


def _generic(names: Mapping[int, str]) -> bool:
    """Whether the names are those that transformers gives where nobody named anything."""
    return all(name.upper() == f"LABEL_{i}" for i, name in names.items())


def _unique(names: Mapping[int, str], fold: Callable[[str], str]) -> dict[str, int]:
    """Numbers by name, without names that several classes have."""
    counts = Counter(fold(name) for name in names.values())
    return {fold(name): i for i, name in names.items() if counts[fold(name)] == 1}


def _few(names: Sequence[str] | Any) -> str:
    """The first names of many."""
    listed = list(names)
    return f"{', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}"


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
        """Use the columns of another split from now on: its labels may number the classes in another order."""
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

    def column(self, what: str, flag: str, given: str | None, usual: Sequence[str], more: str = "") -> str:
        """The column that the user named, or the first with a usual name.

        Args:
            what: What it holds, for messages and reports.
            flag: The option that names it.
            given: That option's value, if there is one.
            usual: Usual names.
            more: What else the hint says.

        Raises:
            HeadPruneError: There is no such column.
        """
        there = ", ".join(self.available)
        if given is not None and given not in self.available:
            raise HeadPruneError(f"There is no column {given!r} ({flag}).", f"The columns are {there}.")
        column = given or next((name for name in usual if name in self.available), None)
        if column is None:
            raise HeadPruneError(
                f"No column looks like the {what}: the columns are {there}.", f"Name it with {flag}{more}."
            )
        self.columns[what] = column
        return column

    def label_column(self, usual: Sequence[str] = CLASS_COLUMNS, what: str = "label") -> str | None:
        """The column of the labels; None where there is none and labels are not required."""
        given = self.options.label_column
        if given is None and not self.labelled and not set(usual) & set(self.available):
            return None
        return self.column(what, "--label-column", given, usual, "; `score --distil` needs none")

    def labels(self, example: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
        """``{"labels": …}`` for a model; {} for a row without a usable label, where labels are not required."""
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
