"""What a user asks of a search: its budgets, one registered class for each kind, and its options (`SearchOptions`).

A budget finds the plan with the most heads that meets it. torch is imported where plans are measured, not here: the
command line makes its options from the register, and from the fields of `SearchOptions` whose type has a ``typer.Option``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from headprune.budgets.base import BUDGETS, Budget, Fit, Reading, Subject, budget_of, kind_named
from headprune.errors import import_files

__all__ = ["BUDGETS", "Budget", "Fit", "Reading", "SearchOptions", "Subject", "budget_of", "kind_named"]

import_files(__name__, __path__)  # the kinds

_planning = partial(typer.Option, rich_help_panel="Planning")


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search for plans.

    Attributes:
        budgets: The budgets; each gets its own plan.
        strategy: A name in `headprune.planning.STRATEGIES`.
        protect: Layers and heads that must stay, such as ``"L0,L3.H7"``.
        min_heads_per_layer: Minimum number of query heads to keep in every layer.
        repair: Whether a repair will follow, which refits the kept heads to make up for the removed ones.
        effort: How much work the search may take: a name in `headprune.planning.strategies.EFFORTS`.
        seed: For random draws.
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
