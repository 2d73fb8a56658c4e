"""A metric of a model's answers: its value, and its value without each example.

Most metrics are no means over examples, so the error of a value is the jackknife's (Efron and Stein 1981, Ann. Stat.
9:586), from the values without one example at a time. It needs no draws, and holds for any smooth function of the
examples (docs/benchmarks.md, Intervals, has error rates and coverage).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from headprune.errors import HeadPruneError, UndefinedError, first_line

LABELS, SEVERAL, TAGS = "a label for each example", "several labels at once", "a label for each token"
NUMBERS, TEXTS = "numbers", "texts"
GROUPS = 400
"""The most groups that examples are left out in, where each value is computed anew."""


@dataclass(frozen=True)
class Answers:
    """A model's answers to examples, with the right ones.

    Attributes:
        form: `LABELS`, `SEVERAL`, `TAGS`, `NUMBERS` or `TEXTS`.
        predictions: For each example a class, an array of 0 and 1 by class, an array of classes by token, a number, or a text.
        references: The right answers, in the same form; for a text also a list of texts, any of which is right.
        probabilities: ``[examples, classes]``, for `LABELS` and `SEVERAL`.
        classes: The names of the classes, by number.
    """

    form: str
    predictions: Sequence[Any]
    references: Sequence[Any]
    probabilities: np.ndarray | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.predictions)

    def some(self, rows: Sequence[int]) -> Answers:
        """The answers to some of the examples."""
        predictions, references = ([values[i] for i in rows] for values in (self.predictions, self.references))
        probabilities = None if self.probabilities is None else self.probabilities[rows]
        return Answers(self.form, predictions, references, probabilities, self.classes)

    def constant(self) -> Answers:
        """Those of a model that gives every example the same answer: the most frequent label (of several at once, of each; of tokens, of all)
        with the labels' shares as probabilities, or the mean of numbers."""
        probabilities = None
        if self.form == TAGS:
            most = np.bincount(np.concatenate([*self.references])).argmax()
            return Answers(self.form, [np.full_like(own, most) for own in self.references], self.references)
        if self.form == LABELS:
            classes = 0 if self.probabilities is None else self.probabilities.shape[1]
            probabilities = np.bincount(self.references, minlength=classes) / len(self)
            answer: Any = int(probabilities.argmax())
        else:
            answer = np.mean(self.references, axis=0)
            if self.form == SEVERAL:
                probabilities, answer = answer, (answer > 0.5).astype(int)
        every = None if probabilities is None else np.tile(probabilities, (len(self), 1))
        return Answers(self.form, [answer] * len(self), self.references, every, self.classes)


@dataclass(frozen=True)
class Jackknife:
    """A metric's values without some examples, from which its error is computed.

    Attributes:
        without: ``[groups]``, each without a group of examples: a single one, or of more than `GROUPS` examples every 400th.
            NaN where the metric is not defined, such as without the only example of a class.
        higher, width, lowest, highest: As in `Metric`.
    """

    without: np.ndarray
    higher: bool
    width: float
    lowest: float
    highest: float

    @property
    def deviations(self) -> np.ndarray:
        """``[groups]``: how far each group moves the value, times the number of groups; their mean is 0.

        A group without which the metric is not defined counts like the one that moves it most. A single group moves nothing.
        """
        if np.isnan(self.without).all():
            return np.zeros(len(self.without))
        moves = (len(self.without) - 1) * (np.nanmean(self.without) - self.without)
        return np.asarray(np.where(np.isnan(moves), np.nanmax(np.abs(moves)), moves))


@dataclass(frozen=True)
class Metric:
    """A metric of a model's answers.

    Attributes:
        name: As ``--metric`` takes it.
        forms: The forms of the answers that it compares; () for any.
        score: Its value for some answers; may be NaN where it is not defined.
        higher: Whether a higher value is better.
        width: The distance from a useless to a perfect model: 1 or 100; 0 if there is no such scale.
        lowest, highest: The lowest and the highest value that it can have.
        percent: Whether it is shown in per cent, and its changes in points.
        relative: Whether its change is shown as a ratio minus 1.
        chance: Its value for a model that knows nothing; None if that depends on the data.
        ranks: Whether it uses probabilities, not only the predicted class.
        sums: ``[examples, k]``, if the metric is a function ``of`` their sums: then leaving one out costs little.
    """

    name: str
    forms: tuple[str, ...]
    score: Callable[[Answers], float]
    higher: bool = True
    width: float = 1.0
    lowest: float = 0.0
    percent: bool = True
    relative: bool = False
    chance: float | None = None
    ranks: bool = False
    highest: float = float("inf")
    sums: Callable[[Answers], np.ndarray] | None = None
    of: Callable[[np.ndarray], float] = float

    @property
    def takes_texts(self) -> bool:
        return TEXTS in self.forms or not self.forms

    def check(self, form: str) -> None:
        """Refuse a form of answers that this metric does not compare.

        Raises:
            HeadPruneError: It compares others.
        """
        if self.forms and form not in self.forms:
            message = f"{self.name} compares {' or '.join(self.forms)}, but this model's answers are {form or 'none of these'}."
            raise HeadPruneError(message, "Choose another metric (docs/metrics.md lists them by task).")

    def measure(self, answers: Answers) -> tuple[float, Jackknife]:
        """The value, and the values without some examples.

        Raises:
            HeadPruneError: The metric compares other answers, or is not defined for these.
        """
        self.check(answers.form)
        if answers.form == LABELS and len(only := {int(label) for label in answers.references}) == 1:
            raise self._undefined(len(answers), f"all have the label {only.pop()}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are not defined: they are NaN
            try:
                value, without = self._measure(answers)
            except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
                raise self._undefined(len(answers), first_line(error)) from error
        if not np.isfinite(value):
            raise self._undefined(len(answers), f"it is {value}")
        return value, self.jackknife(without)

    def guess(self, answers: Answers) -> float | None:
        """The value for a model that knows nothing: `chance`, or that of a constant answer (`Answers.constant`); None if that has none."""
        if self.chance is not None or answers.form not in (LABELS, SEVERAL, TAGS, NUMBERS):
            return self.chance
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = float(self.score(answers.constant()))
            except Exception:  # a metric may be anyone's function
                return None
        return value if np.isfinite(value) else None

    def jackknife(self, without: np.ndarray) -> Jackknife:
        """The metric's values without some examples, ``[groups]``, with its scale."""
        highest = self.width if self.higher and self.width else self.highest
        return Jackknife(without, self.higher, self.width, self.lowest, highest)

    def _measure(self, answers: Answers) -> tuple[float, np.ndarray]:
        if self.sums is not None:
            sums = self.sums(answers)
            total = sums.sum(axis=0)
            return self.of(total), np.array([self.of(total - own) for own in sums])
        count = len(answers)
        group_of = np.arange(count) % min(count, GROUPS)
        if answers.form == LABELS and not self.ranks and len(set(answers.references)) ** 2 <= GROUPS:
            # Without either of two equal answers the value is the same. The predictions have no say in this, as two
            # models' values without the same examples are compared.
            pairs = list(zip(answers.predictions, answers.references, strict=True))
            kinds = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
            first = [pairs.index(kind) for kind in kinds]
            values = [self._score_or_nan(answers.some([i for i in range(count) if i != one])) for one in first]
            return float(self.score(answers)), np.array([values[kinds[pair]] for pair in pairs])
        rest = (np.flatnonzero(group_of != group).tolist() for group in range(group_of.max() + 1))
        return float(self.score(answers)), np.array([self._score_or_nan(answers.some(rows)) for rows in rest])

    def _score_or_nan(self, answers: Answers) -> float:
        try:
            return float(self.score(answers)) if len(answers) else float("nan")
        except (ValueError, ZeroDivisionError):
            return float("nan")

    def _undefined(self, examples: int, why: str) -> UndefinedError:
        hint = "Report on other or more examples (--report-split, --report-limit), or choose another metric."
        if "multi" in why:  # scikit-learn names arguments of its functions
            hint = f"Choose one for several classes, such as {'roc_auc_ovr' if self.ranks else 'f1_macro'}."
        return UndefinedError(f"{self.name} is not defined on these {examples:,} examples: {why}.", hint)


def by_sums(sums: Callable[[Answers], np.ndarray], of: Callable[[np.ndarray], float]) -> dict[str, Any]:
    """The fields of a `Metric` that is a function of sums over examples."""
    return {"score": lambda answers: of(sums(answers).sum(axis=0)), "sums": sums, "of": of}


def ratio(sums: np.ndarray) -> float:
    """The first of two sums, divided by the second; NaN if that is 0."""
    return float(sums[0] / sums[1]) if sums[1] else float("nan")


def library(module: str, metric: str, package: str) -> Any:
    """A module that a metric needs, from a package that headprune does not.

    Raises:
        HeadPruneError: The package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        message = f"{metric} needs {package}, which is not installed."
        raise HeadPruneError(message, 'pip install "headprune[metrics]"') from error
