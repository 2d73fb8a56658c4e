"""How much two methods agree on which heads matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from headprune.scoring.scores import HeadScores

CHANCE_DRAWS = 200


@dataclass(frozen=True)
class Agreement:
    """Rank agreement between two methods' scores over all heads.

    Attributes:
        spearman: Spearman's rho; NaN where a method scores all heads alike.
        kendall: Kendall's tau-b.
        top_half: Share of the better half of the heads (rounded down) that both methods name; 0.5 by chance.
    """

    first: str
    second: str
    spearman: float
    kendall: float
    top_half: float


@dataclass(frozen=True)
class Chance:
    """How much random orders of as many heads agree: 95 % of the pairs agree less.

    Attributes:
        spearman: 95 % of the absolute values of rho are below.
        kendall: The same of tau.
        top_half: 95 % of the shares are below.
    """

    spearman: float
    kendall: float
    top_half: float


def agreement(a: HeadScores, b: HeadScores, top: int | None = None) -> Agreement:
    """Rank agreement between two methods on one model.

    Args:
        a, b: Scores of the same heads.
        top: How many of the best heads to compare, in place of the better half.
    """
    return Agreement(a.method, b.method, *_agree(a.flat().numpy(), b.flat().numpy(), top))


def agreements(scores: Sequence[HeadScores]) -> list[Agreement]:
    """Every pair's, without random controls."""
    return [agreement(a, b) for a, b in combinations([s for s in scores if s.method != "random"], 2)]


@cache
def chance(heads: int, seed: int = 0) -> Chance:
    """The random control: how much two independent random orders agree."""
    rng = np.random.default_rng(seed)
    order = np.arange(heads, dtype=np.float64)
    drawn = np.abs([_agree(order, rng.permutation(order), None) for _ in range(CHANCE_DRAWS)])
    return Chance(*(float(q) for q in np.percentile(drawn, 95, axis=0)))


def _agree(x: np.ndarray, y: np.ndarray, top: int | None) -> tuple[float, float, float]:
    from scipy.stats import kendalltau, spearmanr

    count = top or max(1, len(x) // 2)
    common = set(x.argsort(kind="stable")[-count:].tolist()) & set(y.argsort(kind="stable")[-count:].tolist())
    if not np.ptp(x) or not np.ptp(y):
        return float("nan"), float("nan"), len(common) / count
    return float(spearmanr(x, y).statistic), float(kendalltau(x, y).statistic), len(common) / count
