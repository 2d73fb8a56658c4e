"""Tokens and patches as they are shown."""

from __future__ import annotations

import base64
import io
from typing import Any

from torch import Tensor

from headprune.app.documents import Positions
from headprune.seeing.sequences import Grid

_SIDE = 96  # pixels that an image is shown with, about


def token_labels(ids: list[int], tokenizer: Any) -> tuple[str, ...]:
    """Tokens as text, each with what cannot be seen or printed made visible; a space before it is ``·``."""
    labels = []
    for token in ids:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if not text or "\ufffd" in text:  # a part of a letter, or something that stands for nothing
            text = str(tokenizer.convert_ids_to_tokens(token))
        elif not text.startswith(" ") and str(tokenizer.convert_ids_to_tokens(token)).startswith(("▁", "Ġ")):
            text = f" {text}"  # some tokenizers drop it where a text begins
        labels.append(printable(text))
    return tuple(labels)


def printable(text: str) -> str:
    """A text in one line, without what would steer a terminal.

    >>> printable(" a\\tb\\x1b[1m"), printable("\\n")
    ('·a→b␛[1m', '⏎')
    """
    shown = {"\n": "⏎", "\t": "→", "\r": "␍", " ": "·"}
    return "".join(shown.get(c, c if c.isprintable() else chr(0x2400 + ord(c)) if ord(c) < 32 else "�") for c in text)


def patch_positions(grid: Grid, image: Tensor | None) -> Positions:
    """The patches of an image ``[channels, rows, columns]``, and what stands before them."""
    before = ["[CLS]", *(f"[{i}]" for i in range(1, grid.before))][: grid.before]
    patches = [f"{r},{c}" for r in range(grid.rows) for c in range(grid.columns)]
    picture = None if image is None else as_uri(image)
    return Positions(labels=(*before, *patches), grid=(grid.rows, grid.columns), image=picture)


def as_uri(pixels: Tensor) -> str:
    """An image as a model sees it, its values stretched from black to white, as a ``data:`` URI of a PNG."""
    from PIL import Image

    values = pixels.detach().float().cpu()
    values = values[:3] if len(values) >= 3 else values[:1]
    low, high = float(values.min()), float(values.max())
    levels = ((values - low) / max(high - low, 1e-9) * 255).round().byte().numpy()
    picture = Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))
    factor = _SIDE / max(picture.size)
    size = [max(1, round(n * factor)) for n in picture.size]
    picture = picture.resize((size[0], size[1]), Image.Resampling.NEAREST if factor > 1 else Image.Resampling.BILINEAR)
    held = io.BytesIO()
    picture.save(held, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
