"""Metrics of labels and numbers: every scorer of scikit-learn, correlations (SciPy), and entities (seqeval)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headprune.errors import HeadPruneError
from headprune.metrics.base import LABELS, NUMBERS, SEVERAL, TAGS, Answers, Metric, by_sums, library, ratio

_CORRELATIONS = ("matthews_corrcoef", "adjusted_rand_score", "adjusted_mutual_info_score")
_OF_NUMBERS = ("neg_mean_", "neg_root_", "r2", "explained_variance", "d2_absolute")
_EXPLAINS = ("r2", "explained_variance", "d2_")
_NO_PERCENT = ("neg_", *_EXPLAINS, *_CORRELATIONS, "mutual_info_score", "positive_likelihood_ratio")
_RANKS = ("roc_auc", "average_precision", "top_k", "neg_log_loss", "neg_brier", "d2_log_loss", "d2_brier")
_NOT_SMOOTH = (
    "max_error",
    "neg_max_error",
    "neg_median_absolute_error",
)  # the jackknife does not hold (Efron 1982, section 3.4)


def scorer(name: str) -> Metric | None:
    """A scorer of scikit-learn by its name; None if there is none. A loss is negative there, so higher is better."""
    from sklearn.metrics import get_scorer, get_scorer_names

    if name not in get_scorer_names():
        return None
    if name in _NOT_SMOOTH:
        message = f"{name} rests on single examples, so it has no interval."
        raise HeadPruneError(message, "Choose neg_mean_absolute_error, or neg_root_mean_squared_error.")
    forms = (NUMBERS,) if name.startswith(_OF_NUMBERS) else (LABELS, SEVERAL, TAGS)
    percent, scorer = not name.startswith(_NO_PERCENT), get_scorer(name)

    def score(answers: Answers) -> float:
        predictions, references = (
            np.concatenate([*values]) if answers.form == TAGS else np.asarray(values)
            for values in (answers.predictions, answers.references)
        )
        return float(scorer(_given(forms)(predictions, answers.probabilities), np.arange(len(references)), references))

    width = float(percent or name in _CORRELATIONS)
    lowest = 0.0 if percent else -1.0 if width else float("-inf")
    highest = 0.0 if name.startswith("neg_") else 1.0 if name.startswith(_EXPLAINS) else float("inf")
    chance = 0.0 if name.startswith((*_CORRELATIONS, *_EXPLAINS)) else 0.5 if name.startswith("roc_auc") else None
    ranks = name.startswith(_RANKS)
    return Metric(
        name, forms, score, width=width, lowest=lowest, highest=highest, percent=percent, chance=chance, ranks=ranks
    )


@cache
def _given(forms: tuple[str, ...]) -> Any:
    """A class of estimators that scorers can call, whose answers to "inputs" 0, 1, … are given."""
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

    class Given(RegressorMixin if forms == (NUMBERS,) else ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def __init__(self, predictions: np.ndarray, probabilities: np.ndarray | None) -> None:
            self.predictions, self.probabilities = predictions, probabilities
            self.classes_ = np.unique(predictions) if probabilities is None else np.arange(probabilities.shape[1])

        def fit(self, *_: Any) -> None:
            raise NotImplementedError

        def predict(self, rows: np.ndarray) -> np.ndarray:
            return self.predictions

        def predict_proba(self, rows: np.ndarray) -> np.ndarray:
            if self.probabilities is None:
                raise ValueError("it needs the classes' probabilities, which are not kept for every token")
            return self.probabilities

    return Given


def _correlation(kind: str) -> Metric:
    def score(answers: Answers) -> float:
        from scipy import stats

        pairs = [np.asarray(values, dtype=float) for values in (answers.predictions, answers.references)]
        if pairs[0].ndim > 1:
            raise ValueError("every example has several numbers")
        return float(getattr(stats, kind)(*pairs).statistic)

    return Metric(kind.removesuffix("r"), (NUMBERS,), score, lowest=-1.0, percent=False, chance=0.0)


def _entities(answers: Answers) -> np.ndarray:
    """``[examples, 2]``: twice the entities that are found, and those predicted and there, as seqeval reads tags; F1 is their ratio."""
    get_entities = library("seqeval.metrics.sequence_labeling", "seqeval", "seqeval").get_entities
    if not any(name[:2] in ("B-", "I-", "E-", "S-") for name in answers.classes):
        raise ValueError("the model's classes are not named as in B-PER, I-PER and O (id2label in its config.json)")

    def entities(tags: np.ndarray) -> set[Any]:
        return set(get_entities([answers.classes[tag] for tag in tags]))

    pairs = zip(map(entities, answers.predictions), map(entities, answers.references), strict=True)
    return np.array([[2 * len(found & there), len(found) + len(there)] for found, there in pairs], dtype=float)


METRICS = [
    _correlation("spearmanr"),
    _correlation("pearsonr"),
    Metric("seqeval", (TAGS,), chance=0.0, **by_sums(_entities, ratio)),
]
