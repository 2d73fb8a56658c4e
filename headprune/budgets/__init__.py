"""Budgets: what a user asks for, and the plan with the most heads that holds it. One class a kind, in a register.

torch is imported where plans are measured, not here: the command line makes its options from the register.
"""

# These register their kinds; `headprune prune --help` lists them in this order.
from headprune.budgets import keep, latency, counted, kv_cache, drop  # isort: skip  # noqa: F401
from headprune.budgets.base import BUDGETS, Budget, Fit, Reading, budget_of, kind_named

__all__ = ["BUDGETS", "Budget", "Fit", "Reading", "budget_of", "kind_named"]
