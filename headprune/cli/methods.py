"""`headprune methods`."""

from __future__ import annotations

from headprune.cli.app import app
from headprune.cli.options import Manner, by_groups
from headprune.cli.session import session


@app.command(epilog="Example: `headprune score MODEL -d DATASET --method fisher --method random`")
@by_groups
def methods(manner: Manner) -> None:
    """List the scoring methods, each with its unit, and the planning strategies."""
    with session(manner) as console:
        from rich.table import Table

        from headprune.planning import STRATEGIES
        from headprune.scoring import METHODS

        table = Table(box=None)
        for column in ("method", "what it is", "unit"):
            table.add_column(column, overflow="fold")
        for m in METHODS.values():
            table.add_row(m.name, m.about, m.unit)
        console.table(table)
        table = Table(box=None)
        for column in ("strategy", "how heads are picked by their scores"):
            table.add_column(column, overflow="fold")
        for s in STRATEGIES.values():
            table.add_row(s.name, s.about)
        console.result("")
        console.table(table)
        console.document(
            {
                "methods": [{"name": m.name, "about": m.about, "unit": m.unit} for m in METHODS.values()],
                "strategies": [{"name": s.name, "about": s.about} for s in STRATEGIES.values()],
            }
        )
