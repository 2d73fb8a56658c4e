"""The report's sections, by the template report.md.j2; the files beside this one have its tables, its figures and what takes more than a template."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from importlib import resources
from typing import Any

import jinja2

from headprune import latency
from headprune.amounts import code
from headprune.app.report import content, numbers, verdict
from headprune.app.report.sections import heads, measured, opening, plans

TEMPLATE, FINETUNED = (
    (resources.files("headprune.app.report") / name).read_text("utf-8") for name in ("report.md.j2", "finetune.md.j2")
)
ROOMS = {
    "content": content, "numbers": numbers, "verdict": verdict, "of_heads": heads, "measured": measured, "opening": opening,
    "plans": plans, "latency": latency,
}  # fmt: skip
"""What the template may call."""
_FOLD = "\x1e"  # which no text holds once it is escaped


def sections_of(template: str, **values: Any) -> tuple[list[content.Section], list[content.Figure]]:
    """All that a report says, in its order, and the figures in it."""
    sections: list[content.Section] = []
    figures: list[content.Figure] = []

    def section(title: str, caller: Callable[[], str]) -> str:
        text, summary, folded = (*caller().split(_FOLD), "", "")[:3]
        sections.append(content.Section(title, _tidy(text), summary, _tidy(folded)))
        return ""

    def show(*blocks: content.Block) -> content.Markdown:
        figures.extend(block for block in blocks if isinstance(block, content.Figure))
        return content.blocks_of(blocks)

    _template(template).render(ROOMS, **values, section=section, show=show)
    return sections, figures


@functools.cache
def _template(text: str) -> jinja2.Template:
    """The template; what it prints is escaped, unless it is Markdown already."""

    def escaped(value: Any) -> str:
        return value if isinstance(value, content.Markdown) else content.text_of(value)

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(finalize=escaped, **options)
    environment.filters |= {"commas": "{:,}".format, "quoted": shlex.quote, "to_repeat": numbers.to_repeat}
    environment.globals |= {"code": code, "fold": lambda summary: content.Markdown(f"{_FOLD}{summary}{_FOLD}")}
    return environment.from_string(text)


def _tidy(text: str) -> str:
    """Markdown without the template's line ends within a paragraph, and with one empty line between paragraphs."""
    return re.sub(r"\n{2,}", "\n\n", re.sub(r"\n +(?=\S)", " ", text)).strip()
