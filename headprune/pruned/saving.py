"""A model that is no longer as its class makes it saves itself by headprune, whoever calls its ``save_pretrained``."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from headprune.pruned.structure import home


def save_by_headprune(model: nn.Module) -> None:
    """Replace ``save_pretrained`` and ``push_to_hub`` of this one model; nothing for a model that has none.

    The standard one writes a folder that loads with random weights where a layer lost all its heads, and without biases that
    a repair added. Trainer and others call it.
    """
    inner, _ = home(model)  # PEFT's wrapper goes on saving its adapters
    if hasattr(type(inner), "save_pretrained"):
        vars(inner)["save_pretrained"] = partial(_save_pretrained, inner)
    if hasattr(type(inner), "push_to_hub"):
        vars(inner)["push_to_hub"] = partial(_push_to_hub, inner)


def _save_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """`headprune.checkpoint.save_pretrained`, found when it is called: it builds on this package.

    A function of its own, so that copies of the model save themselves, and pickle finds it.
    """
    importlib.import_module("headprune.checkpoint").save_pretrained(model, *args, **kwargs)


def _push_to_hub(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """`headprune.checkpoint.push_to_hub`, likewise."""
    done: str = importlib.import_module("headprune.checkpoint").push_to_hub(model, *args, **kwargs)
    return done
