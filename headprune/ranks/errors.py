"""Errors between ranks: one of them is lost, or one has failed and all others raise what it raised."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headprune.errors import HeadPruneError, first_line

Packed = tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]
"""An error as another process can read it: its class, arguments and plain attributes."""


class LostRankError(HeadPruneError):
    """Another rank's process has ended, or cannot be reached any more."""


def lost_ranks(gone: Sequence[int]) -> LostRankError:
    """The error where some ranks are gone; it is not known which ones, if none are given."""
    those = ", ".join(map(str, gone[:-1])) + (" and " if gone[1:] else "") + "".join(map(str, gone[-1:]))
    who = f"Rank {those} is" if len(gone) == 1 else f"Ranks {those} are" if gone else "Another rank is"
    return LostRankError(
        f"{who} gone, so the others cannot continue.",
        "What was finished is kept: run the same command again, with as many processes as you like.",
    )


def packed(error: BaseException) -> Packed:
    """An error for a message; in words alone if it cannot be made again elsewhere."""
    plain = {k: v for k, v in vars(error).items() if isinstance(v, str | int | float | bool | None)}
    arguments: Any = error.args
    if isinstance(error, OSError):  # whose `args` leave out which file it is
        arguments = error.__reduce__()[1]
    found: Packed = (type(error), arguments, plain)
    # A class that others do not know, or that makes its errors in another way, as pydantic's.
    with suppress(Exception):
        if str(unpacked(pickle.loads(pickle.dumps(found)))) == str(error):
            return found
    return (RuntimeError, (f"{type(error).__name__}: {first_line(error)}",), {})


def unpacked(message: Packed) -> BaseException:
    """The error that was packed."""
    kind, arguments, state = message
    error = kind.__new__(kind, *arguments)  # what `__init__` makes of its arguments is in them
    error.__dict__.update(state)
    return error
