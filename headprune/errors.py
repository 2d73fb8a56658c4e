"""headprune's errors: what is wrong, where, and what to try; and what registers need."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar

T = TypeVar("T")


class HeadPruneError(Exception):
    """Raised for a user's mistake or a limit of headprune.

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
    """A prune failed its proof; the model is unchanged."""


class ScoresError(HeadPruneError):
    """Existing scores do not fit the request."""


class UndefinedError(HeadPruneError):
    """A model's answers have no such value: its loss on an example is not finite, or a metric is not defined for them."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, or another signal to stop, such as from a batch system or container.

    Args:
        status: The command's exit status.
        hint: How to continue.
    """

    def __init__(self, status: int = 130, hint: str = "") -> None:
        super().__init__()
        self.status, self.hint = status, hint


def registered(register: Mapping[str, T], kind: str, name: str) -> T:
    """Look up an entry of a registry by name.

    Args:
        kind: What the entries are, for the message.

    Raises:
        HeadPruneError: No entry has this name.
    """
    if name not in register:
        raise HeadPruneError(f"There is no {kind} {name!r}.", f"Choose from {', '.join(register)}.")
    return register[name]


def import_files(package: str, paths: list[str]) -> None:
    """Import every file of a package, so that it is enough for a file to be there to register what is in it."""
    for file in iter_modules(paths):
        import_module(f"{package}.{file.name}")


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, without a full stop; the name of the error's class if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


def check_text(path: Path) -> None:
    """Refuse a path that is not valid UTF-8, which the libraries for weights and data do not accept.

    Raises:
        HeadPruneError: It is not.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        message = f"The name {str(path)!r} is not UTF-8, and the libraries that read and write weights and data take no other."
        raise HeadPruneError(message, "Rename the folder, or choose another.") from None


def check_link(path: Path) -> None:
    """Refuse an output path with a dangling symbolic link in it: it does not exist, but cannot be created either.

    Raises:
        HeadPruneError: There is such a link.
    """
    for place in (path, *path.absolute().parents):
        if place.is_symlink() and not place.exists():
            message = f"{place} is a link to {place.readlink()}, which is not there."
            raise HeadPruneError(message, "Make that folder, or choose another place with -o.")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written to, before the work starts whose results it will hold.

    Raises:
        HeadPruneError: It cannot.
    """
    import tempfile

    check_text(folder)
    check_link(folder)
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise HeadPruneError(f"{folder} cannot be written: {there} is a file.", "Choose a folder with -o.")
        # Test by writing: permissions do not tell, for instance, that root cannot write to a read-only disk.
        with tempfile.TemporaryDirectory(prefix=".headprune-", dir=there) as tried:
            Path(tried, folder.name or "x").mkdir()
    except OSError as error:
        raise HeadPruneError(f"{folder} cannot be written: {error.strerror}.", "Choose another with -o.") from None


_FULL = {errno.ENOSPC, errno.EDQUOT}
# Error texts of libraries that raise no OSError with a number: safetensors, NumPy's `tofile`, and `torch.save`.
_SAID = {
    errno.ENOSPC: "No space left on device|Disk quota exceeded|\\(os error (28|122)\\)|\\d+ requested and \\d+ written|"
    "inline_container.*unexpected pos",
    errno.EFBIG: "File too large|\\(os error 27\\)",
}


def _number_of(error: BaseException) -> int:
    """An error's `errno`, also from its text; 0 if it is no system error."""
    own = (isinstance(error, OSError) and error.errno) or 0
    return next((number for number, text in _SAID.items() if re.search(text, str(error))), own)


def explained(error: BaseException) -> HeadPruneError | None:
    """A HeadPruneError for a system error (full disk, no memory, missing permission), which any step may raise; otherwise None.

    Libraries wrap such errors, and safetensors raises one that is no OSError, so causes and texts are checked too.
    """
    for cause in causes(error):
        number, name = _number_of(cause), type(cause).__name__
        where = f" ({cause.filename})" if isinstance(cause, OSError) and cause.filename else ""
        if number == errno.EFBIG:
            message = f"A file would be larger than this process may write{where}."
            return HeadPruneError(message, "Raise the limit: `ulimit -f unlimited`.")
        if number in _FULL:
            return HeadPruneError(
                f"No space left on the disk{where}.",
                "Free some, or use another disk (-o for the results, TMPDIR and HF_HOME for the rest), then run the same command "
                "again: what score, prune or finetune had finished is kept.",
            )
        if isinstance(cause, OSError) and number and where:
            message = f"{cause.filename} cannot be read or written: {cause.strerror}."
            return HeadPruneError(message, "Check the path and its permissions.")
        if number == errno.ENOENT and not _has_folder():
            message = "The current folder is gone: it was removed, or made anew."
            return HeadPruneError(message, 'Go to one that is there (`cd "$PWD"`).')
        if isinstance(cause, MemoryError) or "OutOfMemory" in name or "can't allocate memory" in str(cause):
            hint = "Use a smaller --batch-size, a smaller --max-length, or a machine with more of it."
            return HeadPruneError("Memory ran out.", hint)
    return None


def _has_folder() -> bool:
    """Whether the current working directory still exists."""
    with suppress(FileNotFoundError):
        return bool(Path.cwd())
    return False


def is_of_the_disk(error: BaseException) -> bool:
    """Whether an error says that the disk is full, read-only or broken, so that nothing else can be written either."""
    return any(_number_of(cause) in _FULL | {errno.EFBIG, errno.EROFS, errno.EIO} for cause in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and the chain of its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
