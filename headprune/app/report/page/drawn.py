"""What the page shows and its scripts draw: the documents' figures, with the words that numbers.py has for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headprune import documents
from headprune.amounts import visible
from headprune.app.documents import Heads, Latency, Metrics, Point, Run
from headprune.app.report import findings, numbers, sentences
from headprune.app.report.usage import loading
from headprune.app.report.verdict import against_random, verdict
from headprune.scoring.scores import HeadScores

_WEIGHTS = 1_000_000  # bytes of attention weights in a page: samples beyond are left out, but for the first


@dataclass(frozen=True)
class Size:
    """A position of the slider: a pruned model, or the dense one.

    Attributes:
        heads: In words.
        name: In the table of latencies.
        figure: The metric on the reporting part, with its 95 % interval.
        cells: Its row of the first table.
        gone: Addresses of the heads that went: layer name and index.
        file: The folder that it was saved to; "" for the dense model.
    """

    kept: int
    heads: str
    name: str
    figure: tuple[float, float, float]
    cells: tuple[str, ...]
    gone: frozenset[tuple[str, int]] = frozenset()
    file: str = ""


def sizes(metrics: Metrics) -> list[Size]:
    """The pruned models from the smallest up, then the dense one."""
    metric, dense = metrics.metric, metrics.dense
    (first, *rows), budgets = sentences.table(metrics)[1], findings.largest_first(metrics)
    pruned = [
        Size(
            b.kept, f"{b.kept} of {b.total}", b.name, (b.pruned.metrics[metric], b.pruned.low, b.pruned.high), row.cells,
            frozenset((name, h) for name, heads in b.drop.items() for h in heads), b.checkpoint,
        )
        for b, row in zip(budgets, rows, strict=True)
    ]  # fmt: skip
    total = budgets[0].total
    figure = (dense.metrics[metric], dense.low, dense.high)
    return [*reversed(pruned), Size(total, f"all {total}", "dense", figure, first.cells)]


def chosen(metrics: Metrics, found: Sequence[Size]) -> int:
    """Where the slider stands at first: at the model that the verdict is about."""
    name = verdict(metrics).budget.name
    return next(i for i, size in enumerate(found) if size.name == name)


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
    budgets = {b.checkpoint: b for b in metrics.budgets} if metrics else {}
    return {
        "layers": [[f"L{a.index}", a.num_heads] for a in run.model.layers],
        "methods": [_method(s, addresses) for s in scores],
        "sizes": [
            {
                **asdict(size), "gone": sorted(places[a] for a in size.gone if a in places),
                "use": loading(run, budgets[size.file]) if size.file else "the model as it is",
            }
            for size in found
        ],
        "curve": _curve(metrics) if metrics else None,
        "latency": _latency(metrics.latency) if metrics else [],
        "profiles": _profiles(run, heads) if heads else None,
        "samples": _samples(heads) if heads else [],
    }  # fmt: skip


def _method(scores: HeadScores, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """A method's scores for the map.

    Colours are as in importance.png: even in size up to ``usual``, the median, and in ratio beyond it, up to ``most``.
    """
    values = [value for _, value in (_score(scores, *address) for address in addresses)]
    found = [abs(value) for value in values if isinstance(value, float)]
    most = max(found, default=0.0) or 1.0
    return {
        "name": scores.method, "unit": scores.unit.split(",")[0].split(" when ")[0],
        "values": [None if v == "" else v for v in values],
        "usual": max(float(np.median(found)) if found else most, most / 1000), "most": most, "said": f"{most:.3g}",
        "signed": scores.signed and any(isinstance(v, float) and v < 0 for v in values),
    }  # fmt: skip


def _curve(metrics: Metrics) -> dict[str, Any]:
    """Random heads beside chosen ones treated alike, as in tradeoff.png; and every order's line on the choosing part, as in orders.png.

    Lines begin at the dense model's point; of random draws they have mean and range.
    """
    metric = metrics.metric
    dense = next(p for p in metrics.curve if p.method == "dense")

    def point(kept: int, value: float, low: float, high: float, **more: Any) -> dict[str, Any]:
        return {"kept": kept, "value": value, "low": low, "high": high, "said": numbers.value(value, metric), **more}

    lines: dict[str, dict[int, list[Point]]] = {}
    for p in metrics.curve:
        if p is not dense:
            lines.setdefault(p.method, {}).setdefault(p.kept, []).append(p)
    points = []
    for method, line in lines.items():
        alone = method == "random"  # a draw's own interval is not the range of the draws
        for kept, of in sorted({**line, dense.kept: [dense]}.items()):
            low, high = min(p.value if alone else p.low for p in of), max(p.value if alone else p.high for p in of)
            points.append(point(kept, findings.mean_of([p.value for p in of], metric), low, high, method=method))
    budgets, level = findings.largest_first(metrics)[::-1], metrics.dense.metrics[metric]
    draws = {b.kept: b.random for b in budgets if b.random} | {dense.kept: (level,)}
    same = {b.kept: against_random(metrics, b).value for b in budgets} | {dense.kept: level}
    told = sentences.alike(metrics)
    return {
        "metric": metric, "share": metric in ("accuracy", "f1"), "points": points, "total": dense.kept,
        "random": [point(kept, findings.mean_of(of, metric), min(of), max(of)) for kept, of in draws.items()],
        "alike": [point(kept, value, value, value) for kept, value in same.items()] if told else [],
        "names": {"chosen": sentences.CHOSEN, "alike": told, "random": sentences.random_draws(len(metrics.budgets[0].random))},
    }  # fmt: skip


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
    """The samples, as many as leave the page small."""
    held, found = 0, list[dict[str, Any]]()
    for sample in heads.samples:
        held += sum(len(layer.weights) for layer in sample.layers)
        if found and held > _WEIGHTS:
            break
        found.append(documents.to_json(sample))
    return found


def to_json(value: Any) -> str:
    """JSON that may stand in a page: nothing in it can end its element, begin another, or give orders. What is not finite is null."""
    text = json.dumps(_clean(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, str):
        return visible(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
