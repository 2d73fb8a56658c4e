"""Whether other examples would order the heads in the same way."""

from __future__ import annotations

from typing import Any

import numpy as np

from headprune.scoring.base import Estimate

RESAMPLES = 200


def stability(estimate: Estimate, seed: int = 0) -> dict[str, Any] | None:
    """Rank stability over resampled examples; None if the scores are not made from examples.

    Returns:
        ``spearman``: mean rank correlation of a resample's scores with the scores; ``top_half``: mean share of the better
        half of the heads that a resample names too (0.5 by chance); ``by``: ``"bootstrap"`` over examples where each
        example's effect is known, else ``"normal"`` draws from the standard errors; ``resamples``.
    """
    values = estimate.values.cpu().double().numpy()
    rng = np.random.default_rng(seed)
    if estimate.effects is not None and len(estimate.effects) > 1:
        effects = estimate.effects.cpu().double().numpy()
        n = len(effects)
        draws = rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) @ effects / n
        by = "bootstrap"
    elif bool(estimate.stderr.isfinite().all()):
        draws = rng.normal(values, estimate.stderr.cpu().double().numpy(), size=(RESAMPLES, len(values)))
        by = "normal"
    else:
        return None
    if len(values) < 2 or np.ptp(values) == 0:
        return None
    half = max(1, len(values) // 2)
    mine = _ranks(values[None])
    theirs = _ranks(draws)
    centred = theirs - theirs.mean(1, keepdims=True)
    own = mine - mine.mean()
    scale = np.sqrt((centred**2).sum(1) * (own**2).sum())
    spearman = float(((centred * own).sum(1) / np.where(scale == 0, 1, scale)).mean())
    common = ((theirs >= len(values) - half) & (mine >= len(values) - half)).sum(1) / half
    return {"spearman": spearman, "top_half": float(common.mean()), "by": by, "resamples": RESAMPLES}


def _ranks(rows: np.ndarray) -> np.ndarray:
    ranks: np.ndarray = rows.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable").astype(np.float64)
    return ranks
