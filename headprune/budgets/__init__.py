"""Budgets: what a user asks for, and the plan with the most heads that holds it. One class a kind, in a register.

torch is imported where plans are measured, not here: the command line makes its options from the register.
"""

from headprune.budgets import counted, measured  # noqa: F401  # these register their kinds
from headprune.budgets.base import BUDGETS, Budget, Fit, Reading, budget_of, kind_named

__all__ = ["BUDGETS", "Budget", "Fit", "Reading", "budget_of", "kind_named"]
