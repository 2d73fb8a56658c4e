"""report.html: the report's sections as one page that needs no network, with sizes to try and heads to look into."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from headprune.amounts import visible
from headprune.app.documents import Heads
from headprune.app.report import numbers, verdict
from headprune.app.report.content import Block, Documents, Figure, Section, Strong, Table, block_of
from headprune.app.report.sections.heads import basis
from headprune.app.report.sections.opening import loading
from headprune.scoring.scores import HeadScores


def render(documents: Documents, sections: Sequence[Section], pictures: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        pictures: PNG files by the names that figures have.
    """
    html = [_section(section, pictures, "h2" if i else "h1") for i, section in enumerate(sections)]
    explained = [Strong(f"{s.method}:", basis(s)) for s in documents.rankings]
    data = {**_sizes(documents), "methods": [s.method for s in documents.rankings], **_attention(documents)}
    values = {
        "title": visible(sections[0].title), "opening": html[0], "sections": Markup("").join(html[1:]),
        "heads": _block(_heads(documents), "Table of all heads", {}), "data": _clean(data),
        "explained": Markup("").join(_block(block, "", {}) for block in explained), **_assets(),
    }  # fmt: skip
    return _template().render(values)


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("headprune.app.report.page", ".")
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, autoescape=True, **options).get_template("page.html.j2")


@functools.cache
def _assets() -> dict[str, Any]:
    """Style and script of every page, and the policy by which a browser runs this script and fetches nothing."""
    here = resources.files(__name__)
    style, script = ((here / name).read_text("utf-8") for name in ("page.css", "page.js"))
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    policy = "style-src 'sha256-{}'; script-src 'sha256-{}'".format(*hashes)
    policy = f"default-src 'none'; {policy}; img-src data:; base-uri 'none'; form-action 'none'"
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


# -- sections: what report.md has, as HTML ------------------------------------------------------

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")  # no HTML, and no link of a text's own
_SMALLER = re.compile(r"(<t[dh]>[^<(]+) (\([^<]*\))(?=</t[dh]>)")
_VERDICTS = {"better": "good", "faster": "good", "worse": "bad", "slower": "bad"}


def _section(section: Section, pictures: Mapping[str, bytes], heading: str) -> Markup:
    name = re.sub(r"\W+", "-", section.title.lower()).strip("-")
    opened, folded = (
        Markup("").join(_block(block, f"{section.title}, {place} {i}", pictures) for i, block in enumerate(blocks))
        for place, blocks in (("part", section.blocks), ("detail", section.folded))
    )
    if section.folded:
        opened += Markup("<details><summary>{}</summary>{}</details>").format(section.summary, folded)
    title = visible(section.title)
    form = Markup(f'<section id="{{}}" aria-label="{{}}">\n<{heading}>{{}}</{heading}>\n{{}}</section>\n')
    return form.format(name, title, title, opened)


def _block(block: Block, label: str, pictures: Mapping[str, bytes]) -> Markup:
    """
    Args:
        label: Of a table or a picture that may have to be scrolled.
    """
    scrolled = Markup('<div class="scroll" role="region" aria-label="{}" tabindex="0">{}</div>\n')
    if isinstance(block, Figure):
        file = pictures[block.file]
        width = int.from_bytes(file[16:20], "big")  # of a PNG's header; at 0.8 of it letters are as large as the text's
        image = Markup('<img class="figure" width="{}" src="data:image/png;base64,{}" alt="{}">')
        return scrolled.format(
            visible(label), image.format(round(0.8 * width), base64.b64encode(file).decode(), visible(block.alt))
        )
    html = _SMALLER.sub(r"\1 <small>\2</small>", _MARKDOWN.render(block_of(block)))
    for word, tone in _VERDICTS.items():
        html = html.replace(f"<td>{word}</td>", f'<td class="{tone}">{word}</td>')
    return scrolled.format(visible(label), Markup(html)) if html.startswith("<table") else Markup(html)


# -- what only a page can show ----------------------------------------------------------------


def _sizes(documents: Documents) -> dict[str, Any]:
    """The positions of the slider, the smallest model first and the dense one last: heads kept, and how it is loaded."""
    metrics = documents.metrics
    if metrics is None:
        return {"kept": [], "uses": [], "start": 0}
    budgets = verdict.largest_first(metrics)[::-1]
    return {
        "kept": [*(b.kept for b in budgets), budgets[0].total], "start": budgets.index(verdict.judge(metrics).budget),
        "uses": [*(loading(documents.run, b) for b in budgets), "the model as it is"],
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
    """Why every head has its role, and what it attends to in the samples."""
    heads, layers = documents.heads, documents.run.model.layers
    facts: dict[str, Any] = {"layers": [[f"L{layer.index}", layer.num_heads] for layer in layers]}
    if heads is None:
        return {**facts, "reasons": [], "samples": []}
    reasons = [_reason(heads, layer.name, h) for layer in layers for h in range(layer.num_heads)]
    return {**facts, "reasons": reasons, "samples": heads.samples}


def _reason(heads: Heads, name: str, head: int) -> str:
    """Why a head has its role; or why it could not be seen."""
    layer = next((layer for layer in heads.layers if layer.name == name), None)
    return "not looked at" if layer is None else layer.heads[head].because if layer.heads else layer.unseen


def _clean(value: Any) -> Any:
    """A value as JSON can hold it: documents as dictionaries, numbers that are not finite as null, texts without control characters."""
    if hasattr(value, "__dict__"):  # a part of a document
        return _clean(vars(value))
    if isinstance(value, Mapping):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, str):
        return visible(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
