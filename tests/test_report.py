"""What the report says is what was measured, the bad news too: by `headprune report` on run folders of these documents."""

import base64
import copy
import dataclasses
import hashlib
import io
import json
import math
import re
import shutil
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console as RichConsole

import headprune as hp
from headprune.app.report.measured import sizes_figure
from headprune.app.runs import RunFolder
from headprune.app.workflow.results import time_parts
from headprune.cli import terminal
from headprune.cli.terminal import Console
from headprune.timing import PARTS
from tests.support import documents
from tests.support.commands import Silent
from tests.support.commands import run as command
from tests.support.documents import LAYER, MEASURED, METRICS, RUN, SPEED, TIME, TRAINED, repaired, scores_of
from tests.support.reports import COMMITTED, reported
from tests.support.zoo import bert

STEP = {"before": 1.0, "held_out": 0.7, "strength": 1.0, "examples": 9}


def with_budget(**changes: Any) -> dict[str, Any]:
    """Metrics whose one pruned model differs so."""
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0] |= changes
    return metrics


def planned(**planning: Any) -> dict[str, Any]:
    return {**METRICS, "planning": {"strategy": "auto", **planning}}


def compared(*plans: tuple[str, int]) -> list[dict[str, Any]]:
    """Two orders, whose plans for these budgets have a loss of 1/4, 1/8, …."""
    return [
        {"order": order, "used": order == "compensated", "plans": [
            {"budget": budget, "kept": kept, "loss": value / 2**i} for i, (budget, kept) in enumerate(plans)
        ]} for order, value in (("gradient", 0.25), ("compensated", 0.125))
    ]  # fmt: skip


TRIALS = [
    {"step": "output projections", "before": 0.5, "after": 0.25, "examples": 256, "kept": True},
    {"step": "values", "before": 0.25, "after": 0.375, "examples": 256, "kept": False},
    {"step": "answers", "before": 0.25, "after": math.nan, "examples": 256, "kept": True},
]
LATE = {"asked": "latency 80%", "reading": {"value": 0.78, "low": 0.77, "high": 0.79}, "batch": 32, "length": 9}
PARAMS = {"asked": "params 9.5M", "reading": {"value": 9.4e6, "low": 9.4e6, "high": 9.4e6}}
DROP = {"asked": "drop 0.01", "reading": {"value": 0.002, "low": -0.001, "high": 0.008}}
SPLIT = {"metrics": {"accuracy": 0.65}, "low": 0.6, "high": 0.7, "examples": 200}
OTHER = {**METRICS["curve"][1], "asked": 3, "kept": 3, "value": 0.7}
EXPORTS = [
    {"format": "onnx", "name": "2 heads", "checkpoint": "pruned-2", "file": "2.onnx", "proved": True, "summary": "3 kB", "notes": ["Slow."]},
    {"format": "gguf", "name": "2 heads", "checkpoint": "pruned-2", "file": None, "proved": False, "summary": "no decoder"},
]  # fmt: skip

# What the committed reports show is compared with them, word for word, below.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a bare run": (METRICS, [
        "| heads kept | accuracy | loss | p | FLOPs |", "| 2 | 70.0 % | 0.6 | 0.001 | 0.004 MFLOPs (-20.0%) | 60.0 % (50.0 % to 70.0 %) |",
        "100 (`train`) score the heads, 50 (`validation`) choose between plans, and every figure",
        "from 200 others (`test`).", "3 draws of as many heads", "| L0 (`block.0.attn`) | H1, H2 |",
        "differ by at most 1.0e-07 of their largest value (allowed: 1e-04) from those of the same model",
        "its outputs are exactly those of the model in memory", "2 threads,", "for at least 20 rounds. So was the limit",
    ], ["## Repair", "The run uses one order", "Where the time goes", "Written text", "last step"]),
    "ghosts": ({**with_budget(proof={**METRICS["budgets"][0]["proof"], "ghosts": [LAYER.name]}),
                "latency": {**METRICS["latency"], "bound_ghosts": 1}},
               [f"keep one head (or group) with zero output, which the cache or the module's code needs: `{LAYER.name}`", "In 1 of its layers"], []),
    "the last step": (with_budget(repair=repaired(answers={**STEP, "part": 0.5}, layers_alone=SPLIT, trials=TRIALS)), [
        "| accuracy without repair | repaired layer by layer only |", "; left out: values with 2 heads.",
        "but without the last step of repair, on the 50 choosing", "| 65.0 % | 60.0 % (50.0 % to 70.0 %) |",
    ], []),
    "trained": (with_budget(repair=repaired(), finetune=TRAINED), [
        "| accuracy without repair | before training |", "| 60.0 % | 60.0 % |", "Fine-tuned on 60 examples for 2 epochs, with distillation",
        "and what repair and training gained",
    ], []),
    "the effort": (planned(protect="L0.H3", min_heads_per_layer=1, work={
        "compensated": {"passes": 21.0, "flops": 2e12, "examples": 512},
        "re-scored": {"passes": 70.0, "flops": 7e13, "examples": 512, "left_out": "it would take much"},
    }), ["- re-scored was not tried: it would take much. `--effort high` tries it.", "Protected heads: L0.H3.",
         "at least 1 query heads", "- The strategy of this run: auto."], ["compensated was"]),
    "compared by loss": (planned(judged_by="the loss", compared=compared(("latency 80%", 1), ("keep 2", 2))), [
        "the best by the loss. Below: its mean for each plan on the choosing part, heads", "| order | keep 2 | latency 80% |", "| gradient | 0.125 | 0.25 (1 head) |",
    ], []),
    "a latency": (with_budget(strategy="per-layer", budget=LATE), [
        "Asked: at most 80 % of the dense model's latency; with 2 heads it is 78 % (95 %: 77 % to 79 %) at batch 32 x 9 tokens, on a "
        "fresh measurement.", "| 2 | ablation, per-layer | `pruned-2/` |",
    ], []),
    "parameters": (with_budget(budget=PARAMS), ["Asked: at most 9,500,000 parameters; with 2 heads it is 9,400,000 parameters."], []),
    "a drop": (with_budget(budget=DROP),
               ["are 2: 0.0020 (-0.0010 to 0.0080) there"], []),
    "a plan of the user's": ({**with_budget(method="", strategy="", budget={"asked": "plan my.json"}), "planning": {"plan": "my.json"}}, [
        "| 2 | `my.json` | `pruned-2/` |", "100 (`train`) are not used, 50 (`validation`) are used for the curve only",
    ], ["## How the heads were chosen"]),
    "more heads": ({**METRICS, "curve": [*METRICS["curve"], OTHER]}, ["| heads kept | ablation |", "| 3 | 70.0 % |\n| 2 | 72.0 % |"], []),
    "the largest input, and one that waits": ({**METRICS, "time": [
        {**TIME, "parts": {**TIME["parts"], "feed-forward": 0.25, "launch overhead": 0.8}}, {**TIME, "batch": 8, "bounds": {"2 heads": 1.3}},
    ]}, ["At batch 8 x 9 tokens, 38%", "would give at most 1.30x", "At batch 1 x 9 tokens, 40% is launch overhead, which pruning heads does not",
         "| 2 heads: measured of possible | 1.01x of 1.25x | not compared |"], []),
    "a busy machine": ({**METRICS, "time": [{**TIME, "total": 336.0, "parts": {k: 168 * ms for k, ms in TIME["parts"].items()}}]}, [
        "\n\nAt batch 1 x 9 tokens the machine was busy while the dense model's time was broken down: a pass took 336.00 ms, and 2.00 ms",
        "possible | not compared |",
    ], ["of the dense model's time is attention"]),
    "plain operations took another time": ({**METRICS, "time": [{**TIME, "total": 0.2, "stand_ins": True}]}, ["plain operations"], ["busy"]),
    "written text": ({**METRICS, "generation": [documents.GENERATION]}, [
        "| batch 1 x 9 tokens | dense | 2.00 |  | 2.00 |  | 500.0 | 12.3 kB |",
        "| batch 1 x 9 tokens | 2 heads | 2.00 | 1.01x (0.98 to 1.04), no measurable change | 1.60 | 1.25x (1.20 to 1.30), faster | 625.0 | 6.14 kB |",
    ], []),
    "other data": ({**with_budget(repair=repaired(), also=[
        {"pruned": MEASURED, "change": METRICS["budgets"][0]["change"], "gain": {**METRICS["budgets"][0]["change"], "verdict": "better"}},
    ]), "also": [{"name": "no|tes.txt", "data": documents.PARTS["report"], "dense": MEASURED}]}, [
        "| `no\\|tes.txt`, 200 examples | 4 (dense) | 60.0 % (50.0 % to 70.0 %) |  |  |  |", "| -10.00 points (-15.00 to -5.00), better |",
        "effect of repair",
    ], []),
    "other engines": ({**METRICS, "exports": EXPORTS, "engines": [{"format": "onnx", "rows": METRICS["latency"]["rows"]}]}, [
        "| 2 heads | onnx | `2.onnx`: 3 kB |", "| 2 heads | gguf | not written: no decoder |", "onnx, timed as above", "\n\nSlow.\n\n",
    ], []),
    "sizes in two precisions": ({**with_budget(weights=2_000, dtype="float32"), "dense": {**METRICS["dense"], "weights": 2, "dtype": "float16"}},
                                ["| parameters (size as saved) |", "| 900 (-10.0%; 2 kB in float32) |"], ["Weights are saved"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_report_says(name: str, report: Any) -> None:
    metrics, there, absent = CASES[name]
    text = report(metrics)
    assert [line for line in there if line not in text] == []
    assert [line for line in absent if line in text] == []
    assert text.count("<details>") == text.count("</details>")


def test_scores_alone(report: Any) -> None:
    odd = dataclasses.replace(SCORES, method="gradient", details={"carried_by": [3, 50, 50, 50], "stderr": "none"})
    text = report(None, SCORES, odd, run={**RUN, "folder": "my runs/a"})
    for line in (
        "**Nothing is pruned yet: this run has only scored the heads.** Next, to keep half of them:\n\n```\nheadprune prune --keep 50% -o 'my runs/a'\n```",
        "- By ablation, the heads that matter most are L0.H0 (0.3000±0.0100), L0.H1 (0.2000±0.0100)",
        "- The scores are from 100 examples (`train`). Two other parts, which share no example and no input with them, are set aside",
        "Harmful (more than 1.96 standard errors below 0): 1 of 4; within 1.96 standard errors of 0: 1.",
        f"; 100 examples; no standard error: none; {odd.caution}.", "| ablation, gradient | 1.00 | 1.00 | 100% |",
    ):  # fmt: skip
        assert line in text
    assert odd.caution
    assert "Harmful" not in report(None, scores_of([0.1, 0.2, 0.3, 0.4]))  # none is
    unsure = dataclasses.replace(SCORES, stderr={LAYER.name: SCORES.stderr[LAYER.name] * math.nan})
    assert "Harmful" not in report(None, unsure)
    flat = report(None, SCORES, scores_of([4, 3, 2, 1], "down"), scores_of([1, 1, 1, 1], "flat"))
    pairs = re.findall(r"^\| (\w+, \w+) \| (\S+) \|", flat, re.M)
    assert pairs[0][0] == "ablation, down"
    assert [rho for _, rho in pairs[1:]] == ["–", "–"]  # those that cannot be compared come last


def test_what_holds_of_all_models_is_said_once(report: Any) -> None:
    notes, steps = ["Two, not three.", "The search took long."], ["All alike.", "No step."]
    metrics = with_budget(notes=notes, repair=repaired(notes=steps))
    other = {"kept": 1, "notes": notes[1:], "repair": repaired(notes=steps[:1])}
    metrics["budgets"].append({**METRICS["budgets"][0], **other})
    text = report(metrics)
    for note in ("The search took long.", "With 2 heads: Two, not three.", "All alike.", "With 2 heads: No step."):
        assert text.count(f"\n\n{note}\n\n") == 1


def test_what_the_removed_heads_did(report: Any) -> None:
    """Counted by hand: heads 1 and 2 went, which are one of the broad heads and one of the two that look ahead."""
    text = report(METRICS, heads=documents.HEADS)
    rows = re.findall(r"^\| ([a-z ]+) \| (\d) \| (\d) \| (.*) \|$", text.partition("## What the heads do")[2], re.M)
    assert rows == [
        ("next token", "2", "1", "L0.H2: 90% is there"), ("broad", "1", "1", "L0.H1: 96% is there"), ("mixed", "1", "0", "L0.H3: 10% is there"),
    ]  # fmt: skip
    assert "removed to keep" not in report(None, SCORES, heads=documents.HEADS).partition("## What the heads do")[2]


@pytest.mark.parametrize(("model", "title"), [
    (".headprune/digits/model", "digits/model"), ("/", "/"), ("<a> & {{ b }}  c", "\\<a> & {{ b }}  c"),
])  # fmt: skip
def test_a_title_has_a_name_and_no_path(model: str, title: str, report: Any) -> None:
    run = {**RUN, "options": {**RUN["options"], "model": model}, "columns": {"items": "x"}}
    text = report(METRICS, run=run)
    assert re.match(rf"# Attention heads of {re.escape(title)}\n\n\*\*(?s:.*)timings do not.\n\Z", text)
    assert f"- The model: `{model}`, `M`, t, " in text
    assert "- Columns: items = `x`." in text


def test_commands_to_paste_overwrite_nothing(report: Any) -> None:
    run = copy.deepcopy(RUN)
    run["commands"] = ["headprune score 'm y' -o r --overwrite -q", "headprune prune --keep 2 --overwrite"]
    run["environment"]["threads"] = 1
    run["notes"] = ["1. a", "# b", "2.5 c"]
    text = report(METRICS, run=run)
    assert "```\nheadprune score 'm y' -o r -q\nheadprune prune --keep 2\n```" in text
    assert "1 thread," in text
    assert "\n- 1\\. a\n- \\# b\n- 2\\.5 c\n" in text


@pytest.mark.drawn
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda p: p.name)
def test_no_legend_covers_an_interval(folder: Path) -> None:
    """It lay over those of the largest models."""
    metrics = RunFolder(folder).read_metrics()
    assert metrics is not None
    figure: Any = sizes_figure(metrics).drawing
    figure.canvas.draw()
    (legend,), (axis,) = [box for a in figure.axes if (box := a.get_legend())] or figure.legends, figure.axes
    assert not legend.get_window_extent().overlaps(axis.get_window_extent())


# -- report.html ------------------------------------------------------------------------------------

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


def page(folder: Path, *given: Any, **more: Any) -> Page:
    """The page of a run folder of these documents."""
    reported(folder / "r", *given, **more)
    return Page((folder / "r" / "report.html").read_text())


@pytest.mark.drawn
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda p: p.name)
def test_committed_reports_are_of_today_and_explain_their_words(folder: Path, tmp_path: Path) -> None:
    """And the page says what the Markdown and the documents say."""
    shutil.copytree(folder, tmp_path / "r", ignore=shutil.ignore_patterns("*.html", "*.png"))
    command("report", tmp_path / "r", "-q")
    text, found = ((tmp_path / "r" / name).read_text() for name in ("report.md", "report.html"))
    assert text == (folder / "report.md").read_text()
    for name in {"auto", "re-scored", "compensated", "ablation", "gradient"} & set(re.findall(r"[\w-]+", text)):
        assert re.search(rf"\b{name}\b", text).start() == text.index(f"**{name}:**") + 2, name  # type: ignore[union-attr]
    assert set(re.findall(r"\((\w+\.png)\)", text)) == {path.name for path in folder.glob("*.png")}
    sections = dict(part.split("\n\n", 1) for part in text.split("\n## ")[1:])
    unfolded = {name for name, body in sections.items() if not body.startswith("<details><summary>")}
    assert unfolded - {"On other data", "Written text"} == {
        "Why trust these figures",
        "Where the time goes",
        "Reproduce",
    }
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
    run["options"] = {"model": documents.HOSTILE + codes, "seed": 0, "data": {"dataset": documents.HOSTILE}}
    run["commands"], run["notes"] = [f"headprune score {documents.HOSTILE}{codes}"], [documents.HOSTILE, codes]
    run["model"] |= {"class": documents.HOSTILE, "task": documents.HOSTILE}
    run["parts"]["score"]["split"] = run["columns"]["items"] = documents.HOSTILE + codes
    metrics["budgets"][0]["checkpoint"] = documents.HOSTILE.replace("/", "")
    hostile = documents.heads_document(
        title=documents.HOSTILE, token=documents.HOSTILE + codes, role=documents.HOSTILE + codes
    )
    found = page(tmp_path, metrics, scores_of([0.3, 0.2, -0.1, 0.005], documents.HOSTILE), run=run, heads=hostile)
    plain = page(tmp_path / "plain", METRICS, SCORES, heads=documents.heads_document())
    for tags in ({"script", "img", "style"}, {"a", "iframe", "object"}):
        assert [tag for tag, _ in found.elements if tag in tags] == [tag for tag, _ in plain.elements if tag in tags]
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert not set("<>&") & set(found.raw[1])
    assert documents.HOSTILE in found.text
    assert found.data["samples"][0]["title"] == documents.HOSTILE
    assert found.data["samples"][0]["positions"]["input"]["labels"][0] == f"{documents.HOSTILE}�]0;x� �31m �"
    assert found.heads[0][1] == documents.HOSTILE
    assert found.heads[1][-1] == f"{documents.HOSTILE}�]0;x� �31m �"
    for name in ("report.md", "report.html"):
        text = (tmp_path / "r" / name).read_text()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert "�]0;x� �31m �" in text


def test_a_browser_may_run_this_script_and_fetch_nothing(tmp_path: Path) -> None:
    found = page(tmp_path, METRICS, SCORES, heads=documents.heads_document())
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
    found = page(tmp_path, METRICS, SCORES, heads=documents.heads_document(unseen="no softmax", samples=0))
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
    page(tmp_path, metrics, run=run, heads=documents.large_heads_document(32, 32, 32))
    assert 1_400_000 < (tmp_path / "r" / "report.html").stat().st_size < 2_000_000


# -- the verdict: right in every case, and the same in the terminal and in JSON ---------------------

FASTER = {"ratio": 1.5, "low": 1.4, "high": 1.6, "verdict": "faster"}
OTHERS = {"no": "no measurable change"}
WHERE = "at batch 1 x 9 tokens on a CPU (cpu, 2 threads, float32)"


def budgets_of(*changes: tuple[int, float, float, str], metric: str = "accuracy") -> dict[str, Any]:
    """Metrics with a pruned model for each (heads kept, change, half its interval, verdict)."""
    found = copy.deepcopy(METRICS)
    (first,) = found["budgets"]
    found |= {"metric": metric, "budgets": []}
    names = [f"{kept} heads" for kept, *_ in changes]
    for name, (kept, value, half, word) in zip(names, changes, strict=True):
        change = {**first["change"], "metric": metric, "value": value, "low": value - half, "high": value + half}
        change["verdict"] = OTHERS.get(word, word)
        facts = {"name": name, "kept": kept, "asked": kept, "checkpoint": f"pruned-{kept}", "change": change}
        found["budgets"].append({**first, **facts})
    row = found["latency"]["rows"][0]
    row["timings"] = dict.fromkeys(["dense", *names, "no heads"], documents.TIMING)
    row["speedups"] = {**dict.fromkeys(names, FASTER), "no heads": {**FASTER, "ratio": 2.0}}
    if metric != "accuracy":
        value = {"perplexity": 12.0, "loss": 0.5}[metric]
        for model in (found["dense"], *(b["pruned"] for b in found["budgets"])):
            model |= {"metrics": {metric: value}, "low": 0.8 * value, "high": 1.1 * value}
        for b in found["budgets"]:
            b["random"] = [20.0, 21.0]
    return found


def limited(limit: float) -> dict[str, Any]:
    """The user allowed a drop of this size."""
    data = budgets_of((2, -0.06, 0.01, "worse"))
    data["budgets"][0]["budget"] = {"asked": f"drop {limit}", "reading": {"value": 0.05, "low": 0.04, "high": 0.07}}
    return data


def guessing(metric: str, level: float) -> dict[str, Any]:
    data = budgets_of((2, 0.0, 0.001, "no"), metric=metric)
    data["dense"]["guessing"] = level
    return data


def timed(speed: dict[str, Any], bound: dict[str, Any]) -> dict[str, Any]:
    data = budgets_of((2, 0.0, 0.001, "no"))
    data["latency"]["rows"][0]["speedups"] = {"2 heads": speed, "no heads": bound}
    return data


TOO_FEW = "200 examples are too few to say whether heads can go: without 2 of the 4 heads, "
GUESSES = "The dense model is no better than guessing"
VERDICTS: dict[str, tuple[dict[str, Any], str, str]] = {  # the headline's words, and the rule's
    "the fewest without a loss, in whatever order they were typed": (
        budgets_of((3, 0.001, 0.01, "no"), (1, -0.2, 0.1, "worse"), (2, -0.005, 0.015, "no")),
        "2 of the 4 heads can go: accuracy 70.0 % against 80.0 % (no measurable change; a loss of up to 2.0 points is possible), "
        f"1.50x as fast {WHERE}; removing every head would give 2.00x.", "Recommended: 2 heads, the smallest model for which a loss above",
    ),
    # More examples made a loss of 0.3 % measurable, and only therefore the model was not recommended.
    "a small loss of perplexity": (budgets_of((2, 0.003, 0.002, "worse"), metric="perplexity"),
                                   "(+0.3%, measurably worse; a loss of up to 0.5% is possible)", "Recommended: 2 heads, since a loss above 5 % is"),
    "a small loss of accuracy": (budgets_of((2, -0.008, 0.006, "worse")), "(-0.8 points, measurably worse; a loss of up to 1.4 points is possible)",
                                 "Recommended: 2 heads, since a loss above 2.5 points is ruled out at 95 %."),
    "too few examples": (budgets_of((2, -0.05, 0.06, "no"), (1, -0.05, 0.08, "no")), TOO_FEW, "None is recommended: for no model a loss above 2.5"),
    "all are worse": (
        budgets_of((3, -0.03, 0.01, "worse"), (2, -0.1, 0.01, "worse")), "Every plan worsens the accuracy; the mildest removes "
        "1 of the 4 heads: accuracy 70.0 % against 80.0 % (-3.0 points, measurably worse), 1.50x", "None is recommended",
    ),
    "one is better": (budgets_of((2, 0.03, 0.01, "better")), "can go: accuracy 70.0 % against 80.0 % (+3.0 points, measurably better)", "Recommended"),
    "perplexity, unsure": (budgets_of((2, 0.02, 0.04, "no"), metric="perplexity"), TOO_FEW, "None is recommended"),
    "perplexity, better": (budgets_of((2, -0.02, 0.01, "better"), metric="perplexity"), "can go", "Recommended"),
    "a plain loss, as a share of the dense model's": (budgets_of((2, 0.002, 0.02, "no"), metric="loss"), "a loss of up to 0.022 is possible", "above 5 %"),
    "an allowed drop": (limited(0.08), "can go: accuracy 70.0 % against 80.0 % (-6.0 points, measurably worse; a loss of up to 7.0 points is",
                        "since a loss above 8 points (your limit) is ruled out"),
    "an allowed drop that is exceeded": (limited(0.05), "worsens the accuracy", "for no model a loss above 5 points (your limit) is ruled out"),
    "guessing": (guessing("accuracy", 0.76), GUESSES, "None is recommended: the dense model is no better than guessing."),
    "not guessing": (guessing("accuracy", 0.5), "can go", "Recommended"),
    "not guessing tokens": (guessing("perplexity", 30_000.0), "can go", "Recommended"),
    "guessing tokens": (guessing("perplexity", 12.5), GUESSES, "None is recommended: the dense model is no"),
    "slower": (timed({**SPEED, "ratio": 0.9, "verdict": "slower"}, FASTER), f"slower (0.90x as fast) {WHERE}; removing every head would give 1.50x", ""),
    "not faster": (timed(SPEED, SPEED), f"not measurably faster (1.01x, 0.98 to 1.04) {WHERE}; nor would it be with every head removed.", ""),
    "faster than the bound": (timed({**FASTER, "ratio": 1.6}, FASTER), f"1.60x as fast {WHERE}.", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name: str, report: Any) -> None:
    data, headline, rule = VERDICTS[name]
    text = report(data)
    assert headline in text.split("**")[1]
    (line,) = re.findall(r"^- ((?:None is r|R)ecommended.*)$", text, re.M)
    assert rule in line
    assert re.findall(r"^\| \*\*(\d)\*\* \|", text, re.M) == re.findall(r"Recommended: (\d)", line)


def test_what_was_changed_beside_the_removal_and_where_it_was_timed(report: Any) -> None:
    data = budgets_of((2, -0.1, 0.01, "worse"))
    refitted = "with the weights that stay refitted by least squares"
    for changes, words in (
        ({}, "worsens the accuracy: "), ({"repair": repaired()}, f"accuracy, {refitted} (repair, without training): accuracy"),
        ({"repair": repaired(), "finetune": TRAINED}, f"accuracy, {refitted} and the smaller model trained again: accuracy"),
        ({"repair": repaired(layers={}), "finetune": TRAINED}, "accuracy, with the smaller model trained again: accuracy"),
        ({"repair": repaired(layers={}), "finetune": {**TRAINED, "best": 0}}, "worsens the accuracy: "),
    ):  # fmt: skip
        data["budgets"][0] |= changes
        assert words in report(data).split("**")[1]
    assert "none was better than the weights before training, so these are kept" in report(data)
    row = data["latency"]["rows"][0]
    shapes = [(1, 9), (32, 36), (32, 9), (1, 36)]  # the largest batch, at the usual length
    data["latency"]["rows"] = [{**row, "batch": batch, "length": length} for batch, length in shapes]
    elsewhere = RUN["environment"] | {"device": "cuda:0", "device_name": "a GPU"}  # scores may be of another machine
    assert "at batch 32 x 9 tokens on a GPU (cuda:0, float32)" in report({**data, "environment": elsewhere})


def test_chosen_heads_beside_random_ones(report: Any) -> None:
    data = budgets_of((3, 0.0, 0.001, "no"), (2, 0.0, 0.001, "no"))
    gain = {**data["budgets"][0]["change"], "value": 0.1, "low": 0.05, "high": 0.15, "verdict": "better"}
    data["budgets"][0] |= {"random": [0.5, 0.6], "over_random": gain}
    data["budgets"][1] |= {"random": [0.5, 0.6], "over_random": {**gain, "verdict": "no measurable change"}}
    text, caution = report(data), "beat every draw of as many random ones beyond chance"
    assert (
        "- Better than random heads? Yes with 3 heads (+10.00 points, +5.00 to +15.00); no measurable difference with "
        "2 heads (+10.00 points, +5.00 to +15.00).\n"
    ) in text
    assert caution not in text
    data["budgets"][0]["random"] = [0.5, 0.75]  # beyond chance for these examples, but one draw was better
    text = report(data)
    assert "random heads? Better than the mean of the draws, but not than each, with 3 heads (+10.00 points," in text
    assert text.index(caution) < text.index("| heads kept |") < text.index("- Recommended")
    assert caution not in report({**data, "planning": {"plan": "my.json"}})


def test_a_change_of_perplexity_fits_the_mean_it_stands_beside(report: Any) -> None:
    """Chosen heads with a perplexity of 60 are worse than draws of 10, 20 and 300 by the loss, and better than their arithmetic mean."""
    data = budgets_of((2, 0.0, 0.001, "no"), metric="perplexity")
    (budget,) = data["budgets"]
    draws = hp.Measurement({}, np.full(2, np.log([10, 20, 300]).mean()), np.zeros(2), np.ones(2))
    chosen = hp.Measurement({}, np.log([60.0, 60.0]), np.zeros(2), np.ones(2))
    budget["random"] = [10.0, 20.0, 300.0]
    budget["over_random"] = asdict(hp.compare(draws, chosen, "perplexity"))
    budget["pruned"]["metrics"] = {"perplexity": 60.0}
    text = report(data)
    assert "heads (+53.3%" in text
    assert "| random heads: geometric mean of 3 draws (range) |" in text
    assert " | 39.15 (10 to 300) |" in text


def test_random_heads_are_not_compared_with_trained_ones(report: Any) -> None:
    """Chosen heads that were no better than random ones were better once they had been trained, which random ones are not."""
    data = budgets_of((2, 0.0, 0.001, "no"))
    before = {**MEASURED, "metrics": {**MEASURED["metrics"], "accuracy": 0.6}}
    data["budgets"][0] |= {"random": [0.6, 0.62], "repair": None, "finetune": {**TRAINED, "before": before}}
    text = report(data)
    assert "difference with 2 heads.\n" in text
    assert "Random heads are not trained, so the chosen ones" in text
    assert "| before training | random heads: mean of 2 draws (range) |" in text
    assert "| 60.0 % | 61.0 % (60.0 % to 62.0 %) |" in text


def on_other_data(change: str, gain: str | None, here: str = "better", **more: Any) -> dict[str, Any]:
    data = budgets_of((2, 0.0, 0.001, "no"), **more)
    one, measured = data["budgets"][0]["change"], {**MEASURED, "metrics": data["dense"]["metrics"]}
    data["also"] = [{"name": "notes.txt", "data": RUN["parts"]["report"], "dense": measured}]
    gained = gain and {**one, "value": -0.2, "verdict": gain}
    there = {"pruned": measured, "change": {**one, "verdict": change}, "gain": gained}
    data["budgets"][0] |= {"also": [there], "repair": repaired(gain={**one, "value": 0.1, "verdict": here})}
    return data


def test_a_change_of_little_is_not_written_as_none(report: Any) -> None:
    text = report(budgets_of((2, -2e-5, 1e-4, "no"), metric="perplexity")).partition("## ")[0]
    assert "-0.002% (-0.012% to +0.008%)" in text
    assert "a loss of up to 0.008% is possible" in text
    assert "+0.2% (-0.3% to +0.7%)" in report(budgets_of((2, 0.002, 0.005, "no"), metric="perplexity"))


def test_cautions(report: Any) -> None:
    hurts, worse = "repair hurts on `notes.txt` (-20.00 points", "accuracy is measurably worse on `notes.txt`"
    text = report(on_other_data("no measurable change", "worse"))
    assert hurts in text
    assert "while it helped on the first data" in text
    assert worse not in text
    assert hurts not in report(on_other_data("no measurable change", "worse", here="worse"))  # then it is no secret
    text = report(on_other_data("worse", "no measurable change"))
    assert worse in text
    assert hurts not in text
    data = on_other_data("worse", None, metric="perplexity")
    del data["budgets"][0]["repair"]
    text = report(data)
    assert "perplexity is measurably worse on `notes.txt`" in text
    data["dense"]["guessing"], data["also"][0]["dense"] = 500.0, {**data["also"][0]["dense"], "high": 600.0}
    text = report(data)
    assert "On `notes.txt` the dense model is no better than guessing" in text
    assert "`notes.txt` (" not in text.partition("## ")[0]
    run = copy.deepcopy(RUN)
    run["parts"]["report"]["shortened"] = 7
    assert "**Caution:** 7 of the 200 reported texts were cut at their end: longer" in report(METRICS, run=run)
    for metric, low, high, trained in (
        ("accuracy", 0.95, 0.99, True), ("accuracy", 0.80, 0.90, False), ("perplexity", 1.0, 2.0, True), ("perplexity", 95.0, 99.0, False),
    ):  # fmt: skip
        data = budgets_of((2, 0.0, 0.001, "no"), metric=metric)
        data["curve"][0] |= {"low": low, "high": high}
        assert ("so it was probably trained on `validation`" in report(data)) == trained
    data = budgets_of((2, 0.0, 0.001, "no"), metric="perplexity")
    data["budgets"][0]["change"]["carried_by"] = 3.0
    assert "the change of the loss rests on about 3 of the 200 examples" in report(data)


def shown(folder: Path, width: int) -> str:
    """What the terminal says of a run."""
    console = Console()
    console.out = RichConsole(file=io.StringIO(), width=width, highlight=False)
    run = RunFolder(folder)
    metrics = run.read_metrics()
    assert metrics is not None
    terminal._print_summary(console, run.read_run(), metrics)
    terminal.print_times(console, metrics.latency.rows)
    told: str = console.out.file.getvalue()  # type: ignore[attr-defined]
    return told


@pytest.mark.parametrize("folder", [*COMMITTED, None], ids=lambda p: p.name if p else "other-data")
def test_report_terminal_and_json_say_the_same(folder: Path | None, tmp_path: Path, report: Any) -> None:
    if folder is None:
        report(on_other_data("worse", "worse"))
    folder = folder or tmp_path / "r"
    text, data = (folder / "report.md").read_text(), json.loads((folder / "metrics.json").read_text())
    first, wide = text.partition("\n## ")[0], re.sub(r" +", " ", shown(folder, 400))
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in first.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[3:]] == [str(b["kept"]) for b in sorted(data["budgets"], key=lambda b: -b["kept"])]
    lines = [first.split("**")[1], *re.findall(r"^(?:\*\*Caution:\*\* |- )(.*)$", first, re.M)]
    for line in (line for line in lines if not line.startswith("To use")):
        assert line in wide
    for row in rows[2:]:
        assert " ".join(cell for cell in row if cell) in wide
    for b in data["budgets"]:
        row = next(row for row in rows if row[0] == str(b["kept"]))
        value, change = b["pruned"]["metrics"][data["metric"]], b["change"]
        if data["metric"] == "perplexity":
            assert row[1].startswith(f"{value:.4g} (")
            digits = 1 if max(abs(change[k]) for k in ("value", "low", "high")) >= 5e-4 else 3
            assert f"{100 * change['low']:+.{digits}f}% to {100 * change['high']:+.{digits}f}%" in row[2]
        else:
            assert row[1].startswith(f"{100 * value:.1f} %")
            assert f"{100 * change['low']:+.2f} to {100 * change['high']:+.2f}" in row[2]
        assert row[3] == change["verdict"]
    narrow = shown(folder, 80)  # where "22,713,986" was "22,713,9…"
    assert max(map(len, narrow.partition("Dense and pruned")[2].partition("\n\n")[0].splitlines())) <= 80
    for model in (data["dense"], *data["budgets"]):
        assert f"{model['parameters']:,}" in narrow


# -- progress in the terminal -----------------------------------------------------------------------


def test_the_bar_is_one_line() -> None:
    console = Console()
    console.err = RichConsole(file=io.StringIO(), force_terminal=True, width=80)
    with console.track("scoring by ablation") as progress:
        progress(7, 12, "block.encoder.layer.11.attention.self of 24 layers, and more that is told")
    (line,) = [line for line in console.err.file.getvalue().split("\n") if "7/12" in line]  # type: ignore[attr-defined]
    assert "scoring by ablation (block" in line  # it took three lines


@pytest.mark.parametrize(("totals", "kept"), [([336.0, 0.8, 0.7], 0.8), ([336.0, 5.0, 9.0, 7.0, 8.0, 0.7], 5.0)])
def test_a_disturbed_breakdown_is_measured_again(monkeypatch: Any, totals: list[float], kept: float) -> None:
    """A few passes on a busy machine once took 475 times what the same model took where models were timed in turn."""
    model, example = bert()
    layers, left = hp.find_attention(model, example), iter(totals)

    def measured(*_: Any, **__: Any) -> hp.Breakdown:
        total = next(left)
        return hp.Breakdown(2, 5, total, dict.fromkeys(PARTS, total / len(PARTS)), (), tuple(layers))

    monkeypatch.setattr("headprune.app.workflow.results.breakdown", measured)
    rows = [hp.LatencyRow(2, 5, {"dense": hp.Timing(0.71, 0.9, 20, 0.7, 0.72)}, {})]
    (row,) = time_parts(model, layers, [(2, 5, example)], {}, rows, Silent())
    assert row.total == kept
