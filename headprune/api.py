"""`prune` and `repair` as users call them: the model that they changed saves itself by headprune from then on.

This is the one place that knows both how models are changed and how they are saved.
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
    """``change``, after which the ``save_pretrained`` of the model that it was given writes a folder that `load` reads."""

    @functools.wraps(change)
    def changed(*args: P.args, **kwargs: P.kwargs) -> R:
        result = change(*args, **kwargs)
        model: Any = args[0] if args else kwargs["model"]
        install_save_methods(model)
        return result

    return changed


prune = _saves_itself(surgery.prune)
repair = _saves_itself(repairing.repair)
