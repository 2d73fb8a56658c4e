"""Whether as many other examples would order the heads alike."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata
from torch import Tensor

SPLITS = 100


def split_half(effects: Tensor | None, seed: int = 0) -> float | None:
    """The rank correlation to expect between these scores and those of as many other examples, from 0 to 1.

    The examples are cut into two random halves many times. The mean Spearman correlation r between the scores of two halves says what half of
    the examples is worth; 2 r / (1 + r) what all are (Spearman 1910, Brown 1910). A bootstrap says far too much: its resamples share
    the noise of the scores that they are compared with (docs/methods.md has the figures).

    Args:
        effects: ``[examples, heads]``, whose mean over examples are the scores; None if the scores are no such mean.

    Returns:
        None with fewer than four examples or two heads, or if all heads are alike.
    """
    if effects is None or len(effects) < 4 or effects.shape[1] < 2:
        return None
    every = effects.cpu().double().numpy()
    total, half = every.sum(axis=0), len(every) // 2
    if np.ptp(total) == 0:
        return None
    rng = np.random.default_rng(seed)
    first = np.stack([every[rng.permutation(len(every))[:half]].sum(axis=0) for _ in range(SPLITS)])
    r = max(0.0, float(_correlations(first, total - first).mean()))
    return 2 * r / (1 + r)


def _correlations(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's of every row of ``a`` with that row of ``b``; 0 where a row is constant."""
    x, y = (rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2 for rows in (a, b))
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    return np.asarray((x * y).sum(axis=1) / np.where(scale == 0, 1, scale))
