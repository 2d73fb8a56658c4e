"""What the page shows and its scripts draw: the documents' figures, with the words that numbers.py has for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headprune.app.documents import BudgetResult, Heads, Latency, Metrics, Run
from headprune.app.report import findings, numbers
from headprune.latency import LatencyRow
from headprune.scoring.base import HeadScores

_WEIGHTS = 1_200_000  # bytes of attention weights in a page, at most: further samples are left out
_LIMIT = 0.98  # the share of heads whose score has a colour of its own; those beyond have the last one


@dataclass(frozen=True)
class Size:
    """A pruned model, or the dense one, in the words of the tables.

    Attributes:
        name: In the table of latencies.
        figure: The metric on the reporting part, with its 95 % interval.
        speed: On the largest input that was timed.
        file: The folder that it was saved to; "" for the dense model.
        gone: Addresses of the heads that went: layer name and index.
    """

    kept: int
    name: str
    figure: tuple[float, float, float]
    heads: str
    value: str
    interval: str
    change: str = ""
    verdict: str = ""
    random: str = ""
    speed: str = ""
    size: str = ""
    file: str = ""
    gone: frozenset[tuple[str, int]] = frozenset()


def sizes(metrics: Metrics) -> list[Size]:
    """The pruned models from the smallest up, then the dense one."""
    metric, dense, total = metrics.metric, metrics.dense, metrics.budgets[0].total
    figure = (dense.metrics[metric], dense.low, dense.high)
    last = Size(
        total, "dense", figure, f"{total} (dense)", numbers.value(figure[0], metric), _interval(figure, metric),
        size=f"{dense.parameters:,}",
    )  # fmt: skip
    return [*(_pruned(b, metrics) for b in reversed(findings.largest_first(metrics))), last]


def _pruned(b: BudgetResult, metrics: Metrics) -> Size:
    metric, row = metrics.metric, largest(metrics.latency)
    figure = (b.pruned.metrics[metric], b.pruned.low, b.pruned.high)
    return Size(
        b.kept, b.name, figure, f"{b.kept} of {b.total}", numbers.value(figure[0], metric), _interval(figure, metric),
        change=numbers.change(b.change, metric), verdict=b.change.verdict,
        random=numbers.value(sum(b.random) / len(b.random), metric) if b.random else "",
        speed=numbers.ratio(row.speedups[b.name]) if row and b.name in row.speedups else "",
        size=f"{b.parameters:,} ({b.parameters / metrics.dense.parameters - 1:+.1%})", file=b.checkpoint,
        gone=frozenset((name, h) for name, heads in b.drop.items() for h in heads),
    )  # fmt: skip


def _interval(figure: tuple[float, float, float], metric: str) -> str:
    return f"{numbers.value(figure[1], metric)} to {numbers.value(figure[2], metric)}"


def largest(latency: Latency) -> LatencyRow | None:
    """The input with the most tokens (or examples) of those that were timed."""
    return max(latency.rows, key=lambda row: row.batch * max(row.length, 1), default=None)


def chosen(metrics: Metrics, found: Sequence[Size]) -> int:
    """Where the slider stands at first: at the budget that was asked for first."""
    return next(i for i, size in enumerate(found) if size.name == metrics.budgets[0].name)


@dataclass(frozen=True)
class Row:
    """A head in the table.

    Attributes:
        scores: By each method: in words, and as the value to sort by ("" if there is none).
        kept: By each pruned model, the largest first.
    """

    label: str
    scores: list[tuple[str, float | str]]
    kept: list[bool]
    role: str


def head_rows(run: Run, scores: Sequence[HeadScores], found: Sequence[Size], heads: Heads | None) -> list[Row]:
    """Every head of the dense model, layer by layer."""
    roles = {(a.name, h): head.role for a in heads.layers for h, head in enumerate(a.heads)} if heads else {}
    return [
        Row(
            label, [_score(s, *address) for s in scores], [address not in size.gone for size in found[-2::-1]],
            roles.get(address, ""),
        )
        for label, address in _addresses(run)
    ]  # fmt: skip


def _addresses(run: Run) -> list[tuple[str, tuple[str, int]]]:
    """Every head's label, layer name and index."""
    return [(f"L{a.index}.H{h}", (a.name, h)) for a in run.model.layers for h in range(a.num_heads)]


def _score(scores: HeadScores, name: str, head: int) -> tuple[str, float | str]:
    if name not in scores.values:
        return "–", ""
    value, error = float(scores.values[name][head]), float(scores.stderr[name][head])
    return numbers.with_error(value, error, ".4g", " ± ", ".2g"), value if math.isfinite(value) else ""


def everything(
    run: Run, scores: Sequence[HeadScores], metrics: Metrics | None, found: Sequence[Size], heads: Heads | None
) -> dict[str, Any]:
    """What the scripts get. Heads are numbers, counted through all layers from 0."""
    addresses = [address for _, address in _addresses(run)]
    places = {address: i for i, address in enumerate(addresses)}
    return {
        "layers": [[f"L{a.index}", a.num_heads] for a in run.model.layers],
        "methods": [_method(s, addresses) for s in scores],
        "sizes": [
            {**asdict(size), "gone": sorted(places[a] for a in size.gone if a in places)} for size in found
        ],
        "curve": _curve(metrics) if metrics else None,
        "latency": _latency(metrics.latency) if metrics else [],
        "profiles": _profiles(run, heads) if heads else None,
        "samples": _samples(heads) if heads else [],
    }  # fmt: skip


def _method(scores: HeadScores, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """A method's scores for the map, and the limit of its colours, beyond which few heads lie."""
    values = [value for _, value in (_score(scores, *address) for address in addresses)]
    found = [abs(value) for value in values if isinstance(value, float)]
    limit = (float(np.quantile(found, _LIMIT)) or max(found)) if found else 0.0
    return {
        "name": scores.method, "unit": scores.unit, "values": [None if v == "" else v for v in values],
        "limit": limit, "said": f"{limit:.3g}", "signed": scores.signed and any(v < 0 for v in values if v != ""),
    }  # fmt: skip


def _curve(metrics: Metrics) -> dict[str, Any]:
    """Every method's line, each from the dense model's point; of random draws, mean and range."""
    metric, dense = metrics.metric, next(p for p in metrics.curve if p.method == "dense")
    lines: dict[str, dict[int, list[tuple[float, float, float]]]] = {}
    for p in metrics.curve:
        if p is not dense:
            lines.setdefault(p.method, {}).setdefault(p.kept, []).append((p.value, p.low, p.high))
    for line in lines.values():
        line.setdefault(dense.kept, [(dense.value, dense.low, dense.high)])
    if dense.kept in lines.get("random", {}):  # all draws of no heads are the same
        lines["random"][dense.kept] = [(dense.value, dense.value, dense.value)]
    points = [
        {
            "method": method, "kept": kept, "value": sum(v for v, _, _ in of) / len(of),
            "low": min(v if method == "random" else low for v, low, _ in of),
            "high": max(v if method == "random" else high for v, _, high in of),
        }
        for method, line in lines.items() for kept, of in sorted(line.items())
    ]  # fmt: skip
    for point in points:
        point["said"] = numbers.value(point["value"], metric)
    share = metric in ("accuracy", "f1")
    return {"metric": metric, "share": share, "log": metric == "perplexity", "points": points, "total": dense.kept}


def _latency(latency: Latency) -> list[dict[str, Any]]:
    """Every input with its models: times in milliseconds."""
    return [
        {
            "input": numbers.shape(row),
            "models": [
                {
                    "name": name, "median": t.median, "p95": t.p95, "bound": name == latency.bound,
                    "said": f"{t.median:.2f} ms" + (f", {row.speedups[name].ratio:.2f}x" if name in row.speedups else ""),
                }
                for name, t in row.timings.items()
            ],
        }
        for row in latency.rows
    ]  # fmt: skip


_FIGURES = {
    "entropy": "entropy, nats", "evenness": "evenness", "largest": "largest weight", "distance": "mean distance",
    "previous": "to the previous token", "next": "to the next token", "itself": "to itself", "first": "to the first token",
    "separator": "to separators", "same": "to the same token elsewhere", "sink": "to no token", "induction": "induction",
    "duplicate": "duplicate token",
}  # fmt: skip


def _profiles(run: Run, heads: Heads) -> dict[str, Any]:
    """Every head's role, what justifies it, and its figures; None for heads that could not be seen."""
    layers = {a.name: a for a in heads.layers}
    found: list[Any] = []
    for layer in run.model.layers:
        seen = layers.get(layer.name)
        if seen is None or not seen.heads:
            found += [{"unseen": seen.unseen if seen else "not looked at"}] * layer.num_heads
            continue
        for head in seen.heads:
            figures = [getattr(head, name) for name in _FIGURES]
            found.append({"role": head.role, "because": head.because, "figures": [
                None if figure is None else f"{figure:.2f}" for figure in figures
            ]})  # fmt: skip
    return {"figures": list(_FIGURES.values()), "unit": heads.unit, "heads": found}


def _samples(heads: Heads) -> list[dict[str, Any]]:
    """The samples, as many as fit a page."""
    held, found = 0, []
    for sample in heads.samples:
        held += sum(len(layer.weights) for layer in sample.layers)
        if held > _WEIGHTS:
            break
        found.append(sample.to_json())
    return found


def to_json(value: Any) -> str:
    """JSON that may stand in a page: nothing in it can end its element, or begin another. What is not finite is null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
