"""Facts about a model's modules and config, to name what differs between two models."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Facts = dict[str, dict[str, str]]
"""Module -> attribute -> its value as text; the class's name under ``""``."""

# Entries that change no answer, or that a config does not decide.
_HARMLESS = re.compile(r"label|name_or_path|architectures|version|token_id|problem_type|output_|use_cache|task|dtype")
_REAL = re.compile(r"-?\d+\.\d*(e[-+]?\d+)?|-?\d+e[-+]?\d+")


def facts(model: nn.Module) -> Facts:
    """Every module's class and plain public attributes: numbers, names, functions."""
    found: Facts = {}
    for name, module in model.named_modules():
        own = {"": type(module).__name__}
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or attribute == "training" or "path" in attribute:
                continue  # a path is of one machine
            if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < 80):
                own[attribute] = repr(value)
            elif callable(value) and not isinstance(value, nn.Module):
                own[attribute] = f"{getattr(value, '__name__', type(value).__name__)}()"
        found[name] = own
    return found


def differences(saved: Facts, now: Facts, *, plain: bool = True) -> list[str]:
    """The differences, in words.

    Args:
        plain: Whether whole numbers, flags and names count too: some only record what a model was used for.
    """
    found = [f"{name or 'the model'} was saved and is not there" for name in saved if name not in now]
    for name, own in now.items():
        before = saved.get(name, {})
        for attribute, value in own.items():
            was = before.get(attribute, value)
            if was != value and (plain or not attribute or _REAL.fullmatch(was) or was.endswith("()")):
                where = ".".join(part for part in (name, attribute) if part) or "the model"
                found.append(f"{where} is {value}, saved {was}")
    return found


def compared_config(saved: Any, now: Any, where: str = "") -> list[str]:
    """Entries of config.json that differ from those that were saved, in words."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        return [
            text
            for key in dict.fromkeys((*saved, *now))
            for text in compared_config(saved.get(key), now.get(key), f"{where}.{key}" if where else key)
        ]
    return [] if saved == now else [f"{where} in config.json is {_short(now)}, saved {_short(saved)}"]


def telling(edited: list[str]) -> list[str]:
    """The edits of a config that could change answers."""
    return [text for text in edited if not _HARMLESS.search(text.split(" ", 1)[0])]


def versions() -> str:
    """The versions of the libraries that decide what a model computes."""
    transformers = sys.modules.get("transformers")
    return f"torch {torch.__version__}" + (f", transformers {transformers.__version__}" if transformers else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
