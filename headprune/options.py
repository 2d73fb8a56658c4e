"""Options of a search, as plain values that the command line, run folders and Python functions share. No torch is imported here.

A field that the command line shows says how in its type: ``Annotated[type, typer.Option(...)]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from headprune.budgets import Budget

MAX_SEED = 2**31 - 1  # NumPy takes no more than 2**32 - 1, and some draws add to it

_planning = partial(typer.Option, rich_help_panel="Planning")


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
        str, _planning("--strategy", "-s", help="How heads are chosen; `headprune methods` lists the strategies.")
    ] = "auto"
    protect: Annotated[str, _planning(help="Layers and heads that stay: L0,L3.H7.", show_default=False)] = ""
    min_heads_per_layer: Annotated[int, _planning(min=0, help="Query heads every layer keeps.", show_default=False)] = 0
    repair: bool = True
    effort: Annotated[
        str, _planning(help="Work the search may take: low, normal or high (counted, never timed; docs/planning.md).")
    ] = "normal"
    seed: int = 0
