"""How many examples the scores of docs/exercise.md need, and whether they may be examples that the model was trained on.

Every example's effects are computed once and kept in `.headprune/exercise/`; the rest is drawn from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import headprune as hp
from headprune.gates import gated

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
        parts = [_effects(model, layers, batch) for batch in batches]
        np.savez(path, **{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    return dict(np.load(path))


def _effects(model: nn.Module, layers: Sequence[hp.AttentionLayer], batch: dict[str, Tensor]) -> Effects:
    """Of one batch, by a forward pass for every head; the gradient by a gate for every example and head."""
    inputs, labels = {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]

    def answered() -> Tensor:
        logits: Tensor = model(**inputs)["logits"]
        return logits.log_softmax(-1)

    def losses(log: Tensor) -> Tensor:
        each = F.nll_loss(log.flatten(0, -2), labels.flatten(), reduction="none")
        return each.view(len(labels), -1).mean(1)

    with torch.no_grad():
        dense, ablated, moved = answered(), [], []
        for layer in layers:
            for head in range(layer.num_heads):
                with hp.mask(model, {layer.name: [head]}, layers=layers):
                    found = answered()
                ablated.append((losses(found) - losses(dense)).double())
                kl = (dense.exp() * (dense - found)).sum(-1)
                moved.append(kl.view(len(labels), -1).mean(1).double())
    gates = {a.name: torch.ones(len(labels), a.num_heads, requires_grad=True) for a in layers}
    with gated(model, layers, gates):
        slopes = torch.autograd.grad(losses(answered()).sum(), list(gates.values()))
    found = {"loss": losses(dense), "ablation": torch.stack(ablated, 1), "logits": torch.stack(moved, 1)}
    return {k: v.numpy() for k, v in {**found, "gradient": torch.cat(slopes, 1).abs()}.items()}


def rho(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b).statistic)


def reliability(effects: Effects) -> dict[str, Any]:
    """Rank correlation between the scores of two samples of n examples that share none, over many draws of both.

    ``needed`` is the n at which it is 0.8, between the sizes by Spearman's and Brown's formula; beyond them, from the largest.
    """
    rng, found = np.random.default_rng(0), {}
    for method in METHODS:
        each = effects[method]
        sizes, means, sds = [n for n in SIZES if 2 * n <= len(each)], [], []
        for n in sizes:
            rows = [rng.permutation(len(each)) for _ in range(SPLITS)]
            drawn = [rho(each[r[:n]].mean(0), each[r[n : 2 * n]].mean(0)) for r in rows]
            means.append(float(np.mean(drawn)))
            sds.append(float(np.std(drawn)))
        enough = next((i for i, mean in enumerate(means) if mean >= RELIABLE), len(sizes) - 1)
        needed = sizes[enough] * RELIABLE / (1 - RELIABLE) * (1 - means[enough]) / means[enough]
        found[method] = {
            "examples": sizes, "mean": means, "sd": sds, "needed": max(float(f"{needed:.1g}"), sizes[0]), "seen": means[enough] >= RELIABLE,
        }  # fmt: skip
    return found


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
