"""What a report says, before it is Markdown, HTML or lines in a terminal: sections of text, tables and figures.

Texts have one kind of markup: what stands in backticks is code (`code`). The renderers show everything else as it is, so a name, a
label or a text from the data is never markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.app.documents import Heads, Metrics, Run
from headprune.scoring.scores import HeadScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Documents:
    """What a run folder holds, and all that its report is made of.

    Attributes:
        scores: Of every method; none for a plan of the user's.
        metrics: None where nothing was pruned.
        heads: None where no head was looked at.
    """

    run: Run
    scores: Sequence[HeadScores]
    metrics: Metrics | None = None
    heads: Heads | None = None

    @property
    def rankings(self) -> list[HeadScores]:
        """The scores that say something: not the random control."""
        return [s for s in self.scores if s.method != "random"]


@dataclass(frozen=True)
class Strong:
    """A text whose first words stand out."""

    lead: str
    text: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of texts."""

    lines: Sequence[str | Strong]


@dataclass(frozen=True)
class CommandLines:
    """Lines to type."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of texts; ``strong`` is the number of the row that stands out."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: int | None = None


@dataclass(frozen=True)
class Figure:
    """A picture, drawn once and written beside report.md.

    Attributes:
        file: Its name, which ``PARTS`` in `headprune.app.runs` has, too.
        alt: What it shows, for those who do not see it.
    """

    file: str
    alt: str
    draw: Callable[[], Drawing]


Block = str | Strong | Bullets | CommandLines | Table | Figure


@dataclass(frozen=True)
class Section:
    """A part of a report that fits on a screen.

    Attributes:
        summary: The line that unfolds ``folded``.
    """

    title: str
    blocks: Sequence[Block] = ()
    summary: str = ""
    folded: Sequence[Block] = ()


def code(text: object) -> str:
    """A text, marked as code: a name, a path, a call, or anything from the data.

    >>> code("a b"), code("a`b")
    ('`a b`', '``a`b``')
    """
    plain = str(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if plain[:1] in ("`", "") or plain.endswith("`") else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def spans(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces, each with whether it is code.

    >>> list(spans("type `x`, or ``a`b``"))
    [('type ', False), ('x', True), (', or ', False), ('a`b', True)]
    """
    for i, piece in enumerate(_CODE.split(text)):  # text, fence, code, text, …
        if i % 3 == 2:
            yield (piece[1:-1] if piece.strip() and piece[0] == piece[-1] == " " else piece), True
        elif i % 3 == 0 and piece:
            yield piece, False


def capital(text: str) -> str:
    """A text that begins with a capital letter."""
    return f"{text[:1].upper()}{text[1:]}"


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def notes_by_size(notes: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """Every model's notes, each once, with the heads kept of the models that it is of where those are not all.

    >>> notes_by_size([(36, ["slow", "even"]), (18, ["slow"])])
    ['slow', 'With 36 heads: even']
    """
    lines = []
    for note in dict.fromkeys(note for _, some in notes for note in some):
        of = [str(kept) for kept, some in notes if note in some]
        lines.append(note if len(of) == len(notes) else f"With {listed(of)} heads: {note}")
    return lines
