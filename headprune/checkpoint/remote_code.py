"""Which call loads a folder, and the code with which transformers loads a pruned folder where headprune is not installed.

``config.json`` names that code's classes in ``auto_map``, and ``AutoModel….from_pretrained(folder, trust_remote_code=True)`` builds
them. Each subclasses the stock class and changes the modules after they are built (`headprune.pruned.restructure`).
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from torch import nn

from headprune.errors import HeadPruneError
from headprune.files import read_json

SIDECAR = "headprune.json"
MODULE = "modeling_headprune"
FILE = f"{MODULE}.py"
_STOCK = "transformers.models."
_SOURCES = ("modules", "hooks", "structure")  # of headprune.pruned, in the order in which they import each other


@dataclass(frozen=True)
class LoadCall:
    """The call that loads a folder that headprune saved.

    Attributes:
        auto_class: The transformers class that loads it, such as ``"AutoModelForCausalLM"``; "" if only `headprune.load` does.
        remote: Whether it needs ``trust_remote_code=True``: the stock class cannot represent the model, or the model has its own code.
        why: Why the stock class cannot represent the model; "" if it can, or if the reason is not known.
    """

    auto_class: str
    remote: bool = False
    why: str = ""

    def code(self, folder: str = "folder") -> str:
        """The call as Python code.

        >>> LoadCall("AutoModel", True).code()
        'AutoModel.from_pretrained(folder, trust_remote_code=True)'
        """
        function = f"{self.auto_class}.from_pretrained" if self.auto_class else "headprune.load"
        return f"{function}({folder}{', trust_remote_code=True' if self.remote else ''})"


def load_call(folder: str | Path) -> LoadCall:
    """The call that loads a folder that `save` wrote.

    Raises:
        HeadPruneError: `save` did not write this folder, or it is damaged.
    """
    import transformers

    path = Path(folder)
    sidecar, config = read_json(path / SIDECAR, "checkpoint"), read_config(path)
    try:
        name, maps = str(config["architectures"][0]), dict(config.get("auto_map", {}))
    except (ValueError, LookupError, TypeError):
        return LoadCall("")
    if "headprune" in config:
        auto = _usual((auto for auto, cls in maps.items() if cls == f"{MODULE}.{name}"), name)
        return LoadCall(auto, bool(auto), str(sidecar.get("why_not_stock", "")))
    cls: Any = getattr(transformers, name, None)
    custom = not str(sidecar.get("class")).startswith(_STOCK)  # which may have the name of a stock class
    if custom or getattr(cls, "config_class", None) is None:  # the name is from a file
        return LoadCall("", own_class(config, name) is not None)
    return LoadCall(_usual((auto for auto, own in auto_classes(cls).items() if own == name), name) or name)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json; empty if it is missing or unreadable."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def own_class(config: Mapping[str, Any], name: str) -> str | None:
    """The reference to a custom class's code in ``auto_map`` of a config, such as ``"modeling_mine.MyModel"``; None if the config
    names no class of this name."""
    maps = config.get("auto_map")
    references = maps.values() if isinstance(maps, dict) else ()
    return next((r for r in references if isinstance(r, str) and r.rpartition(".")[2] == name), None)


def copy_code(cls: type, folder: Path, config: Any) -> None:
    """Copy the code of a custom class that the config names in ``auto_map``, and name that copy there."""
    from transformers.dynamic_module_utils import custom_object_save

    maps = getattr(config, "auto_map", None) or {}
    if own := own_class({"auto_map": maps}, cls.__name__):
        here = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"  # the code may have come from a repository
        config.auto_map = {auto: here if reference == own else reference for auto, reference in maps.items()}
        custom_object_save(cls, folder)


def auto_classes(cls: type) -> dict[str, str]:
    """The auto classes that can load a model class, each with the class that it builds: the model's own or its base model's."""
    from transformers.models.auto import modeling_auto

    kind = cls.config_class.model_type  # type: ignore[attr-defined]
    classes = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        named = getattr(mapping, "_model_mapping", {}).get(kind) if isinstance(auto, type) else None
        options = (named,) if isinstance(named, str) else tuple(named or ())
        if cls.__name__ in options:
            classes[name] = cls.__name__
        elif name == "AutoModel" and options and hasattr(sys.modules[cls.__module__], options[0]):
            classes[name] = options[0]
    return classes


def code_for(cls: type, version: str) -> str:
    """The text of modeling_headprune.py for a transformers class."""
    autos = auto_classes(cls)
    package, _, module = cls.__module__.rpartition(".")
    text: str = template(f"{FILE}.j2").render(
        version=version, package=package, module=module, copied=_copied(), names=dict.fromkeys((cls.__name__, *autos.values())),
        auto=next((auto for auto, name in autos.items() if name == cls.__name__), "AutoModel"),
    )  # fmt: skip
    return text


class NotStockError(HeadPruneError):
    """The stock class cannot represent the pruned model; the text says why."""


def dense_class(model: nn.Module) -> type:
    """The class of a model; for a class from modeling_headprune.py, the transformers class that it extends. Other custom classes are
    returned as they are, since a class that extends one of transformers may give other answers."""
    cls = type(model)
    if not cls.__module__.endswith(f".{MODULE}"):
        return cls
    return next((c for c in cls.__mro__ if is_stock(c)), cls)


def is_stock(cls: type) -> bool:
    """Whether a class is one of transformers' models."""
    return cls.__module__.startswith(_STOCK)


def plain_config(model: nn.Module) -> Any:
    """A copy of a model's config without the entries that headprune added."""
    config = copy.deepcopy(model.config)
    for name in ("headprune", "auto_map"):
        vars(config).pop(name, None)
    return config


def configs_in(config: Any) -> list[Any]:
    """A config and its sub-configs, at all depths."""
    below = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return [config, *(c for sub in below if sub is not None for c in configs_in(sub))]


@cache
def template(name: str, **filters: Callable[[Any], str]) -> Any:
    """Load a Jinja template of this package."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headprune.checkpoint", "."), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(filters)
    return environment.get_template(name)


@cache
def _copied() -> str:
    """The source of headprune.pruned's files as one text, without docstrings of modules and imports from headprune."""
    texts = []
    for name in _SOURCES:
        text = resources.files("headprune.pruned").joinpath(f"{name}.py").read_text(encoding="utf-8")
        text = re.sub(r'\A""".*?"""\n', "", text, flags=re.S)
        text = re.sub(r"^from (headprune|__future__)[^\n(]*(\([^)]*\)|[^\n]*)\n", "", text, flags=re.M)
        texts.append(text.strip())
    return "\n\n\n".join(texts)


def _usual(autos: Iterable[str], name: str) -> str:
    """The usual one of the auto classes that load the class ``name``; "" if there are none.

    Encoder-decoders that were trained to fill masks (BART) also have AutoModelForMaskedLM, but people load them to generate text.
    """
    others = {"AutoModelForPreTraining", *(() if name.endswith("MaskedLM") else ("AutoModelForMaskedLM",))}
    return min(autos, key=lambda a: (a in others, a == "AutoModelForPreTraining", a != "AutoModel", a), default="")
