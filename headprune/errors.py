"""The one error class: what is wrong, where, and what to try."""

from __future__ import annotations


class HeadPruneError(Exception):
    """A mistake or a limit that headprune knows about.

    Args:
        message: What is wrong and where (layer, head, row, file).
        hint: The next thing to try; the command line prints it after the message.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.hint}" if self.hint else message


class PruneError(HeadPruneError):
    """A prune that could not be proved; the model is as it was before."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
