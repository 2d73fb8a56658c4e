"""A report's content as Markdown. Nothing in a text is markup but what stands in backticks, which is code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headprune.amounts import in_line
from headprune.app.report.content import Block, Bullets, CommandLines, Figure, Section, Strong, Table, code, spans

_MARKS = re.compile(r"([\\`<\[*~$]|&(?=[\w#])|(?<!\w)_|_(?!\w))")
_AT_START = re.compile(r"^(\d*)([#>+\-.)])")


def render(sections: Sequence[Section], note: str = "") -> str:
    """The whole report: the first section's title is the report's.

    Args:
        note: A line of Markdown below the first section.
    """
    parts = []
    for i, section in enumerate(sections):
        parts += [f"{'##' if i else '#'} {text_of(section.title)}", *map(block_of, section.blocks)]
        if section.folded:
            parts += [
                f"<details><summary>{text_of(section.summary)}</summary>",
                *map(block_of, section.folded),
                "</details>",
            ]
        if i == 0 and note:
            parts.append(note)
    return "\n\n".join(parts) + "\n"


def block_of(block: Block) -> str:
    """A paragraph, a list, a table or another block."""
    match block:
        case Table():
            rows = [[text_of(cell).replace("|", r"\|") for cell in row] for row in (block.head, *block.rows)]
            if block.strong is not None:
                rows[1 + block.strong][0] = f"**{rows[1 + block.strong][0]}**"
            lines = [f"| {' | '.join(row)} |" for row in rows]
            return "\n".join([lines[0], f"{'|---' * len(block.head)}|", *lines[1:]])
        case Bullets():
            return "\n".join(f"- {block_of(line)}" for line in block.lines)
        case CommandLines():
            longest = max((len(run) for line in block.lines for run in re.findall("`+", line)), default=0)
            fence = "`" * max(3, 1 + longest)
            return "\n".join([fence, *map(in_line, block.lines), fence])
        case Figure():
            return f"![{text_of(block.alt)}]({block.file})"
        case Strong():
            return f"**{text_of(block.lead)}** {text_of(block.text)}".rstrip()
    return _AT_START.sub(r"\1\\\2", text_of(block))


def text_of(text: str) -> str:
    r"""A text in one line, with what Markdown would read escaped.

    >>> text_of("cut at `a<b`, says <i> and [x](y)")
    'cut at `a<b`, says \\<i> and \\[x](y)'
    """
    pieces = spans(in_line(text))
    return "".join(code(piece) if is_code else _MARKS.sub(r"\\\1", piece) for piece, is_code in pieces)
