"""Which rows of which split serve which part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headprune.app.data.reading import place
from headprune.app.options import DataOptions
from headprune.errors import HeadPruneError

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
