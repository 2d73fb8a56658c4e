"""Tables, pictures and sentences of what was measured: what each size costs and gains, how the heads were chosen, and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import LogFormatter

from headprune import amounts
from headprune.app.documents import DISTURBED, BudgetResult, Dense, Measured, Metrics, TimeParts, ValueTable
from headprune.app.pictures import new_figure
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Figure, Table, listed, notes_by_size
from headprune.latency import GenerationRow, LatencyRow
from headprune.metrics import metric_named
from headprune.planning import AUTO, STRATEGIES, abouts
from headprune.repairing.steps import ALL_FITTED
from headprune.timing import ATTENTION, LAUNCH, PROJECTIONS

_BLUE, _GREY = "#0072B2", "#7f7f7f"  # Okabe and Ito's blue, and grey for the random control


def sizes_table(metrics: Metrics) -> Table:
    """The dense model, then the pruned ones by size; the recommended one stands out."""
    metric, dense, first = metrics.metric, metrics.dense, verdict.headline_row(metrics.latency)

    def size(model: Dense | BudgetResult) -> str:
        return f"{amounts.size(model.weights, 3)} in {model.dtype}" if model.weights else ""

    head = (
        "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", f"speed at {numbers.shape(first)} (95 %)", "speed verdict",
        numbers.with_more("parameters", "size as saved" if dense.weights else ""),
    )  # fmt: skip
    parameters = numbers.with_more(f"{dense.parameters:,}", size(dense))
    total = f"{metrics.budgets[0].total} (dense)"
    rows = [(total, numbers.interval(dense, metric), "", "", "", "", parameters)]
    for b in verdict.largest_first(metrics):
        share = numbers.share_of(b.parameters, dense.parameters)
        speed = first.speedups[b.name]
        rows.append((
            str(b.kept), numbers.interval(b.pruned, metric), numbers.change(b.change, metric), b.change.verdict,
            numbers.ratio(speed), speed.verdict, numbers.with_more(f"{b.parameters:,}", share, size(b)),
        ))  # fmt: skip
    result = verdict.judge(metrics)
    return Table(head, rows, 1 + verdict.largest_first(metrics).index(result.budget) if result.recommended else None)


def sizes_figure(metrics: Metrics) -> Figure:
    """The metric against heads kept: the saved models on the reported examples, beside random heads (the mean of their draws as a line, the
    range as a band).
    """
    metric, dense, budgets = metrics.metric, metrics.dense, verdict.largest_first(metrics)
    kept, models = [budgets[0].total, *(b.kept for b in budgets)], [dense, *(b.pruned for b in budgets)]
    value, low, high = np.array([(m.metrics[metric], m.low, m.high) for m in models]).T
    draws = [(dense.metrics[metric],), *(b.random for b in budgets)]
    figure, (axis,) = new_figure(7.2, 4.0)
    style: dict[str, Any] = {"fmt": "D-", "color": _BLUE, "markersize": 6, "capsize": 3, "zorder": 5}
    spread, name = np.maximum([value - low, high - value], 0), "chosen heads (95 % interval)"
    axis.errorbar(kept, value, spread, **style, label=name)
    alike = [value[0], *(verdict.like_random(b).metrics[metric] for b in budgets)]
    if alike != [*value]:
        done = "repaired and trained" if verdict.trained(metrics) else "repaired"
        name = f"chosen heads, {done} no more than the random ones"
        axis.plot(kept, alike, "D:", color=_BLUE, markersize=5, markerfacecolor="white", zorder=4, label=name)
    axis.set_xticks(kept)
    means = [numbers.mean_of(of_size, metric) for of_size in draws[::-1]]
    lows, highs = ([extreme(of_size) for of_size in draws[::-1]] for extreme in (min, max))
    label = f"random heads: mean and range of {max(map(len, draws))} draws"
    axis.plot(kept[::-1], means, "--", color=_GREY, label=label)
    axis.fill_between(kept[::-1], lows, highs, color=_GREY, alpha=0.2, lw=0)
    axis.axhline(value[0], color="black", lw=0.8, ls=":", label="dense model")
    axis.set(xlabel=f"heads kept, of {kept[0]}", ylabel=f"{metric},\non the reported examples")
    if metric_named(metric).relative:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())  # 2.05, not 2.05 × 10⁰
        axis.yaxis.set_minor_formatter(LogFormatter())
    axis.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)  # never over the intervals
    return Figure("tradeoff.png", f"{metric} against heads kept, with random heads and 95 % intervals", figure)


def orders(metrics: Metrics) -> dict[str, str]:
    """What each order named in a report is, by its strategy's description."""
    planning = metrics.planning
    names = [*(p.method for p in metrics.curve), *(order.order for order in planning.compared), *planning.work]
    names += [*(b.strategy for b in metrics.budgets), planning.strategy]
    known = {**abouts(), "random": "Heads drawn at random, the control."}

    def by_scores(name: str) -> str:
        strategy = name.rpartition(", ")[2] if planning.strategy == AUTO else planning.strategy
        made = STRATEGIES.get(strategy, STRATEGIES["one-shot"] if planning.strategy == AUTO else None)
        return f"By the scores of that name ({made.name}): {made.about[:1].lower()}{made.about[1:]}" if made else ""

    texts = {name: known.get(name) or by_scores(name) for name in names if name not in ("", "dense")}
    return {name: text for name, text in texts.items() if text}


def epochs_kept(metrics: Metrics) -> str:
    """Which models training did not improve, so that their weights from before it are kept."""
    kept = " and ".join(budget.name for budget in metrics.budgets if budget.finetune and not budget.finetune.best)
    return kept and f"; with {kept} none was better than the weights before training, so these are kept"


def comparison_table(metrics: Metrics) -> Table:
    """The loss or divergence of every order's plans, largest first; with heads kept, if the budget does not say it."""
    orders = metrics.planning.compared
    first = orders[0].plans
    places = sorted(range(len(first)), key=lambda i: -first[i].kept)
    rows = []
    for order in orders:
        cells = []
        for plan in (order.plans[i] for i in places):
            value = plan.loss if plan.divergence is None else plan.divergence
            heads = "" if plan.budget == f"keep {plan.kept}" else amounts.head_count(plan.kept)
            cells.append(numbers.with_more("–" if value is None else f"{value:.3g}", heads))
        rows.append((f"{order.order}{' (used)' * order.used}", *cells))
    strong = next((i for i, order in enumerate(orders) if order.used), None)
    return Table(("order", *(first[i].budget for i in places)), rows, strong)


def curve_table(metrics: Metrics) -> Table:
    """The metric at every number of heads, on the choosing part."""
    metric = metrics.curve_metric or metrics.metric
    points = [p for p in metrics.curve if p.method != "dense"]
    methods, rows = [*dict.fromkeys(p.method for p in points)], []
    for asked in sorted({p.asked for p in points}, reverse=True):
        draws = ([p.value for p in points if (p.method, p.asked) == (method, asked)] for method in methods)
        kept = sorted({p.kept for p in points if p.asked == asked})
        size = str(asked) if kept == [asked] else f"{'/'.join(map(str, kept))} (asked: {asked})"
        rows.append((size, *(numbers.value(numbers.mean_of(d, metric), metric) if d else "–" for d in draws)))
    return Table(("heads kept", *methods), rows)


# -- metrics, other data and repair ----------------------------------------------------------------------


def other_table(metrics: Metrics) -> Table:
    """The metric on second datasets, to which nothing was fitted."""
    metric, budgets = metrics.metric, verdict.largest_first(metrics)
    repairs = any(b.repair for b in budgets)
    effect = ["effect of repair"] if repairs else ["effect of training"] * verdict.trained(metrics)
    rows = []
    for i, data in enumerate(metrics.also):
        name = f"{amounts.code(data.name)}, {data.data.examples:,} examples"
        dense = (name, f"{budgets[0].total} (dense)", numbers.interval(data.dense, metric), "", "", "")
        rows.append(dense[: 5 + len(effect)])
        for b in budgets:
            there = b.also[i]
            gain = f"{numbers.change(there.gain, metric)}, {there.gain.verdict}" if there.gain else "–"
            value, change = numbers.interval(there.pruned, metric), numbers.change(there.change, metric)
            rows.append((name, str(b.kept), value, change, there.change.verdict, gain)[: 5 + len(effect)])
    return Table(["data", "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", *effect], rows)


def values_table(table: ValueTable) -> Table:
    """The metrics of several models on one dataset or task."""
    rows = []
    for v in table.values:
        value = numbers.value(v.value, v.kind)
        if v.low is not None and v.high is not None:
            value = numbers.between(v.value, v.low, v.high, v.kind)
        cells = (numbers.change(v.change, v.kind), v.change.verdict) if v.change else ("", "")
        rows.append((v.metric, v.model, value, *cells))
    return Table(("metric", "model", "value (95 %)", "change (95 %, paired)", "verdict"), rows)


def metrics_table(metrics: Metrics) -> Table:
    """Every metric with p-values and FLOPs, and the run's own metric without what repair and training changed."""
    metric, dense, budgets = metrics.metric, metrics.dense, verdict.largest_first(metrics)

    def values(title: str, models: Sequence[Measured | None], name: str = metric) -> list[str]:
        return [title, *("–" if m is None else numbers.value(m.metrics[name], name) for m in models)]

    # Perplexity is of language models: of a classifier it is nobody's figure.
    hidden = {metric} | ({"perplexity"} - {metrics.curve_metric or metric})
    names = [metric, *(n for n in dense.metrics if n not in hidden)]
    flops = (f"{amounts.flops(b.flops, 4)} ({numbers.share_of(b.flops, dense.flops)})" for b in budgets)
    columns = [
        ["heads kept", f"{budgets[0].total} (dense)", *(str(b.kept) for b in budgets)],
        *(values(n, [dense, *(b.pruned for b in budgets)], n) for n in names),
        ["p", "", *("" if b.change.p_value is None else f"{b.change.p_value:.2g}" for b in budgets)],
        ["FLOPs", amounts.flops(dense.flops, 4), *flops],
    ]
    for i, change in enumerate(budgets[0].changes):
        changes = [b.changes[i] for b in budgets]
        texts = (f"{numbers.change(each, each.metric)}, {each.verdict}" for each in changes)
        columns.append([f"change of {change.metric} (95 %)", "", *texts])
    others: dict[str, list[Measured | None]] = {
        f"{metric} without repair": [b.repair.without if b.repair else None for b in budgets],
        "repaired layer by layer only": [*map(verdict.layers_alone, budgets)],
        "before training": [*map(verdict.untrained, budgets)] if verdict.trained(metrics) else [],
    }
    columns += [values(title, [None, *models]) for title, models in others.items() if any(models)]
    mean = "geometric mean" if metric_named(metric).relative else "mean"
    columns.append([f"random heads: {mean} of {len(budgets[0].random)} draws (range)", "–"])
    for b in budgets:
        middle = numbers.mean_of(b.random, metric)
        columns[-1].append(numbers.between(middle, min(b.random), max(b.random), metric))
    head, *rows = zip(*columns, strict=True)
    return Table(head, rows)


def answers_table(budget: BudgetResult, metric: str) -> Table:
    """The answers in texts that changed most, dense and pruned side by side."""
    rows = []
    for a in budget.answers:
        values = (numbers.value(v, metric) for v in (a.before, a.after))
        rows.append((str(a.row), " / ".join(a.reference), a.dense, a.pruned, *values))
    return Table(("row", "reference", "dense", "pruned", f"{metric}: dense", "pruned"), rows)


def left_out(metrics: Metrics) -> str:
    """The steps of repair that were tried and never kept; "" if there is none."""
    trials = [(b.kept, t) for b in verdict.largest_first(metrics) if b.repair for t in b.repair.trials]
    kept = [(size, trial.step) for size, trial in trials if trial.kept]
    steps = [f"{t.step} with {amounts.head_count(size)}" for size, t in trials if (size, t.step) not in kept]
    return listed(steps) if steps else ""


def fits_choosing(metrics: Metrics) -> bool:
    """Whether the last step of a repair was fitted to the choosing examples too."""
    return any(ALL_FITTED in note for budget in metrics.budgets if budget.repair for note in budget.repair.notes)


def repair_notes(metrics: Metrics) -> list[str]:
    """What could not be repaired, and why."""
    return notes_by_size([(b.kept, b.repair.notes) for b in verdict.largest_first(metrics) if b.repair])


_MUCH = 0.25  # the share of launch overhead that is worth a sentence


def rounds(metrics: Metrics) -> int:
    """How often every model was timed, at least."""
    return min(timing.runs for row in metrics.latency.rows for timing in row.timings.values())


def latency_table(rows: Sequence[LatencyRow]) -> Table:
    """Every model's time on every input, in milliseconds; the first model is the one that others are compared with."""
    body = []
    for row in rows:
        for name, timing in row.timings.items():
            faster = row.speedups.get(name)
            speedup = (numbers.ratio(faster), faster.verdict) if faster else ("", "")
            body.append((numbers.shape(row), name, f"{timing.median:.2f}", f"{timing.p95:.2f}", *speedup))
    return Table(("input", "model", "median, ms", "95th, ms", "speed-up (95 %)", "verdict"), body)


def time_table(rows: Sequence[TimeParts], metrics: Metrics | None = None) -> Table:
    """The parts of the dense model's time on every input; with ``metrics``, also each model's speed-up and its bound."""
    body = [["ms", *(f"{row.total:.2f}" for row in rows)]]
    body += [[part, *(f"{row.shares[part]:.1%}" for row in rows)] for part in rows[0].parts]
    body.append(["at most, without heads", *(f"{max(row.bounds.values()):.2f}x" for row in rows)])
    if metrics is not None:
        for b in verdict.largest_first(metrics):
            body.append([f"{b.name}: measured of possible", *(_gain(metrics, row, b.name) for row in rows)])
    return Table(["part", *map(numbers.shape, rows)], body)


def _gain(metrics: Metrics, row: TimeParts, name: str) -> str:
    """A model's measured speed-up on an input, beside the largest that its plan allows there."""
    timed = metrics.latency.rows
    speedups = next((r.speedups for r in timed if (r.batch, r.length) == (row.batch, row.length)), {})
    if name not in speedups or name not in row.bounds or row.factor_from(timed) > DISTURBED:
        return "not compared"
    gain, bound = speedups[name].ratio, row.bounds[name]
    return f"{gain:.2f}x of {bound:.2f}x"


def disturbance(row: TimeParts, timed: Sequence[LatencyRow]) -> str:
    """A warning if a breakdown took much longer or shorter than the timed passes (a busy machine); else ""."""
    median = row.timed(timed)
    if median is None or row.factor_from(timed) <= DISTURBED:
        return ""
    return (
        f"At {numbers.shape(row)} the machine was busy while the dense model's time was broken down: a pass took {row.total:.2f} ms, and "
        f"{median:.2f} ms where models were timed in turn. So the shares are rough; `headprune bench` measures both again."
    )


def conclusions(metrics: Metrics) -> str:
    """How to make the model faster, by the largest input and the one with most launch overhead; or why that is unknown."""
    rows = metrics.time
    if busy := [*filter(None, (disturbance(row, metrics.latency.rows) for row in rows))]:
        return " ".join(busy)
    row = max(rows, key=lambda row: (row.batch * max(1, row.length), row.total))
    attention = row.shares[PROJECTIONS] + row.shares[ATTENTION]
    others = {part: share for part, share in row.shares.items() if part not in (PROJECTIONS, ATTENTION)}
    beside = max(others, key=others.__getitem__)
    neurons = beside == "feed-forward" and others[beside] > attention
    text = (
        f"At {numbers.shape(row)}, {attention:.0%} of the dense model's time is attention and {others[beside]:.0%} {beside}: by this "
        f"estimate, removing every prunable head would give at most {max(row.bounds.values()):.2f}x"
        f"{'; pruning feed-forward neurons is the next thing to try' if neurons else ''}."
    )
    row = max(rows, key=lambda row: row.shares[LAUNCH])
    if row.shares[LAUNCH] >= _MUCH:
        share = f"{row.shares[LAUNCH]:.0%} is launch overhead, which pruning heads does not reduce"
        text += f" At {numbers.shape(row)}, {share}: use larger batches, or compile the model."
    return text


def generation_table(rows: Sequence[GenerationRow]) -> Table:
    """Every model's generation times on every prompt."""
    body = []
    for row in rows:
        for name, token in row.token.items():
            cells = []
            for timing, speedups in ((row.prefill[name], row.prefill_speedups), (token, row.token_speedups)):
                faster = speedups.get(name)
                cells += [f"{timing.median:.2f}", f"{numbers.ratio(faster)}, {faster.verdict}" if faster else ""]
            cells += [f"{row.tokens_per_second[name]:,.1f}", amounts.size(row.cache[name], 3)]
            body.append([numbers.shape(row), name, *cells])
    speedup = "speed-up (95 %)"
    head = ["prompt", "model", "prefill, ms", speedup, "per token, ms", speedup, "tokens per second", "cache per token"]
    return Table(head, body)


def exports_table(metrics: Metrics) -> Table:
    """The files that were written for other engines."""
    files = ((export, amounts.code(export.file) if export.file else "not written") for export in metrics.exports)
    return Table(("model", "written for", "file"), [(e.name, e.format, f"{file}: {e.summary}") for e, file in files])
