"""What pruning costs and gains: every metric, other data, repair, and times of forward passes, written text and other engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headprune import amounts
from headprune.amounts import code, head_count
from headprune.app.documents import DISTURBED, BudgetResult, Measured, Metrics, Run, TimeParts
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Block, Section, Table, listed, notes_by_size
from headprune.latency import WARM_UP, LatencyRow
from headprune.timing import ATTENTION, LAUNCH, PROJECTIONS

if TYPE_CHECKING:
    from headprune.decoding import GenerationRow


def other_data(run: Run, metrics: Metrics) -> Section | None:
    """Second datasets, that nothing was fitted to."""
    if not metrics.also:
        return None
    metric, budgets = metrics.metric, verdict.largest_first(metrics)
    repairs = any(b.repair for b in budgets)
    effect = ["effect of repair"] if repairs else ["effect of training"] * verdict.trained(metrics)
    rows = []
    for i, data in enumerate(metrics.also):
        name = f"{code(data.name)}, {data.data.examples:,} examples"
        dense = (name, f"{budgets[0].total} (dense)", numbers.interval(data.dense, metric), "", "", "")
        rows.append(dense[: 5 + len(effect)])
        for b in budgets:
            there = b.also[i]
            gain = f"{numbers.change(there.gain, metric)}, {there.gain.verdict}" if there.gain else "–"
            value, change = numbers.interval(there.pruned, metric), numbers.change(there.change, metric)
            rows.append((name, str(b.kept), value, change, there.change.verdict, gain)[: 5 + len(effect)])
    head = ["data", "heads kept", f"{metric} (95 %)", "change (95 %)", "verdict", *effect]
    what = "pruning and repair generalise" if repairs else "pruning generalises"
    sentence = (
        f"None of this data was used to score, to choose or to fit, so it shows how {what} beyond the first dataset."
    )
    return Section("On other data", [sentence, Table(head, rows)])


def all_metrics(run: Run, metrics: Metrics) -> Section:
    """Every metric with p-values and FLOPs, and the run's own metric without what repair and training changed."""
    metric, dense, budgets = metrics.metric, metrics.dense, verdict.largest_first(metrics)
    repairs, trained = [b.repair for b in budgets], verdict.trained(metrics)

    def values(title: str, models: Sequence[Measured | None], name: str = metric) -> list[str]:
        return [title, *("–" if m is None else numbers.value(m.metrics[name], name) for m in models)]

    names = [metric, *(n for n in numbers.METRICS if n in dense.metrics and n != metric)]
    flops = (f"{amounts.flops(b.flops, 4)} ({numbers.share_of(b.flops, dense.flops)})" for b in budgets)
    columns = [
        ["heads kept", f"{budgets[0].total} (dense)", *(str(b.kept) for b in budgets)],
        *(values(numbers.METRICS.get(n, n), [dense, *(b.pruned for b in budgets)], n) for n in names),
        ["p", "", *("" if b.change.p_value is None else f"{b.change.p_value:.2g}" for b in budgets)],
        ["FLOPs", amounts.flops(dense.flops, 4), *flops],
    ]
    if any(repairs):
        columns.append(values(f"{metric} without repair", [None, *(r.without if r else None for r in repairs)]))
    if any(map(verdict.by_cheaper_repair, budgets)):
        columns.append(
            values("repaired layer by layer only", [None, *(r.layers_alone if r else None for r in repairs)])
        )
    if trained:
        columns.append(values("before training", [None, *map(verdict.untrained, budgets)]))
    head, *rows = zip(*columns, strict=True)
    sentence = (
        f"p: of the change of {metric}, by the test that gives its interval. FLOPs: one example of median length."
    )
    notes = notes_by_size([(b.kept, b.repair.notes) for b in budgets if b.repair])
    changed = " and what repair and training gained" if trained else " and what repair gained" if any(repairs) else ""
    summary = f"Every metric, with p-values and FLOPs{',' * bool(changed)}{changed}"
    return Section("All metrics", (), summary, [Table(head, rows), sentence, *_changes(budgets), *notes])


def _changes(budgets: Sequence[BudgetResult]) -> Iterator[str]:
    """How the remaining weights were changed."""
    if first := next((b.repair for b in budgets if b.repair), None):
        mixtures = f" and {first.mixtures:,} mixtures of them (the first half of one text, the second of another)"
        left_out = [
            f"{t.step} with {head_count(b.kept)}" for b in budgets if b.repair for t in b.repair.trials if not t.kept
        ]
        yield (
            f"Repair fits the kept heads' weights by least squares, on the {first.examples:,} scoring examples"
            f"{mixtures if first.mixtures else ''}, to what the dense model computes there, without labels or training. A step is kept only if it "
            "brings the model nearer to the dense one's answers on the choosing examples (`repair.trials` in `metrics.json`)"
            f"{f'; left out: {listed(left_out)}' if left_out else ''}."
        )
    if tuning := next((b.finetune for b in budgets if b.finetune), None):
        yield (
            f"Fine-tuned on {tuning.examples:,} examples for {tuning.options.epochs:g} epoch{'s' * (tuning.options.epochs != 1)}, with "
            "distillation from the dense model; the choosing part decided which epoch is kept."
        )


_MUCH = 0.25  # the share of launch overhead that is worth a sentence


def latency(run: Run, metrics: Metrics) -> Section:
    """Every input that was timed."""
    environment, bound = metrics.environment or run.environment, metrics.latency.bound
    clock = "CUDA events" if environment.device.startswith("cuda") else "a monotonic clock"
    blocks: list[Block] = [
        latency_table(metrics.latency.rows),
        f"One forward pass, by {clock}, on {numbers.device(environment, run.model.dtype)}, after {WARM_UP} rounds of warm-up; the models "
        "take turns in every round; 95th: the percentile. Speed-up: the median over rounds of dense time / pruned time, with a distribution-free interval.",
    ]
    if bound:
        ghosts = metrics.latency.bound_ghosts
        ghost = f" In {ghosts} of its layers one head (or group) stays, with zero output." if ghosts else ""
        blocks.append(f"“{bound}” is this model with every prunable head removed: no plan can gain more.{ghost}")
    return Section("Latency", (), "Every input that was timed", blocks)


def latency_table(rows: Sequence[LatencyRow]) -> Table:
    """Every model's time on every input, in milliseconds; the first model is the one that others are compared with."""
    body = []
    for row in rows:
        for name, timing in row.timings.items():
            faster = row.speedups.get(name)
            speedup = (numbers.ratio(faster), faster.verdict) if faster else ("", "")
            body.append((numbers.shape(row), name, f"{timing.median:.2f}", f"{timing.p95:.2f}", *speedup))
    return Table(("input", "model", "median, ms", "95th, ms", "speed-up (95 %)", "verdict"), body)


def time(run: Run, metrics: Metrics) -> Section | None:
    """What the dense model spends its time on, and so the most that a plan can gain."""
    rows, timed = metrics.time, metrics.latency.rows
    if not rows:
        return None
    sentences = [text for row in rows if (text := disturbance(row, timed))] or [*_conclusions(rows)]
    on_gpu = (metrics.environment or run.environment).device.startswith("cuda")
    stand_ins = " PyTorch's fused attention cannot be broken down, so plain operations replaced it here."
    how = (
        f"By PyTorch's profiler, medians over passes. Launch overhead: {'the GPU waits' if on_gpu else 'Python and PyTorch work'}, and no "
        "operation runs. Possible gain (Amdahl's law): the removed heads' share of attention and its projections takes no time, and all else "
        f"as long as before; smaller matrices may gain more.{stand_ins if rows[0].stand_ins else ''}"
    )
    summary = "Every input, and what each plan gained of what is possible"
    return Section("Where the time goes", [" ".join(sentences)], summary, [time_table(rows, metrics), how])


def time_table(rows: Sequence[TimeParts], metrics: Metrics | None = None) -> Table:
    """The parts of the dense model's time on every input; and if models were timed, each one's gain beside the possible one."""
    body = [["ms", *(f"{row.total:.2f}" for row in rows)]]
    body += [[part, *(f"{row.shares[part]:.1%}" for row in rows)] for part in rows[0].parts]
    body.append(["at most, without heads", *(f"{max(row.bounds.values()):.2f}x" for row in rows)])
    if metrics is not None:
        for b in verdict.largest_first(metrics):
            body.append([f"{b.name}: measured of possible", *(_gain(metrics, row, b.name) for row in rows)])
    return Table(["part", *map(numbers.shape, rows)], body)


def _gain(metrics: Metrics, row: TimeParts, name: str) -> str:
    """How many times as fast a model is on an input, of the most that its plan can give there."""
    timed = metrics.latency.rows
    speedups = next((r.speedups for r in timed if (r.batch, r.length) == (row.batch, row.length)), {})
    if name not in speedups or name not in row.bounds or row.factor_from(timed) > DISTURBED:
        return "not compared"
    gain, bound = speedups[name].ratio, row.bounds[name]
    return f"{gain:.2f}x of {bound:.2f}x ({gain / bound:.0%})"


def disturbance(row: TimeParts, timed: Sequence[LatencyRow]) -> str:
    """That other work on the machine kept a breakdown from being like the timed passes of the same model; "" where they are alike."""
    median = row.timed(timed)
    if median is None or row.factor_from(timed) <= DISTURBED:
        return ""
    return (
        f"At {numbers.shape(row)} the machine was busy while the dense model's time was broken down: a pass took {row.total:.2f} ms, and "
        f"{median:.2f} ms where models were timed in turn. So the shares are rough; `headprune bench` measures both again."
    )


def _conclusions(rows: Sequence[TimeParts]) -> Iterator[str]:
    """What the largest input says to somebody who wants the model faster, and the one with most launch overhead."""
    row = max(rows, key=lambda row: (row.batch * max(1, row.length), row.total))
    attention = row.shares[PROJECTIONS] + row.shares[ATTENTION]
    others = {part: share for part, share in row.shares.items() if part not in (PROJECTIONS, ATTENTION)}
    beside = max(others, key=others.__getitem__)
    neurons = beside == "feed-forward" and others[beside] > attention
    yield (
        f"At {numbers.shape(row)}, {attention:.0%} of the dense model's time is attention and {others[beside]:.0%} {beside}: by this "
        f"estimate, removing every prunable head gives {max(row.bounds.values()):.2f}x"
        f"{'; pruning feed-forward neurons is the next thing to try' if neurons else ''}."
    )
    row = max(rows, key=lambda row: row.shares[LAUNCH])
    if row.shares[LAUNCH] >= _MUCH:
        share = f"{row.shares[LAUNCH]:.0%} is launch overhead, which pruning heads does not reduce"
        yield f"At {numbers.shape(row)}, {share}: use larger batches, or compile the model."


def generation(run: Run, metrics: Metrics) -> Section | None:
    """How fast models write text."""
    if not metrics.generation:
        return None
    new = metrics.generation[0].new
    sentence = f"Greedy, models in turn, {new} tokens after the first one. Cache: keys and values of one sequence, in all layers."
    return Section("Written text", [generation_table(metrics.generation), sentence])


def generation_table(rows: Sequence[GenerationRow]) -> Table:
    """Every model's times on every prompt."""
    body = []
    for row in rows:
        for name, token in row.token.items():
            cells = []
            for timing, speedups in ((row.prefill[name], row.prefill_speedups), (token, row.token_speedups)):
                cells += [f"{timing.median:.2f}", numbers.ratio(speedups[name]) if name in speedups else ""]
            cells += [f"{row.tokens_per_second[name]:,.1f}", amounts.size(row.cache[name], 3)]
            body.append([numbers.shape(row), name, *cells])
    speedup = "speed-up (95 %)"
    head = ["prompt", "model", "prefill, ms", speedup, "per token, ms", speedup, "tokens per second", "cache per token"]
    return Table(head, body)


def engines(run: Run, metrics: Metrics) -> Section | None:
    """The files that were written for other engines, and their times there."""
    if not metrics.exports:
        return None
    files = [code(export.file) if export.file else "not written" for export in metrics.exports]
    rows = [(e.name, e.format, f"{file}: {e.summary}") for e, file in zip(metrics.exports, files, strict=True)]
    blocks: list[Block] = [Table(("model", "written for", "file"), rows)]
    for engine in metrics.engines:
        blocks += [f"{engine.format}, timed as above, in its engine on the CPU:", latency_table(engine.rows)]
    blocks += dict.fromkeys(note for export in metrics.exports for note in export.notes)
    return Section("In other engines", (), "The files for other engines, and their times there", blocks)
