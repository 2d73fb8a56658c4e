"""Text is never markup: names, labels and rows that look like HTML, Markdown, rich's markup and a terminal's codes, to the end."""

import json
import re
from typing import Any

import pytest
import transformers as tf
from markdown_it import MarkdownIt

from tests.support.commands import run
from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.zoo import randomise

pytestmark = pytest.mark.slow

SCRIPT = '<script>alert("1")<'  # "/" cannot be in a file's name
EVIL = f"{SCRIPT}/script><img src=x onerror=alert(2)> [red]r[/] [/] [l](javascript:alert(3)) `c` | p \x1b[31m {{{{7*7}}}} & '"
NAME = f"{SCRIPT}img src=x onerror=alert(2)> [red]r[] [l](javascript:alert(3)) `c` | {{{{7*7}}}} & '"
COLUMN = f"{EVIL}\n# h"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose model, data, columns, labels and rows are all named so; and what the terminal got."""
    root = tmp_path_factory.mktemp("markup")
    model, data = root / f"m{NAME}", root / f"d{NAME}.jsonl"
    config = tf.BertConfig(**common(id2label={0: EVIL, 1: f"{EVIL}2"}, label2id={EVIL: 0, f"{EVIL}2": 1}))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(model)
    tokenizer().save_pretrained(model)
    document = json.loads((model / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    for token, old in ((f"{SCRIPT}x", "one"), ("[red]", "two"), ("`|`", "three")):  # tokens of the model's own
        vocabulary[token] = vocabulary.pop(old)
    (model / "tokenizer.json").write_text(json.dumps(document))
    (model / "README.md").write_text(f"---\nlicense: mit\ntags:\n- '{SCRIPT}'\nlanguage: '{SCRIPT}'\n---\n# {EVIL}\n")
    rows = [{COLUMN: f"{SCRIPT} [red] {row['text']} {i} {EVIL}", "label": (EVIL, f"{EVIL}2")[int(str(row['label']))]}
            for i, row in enumerate(sentences(60, 1))]  # fmt: skip
    write_jsonl(data, rows)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("headprune.latency.MIN_SECONDS", 0.001)
        out = root / f"r{NAME}"
        for code, *typed in (
            [0, "score", model, "-d", data, "--text-column", COLUMN, "-m", "gradient", "-L", 20, "-b", 8, "-o", out],
            [0, "prune", "-k", 4, "-s", "one-shot", "--no-repair", "--scores", out, "-o", out],
            [0, "report", out], [0, "inspect", model], [0, "show", model, "--text", f"{EVIL} good film"],
            [1, "score", model, "-d", data, "--text-column", f"no{EVIL}"],
            [1, "score", model, "-d", root / f"gone{NAME}.jsonl"],
            [1, "score", root / f"gone{NAME}", "-d", data],
            [1, "prune", model, "-d", data, "-k", EVIL],
        ):  # fmt: skip
            said.append(run(*typed, code=code))
    return {"run": out, "said": said, "model": model}


def test_the_terminal_shows_it_as_it_is(made: dict[str, Any]) -> None:
    for result in made["said"]:
        for text in (result.stdout, result.stderr):
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
            assert "49" not in re.findall(r"[\d.]+%?", text)  # {{7*7}} was not computed
        if result.exit_code:
            (line,) = [line for line in result.stderr.splitlines() if line.startswith("headprune: ")]
            assert result.stderr.rstrip().endswith(line)
            assert "[red]r[" in line  # rich would have eaten it
            assert SCRIPT in line


@pytest.mark.parametrize("file", ["report.md", "pruned-4/README.md"])
def test_markdown_has_no_html_and_no_link_of_theirs(file: str, made: dict[str, Any]) -> None:
    text = (made["run"] / file).read_text()
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(body):
        for part in (token, *(token.children or ())):
            if part.type in ("html_block", "html_inline"):
                assert not re.sub(r"</?details>|<summary>[^<>]*</summary>|<!--.*?-->|\s", "", part.content)
            href = str(part.attrGet("href") or part.attrGet("src") or "")
            assert not href.startswith(("javascript", "x")), href
            assert "alert" not in href
    assert "\x1b" not in text
    run = json.loads((made["run"] / "run.json").read_text())  # documents hold it as it is
    assert (run["columns"]["text"], run["options"]["model"]) == (COLUMN, str(made["model"]))
    if file == "report.md":
        assert "javascript:alert(3)" in text  # it is there, as text
    for table in re.findall(r"(?:^\|.*\n)+", body, flags=re.M):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(bars) == 1, table  # a bar in a name makes no column
