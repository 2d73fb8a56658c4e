"""What scoring methods are told, in Python and in one text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from headprune.errors import HeadPruneError


@dataclass(frozen=True)
class Settings:
    """Options of scoring methods. Each method reads those that concern it; None is the method's own default.

    On the command line they follow the method's name: ``-m ablation:examples=64`` (`method_and_settings`).

    Attributes:
        keep: How many heads are going to stay (a count, or a share such as ``"50%"``): near this cut adaptive methods look closest, and
            learned gates aim at it.
        examples: How many examples to ablate exactly, at most; gradients on all examples estimate the rest.
        seconds: The time to spend, approximately; ``time`` on the command line.
        max_memory: Bytes that a method may use beyond the model; by default half of the free memory.
        normalise: Divide each layer's scores by their L2 norm (Michel et al., section 4.1, after Molchanov et al. 2017).
        steps: Training steps of learned gates, or points of integration.
        permutations: The most permutations that Shapley values are sampled from.
        sparsity: Weight of the L0 penalty per head, where ``keep`` is not given.
    """

    keep: int | str | None = None
    examples: int | None = None
    seconds: float | None = None
    max_memory: int | None = None
    normalise: bool = False
    steps: int | None = None
    permutations: int | None = None
    sparsity: float | None = None

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            HeadPruneError: A number is too small or not finite.
        """
        from headprune.plans import keep_of

        if self.keep is not None:
            keep_of(self.keep)
        least = {"examples": 2, "max_memory": 1, "steps": 1, "permutations": 1, "sparsity": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise HeadPruneError(f"{name} is {value}.", f"Give {low} or more.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise HeadPruneError(f"The time to spend is {self.seconds} seconds.", "Give more than 0.")


_NAMES = {"time": "seconds", "memory": "max_memory"}


def method_and_settings(text: str, base: Settings | None = None) -> tuple[str, Settings]:
    """A scoring method's name and settings from one text, such as ``"shapley:permutations=64"`` or ``"ablation:examples=64,normalise"``.

    >>> method_and_settings("ablation:examples=64,time=60")[1].seconds
    60.0

    Args:
        base: Settings where the text says nothing.

    Raises:
        HeadPruneError: A setting that there is not, or a value that it cannot have.
    """
    name, _, rest = text.partition(":")
    given: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(Settings)}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        own = _NAMES.get(key.strip(), key.strip())
        if own not in kinds:
            known = ", ".join({v: k for k, v in _NAMES.items()}.get(kind, kind) for kind in kinds)
            raise HeadPruneError(f"There is no setting {key.strip()!r} of {name}.", f"Choose from {known}.")
        given[own] = _setting(text, own, value.strip(), kinds[own])
    settings = replace(base or Settings(), **given)
    settings.check()
    return name.strip(), settings


def _setting(text: str, name: str, value: str, kind: str) -> Any:
    try:
        if name == "normalise":
            return {"": True, "true": True, "false": False}[value.lower()]
        if name == "max_memory":
            return bytes_of(value)
        if name == "keep":
            return int(value) if value.isdigit() else value
        return float(value) if "float" in kind else int(value)
    except (KeyError, ValueError, OverflowError):
        example = {"normalise": "normalise", "max_memory": "memory=4GB", "seconds": "time=60"}.get(name, f"{name}=64")
        raise HeadPruneError(
            f"{value!r} is no value for {name} in {text!r}.", f"Write it as {text.partition(':')[0]}:{example}."
        ) from None


def bytes_of(text: str) -> int:
    """An amount of memory, such as ``"4GB"``, in bytes.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    size = int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is no amount of memory")
    return size
