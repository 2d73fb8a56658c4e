"""Text is never markup: names, labels and rows that look like HTML, Markdown, rich's markup and a terminal's codes, to the end."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import transformers as tf
from markdown_it import MarkdownIt

from headprune.cli import app
from tests.support.commands import runner
from tests.support.folders import sentences, tokenizer
from tests.support.zoo import randomise

pytestmark = pytest.mark.slow

SCRIPT = '<script>alert("1")<'  # "/" cannot be in a file's name
EVIL = f"{SCRIPT}/script><img src=x onerror=alert(2)> [red]r[/] [/] [l](javascript:alert(3)) `c` | p \x1b[31m {{{{7*7}}}} & '"
NAME = f"{SCRIPT}img src=x onerror=alert(2)> [red]r[] [l](javascript:alert(3)) `c` | {{{{7*7}}}} & '"
COLUMN = f"{EVIL}\n# h"


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self._in: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._in = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        elif self._in is None:
            self.text += data


def page_of(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    page.close()
    return page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose model, data, columns, labels and rows are all named so; and what the terminal got."""
    root = tmp_path_factory.mktemp("markup")
    model, data = root / f"m{NAME}", root / f"d{NAME}.jsonl"
    config = tf.BertConfig(
        vocab_size=30, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, pad_token_id=0,
        max_position_embeddings=64, id2label={0: EVIL, 1: f"{EVIL}2"}, label2id={EVIL: 0, f"{EVIL}2": 1},
    )  # fmt: skip
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(model)
    words = tokenizer()
    shutil.copy(_vocabulary(root, words), root / "tokenizer.json")
    words.save_pretrained(model)
    document = json.loads((model / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    for token, old in ((f"{SCRIPT}x", "one"), ("[red]", "two"), ("`|`", "three")):  # tokens of the model's own
        vocabulary[token] = vocabulary.pop(old)
    (model / "tokenizer.json").write_text(json.dumps(document))
    (model / "README.md").write_text(f"---\nlicense: mit\ntags:\n- '{SCRIPT}'\nlanguage: '{SCRIPT}'\n---\n# {EVIL}\n")
    rows = [{COLUMN: f"{SCRIPT} [red] {row['text']} {i} {EVIL}", "label": (EVIL, f"{EVIL}2")[int(str(row['label']))]}
            for i, row in enumerate(sentences(60, 1))]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("headprune.latency.MIN_SECONDS", 0.001)
        out = root / f"r{NAME}"
        for typed in (
            ["score", model, "-d", data, "--text-column", COLUMN, "-m", "gradient", "-L", 20, "-b", 8, "-o", out],
            ["prune", "-k", 4, "-s", "one-shot", "--no-repair", "--scores", out, "-o", out],
            ["report", out],
            ["inspect", model],
            ["show", model, "--text", f"{EVIL} good film", "-o", root / "seen.svg"],
            ["score", model, "-d", data, "--text-column", f"no{EVIL}"],
            ["score", model, "-d", root / f"gone{NAME}.jsonl"],
            ["score", root / f"gone{NAME}", "-d", data],
            ["prune", model, "-d", data, "-k", EVIL],
        ):
            if typed[0] == "show":
                patch.undo()
                patch.chdir(root)
            said.append(runner.invoke(app, [str(a) for a in typed]))
    return {"root": root, "run": out, "said": said, "model": model}


def _vocabulary(root: Path, words: Any) -> Path:
    words.save_pretrained(root / "t")
    return root / "t" / "tokenizer.json"


def test_every_command_did_its_work(made: dict[str, Any]) -> None:
    codes = [result.exit_code for result in made["said"]]
    assert codes == [0, 0, 0, 0, 0, 1, 1, 1, 1], [(r.stderr, r.exception) for r in made["said"]]


def test_the_terminal_shows_it_as_it_is(made: dict[str, Any]) -> None:
    for result in made["said"]:
        for text in (result.stdout, result.stderr):
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
            assert "49" not in re.sub(
                r"[\d.]+%?", lambda n: n[0] if n[0] == "49" else "", text
            )  # {{7*7}} was not computed
        if result.exit_code:
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
            assert result.stderr.rstrip().endswith(line)
            assert "[red]r[" in line  # rich would have eaten it
            assert SCRIPT in line


def test_report_html_has_no_element_of_theirs(made: dict[str, Any]) -> None:
    page = page_of(made["run"] / "report.html")
    assert SCRIPT in page.text
    assert "[l](javascript:alert(3))" in page.text
    plain = page_of(Path(__file__).parent.parent / "reports" / "digits" / "report.html")
    assert [attrs for attrs, _ in page.scripts] == [attrs for attrs, _ in plain.scripts]
    for (attrs, text), (_, theirs) in zip(page.scripts, plain.scripts, strict=True):
        assert text == theirs or (attrs.get("type") == "application/json" and json.loads(text))
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert not [
        v
        for _, name, v in page.attributes
        if name in ("href", "src") and v and not v.startswith(("#", "data:", "report.md"))
    ]


@pytest.mark.parametrize("file", ["report.md", "pruned-4/README.md"])
def test_markdown_has_no_html_and_no_link_of_theirs(file: str, made: dict[str, Any]) -> None:
    text = (made["run"] / file).read_text()
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    columns = 0
    for token in parser.parse(body):
        if token.type == "tr_open":
            columns = 0
        if token.type in ("th_open", "td_open"):
            columns += 1
        for part in (token, *(token.children or ())):
            if part.type in ("html_block", "html_inline"):
                page = Page()
                page.feed(part.content)
                assert not {"script", "img"} & set(page.tags), part.content
                assert not [a for a in page.attributes if a[1].startswith("on")]
            href = str(part.attrGet("href") or part.attrGet("src") or "")
            assert not href.startswith(("javascript", "x")), href
            assert "alert" not in href
    assert "\x1b" not in text
    if file == "report.md":
        assert "javascript:alert(3)" in text  # it is there, as text
    for table in re.findall(r"(?:^\|.*\n)+", body, flags=re.M):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1, table  # a bar in a name makes no column


def test_metadata_of_the_card_is_read_as_text(made: dict[str, Any]) -> None:
    import yaml

    text = (made["run"] / "pruned-4" / "README.md").read_text()
    data = yaml.safe_load(text.split("---")[1])
    assert SCRIPT in data["tags"]
    assert data["license"] == "mit"


@pytest.mark.drawn
def test_a_picture_holds_text_alone(made: dict[str, Any]) -> None:
    path = made["root"] / "seen.svg"
    tree = ElementTree.parse(path)
    assert not [e for e in tree.iter() if e.tag.rpartition("}")[2] in ("script", "foreignObject", "a")]
    links = [value for e in tree.iter() for name, value in e.attrib.items() if name.rpartition("}")[2] == "href"]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert not [name for e in tree.iter() for name in e.attrib if name.lower().startswith("on")]


def test_documents_hold_it_as_it_is(made: dict[str, Any]) -> None:
    run = json.loads((made["run"] / "run.json").read_text())
    assert run["columns"]["text"] == COLUMN
    assert run["options"]["model"] == str(made["model"])
