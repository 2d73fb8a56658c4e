"""How many examples the scores of docs/exercise.md need, and whether they may be examples that the model was trained on.

Every example's effects are computed once and kept in `.headprune/exercise/`; the rest is drawn from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

import headprune as hp
from headprune.losses import ExampleLoss
from headprune.scoring import Settings
from headprune.scoring.ablation import exact
from headprune.scoring.base import Problem
from headprune.scoring.gradient import gate_gradients
from headprune.scoring.replay import Replay
from headprune.scoring.sampled import State

HOME = Path(__file__).parent.parent / ".headprune" / "exercise"
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
SPLITS, RELIABLE = 40, 0.8
METHODS = ("ablation", "gradient", "logits")
Effects = dict[str, np.ndarray]
"""By method, ``[examples, heads]``, of which the scores are the mean; ``loss``, the dense model's, ``[examples]``."""


def effects_of(name: str, model: nn.Module, layers: Sequence[hp.AttentionLayer], batches: Sequence[Any]) -> Effects:
    """What single examples say of every head; from the file of an earlier run if there is one."""
    path = HOME / f"{name}.npz"
    if not path.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        every = {distil: _problem(model, layers, batches, distil) for distil in (False, True)}
        slopes, answers = gate_gradients(every[False]), exact(every[True], Replay(every[True]))
        ablation = exact(every[False], Replay(every[False]))
        found = {"ablation": ablation, "logits": answers, "gradient": slopes}
        np.savez(path, loss=slopes.losses, **{k: v.effects.numpy() for k, v in found.items()})
    found = dict(np.load(path))
    return {**found, "expected": -found["gradient"], "gradient": np.abs(found["gradient"])}


def _problem(model: nn.Module, layers: Sequence[hp.AttentionLayer], batches: Sequence[Any], distil: bool) -> Problem:
    losses = ExampleLoss(model, distil=distil)
    kept = losses.prepare(list(batches))
    return Problem(
        model, layers, [(batch, losses.rows.size(batch)) for batch in kept], losses, 0, lambda *_: None, Settings(), rows=losses.rows
    )  # fmt: skip


def rho(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b).statistic)


def reliability(effects: Effects) -> dict[str, Any]:
    """Rank correlation between the scores of two samples of n examples that share none, over many draws of both.

    ``needed`` is the n at which it is 0.8, between the sizes by Spearman's and Brown's formula; beyond them, from the largest.
    """
    rng, found = np.random.default_rng(0), {}
    for method in (*METHODS, "controlled"):
        each = effects.get(method, effects["ablation"])
        of = _controlled(effects) if method == "controlled" else lambda rows, each=each: each[rows].mean(0)
        sizes, means, sds = [n for n in SIZES if 2 * n <= len(each)], [], []
        for n in sizes:
            rows = [rng.permutation(len(each)) for _ in range(SPLITS)]
            drawn = [rho(of(r[:n]), of(r[n : 2 * n])) for r in rows]
            means.append(float(np.mean(drawn)))
            sds.append(float(np.std(drawn)))
        enough = next((i for i, mean in enumerate(means) if mean >= RELIABLE), len(sizes) - 1)
        needed = sizes[enough] * RELIABLE / (1 - RELIABLE) * (1 - means[enough]) / means[enough]
        found[method] = {
            "examples": sizes, "mean": means, "sd": sds, "needed": max(float(f"{needed:.1g}"), sizes[0]), "seen": means[enough] >= RELIABLE,
        }  # fmt: skip
    return found


def _controlled(effects: Effects) -> Callable[[np.ndarray], np.ndarray]:
    """Scores by `Settings(examples=n // 8)`: gradients of all n examples, and ablation of an eighth of them."""

    def scores(rows: np.ndarray) -> np.ndarray:
        expected, exact = (torch.from_numpy(effects[k][rows]) for k in ("expected", "ablation"))
        empty = State.empty(expected, int(rows[0]))
        state = empty.grown(torch.full_like(empty.wanted, len(rows) / 8))
        looked = state.uniforms[:, None] < state.inclusion()
        return dataclasses.replace(state, effects=exact.where(looked, torch.nan)).each().mean(0).numpy()

    return scores


def signs(effects: Effects) -> dict[str, Any]:
    """Where removal of a head raises the loss, and where it lowers it; of a model of two classes."""
    each, right = effects["ablation"], effects["loss"] < np.log(2)
    n = len(right)
    mean, error = each.mean(0), each.std(0, ddof=1) / np.sqrt(n)
    return {
        "examples": n, "loss": float(effects["loss"].mean()), "right": float(each[right].mean()), "wrong": float(each[~right].mean()),
        "raises_right": int((each[right].mean(0) > 0).sum()), "lowers_wrong": int((each[~right].mean(0) < 0).sum()),
        "sure": int((np.abs(mean) > 1.96 * error).sum()), "harmful": int((mean < -1.96 * error).sum()),
    }  # fmt: skip


def sources(trained: Effects, held: Effects, size: int = 512, few: int = 128) -> dict[str, Any]:
    """Rank correlation of scores with those of many new examples: scores from examples of training, and from others that it had not.

    Returns:
        By method, means over draws: ``trained`` and ``held`` (``size`` examples each), ``few`` (others).
    """
    rng, found = np.random.default_rng(0), {}
    for method in METHODS:
        rows = []
        for _ in range(SPLITS):
            order = rng.permutation(len(held[method]))
            truth = held[method][order[size:]].mean(0)
            seen = trained[method][rng.permutation(len(trained[method]))[:size]]
            rows.append(
                [rho(part.mean(0), truth) for part in (seen, held[method][order[:size]], held[method][order[:few]])]
            )
        found[method] = dict(zip(("trained", "held", "few"), np.mean(rows, axis=0).tolist(), strict=True))
    return {**found, "examples": size, "few": few, "others": len(held["loss"]) - size}
