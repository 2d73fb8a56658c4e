"""Disjoint parts of a dataset: which rows of which split serve which part, and their encoded examples; no input is in two parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headprune.amounts import example_count
from headprune.app.data.encoders import encoder_of
from headprune.app.data.encoders.text import CausalLM, MaskedLM
from headprune.app.data.part import DataParts, OnDemand, Part, content_hash
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
    only_scores = None not in (choosing, reporting)
    most = size if only_scores else size // 2 if reporting is None else size * 4 // 5
    cuts = {"score": take(scoring, min(options.limit, most))}
    most = options.limit
    if reporting is None:
        cut = place(options.dataset, scoring)
        by_user = options.report_split is not None
        why = f"{cut} is both scored and reported on: it" if by_user else f"There is no other split to report on: {cut}"
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


def load_parts(options: DataOptions, loaded: LoadedModel, labelled: bool = True) -> DataParts:
    """The three parts of a dataset, with disjoint inputs.

    Args:
        labelled: Whether every example must have a label; else labels that are there are still taken.

    Raises:
        HeadPruneError: No such dataset or column, an empty part, labels that don't fit the model.
    """
    source = _Source(options, loaded, labelled=labelled)
    rows_of, notes = cut_rows(source.splits, options, labelled)
    parts: dict[str, Part] = {}
    seen: set[str] = set()
    for name, (split, rows) in rows_of.items():
        parts[name] = part = source.part(name, split, rows, seen)
        if not part.rows:
            raise _nothing_left(name, part, len(rows), source)
        seen.update(part.inputs)  # the same input in two parts would make them depend on each other
    notes.extend(_left_out(parts.values()))
    if repeated := sum(part.repeated for part in parts.values()):
        notes.append(f"Left out of the later parts, as their input had already been used: {example_count(repeated)}.")
    if any(part.shortened for part in parts.values()):
        counts = ", ".join(f"{part.shortened} of {len(part)} to {name}" for name, part in parts.items())
        notes.append(f"{source.encoder.cut_note}: {counts}.")
    notes.extend(source.encoder.notes)
    return DataParts(parts["score"], parts["choose"], parts["report"], source.encoder.columns, notes)


def load_train(
    options: DataOptions, loaded: LoadedModel, parts: DataParts, limit: int | None = None
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
    source, split = _Source(options, loaded), parts.score.split
    held_out = (parts.choose, parts.report)
    used = {row for part in held_out if part.split == split for row in part.rows}
    identity = source.encoder.identity
    seen = {content_hash(identity(feature)) for part in (*held_out, *parts.also) for feature in part.features}
    rows = (row for row in shuffled(len(source.splits[split]), options.seed) if row not in used)
    part = source.part("train", split, rows, seen, limit, on_demand=loaded.task.modality != "text")
    if not part.rows:
        raise HeadPruneError(
            f"No example of {place(options.dataset, split)} is left to train on: all of them are used to choose or to report.",
            "Use more data, or a smaller --limit and --report-limit.",
        )
    scored = len(set(part.rows) & set(parts.score.rows))
    notes = [f"{len(part):,} examples to train on ({split}), of which {scored:,} also scored the heads."]
    notes.extend(_left_out([part]))
    if part.repeated:
        notes.append(
            f"Left out of the training part, as their input is used to choose or to report: {example_count(part.repeated)}."
        )
    if part.shortened:
        notes.append(f"{source.encoder.cut_note}: {part.shortened} of {len(part)} to train on.")
    return part, notes


def load_also(options: DataOptions, loaded: LoadedModel, parts: DataParts) -> DataParts:
    """The parts, with one of every second dataset beside them: a test split where there is one, `DataOptions.report_limit` rows at most.

    Language models that no second dataset is named for get a small text that comes with headprune. No input is taken
    that scores heads or chooses plans, and `load_train` leaves out all of them: nothing is fitted to these.

    Raises:
        HeadPruneError: As `load_parts`.
    """
    own = not options.also and encoder_of(loaded.task) in (CausalLM, MaskedLM)
    also, notes = [], list(parts.notes)
    for dataset in (str(PLAIN_TEXT),) if own else options.also:
        try:
            part, part_notes = _also(options, dataset, loaded, parts, PLAIN_TEXT.name if own else dataset)
        except HeadPruneError as error:
            if not own:
                raise
            notes.append(f"{PLAIN_TEXT.name} was not measured: {error.args[0]}")  # a language without these letters
            continue
        also.append(part)
        notes.extend(part_notes)
    return replace(parts, also=tuple(also), notes=notes)


def _also(
    options: DataOptions, dataset: str, loaded: LoadedModel, parts: DataParts, name: str
) -> tuple[Part, list[str]]:
    """The part of a second dataset, and notes on it."""
    splits = read_splits(dataset)
    split = reported_of(splits, dataset)
    columns = splits[split].column_names
    shared: dict[str, Any] = {}
    for flag in ("text_column", "label_column"):  # columns that this dataset does not have are guessed
        named = getattr(options, flag)
        shared[flag] = named if named and all(c.strip() in columns for c in named.split(",")) else None
    source = _Source(replace(options, dataset=dataset, subset=None, **shared), loaded, splits)
    rows = shuffled(len(splits[split]), options.seed)
    part = source.part(name, split, rows, {*parts.score.inputs, *parts.choose.inputs}, options.report_limit)
    if not part.rows:
        raise _nothing_left("measure", part, len(rows), source)
    notes = [f"{name}: {note}" for note in _left_out([replace(part, name="measure")])]
    if part.shortened:
        notes.append(f"{source.encoder.cut_note}: {part.shortened} of {len(part)} of {name}.")
    if source.encoder.classes.note:
        notes.append(f"{name}: {source.encoder.classes.note}")
    return part, notes


def _left_out(parts: Iterable[Part]) -> list[str]:
    """A note on the rows that could not be used; [] if there are none."""
    counts = []
    for part in parts:
        if part.left_out:
            total = sum(part.left_out.values())
            why = ", ".join(f"{count:,} {reason}" for reason, count in part.left_out.items())
            counts.append(f"{total:,} of {total + len(part):,} to {part.name} ({why})")
    return [f"Rows left out, as they cannot be used: {'; '.join(counts)}."] if counts else []


class _Source:
    """A dataset's splits, and the encoder of the model's task for their rows."""

    def __init__(
        self, options: DataOptions, loaded: LoadedModel, splits: dict[str, Any] | None = None, labelled: bool = True
    ) -> None:
        self.options = options
        self.splits = read_splits(options.dataset, options.subset) if splits is None else splits
        self.encoder = encoder_of(loaded.task)(options, loaded, next(iter(self.splits.values())).features, labelled)

    def part(
        self,
        name: str,
        split: str,
        rows: Iterable[int],
        seen: set[str],
        limit: int | None = None,
        on_demand: bool = False,
    ) -> Part:
        """The part of a split's rows that can be used and whose input is not in ``seen``.

        Args:
            limit: Rows, at most; no more are read.
            on_demand: Keep a hash of the features, and encode a row again each time it is read.
        """
        kept, inputs, features = list[int](), list[str](), list[Any]()
        left_out, repeated, shortened = Counter[str](), 0, 0
        self.encoder.read(self.splits[split].features)
        for row in rows:
            if len(kept) == limit:
                break
            feature, cut = self._row(split, row)
            if isinstance(feature, str):
                left_out[feature] += 1
                continue
            key = content_hash(self.encoder.identity(feature))
            if key in seen:
                repeated += 1
                continue
            kept.append(row)
            inputs.append(key)
            features.append(content_hash(feature) if on_demand else feature)
            shortened += cut
        examples: Sequence[dict[str, Any]] = features
        if on_demand:
            data, encode = self.splits[split], self.encoder.encode
            examples = OnDemand(lambda row: encode(data[row], row), kept, features)
        elif not all("labels" in feature for feature in features):  # some have none, and need none
            for feature in features:
                feature.pop("labels", None)
        collate, size = self.encoder.collate, self.options.batch_size
        return Part(name, split, kept, examples, collate, size, tuple(inputs), shortened, dict(left_out), repeated)

    def _row(self, split: str, row: int) -> tuple[dict[str, Any] | str, bool]:
        """A row's features, or why it cannot be used; and whether its end was cut off."""
        self.encoder.cut = False
        where = f"Row {row} of {place(self.options.dataset, split)} (the first is row 0)"
        try:
            return self.encoder.encode(self.splits[split][row], row), self.encoder.cut
        except HeadPruneError as error:
            raise HeadPruneError(f"{where}: {error.args[0]}", error.hint) from None
        except Exception as error:
            raise HeadPruneError(
                f"{where} cannot be read: {type(error).__name__}: {first_line(error)}.",
                "Check this row, --text-column, --label-column and --max-length.",
            ) from error


def _nothing_left(name: str, part: Part, rows: int, source: _Source) -> HeadPruneError:
    """Why a part has no example."""
    split = place(source.options.dataset, part.split)
    if not rows:
        return HeadPruneError(
            f"There are too few rows in {split}: none is left to {name} on.",
            "Use more data, or a smaller --limit.",
        )
    if part.repeated == rows:
        cut = f" {source.encoder.cut_note}." if source.encoder.cut else ""
        return HeadPruneError(
            f"All {rows} examples to {name} on ({split}) repeat an input of an earlier part.{cut}",
            "The parts must not share inputs: remove the duplicates, use more data, or name another split.",
        )
    return HeadPruneError(
        f"None of the {rows} examples to {name} on ({split}) can be used: they are empty, or hold no answer.",
        "Check the columns that were guessed, --text-column and --label-column.",
    )
