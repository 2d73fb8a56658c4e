"""What a report concludes from the documents: no text, only what is so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.budgets import kind_named
from headprune.scoring.agreement import Agreement
from headprune.scoring.base import HeadScores
from headprune.uncertainty import FEW

_SHOWN = 8  # heads at each end of a method's list


def largest_first(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The budgets, those that keep most heads first."""
    return sorted(metrics["budgets"], key=lambda b: -b["kept"])


def chosen_by(budget: Mapping[str, Any]) -> list[str]:
    """The method and the strategy that chose a budget's heads; none for a plan of the user's."""
    by = [budget["method"]] if budget["method"] else []
    return by + ([budget["strategy"]] if budget.get("strategy") not in ("", None, *by) else [])


def trained_on_choosing(metrics: Mapping[str, Any]) -> float | None:
    """The dense model's value where plans were chosen, if it is far better there than where they are reported."""
    dense = metrics["dense"]
    chosen = next(p for p in metrics["curve"] if p["method"] == "dense")
    lower = metrics["metric"] == "perplexity"
    apart = chosen["high"] < dense["low"] if lower else chosen["low"] > dense["high"]
    return float(chosen["value"]) if apart else None


def rests_on_few(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Budgets whose change of perplexity hangs on so few examples that its interval may be too narrow."""
    if metrics["metric"] == "accuracy":
        return []
    changes = ((b, b["change"]) for b in largest_first(metrics))
    return [b for b, c in changes if 0 < c.get("carried_by", 0.0) < FEW <= c["examples"]]


@dataclass(frozen=True)
class Speed:
    """The first budget's speed.

    Attributes:
        rows: Each input that was timed, with the speedup there.
        slow: On how many of them it is not measurably faster.
        most: The input on which a model without prunable heads would gain most, and that model's ratio there; None if
            it was not timed.
    """

    rows: list[tuple[dict[str, Any], dict[str, Any]]]
    slow: int
    most: tuple[dict[str, Any], float] | None


def speed(metrics: Mapping[str, Any]) -> Speed:
    """What was gained, and the most there was to gain."""
    latency, name = metrics["latency"], metrics["budgets"][0]["name"]
    rows = [(row, row["speedups"][name]) for row in latency["rows"]]
    most, bound = None, latency["bound"]
    if bound:
        row = max(latency["rows"], key=lambda row: row["speedups"][bound]["ratio"])
        most = row, row["speedups"][bound]["ratio"]
    return Speed(rows, sum(s["verdict"] != "faster" for _, s in rows), most)


@dataclass(frozen=True)
class Ranking:
    """A method's heads from the most important down, each as (label, score, standard error).

    Attributes:
        harmful: Heads whose score is below 0 beyond its standard error; None where that means nothing.
        unsure: Heads that cannot be told from 0.
    """

    scores: HeadScores
    heads: list[tuple[str, float, float]]
    harmful: int | None
    unsure: int

    @property
    def highest(self) -> list[tuple[str, float, float]]:
        """The most important, at most half of all."""
        return self.heads[: min(_SHOWN, len(self.heads) // 2)]

    @property
    def lowest(self) -> list[tuple[str, float, float]]:
        """The least important first, at most half of all."""
        return self.heads[::-1][: min(_SHOWN, len(self.heads) // 2)]


def ranking(scores: HeadScores) -> Ranking:
    """The order of a method's heads, and which of them are surely harmful."""
    flat, error, labels = scores.flat(), scores.flat_stderr(), scores.labels()
    heads = [(labels[i], float(flat[i]), float(error[i])) for i in flat.argsort(descending=True).tolist()]
    harmful = None
    if scores.signed and float(flat.min()) < 0 and bool(error.isfinite().all()):
        harmful = int(((flat + 1.96 * error) < 0).sum())
    return Ranking(scores, heads, harmful, int((flat.abs() < 1.96 * error).sum()))


@dataclass(frozen=True)
class TradeOff:
    """The table of the curves: the mean of every method's values at every number of heads that was asked for."""

    methods: list[str]
    rows: list[tuple[int, list[float | None]]]


def trade_off(curve: Sequence[Mapping[str, Any]]) -> TradeOff:
    """The curve's points by heads kept and method."""
    points = [p for p in curve if p["method"] != "dense"]
    methods = list(dict.fromkeys(p["method"] for p in points))
    rows = []
    for keep in sorted({p["asked"] for p in points}, reverse=True):
        found = ([p["value"] for p in points if p["method"] == m and p["asked"] == keep] for m in methods)
        rows.append((keep, [sum(values) / len(values) if values else None for values in found]))
    return TradeOff(methods, rows)


@dataclass(frozen=True)
class Refit:
    """What the refits of a budget's layers did, on average."""

    before: float
    after: float
    least: float
    most: float
    new_values: int
    layers: int


def refit(repair: Mapping[str, Any] | None) -> Refit | None:
    """W_O's mean error without and with the repair, and the range of its ridges; None if no layer was refitted."""
    fits = list(repair["layers"].values()) if repair else []
    if not fits:
        return None
    before, after = (sum(f[key] for f in fits) / len(fits) for key in ("before", "after"))
    ridges = sorted(f["ridge"] for f in fits)
    return Refit(before, after, ridges[0], ridges[-1], sum(f["values"] for f in fits), len(fits))


def shared_notes(budgets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int] | None]]:
    """The repairs' notes, each once, with the heads kept by the budgets that it is of; None if it is of all."""
    repaired = [b for b in budgets if b.get("repair")]
    kept: dict[str, list[int]] = {}
    for b in repaired:
        for note in b["repair"]["notes"]:
            kept.setdefault(note, []).append(b["kept"])
    return [(note, None if len(of) == len(repaired) else of) for note, of in kept.items()]


def notes_in_common(budgets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on how plans were made that are of several budgets, and of all."""
    return [n for n in budgets[0]["notes"] if len(budgets) > 1 and all(n in b["notes"] for b in budgets)]


def limits_metric(budgets: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what was asked for is a bound on what is lost, so that fewer heads are better."""
    return any("kind" in b.get("budget", {}) and kind_named(b["budget"]["kind"]).by_metric for b in budgets)


def changed_weights(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The budgets whose models were repaired or fine-tuned, those that keep most heads first."""
    return [b for b in largest_first(metrics) if b.get("repair") or b.get("finetune")]


def fewest_rounds(latency: Mapping[str, Any]) -> int:
    """The rounds that every model was timed in, at least."""
    return min(int(timing["runs"]) for row in latency["rows"] for timing in row["timings"].values())


def closest_first(pairs: Sequence[Agreement]) -> list[Agreement]:
    """Pairs of methods from the most alike down; those that cannot be compared last."""
    return sorted(pairs, key=lambda p: -(p.spearman if p.spearman == p.spearman else -2))
