"""report.html: the same content as report.md, one file without a network, and no text that becomes markup."""

import base64
import copy
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run as command
from tests.support.documents import HOSTILE, METRICS, RUN, heads_document, large_heads_document, scores_of
from tests.support.reports import reported

REPORTS = sorted((Path(__file__).parent.parent / "reports").glob("*/"))
SCORES = scores_of([0.3, 0.2, -0.1, 0.005])


class Page(HTMLParser):
    """A page: its tables as rows of texts, its scripts and styles, its elements, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[str] = []
        self.text = ""
        self._cell = False
        self.feed(text)
        self.data = json.loads(self.raw[1])  # behind the style, before the script
        self.heads = next(table for table in self.tables if table[0][0] == "head")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append("")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._cell = tag in ("td", "th") or (self._cell and tag in ("small", "code", "strong"))

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.raw[-1] += data
            return
        if self._cell:
            self.tables[-1][-1][-1] += data
        self.text += data


def page(folder: Path, *documents: Any, **more: Any) -> Page:
    """The page of a run folder of these documents."""
    reported(folder / "r", *documents, **more)
    return Page((folder / "r" / "report.html").read_text())


@pytest.mark.drawn
@pytest.mark.parametrize("folder", REPORTS, ids=lambda p: p.name)
def test_committed_reports_are_of_today_and_explain_their_words(folder: Path, tmp_path: Path) -> None:
    """And the page says what the Markdown and the documents say."""
    shutil.copytree(folder, tmp_path / "r", ignore=shutil.ignore_patterns("*.html", "*.png"))
    (tmp_path / "r" / "latency.png").write_bytes(b"of an older version")
    command("report", tmp_path / "r", "-q")
    text, found = ((tmp_path / "r" / name).read_text() for name in ("report.md", "report.html"))
    assert text == (folder / "report.md").read_text()
    for name in ("auto", "re-scored", "compensated", "ablation", "gradient"):
        assert re.search(rf"\b{name}\b", text).start() == text.index(f"**{name}:**") + 2, name  # type: ignore[union-attr]
    assert set(re.findall(r"\((\w+\.png)\)", text)) == {path.name for path in folder.glob("*.png")}
    sections = dict(part.split("\n\n", 1) for part in text.split("\n## ")[1:])
    unfolded = {name for name, body in sections.items() if not body.startswith("<details><summary>")}
    assert unfolded == {"Why trust these figures", "Where the time goes", "Reproduce"}
    shown = Page(found)
    tables = [
        [[re.sub(r"[*`\\]", "", cell).strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|---" not in line]
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M)
    ]  # fmt: skip
    assert [table for table in shown.tables if table is not shown.heads] == tables
    plain = re.sub(r"\s+", " ", shown.text)
    for line in re.findall(r"^(?:- )?((?:\*\*|[A-Z“]).*)$", text.replace("[report.html](report.html)", ""), re.M):
        words = re.sub(r"[*`\\]", "", line)
        assert words in plain or words.startswith("Every size and every head"), line
    pictures = sorted(path.read_bytes() for path in (tmp_path / "r").glob("*.png"))
    sources = [attrs["src"] or "" for tag, attrs in shown.elements if tag == "img"]
    assert sorted(base64.b64decode(source.partition(",")[2]) for source in sources) == pictures
    assert b"of an older version" not in pictures
    raw, scores, run = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "scores", "run"))
    head, *rows = shown.heads
    layers = {layer["name"]: layer["index"] for layer in run["model"]["layers"]}
    for b in raw["budgets"]:
        gone = {f"L{layers[layer]}.H{h}" for layer, heads in b["drop"].items() for h in heads}
        assert {row[0] for row in rows if row[head.index(f"with {b['kept']}")] == "pruned"} == gone
    for s in scores["scores"]:
        values = {f"L{layers[name]}.H{h}": value for name, of in s["values"].items() for h, value in enumerate(of)}
        cells = {row[0]: row[head.index(s["method"])].split(" ±")[0] for row in rows}
        assert cells == {k: f"{v:.4g}" for k, v in values.items()}
    command("report", tmp_path / "r", "-q")
    assert (tmp_path / "r" / "report.html").read_text() == found


def test_texts_never_become_markup(tmp_path: Path) -> None:
    """Of the model, the dataset, its rows, labels and columns, a command, a note, a role, a layer, a method; nor do they give orders."""
    codes = "\x1b]0;x\x07 \x9b31m \u202e"
    run, metrics = copy.deepcopy(RUN), copy.deepcopy(METRICS)
    run["options"] = {"model": HOSTILE + codes, "seed": 0, "data": {"dataset": HOSTILE}}
    run["commands"], run["notes"] = [f"headprune score {HOSTILE}{codes}"], [HOSTILE, codes]
    run["model"] |= {"class": HOSTILE, "task": HOSTILE}
    run["parts"]["score"]["split"] = run["columns"]["items"] = HOSTILE + codes
    metrics["budgets"][0]["checkpoint"] = HOSTILE.replace("/", "")
    hostile = heads_document(title=HOSTILE, token=HOSTILE + codes, role=HOSTILE + codes)
    found = page(tmp_path, metrics, scores_of([0.3, 0.2, -0.1, 0.005], HOSTILE), run=run, heads=hostile)
    plain = page(tmp_path / "plain", METRICS, SCORES, heads=heads_document())
    for tags in ({"script", "img", "style"}, {"a", "iframe", "object"}):
        assert [tag for tag, _ in found.elements if tag in tags] == [tag for tag, _ in plain.elements if tag in tags]
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert not set("<>&") & set(found.raw[1])
    assert HOSTILE in found.text
    assert found.data["samples"][0]["title"] == HOSTILE
    assert found.data["samples"][0]["positions"]["input"]["labels"][0] == f"{HOSTILE}�]0;x� �31m �"
    assert found.heads[0][1] == HOSTILE
    assert found.heads[1][-1] == f"{HOSTILE}�]0;x� �31m �"
    for name in ("report.md", "report.html"):
        text = (tmp_path / "r" / name).read_text()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert "�]0;x� �31m �" in text


def test_a_browser_may_run_this_script_and_fetch_nothing(tmp_path: Path) -> None:
    found = page(tmp_path, METRICS, SCORES, heads=heads_document())
    policy = next(a["content"] or "" for tag, a in found.elements if tag == "meta" and a.get("http-equiv"))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    style, _, script = found.raw
    for rule, text in (("style-src", style), ("script-src", script)):
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    for tag, attributes in found.elements:
        assert not {"srcset", "action", "data", "style"} & set(attributes), tag
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith(("#", "data:,", "report.md")), attributes


def test_scores_alone_plans_alone_and_heads_that_were_not_seen(tmp_path: Path) -> None:
    found = page(tmp_path, None, SCORES, scores_of([1, 2, 3, math.nan], "gradient"))
    assert found.heads[::4] == [["head", "ablation", "gradient", "role"], ["L0.H3", "0.005 ± 0.01", "nan ± 0.01", ""]]
    assert found.data["kept"] == []
    assert "headprune prune --keep 50%" in found.text
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["dtype"] = "float16"  # saved in half precision, measured in float32: the call says so too
    found = page(tmp_path, metrics)
    assert found.data["uses"] == ['headprune.load("pruned-2").float()', "the model as it is"]
    assert (found.data["kept"], found.data["start"]) == ([2, 4], 0)
    assert found.heads == [
        ["head", "with 2", "role"], ["L0.H0", "kept", ""], ["L0.H1", "pruned", ""], ["L0.H2", "pruned", ""], ["L0.H3", "kept", ""]
    ]  # fmt: skip
    found = page(tmp_path, METRICS, SCORES, heads=heads_document(unseen="no softmax", samples=0))
    assert found.data["reasons"] == ["no softmax"] * 4
    assert "The weights of 1 layer cannot be seen: no softmax" in found.text


def test_a_large_run_has_a_page_below_two_megabytes(tmp_path: Path) -> None:
    """32 layers of 32 heads, with profiles and as much attention as `headprune.app.seeing.look` keeps."""
    run = copy.deepcopy(RUN)
    layers = [{**RUN["model"]["layers"][0], "name": f"layer.{i}", "index": i, "num_heads": 32} for i in range(32)]
    run["model"] |= {"layers": layers, "heads": 1024}
    metrics = copy.deepcopy(METRICS)
    drop = {f"layer.{i}": list(range(16)) for i in range(32)}
    one = {**metrics["budgets"][0], "total": 1024, "drop": drop}
    metrics["budgets"] = [{**one, "kept": kept} for kept in (768, 512, 256)]
    page(tmp_path, metrics, run=run, heads=large_heads_document(32, 32, 32))
    assert 1_400_000 < (tmp_path / "r" / "report.html").stat().st_size < 2_000_000
