"""`headprune methods`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.cli.app import app
from headprune.cli.options import Manner, takes_options
from headprune.cli.session import session

if TYPE_CHECKING:
    from rich.table import Table


@app.command(epilog="Example: `headprune score MODEL -d DATASET --method fisher --method random`")
@takes_options
def methods(manner: Manner) -> None:
    """List the scoring methods, each with its unit, the planning strategies, and the formats of `headprune export`."""
    with session(manner) as console:
        from headprune.exporting import FORMATS
        from headprune.planning import STRATEGIES
        from headprune.scoring import METHODS

        found = [{"name": m.name, "about": m.about, "unit": m.unit} for m in METHODS.values()]
        strategies = [{"name": s.name, "about": s.about} for s in STRATEGIES.values()]
        formats = [{"name": f.name, "about": f.about} for f in FORMATS.values()]
        console.show(_table(found, "method", "what it is", "unit"))
        console.result("")
        console.show(_table(strategies, "strategy", "how heads are picked by their scores"))
        console.result("")
        console.show(_table(formats, "format", "what `headprune export --to` writes"))
        console.document({"methods": found, "strategies": strategies, "formats": formats})


def _table(rows: list[dict[str, str]], *columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table
