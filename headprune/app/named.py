"""What a user names as a model, looked at before anything is loaded or asked for."""

from __future__ import annotations

from pathlib import Path

from headprune.errors import HeadPruneError, check_text
from headprune.files import recover_folder


def check_source(source: str) -> None:
    """Refuse what cannot be a model, before anything is loaded.

    Raises:
        HeadPruneError: No such folder, and no name that a model on the Hub can have; or a file.
    """
    if not source.strip():
        raise HeadPruneError("No model was named.", "Pass a Hub id, a local folder, or a folder headprune saved.")
    check_text(Path(source))
    try:
        recover_folder(Path(source))
        if Path(source).is_file():
            raise HeadPruneError(f"{source} is a file.", "Pass the folder that it lies in, or a Hub id.")
        local = Path(source).is_dir()
    except OSError as error:
        raise HeadPruneError(f"There is no model {source!r} ({error.strerror}).", "Check the spelling.") from None
    if not local and not _may_be_on_hub(split_revision(source)[0]):
        raise HeadPruneError(
            f"There is no model {source!r:.200}: no such folder, and on the Hugging Face Hub no model can have this name.",
            "Check the path.",
        )


def split_revision(source: str) -> tuple[str, str | None]:
    """A model's id and its revision, of ``ID@REVISION``; a folder has none."""
    if Path(source).exists() or "@" not in source:
        return source, None
    name, _, revision = source.rpartition("@")
    return name, revision


def _may_be_on_hub(source: str) -> bool:
    """Whether a model on the Hub can have a name: no path can that begins with a dot or a slash, or has several folders."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True
