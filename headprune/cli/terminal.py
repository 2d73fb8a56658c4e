"""What the user sees: results and tables on stdout, everything else on stderr. `app/report` makes the tables that a report has, too."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from headprune.amounts import visible
from headprune.files import dumps

if TYPE_CHECKING:
    from pathlib import Path

    from headprune.app.documents import Metrics, Run, TimeParts, ValueTable
    from headprune.app.report.content import Table
    from headprune.app.runs import RunFolder
    from headprune.app.workflow.scene import Scene
    from headprune.budgets import Fit
    from headprune.latency import GenerationRow, LatencyRow
    from headprune.scoring import HeadScores

_PIPED_WIDTH = 140  # columns where the output is not a terminal


class Terminal(RichConsole):
    """A console that shows the escape codes in labels and names, so that the terminal does not obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Rich's segments, with the escape codes in their text made visible; rich adds its own colours later."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


class Console:
    """stdout for results, stderr for the rest; ``quiet`` keeps stderr for errors."""

    def __init__(self, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet, self.as_json = quiet, as_json
        self.stdout = sys.stdout  # kept: sys.stdout may be redirected while a command runs
        self.out = Terminal(highlight=False, markup=False, emoji=False)
        self.err = Terminal(stderr=True, highlight=False, markup=False, emoji=False)
        if not self.out.is_terminal:
            self.out.width = _PIPED_WIDTH

    def say(self, *texts: str) -> None:
        """Print progress messages on stderr, unless quiet."""
        for text in texts if not self.quiet else ():
            self.err.print(Text(text), style="dim")

    def result(self, text: str) -> None:
        """Print a line of the result on stdout."""
        self.show(Text(text), soft_wrap=True)

    def show(self, renderable: RenderableType, soft_wrap: bool = False) -> None:
        """Print a part of the result, such as a table, unless JSON is asked for."""
        if not self.as_json:
            self.out.print(renderable, soft_wrap=soft_wrap)

    def document(self, data: Any) -> None:
        """Print the result as one JSON document, if --json was given."""
        if self.as_json and self.stdout is not None:  # None: it was closed before the command began (`>&-`)
            text, encoding = dumps(data), getattr(self.stdout, "encoding", None) or "utf-8"
            if encoding.lower() not in ("utf-8", "utf8"):  # JSON has escapes for what another encoding cannot hold
                text = json.dumps(json.loads(text), indent=1)
            self.stdout.write(text + "\n")
            self.stdout.flush()

    @contextmanager
    def track(self, label: str) -> Iterator[Any]:
        """A progress bar with the time left; yields ``progress(done, total, note="")``."""
        if self.quiet or not self.err.is_terminal:
            self.say(f"{label} …")
            yield lambda done, total, note="": None
            return
        # In a narrow terminal the label is cut, not the time left.
        one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        text = TextColumn("{task.description}", markup=False, table_column=one_line)
        columns = (text, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # The time left is estimated from all steps: a step may take minutes.
        with Progress(*columns, console=self.err, transient=True, expand=True, speed_estimate_period=math.inf) as bars:
            task = bars.add_task(label, total=None)

            def update(done: int, total: int, note: str = "") -> None:
                text = f"{label} ({note})" if note else label
                bars.update(task, completed=done, total=total, description=text)

            yield update


# -- tables ----------------------------------------------------------------------------------------------


def print_table(console: Console, title: str, content: Table) -> None:
    """Print a table whose cells wrap between words in a narrow terminal, and never within a number."""
    from rich.table import Table

    columns = list(zip(content.head, *content.rows, strict=True))
    widths = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    wanted = [max(map(len, column)) for column in columns]
    # Rich narrows the widest columns first, also below a number's width, and then cuts the lines.
    for _ in range(console.out.width - sum(widths) - 2 * len(columns)):
        narrow = max(range(len(columns)), key=lambda i: wanted[i] - widths[i])
        widths[narrow] += wanted[narrow] > widths[narrow]
    table = Table(title=title, title_justify="left", box=None)
    for head, width in zip(content.head, widths, strict=True):
        table.add_column(head, overflow="fold", width=width)
    for i, row in enumerate(content.rows):
        table.add_row(*row, style="bold" if i == content.strong else None)
    console.result("")
    console.show(table)


def print_scores(console: Console, scores: list[HeadScores]) -> None:
    from headprune.app.report.heads import agreement_table

    for s in scores:
        _print_heat(console, s, {})
    for s in scores:
        for note in filter(None, (s.caution, s.stability)):
            console.result(f"{s.method}: {note}.")
    if pairs := agreement_table(scores):
        print_table(console, "Rank agreement", pairs)


def _print_heat(console: Console, s: HeadScores, drop: dict[str, list[int]]) -> None:
    from headprune.app.pictures import heat_map

    console.result("")
    console.show(heat_map(s, drop))


def print_plans(console: Console, fits: Sequence[Fit], scores: Sequence[HeadScores]) -> None:
    """Print plans with their notes, each note once."""
    printed: set[str] = set()
    for fit in fits:
        plan = fit.plan
        for s in scores:
            if s.method == plan.method:
                _print_heat(console, s, plan.drop)
        line = f"{', '.join(filter(None, (plan.method, plan.strategy)))}: keeps {plan.kept} of {plan.total}."
        if plan.budget:
            measured = f"; measured: {fit.budget.show(fit.reading.value)}" if fit.budget and fit.reading else ""
            line += f" Asked: {plan.budget}{measured}."
        console.result(" ".join([line.removeprefix(": "), *(note for note in plan.notes if note not in printed)]))
        printed.update(plan.notes)
        for name, heads in plan.drop.items():
            console.result(f"  {name}: drops {', '.join(f'H{h}' for h in heads)}")


def print_dry_run(console: Console, scene: Scene, methods: Sequence[str], folder: Path, doing: str, cost: str) -> None:
    """Print what a run would do if it has no plan yet: the layers, and the cost."""
    from headprune import documents
    from headprune.app.documents import Cut

    print_layers(console, scene.model, scene.layers)
    console.result(f"Would {doing}. {cost} Nothing was written.")
    console.document({
        "folder": str(folder), "methods": list(methods), "parts": documents.to_json(Cut.of(scene.parts)),
        "layers": [layer.to_json() for layer in scene.layers],
    })  # fmt: skip


def print_layers(console: Console, model: Any, layers: list[Any]) -> None:
    from headprune.app.report.content import Table
    from headprune.pruned import ghosts

    rows = []
    for a in layers:
        unit = "heads" if len(a.units[0]) == 1 else f"groups of {len(a.units[0])}"
        numbers = (str(number) for number in (a.num_heads, a.num_kv_heads, a.head_dim))
        rows.append((f"L{a.index}", a.name, a.kind, *numbers, unit if a.prunable else f"no: {a.reason}"))
    head = ("", "attention layer", "kind", "heads", "key/value", "width", "prunable")
    heads = sum(a.num_heads for a in layers if a.name not in ghosts(model))
    print_table(console, f"{type(model).__name__}: {heads} heads", Table(head, rows))


def print_pruned(console: Console, folder: RunFolder) -> None:
    """Print the report's first screen, the times, and the paths of report and models."""
    from headprune.app.report import verdict

    metrics = folder.read_metrics()
    assert metrics is not None
    _print_summary(console, folder.read_run(), metrics)
    for table in metrics.tasks:
        print_values(console, table)
    print_times(console, metrics.latency.rows, metrics.time, metrics.generation, metrics)
    console.result(f"\nReport: {folder.report_path}\nPage:   {folder.page_path}")
    for b in metrics.budgets:
        console.result(f"Model:  {folder.path / b.checkpoint}")
        print_loading(console, folder.path / b.checkpoint)
    for export in metrics.exports:
        path = f"{folder.path / export.file} " if export.file else f"not written for {export.name}:"
        console.result(f"{export.format}: {path} {export.summary}")
    result = verdict.judge(metrics)
    checkpoint = shlex.quote(str(folder.path / result.budget.checkpoint))
    ready = result.recommended or result.budget.finetune
    following = f"push {checkpoint} USER/NAME --dry-run" if ready else f"finetune {checkpoint}"
    console.result(f"Next:   headprune {following}")
    print_document(console, folder)


def _print_summary(console: Console, run: Run, metrics: Metrics) -> None:
    """Print the report's first screen, without what is printed elsewhere, and the section on other data."""
    from headprune.app.report import measured, verdict

    console.result(f"\n{verdict.headline(run, metrics)}")
    for text in verdict.cautions(run, metrics):
        console.result(f"\nCaution: {text}")
    print_table(console, "Dense and pruned", measured.sizes_table(metrics))
    lines = (verdict.rule(metrics), verdict.over_random_line(metrics), verdict.precision(run, metrics))
    console.result("\n" + "\n".join(filter(None, lines)))
    if metrics.also:
        print_table(console, "On other data", measured.other_table(metrics))


def print_values(console: Console, table: ValueTable) -> None:
    """Print the metrics of models on one dataset or task."""
    from headprune.app.report.measured import values_table

    of = f"{table.examples:,} examples ({table.data.split})" if table.data else f"{table.examples:,} documents"
    print_table(console, f"{table.name}: {of}", values_table(table))
    for note in table.notes:
        console.result(note)


def print_loading(console: Console, folder: Path) -> None:
    """Print how to load a saved model, and why that needs an option, if it does."""
    from headprune.checkpoint import load_call

    loading = load_call(folder)
    console.result(f"        loads with {loading.code()}")
    if loading.why:
        console.say(f"The folder needs trust_remote_code=True: {loading.why}")


def print_document(console: Console, folder: RunFolder) -> None:
    """Print a pruned run's metrics.json, if JSON was asked for."""
    from headprune.files import SCHEMA

    if metrics := folder.read_metrics():
        console.document({"folder": str(folder.path), "headprune": metrics.kind, "schema": SCHEMA, **metrics.to_json()})


def print_times(
    console: Console, rows: Sequence[LatencyRow], parts: Sequence[TimeParts] = (), generation: Sequence[GenerationRow] = (),
    metrics: Metrics | None = None,
) -> None:  # fmt: skip
    """Print the measured latency, where the dense model's time goes, and how fast models generate."""
    from headprune.app.report.measured import disturbance, generation_table, latency_table, time_table

    print_table(console, "Latency of a forward pass, models in turn", latency_table(rows))
    if parts:
        print_table(console, "Where the dense model's time goes", time_table(parts, metrics))
        for text in filter(None, (disturbance(part, rows) for part in parts)):
            console.result(text)
    if generation:
        print_table(console, "Generation, models in turn", generation_table(generation))
