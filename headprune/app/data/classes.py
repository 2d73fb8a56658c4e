"""The classes of a model, and the labels of a dataset's column as their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headprune.errors import HeadPruneError


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
            self._match_by_order()

    def _match_by_order(self) -> None:
        """Take the data's order where nothing speaks against it; else rows of classes that the model does not name are refused."""
        alike, generic = len(self._data) == self.count, _is_generic(self.names)
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
        raise HeadPruneError(
            f"label {value!r} does not fit the model's head, which has {self.count} classes ({_few(self.names.values())}).",
            "Check --label-column, and name the classes in the data as the model does (id2label in its config.json).",
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


def _is_generic(names: Mapping[int, str]) -> bool:
    """Whether the names are those that transformers gives where nobody named anything."""
    return all(name.upper() == f"LABEL_{i}" for i, name in names.items())


def _unique(names: Mapping[int, str], fold: Callable[[str], str]) -> dict[str, int]:
    """Numbers by name, without names that several classes have."""
    counts = Counter(fold(name) for name in names.values())
    return {fold(name): i for i, name in names.items() if counts[fold(name)] == 1}


def _few(names: Iterable[str]) -> str:
    """The first names of many."""
    listed = list(names)
    return f"{', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}"
