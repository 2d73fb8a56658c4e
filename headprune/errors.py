"""The one error class: what is wrong, where, and what to try."""

from __future__ import annotations

import errno
from pathlib import Path


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


class Stopped(KeyboardInterrupt):
    """Ctrl-C, or a signal that asks to stop, as batch systems and containers send it.

    Args:
        status: The command's exit status.
        hint: How to go on.
    """

    def __init__(self, status: int = 130, hint: str = "") -> None:
        super().__init__()
        self.status, self.hint = status, hint


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, before the work whose result would go there.

    Raises:
        HeadPruneError: It cannot.
    """
    import tempfile

    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise HeadPruneError(f"{folder} cannot be written: {there} is a file.", "Choose a folder with -o.")
        # Permissions say too little: root may do all, but not on a read-only disk.
        with tempfile.TemporaryDirectory(prefix=".headprune-", dir=there) as tried:
            Path(tried, folder.name or "x").mkdir()
    except OSError as error:
        raise HeadPruneError(
            f"{folder} cannot be written: {error.strerror}.", "Choose another folder with -o."
        ) from None


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def explained(error: BaseException) -> HeadPruneError | None:
    """An error of the system's, which any step may meet, with what to do about it; None for any other.

    Libraries wrap such errors, and the one for safetensors is not even an OSError, so causes and texts are looked at.
    """
    cause: BaseException | None = error
    while cause is not None:
        system = cause if isinstance(cause, OSError) else OSError()
        where = f" ({system.filename})" if system.filename else ""
        if system.errno in _FULL or "No space left on device" in str(cause):
            return HeadPruneError(
                f"No space left on the disk{where}.",
                "Free some, or use another disk (-o for the results, TMPDIR and HF_HOME for the rest), then run the same command "
                "again: what score, prune or finetune had finished is kept.",
            )
        if system.errno is not None and where:
            return HeadPruneError(
                f"{system.filename} cannot be read or written: {system.strerror}.",
                "Check the path and its permissions.",
            )
        name = type(cause).__name__
        if isinstance(cause, MemoryError) or "OutOfMemory" in name or "can't allocate memory" in str(cause):
            return HeadPruneError(
                "Memory ran out.", "Use a smaller --batch-size, a smaller --max-length, or a machine with more of it."
            )
        cause = cause.__cause__ or cause.__context__
    return None
