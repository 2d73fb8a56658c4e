"""Intervals and p-values for a mean over examples, also with few examples, or with an effect in only a few of them.

A sample without any of the rare large effects looks certain: no example changed, so the interval has no width. The
remedy is known from proportions (Agresti and Coull 1998, "Approximate is better than exact"; for paired
ones Bonett and Price 2012, J. Educ. Behav. Stat. 37:479): count two examples more than were seen, here one with the
largest deviation that was seen, and one with its opposite. The mean does not change, and its variance becomes

    (sum_i e_i^2 + 2 max_i e_i^2) / n^2

with Student's t of n - 1 degrees of freedom. Interval, test and verdict all come from this one number, so
they cannot contradict each other. benchmarks/intervals.py simulates error rates and coverage (docs/benchmarks.md).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student

CONFIDENCE = 0.95
FEW = 10.0  # examples that carry an effect: with fewer, intervals cover less than 95 % (docs/benchmarks.md, Intervals)


def spread(residuals: np.ndarray, least: Any = 0.0) -> np.ndarray:
    """Standard deviation of a sum of independent examples, with two more of them counted.

    Args:
        residuals: ``[examples, ...]``, each example's deviation from its expectation.
        least: Smallest deviation of the two added examples: where no deviation was seen, there still may be one.

    Returns:
        ``[...]``.
    """
    size = np.maximum(np.abs(residuals).max(axis=0), least)
    return np.asarray(np.sqrt((residuals**2).sum(axis=0) + 2 * size**2))


def quantile(examples: int) -> float:
    """Student's t: half the width of the 95 % interval in standard errors."""
    return float(student.ppf((1 + CONFIDENCE) / 2, _freedom(examples)))


def p_value(deviation: float, error: float, examples: int) -> float:
    """Two-sided p-value of an estimate being 0 in truth: below .05 if and only if its interval does not contain 0."""
    if error == 0:
        return 0.0 if deviation else 1.0
    return float(2 * student.sf(abs(deviation) / error, _freedom(examples)))


def _freedom(examples: int) -> int:
    return max(examples - 1, 1)


def carried_by(effects: np.ndarray) -> np.ndarray:
    """How many examples a mean rests on, ``(sum |x|)^2 / sum x^2`` (Kish's effective size): ``[examples, ...]`` to ``[...]``.

    All of them if their effects have the same size, k if only k have one of the same size; 0 without any effect.
    """
    size = np.abs(effects)
    squares = (size**2).sum(axis=0)
    return np.asarray(size.sum(axis=0) ** 2 / np.where(squares > 0, squares, 1.0))


def wilson(share: float, examples: float) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927), which has a width at 0 and 1 too."""
    z = float(student.ppf((1 + CONFIDENCE) / 2, math.inf))
    middle, below = share + z**2 / (2 * examples), 1 + z**2 / examples
    half = z * math.sqrt(share * (1 - share) / examples + (z / (2 * examples)) ** 2)
    return max(0.0, min(share, (middle - half) / below)), min(1.0, max(share, (middle + half) / below))


_SPLITS = 100  # of the examples into halves


def split_half(effects: np.ndarray, seed: int = 0) -> float | None:
    """The rank correlation to expect between these scores and those of as many other examples, from 0 to 1.

    The examples are cut into two random halves many times. The mean Spearman correlation r between two halves' scores
    is that of half the examples; 2 r / (1 + r) is that of all (Spearman 1910, Brown 1910). A bootstrap is far too
    optimistic: its resamples share the noise of the scores that they are compared with (docs/methods.md has the
    figures).

    Args:
        effects: ``[examples, heads]``, whose mean over examples are the scores.

    Returns:
        None with fewer than four examples or two heads, or if all heads are alike.
    """
    if len(effects) < 4 or effects.shape[1] < 2:
        return None
    total, half = effects.sum(axis=0), len(effects) // 2
    if np.ptp(total) == 0:
        return None
    rng = np.random.default_rng(seed)
    first = np.stack([effects[rng.permutation(len(effects))[:half]].sum(axis=0) for _ in range(_SPLITS)])
    r = max(0.0, float(_correlations(first, total - first).mean()))
    return 2 * r / (1 + r)


def _correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman correlation of every row of ``a`` with the same row of ``b``; 0 where a row is constant."""
    x, y = (rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2 for rows in (a, b))
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    return np.asarray((x * y).sum(axis=1) / np.where(scale == 0, 1, scale))
