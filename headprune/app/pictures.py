"""Pictures as files and in documents: what the report's figures and those of `headprune show` share."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image
from torch import Tensor

from headprune.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # imported only where one is drawn

Drawing: TypeAlias = "Figure"

_COLOURS = 256  # of a PNG: two thirds fewer bytes, and no difference to the eye
_SIDE = 96  # pixels that an image of a document has, about


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Drawing, list[Any]]:
    """A matplotlib figure of so many inches and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def png(figure: Drawing) -> bytes:
    """A figure as a PNG file; the same figure gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    size = canvas.get_width_height()
    picture = Image.frombuffer("RGBA", size, bytes(canvas.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    few = picture.quantize(_COLOURS, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE)
    few.save(file, "PNG", optimize=True)
    return file.getvalue()


def save(figure: Drawing, path: Path) -> None:
    """Write a figure to a ``.png``, ``.svg`` or ``.pdf`` file, whole or not at all."""
    form = path.suffix.lower().removeprefix(".")
    if form == "png":
        write_file(path, png(figure))
        return
    file = io.BytesIO()
    figure.savefig(file, format=form)
    write_file(path, file.getvalue())


def as_uri(pixels: Tensor) -> str:
    """An image as a model sees it, its values stretched from black to white, as a ``data:`` URI of a PNG."""
    values = pixels[: 3 if len(pixels) >= 3 else 1].detach().float().cpu()
    low, high = float(values.min()), float(values.max())
    levels = ((values - low) / max(high - low, 1e-9) * 255).round().byte().numpy()
    picture = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    factor = _SIDE / max(picture.size)
    size = tuple(max(1, round(n * factor)) for n in picture.size)
    picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def from_uri(uri: str) -> Any:
    """The pixels of such an image."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
