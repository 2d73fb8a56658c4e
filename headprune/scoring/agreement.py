"""How far two methods agree on which heads matter."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.scoring.base import HeadScores


@dataclass(frozen=True)
class Agreement:
    """Rank agreement between two methods' scores over all heads.

    Attributes:
        spearman: Spearman's rho.
        kendall: Kendall's tau-b.
        top_half: Share of the better half of the heads (rounded down) that both methods name; 0.5 by chance.
    """

    first: str
    second: str
    spearman: float
    kendall: float
    top_half: float


def agreement(a: HeadScores, b: HeadScores) -> Agreement:
    """Rank agreement between two methods on one model."""
    from scipy.stats import kendalltau, spearmanr

    x, y = a.flat().numpy(), b.flat().numpy()
    half = max(1, len(x) // 2)
    common = set(x.argsort()[-half:].tolist()) & set(y.argsort()[-half:].tolist())
    return Agreement(
        a.method, b.method, float(spearmanr(x, y).statistic), float(kendalltau(x, y).statistic), len(common) / half
    )
