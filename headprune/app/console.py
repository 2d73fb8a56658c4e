"""What the user sees: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from headprune.amounts import visible
from headprune.files import dumps

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
