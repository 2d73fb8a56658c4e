"""What a report is made of: sections of Markdown, from texts, tables and figures.

Texts have one kind of markup: text in backticks is code (`code`). Everything else is shown as it is, so a name, a label or a text
from the data is never markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headprune.amounts import code, in_line
from headprune.app.documents import Heads, Metrics, Run
from headprune.app.pictures import Drawing
from headprune.scoring.scores import HeadScores

# Code in backticks, or a character that Markdown would interpret.
_MARKUP = re.compile(
    r"(?<!`)(?P<fence>`+)(?!`)(?P<code>.+?)(?<!`)(?P=fence)(?!`)|[\\`<\[*~$]|&(?=[\w#])|(?<!\w)_|_(?!\w)"
)
_AT_START = re.compile(r"^(\d*)([#>+\-.)])")


@dataclass(frozen=True)
class Documents:
    """A run folder's documents, from which its report is made.

    Attributes:
        scores: The scores of every method; none for a user's plan.
        metrics: None if nothing was pruned.
        heads: None if no head was profiled.
    """

    run: Run
    scores: Sequence[HeadScores]
    metrics: Metrics | None = None
    heads: Heads | None = None

    @property
    def rankings(self) -> list[HeadScores]:
        """The scores without the random control."""
        return [s for s in self.scores if s.method != "random"]


@dataclass(frozen=True)
class Table:
    """A table of texts; ``strong`` is the index of the row to highlight."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: int | None = None


@dataclass(frozen=True)
class Figure:
    """A picture that is written beside report.md.

    Attributes:
        file: Its file name, which must be in `headprune.app.runs.PARTS`.
        alt: The alternative text, for readers who do not see the picture.
    """

    file: str
    alt: str
    drawing: Drawing


class Markdown(str):
    """Text that is Markdown already, with special characters escaped."""


Block = str | Markdown | Table | Figure


@dataclass(frozen=True)
class Section:
    """A part of a report that fits on a screen, in Markdown.

    Attributes:
        text: What is always shown.
        summary: The line that unfolds ``folded``.
    """

    title: str
    text: str
    summary: str = ""
    folded: str = ""


def capital(text: str) -> str:
    """The text with its first letter as a capital."""
    return f"{text[:1].upper()}{text[1:]}"


def listed(words: Sequence[str]) -> str:
    """Words joined for a sentence: by commas, and "and" before the last."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def notes_by_size(notes: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    """The models' notes, each once; a note that not all models have names its models by heads kept.

    >>> notes_by_size([(36, ["slow", "even"]), (18, ["slow"])])
    ['slow', 'With 36 heads: even']
    """
    lines = []
    for note in dict.fromkeys(note for _, some in notes for note in some):
        of = [str(kept) for kept, some in notes if note in some]
        lines.append(note if len(of) == len(notes) else f"With {listed(of)} heads: {note}")
    return lines


def markdown(sections: Sequence[Section], note: str = "") -> str:
    """A report as Markdown; the first section's title is the report's title.

    Args:
        note: A line of Markdown below the first section.
    """
    parts = []
    for i, section in enumerate(sections):
        folded = f"<details><summary>{text_of(section.summary)}</summary>\n\n{section.folded}\n\n</details>"
        parts += [f"{'##' if i else '#'} {text_of(section.title)}", section.text, folded if section.folded else ""]
        parts.append("" if i else note)
    return "\n\n".join(filter(None, parts)) + "\n"


def block_of(block: Block) -> str:
    """A block as Markdown."""
    match block:
        case Table():
            rows = [[text_of(cell).replace("|", r"\|") for cell in row] for row in (block.head, *block.rows)]
            if block.strong is not None:
                rows[1 + block.strong][0] = f"**{rows[1 + block.strong][0]}**"
            lines = [f"| {' | '.join(row)} |" for row in rows]
            return "\n".join([lines[0], f"{'|---' * len(block.head)}|", *lines[1:]])
        case Markdown():
            return block
        case Figure():
            return f"![{text_of(block.alt)}]({block.file})"
    return _AT_START.sub(r"\1\\\2", text_of(block))


def bullets(lines: Iterable[str]) -> Markdown:
    """A bulleted list of texts."""
    return Markdown("\n".join(f"- {block_of(line)}" for line in lines))


def command_lines(lines: Sequence[str]) -> Markdown:
    """Lines to type, as a fenced code block."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, 1 + longest)
    return Markdown("\n".join([fence, *map(in_line, lines), fence]))


def text_of(text: object) -> str:
    r"""A text in one line, with Markdown's special characters escaped outside code.

    >>> text_of("cut at `a<b`, says <i> and [x](y)")
    'cut at `a<b`, says \\<i> and \\[x](y)'
    """
    return _MARKUP.sub(lambda match: code(match["code"]) if match["code"] else f"\\{match[0]}", in_line(str(text)))
