"""Loads a dataset as three disjoint parts of encoded examples (score, choose, report), and a part to train on.

Heads are scored on the first part, plans are chosen on the second, and results are reported on the third.
Training may use the scored examples, but none of the other two parts.

`reading` reads the data. `encoder` turns rows into features and labels into the model's classes, by the functions
of `encodings`, one for each task. Here the data is cut into parts, and these are encoded; no input is in two of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.app.data.encoder import Encoder, OnDemand, content_hash
from headprune.app.data.encodings import encoding_of, settle_padding
from headprune.app.data.reading import place, read_splits
from headprune.app.models import LoadedModel
from headprune.app.options import DataOptions
from headprune.errors import HeadPruneError, first_line

_CHOOSE_SPLITS = ("validation", "valid", "val", "dev", "eval", "validation_matched")
_REPORT_SPLITS = ("test", *_CHOOSE_SPLITS)
_REPEATING = "repeating an input of an earlier part"
PLAIN_TEXT = Path(__file__).parent / "plain-english.txt"  # a passage a line; its source is in plain-english.md


@dataclass(frozen=True)
class Part:
    """Encoded examples for one purpose, such as scoring.

    Attributes:
        name: ``"score"``, ``"choose"``, ``"report"`` or ``"train"``; for a second dataset, that dataset's name.
        split: The split that they come from.
        rows: Their row numbers in that split.
        features: One dict of plain lists or tensors per example; images and sounds to train on are encoded when they are read.
        batch_size: Examples per batch.
        inputs: A hash of every example's input, to keep parts disjoint.
        shortened: How many examples were truncated to the length that the model accepts, or that the user set.
        left_out: How many rows could not be used, by reason.
        columns: The dataset's columns, by what they hold.
        row: Returns the dataset's row of an example, by the example's index.
    """

    name: str
    split: str
    rows: list[int]
    features: Sequence[dict[str, Any]]
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    batch_size: int
    inputs: tuple[str, ...] = ()
    shortened: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    row: Callable[[int], Any] = lambda _: None

    def __len__(self) -> int:
        return len(self.features)

    @property
    def purpose(self) -> str:
        """The purpose in words, such as ``"to score"``."""
        return f"to {self.name if self.name in ('score', 'choose', 'report', 'train') else 'measure'}"

    @property
    def reasons(self) -> str:
        """Why rows were left out, with counts; "" if none were."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())

    def lengths(self) -> list[int]:
        """Tokens per example; 1 each where inputs are not texts."""
        is_text = "input_ids" in self.features[0]
        return [len(f["input_ids"]) for f in self.features] if is_text else [1] * len(self)

    def order(self) -> list[int]:
        """The examples' indices, sorted by length, so that batches need little padding."""
        lengths = self.lengths()
        if not isinstance(self.features, OnDemand) and "input_values" in self.features[0]:  # sounds are padded, too
            lengths = [len(each["input_values"]) for each in self.features]
        return sorted(range(len(self)), key=lambda i: (lengths[i], i))

    def batches(self, batch_size: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Padded batches in the order of `order`."""
        order, size = self.order(), batch_size or self.batch_size
        for start in range(0, len(order), size):
            yield self.collate([self.features[i] for i in order[start : start + size]])

    def short(self, count: int) -> dict[str, Tensor]:
        """A batch of the shortest examples of four tokens or more: one token does not tell whether a model looks ahead."""
        order, lengths = self.order(), self.lengths()
        enough = [i for i in order if lengths[i] >= min(4, lengths[order[-1]])]
        return self.collate([self.features[i] for i in (enough if len(enough) >= count else order[-count:])[:count]])

    def typical(self, count: int) -> dict[str, Tensor]:
        """A batch of the ``count`` examples whose length is nearest to the median."""
        order = self.order()
        middle = max(0, min(len(order) // 2 - count // 2, len(order) - count))
        return self.collate([self.features[i] for i in order[middle : middle + count]])

    @cached_property
    def content_hash(self) -> str:
        """A hash of every example, labels included."""
        if isinstance(self.features, OnDemand):
            return content_hash(self.features.hashes)
        return content_hash([content_hash(feature) for feature in self.features])


@dataclass(frozen=True)
class DataParts:
    """The three disjoint parts, the columns in use, and notes on what was left out.

    Attributes:
        also: Parts of second datasets, to which nothing is fitted; they share no input with ``score`` and ``choose``.
    """

    score: Part
    choose: Part
    report: Part
    columns: dict[str, str]
    notes: list[str] = field(default_factory=list)
    also: tuple[Part, ...] = ()


# -- how a dataset is cut into parts --------------------------------------------------------------------

Cuts = dict[str, tuple[str, list[int]]]
"""The split and row numbers of each part, by the part's name."""

Noted = tuple[Part, list[str]]
"""A part, and notes on what is in it."""


def cut_rows(splits: Mapping[str, Any], options: DataOptions, labelled: bool = True) -> tuple[Cuts, list[str]]:
    """Rows for each part: from the dataset's own splits, or cut by seed where there are too few.

    Returns:
        The split and its row numbers for ``"score"``, ``"choose"`` and ``"report"``, and notes on unexpected choices.

    Raises:
        HeadPruneError: No labelled rows, or no such split.
    """
    flags = {"--split": options.split, "--choose-split": options.choose_split, "--report-split": options.report_split}
    usable = labelled_splits(splits, options.label_column)
    if not labelled and (not usable or not {*flags.values()} - {None} <= usable.keys()):
        usable = {name: data for name, data in splits.items() if len(data)}  # otherwise the same rows as with labels
    hidden = [name for name, data in splits.items() if len(data) and name not in usable]
    notes = [f"The labels of {place(options.dataset, name)} are hidden (-1), so it is not used." for name in hidden]
    if not usable:
        raise HeadPruneError(f"{options.dataset} holds no labelled rows.", "Check the files and --subset.")
    for flag, wanted in flags.items():
        if wanted is not None and wanted not in usable:
            raise HeadPruneError(f"There is no usable split {wanted!r} ({flag}).", f"There are {', '.join(usable)}.")

    def find(names: Iterable[str], *others: str | None) -> str | None:
        return next((name for name in names if name in usable and name not in others), None)

    scoring = options.split or ("train" if "train" in usable else next(iter(usable)))
    reporting = options.report_split or find(_REPORT_SPLITS, scoring)
    choosing = options.choose_split or find(_CHOOSE_SPLITS, scoring, reporting)
    choosing, reporting = (None if split == scoring else split for split in (choosing, reporting))
    free = {name: shuffle(len(data), options.seed) for name, data in usable.items()}

    def take(split: str, count: int) -> tuple[str, list[int]]:
        rows, free[split] = free[split][:count], free[split][count:]
        return split, rows

    # A split that serves several parts is cut: at most half of it scores, a fifth chooses, the rest reports.
    size = len(usable[scoring])
    most = size if choosing and reporting else size * 4 // 5 if reporting else size // 2
    cuts = {"score": take(scoring, min(options.limit, most))}
    most = options.limit
    if reporting is None:
        cut, by_user = place(options.dataset, scoring), options.report_split is not None
        why = f"{cut} is both scored and reported on: it" if by_user else f"There is no other split to report on: {cut}"
        notes.append(f"{why} was cut by seed {options.seed}.")
        most = most if choosing else size // 5
    elif choosing == reporting:
        most = len(free[reporting]) // 2
    cuts["choose"] = take(choosing or scoring, min(options.limit, most))
    cuts["report"] = take(reporting or scoring, options.report_limit)
    return cuts, notes


def labelled_splits(splits: Mapping[str, Any], column: str | None = None) -> dict[str, Any]:
    """The non-empty splits whose labels are not hidden; ``column``: of the labels, where the user named it."""
    return {name: data for name, data in splits.items() if len(data) and not hidden_labels(data, column or "label")}


def shuffle(count: int, seed: int) -> list[int]:
    """The row numbers of a split of ``count`` rows, shuffled by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).tolist()


def hidden_labels(data: Any, column: str = "label") -> bool:
    """Whether every label is -1, as in the test splits of GLUE; -1 may also be a class, by which a split is sorted."""
    with suppress(UnicodeDecodeError):  # invalid text; the error that names its row comes when it is read
        few = data[: min(50, len(data))][column] if column in data.column_names else [None]
        return all(label == -1 for label in few) and bool(data.unique(column) == [-1])
    return False


def load_parts(options: DataOptions, loaded: LoadedModel, labelled: bool = True) -> DataParts:
    """The three parts of a dataset, with disjoint inputs.

    Args:
        labelled: Whether every example must have a label; if not, existing labels are still used.

    Raises:
        HeadPruneError: No such dataset or column, an empty part, labels that don't fit the model.
    """
    splits = read_splits(options.dataset, options.subset)
    encoder = Encoder(encoding_of(loaded.task), options, loaded, splits, labelled)
    cuts, notes = cut_rows(splits, options, labelled)
    parts: dict[str, Part] = {}
    seen: set[str] = set()
    for name, (split, rows) in cuts.items():
        parts[name] = _encode(encoder, name, split, rows, seen)
        seen.update(parts[name].inputs)  # the same input in two parts would make them depend on each other
    notes += [*_notes_on(encoder, *parts.values()), *encoder.notes]
    return DataParts(parts["score"], parts["choose"], parts["report"], encoder.columns, notes)


def load_train(options: DataOptions, loaded: LoadedModel, parts: DataParts, limit: int | None = None) -> Noted:
    """The part to train on: the scoring split without the examples that choose plans or are reported.

    An example is left out if its row or its input is in one of these parts, or its input in a second dataset.

    Args:
        options: As for `load_parts`, which gave ``parts``.
        limit: Examples, at most: drawn by the seed, the scored ones first.

    Returns:
        The part, shuffled by the seed, and notes on what is in it.

    Raises:
        HeadPruneError: No such dataset or column, nothing left to train on.
    """
    splits, split = read_splits(options.dataset, options.subset), parts.score.split
    encoder = Encoder(encoding_of(loaded.task), options, loaded, splits, labelled=True)
    held_out = (parts.choose, parts.report)
    used = {row for part in held_out if part.split == split for row in part.rows}
    seen = {key for part in (*held_out, *parts.also) for key in part.inputs}
    rows = (row for row in shuffle(len(splits[split]), options.seed) if row not in used)
    part = _encode(encoder, "train", split, rows, seen, limit, on_demand=loaded.task.modality != "text")
    scored = len(set(part.rows) & set(parts.score.rows))
    first = f"{len(part):,} examples to train on ({split}), of which {scored:,} also scored the heads."
    return part, [first, *_notes_on(encoder, part)]


def load_also(options: DataOptions, loaded: LoadedModel, parts: DataParts) -> DataParts:
    """``parts`` with a part of each second dataset: its test split, if any, with at most `DataOptions.report_limit` rows.

    If the user names none, language models get a small text that comes with headprune. Nothing is fitted to second
    datasets: inputs that score heads or choose plans are left out here, and `load_train` leaves out these inputs.

    Raises:
        HeadPruneError: As `load_parts`.
    """
    own = not options.also and loaded.task.name in ("causal-lm", "masked-lm")
    also, notes = [], list(parts.notes)
    for dataset in (str(PLAIN_TEXT),) if own else options.also:
        name = PLAIN_TEXT.name if own else dataset
        try:
            part, part_notes = _load_second_dataset(options, dataset, loaded, parts, name)
        except HeadPruneError as error:
            if not own:
                raise
            notes.append(f"{name} was not measured: {error.args[0]}")  # such as a model for another script
            continue
        also.append(part)
        notes += [f"{name}: {note}" for note in part_notes]
    return replace(parts, also=tuple(also), notes=notes)


def _load_second_dataset(options: DataOptions, dataset: str, loaded: LoadedModel, parts: DataParts, name: str) -> Noted:
    """The part of a second dataset."""
    splits = read_splits(dataset)
    named = options.label_column
    usable = labelled_splits(splits, named if any(named in data.column_names for data in splits.values()) else None)
    if not usable:
        raise HeadPruneError(f"{dataset} holds no labelled rows.", "Check the files.")
    split = next((each for each in _REPORT_SPLITS if each in usable), next(iter(usable)))
    # Columns that were named for the first dataset are guessed where this one does not have them.
    there = splits[split].column_names
    columns = {name: getattr(options, name) for name in ("text_column", "label_column")}
    known: Any = {k: v if v and all(s.strip() in there for s in v.split(",")) else None for k, v in columns.items()}
    options = replace(options, dataset=dataset, subset=None, **known)
    encoder = Encoder(encoding_of(loaded.task), options, loaded, splits, labelled=True)
    rows, seen = shuffle(len(splits[split]), options.seed), {*parts.score.inputs, *parts.choose.inputs}
    part = _encode(encoder, name, split, rows, seen, options.report_limit)
    return part, [*_notes_on(encoder, part), *filter(None, [encoder.classes.note])]


def _encode(
    encoder: Encoder, name: str, split: str, rows: Iterable[int], seen: set[str], limit: int | None = None, on_demand: bool = False
) -> Part:  # fmt: skip
    """A part made of a split's usable rows, without inputs that are in ``seen``.

    Args:
        limit: Rows, at most; no more are read.
        on_demand: Keep a hash of the features, and encode a row again each time it is read.

    Raises:
        HeadPruneError: A row that cannot be read; or no row can be used.
    """
    kept, inputs, features = list[int](), list[str](), list[Any]()
    left_out, shortened = Counter[str](), 0
    data = encoder.splits[split]
    encoder.read(data.features)
    for row in rows:
        if len(kept) == limit:
            break
        feature = _feature(encoder, split, row)
        key = feature if isinstance(feature, str) else content_hash(encoder.identity(feature))
        if isinstance(feature, str) or key in seen:
            left_out[_REPEATING if key in seen else key] += 1
            continue
        kept.append(row)
        inputs.append(key)
        features.append(content_hash(feature) if on_demand else feature)
        shortened += encoder.cut
    examples: Sequence[dict[str, Any]] = features
    if on_demand:
        examples = OnDemand(partial(_feature, encoder, split), kept, features)
    elif not all("labels" in feature for feature in features):  # labels are optional, and some are missing: use none
        for feature in features:
            feature.pop("labels", None)
    if not encoder.settled:
        encoder.notes += filter(None, [settle_padding(encoder, [] if on_demand else features)])
        encoder.settled = True
    part = Part(
        name, split, kept, examples, encoder.collate, encoder.options.batch_size, tuple(inputs), shortened, dict(left_out),
        dict(encoder.columns), lambda example: data[kept[example]],
    )  # fmt: skip
    if not kept:
        cut = f" {encoder.cut_note}." if encoder.cut else ""
        raise HeadPruneError(
            f"No example of {place(encoder.options.dataset, split)} is left {part.purpose} on: "
            f"{part.reasons or 'there are too few rows'}.{cut}",
            "Use more data without duplicates, another split or columns, or a smaller --limit and --report-limit.",
        )
    return part


def _feature(encoder: Encoder, split: str, row: int) -> dict[str, Any] | str:
    """A row's features; or why it cannot be used, in a few words.

    Raises:
        HeadPruneError: It cannot be read; the message names the row.
    """
    encoder.cut, where = False, f"Row {row} of {place(encoder.options.dataset, split)} (the first is row 0)"
    try:
        return encoder.encoding.encode(encoder, encoder.splits[split][row], row)
    except HeadPruneError as error:
        raise HeadPruneError(f"{where}: {error.args[0]}", error.hint) from None
    except Exception as error:
        hint = "Check this row, --text-column, --label-column and --max-length."
        raise HeadPruneError(f"{where} cannot be read: {type(error).__name__}: {first_line(error)}.", hint) from error


def _notes_on(encoder: Encoder, *parts: Part) -> list[str]:
    """Notes on how many examples were left out and truncated."""
    counts = []
    for part in parts:
        if count := sum(part.left_out.values()):
            counts.append(f"{count:,} of {count + len(part):,} {part.purpose} ({part.reasons})")
    notes = [f"Rows left out: {'; '.join(counts)}."] if counts else []
    if any(part.shortened for part in parts):
        cut = ", ".join(f"{part.shortened} of {len(part)} {part.purpose}" for part in parts)
        notes.append(f"{encoder.cut_note}: {cut}.")
    return notes
