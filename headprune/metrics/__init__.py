"""Metrics of a model's answers by name, each with its value and its value without each example."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from headprune.errors import HeadPruneError
from headprune.metrics import labels, texts
from headprune.metrics.base import LABELS, NUMBERS, SEVERAL, TAGS, TEXTS, Answers, Jackknife, Metric

__all__ = [
    "LABELS",
    "LOSSES",
    "NUMBERS",
    "SEVERAL",
    "TAGS",
    "TEXTS",
    "Answers",
    "Jackknife",
    "Metric",
    "metric_named",
    "metric_of",
]


def _of_losses(answers: Answers) -> float:
    raise TypeError("headprune.evaluation computes it from losses")


LOSSES = {
    metric.name: metric
    for metric in (
        Metric("accuracy", (), _of_losses),
        Metric("perplexity", (), _of_losses, higher=False, width=0.0, percent=False, relative=True),
        Metric("loss", (), _of_losses, higher=False, width=0.0, percent=False),
    )
}
"""Means over labels, which `headprune.evaluate` computes from losses and correct labels; the first that a model has is its own."""

METRICS = LOSSES | {metric.name: metric for metric in (*labels.METRICS, *texts.METRICS)}


def metric_named(name: str) -> Metric:
    """A metric by its name: one of `METRICS`, or a scorer of scikit-learn.

    Raises:
        HeadPruneError: There is none of this name.
    """
    found = METRICS.get(name) or labels.scorer(name)
    if found is None:
        from sklearn.metrics import get_scorer_names

        close = get_close_matches(name.lower(), get_scorer_names(), n=8, cutoff=0.4) or ["f1_macro", "roc_auc"]
        hint = f"Choose from {', '.join(METRICS)}, or a scorer of scikit-learn, such as {', '.join(close)}."
        raise HeadPruneError(f"There is no metric {name!r:.60}.", hint)
    return found


def metric_of(given: str | Metric | Callable[[Any, Any], float]) -> Metric:
    """A metric from its name, or from a function of (predictions, references), of which higher values are better.

    Raises:
        HeadPruneError: There is none of this name.
    """
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        return metric_named(given)

    def score(answers: Answers) -> float:
        return given(answers.predictions, answers.references)

    name = getattr(given, "__name__", type(given).__name__)
    return Metric(name, (), score, width=0.0, lowest=float("-inf"), percent=False)
