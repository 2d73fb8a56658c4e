"""Disjoint parts of a dataset: which rows of which split serve which part, and their encoded examples; no input is in two parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headprune.amounts import example_count
from headprune.app.data.encoders import encoder_of
from headprune.app.data.encoders.text import CausalLM, MaskedLM
from headprune.app.data.part import OnDemand, Part, Parts, content_hash
from headprune.app.data.reading import place, read_splits
from headprune.app.models import LoadedModel
from headprune.app.options import DataOptions
from headprune.errors import HeadPruneError, first_line

_CHOOSE_SPLITS = ("validation", "valid", "val", "dev", "eval", "validation_matched")
_REPORT_SPLITS = ("test", *_CHOOSE_SPLITS)


def cut_rows(
    splits: Mapping[str, Any], options: DataOptions, labelled: bool = True
) -> tuple[dict[str, tuple[str, list[int]]], list[str]]:
    """Rows for each part: from the dataset's own splits, or cut by seed where there are too few.

    Returns:
        The split and its row numbers for ``"score"``, ``"choose"`` and ``"report"``, and notes on unexpected choices.

    Raises:
        HeadPruneError: No labelled rows, or no such split.
    """
    usable = {name: data for name, data in splits.items() if len(data) and not hidden_labels(data)}
    named = {options.split, options.choose_split, options.report_split} - {None}
    if not labelled and (not usable or not named <= usable.keys()):  # else the same rows as where labels are needed
        usable = {name: data for name, data in splits.items() if len(data)}
    hidden = [name for name, data in splits.items() if len(data) and name not in usable]
    notes = [f"The labels of {place(options.dataset, name)} are hidden (-1), so it is not used." for name in hidden]
    if not usable:
        raise HeadPruneError(f"{options.dataset} holds no labelled rows.", "Check the files and --subset.")
    scoring, choosing, reporting = _serving(usable, options)
    free = {name: shuffled(len(data), options.seed) for name, data in usable.items()}

    def take(split: str, count: int) -> tuple[str, list[int]]:
        rows, free[split] = free[split][:count], free[split][count:]
        return split, rows

    # A split that serves several parts is cut: at most half of it scores, a fifth chooses, the rest reports.
    size = len(usable[scoring])
    alone = None not in (choosing, reporting)
    most = size if alone else size // 2 if reporting is None else size * 4 // 5
    cuts = {"score": take(scoring, min(options.limit, most))}
    most = options.limit
    if reporting is None:
        cut = place(options.dataset, scoring)
        asked = options.report_split is not None
        why = f"{cut} is both scored and reported on: it" if asked else f"There is no other split to report on: {cut}"
        notes.append(f"{why} was cut by seed {options.seed}.")
        most = most if choosing else size // 5
    elif choosing == reporting:
        most = len(free[choosing]) // 2
    cuts["choose"] = take(choosing or scoring, min(options.limit, most))
    cuts["report"] = take(reporting or scoring, options.report_limit)
    return cuts, notes


def _serving(usable: Mapping[str, Any], options: DataOptions) -> tuple[str, str | None, str | None]:
    """The splits that score, choose and report; None for a part that is cut from another part's split."""
    for flag, wanted in (
        ("--split", options.split), ("--choose-split", options.choose_split), ("--report-split", options.report_split),
    ):  # fmt: skip
        if wanted is not None and wanted not in usable:
            raise HeadPruneError(f"There is no usable split {wanted!r} ({flag}).", f"There are {', '.join(usable)}.")
    scoring = options.split or ("train" if "train" in usable else next(iter(usable)))
    reporting = options.report_split or next((s for s in _REPORT_SPLITS if s in usable and s != scoring), None)
    choosing = options.choose_split or next(
        (s for s in _CHOOSE_SPLITS if s in usable and s not in (scoring, reporting)), None
    )
    return scoring, None if choosing == scoring else choosing, None if reporting == scoring else reporting


def reported_of(splits: Mapping[str, Any], dataset: str) -> str:
    """The split of a second dataset to measure on: one for tests, or the first that has labels.

    Raises:
        HeadPruneError: No labelled rows.
    """
    usable = [name for name, data in splits.items() if len(data) and not hidden_labels(data)]
    if not usable:
        raise HeadPruneError(f"{dataset} holds no labelled rows.", "Check the files.")
    return next((name for name in _REPORT_SPLITS if name in usable), usable[0])


def shuffled(count: int, seed: int) -> list[int]:
    """The order in which a split's rows are taken: the same for all splits of one size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).tolist()


def hidden_labels(data: Any) -> bool:
    """Whether every label is -1, as in the test splits of GLUE."""
    if "label" not in data.column_names:
        return False
    try:
        return all(label == -1 for label in data[: min(50, len(data))]["label"])
    except UnicodeDecodeError:  # a text that is none; its row is named when it is read
        return False


PLAIN_TEXT = Path(__file__).parent / "plain-english.txt"  # a passage a line; its source is in plain-english.md


def load_parts(options: DataOptions, loaded: LoadedModel, labelled: bool = True) -> Parts:
    """Read, cut and encode the data.

    Args:
        labelled: Whether every example must have a label; else labels that are there are still taken.

    Raises:
        HeadPruneError: No such dataset or column, an empty part, labels that don't fit the model.
    """
    reader = _Reader(options, loaded, labelled=labelled)
    encoder = reader.encoder
    rows_of, notes = cut_rows(reader.splits, options, labelled)
    parts, chosen = {}, {}
    seen: set[str] = set()
    for name, (split, rows) in rows_of.items():
        found = chosen[name] = reader.encode(split, rows, seen)
        if not found.rows:
            raise _nothing_left(name, reader.place(split), len(rows), found.repeated, reader)
        seen.update(found.inputs)  # the same input in two parts would make them depend on each other
        parts[name] = found.part(name, split, encoder.collate, options.batch_size)
    notes.extend(_left_out(parts.values()))
    if repeated := sum(found.repeated for found in chosen.values()):
        notes.append(f"Left out of the later parts, as their input had already been used: {example_count(repeated)}.")
    if any(found.shortened for found in chosen.values()):
        counts = ", ".join(f"{found.shortened} of {len(found.rows)} to {name}" for name, found in chosen.items())
        notes.append(f"{encoder.cut_note}: {counts}.")
    notes.extend(encoder.notes)
    return Parts(parts["score"], parts["choose"], parts["report"], encoder.columns, notes)


def load_train(
    options: DataOptions, loaded: LoadedModel, parts: Parts, limit: int | None = None
) -> tuple[Part, list[str]]:
    """The part to train on: the scoring split without what chooses and what is reported.

    An example is left out if its row, or its input (as in `load_parts`), is in either of them.

    Args:
        options: As for `load_parts`, which gave ``parts``.
        limit: Examples, at most: drawn by the seed, the scored ones first.

    Returns:
        The part, shuffled by the seed, and notes on what is in it.

    Raises:
        HeadPruneError: No such dataset or column, nothing left to train on.
    """
    reader = _Reader(options, loaded)
    encoder, split = reader.encoder, parts.score.split
    data = reader.splits[split]
    held_out = (parts.choose, parts.report)
    taken = {row for part in held_out if part.split == split for row in part.rows}
    seen = {content_hash(encoder.identity(feature)) for part in (*held_out, *parts.also) for feature in part.features}
    rows = (row for row in shuffled(len(data), options.seed) if row not in taken)
    texts = loaded.task.modality == "text"
    found = reader.encode(split, rows, seen, limit, keep=texts)
    if not found.rows:
        raise HeadPruneError(
            f"No example of {reader.place(split)} is left to train on: all of them are used to choose or to report.",
            "Use more data, or a smaller --limit and --report-limit.",
        )
    later = OnDemand(lambda row: encoder.encode(data[row], row), found.rows, found.feature_hashes)
    part = found.part("train", split, encoder.collate, options.batch_size)
    part = part if texts else replace(part, features=later)
    count = len(found.rows)
    scored = len(set(found.rows) & set(parts.score.rows))
    notes = [f"{count:,} examples to train on ({split}), of which {scored:,} also scored the heads."]
    notes.extend(_left_out([part]))
    if found.repeated:
        notes.append(
            f"Left out of the training part, as their input is used to choose or to report: {example_count(found.repeated)}."
        )
    if found.shortened:
        notes.append(f"{encoder.cut_note}: {found.shortened} of {count} to train on.")
    return part, notes


def load_also(options: DataOptions, loaded: LoadedModel, parts: Parts) -> Parts:
    """The parts, with one of every second dataset beside them: a test split where there is one, `DataOptions.report_limit` rows at most.

    Language models that no second dataset is named for get a small text that comes with headprune. No input is taken
    that scores heads or chooses plans, and `load_train` leaves out all of them: nothing is fitted to these.

    Raises:
        HeadPruneError: As `load_parts`.
    """
    own = not options.also and encoder_of(loaded.task) in (CausalLM, MaskedLM)
    found, notes = [], list(parts.notes)
    for dataset in (str(PLAIN_TEXT),) if own else options.also:
        try:
            part, said = _also(options, dataset, loaded, parts, PLAIN_TEXT.name if own else dataset)
        except HeadPruneError as error:
            if not own:
                raise
            notes.append(f"{PLAIN_TEXT.name} was not measured: {error.args[0]}")  # a language without these letters
            continue
        found.append(part)
        notes.extend(said)
    return replace(parts, also=tuple(found), notes=notes)


def _also(options: DataOptions, dataset: str, loaded: LoadedModel, parts: Parts, name: str) -> tuple[Part, list[str]]:
    """The part of a second dataset, and notes on it."""
    splits = read_splits(dataset)
    split = reported_of(splits, dataset)
    given = {flag: getattr(options, flag) for flag in ("text_column", "label_column")}
    there = splits[split].column_names  # other columns than the first dataset's are guessed
    known: dict[str, Any] = {
        k: v if v and all(c.strip() in there for c in v.split(",")) else None for k, v in given.items()
    }
    reader = _Reader(replace(options, dataset=dataset, subset=None, **known), loaded, splits)
    seen = {*parts.score.inputs, *parts.choose.inputs}
    rows = shuffled(len(splits[split]), options.seed)
    found = reader.encode(split, rows, seen, options.report_limit)
    if not found.rows:
        raise _nothing_left("measure", reader.place(split), len(rows), found.repeated, reader)
    part = found.part(name, split, reader.encoder.collate, options.batch_size)
    notes = [f"{name}: {note}" for note in _left_out([replace(part, name="measure")])]
    if found.shortened:
        notes.append(f"{reader.encoder.cut_note}: {found.shortened} of {len(found.rows)} of {name}.")
    if reader.encoder.classes.note:
        notes.append(f"{name}: {reader.encoder.classes.note}")
    return part, notes


def _left_out(parts: Iterable[Part]) -> list[str]:
    """A note on the rows that could not be used; [] if there are none."""
    told = []
    for part in parts:
        if part.left_out:
            total = sum(part.left_out.values())
            why = ", ".join(f"{count:,} {reason}" for reason, count in part.left_out.items())
            told.append(f"{total:,} of {total + len(part):,} to {part.name} ({why})")
    return [f"Rows left out, as they cannot be used: {'; '.join(told)}."] if told else []


@dataclass
class _Encoded:
    """The usable rows of one split.

    Attributes:
        features: Of each row; empty where they are not kept: then `feature_hashes` has a hash of each.
        inputs: A hash of each row's input.
        repeated: How many rows were left out because their input had been seen.
        shortened: How many rows were cut to the length that the model accepts.
        left_out: How many rows cannot be used, by the reason.
    """

    rows: list[int] = field(default_factory=list)
    features: list[dict[str, Any]] = field(default_factory=list)
    feature_hashes: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    repeated: int = 0
    shortened: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def part(self, name: str, split: str, collate: Callable[[list[dict[str, Any]]], Any], batch_size: int) -> Part:
        """The part of these rows."""
        return Part(
            name, split, self.rows, self.features, collate, batch_size, tuple(self.inputs), self.shortened,
            dict(self.left_out),
        )  # fmt: skip


class _Reader:
    """A dataset's splits, and the encoder of the model's task for their rows."""

    def __init__(
        self, options: DataOptions, loaded: LoadedModel, splits: dict[str, Any] | None = None, labelled: bool = True
    ) -> None:
        self.dataset = options.dataset
        self.splits = read_splits(options.dataset, options.subset) if splits is None else splits
        self.encoder = encoder_of(loaded.task)(options, loaded, next(iter(self.splits.values())).features, labelled)

    def place(self, split: str) -> str:
        """A split's name in messages."""
        return place(self.dataset, split)

    def encode(
        self, split: str, rows: Iterable[int], seen: set[str], limit: int | None = None, keep: bool = True
    ) -> _Encoded:
        """The rows that can be used and whose input is not in ``seen``.

        Args:
            limit: Rows, at most; no more are read.
            keep: Whether to keep the features, and not only a hash of them.
        """
        found = _Encoded()
        self.encoder.read(self.splits[split].features)
        for row in rows:
            if len(found.rows) == limit:
                break
            feature, cut = self._row(split, row)
            if isinstance(feature, str):
                found.left_out[feature] += 1
                continue
            key = content_hash(self.encoder.identity(feature))
            if key in seen:
                found.repeated += 1
                continue
            found.rows.append(row)
            found.inputs.append(key)
            found.shortened += cut
            if keep:
                found.features.append(feature)
            else:
                found.feature_hashes.append(content_hash(feature))
        if not all("labels" in feature for feature in found.features):  # some have none, and need none
            for feature in found.features:
                feature.pop("labels", None)
        return found

    def _row(self, split: str, row: int) -> tuple[dict[str, Any] | str, bool]:
        """A row's features, or why it cannot be used; and whether its end was cut off."""
        self.encoder.cut = False
        try:
            return self.encoder.encode(self.splits[split][row], row), self.encoder.cut
        except HeadPruneError as error:
            raise HeadPruneError(f"{self._where(split, row)}: {error.args[0]}", error.hint) from None
        except Exception as error:
            raise HeadPruneError(
                f"{self._where(split, row)} cannot be read: {type(error).__name__}: {first_line(error)}.",
                "Check this row, --text-column, --label-column and --max-length.",
            ) from error

    def _where(self, split: str, row: int) -> str:
        return f"Row {row} of {self.place(split)} (the first is row 0)"


def _nothing_left(name: str, place: str, rows: int, repeated: int, reader: _Reader) -> HeadPruneError:
    """Why a part has no example."""
    encoder = reader.encoder
    if not rows:
        return HeadPruneError(
            f"There are too few rows in {place}: none is left to {name} on.",
            "Use more data, or a smaller --limit.",
        )
    if repeated == rows:
        cut = f" {encoder.cut_note}." if encoder.cut else ""
        return HeadPruneError(
            f"All {rows} examples to {name} on ({place}) repeat an input of an earlier part.{cut}",
            "The parts must not share inputs: remove the duplicates, use more data, or name another split.",
        )
    return HeadPruneError(
        f"None of the {rows} examples to {name} on ({place}) can be used: they are empty, or hold no answer.",
        "Check the columns that were guessed, --text-column and --label-column.",
    )
