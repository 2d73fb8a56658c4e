"""Renders report.html: the report's sections as a page that needs no network, with a slider of sizes and head views."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from headprune.amounts import visible
from headprune.app.report import heads, numbers, verdict
from headprune.app.report.content import Documents, Section, Table, block_of, text_of
from headprune.inputs import map_leaves
from headprune.scoring.scores import HeadScores


def render(documents: Documents, sections: Sequence[Section], pictures: Mapping[str, bytes]) -> str:
    """The whole page, as HTML.

    Args:
        pictures: PNG files, by the file names of the figures.
    """
    first, *others = (_section(section, pictures, "h2" if i else "h1") for i, section in enumerate(sections))
    template, assets = _template()
    return template.render(
        assets, title=visible(sections[0].title), opening=first, sections=Markup("").join(others),
        heads=_html(block_of(_heads(documents)), "Table of all heads", {}),
        explained=_html("\n\n".join(f"**{text_of(s.method)}:** {text_of(heads.basis(s))}" for s in documents.rankings), "", {}),
        data=_plain(_sizes(documents) | _attention(documents)),
    )  # fmt: skip


@functools.cache
def _template() -> tuple[jinja2.Template, dict[str, Any]]:
    """The page's template, its style and script, and a content security policy that allows only these and no network."""
    names = ("page.html.j2", "page.css", "page.js")
    page, style, script = ((resources.files(__name__) / name).read_text("utf-8") for name in names)
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    policy = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'"
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    assets = {"style": Markup(style), "script": Markup(script), "policy": policy.format(*hashes)}
    return jinja2.Template(page, autoescape=True, **options), assets


# -- sections: what report.md has, as HTML ------------------------------------------------------

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")  # no raw HTML, no links of plain addresses
_SMALLER = re.compile(r"(<t[dh]>[^<(]+) (\([^<]*\))(?=</t[dh]>)")
_VERDICTS = {"better": "good", "faster": "good", "worse": "bad", "slower": "bad"}


def _section(section: Section, pictures: Mapping[str, bytes], heading: str) -> Markup:
    title = visible(section.title)
    inside = _html(section.text, f"{title}, part", pictures)
    if section.folded:
        folded = _html(section.folded, f"{title}, detail", pictures)
        inside += Markup("<details><summary>{}</summary>{}</details>").format(section.summary, folded)
    form = f'<section id="{{}}" aria-label="{{}}">\n<{heading}>{{}}</{heading}>\n{{}}</section>\n'
    return Markup(form).format(re.sub(r"\W+", "-", title.lower()).strip("-"), title, title, inside)


def _html(text: str, label: str, pictures: Mapping[str, bytes]) -> Markup:
    """A report's Markdown as HTML; tables and pictures in a frame with this label, in which they can be scrolled."""
    count = itertools.count(1)

    def framed(inside: str) -> str:
        name = f"{escape(label)} {next(count)}"
        return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">{inside}</div>'

    def picture(match: re.Match[str]) -> str:
        file = pictures[match["file"]]
        width = round(0.8 * int.from_bytes(file[16:20], "big"))  # the PNG's own: letters are as large as the text's
        source = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        return framed(f'<img class="figure" width="{width}" src="{source}" alt="{match["alt"]}">')

    html = _SMALLER.sub(r"\1 <small>\2</small>", _MARKDOWN.render(text))
    for word, tone in _VERDICTS.items():
        html = html.replace(f"<td>{word}</td>", f'<td class="{tone}">{word}</td>')
    html = re.sub(r"<table>.*?</table>", lambda match: framed(match[0]), html, flags=re.DOTALL)
    return Markup(re.sub(r'<p><img src="(?P<file>[^"]*)" alt="(?P<alt>[^"]*)" /></p>', picture, html))


# -- what only a page can show ----------------------------------------------------------------


def _sizes(documents: Documents) -> dict[str, Any]:
    """The slider's positions, the smallest model first and the dense one last: heads kept, and the call that loads it."""
    metrics = documents.metrics
    if metrics is None:
        return {"kept": [], "uses": [], "start": 0}
    budgets = verdict.largest_first(metrics)[::-1]
    return {
        "kept": [*(b.kept for b in budgets), budgets[0].total], "start": budgets.index(verdict.judge(metrics).budget),
        "uses": [*(verdict.loading(documents.run, b) for b in budgets), "the model as it is"],
    }  # fmt: skip


def _heads(documents: Documents) -> Table:
    """Every head of the dense model, layer by layer: its scores, in which sizes it is kept, its role."""
    budgets = verdict.largest_first(documents.metrics) if documents.metrics is not None else []
    layers = documents.heads.layers if documents.heads is not None else ()
    roles = {(layer.name, h): head.role for layer in layers for h, head in enumerate(layer.heads)}
    rows = []
    for layer in documents.run.model.layers:
        for h in range(layer.num_heads):
            scores = (_score(s, layer.name, h) for s in documents.rankings)
            kept = ("pruned" if h in b.drop.get(layer.name, ()) else "kept" for b in budgets)
            rows.append([f"L{layer.index}.H{h}", *scores, *kept, roles.get((layer.name, h), "")])
    return Table(["head", *(s.method for s in documents.rankings), *(f"with {b.kept}" for b in budgets), "role"], rows)


def _score(scores: HeadScores, layer: str, head: int) -> str:
    known = layer in scores.values
    return numbers.with_error(float(scores.values[layer][head]), float(scores.stderr[layer][head])) if known else "–"


def _attention(documents: Documents) -> dict[str, Any]:
    """The methods, why every head has its role (or why it could not be seen), and what it attends to in the samples."""
    seen, layers, reasons = documents.heads, documents.run.model.layers, list[str]()
    for layer, profile in zip(layers, seen.layers, strict=True) if seen is not None else ():
        reasons += [head.because for head in profile.heads] or [profile.unseen] * layer.num_heads
    return {
        "methods": [s.method for s in documents.rankings], "layers": [[f"L{layer.index}", layer.num_heads] for layer in layers],
        "reasons": reasons, "samples": seen.to_json()["samples"] if seen is not None else [],
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite as null, texts without control characters."""

    def plain(leaf: Any) -> Any:
        unknown = isinstance(leaf, float) and not math.isfinite(leaf)
        return visible(leaf) if isinstance(leaf, str) else None if unknown else leaf

    return map_leaves(value, plain)
