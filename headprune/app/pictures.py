"""Figures and images as files and data URIs; attention as a figure (report, `headprune show`), and it and scores in a terminal."""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from headprune.app.documents import Heads, Positions, Sample, SampleLayer, by_role
from headprune.files import write_file
from headprune.scoring.scores import HeadScores
from headprune.seeing import MIXED, RULES, UNKNOWN, HeadProfile

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # imported only where one is drawn

Drawing: TypeAlias = "Figure"

_COLOURS = 256  # in a PNG: a third of the bytes, and no visible difference
_SIDE = 96  # pixels along the longer side of an image in a document
# The frame around a head: one colour for a family of roles; Okabe and Ito's, which colour-blind readers can tell apart.
_OF_ROLES = {
    "previous token": "#0072B2", "next token": "#56B4E9", "relative position": "#56B4E9", "itself": "#F0E442", "same token": "#F0E442",
    "separator": "#D55E00", "first token": "#D55E00", "sink": "#D55E00", "induction": "#009E73", "duplicate token": "#009E73",
    "rare words": "#CC79A7", "broad": "#E69F00", "near": "#332288", MIXED: "#bbbbbb",
}  # fmt: skip
_CELL, _FRAME, _GAP = 44, 3, 5  # pixels


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Drawing, list[Any]]:
    """A matplotlib figure of a size in inches, and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def png(figure: Drawing) -> bytes:
    """A figure as a PNG file; the same figure gives the same bytes."""
    drawn = Image.open(io.BytesIO(_drawn(figure, "png"))).convert("RGB")
    return _as_png(drawn.quantize(_COLOURS, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE))


def _drawn(figure: Drawing, form: str) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=form)
    return file.getvalue()


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def save(figure: Drawing, path: Path) -> None:
    """Write a figure to a ``.png``, ``.svg`` or ``.pdf`` file, whole or not at all."""
    form = path.suffix.lower().removeprefix(".")
    write_file(path, png(figure) if form == "png" else _drawn(figure, form))


def as_uri(pixels: Tensor) -> str:
    """An image as a model sees it, its values stretched from black to white, as a ``data:`` URI of a PNG."""
    values = pixels[: 3 if len(pixels) >= 3 else 1].detach().float().cpu()
    low, high = float(values.min()), float(values.max())
    levels = ((values - low) / max(high - low, 1e-9) * 255).round().byte().numpy()
    picture = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    factor = _SIDE / max(picture.size)
    size = tuple(max(1, round(n * factor)) for n in picture.size)
    picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR)
    return f"data:image/png;base64,{base64.b64encode(_as_png(picture)).decode()}"


def from_uri(uri: str) -> Any:
    """The pixels of an image that `as_uri` made."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


# -- attention: tables of numbers, and these as pictures ------------------------------------------------


def cells(sample: Sample, layer: SampleLayer) -> NDArray[np.float32]:
    """A table for each head: queries by keys; or, if only some of an image's rows are stored, the first position's attention
    to the patches, as rows by columns of the image, each head scaled to its largest weight.
    """
    weights = layer.unpacked()
    grid = sample.positions[layer.keys].grid
    if layer.rows is None or grid is None:
        return weights
    patches = weights[:, 0, -grid[0] * grid[1] :]
    scaled: NDArray[np.float32] = patches / np.maximum(patches.max(axis=1, keepdims=True), 1e-9)
    return scaled.reshape(-1, *grid)


def resized(table: NDArray[np.float32], rows: int, columns: int) -> NDArray[np.float32]:
    """A table resized to ``rows`` by ``columns``; a new cell has the largest value it covers, so lines stay visible."""
    for axis, wanted in ((0, rows), (1, columns)):
        table = np.maximum.reduceat(table, np.arange(wanted) * table.shape[axis] // wanted, axis=axis)
    return table


def figure_of_all(heads: Heads, sample: Sample, drop: Mapping[str, Sequence[int]] | None = None) -> Drawing:
    """All heads as small multiples: a row for each layer, keys to the right and queries down, a frame for each role.

    Args:
        drop: Heads to cross out, by layer.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    rows = [(profile, layer) for profile in heads.layers if (layer := sample.layer(profile.index)) is not None]
    widest = max(len(profile.heads) for profile, _ in rows)
    size = _CELL + 2 * _FRAME
    step = size + _GAP
    canvas = np.ones((len(rows) * step, widest * step, 3), np.float32)
    roles: list[str] = []
    for i, (profile, layer) in enumerate(rows):
        for h, table in enumerate(cells(sample, layer)):
            roles.append(profile.heads[h].role)
            tile = canvas[i * step : i * step + size, h * step : h * step + size]
            tile[:] = to_rgb(_OF_ROLES.get(roles[-1], _OF_ROLES[MIXED]))
            shown = np.sqrt(np.clip(resized(table, _CELL, _CELL), 0, 1))  # the root, so that small weights can be seen
            tile[_FRAME:-_FRAME, _FRAME:-_FRAME] = colormaps["Blues"](shown)[..., :3]
    figure, (axis,) = new_figure(1.3 + widest * 0.5, 1.5 + len(rows) * 0.5)
    axis.imshow(canvas, interpolation="nearest")
    if crosses := [(h * step, i * step) for i, (p, _) in enumerate(rows) for h in (drop or {}).get(p.name, ())]:
        style: dict[str, Any] = {"color": "black", "markersize": 20, "markeredgewidth": 1.4, "alpha": 0.75, "ls": ""}
        axis.plot(*(np.array(crosses).T + size / 2), "x", **style)
    across, down = ([i * step + step / 2 for i in range(count)] for count in (widest, len(rows)))
    axis.set_xticks(across, [f"H{h}" for h in range(widest)], fontsize=7)
    axis.set_yticks(down, [f"L{profile.index}" for profile, _ in rows], fontsize=7)
    axis.tick_params(length=0)
    axis.xaxis.tick_top()
    axis.spines[:].set_visible(False)
    legend = [
        Patch(color=_OF_ROLES.get(r, _OF_ROLES[MIXED]), label=f"{r} ({n})") for r, n in Counter(roles).most_common()
    ]
    columns = max(1, min(len(legend), int((1.3 + widest * 0.5) / 1.5)))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.01), "fontsize": 7, "frameon": False}
    axis.legend(handles=legend, ncols=columns, **below)
    _titled(axis, sample.title)
    return figure


def figure_of_head(sample: Sample, layer: SampleLayer, head: int, title: str) -> Drawing:
    """One head, large: queries down, keys to the right; for a large image, the attention of the stored positions."""
    queries, keys = sample.positions[layer.queries], sample.positions[layer.keys]
    weights = layer.unpacked()[head]
    if layer.rows is not None and keys.grid is not None:
        return _figure_of_patches(queries, keys, layer.rows, weights, title)
    rows = range(len(queries.labels)) if layer.rows is None else layer.rows
    figure, (axis,) = new_figure(2.6 + 0.2 * max(len(keys.labels), 6), 1.9 + 0.2 * max(len(rows), 6))
    image = axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="equal")
    plain: dict[str, Any] = {"fontsize": 7, "parse_math": False}
    axis.set_xticks(range(len(keys.labels)), keys.labels, rotation=90, **plain)
    axis.set_yticks(range(len(rows)), [queries.labels[r] for r in rows], **plain)
    axis.set_xlabel("attends to", fontsize=8)
    axis.set_ylabel("token" if keys.grid is None else "position", fontsize=8)
    _titled(axis, title)
    figure.colorbar(image, ax=axis, shrink=0.7).set_label("attention weight", fontsize=8)
    return figure


def _figure_of_patches(queries: Positions, keys: Positions, rows: Sequence[int], weights: Any, title: str) -> Drawing:
    assert keys.grid is not None
    count = keys.grid[0] * keys.grid[1]
    figure, axes = new_figure(2.2 * (len(rows) + 1), 2.9, columns=len(rows) + 1)
    if keys.image:
        axes[0].imshow(from_uri(keys.image), cmap="gray")
    axes[0].set_title("the image", fontsize=8)
    top = float(weights[:, -count:].max()) or 1.0
    for axis, row, row_weights in zip(axes[1:], rows, weights, strict=True):
        image = axis.imshow(row_weights[-count:].reshape(keys.grid), cmap="Blues", vmin=0, vmax=top)
        axis.set_title(f"from {queries.labels[row]}", fontsize=8, parse_math=False)
        place = row - (len(queries.labels) - count)
        if place >= 0 and queries.grid == keys.grid:
            axis.plot(place % keys.grid[1], place // keys.grid[1], "x", color="#D55E00")
    for axis in axes:
        axis.set_axis_off()
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("attention weight", fontsize=8)
    figure.suptitle(title, fontsize=9, parse_math=False)
    return figure


def _titled(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=8, loc="left", wrap=True, parse_math=False)


# -- in a terminal: text from data is never markup; coloured text has its own background ---------------------

_SHORT = {rule.role: rule.short for rule in RULES} | {MIXED: "·", UNKNOWN: "?"}
_SHADES = " ░▒▓█"
_LEAST, _MOST = 4, 16  # columns of a head
_KEYS = 4  # keys named for each query, at most
_WIDE = 16  # heads per layer up to which the heat map shows numbers


def all_heads(heads: Heads, sample: Sample, width: int, colours: bool) -> Group:
    """All heads as small multiples, a row of them for each layer.

    Args:
        width: Columns of the terminal.
        colours: Whether the terminal shows colours.
    """
    lines: list[Text] = [Text(sample.title)] if sample.title else []
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
    texts = {name: f"{value:,}" if isinstance(value, int) else f"{value:.3g}" for name, value in numbers.items()}
    return Text(", ".join(f"{name} {text}" for name, text in texts.items() if name != "clarity"))


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


def heat_map(scores: HeadScores, drop: Mapping[str, Sequence[int]]) -> Table:
    """Scores, layers by heads, coloured by rank in the model: dark blue matters, red harms (if a score below 0 means that).

    Args:
        drop: Heads to cross out, by layer.
    """
    rows = {layer: scores.values[layer.name].tolist() for layer in scores.layers}
    ranked = sorted(value for row in rows.values() for value in row)
    largest = max(map(abs, ranked))
    # Values below 1 are divided by a power of ten, in steps of three, so that the largest is at least 1.
    exponent = max(3 * math.floor(math.log10(largest) / 3), -12) if 0 < largest < 1 else 0
    widest = max(map(len, rows.values()))
    numbers = widest <= _WIDE
    title = f"{scores.method}: {scores.unit}; {scores.basis}{f', in 1e{exponent}' * (numbers and exponent < 0)}"
    columns = (Column(f"H{h}" if numbers else str(h % 10), justify="right") for h in range(widest))
    table = Table("", *columns, title=title, title_justify="left", box=None, padding=0, pad_edge=False)
    for layer, row in rows.items():
        cells = []
        for h, value in enumerate(row):
            shade = int(235 - 150 * ranked.index(value) / max(len(ranked) - 1, 1))
            colour = f"rgb({shade},{shade},255)" if value >= 0 or not scores.signed else "rgb(255,170,150)"
            cross = "x" if h in drop.get(layer.name, ()) else ""
            text = f"{cross}{value / 10**exponent:.1f}" if numbers else cross or " "
            cells.append(Text(f" {text} ", style=f"black on {colour}"))
        table.add_row(f"L{layer.index} ", *cells)
    return table


def _short(role: str) -> str:
    return _SHORT.get(role, role)


def _blue(weight: float) -> str:
    """From near white to dark blue, by the square root of a weight."""
    share = float(np.sqrt(min(max(float(weight), 0.0), 1.0)))
    low, high = (244, 247, 252), (8, 48, 107)
    return "rgb({},{},{})".format(*(round(a + (b - a) * share) for a, b in zip(low, high, strict=True)))


def _ink(weight: float) -> str:
    return "rgb(255,255,255)" if weight > 0.39 else "rgb(0,0,0)"  # contrast of 4.5 or more
