"""What every document shares: how it is checked, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headprune.errors import HeadPruneError
from headprune.jsonio import read_json, write_json

if TYPE_CHECKING:
    from typing_extensions import Self


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
        """As `headprune.jsonio.dumps` takes it."""
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
            return cls.model_validate(data)
        except (ValidationError, HeadPruneError) as error:
            what = _problem(error) if isinstance(error, ValidationError) else str(error.args[0]).rstrip(".")
            raise HeadPruneError(f"{path} is damaged, or of another version: {what}.", "Make it again.") from None

    def write(self, path: Path) -> None:
        """Write the file; readers see the old one or this one."""
        write_json(path, self.kind, self.to_json())


def _problem(error: ValidationError) -> str:
    """The first thing that is wrong, with its place in the document."""
    first = error.errors(include_url=False)[0]
    place = " › ".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"this headprune does not know {place}"
    return f"{place} is {first['input']!r:.60}; {first['msg'].replace('Input', 'it')}"
