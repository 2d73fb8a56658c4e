"""What every document shares: how it is checked, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from headprune.errors import HeadPruneError, first_line
from headprune.files import read_json, write_json

if TYPE_CHECKING:
    from typing_extensions import Self


Count = Annotated[int, Field(ge=0)]
"""How many there are of something, or which one of them, counted from 0."""


def _beside(name: str) -> str:
    if name in ("", ".", "..") or "\0" in name or Path(name).name != name:
        raise ValueError("it leads to another folder")
    return name


Beside = Annotated[str, AfterValidator(_beside)]
"""The name of a file or folder beside the document: no path, so it leads nowhere else."""


class Document(BaseModel):
    """A value of a JSON file: immutable, and checked when it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def given(self) -> dict[str, Any]:
        """The fields that were set, by their names."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def changed(self, **changes: Any) -> Self:
        """A copy with other values in some fields."""
        return type(self).model_validate({**self.given(), **changes})

    def to_json(self) -> dict[str, Any]:
        """As `headprune.files.dumps` takes it."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class File(Document):
    """A value that is a whole file.

    Attributes:
        kind: What the file says that it holds.
    """

    kind: ClassVar[str]

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a file holds.

        Raises:
            HeadPruneError: No such file, not JSON, another kind of document, or a wrong one; the message names the key.
        """
        data = read_json(path, cls.kind)
        try:
            found = cls.model_validate(data)
            what = _bent(data, found.to_json())
        except ValidationError as error:
            what = _problem(error)
        except (HeadPruneError, TypeError, ValueError, OverflowError) as error:
            what = first_line(error) if not isinstance(error, HeadPruneError) else str(error.args[0]).rstrip(".")
        if what:
            raise HeadPruneError(f"{path} is damaged, or of another version: {what}.", "Make it again.") from None
        return found

    def write(self, path: Path) -> None:
        """Write the file; readers see the old one or this one."""
        write_json(path, self.kind, self.to_json())


def _bent(given: Any, read: Any, place: tuple[Any, ...] = ()) -> str:
    """The first value that pydantic took for one of another type (true for 1, "3" for 3); "" if there is none."""
    if isinstance(given, dict) and isinstance(read, dict):
        pairs = ((key, value, read[key]) for key, value in given.items() if key in read)
    elif isinstance(given, list) and isinstance(read, list | tuple):
        pairs = ((i, *both) for i, both in enumerate(zip(given, read, strict=False)))
    else:
        plain = isinstance(given, bool | int | float | str) and isinstance(read, bool | int | float | str)
        if not plain or type(given) is type(read) or (type(given) is int and type(read) is float):
            return ""
        return f"{' › '.join(map(str, place))} is {given!r:.60}; it should be {_KINDS.get(type(read), 'a text')}"
    return next(filter(None, (_bent(a, b, (*place, key)) for key, a, b in pairs)), "")


_KINDS = {bool: "true or false", int: "a valid integer", float: "a valid number"}


def _problem(error: ValidationError) -> str:
    """The first thing that is wrong, with its place in the document."""
    first = error.errors(include_url=False)[0]
    place = " › ".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"this headprune does not know {place}"
    return f"{place} is {first['input']!r:.60}; {first['msg'].replace('Input', 'it')}"
