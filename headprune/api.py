"""The public `prune` and `repair`: after them, the model's own ``save_pretrained`` and ``push_to_hub`` are headprune's.

Only this file depends on both changing models and saving them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from headprune import repairing, surgery
from headprune.checkpoint import install_save_methods

P = ParamSpec("P")
R = TypeVar("R")


def _saves_itself(change: Callable[P, R]) -> Callable[P, R]:
    """Decorator: after ``change(model, …)``, the model's ``save_pretrained`` writes a folder that `load` reads."""

    @functools.wraps(change)
    def changed(*args: P.args, **kwargs: P.kwargs) -> R:
        result = change(*args, **kwargs)
        model: Any = args[0] if args else kwargs["model"]
        install_save_methods(model)
        return result

    return changed


prune = _saves_itself(surgery.prune)
repair = _saves_itself(repairing.repair)
