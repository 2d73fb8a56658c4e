"""Documents: dataclasses as JSON files, checked by pydantic when they are read.

A document is a frozen dataclass of plain values. What is read must be what this version writes: an unknown key, a missing one or a value
of another type is an error that names its place, since what this version does not understand could make its report wrong. A field with a
default was added later, or is there only where it applies: files without it are readable.
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
"""How many there are of something, or which one of them, counted from 0."""


def _check_beside(name: str) -> str:
    if name in ("", ".", "..") or "\0" in name or Path(name).name != name:
        raise ValueError("it leads to another folder")
    return name


Beside = Annotated[str, AfterValidator(_check_beside)]
"""The name of a file or folder beside the document: no path, so it leads nowhere else."""


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def to_json(value: Any) -> dict[str, Any]:
    """A dataclass as plain values, as `headprune.files.dumps` takes them."""
    values: dict[str, Any] = _adapter(type(value)).dump_python(value, by_alias=True)
    return values


def from_json(kind: type[T], data: Any) -> T:
    """The dataclass that plain values describe.

    Raises:
        ValueError: What is wrong, and its place.
    """
    try:
        value: T = _adapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(_first_problem(error)) from None
    if difference := _first_difference(data, to_json(value)):
        raise ValueError(difference)
    return value


class File:
    """A dataclass that is a whole file; subclasses name their ``kind``."""

    kind: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a file holds.

        Raises:
            HeadPruneError: No such file, not JSON, another kind of document, or a wrong one; the message names the key.
        """
        data = read_json(path, cls.kind)
        try:
            return from_json(cls, data)
        except HeadPruneError as error:
            problem = str(error.args[0]).rstrip(".")
        except (TypeError, ValueError, OverflowError) as error:
            problem = first_line(error)
        raise HeadPruneError(f"{path} is damaged, or of another version: {problem}.", "Make it again.") from None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return to_json(self)

    def write(self, path: Path) -> None:
        """Write the file; readers see the old one or this one."""
        write_json(path, self.kind, self.to_json())


_TYPES = {bool: "true or false", int: "a valid integer", float: "a valid number"}


def _first_difference(given: Any, read: Any, place: tuple[Any, ...] = ()) -> str:
    """The first key that is not known, or value that pydantic took for one of another type (true for 1, "3" for 3); "" if there is none."""
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
    """The first thing that pydantic found wrong, with its place in the document."""
    first = error.errors(include_url=False)[0]
    place = " › ".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    return f"{place} is {first['input']!r:.60}; {first['msg'].replace('Input', 'it')}"
