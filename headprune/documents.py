"""Documents: dataclasses as JSON files, checked by pydantic when they are read.

A document is a frozen dataclass of plain values. Reading is strict: an unknown key, a missing key or a value of another type is an error
that names its place, since content that this version does not understand could make its report wrong. Only fields with a default may be
missing: they were added in a later version, or do not always apply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import Self

from headprune.errors import HeadPruneError, first_line
from headprune.files import read_json, write_json

T = TypeVar("T")

Count = Annotated[int, Field(ge=0)]
"""A count, or an index from 0."""


def _check_beside(name: str) -> str:
    if name in ("", ".", "..") or "\0" in name or Path(name).name != name:
        raise ValueError("it leads to another folder")
    return name


Beside = Annotated[str, AfterValidator(_check_beside)]
"""The name of a file or folder beside the document; never a path to another folder."""


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def to_json(value: Any) -> dict[str, Any]:
    """A dataclass as plain values, for `headprune.files.dumps`."""
    values: dict[str, Any] = _adapter(type(value)).dump_python(value, by_alias=True)
    return values


def from_json(kind: type[T], data: Any) -> T:
    """Build a dataclass from plain values.

    Raises:
        ValueError: The values do not fit; the error says what is wrong and where.
    """
    try:
        value: T = _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None
    if difference := _first_difference(data, to_json(value)):
        raise ValueError(difference)
    return value


class File:
    """Base class of dataclasses that are stored as one file; subclasses set ``kind``."""

    kind: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            HeadPruneError: No such file, not JSON, another kind of document, or an invalid one; the message names the key.
        """
        data = read_json(path, cls.kind)
        try:
            return from_json(cls, data)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"{path} is damaged, or of another version: {first_line(error)}."
            raise HeadPruneError(message, "Make it again.") from None

    def to_json(self) -> dict[str, Any]:
        """The document as plain values."""
        return to_json(self)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_json(path, self.kind, self.to_json())


_TYPES = {bool: "true or false", int: "a valid integer", float: "a valid number"}


def _first_difference(given: Any, read: Any, place: tuple[Any, ...] = ()) -> str:
    """The first unknown key, or value that pydantic converted to another type (true to 1, "3" to 3), in words; "" if there is none."""
    where = " › ".join(map(str, place))
    if isinstance(given, dict) and isinstance(read, dict):
        if unknown := [key for key in given if key not in read]:
            return f"this headprune does not know {' › '.join(map(str, (*place, unknown[0])))}"
        pairs = [(key, value, read[key]) for key, value in given.items()]
    elif isinstance(given, list) and isinstance(read, list | tuple):
        pairs = [(i, *both) for i, both in enumerate(zip(given, read, strict=False))]
    else:
        plain = isinstance(given, bool | int | float | str) and isinstance(read, bool | int | float | str)
        if not plain or type(given) is type(read) or (type(given) is int and type(read) is float):
            return ""
        return f"{where} is {given!r:.60}; it should be {_TYPES.get(type(read), 'a text')}"
    return next(filter(None, (_first_difference(a, b, (*place, key)) for key, a, b in pairs)), "")


def _first_problem(error: ValidationError) -> str:
    """The first error that pydantic found, with its place in the document."""
    first = error.errors(include_url=False)[0]
    place = " › ".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {first['input']!r:.60}; {first['msg'].replace('Input', 'it')}"
