"""The code that transformers runs to load a pruned folder where headprune is not installed.

``config.json`` names its classes in ``auto_map``; ``AutoModel….from_pretrained(folder, trust_remote_code=True)`` then builds
them. Each is the standard class, whose modules are changed after it was built (`headprune.pruned.restructure`).
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

FILE = "modeling_headprune.py"
_SOURCES = (
    "standins",
    "hooks",
    "empty",
    "structure",
)  # of headprune.pruned, in the order in which they import each other

_HEAD = '''"""Written by headprune {version}: loads a model whose attention heads were pruned, without headprune.

    from transformers import {auto}
    model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)

The classes at the end are transformers' own; after one is built, its modules are changed as config.json says under
"headprune". What comes before is a copy of the package headprune.pruned (Apache-2.0).
"""

from __future__ import annotations

'''
_CLASSES = '''

# -- the classes --------------------------------------------------------------------------------


class _Pruned:
    """A standard class with the pruned model's modules."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        restructure(self, config.headprune)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Buffers that no file holds are computed by transformers' own code, which it leaves out for modules of others."""
        return False

    def _init_weights(self, module: Any) -> None:
        """Only where something was not loaded: what takes the place of other modules may lack what the standard code fills."""
        tensors = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        if not all(getattr(t, "_is_hf_initialized", False) for t in tensors):
            super()._init_weights(module)
'''
_CLASS = """

class {name}(_Pruned, _dense.{name}):
    pass
"""


def auto_classes(cls: type) -> dict[str, str]:
    """The classes of transformers through which a model can be loaded: its own and its base model's, by auto class."""
    from transformers.models.auto import modeling_auto

    kind = cls.config_class.model_type  # type: ignore[attr-defined]
    found = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        named = getattr(mapping, "_model_mapping", {}).get(kind) if isinstance(auto, type) else None
        options = (named,) if isinstance(named, str) else tuple(named or ())
        if cls.__name__ in options:
            found[name] = cls.__name__
        elif name == "AutoModel" and options and hasattr(_module(cls), options[0]):
            found[name] = options[0]
    return found


def auto_map(cls: type) -> dict[str, str]:
    """``config.auto_map``: which class of the file serves which auto class."""
    return {auto: f"{FILE.removesuffix('.py')}.{name}" for auto, name in auto_classes(cls).items()}


def code_for(cls: type, version: str) -> str:
    """The file's text, for a class of transformers."""
    autos = auto_classes(cls)
    names = dict.fromkeys((cls.__name__, *autos.values()))
    package, _, module = cls.__module__.rpartition(".")
    auto = next((auto for auto, name in autos.items() if name == cls.__name__), "AutoModel")
    imports = f"from {package} import {module} as _dense\n"
    classes = "".join(_CLASS.format(name=name) for name in names)
    return _HEAD.format(version=version, auto=auto) + imports + _copied() + _CLASSES + classes


@cache
def _copied() -> str:
    """headprune.pruned's files as one, without what they import from each other."""
    texts = []
    for name in _SOURCES:
        text = resources.files("headprune.pruned").joinpath(f"{name}.py").read_text(encoding="utf-8")
        text = re.sub(r'\A""".*?"""\n', "", text, flags=re.S)
        text = re.sub(r"^from (headprune|__future__)[^\n(]*(\([^)]*\)|[^\n]*)\n", "", text, flags=re.M)
        texts.append(text.strip())
    return "\n\n" + "\n\n\n".join(texts) + "\n"


def _module(cls: type) -> Any:
    import sys

    return sys.modules[cls.__module__]
