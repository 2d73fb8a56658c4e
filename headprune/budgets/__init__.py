"""Budgets: what a user asks for, and the plan with the most heads that meets it. One registered class for each kind.

torch is imported where plans are measured, not here: the command line makes its options from the register.
"""

from headprune.budgets.base import BUDGETS, Budget, Fit, Reading, Subject, budget_of, kind_named
from headprune.errors import import_files

__all__ = ["BUDGETS", "Budget", "Fit", "Reading", "Subject", "budget_of", "kind_named"]

import_files(__name__, __path__)  # the kinds
