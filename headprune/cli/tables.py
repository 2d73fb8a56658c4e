"""What commands print: tables of scores, plans, results and timings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headprune.amounts import head_count

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from headprune.app.console import Console
    from headprune.app.documents import FinetuneRecord, Metrics, Run, TimeParts
    from headprune.app.runs import RunFolder
    from headprune.budgets import Fit
    from headprune.latency import LatencyRow
    from headprune.scoring import HeadScores
    from headprune.timing import GenerationRow


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[int] = ()) -> Table:
    """A table whose cells wrap between words in a narrow terminal, and never within a number."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    for column in zip(head, *rows, strict=True):
        table.add_column(
            column[0], overflow="fold", min_width=max(len(w) for cell in column for w in cell.split() or [""])
        )
    for i, row in enumerate(rows):
        table.add_row(*row, style="bold" if i in bold else None)
    return table


def print_scores(console: Console, scores: list[HeadScores]) -> None:
    from rich.table import Table

    from headprune.scoring.agreement import agreements, chance

    for s in scores:
        _print_heat(console, s, {})
    for s in scores:
        if s.caution:
            console.result(f"{s.method}: {s.caution}.")
        if s.stability:
            console.result(f"{s.method}: {s.stability}.")
    if not (pairs := agreements(scores)):
        return
    random = chance(len(scores[0].flat()))
    table = Table(title="Rank agreement", title_justify="left", box=None)
    for column in ("", "", "Spearman", "Kendall", "upper half in common"):
        table.add_column(column)
    for both in pairs:
        table.add_row(both.first, both.second, f"{both.spearman:.2f}", f"{both.kendall:.2f}", f"{both.top_half:.0%}")
    table.add_row(
        "random orders", "95 % within", f"±{random.spearman:.2f}", f"±{random.kendall:.2f}", f"{random.top_half:.0%}",
        style="dim",
    )  # fmt: skip
    console.result("")
    console.table(table)


def _print_heat(console: Console, s: HeadScores, drop: dict[str, list[int]]) -> None:
    from headprune.app.console import heat_map

    rows = [(f"L{a.index}", s.values[a.name].tolist(), drop.get(a.name, [])) for a in s.layers]
    console.result("")
    console.table(heat_map(f"{s.method}: {s.unit}; {s.basis}", rows, s.signed))


def print_plan(console: Console, fitted: Fit, scores: list[HeadScores], told: set[str]) -> None:
    """A plan, and those of its notes that were not told yet."""
    plan = fitted.plan
    notes = [note for note in plan.notes if note not in told]
    told.update(notes)
    for s in scores:
        if s.method == plan.method:
            _print_heat(console, s, plan.drop)
    by = ", ".join(filter(None, (plan.method, plan.strategy)))
    cost = f" Asked: {plan.budget}." if plan.budget else ""
    if fitted.budget is not None and (reading := fitted.reading) is not None:
        cost = f" Asked: {plan.budget}; measured: {fitted.budget.show(reading.value)}."
    console.result(f"{f'{by}: ' if by else ''}keeps {plan.kept} of {plan.total}.{cost} {' '.join(notes)}".rstrip())
    for name, heads in plan.drop.items():
        console.result(f"  {name}: drops {', '.join(f'H{h}' for h in heads)}")


def print_layers(console: Console, name: str, layers: list[Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: {sum(a.num_heads for a in layers)} heads", title_justify="left", box=None)
    for column in ("", "attention layer", "kind", "heads", "key/value", "width", "prunable"):
        table.add_column(column, overflow="fold")
    for a in layers:
        alone = "heads" if len(a.units[0]) == 1 else f"groups of {len(a.units[0])}"
        table.add_row(
            f"L{a.index}", a.name, a.kind, str(a.num_heads), str(a.num_kv_heads), str(a.head_dim),
            alone if a.prunable else f"no: {a.reason}",
        )  # fmt: skip
    console.table(table)


def print_pruned(console: Console, folder: RunFolder) -> None:
    from headprune.app.report.verdict import verdict

    metrics = folder.read_metrics()
    assert metrics is not None
    _print_results(console, folder.read_run(), metrics)
    console.result(f"\nReport: {folder.report_path}\nPage:   {folder.page_path}")
    for b in metrics.budgets:
        console.result(f"Model:  {folder.path / b.checkpoint}")
        print_loading(console, folder.path / b.checkpoint)
    for made in metrics.exports:
        told = (
            f"{folder.path / made.file}  {made.summary}"
            if made.file
            else f"not written for {made.name}: {made.summary}"
        )
        console.result(f"{made.format}: {told}")
    found = verdict(metrics)
    checkpoint = shlex.quote(str(folder.path / found.budget.checkpoint))
    ready = found.recommended or found.budget.finetune
    console.result(
        f"Next:   headprune {f'push {checkpoint} USER/NAME --dry-run' if ready else f'finetune {checkpoint}'}"
    )
    print_document(console, folder)


def print_loading(console: Console, folder: Path) -> None:
    """How a saved model loads, and why not without an option."""
    from headprune.checkpoint import load_call

    call = load_call(folder)
    console.result(f"        loads with {call.code()}")
    if call.why:
        console.say(f"The folder needs trust_remote_code=True: {call.why}")


def print_document(console: Console, folder: RunFolder) -> None:
    """A pruned run's metrics.json, if JSON was asked for."""
    from headprune.files import SCHEMA

    if metrics := folder.read_metrics():
        console.document({"folder": str(folder.path), "headprune": metrics.kind, "schema": SCHEMA, **metrics.to_json()})


def _print_results(console: Console, run: Run, metrics: Metrics) -> None:
    """What the report's first screen says, in the same words and figures."""
    from headprune.app.report import sentences
    from headprune.app.report.findings import where_time_goes
    from headprune.app.report.numbers import shape

    head, rows = sentences.table(metrics)
    shown = [i for i in sentences.Column if i.name != "RANDOM"]  # told below
    cells = [[row.cells[i] for i in shown] for row in rows]
    recommended = [i for i, row in enumerate(rows) if row.recommended]
    table = _table("Dense and pruned", [head[i] for i in shown], cells, recommended)
    console.result(f"\n{sentences.headline(run, metrics)}\n")
    for caution in sentences.cautions(run, metrics):
        console.result(f"Caution: {caution}\n")
    console.table(table)
    console.result(f"\n{sentences.rule(metrics)}\nBetter than random heads? {sentences.over_random(metrics)}")
    if told := sentences.precision(run, metrics):
        console.result(told)
    for line in sentences.elsewhere_rows(metrics):
        console.result(line)
    for b in metrics.budgets:
        if b.repair and (left_out := [t.step for t in b.repair.trials if not t.kept]):
            console.result(
                f"{head_count(b.kept)}: repair of {', '.join(left_out)} did no better on the choosing examples; left out."
            )
    print_latency(console, metrics.latency.rows)
    print_time(console, metrics.time, metrics.latency.rows)
    if goes := where_time_goes(metrics):
        for gain in goes.at_largest:
            console.result(
                f"{gain.name}, {shape(gain.row)}: {gain.achieved.ratio:.2f}x as fast; the most that this plan can gain is estimated at {gain.bound:.2f}x."
            )
    print_generation(console, metrics.generation)


def print_finetuned(console: Console, record: FinetuneRecord) -> None:
    from headprune.app.report.finetuned import rows

    head, *body = rows(record)
    console.result("")
    console.table(_table("Dense, pruned and fine-tuned, on the reporting part", head, body))
    console.result(f"Training: {record.changes.gain.verdict}.")


def print_latency(console: Console, rows: Sequence[LatencyRow]) -> None:
    from headprune.app.report.numbers import ratio, shape

    found = []
    for row in rows:
        where = shape(row)
        for name, timing in row.timings.items():
            faster = ratio(row.speedups[name]) if name in row.speedups else ""
            found.append((where, name, f"{timing.median:.2f}", f"{timing.p95:.2f}", faster))
            where = ""
    console.result("")
    head = ("input", "model", "median, ms", "95th", "speed-up (95 %)")
    console.table(_table("Latency of a forward pass, dense against pruned in turn", head, found))


def print_time(console: Console, rows: Sequence[TimeParts], timed: Sequence[LatencyRow]) -> None:
    if not rows:
        return
    from headprune.app.report.busy import disturbed
    from headprune.app.report.numbers import shape

    found = [("ms", *(f"{row.total:.2f}" for row in rows))]
    found += [(part, *(f"{row.shares[part]:.0%}" for row in rows)) for part in rows[0].shares]
    found.append(("at most, without heads", *(f"{max(row.bounds.values()):.2f}x" for row in rows)))
    console.result("")
    console.table(_table("Where the dense model's time goes", ("", *map(shape, rows)), found))
    for row in rows:
        if told := disturbed(row, timed):
            console.result(told)


def print_generation(console: Console, rows: Sequence[GenerationRow]) -> None:
    if not rows:
        return
    from headprune.app.report.numbers import cache, ratio, shape

    found = []
    for row in rows:
        where = shape(row)
        for name, token in row.token.items():
            faster = ratio(row.token_speedups[name]) if name in row.token_speedups else ""
            found.append((
                where, name, f"{row.prefill[name].median:.2f}", f"{token.median:.2f}", faster,
                f"{row.tokens_per_second[name]:,.1f}", cache(row.cache[name]),
            ))  # fmt: skip
            where = ""
    console.result("")
    head = ("prompt", "model", "prefill, ms", "ms per token", "speed-up (95 %)", "tokens/s", "cache per token")
    console.table(_table("Generation, dense against pruned in turn", head, found))
