"""Options of scoring and search, as plain values that the command line, run folders and Python functions share. No torch is imported here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from headprune.budgets import Budget
from headprune.errors import HeadPruneError

MAX_SEED = 2**31 - 1  # NumPy takes no more than 2**32 - 1, and some draws add to it
AUTO = "auto"


@dataclass(frozen=True)
class Flag:
    """How the command line shows a field of options, as the second part of ``Annotated[type, Flag(…)]``; a field without one it does not show.

    Attributes:
        help: In ``--help``.
        name: Such as ``"--time"``; by default the field's.
        short: A letter for it, such as ``"-L"``.
        least: The smallest number.
        metavar: What stands for the value.
        panel: The heading in ``--help``; by default the group's.
    """

    help: str
    name: str = ""
    short: str = ""
    least: float | None = None
    metavar: str | None = None
    panel: str | None = None


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
        least = {"keep": 1, "examples": 2, "max_memory": 1, "steps": 1, "permutations": 1, "sparsity": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, str) and not low <= value < math.inf:
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
    except (KeyError, ValueError):
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


@dataclass(frozen=True)
class SearchOptions:
    """What plans are searched for.

    Attributes:
        budgets: What every plan must meet, a plan each.
        strategy: A name of `headprune.planning.STRATEGIES`.
        protect: What must stay, such as ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        repair: Whether the heads that stay will be refitted to what the removed ones gave.
        effort: How much work it may be, a name of `headprune.planning.effort.EFFORTS`.
        seed: For what is drawn.
    """

    budgets: tuple[Budget, ...] = ()
    strategy: Annotated[
        str,
        Flag(
            "How the heads to remove are chosen; `headprune methods` lists the strategies.",
            short="-s",
            panel="Planning",
        ),
    ] = AUTO
    protect: Annotated[str | tuple[str, ...], Flag("Layers and heads that stay: L0,L3.H7.", panel="Planning")] = ""
    min_heads_per_layer: Annotated[int, Flag("Query heads that every layer keeps.", least=0, panel="Planning")] = 0
    repair: bool = True
    effort: Annotated[
        str,
        Flag(
            "How much work the search for heads may take: low, normal or high (counted, never timed; see docs/planning.md).",
            panel="Planning",
        ),
    ] = "normal"
    seed: int = 0
