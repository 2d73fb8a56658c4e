"""Shows attention in the terminal. Text from data is never markup; coloured text has its own background."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from headprune.app.documents import Heads, Sample, SampleLayer
from headprune.app.pictures import cells, resized
from headprune.app.seeing import by_role
from headprune.seeing import HeadProfile
from headprune.seeing.roles import MIXED, RULES, UNKNOWN

_SHORT = {rule.role: rule.short for rule in RULES} | {MIXED: "·", UNKNOWN: "?"}
_SHADES = " ░▒▓█"
_CUT = " (cut to be shown)"
_LEAST, _MOST = 4, 16  # columns of a head
_KEYS = 4  # keys named for each query, at most


def all_heads(heads: Heads, sample: Sample, width: int, colours: bool) -> Group:
    """All heads as small multiples, a row of them for each layer.

    Args:
        width: Columns of the terminal.
        colours: Whether the terminal shows colours.
    """
    lines: list[Text] = [Text(f"{sample.title}{_CUT if sample.shortened else ''}")] if sample.title else []
    for profile in heads.layers:
        layer = sample.layer(profile.index)
        if layer is None:
            continue
        tables = cells(sample, layer)
        each = max(_LEAST, min(_MOST, max(tables.shape[1:]), (width - 5) // len(tables) - 1))
        across = max(1, (width - 5) // (each + 1))
        for start in range(0, len(tables), across):
            some = range(start, min(start + across, len(tables)))
            rows = 2 * -(-each // 4) * (2 if each > 8 else 1)
            names = (f"H{h} {_short(profile.heads[h].role)}"[:each].ljust(each) for h in some)
            lines.append(Text(f"{'' if start else f'L{profile.index}':<4} {' '.join(names)}", "bold"))
            lines += _strip([resized(tables[h], rows, each) for h in some], colours)
    return Group(*lines)


def _strip(tables: list[NDArray[np.float32]], colours: bool) -> list[Text]:
    """Tables side by side, two rows of numbers in each line."""
    lines = []
    for r in range(0, len(tables[0]), 2):
        line = Text("     ")
        for table in tables:
            for top, bottom in zip(table[r], table[r + 1], strict=True):
                if colours:
                    line.append("▀", f"{_blue(top)} on {_blue(bottom)}")
                else:
                    line.append(_SHADES[min(4, int(np.sqrt(max(top, bottom)) * 5))])
            line.append(" ")
        lines.append(line)
    return lines


def one_head(sample: Sample, layer: SampleLayer, head: int, colours: bool) -> RenderableType:
    """One head: for each token what it attends to, and the text with its weights as backgrounds."""
    queries, keys = sample.positions[layer.queries], sample.positions[layer.keys]
    weights = layer.unpacked()[head]
    rows = range(len(queries.labels)) if layer.rows is None else layer.rows
    picture = colours and keys.grid is None
    columns = [Column(justify="right", no_wrap=True), Column(no_wrap=True), *([Column()] if picture else [])]
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for row, row_weights in zip(rows, weights, strict=True):
        largest = [j for j in np.argsort(-row_weights, kind="stable")[:_KEYS] if row_weights[j] >= 0.05]
        names = Text("  ").join(Text(f"{keys.labels[j]} {row_weights[j]:.0%}") for j in largest)
        shown = [Text(queries.labels[row], "bold"), names]
        if picture:
            painted = (Text(k, f"{_ink(w)} on {_blue(w)}") for k, w in zip(keys.labels, row_weights, strict=True))
            shown.append(Text(" ").join(painted))
        table.add_row(*shown)
    return table


def figures_of(profile: HeadProfile) -> Text:
    """A head's numbers, except its clarity, by their names in heads.json."""
    numbers = {name: value for name, value in vars(profile).items() if isinstance(value, int | float)}
    return Text(", ".join(f"{name} {value:.3g}" for name, value in numbers.items() if name != "clarity"))


def role_table(heads: Heads) -> Table:
    """Layers by heads, each with its role in short."""
    widest = max(len(layer.heads) for layer in heads.layers)
    table = Table("", *(f"H{h}" for h in range(widest)), box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for layer in heads.layers:
        roles = [Text(_short(profile.role), "dim" if profile.role == MIXED else "") for profile in layer.heads]
        table.add_row(f"L{layer.index}", *(roles or [Text("?")]))
    return table


def role_counts(heads: Heads) -> list[str]:
    """A line for each role, most frequent first: how many heads have it, and the clearest of them, in words."""
    return [f"{_short(role):>5}  {len(places):>3}  {role}, as {example}" for role, places, example in by_role(heads)]


def _short(role: str) -> str:
    return _SHORT.get(role, role)


def _blue(weight: float) -> str:
    """From near white to dark blue, by the square root of a weight."""
    share = float(np.sqrt(min(max(float(weight), 0.0), 1.0)))
    low, high = (244, 247, 252), (8, 48, 107)
    return "rgb({},{},{})".format(*(round(a + (b - a) * share) for a, b in zip(low, high, strict=True)))


def _ink(weight: float) -> str:
    return "rgb(255,255,255)" if weight > 0.39 else "rgb(0,0,0)"  # contrast of 4.5 or more
