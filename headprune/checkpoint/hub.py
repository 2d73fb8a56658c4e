"""Folders uploaded to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headprune.checkpoint.card import CARD, replaceable
from headprune.errors import HeadPruneError, first_line


def upload(
    folder: Path, repo: str, *, private: bool | None = None, token: str | bool | None = None, **commit: Any
) -> str:
    """Upload a folder's files in one commit, making the repository if there is none; a card that people wrote there stays.

    Args:
        folder: A folder that headprune saved.
        repo: ``"user/name"``; a name alone is one of the user's own.
        private: Whether a new repository is private; by default as the user's settings say.
        token: By default the one of ``hf auth login`` or ``HF_TOKEN``.
        commit: More for `huggingface_hub.HfApi.upload_folder`, such as ``commit_message``, ``revision`` and ``create_pr``.

    Returns:
        The commit's address.

    Raises:
        HeadPruneError: The Hub cannot be reached or refuses: offline, no token, no right to write, no such name.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        theirs = _card_there(api, repo, commit.get("revision"))
        ignored = [".*", *([] if replaceable(theirs) else [CARD])]
        done = api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=ignored, **commit)
    except Exception as error:
        raise _explained(repo, error) from error
    return str(done.pr_url or done.commit_url)


def uploaded(folder: Path) -> list[Path]:
    """The files that `upload` sends."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _card_there(api: Any, repo: str, revision: str | None) -> bytes | None:
    """The card that a repository holds."""
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        return Path(api.hf_hub_download(repo, CARD, revision=revision)).read_bytes()
    except (EntryNotFoundError, RevisionNotFoundError):
        return None


def _explained(repo: str, error: Exception) -> HeadPruneError:
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        why, hint = "HF_HUB_OFFLINE is set", "Unset it, and push again."
    elif isinstance(error, LocalTokenNotFoundError) or status == 401:
        why, hint = "you are not logged in", "Run `hf auth login`, or set HF_TOKEN to a token that may write."
    elif status == 403:
        why, hint = "your token may not write there", "Use a token that may write, or a repository of your own."
    elif isinstance(error, HFValidationError):
        why, hint = f"this is no name of a repository ({first_line(error)})", "Use user/name."
    else:
        why, hint = first_line(error), "Check the name and the network, and push again: what was uploaded is kept."
    return HeadPruneError(f"{repo} could not be pushed to: {why}.", hint)
