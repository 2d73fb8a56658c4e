"""What README and docs say to type, and where they lead: today's commands, options, files and headings."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support.commands import COMMANDS, metrics_of, run

ROOT = Path(__file__).parents[1]
MADE = {"api.md", "coverage.md", "coverage-onnx.md", "licences.md"}
FILES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
PAGES = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in FILES}
PROSE = {name: text for name, text in PAGES.items() if Path(name).name not in MADE | {"CHANGELOG.md"}}
OPTIONS = {
    name: {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o[0] == "-"} | {"--help"}
    for name, command in COMMANDS.items()
}


def code_in(text: str) -> list[str]:
    """The lines of code blocks, and what stands in backticks."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```|((?:^    [^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```\w*\n(.*?)^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for pair in blocks for block in pair for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", rest)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings are linked to."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        assert not heading or heading in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", PROSE)
def test_commands_have_these_options(name: str) -> None:
    for line in code_in(PROSE[name]):
        for command, rest in re.findall(r"(?:^|-m |[;&|] |\$ )headprune (\w+)([^;&|#]*)", line):
            if command not in COMMANDS:  # `headprune auto` is a row of a table
                assert not rest.strip(), line
                continue
            typed = re.findall(r"(?<!\S)(--?[a-z][\w-]*)", rest)
            assert not set(typed) - OPTIONS[command], line


@pytest.mark.parametrize("command", ["score", "prune", "finetune", "show", "bench", "export", "push"])
def test_every_option_is_shown_somewhere(command: str) -> None:
    code = "\n".join(line for text in PROSE.values() for line in code_in(text))
    for options in (p.opts for p in COMMANDS[command].params if p.opts[0][0] == "-"):
        assert any(re.search(rf"(?<!\S){o}(?![\w-])", code) for o in options), options


@pytest.mark.parametrize("name", PROSE)
def test_files_are_there(name: str) -> None:
    for path in re.findall(r"`((?:headprune|tests|benchmarks|tools|docs|reports)/[\w./-]*)`(?!, new)", PROSE[name]):
        assert (ROOT / path).exists() or path.startswith("reports/"), path


# -- the quick start, with the demo, from nothing; and a real model, pruned (slow) ---------------------------------

MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"


def test_nothing_that_is_ignored_is_committed() -> None:
    """Else a fresh clone would find what it says it makes."""
    git = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=False)
    if found.returncode or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    assert found.stdout == ""


@pytest.mark.slow
@pytest.mark.drawn
def test_the_quick_start(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/quickstart.md but those that install, and its Python. The ViT is trained here, as in a fresh clone."""
    monkeypatch.setattr("headprune.app.demo.KEEP", ("12",))
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    commands = [line for line in commands if not line.startswith(("git ", "python3 -m venv", "pip "))]
    assert len(commands) >= 8
    for command, *arguments in map(shlex.split, commands):
        if command == "headprune":
            run(*arguments)
        else:
            subprocess.run([command, *arguments], check=True)
    assert len(list((here / ".headprune" / "digits" / "data").glob("*.parquet"))) == 3
    assert (here / "heads.png").stat().st_size > 1000
    metrics = metrics_of(here / "reports" / "demo")
    assert metrics["dense"]["metrics"]["accuracy"] >= 0.97
    (half,) = metrics["budgets"]
    assert half["kept"] == 12
    assert half["pruned"]["metrics"]["accuracy"] > max(half["random"])
    assert half["parameters"] < metrics["dense"]["parameters"]
    assert "has been run" in run("demo", "-q").stdout
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    capsys.readouterr()
    exec(code, {})
    assert "times as fast" in capsys.readouterr().out


def right(folder: Path, rows: list[dict[str, Any]]) -> list[bool]:
    """Which sentences a classifier gets right, one at a time, as transformers loads it."""
    model, tokenizer = (
        auto.from_pretrained(folder) for auto in (tf.AutoModelForSequenceClassification, tf.AutoTokenizer)
    )
    with torch.inference_mode():
        logits = [model.float().eval()(**tokenizer(row["text"], return_tensors="pt")).logits for row in rows]
    return [int(each.argmax()) == row["label"] for each, row in zip(logits, rows, strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(not MINILM.is_dir(), reason="needs ../shared/real/minilm-rt, which is not part of the product")
def test_minilm(here: Path) -> None:
    """Its accuracy is the one counted by hand, on the first sentences of the test split."""
    model, data, test = "minilm-rt", "minilm-rt/data", here / "minilm-rt" / "data" / "test.jsonl"
    shutil.copytree(MINILM, here / model)
    lines = test.read_text().splitlines()[:400]
    test.write_text("\n".join(lines))
    run("score", model, "-d", data, "--split", "train", "-m", "gradient", "-L", 64, "-b", 16, "-q")
    run("prune", "--keep", 36, "-q")
    metrics = metrics_of(here / "reports" / "minilm-rt-1")
    known = right(here / model, [json.loads(line) for line in lines])
    assert metrics["dense"]["examples"] == len(known)
    assert metrics["dense"]["metrics"]["accuracy"] == pytest.approx(
        sum(known) / len(known), abs=1.5 / len(known)
    )  # a near tie
    (budget,) = metrics["budgets"]
    assert budget["kept"] == 36
    assert budget["pruned"]["metrics"]["accuracy"] > 0.75
    assert budget["proof"]["difference"] < 1e-4
    assert budget["proof"]["reload_difference"] == 0
