"""Encodes a dataset's rows for a model: finds columns, maps labels to classes, truncates texts, makes batches."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headprune.app.models import LoadedModel
from headprune.app.options import DataOptions
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.files import digest
from headprune.inputs import positions_of, unlabelled

Row = Mapping[str, Any]
Feature = dict[str, Any]
OPTIONAL = ("label", "answers")  # columns that may be missing where no label is needed


@dataclass(frozen=True)
class Encoding:
    """How the examples of a task are encoded.

    Attributes:
        encode: Takes an encoder, a row and its number; gives the row's features, or a few words on why it cannot be used.
        columns: Usual column names, by what a column holds: the input first, then the target, if it has a column.
        labels: ``""``: one label per example; ``"input"``: one per token, padded on the inputs' side; ``"right"``: a decoder's text,
            padded on the right, as decoders read from the left.
        pads: Whether the processor pads inputs; else all have one shape.
        side: Where texts must be padded, as labels count from there; "" where no answer depends on it (`settle_padding`).
        masks: Whether inputs are masked, and the labels are the original tokens.
        prepare: Checks the model and the tokenizer, and gives a note on what is measured; "" for none.
    """

    encode: Callable[[Encoder, Row, int], Feature | str]
    columns: Mapping[str, tuple[str, ...]]
    labels: str = ""
    pads: bool = True
    side: str = ""
    masks: bool = False
    prepare: Callable[[Encoder], str] = lambda _: ""


class Encoder:
    """Turns rows into features, and features into batches.

    Args:
        splits: The dataset's splits, by name.
        labelled: Whether every example must have a label; if not, existing labels are still used.

    Attributes:
        columns: The columns in use, by what they hold; the two columns of a pair are joined by a comma.
        notes: What a reader of the report should know.
        cut: Whether the last example was truncated.
    """

    def __init__(
        self, encoding: Encoding, options: DataOptions, loaded: LoadedModel, splits: Mapping[str, Any], labelled: bool
    ) -> None:
        self.encoding, self.options, self.splits, self.labelled = encoding, options, splits, labelled
        self.model, self.config = loaded.model, loaded.config
        self.processor = copy.deepcopy(loaded.processor)  # calls set how it pads and truncates; `loaded`'s is saved
        if encoding.side:
            self.processor.padding_side = encoding.side
        self.columns: dict[str, str] = {}
        features = next(iter(splits.values())).features
        for what, usual in encoding.columns.items():
            if column := self._column(what, usual, list(features)):
                self.columns[what] = column
        self.label = next((self.columns[what] for what in OPTIONAL if what in self.columns), None)
        self.shifted = False  # whether labels are the next tokens
        self.settled = False  # whether the side of padding is known to be right
        self.cut = False
        self.notes = list(filter(None, [encoding.prepare(self)]))
        self.read(features)

    def _column(self, what: str, usual: Sequence[str], there: Sequence[str]) -> str:
        """The column that the user named, or the first with a usual name; "" for a missing label column that is optional.

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
        """Switch to the column types of another split, which may number the classes in another order."""
        self.classes = Classes(self.config, features.get(self.columns.get("label", "")))
        if self.classes.note and self.classes.note not in self.notes:
            self.notes.append(self.classes.note)

    def identity(self, feature: Feature) -> Any:
        """An example's input without labels, to find duplicates by; for a masked text, its original tokens."""
        if not self.encoding.masks:
            return unlabelled(feature)
        pairs = zip(feature["input_ids"], feature["labels"], strict=True)
        return [token if label == IGNORED else label for token, label in pairs]

    def collate(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """A batch: inputs are padded to the longest; each example has one label, or one row of labels, padded with `IGNORED`."""
        from transformers import DataCollatorWithPadding, default_data_collator

        labels = [feature["labels"] for feature in features if "labels" in feature]
        inputs = [{k: v for k, v in feature.items() if k != "labels"} for feature in features]
        if not self.encoding.pads:
            _check_alike(inputs)
        collator = DataCollatorWithPadding(self.processor) if self.encoding.pads else default_data_collator
        batch = dict(collator(inputs))
        # Decoders classify by the last token that is not their own config's padding, which the tokenizer's may not be.
        pad = getattr(self.config.get_text_config(), "pad_token_id", None) if self.encoding.pads else None
        if "input_ids" in batch and "attention_mask" in batch and pad is not None and pad >= 0:
            batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad)
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
        """A row's values in the input columns."""
        return [row[name] for name in next(iter(self.columns.values())).split(",")]

    def holds_no(self, what: str, hint: str) -> HeadPruneError:
        """The error for a row whose input is of the wrong kind."""
        return HeadPruneError(f"column {next(iter(self.columns.values()))!r} holds no {what}.", hint)

    def target(self, row: Row) -> str | None:
        """A row's text to write; None where there is none."""
        *_, name = self.columns.values()
        text = row[name]
        if isinstance(text, list | Mapping):
            raise HeadPruneError(f"column {name!r} holds no single text.", "Name another with --label-column.")
        return None if text is None else str(text)

    def tokens(self, row: Row) -> Feature:
        """A row's text, or pair of texts, tokenized and truncated."""
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
        transcript = getattr(self.config, "max_target_positions", None)
        limits = (tokenizer, positions_of(self.model), transcript)
        return min((most for most in limits if isinstance(most, int)), default=sys.maxsize)

    @property
    def cut_note(self) -> str:
        """The beginning of a note: at which length texts were truncated, and why."""
        why = "the most that the model takes" if self.max_length >= self._most_tokens else "--max-length says where"
        return f"Texts of more than {self.max_length} tokens were cut there ({why})"

    def truncate(self, *texts: Any, tokenizer: Any = None, how: str | bool = True, **options: Any) -> Any:
        """A tokenizer's encoding of an example, cut at `max_length` tokens; sets `cut` if it was longer.

        Args:
            tokenizer: The processor by default.
            how: The tokenizer's argument ``truncation``.
            options: Further arguments of the tokenizer.
        """
        encode = partial(tokenizer or self.processor, *texts, **options)
        coded = encode(truncation=how, max_length=self.max_length)
        # Encoding without truncation doubles the time, so it is done only where the limit is reached.
        whole = len(coded["input_ids"]) < self.max_length
        if not whole and len(encode(truncation=False)["input_ids"]) > len(coded["input_ids"]):
            self.cut = True
        return coded


# -- features ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnDemand(Sequence[dict[str, Any]]):
    """Features that are encoded each time they are read: images and sounds of a whole split may not fit in memory.

    Attributes:
        encode: Features of a row by its number.
        hashes: A hash of the features of each row.
    """

    encode: Callable[[int], Any]
    rows: list[int]
    hashes: list[str]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.encode(self.rows[index])


def _check_alike(inputs: Sequence[Feature]) -> None:
    """Refuse inputs of several shapes, which no batch holds: some image processors keep an image's proportions.

    Raises:
        HeadPruneError: There are two shapes.
    """
    for name in inputs[0]:
        shapes = [list(getattr(each[name], "shape", ())) for each in inputs]
        if other := next((shape for shape in shapes if shape != shapes[0]), None):
            raise HeadPruneError(
                f"The processor gives {name} of several shapes, {shapes[0]} and {other}, which make no batch.",
                "Let it resize, crop or pad all to one (preprocessor_config.json).",
            )


def content_hash(value: Any) -> str:
    """A hash of plain values and tensors; equal values have equal hashes."""

    def plain(x: Any) -> Any:
        return digest([x.numpy().tobytes()], 64) if isinstance(x, Tensor) else str(x)

    return digest(json.dumps(value, default=plain, sort_keys=True))


# -- classes --------------------------------------------------------------------------------------------


class Classes:
    """Maps the labels of a dataset's column to the class numbers of a model.

    Class names take precedence over numbers: a ClassLabel column, such as an image folder's, numbers classes in the
    dataset's own order, and the model's ``id2label`` may have another.

    Args:
        config: The model's config.
        feature: The column's type in the dataset (a feature of ``datasets``, or a list of them); None where it is not known.

    Attributes:
        note: Which class names the model lacks, if classes were matched by their order instead; "" for none.
    """

    def __init__(self, config: Any, feature: Any = None) -> None:
        self.count: int = config.num_labels
        self.names = _names_of(config)
        self._exact, self._loose = _unique(self.names, str), _unique(self.names, str.casefold)
        self._by_value = _values_of(self.names)
        while (inner := getattr(feature, "feature", None)) is not None:  # a label for every word, or several for a text
            feature = inner
        is_bool = getattr(feature, "dtype", None) == "bool"
        self._data = ["False", "True"] if is_bool else list(getattr(feature, "names", None) or ())
        self._numbers = [self._number_of_name(name) for name in self._data]
        if len(known := [n for n in self._numbers if n is not None]) > len(set(known)):  # "A" and "a" are two classes
            self._numbers = [self._exact.get(name) for name in self._data]
        self._all_named, self.note = None not in self._numbers, ""
        if not self._all_named:
            self._match_by_order()

    def _match_by_order(self) -> None:
        """Match classes by order, if no name contradicts it and the model has as many of them, or only generic names."""
        alike, generic = len(self._data) == self.count, _is_generic(self.names)
        if any(n not in (None, i) for i, n in enumerate(self._numbers)) or not (alike or generic):
            return
        if not (alike and generic):
            others = [name for name, number in zip(self._data, self._numbers, strict=True) if number is None]
            self.note = f"Classes were matched by their order: the model ({_few(self.names.values())}) does not name the data's {_few(others)}."
        self._numbers = [i if i < self.count else None for i in range(len(self._data))]

    def _number_of_name(self, name: str) -> int | None:
        """The number of the class with this name; case is ignored where that is unambiguous."""
        return self._exact.get(name, self._loose.get(name.casefold()))

    def number(self, value: Any) -> int | float:
        """The model's class number for a label; for a regression head, the label as a number.

        Raises:
            HeadPruneError: The model's head has no such class.
        """
        if self.count == 1 and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
        number = None
        if isinstance(value, str):
            number = self._number_of_name(value)
        elif isinstance(value, int | float) and self._by_value and not self._data:
            number = self._by_value.get(float(value))  # names such as "1" to "5" are the labels of the training data
        elif isinstance(value, int | float) and float(value).is_integer():
            at = int(value)
            if self._data and 0 <= at < len(self._data):
                number, value = self._numbers[at], self._data[at]
            elif not self._data and 0 <= at < self.count:
                number = at
        if number is not None:
            return number
        raise HeadPruneError(
            f"label {value!r} does not fit the model's head, which has {self.count} classes ({_few(self.names.values())}).",
            "Check --label-column, and name the classes in the data as the model does (id2label in its config.json).",
        )

    def several(self, value: Any, *, any_number: bool) -> list[float]:
        """A multi-label target as the model takes it: a number for each class.

        Args:
            value: These numbers; or, where the column's type names classes, a list of the classes that apply.
            any_number: Whether numbers outside 0 to 1 are allowed.

        Raises:
            HeadPruneError: Not as many numbers as the model has classes, or a number that is not allowed.
        """
        if isinstance(value, list) and self._data and (self._all_named or len(self._data) > 2):
            held = {self.number(each) for each in value}
            return [float(i in held) for i in range(self.count)]
        fits = isinstance(value, list) and len(value) == self.count
        if not fits or not all(
            isinstance(x, int | float) and (math.isfinite(x) if any_number else 0 <= x <= 1) for x in value
        ):
            takes = f"{self.count} numbers{'' if any_number else ' from 0 to 1'}"
            hint = "Give a 0 or a 1 for each of the model's classes, in their order."
            raise HeadPruneError(f"label {value} does not fit the model's head, which takes {takes}.", hint)
        return [float(x) for x in value]


def _names_of(config: Any) -> dict[int, str]:
    """The classes' names by number: a config's ``id2label``, or its ``label2id`` where only that was set."""
    names = {int(i): str(name) for i, name in config.id2label.items()}
    backwards: Mapping[str, int] = getattr(config, "label2id", None) or {}
    if _is_generic(names) and len(backwards) == len(names):
        return {int(i): str(name) for name, i in backwards.items()}
    return names


def _values_of(names: Mapping[int, str]) -> dict[float, int]:
    """Class numbers by value, if all names are different numbers, such as "1", "-1" or "2.0"; {} if not."""
    values = {}
    with suppress(ValueError):
        values = {float(name): i for i, name in names.items() if math.isfinite(float(name))}
    return values if len(values) == len(names) else {}


def _is_generic(names: Mapping[int, str]) -> bool:
    """Whether all names are transformers' defaults, ``LABEL_0``, ``LABEL_1`` and so on."""
    return all(name.upper() == f"LABEL_{i}" for i, name in names.items())


def _unique(names: Mapping[int, str], fold: Callable[[str], str]) -> dict[str, int]:
    """Class numbers by name, without names that several classes share."""
    counts = Counter(fold(name) for name in names.values())
    return {fold(name): i for i, name in names.items() if counts[fold(name)] == 1}


def _few(names: Iterable[str]) -> str:
    """The first six names, joined by commas, with … for the rest."""
    listed = list(names)
    return f"{', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}"
