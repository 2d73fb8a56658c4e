"""Two runs side by side: their options, and their models' metrics, paired on the examples that both report on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import norm

from headprune.app.documents import Measured, Metrics, ReportValues, Run
from headprune.app.report.verdict import headline_row
from headprune.app.runs import RunFolder
from headprune.documents import Count, to_json
from headprune.errors import HeadPruneError
from headprune.evaluation import Change, compare, verdict_of
from headprune.latency import Speedup
from headprune.metrics import LOSSES, metric_named


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model of a run.

    Attributes:
        run: The run's folder.
        name: ``"dense"``, or the checkpoint's name.
        kept: Heads.
        speedup: Against the dense model of its run, on its machine; None for that model.
        batch, length: The input of ``speedup``; ``length`` in tokens, 0 where there are none.
        weights: Bytes as saved; None in older runs.
    """

    run: str
    name: str
    kept: Count
    measured: Measured
    speedup: Speedup | None = None
    batch: Count
    length: Count
    parameters: Count
    weights: Count | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedPair:
    """The change from a model of the first run to one of the second.

    Attributes:
        paired: Whether it is paired by example; otherwise the interval takes both models' errors as independent.
    """

    first: str
    second: str
    paired: bool
    change: Change


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
        options: What differs, by its name: the values of both.
        notes: What a reader should know, such as why nothing is paired.
    """

    runs: tuple[str, str]
    metric: str
    options: dict[str, tuple[str, str]]
    models: tuple[ComparedModel, ...]
    pairs: tuple[ComparedPair, ...]
    notes: tuple[str, ...]


def compare_runs(first: RunFolder, second: RunFolder) -> RunComparison:
    """Compare two runs of `headprune prune`.

    Raises:
        HeadPruneError: A folder holds no such run, or a damaged one; their metrics differ.
    """
    (run, metrics), (other_run, other) = opened = [_open(folder) for folder in (first, second)]
    if metrics.metric != other.metric:
        message = f"{first.path} is measured by {metrics.metric}, {second.path} by {other.metric}."
        raise HeadPruneError(message, "`headprune evaluate MODEL MODEL -d DATA --metric NAME` measures both by one.")
    notes: list[str] = []
    values, pairs = _values(first, second, metrics.metric, notes), []
    if not {b.kept for b in metrics.budgets} & {b.kept for b in other.budgets}:
        notes.append("No two models keep as many heads, so the largest ones are compared, then the next, and so on.")
    for (name, a), (other_name, b) in _matched(run, metrics, other_run, other):
        paired = _paired(values, name, other_name, metrics.metric, notes)
        change = paired or _independent(a, b, metrics.metric)
        pairs.append(ComparedPair(first=name, second=other_name, paired=paired is not None, change=change))
    machines = {(m.environment or r.environment).device_name for r, m in opened}
    if len(machines) > 1:
        notes.append(f"Times are from different machines: {' and '.join(sorted(machines))}.")
    models = [*_models(first, run, metrics), *_models(second, other_run, other)]
    return RunComparison(
        runs=(str(first.path), str(second.path)), metric=metrics.metric, options=_differences(opened), models=tuple(models),
        pairs=tuple(pairs), notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _open(folder: RunFolder) -> tuple[Run, Metrics]:
    """The documents of a run that pruned."""
    metrics = folder.read_metrics() if folder.run_path.is_file() else None
    if metrics is None:
        raise HeadPruneError(f"{folder.path} holds no run that pruned.", "Pass a folder that `headprune prune` wrote.")
    return folder.read_run(), metrics


_INDEPENDENT = "so nothing is paired: intervals take both as independent."


def _values(
    first: RunFolder, second: RunFolder, metric: str, notes: list[str]
) -> tuple[ReportValues, ReportValues] | None:
    """Both runs' values per example; None with a note if they cannot be paired."""
    a, b = (folder.read_values() for folder in (first, second))
    if a is None or b is None:
        older = first if a is None else second
        notes.append(f"{older.path} has no report.npz with values of examples, as in older versions, {_INDEPENDENT}")
        return None
    here, there = a.common(b)
    common, most = len(here), max(len(a.rows), len(b.rows))
    if common < 2:
        notes.append(f"The runs report on different examples or labels, or one is of an older version, {_INDEPENDENT}")
        return None
    if metric not in LOSSES and not here == there == list(range(most)):
        why = f"{metric} is no mean over examples, and the runs report on others or in another order"
        notes.append(f"{why}, {_INDEPENDENT}")
        return None
    if common < most:
        sizes = f"{len(a.rows):,} and {len(b.rows):,}"
        notes.append(f"Changes are of the {common:,} examples that both runs report on, of {sizes}.")
    return a, b


Named = tuple[str, Measured]
"""A model's name and metrics."""


def _matched(run: Run, metrics: Metrics, other_run: Run, other: Metrics) -> Iterator[tuple[Named, Named]]:
    """Models to compare: the dense ones, if they are not the same; those with as many heads; if there are none, by size."""
    if run.model.fingerprint != other_run.model.fingerprint:
        yield ("dense", metrics.dense), ("dense", other.dense)
    alike = [(a, b) for a in metrics.budgets for b in other.budgets if a.kept == b.kept]
    by_size = [sorted(m.budgets, key=lambda budget: -budget.kept) for m in (metrics, other)]
    for a, b in alike or zip(*by_size, strict=False):
        yield (a.checkpoint, a.pruned), (b.checkpoint, b.pruned)


def _paired(
    values: tuple[ReportValues, ReportValues] | None, name: str, other_name: str, metric: str, notes: list[str]
) -> Change | None:
    """The change paired by example; None, with a note, where this is not possible."""
    if values is None:
        return None
    try:
        here, there = values[0].common(values[1])
        return compare(values[0].some(name, here), values[1].some(other_name, there), metric)
    except (HeadPruneError, KeyError) as error:
        why = f"The answers of {error.args[0]} are missing." if isinstance(error, KeyError) else error.args[0]
        notes.append(f"{why} {_INDEPENDENT[:1].upper()}{_INDEPENDENT[1:]}")
        return None


def _independent(a: Measured, b: Measured, metric: str) -> Change:
    """The change between models that were measured on different examples: squares of half-widths are added."""
    ratio = metric_named(metric).relative
    scale = math.log if ratio else float
    ends = [[scale(v) for v in (m.metrics[metric], m.low, m.high)] for m in (a, b)]
    # Wilson's interval, of accuracy, is not symmetric; any other is, but where it would go beyond the metric's range.
    halves = ((high - low) / 2 if metric == "accuracy" else max(high - v, v - low) for v, low, high in ends)
    half = math.hypot(*halves)
    value = ends[1][0] - ends[0][0]
    error = half / norm.ppf(0.975)
    p = float(2 * norm.sf(abs(value) / error)) if error else float(value == 0)
    low, high = value - half, value + half
    verdict = verdict_of(low, high, metric_named(metric).higher)
    if ratio:
        value, low, high = map(math.expm1, (value, low, high))
    return Change(metric, value, low, high, p, verdict, min(a.examples, b.examples))


def _models(folder: RunFolder, run: Run, metrics: Metrics) -> Iterator[ComparedModel]:
    """The dense model of a run, and the pruned ones, largest first."""
    row, dense = headline_row(metrics.latency), metrics.dense
    common: dict[str, Any] = {"run": str(folder.path), "batch": row.batch, "length": row.length}
    yield ComparedModel(
        name="dense", kept=metrics.budgets[0].total, measured=dense, parameters=dense.parameters, weights=dense.weights, **common
    )  # fmt: skip
    for b in sorted(metrics.budgets, key=lambda budget: -budget.kept):
        yield ComparedModel(
            name=b.checkpoint, kept=b.kept, measured=b.pruned, speedup=row.speedups[b.name], parameters=b.parameters,
            weights=b.weights, **common,
        )  # fmt: skip


def _differences(opened: Sequence[tuple[Run, Metrics]]) -> dict[str, tuple[str, str]]:
    """The options and versions that differ, by name."""
    first, second = (dict(_options(run, metrics)) for run, metrics in opened)
    names = dict.fromkeys([*first, *second])
    pairs = {name: (first.get(name, ""), second.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _options(run: Run, metrics: Metrics) -> Iterator[tuple[str, str]]:
    """What a run was asked for, and what it ran on, as text by name."""
    yield from (pair for pair in _flat(to_json(run.options)) if pair[0] != "keep")  # `budgets` says it
    planning = metrics.planning
    yield "plan", planning.plan or ""
    yield "strategy", planning.strategy
    yield "protect", planning.protect
    yield "min_heads_per_layer", str(planning.min_heads_per_layer)
    yield "effort", planning.effort.name if planning.effort else ""
    yield "budgets", ", ".join(b.budget.asked if b.budget else f"keep {b.asked}" for b in metrics.budgets)
    yield "repair", "yes" if any(b.repair for b in metrics.budgets) else "no"
    yield "finetune", ", ".join(f"{b.finetune.options.epochs:g}" for b in metrics.budgets if b.finetune)
    environment = metrics.environment or run.environment
    for name in ("headprune", "torch", "transformers", "device", "device_name", "threads"):
        yield name, str(getattr(environment, name))
    yield "fingerprint", run.model.fingerprint


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
