"""What to type to get a pruned model as it was measured."""

from __future__ import annotations

from headprune.app.documents import BudgetResult, Metrics, Run
from headprune.app.report import numbers
from headprune.app.report.verdict import verdict
from headprune.checkpoint import code


def usage(run: Run, metrics: Metrics) -> str:
    """What to type to get a model as it was measured: with headprune, and with transformers alone."""
    found = verdict(metrics)
    budget, which = found.budget, "it" if found.recommended or len(metrics.budgets) == 1 else "one"
    widened = _widened(run, budget)
    own = f"import headprune; model = {loading(run, budget)}"
    if budget.runs_code:  # transformers alone would build the class from the model's own code, with all heads
        return f"To use {which}: {code(own)}."
    known = budget.loads if budget.loads and not budget.loads.startswith("headprune.") else ""
    other = known or "from_pretrained(folder, trust_remote_code=True)"
    other = f'{other.removesuffix(")")}, dtype="float32")' if widened else other
    return f"To use {which}: {code(own)}, or without headprune, with the same folder, transformers' {code(other)}."


def loading(run: Run, budget: BudgetResult) -> str:
    """The call that loads a budget's model as it was measured."""
    folder = f"{run.folder}/{budget.checkpoint}" if run.folder else budget.checkpoint
    trusting = ", trust_remote_code=True" if budget.runs_code else ""
    return f"headprune.load({numbers.quoted(folder)}{trusting}){'.float()' if _widened(run, budget) else ''}"


def _widened(run: Run, budget: BudgetResult) -> bool:
    """Whether a model is saved in half precision, but was measured in float32."""
    return bool(budget.dtype) and budget.dtype != run.model.dtype == "float32"
