"""A folder's model card (README.md, with metadata for the Hugging Face Hub at its top), and the upload to the Hub.

A card is written from the folder's content alone, so that it can be rewritten with more figures later (`add_figures`). It keeps the
license, languages and datasets from the source model's card, and that card is copied beside it as README-source.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune import amounts
from headprune.amounts import in_line
from headprune.checkpoint.remote_code import FILE, SIDECAR, load_call, template
from headprune.errors import HeadPruneError, first_line
from headprune.files import digest, read_json, write_file

CARD, SOURCE_CARD = "README.md", "README-source.md"

# Metadata of the source model's card that also holds for the pruned model. Its measured results do not.
_KEPT = ("license", "license_name", "license_link", "language", "datasets", "base_model", "base_model_relation")
_NOT_OF_THE_MODEL: dict[str, Any] = {"about": None, "files": None}  # in a folder's headprune.json
_MARK = "\n<!-- Written by headprune ({}), which does not replace it once it was changed. -->\n"


@dataclass(frozen=True)
class Origin:
    """The folder or repository that a model was loaded from. It is read before anything is written, perhaps into the same folder.

    Attributes:
        card: Its model card; None if it has none.
        source_card: Its README-source.md, the card of the model that it was itself made from.
        sidecar: Its headprune.json; None if headprune did not save it.
        hub: Its repository name, if it came from the Hub.
    """

    card: bytes | None = None
    source_card: bytes | None = None
    sidecar: Mapping[str, Any] | None = None
    hub: str | None = None


def origin_of(model: Any) -> Origin:
    """The `Origin` that a transformers model's config names; reads the Hub's files from the local cache only."""
    source = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
    if source and (folder := Path(source)).is_dir():
        with suppress(HeadPruneError):
            sidecar = read_json(folder / SIDECAR, "checkpoint")
            return Origin(_bytes(folder / CARD), _bytes(folder / SOURCE_CARD), sidecar)
        return Origin(_bytes(folder / CARD))
    if source:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # such as the path of a folder that is gone
            if isinstance(try_to_load_from_cache(source, "config.json"), str):
                card = try_to_load_from_cache(source, CARD)
                return Origin(_bytes(Path(card)) if isinstance(card, str) else None, hub=source)
    return Origin()


def write_card(folder: Path, origin: Origin) -> None:
    """Write the card of an otherwise complete folder, unless the folder has a card that somebody else wrote or changed."""
    if not replaceable(_bytes(folder / CARD)):
        return
    sidecar, kept, source_card = read_json(folder / SIDECAR, "checkpoint"), _metadata(origin.card), origin.source_card
    same = origin.sidecar is not None and {**sidecar, **_NOT_OF_THE_MODEL} == {**origin.sidecar, **_NOT_OF_THE_MODEL}
    if origin.card is not None and same:  # the same model: its card still holds, figures included
        write_file(folder / CARD, origin.card)
    else:
        if origin.hub:
            kept = {**kept, "base_model": origin.hub, "base_model_relation": None}
        elif not replaceable(origin.card):
            source_card = origin.card
        _write(folder, sidecar, kept, "", bool(source_card))
    if source_card is not None:
        write_file(folder / SOURCE_CARD, source_card)


def metadata(folder: Path) -> dict[str, Any]:
    """The metadata in a folder's model card."""
    return _metadata(_bytes(folder / CARD))


def add_figures(folder: Path, figures: str, dataset: str | None = None) -> None:
    """Rewrite a folder's card with measured figures (Markdown), and the Hub's name of the dataset that they come from."""
    sidecar, kept = read_json(folder / SIDECAR, "checkpoint"), metadata(folder)
    if dataset:
        kept["datasets"] = list(dict.fromkeys([*_listed(kept.get("datasets")), dataset]))
    _write(folder, sidecar, kept, figures, (folder / SOURCE_CARD).is_file())


def add_tags(folder: Path, tags: Sequence[str]) -> None:
    """Add tags to a folder's card."""
    from huggingface_hub import ModelCard

    ours = replaceable(_bytes(folder / CARD))
    card = ModelCard.load(folder / CARD)
    card.data.tags = list(dict.fromkeys((*(card.data.tags or []), *tags)))
    content = str(card)
    write_file(folder / CARD, _append_mark(content.rpartition(_MARK.partition("{}")[0])[0]) if ours else content)


def code(text: object) -> str:
    """A text as inline Markdown code on one line, escaped for tables too."""
    return amounts.code(" ".join(in_line(str(text)).split())).replace("|", "\\|")


def replaceable(card: bytes | None) -> bool:
    """Whether a card may be overwritten: there is none, or headprune wrote it and nobody changed it since."""
    if card is None:
        return True
    before, after = _MARK.split("{}")
    match = re.fullmatch(f"(.*){re.escape(before)}([0-9a-f]+){re.escape(after)}", card.decode("utf-8", "replace"), re.S)
    return match is not None and match[2] == digest(match[1])


def upload(
    folder: Path, repo: str, *, private: bool | None = None, token: str | bool | None = None, **commit: Any
) -> str:
    """Upload a folder's files in one commit; creates the repository if needed, and keeps a card that people wrote there.

    Args:
        folder: A folder that headprune saved.
        repo: ``"user/name"``; a bare name is a repository of the user's own.
        private: Whether a new repository is private; by default as the user's settings say.
        token: By default the token of ``hf auth login`` or ``HF_TOKEN``.
        commit: Further arguments of `huggingface_hub.HfApi.upload_folder`: ``commit_message``, ``revision``, ``create_pr`` …

    Returns:
        The URL of the commit or pull request.

    Raises:
        HeadPruneError: The Hub cannot be reached or refuses: offline, no token, no right to write, no such name.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    api, card = HfApi(token=token), None
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        with suppress(EntryNotFoundError, RevisionNotFoundError):
            card = Path(api.hf_hub_download(repo, CARD, revision=commit.get("revision"))).read_bytes()
        ignored = [".*", *([] if replaceable(card) else [CARD])]
        result = api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=ignored, **commit)
    except Exception as error:
        why, hint = _refusal(error)
        raise HeadPruneError(f"{repo} could not be pushed to: {why}.", hint) from error
    return str(result.pr_url or result.commit_url)


def files_to_upload(folder: Path) -> list[Path]:
    """The files that `upload` sends."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def _refusal(error: Exception) -> tuple[str, str]:
    """Why an upload failed, and a hint."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", "Unset it, and push again."
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "you are not logged in", "Run `hf auth login`, or set HF_TOKEN to a token that may write."
    if status == 403:
        return "your token may not write there", "Use a token that may write, or a repository of your own."
    if isinstance(error, HFValidationError):
        return f"this is no name of a repository ({first_line(error)})", "Use user/name."
    return first_line(error), "Check the name and the network, and push again: what was uploaded is kept."


def _write(
    folder: Path, sidecar: Mapping[str, Any], kept: Mapping[str, Any], figures: str, has_source_card: bool
) -> None:
    from huggingface_hub import ModelCardData

    call, base, structure = load_call(folder), kept.get("base_model"), sidecar["structure"]
    module, _, name = sidecar["class"].rpartition(".")
    layers = _layers(sidecar.get("heads", {}), sidecar["removed"])
    # A repair may add biases to a model that has lost no head.
    entries, added = structure.get("modules", {}).items(), structure.get("biases", ())
    repaired = all(n in added and [*entry] == ["tensors"] and [*entry["tensors"]] == ["bias"] for n, entry in entries)
    pruned = bool(layers) or not repaired
    tags = ["headprune", *["pruning"] * pruned, *["custom_code"] * call.remote]
    others = [str(tag) for tag in _listed(kept.get("tags")) if tag not in ("headprune", "pruning", "custom_code")]
    data = {
        **{key: kept[key] for key in _KEPT if kept.get(key)},
        "library_name": "transformers" if call.auto_class else "headprune",
        "pipeline_tag": _pipeline_of(name),
        "tags": list(dict.fromkeys((*tags, *others))),
    }
    text = template("card.md.j2", code=code).render(
        name=name, version=sidecar["version"], pruned=pruned, repaired=sidecar.get("repaired"), layers=layers,
        total=sum(layer["heads"] for layer in layers), left=sum(layer["left"] for layer in layers),
        biases=structure.get("biases"), ghosts=structure.get("ghosts"), figures=figures.strip(), call=call,
        needs_instance=not module.startswith("transformers."), code_file=FILE,
        base=base if isinstance(base, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) else None,
        source_card=SOURCE_CARD if has_source_card else None,
    )  # fmt: skip
    write_file(folder / CARD, _append_mark(f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}"))


def _layers(heads: Mapping[str, int], removed: Sequence[Mapping[str, Sequence[int]]]) -> list[dict[str, Any]]:
    """Every layer's numbers of removed, kept and dense heads; ``heads`` is 0 if the dense number is not known."""
    gone: Counter[str] = Counter()
    for step in removed:
        gone.update({name: len(heads_gone) for name, heads_gone in step.items()})
    if not any(gone.values()):
        return []
    known = heads if gone.keys() <= heads.keys() else {}  # folders of older versions have no head counts
    rows = [(i if known else None, name, known.get(name, 0)) for i, name in enumerate(known or gone)]
    return [{"index": i, "name": name, "gone": gone[name], "heads": n, "left": n - gone[name]} for i, name, n in rows]


def _pipeline_of(name: str) -> str | None:
    """The Hub's pipeline tag (task) of a transformers class; None if it has none or several."""
    from transformers.modelcard import TASK_MAPPING

    several = [(task, each) for task, classes in TASK_MAPPING.items() for each in classes.values()]
    tasks = {task for task, each in several if name in (each if isinstance(each, list | tuple) else [each])}
    return tasks.pop() if len(tasks) == 1 else None


def _metadata(card: bytes | None) -> dict[str, Any]:
    """A card's metadata; empty if there is none or it is not valid YAML."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search((card or b"").decode("utf-8-sig", "replace"))
    with suppress(yaml.YAMLError, ValueError, RecursionError):  # a date of month 13 is a ValueError
        data = yaml.safe_load(match[2]) if match else None
        return data if isinstance(data, dict) else {}
    return {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _append_mark(content: str) -> str:
    return content + _MARK.format(digest(content))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
