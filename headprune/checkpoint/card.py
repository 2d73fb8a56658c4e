"""The model card of a folder: README.md, with the metadata that the Hugging Face Hub reads at its top.

Everything in it is read off the folder itself, so that it can be written again when more is known (`add_figures`). What the card of
the model that it was made from says of license, languages and data is kept, and that card is copied beside as README-source.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headprune.amounts import in_line
from headprune.checkpoint import remote_code
from headprune.checkpoint.loading import SIDECAR, Loading, loading_of
from headprune.errors import HeadPruneError
from headprune.jsonio import read_json, write_bytes, write_text

CARD, SOURCE_CARD = "README.md", "README-source.md"

# What of a card's metadata still holds of a smaller model. Results that the larger one was measured to have do not.
_KEPT = ("license", "license_name", "license_link", "language", "datasets", "base_model", "base_model_relation")
_APART: dict[str, Any] = {"about": None, "files": None}  # what a folder's document says that is not of its model
_MARK = "\n<!-- Written by headprune ({}), which does not replace it once it was changed. -->\n"


@dataclass(frozen=True)
class Origin:
    """The model that a model was loaded from, looked at before anything is written: perhaps into the same folder.

    Attributes:
        card: Its card; None where there is none.
        source_card: What lies beside that, of the model that it was made from itself.
        sidecar: What headprune noted of it; None if it is no folder of ours.
        loads: How it loads.
        hub: Its name on the Hub, if it came from there.
    """

    card: bytes | None = None
    source_card: bytes | None = None
    sidecar: Mapping[str, Any] | None = None
    loads: Loading | None = None
    hub: str | None = None

    @classmethod
    def of(cls, model: Any) -> Origin:
        """What a transformers model's config names; of the Hub's models what is on this machine."""
        source = str(getattr(getattr(model, "config", None), "_name_or_path", None) or "")
        if not source:
            return cls()
        if (folder := Path(source)).is_dir():
            with suppress(HeadPruneError):
                ours = read_json(folder / SIDECAR, "checkpoint")
                return cls(_bytes(folder / CARD), _bytes(folder / SOURCE_CARD), ours, loading_of(folder))
            return cls(_bytes(folder / CARD))
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # such as the path of a folder that is gone
            if isinstance(try_to_load_from_cache(source, "config.json"), str):
                card = try_to_load_from_cache(source, CARD)
                return cls(_bytes(Path(card)) if isinstance(card, str) else None, hub=source)
        return cls()


def write_card(folder: Path, origin: Origin) -> None:
    """Write the card of a folder that is complete but for it; one that somebody else wrote is left alone."""
    if not replaceable(_bytes(folder / CARD)):
        return
    sidecar, kept, source_card = read_json(folder / SIDECAR, "checkpoint"), _metadata(origin.card), origin.source_card
    if (
        origin.card is not None
        and origin.sidecar is not None
        and {**sidecar, **_APART} == {**origin.sidecar, **_APART}
        and loading_of(folder) == origin.loads
    ):  # the same model, so the card holds, with what was measured
        write_bytes(folder / CARD, origin.card)
    else:
        if origin.hub:
            kept = {**kept, "base_model": origin.hub, "base_model_relation": None}
        elif not replaceable(origin.card):
            source_card = origin.card
        _write(folder, sidecar, kept, "", bool(source_card))
    if source_card is not None:
        write_bytes(folder / SOURCE_CARD, source_card)


def metadata(folder: Path) -> dict[str, Any]:
    """What a folder's card says of its model to the Hub."""
    return _metadata(_bytes(folder / CARD))


def add_figures(folder: Path, figures: str, dataset: str | None = None) -> None:
    """Write the card of a folder that was just saved again, with what was measured (Markdown), and on which dataset of the Hub."""
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
    write_text(folder / CARD, _marked(content.rpartition(_MARK.partition("{}")[0])[0]) if ours else content)


def code(text: object) -> str:
    """A text as Markdown's code, which is never markup, also in a table; on one line."""
    plain = " ".join(in_line(str(text)).split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if plain[:1] in ("`", "") or plain.endswith("`") else ""
    return f"{fence}{pad}{plain}{pad}{fence}".replace("|", "\\|")


def _write(
    folder: Path, sidecar: Mapping[str, Any], kept: Mapping[str, Any], figures: str, has_source_card: bool
) -> None:
    from huggingface_hub import ModelCardData

    loads = loading_of(folder)
    structure, base = sidecar["structure"], kept.get("base_model")
    module, _, name = sidecar["class"].rpartition(".")
    layers = _layers(sidecar.get("heads", {}), sidecar["removed"])
    pruned = bool(layers or structure.get("modules"))
    tags = ["headprune", *["pruning"] * pruned, *["custom_code"] * loads.remote]
    data = {
        **{key: kept[key] for key in _KEPT if kept.get(key)},
        "library_name": "transformers" if loads.through else "headprune",
        "pipeline_tag": _pipeline_of(name),
        "tags": list(dict.fromkeys((*tags, *_other_tags(kept.get("tags"))))),
    }
    text = _template().render(
        name=name, version=sidecar["version"], pruned=pruned, repaired=sidecar.get("repaired"), layers=layers,
        total=sum(layer["heads"] for layer in layers), left=sum(layer["left"] for layer in layers),
        biases=structure.get("biases"), ghosts=structure.get("ghosts"), figures=figures.strip(), loads=loads,
        needs_instance=not module.startswith("transformers."), code_file=remote_code.FILE,
        base=base if isinstance(base, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base) else None,
        source_card=SOURCE_CARD if has_source_card else None,
    )  # fmt: skip
    content = f"---\n{ModelCardData(**data).to_yaml()}\n---\n\n{text}"
    write_text(folder / CARD, _marked(content))


def _layers(heads: Mapping[str, int], removed: Sequence[Mapping[str, Sequence[int]]]) -> list[dict[str, Any]]:
    """Of every layer how many heads went, how many are left, and how many there were: 0 where that was not noted."""
    gone: dict[str, int] = {}
    for name, dropped in ((name, dropped) for step in removed for name, dropped in step.items()):
        gone[name] = gone.get(name, 0) + len(dropped)
    if not any(gone.values()):
        return []
    if gone.keys() - heads.keys():  # of a folder of an older version
        return [{"index": None, "name": name, "gone": n, "heads": 0, "left": 0} for name, n in gone.items()]
    return [
        {"index": i, "name": name, "gone": gone.get(name, 0), "heads": n, "left": n - gone.get(name, 0)}
        for i, (name, n) in enumerate(heads.items())
    ]


def _pipeline_of(name: str) -> str | None:
    """The Hub's word for what a class of transformers does; None where that is nothing, or several things."""
    from transformers.modelcard import TASK_MAPPING

    def served(classes: Mapping[str, Any]) -> bool:
        return any(name in (found if isinstance(found, list | tuple) else (found,)) for found in classes.values())

    tasks = [task for task, classes in TASK_MAPPING.items() if served(classes)]
    return tasks[0] if len(tasks) == 1 else None


def _metadata(card: bytes | None) -> dict[str, Any]:
    """What a card says of its model to the Hub; nothing if it cannot be read, whatever people write there."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    found = REGEX_YAML_BLOCK.search((card or b"").decode("utf-8-sig", "replace"))
    with suppress(yaml.YAMLError, ValueError, RecursionError):  # a date of month 13 is a ValueError
        data = yaml.safe_load(found[2]) if found else None
        return data if isinstance(data, dict) else {}
    return {}


def _other_tags(tags: Any) -> list[str]:
    """Another card's tags, without those that say how it loads."""
    return [str(tag) for tag in _listed(tags) if tag not in ("headprune", "pruning", "custom_code")]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def replaceable(card: bytes | None) -> bool:
    """Whether there is no card, or one that nobody has changed since headprune wrote it."""
    if card is None:
        return True
    before, after = _MARK.split("{}")
    found = re.fullmatch(f"(.*){re.escape(before)}([0-9a-f]+){re.escape(after)}", card.decode("utf-8", "replace"), re.S)
    return found is not None and found[2] == _digest(found[1])


def _marked(content: str) -> str:
    return content + _MARK.format(_digest(content))


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@cache
def _template() -> Any:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("headprune.checkpoint", "."), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters["code"] = code
    return made.get_template("card.md.j2")
