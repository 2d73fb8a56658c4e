"""How a saved folder loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.checkpoint import remote_code
from headprune.jsonio import read_json

SIDECAR = "headprune.json"


@dataclass(frozen=True)
class Loading:
    """How a folder that headprune saved loads.

    Attributes:
        through: The class of transformers that loads it, such as ``"AutoModelForCausalLM"``; "" where `headprune.load` alone does.
        remote: Whether ``trust_remote_code=True`` is needed: the stock class cannot state the model, or its class comes with it as code.
        why: Why it cannot; "" if it can, or if that is not known.
    """

    through: str
    remote: bool = False
    why: str = ""

    def call(self, folder: str = "folder") -> str:
        """The call, for people.

        >>> Loading("AutoModel", True).call()
        'AutoModel.from_pretrained(folder, trust_remote_code=True)'
        """
        function = f"{self.through}.from_pretrained" if self.through else "headprune.load"
        return f"{function}({folder}{', trust_remote_code=True' if self.remote else ''})"


def loading_of(folder: str | Path) -> Loading:
    """How a folder that `save` wrote loads.

    Raises:
        HeadPruneError: It is no such folder, or damaged.
    """
    import transformers

    path = Path(folder)
    why = str(read_json(path / SIDECAR, "checkpoint").get("why_not_stock", ""))
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        name = str(config["architectures"][0])
        maps = dict(config.get("auto_map", {}))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return Loading("")
    if "headprune" in config:
        own = f"{remote_code.FILE.removesuffix('.py')}.{name}"
        auto = _usual((auto for auto, cls in maps.items() if cls == own), name)
        return Loading(auto, bool(auto), why)
    cls: Any = getattr(transformers, name, None)
    if getattr(cls, "config_class", None) is None:  # the name is from a file
        return Loading("", own_class(config, name) is not None)
    return Loading(_usual((auto for auto, own in remote_code.auto_classes(cls).items() if own == name), name) or name)


def own_class(config: Mapping[str, Any], name: str) -> str | None:
    """Where the code of a class is that came with a model, as ``auto_map`` in its config says: ``"modeling_mine.MyModel"``; None if
    the config names none of this name."""
    maps = config.get("auto_map")
    references = maps.values() if isinstance(maps, dict) else ()
    return next((r for r in references if isinstance(r, str) and r.rpartition(".")[2] == name), None)


def _usual(autos: Iterable[str], name: str) -> str:
    """The auto class by which people load a model, of those that serve its class of this ``name``; "" for none.

    Encoder-decoders that were trained to fill masks (BART) are served by that auto class too, and loaded to write text.
    """
    others = {"AutoModelForPreTraining", *(() if name.endswith("MaskedLM") else ("AutoModelForMaskedLM",))}
    return min(
        autos,
        key=lambda auto: (auto in others, auto == "AutoModelForPreTraining", auto != "AutoModel", auto),
        default="",
    )
