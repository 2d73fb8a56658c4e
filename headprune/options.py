"""Options of a search, as plain values that the command line, run folders and Python functions share. No torch is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from headprune.budgets import Budget

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
class SearchOptions:
    """What plans are searched for.

    Attributes:
        budgets: What every plan must meet, a plan each.
        strategy: A name of `headprune.planning.STRATEGIES`.
        protect: What must stay, such as ``"L0,L3.H7"``.
        min_heads_per_layer: Query heads that every layer keeps.
        repair: Whether the heads that stay will be refitted to what the removed ones gave.
        effort: How much work it may be, a name of `headprune.planning.strategies.EFFORTS`.
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
