"""From a dataset's id or path to three disjoint parts of encoded examples: score, choose, report; and a part to train on.

The examples that score heads never choose between plans, and neither are ever reported. Training may use
the scored examples, and no others of the three.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.convention import find, sees_ahead
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import model_device
from headprune.models import LoadedModel
from headprune.trace import evaluating

_BUILDERS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text",
}  # fmt: skip
_CHOOSE_SPLITS = ("validation", "valid", "val", "dev", "eval", "validation_matched")
_REPORT_SPLITS = ("test", *_CHOOSE_SPLITS)

MAX_SEED = 2**31 - 1  # NumPy takes no more than 2**32 - 1, and some draws add to it

# Usual names, most telling first; a tuple is a pair of texts.
_TEXT: tuple[str | tuple[str, str], ...] = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text_a", "text_b"),
    ("question", "sentence"), ("question", "passage"), "text", "sentence", "content", "review", "tweet", "document",
    "tokens", "words", "article",
)  # fmt: skip
_LABEL = (
    "label",
    "labels",
    "class",
    "target",
    "sentiment",
    "category",
    "intent",
    "ner_tags",
    "pos_tags",
    "tags",
    "fine_label",
)
_SOURCE = ("article", "document", "dialogue", "source", "input", "question", "text")
_TARGET = ("highlights", "summary", "target", "output", "answer", "label", "labels")
_IMAGE = ("image", "img", "pixel_values", "picture")
_AUDIO = ("audio", "speech", "sound")
_TRANSCRIPT = ("text", "sentence", "transcription", "transcript", "normalized_text")


@dataclass(frozen=True)
class DataOptions:
    """Where the data is and how to read it."""

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

    def check(self) -> None:
        """Refuse what is surely wrong, before anything is loaded.

        Raises:
            HeadPruneError: A number out of its range, or no such file or folder, or one without anything in it.
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
        _check_local(self.dataset)


def _check_local(dataset: str) -> None:
    """Refuse files that are surely no data: reading takes longer, and the libraries' errors say less."""
    path = Path(dataset)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        empty = (is_file and not path.stat().st_size) or (is_folder and not any(path.iterdir()))
    except OSError as error:
        raise HeadPruneError(f"{dataset} cannot be read: {error.strerror}.", "Check the path.") from None
    if not dataset.strip():
        raise HeadPruneError(
            "--dataset names no dataset.", "Pass a Hub id, a folder, or a .jsonl, .csv or .parquet file."
        )
    if empty:
        raise HeadPruneError(f"{path} is empty.", "Pass a folder or a file with data in it.")
    known = path.suffix.lower() in _BUILDERS
    if is_file and not known:
        raise HeadPruneError(
            f"{path} is no data file that headprune reads.", f"Use {', '.join(_BUILDERS)}, a folder or a Hub id."
        )
    if not is_file and not is_folder and (known or path.is_absolute() or dataset.startswith((".", "~"))):
        raise HeadPruneError(f"There is no file or folder {dataset}.", "Check the path.")


@dataclass(frozen=True)
class Part:
    """Encoded examples of one purpose.

    Attributes:
        name: ``"score"``, ``"choose"``, ``"report"`` or ``"train"``.
        split: The split they are from.
        rows: Their row numbers in that split.
        features: One dict of plain lists or tensors per example; of images and sounds to train on, made when asked for.
        batch_size: Examples per batch.
        inputs: A hash of every example's input, where parts were cut by it.
    """

    name: str
    split: str
    rows: list[int]
    features: Sequence[dict[str, Any]]
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    batch_size: int
    inputs: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.features)

    def lengths(self) -> list[int]:
        """Tokens per example (1 where there are none)."""
        if isinstance(self.features, _OnDemand):
            return [1] * len(self)
        return [len(f["input_ids"]) if "input_ids" in f else 1 for f in self.features]

    def order(self) -> list[int]:
        """Examples by length, so that a batch holds little padding."""
        lengths = self.lengths()
        return sorted(range(len(self)), key=lambda i: (lengths[i], i))

    def batches(self, batch_size: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Padded batches in the order of `order`."""
        order, size = self.order(), batch_size or self.batch_size
        for start in range(0, len(order), size):
            yield self.collate([self.features[i] for i in order[start : start + size]])

    def typical(self, count: int) -> dict[str, Tensor]:
        """A batch of the ``count`` examples whose length is nearest to the median."""
        order = self.order()
        middle = max(0, min(len(order) // 2 - count // 2, len(order) - count))
        return self.collate([self.features[i] for i in order[middle : middle + count]])

    def about(self) -> dict[str, Any]:
        """Which examples these are: enough to see later whether they are the same."""
        about = {"split": self.split, "examples": len(self), "rows_hash": _hash(self.rows)}
        # Token ids are the same everywhere; pixels and sounds may differ in their last digit between machines.
        texts = not isinstance(self.features, _OnDemand) and "input_ids" in self.features[0]
        return about | {"content_hash": self.content_hash()} if texts else about

    @cached_property
    def _content(self) -> str:
        made = isinstance(self.features, _OnDemand)
        return _hash(self.features.hashes if made else [_hash(f) for f in self.features])  # type: ignore[attr-defined]

    def content_hash(self) -> str:
        """A hash of every example, labels included."""
        return self._content


@dataclass(frozen=True)
class Parts:
    """The three disjoint parts, and what was guessed or left out on the way."""

    score: Part
    choose: Part
    report: Part
    columns: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def about(self) -> dict[str, Any]:
        return {p.name: p.about() for p in (self.score, self.choose, self.report)}


def load_parts(options: DataOptions, loaded: LoadedModel) -> Parts:
    """Read, cut and encode the data.

    Raises:
        HeadPruneError: No such dataset or column, an empty part, labels that don't fit the model.
    """
    splits = read_splits(options)
    encoder = _ENCODERS[loaded.task.name](options, loaded, _columns_of(splits))
    rows_of, notes = _cut(splits, options)
    parts = {}
    seen: set[str] = set()
    repeated = 0
    shortened = {}
    for name, (split, rows) in rows_of.items():
        kept: list[int] = []
        features: list[dict[str, Any]] = []
        keys: list[str] = []
        again = shortened[name] = 0
        for row in rows:
            feature, cut = _encoded(encoder, splits[split], split, row)
            if feature is None:
                continue
            key = _hash(encoder.identity(feature))
            if key in seen:
                again += 1  # the same input in two parts would make them depend on each other
                continue
            shortened[name] += cut
            keys.append(key)
            kept.append(row)
            features.append(feature)
        if not features:
            raise _nothing_left(name, split, len(rows), again, encoder)
        repeated += again
        seen.update(keys)
        parts[name] = Part(name, split, kept, features, encoder.collate, options.batch_size, tuple(keys))
    if repeated:
        notes.append(f"{repeated} examples whose input had already been used were left out of the later parts.")
    if any(shortened.values()):
        counts = ", ".join(f"{shortened[name]} of {len(part)} to {name}" for name, part in parts.items())
        notes.append(f"{encoder.cut_note}: {counts}.")
    notes.extend(encoder.notes)
    return Parts(parts["score"], parts["choose"], parts["report"], encoder.columns, notes)


def _encoded(encoder: _Encoder, data: Any, split: str, row: int) -> tuple[dict[str, Any] | None, bool]:
    """A row's features, and whether something was cut off at the end of it."""
    encoder.cut = False
    try:
        return encoder.encode(data[row], row), encoder.cut
    except HeadPruneError as error:
        raise HeadPruneError(f"Row {row} of {split}: {error.args[0]}", error.hint) from None
    except Exception as error:
        raise HeadPruneError(
            f"Row {row} of {split} cannot be read: {type(error).__name__}: {first_line(error)}.",
            "Check this row, --text-column, --label-column and --max-length.",
        ) from error


def _nothing_left(name: str, split: str, rows: int, repeated: int, encoder: _Encoder) -> HeadPruneError:
    """Why a part has no example."""
    if not rows:
        return HeadPruneError(
            f"Split {split!r} has too few rows: none is left to {name} on.", "Use more data, or a smaller --limit."
        )
    if repeated == rows:
        cut = f" {encoder.cut_note}." if encoder.cut else ""
        return HeadPruneError(
            f"All {rows} examples to {name} on (split {split!r}) repeat an input that an earlier part has.{cut}",
            "The parts must not share inputs: remove the duplicates, use more data, or name another split.",
        )
    return HeadPruneError(
        f"None of the {rows} examples to {name} on (split {split!r}) can be used: they are empty, or hold no answer.",
        "Check the columns that were guessed, --text-column and --label-column.",
    )


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
    splits = read_splits(options)
    encoder = _ENCODERS[loaded.task.name](options, loaded, _columns_of(splits))
    split = parts.score.split
    held_out = (parts.choose, parts.report)
    taken = {row for part in held_out if part.split == split for row in part.rows}
    seen = {_hash(encoder.identity(feature)) for part in held_out for feature in part.features}
    rows: list[int] = []
    features: list[dict[str, Any]] = []
    hashes: list[str] = []
    repeated = shortened = 0
    for row in _shuffled(len(splits[split]), options.seed):
        if len(rows) == limit:
            break
        if row in taken:
            continue
        feature, cut = _encoded(encoder, splits[split], split, row)
        if feature is None:
            continue
        if _hash(encoder.identity(feature)) in seen:
            repeated += 1
            continue
        rows.append(row)
        shortened += cut
        if loaded.task.modality == "text":
            features.append(feature)
        else:
            hashes.append(_hash(feature))
    if not rows:
        raise HeadPruneError(
            f"No example of split {split!r} is left to train on: all of them choose or are reported.",
            "Use more data, or a smaller --limit and --report-limit.",
        )
    scored = len(set(rows) & set(parts.score.rows))
    notes = [f"{len(rows)} examples to train on ({split}), of which {scored} also scored the heads."]
    if repeated:
        notes.append(f"{repeated} examples whose input chooses or is reported were left out of the training part.")
    if shortened:
        notes.append(f"{encoder.cut_note}: {shortened} of {len(rows)} to train on.")
    made = features or _OnDemand(lambda row: encoder.encode(splits[split][row], row), rows, hashes)
    return Part("train", split, rows, made, encoder.collate, options.batch_size), notes


class _OnDemand(Sequence[dict[str, Any]]):
    """Features that are encoded whenever they are asked for: images and sounds of a whole split may not fit in memory."""

    def __init__(self, encode: Callable[[int], Any], rows: list[int], hashes: list[str]) -> None:
        self.encode, self.rows, self.hashes = encode, rows, hashes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return (
            [self.encode(row) for row in self.rows[index]]
            if isinstance(index, slice)
            else self.encode(self.rows[index])
        )


# -- reading ----------------------------------------------------------------------------------


def read_splits(options: DataOptions) -> Mapping[str, Any]:
    """Every split of a Hub dataset, a local folder or a local file."""
    import datasets

    path = Path(options.dataset)
    try:
        if path.is_file():
            builder = _BUILDERS.get(path.suffix.lower())
            if builder is None:
                raise HeadPruneError(
                    f"{path} is no data file that headprune reads.",
                    f"Use {', '.join(_BUILDERS)}, a folder or a Hub id.",
                )
            extra = {"delimiter": "\t"} if path.suffix == ".tsv" else {}
            found = datasets.load_dataset(builder, data_files=str(path), **extra)
            return {"all": found["train"]}
        if path.is_dir():
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                stored = datasets.load_from_disk(str(path))
                return stored if isinstance(stored, datasets.DatasetDict) else {"all": stored}
            found = datasets.load_dataset(str(path), options.subset)
        else:
            found = datasets.load_dataset(options.dataset, options.subset)
    except HeadPruneError:
        raise
    except Exception as error:
        text = first_line(error)
        if path.exists():
            why = "it holds no rows" if "empty" in text.lower() or isinstance(error, StopIteration) else text
            raise HeadPruneError(f"{path} cannot be read as a dataset: {why}.", "Check the files in it.") from error
        raise HeadPruneError(
            f"There is no dataset {options.dataset!r}: no such file or folder, and the Hugging Face hub says: {text}.",
            "Pass a Hub id, a folder, or a .jsonl, .csv or .parquet file.",
        ) from error
    if len(found) == 1:
        only = next(iter(found))
        return {only: found[only]}
    return dict(found)


def _columns_of(splits: Mapping[str, Any]) -> list[str]:
    return list(next(iter(splits.values())).column_names)


def _cut(splits: Mapping[str, Any], options: DataOptions) -> tuple[dict[str, tuple[str, list[int]]], list[str]]:
    """Rows for each part: from the splits there are, else cut by seed."""
    usable = {name: data for name, data in splits.items() if len(data) and not _hidden_labels(data)}
    hidden = [name for name, data in splits.items() if len(data) and name not in usable]
    notes = [f"The labels of split {name!r} are hidden (-1), so it is not used." for name in hidden]
    if not usable:
        raise HeadPruneError(f"{options.dataset} holds no labelled rows.", "Check the files and --subset.")
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
    free = {name: _shuffled(len(data), options.seed) for name, data in usable.items()}

    def take(split: str, count: int) -> tuple[str, list[int]]:
        rows, free[split] = free[split][:count], free[split][count:]
        return split, rows

    size = len(usable[scoring])
    cuts = {}
    # A split that serves several parts is cut: at most half of it scores, a fifth chooses, the rest reports.
    shared = sum(s in (None, scoring) for s in (reporting, choosing))
    cuts["score"] = take(
        scoring, min(options.limit, size if not shared else size // 2 if reporting is None else size * 4 // 5)
    )
    if reporting is None or reporting == scoring:
        cuts["choose"] = take(choosing or scoring, min(options.limit, size // 5 if not choosing else options.limit))
        cuts["report"] = take(scoring, options.report_limit)
        notes.append(f"There is no other split to report on: {scoring!r} was cut by seed {options.seed}.")
    elif choosing is None or choosing == reporting:
        source = choosing or scoring
        available = len(free[source])
        cuts["choose"] = take(source, min(options.limit, available // 2 if source == reporting else available))
        cuts["report"] = take(reporting, options.report_limit)
    else:
        cuts["choose"] = take(choosing, options.limit)
        cuts["report"] = take(reporting, options.report_limit)
    return cuts, notes


def _shuffled(count: int, seed: int) -> list[int]:
    """The rows of a split in the order in which they are taken; of every split of one size the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).tolist()


def _hidden_labels(data: Any) -> bool:
    """Whether every label is -1, as in the test splits of GLUE."""
    return "label" in data.column_names and all(label == -1 for label in data[: min(50, len(data))]["label"])


def _hash(value: Any) -> str:
    def plain(x: Any) -> Any:
        return hashlib.sha256(x.numpy().tobytes()).hexdigest() if isinstance(x, Tensor) else str(x)

    return hashlib.sha256(json.dumps(value, default=plain, sort_keys=True).encode()).hexdigest()[:16]


# -- encoding ---------------------------------------------------------------------------------


class _Encoder:
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
        return {k: v for k, v in feature.items() if k not in _LABEL_KEYS}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A padded batch."""
        raise NotImplementedError

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


class _Text(_Encoder):
    """Shared by everything that tokenizes."""

    def setup(self) -> None:
        self.text = self.text_columns()

    def text_columns(self) -> tuple[str, ...]:
        given = self.options.text_column
        if given is not None:
            return tuple(self.column("text", "--text-column", name.strip(), ()) for name in given.split(","))
        for usual in _TEXT:
            pair = usual if isinstance(usual, tuple) else (usual,)
            if all(name in self.available for name in pair):
                self.columns["text"] = ",".join(pair)
                return pair
        raise HeadPruneError(
            f"No column looks like the text: the columns are {', '.join(self.available)}.",
            "Name it with --text-column (two for pairs: --text-column premise,hypothesis).",
        )

    def tokens(self, example: Mapping[str, Any]) -> dict[str, list[int]]:
        texts = [example[name] for name in self.text]
        if any(not isinstance(t, str) for t in texts):
            raise HeadPruneError(f"column {self.text[0]!r} holds no text.", "Name another with --text-column.")
        return dict(self.shortened(partial(self.processor, *texts)))

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = [{k: v for k, v in f.items() if k not in _LABEL_KEYS} for f in features]
        batch = dict(self.processor.pad(inputs, return_tensors="pt"))
        for key in _LABEL_KEYS:
            if key in features[0]:
                batch[key] = self.labels([f[key] for f in features], batch["input_ids"].shape[1])
        return batch

    def labels(self, labels: list[Any], length: int) -> Tensor:
        """Labels as a tensor: one per example, or padded to the tokens (on the side where padding is)."""
        if not isinstance(labels[0], list):
            return torch.tensor(labels)
        left = self.processor.padding_side == "left"
        padded = [[IGNORED] * (length - len(x)) + x if left else x + [IGNORED] * (length - len(x)) for x in labels]
        return torch.tensor(padded)


_LABEL_KEYS = ("labels", "start_positions", "end_positions")


def _class_of(value: Any, config: Any) -> int | float:
    """A label as the model's class: its number, or looked up by name."""
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


class _SequenceClassification(_Text):
    def setup(self) -> None:
        super().setup()
        self.label = self.column("label", "--label-column", self.options.label_column, _LABEL)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        label = example[self.label]
        several = isinstance(label, list)
        value = [float(x) for x in label] if several else _class_of(label, self.config)
        return {**self.tokens(example), "labels": value}

    def labels(self, labels: list[Any], length: int) -> Tensor:
        return torch.tensor(labels)


class _TokenClassification(_Text):
    def setup(self) -> None:
        super().setup()
        self.label = self.column("label", "--label-column", self.options.label_column, _LABEL[::-1])

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | None:
        words, tags = example[self.text[0]], example[self.label]
        if len(words) != len(tags):
            raise HeadPruneError(f"{len(words)} words, but {len(tags)} labels.", "Check the two columns.")
        if not words:
            return None
        coded = self.shortened(partial(self.processor, words, is_split_into_words=True))
        labels, previous = [], None
        for word in coded.word_ids():
            # A word counts once, at its first token.
            fresh = word is not None and word != previous
            labels.append(_class_of(tags[word], self.config) if fresh else IGNORED)
            previous = word
        return {**coded, "labels": labels}


class _CausalLM(_Text):
    def setup(self) -> None:
        super().setup()
        # Padding on the left would have the first word predicted from it, and shift every position after it.
        self.processor.padding_side = "right"
        self.shifted = self._wants_next_tokens()

    def _wants_next_tokens(self) -> bool:
        """Whether labels must be the next tokens, since the model compares logits with labels in their own place.

        Raises:
            HeadPruneError: A model that sees the tokens that it would be asked for.
        """
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.config.get_text_config().vocab_size
        # Marks of images and the like are mostly the first or the last of a vocabulary.
        ids = torch.randint(vocabulary // 4, max(vocabulary // 2, 2), (1, 8), generator=generator)
        ids = ids.to(model_device(self.model))
        example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        with torch.no_grad(), evaluating(self.model):
            if sees_ahead(self.model, example):
                raise HeadPruneError(
                    f"{type(self.model).__name__}, as it is set up, sees the tokens behind each one: its perplexity on plain "
                    "text would mean nothing.",
                    "Use --task masked-lm, if it is a masked language model (or is_decoder in its config).",
                )
            convention = find(self.model, [example], [example]).convention
        shifted = convention is not None and convention.ahead == 0
        if shifted:
            self.notes.append("This model's own loss does not shift labels: they are the next tokens.")
        return shifted

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | None:
        coded = self.tokens(example)
        if len(coded["input_ids"]) < 2:
            return None  # nothing to predict
        coded.pop("token_type_ids", None)
        ids = list(coded["input_ids"])
        return {**coded, "labels": [*ids[1:], IGNORED] if self.shifted else ids}


class _MaskedLM(_Text):
    def setup(self) -> None:
        super().setup()
        if self.processor.mask_token_id is None:
            raise HeadPruneError("The tokenizer has no mask token.", "Use a masked language model's tokenizer.")
        self.notes.append("15 % of each text's tokens were masked, drawn by seed and row; only they are predicted.")

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | None:
        coded = self.tokens(example)
        ids = coded["input_ids"]
        special = set(self.processor.all_special_ids)
        open_ = [i for i, token in enumerate(ids) if token not in special]
        if not open_:
            return None
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + row)
        count = max(1, round(0.15 * len(open_)))
        masked = {open_[i] for i in torch.randperm(len(open_), generator=generator)[:count].tolist()}
        labels = [token if i in masked else IGNORED for i, token in enumerate(ids)]
        coded["input_ids"] = [self.processor.mask_token_id if i in masked else t for i, t in enumerate(ids)]
        return {**coded, "labels": labels}

    def identity(self, feature: dict[str, Any]) -> Any:
        """The text before it was masked."""
        pairs = zip(feature["input_ids"], feature["labels"], strict=True)
        return [token if label == IGNORED else label for token, label in pairs]


class _QuestionAnswering(_Encoder):
    """SQuAD's columns: question, context, answers {text, answer_start}."""

    collate = _Text.collate
    labels = _Text.labels

    def setup(self) -> None:
        self.question = self.column("question", "--text-column", None, ("question",))
        self.context = self.column("context", "--text-column", None, ("context", "passage"))
        self.answers = self.column("answers", "--label-column", self.options.label_column, ("answers", "answer"))
        self.dropped = 0

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any] | None:
        answers = example[self.answers]
        if not answers["text"]:
            return None
        start = answers["answer_start"][0]
        end = start + len(answers["text"][0])
        coded = self.shortened(
            partial(self.processor, example[self.question], example[self.context], return_offsets_mapping=True),
            how="only_second",
        )
        offsets, sequence = coded.pop("offset_mapping"), coded.sequence_ids()
        inside = [
            i for i, (s, (a, b)) in enumerate(zip(sequence, offsets, strict=True)) if s == 1 and a < end and b > start
        ]
        if not inside:
            return None  # the answer was cut off
        return {**coded, "start_positions": inside[0], "end_positions": inside[-1]}


class _Seq2Seq(_Text):
    def text_columns(self) -> tuple[str, ...]:
        return (self.column("source", "--text-column", self.options.text_column, _SOURCE),)

    def setup(self) -> None:
        super().setup()
        usual = [name for name in _TARGET if name not in self.text]
        self.target = self.column("target", "--label-column", self.options.label_column, usual)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        target = self.shortened(partial(self.processor, text_target=str(example[self.target])))
        return {**self.tokens(example), "labels": list(target["input_ids"])}

    def labels(self, labels: list[Any], length: int) -> Tensor:
        longest = max(map(len, labels))
        return torch.tensor([x + [IGNORED] * (longest - len(x)) for x in labels])


class _ImageClassification(_Encoder):
    def setup(self) -> None:
        self.image = self.column("image", "--text-column", self.options.text_column, _IMAGE)
        self.label = self.column("label", "--label-column", self.options.label_column, _LABEL)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        image = example[self.image]
        if self.config.num_channels == 3 and getattr(image, "mode", "RGB") != "RGB":
            image = image.convert("RGB")
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": _class_of(example[self.label], self.config)}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.stack([f["pixel_values"] for f in features]),
            "labels": torch.tensor([f["labels"] for f in features]),
        }


class _Audio(_Encoder):
    def setup(self) -> None:
        self.audio = self.column("audio", "--text-column", self.options.text_column, _AUDIO)

    def samples(self, example: Mapping[str, Any]) -> Any:
        """The sound as a mono array at the model's rate."""
        import numpy as np

        sound = example[self.audio]
        extractor = getattr(self.processor, "feature_extractor", self.processor)
        if isinstance(sound, Mapping):
            array, rate = np.asarray(sound["array"], dtype=np.float32), int(sound["sampling_rate"])
        elif hasattr(sound, "get_all_samples"):  # torchcodec's decoder, as datasets gives it
            decoded = sound.get_all_samples()
            array, rate = decoded.data.mean(dim=0).numpy(), int(decoded.sample_rate)
        else:
            raise HeadPruneError(
                f"column {self.audio!r} holds no sound.", "Give {array, sampling_rate}, or install torchcodec."
            )
        if rate != extractor.sampling_rate:
            raise HeadPruneError(
                f"the sound has {rate} samples a second, the model takes {extractor.sampling_rate}.",
                "Resample the dataset (datasets: cast_column with Audio(sampling_rate=…)).",
            )
        return array


class _AudioClassification(_Audio):
    def setup(self) -> None:
        super().setup()
        self.label = self.column("label", "--label-column", self.options.label_column, _LABEL)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        coded = self.processor(self.samples(example), sampling_rate=rate)
        feature = {k: torch.as_tensor(v[0]) for k, v in coded.items()}
        return {**feature, "labels": _class_of(example[self.label], self.config)}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = [{k: v for k, v in f.items() if k != "labels"} for f in features]
        batch = dict(self.processor.pad(inputs, padding=True, return_tensors="pt"))
        batch["labels"] = torch.tensor([f["labels"] for f in features])
        return batch


class _SpeechSeq2Seq(_Audio):
    def setup(self) -> None:
        super().setup()
        self.target = self.column("transcript", "--label-column", self.options.label_column, _TRANSCRIPT)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        extractor, tokenizer = self.processor.feature_extractor, self.processor.tokenizer
        coded = extractor(self.samples(example), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        target = self.shortened(partial(tokenizer, str(example[self.target])), self.options.max_length or 448)
        labels = list(target["input_ids"])
        if labels[:1] == [self.config.decoder_start_token_id]:
            labels = labels[1:]  # the model puts it there itself when it shifts the labels
        return {"input_features": coded["input_features"][0], "labels": labels}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(f["labels"]) for f in features)
        return {
            "input_features": torch.stack([f["input_features"] for f in features]),
            "labels": torch.tensor([f["labels"] + [IGNORED] * (longest - len(f["labels"])) for f in features]),
        }


_ENCODERS: dict[str, Callable[[DataOptions, LoadedModel, Sequence[str]], _Encoder]] = {
    "sequence-classification": _SequenceClassification,
    "token-classification": _TokenClassification,
    "question-answering": _QuestionAnswering,
    "masked-lm": _MaskedLM,
    "causal-lm": _CausalLM,
    "image-classification": _ImageClassification,
    "speech-seq2seq": _SpeechSeq2Seq,
    "audio-classification": _AudioClassification,
    "seq2seq": _Seq2Seq,
}
