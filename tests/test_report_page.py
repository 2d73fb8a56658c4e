"""report.html: the same figures as report.md and the documents, one file without a network, and no text that becomes markup."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headprune.app import report
from headprune.app.documents import Heads, LayerProfile, Metrics, Positions, Run, Sample, SampleLayer
from headprune.app.report import markdown, page, sentences
from headprune.app.report.page import drawn
from headprune.app.runs import RunFolder
from headprune.scoring.scores import HeadScores
from headprune.seeing import HeadProfile
from tests.support.documents import (
    HOSTILE,
    LAYER,
    MEASURED,
    METRICS,
    PARTS,
    RUN,
    heads_document,
    repaired,
    scores_of,
)

REPORTS = Path(__file__).parent.parent / "reports"
VENDOR = Path(page.__file__).parent / "vendor"


class Parsed(HTMLParser):
    """A page: its tables as lists of rows of texts, its scripts, its elements and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.source = "", text
        self._table: list[list[str]] | None = None
        self._cell = self._script = False
        self.feed(text)

    def _of(self, name: str) -> str:
        """The text of the element with this id, its children's ends as line ends."""
        return html.unescape(
            re.sub(r"<[^>]*>", "", self.source.split(f'id="{name}">')[1].split("</p>")[0].split("</ul>")[0])
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "table":
            self._table = self.tables.setdefault(found["id"] or "", [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._cell = True
        elif tag == "small" and self._cell and self._table is not None:
            self._table[-1][-1] += " "
        elif tag == "script":
            self.scripts.append((found, ""))
            self._script = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False
        elif tag == "table":
            self._table = None
        elif tag == "script":
            self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._cell and self._table is not None:
            self._table[-1][-1] += data
        else:
            self.text += data

    @property
    def headline(self) -> str:
        """The verdict."""
        return self._of("headline")

    @property
    def reasons(self) -> list[str]:
        """The list below the first table."""
        return [line for line in self._of("reasons").splitlines() if line]

    @property
    def cautions(self) -> list[str]:
        """The list below the verdict, before the table."""
        if 'id="cautions"' not in self.source:
            return []
        assert self.source.index('id="cautions"') < self.source.index('id="sizes"')
        return [line for line in self._of("cautions").splitlines() if line]

    @property
    def data(self) -> Any:
        """What the page's scripts draw."""
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "data"))


def parsed(
    metrics: dict[str, Any] | None = METRICS, *found: HeadScores, run: dict[str, Any] = RUN, heads: Heads | None = None
) -> Parsed:
    """The page of documents as JSON holds them."""
    return Parsed(page.render(Run.model_validate(run), found, metrics and Metrics.model_validate(metrics), heads))


def markdown_table(text: str, first: str) -> list[list[str]]:
    """The cells of the table in markdown whose head begins with ``first``, without its ruler and without bold and code marks."""
    lines = text[text.index(first) :].split("\n\n")[0].splitlines()
    cells = [[re.sub(r"[*`]", "", cell).strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


@pytest.mark.parametrize("name", ["minilm-rt", "digits"])
def test_the_page_the_markdown_and_the_documents_say_the_same_numbers(name: str) -> None:
    folder = RunFolder(REPORTS / name)
    run, scores, metrics, heads = folder.read_run(), folder.read_scores(), folder.read_metrics(), folder.read_heads()
    assert metrics is not None
    text, found = markdown.render(run, scores, metrics), Parsed(page.render(run, scores, metrics, heads))
    shown_sizes = [[cell.replace(" recommended", "") for cell in row] for row in found.tables["sizes"]]
    assert shown_sizes == markdown_table(text, "| heads kept | accuracy (95 %)")
    recommended = [row[0].split()[0] for row in found.tables["sizes"] if row[0].endswith(" recommended")]
    assert recommended == re.findall(r"^\| \*\*(\d+)\*\* \|", text, re.M)
    assert f"**{found.headline}**" in text
    plain = text.replace("**", "").replace("`", "")
    for reason in found.reasons:
        assert f"\n- {reason}\n" in plain
    cautions = sentences.cautions(run, metrics)
    assert found.cautions == [f"Caution: {caution}".replace("`", "") for caution in cautions]
    assert all(f"\n\n{caution}\n\n" in plain for caution in found.cautions)
    assert sentences.parts(run, metrics, bool(scores)).replace("`", "") in found.text
    for order, about in sentences.orders(metrics):
        assert f"{order}: {about}" in found.text
    assert "--overwrite" not in found.source.split('<script type="application/json"')[0]
    assert found.tables["curve-table"] == markdown_table(text[text.index("## Trade-off") :], "| heads kept |")
    assert found.tables["latency-table"][1:] == markdown_table(text, "| input |")[1:]
    raw = json.loads(folder.metrics_path.read_text())
    sizes = {size["kept"]: size for size in found.data["sizes"]}
    assert sizes.pop(raw["budgets"][0]["total"])["figure"][0] == raw["dense"]["metrics"][raw["metric"]]
    assert set(sizes) == {b["kept"] for b in raw["budgets"]}
    labels = [row[0] for row in found.tables["heads"][1:]]
    for b in raw["budgets"]:
        size = sizes[b["kept"]]
        assert size["figure"] == [b["pruned"]["metrics"][raw["metric"]], b["pruned"]["low"], b["pruned"]["high"]]
        indices = {layer.name: layer.index for layer in run.model.layers}
        gone = {f"L{indices[layer]}.H{head}" for layer, heads in b["drop"].items() for head in heads}
        assert {labels[i] for i in size["gone"]} == gone
        column = found.tables["heads"][0].index(f"with {b['kept']}")
        assert {row[0] for row in found.tables["heads"][1:] if row[column] == "pruned"} == gone
        assert {row[0] for row in found.tables["heads"][1:] if row[column] == "kept"} == set(labels) - gone
    shown = [s for s in scores if s.method != "random"]
    for column, s in enumerate(shown, 1):
        assert found.tables["heads"][0][column] == s.method
        assert found.data["methods"][column - 1]["values"] == s.flat().tolist()
        said = dict(zip(labels, (row[column] for row in found.tables["heads"][1:]), strict=True))
        for label, value, error in zip(s.labels(), s.flat().tolist(), s.flat_stderr().tolist(), strict=True):
            assert said[label] == (f"{value:.4g} ± {error:.2g}" if error == error else f"{value:.4g}")
        for pick in (max, min):  # as the list of report.md has it
            i = pick(range(len(labels)), key=lambda i: s.flat()[i])
            assert f"{s.labels()[i]} {said[s.labels()[i]]}" in text
    for row, there in zip(raw["latency"]["rows"], found.data["latency"], strict=True):
        assert {m["name"]: m["median"] for m in there["models"]} == {k: t["median"] for k, t in row["timings"].items()}


def test_second_data_and_other_engines_are_on_the_page_as_in_the_report() -> None:
    metrics = copy.deepcopy(METRICS)
    change = metrics["budgets"][0]["change"]
    metrics["also"] = [{"name": "notes.txt", "data": PARTS["report"], "dense": MEASURED}]
    metrics["budgets"][0] |= {
        "repair": repaired(), "also": [{"pruned": MEASURED, "change": change, "gain": {**change, "verdict": "better"}}],
    }  # fmt: skip
    metrics["exports"] = [
        {"format": "onnx", "name": "2 heads", "checkpoint": "pruned-2", "file": "2.onnx", "proved": True, "summary": "3 kB, tried"},
        {"format": "gguf", "name": "2 heads", "checkpoint": "pruned-2", "file": None, "proved": False, "summary": "no decoder"},
    ]  # fmt: skip
    metrics["engines"] = [{"format": "onnx", "rows": metrics["latency"]["rows"]}]
    text = markdown.render(Run.model_validate(RUN), [], Metrics.model_validate(metrics))
    found = parsed(metrics)
    assert found.tables["also"] == markdown_table(text, "| data | heads |")
    assert found.tables["also"][2] == [
        "notes.txt, 200 examples", "2", "60.0 % (50.0 % to 70.0 %)", "-10.00 points (-15.00 to -5.00)", "worse",
        "-10.00 points (-15.00 to -5.00), better",
    ]  # fmt: skip
    assert found.tables["exports"][1:] == markdown_table(text, "| model | written for |")[1:]
    assert found.tables["exports"][2] == ["2 heads", "gguf", "not written: no decoder"]
    engine = text[text.index("onnx, timed as above") :]
    assert found.tables["engine-onnx"] == markdown_table(engine, "| input | model | median, ms | speed-up")
    assert "\n## In other engines\n\n<details>" in text


def test_texts_never_become_markup() -> None:
    """Of the model, the dataset, its rows, labels and columns, a command, a note, a role, a layer, a method."""
    run = copy.deepcopy(RUN)
    run["options"] = {"model": HOSTILE, "seed": 0, "data": {"dataset": HOSTILE}}
    run["commands"], run["notes"] = [f"headprune score {HOSTILE}"], [HOSTILE]
    run["model"] |= {"class": HOSTILE, "task": HOSTILE}
    run["parts"]["score"]["split"] = HOSTILE
    metrics = copy.deepcopy(METRICS)
    metrics["budgets"][0]["checkpoint"] = HOSTILE.replace("/", "")
    heads = heads_document(title=HOSTILE, token=HOSTILE, role=HOSTILE)
    found = parsed(metrics, scores_of([0.3, 0.2, -0.1, 0.005], HOSTILE), run=run, heads=heads)
    plain = parsed(METRICS, scores_of([0.3, 0.2, -0.1, 0.005]), heads=heads_document())
    held = next(text for attributes, text in found.scripts if attributes.get("id") == "data")
    assert not set("<>&") & set(held)
    counts = [sorted(tag for tag, _ in each.elements) for each in (found, plain)]
    assert [tag for tag in counts[0] if tag in ("script", "img")] == [
        tag for tag in counts[1] if tag in ("script", "img")
    ]
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert HOSTILE in found.text
    assert found.data["samples"][0]["title"] == HOSTILE
    assert found.data["samples"][0]["positions"]["input"]["labels"][0] == HOSTILE
    assert found.data["profiles"]["heads"][0]["role"] == HOSTILE
    assert found.tables["heads"][0][1] == HOSTILE


def test_codes_that_a_terminal_would_obey_are_in_no_output() -> None:
    """A name with an escape code was written into report.html as it is: shown by `cat`, it gave the terminal orders."""
    codes = "\x1b]0;x\x07 \x9b31m \u202e"
    run = copy.deepcopy(RUN)
    run["options"] = {"model": f"m{codes}", "seed": 0, "data": {"dataset": f"d{codes}"}}
    run["commands"], run["notes"] = [f"headprune score 'm{codes}'"], [f"n`{codes}`"]
    run["parts"]["score"]["split"] = run["columns"]["items"] = f"s{codes}"
    heads = heads_document(title=f"t{codes}", token=f"w{codes}", role=f"r{codes}")
    metrics = Metrics.model_validate(METRICS)
    found = Run.model_validate(run), [scores_of([0.3, 0.2, -0.1, 0.005], f"a{codes}")], metrics, heads
    made = [page.render(*found), markdown.render(*found), markdown.card(found[0], metrics, metrics.budgets[0])]
    for text in made:
        assert not re.search(
            "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text.split('<script type="application/json"')[0]
        )
        assert "�]0;x� �31m �" in text
    held = Parsed(made[0]).data
    assert held["samples"][0]["title"] == "t�]0;x� �31m �"
    assert held["samples"][0]["positions"]["input"]["labels"][0] == "w�]0;x� �31m �"
    assert held["methods"][0]["name"] == "a�]0;x� �31m �"


def test_a_browser_may_run_these_scripts_and_fetch_nothing() -> None:
    found = parsed(METRICS, scores_of([0.3, 0.2, -0.1, 0.005]), heads=heads_document())
    policy = next(a["content"] for tag, a in found.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    run = [text for attributes, text in found.scripts if "type" not in attributes]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run}
    assert set(rules["script-src"].split()) == hashes
    for tag, attributes in found.elements:
        assert not {"src", "srcset", "action", "data"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith(("#", "data:,", "report.md")), attributes


def test_the_libraries_are_the_ones_that_are_written_down() -> None:
    sources = json.loads((VENDOR / "SOURCES.json").read_text())
    licences = (VENDOR / "LICENSES.txt").read_text()
    assert {s["file"] for s in sources} == {path.name for path in VENDOR.glob("*.js")}
    for source in sources:
        content = (VENDOR / source["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == source["sha256"]
        assert source["version"].encode() in content[:100]
        assert f"{source['package']} {source['version']}: Copyright" in licences
        assert source["licence"] == "ISC"
    assert "Permission to use, copy, modify, and/or distribute" in parsed(None).scripts[-1][1]


def test_scores_alone() -> None:
    found = parsed(None, scores_of([0.3, 0.2, -0.1, 0.005]), scores_of([1, 2, 3, math.nan], "gradient"))
    assert set(found.tables) == {"heads"}
    assert found.tables["heads"][0] == ["head", "ablation", "gradient"]
    assert found.tables["heads"][-1] == ["L0.H3", "0.005 ± 0.01", "nan ± 0.01"]
    assert found.data["sizes"] == []
    assert found.data["methods"][1]["values"] == [1, 2, 3, None]
    assert "headprune prune --keep 50%" in found.text


def test_a_plan_without_scores() -> None:
    found = parsed(METRICS)
    assert found.tables["heads"] == [
        ["head", "with 2"], ["L0.H0", "kept"], ["L0.H1", "pruned"], ["L0.H2", "pruned"], ["L0.H3", "kept"]
    ]  # fmt: skip
    assert found.data["methods"] == []


def test_the_call_beside_the_slider_gives_what_was_measured() -> None:
    """A model that is saved in half precision was measured in float32: the call beside its figures must say so too."""
    metrics = copy.deepcopy(METRICS)
    for dtype, call in (("float16", 'headprune.load("pruned-2").float()'), ("float32", 'headprune.load("pruned-2")')):
        metrics["budgets"][0] |= {"dtype": dtype, "checkpoint": "pruned-2"}
        found = parsed(metrics, scores_of([0.3, 0.2, -0.1, 0.005]))
        assert found.data["sizes"][0]["use"] == call
        assert any(f"model = {call}," in reason for reason in found.reasons)


def test_a_language_model() -> None:
    metrics = copy.deepcopy(METRICS)
    metrics["metric"] = "perplexity"
    for place in (metrics["dense"], metrics["budgets"][0]["pruned"]):
        place |= {"metrics": {"perplexity": 61.98, "loss": 4.1}, "low": 58.2, "high": 66.1}
    metrics["budgets"][0]["change"] |= {"metric": "perplexity", "value": 0.12, "low": 0.1, "high": 0.14}
    metrics["budgets"][0]["random"] = [70.0, math.inf]
    for point in metrics["curve"]:
        point |= {"value": 70.0, "low": 60.0, "high": math.inf}
    found = parsed(metrics, scores_of([0.3, 0.2, -0.1, 0.005]))
    row = found.tables["sizes"][2]
    assert row[1:3] == ["61.98 (58.2 to 66.1)", "+12.0% (+10.0% to +14.0%)"]
    assert found.data["curve"]["metric"] == "perplexity"
    assert not found.data["curve"]["share"]
    assert found.data["curve"]["points"][0]["high"] is None


def test_the_curves_are_from_the_dense_model_down_and_random_is_a_mean_with_its_range() -> None:
    metrics = copy.deepcopy(METRICS)
    other = {**metrics["curve"][2], "value": 0.7, "low": 0.6, "high": 0.8}
    metrics["curve"].append(other)
    points = parsed(metrics).data["curve"]["points"]
    random = {p["kept"]: (p["value"], p["low"], p["high"]) for p in points if p["method"] == "random"}
    assert random == {2: (pytest.approx(0.6), 0.5, 0.7), 4: (0.81, 0.81, 0.81)}
    ablation = {p["kept"]: (p["value"], p["low"], p["high"]) for p in points if p["method"] == "ablation"}
    assert ablation == {2: (0.72, 0.6, 0.8), 4: (0.81, 0.74, 0.88)}


def test_the_first_chart_is_of_the_reported_examples_alone() -> None:
    curve = parsed(METRICS).data["curve"]
    assert [(p["kept"], p["value"], p["low"], p["high"], p["said"]) for p in curve["random"]] == [
        (2, pytest.approx(0.6), 0.5, 0.7, "60.0 %"), (4, 0.8, 0.8, 0.8, "80.0 %")
    ]  # fmt: skip
    assert curve["names"]["random"] == "random heads: mean and range of 3 draws"
    assert curve["alike"] == []  # these models are repaired as the random ones are


def test_chosen_heads_repaired_like_random_ones_are_drawn_beside_them() -> None:
    """The last step of repair is not made for random heads: a line of chosen heads with it alone compared unlike things."""
    metrics = copy.deepcopy(METRICS)
    alone = {**MEASURED, "metrics": {**MEASURED["metrics"], "accuracy": 0.65}}
    metrics["budgets"][0]["repair"] = repaired(layers_alone=alone)
    curve = parsed(metrics).data["curve"]
    assert [(p["kept"], p["value"]) for p in curve["alike"]] == [(2, 0.65), (4, 0.8)]
    assert curve["names"]["alike"] == "chosen heads, repaired layer by layer like the random ones"
    assert "but without the last step of repair" not in parsed(metrics).text


def test_a_busy_machine_is_told_on_the_page_too() -> None:
    folder = RunFolder(REPORTS / "digits")
    run, metrics = folder.read_run(), folder.read_metrics()
    assert metrics is not None
    first, *rest = metrics.time
    slow = metrics.changed(time=(first.changed(total=10 * first.total).to_json(), *(row.to_json() for row in rest)))
    told = "the machine was busy while"
    assert told in markdown.render(run, [], slow)
    assert told in Parsed(page.render(run, [], slow)).text


def test_colours_are_in_ratio_beyond_the_usual_score() -> None:
    """As importance.png's: one large score hides no other."""
    found = parsed(None, scores_of([0.01, -0.03, 0.05, 10.0])).data["methods"][0]
    assert (found["usual"], found["most"], found["signed"]) == (pytest.approx(0.04), 10.0, True)
    assert parsed(None, scores_of([0.0] * 4)).data["methods"][0]["most"] == 1


def test_what_heads_do_stands_beside_them() -> None:
    found = parsed(METRICS, scores_of([0.3, 0.2, -0.1, 0.005]), heads=heads_document(role="previous token"))
    assert found.tables["heads"][1][-1] == "previous token"
    first = found.data["profiles"]["heads"][0]
    assert first["role"] == "previous token"
    assert dict(zip(found.data["profiles"]["figures"], first["figures"], strict=True))["entropy, nats"] == "1.25"
    sample = found.data["samples"][0]
    (layer,) = sample["layers"]
    weights = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(layer["shape"])
    assert weights.shape == (4, 3, 3)
    assert weights[1].tolist() == [[255, 0, 0]] * 3


def test_heads_that_could_not_be_seen() -> None:
    layers = (LayerProfile(name=LAYER.name, index=0, kind="encoder", heads=(), unseen="no softmax"),)
    heads = Heads(examples=1, tokens=2, unit="tokens", layers=layers, samples=())
    found = parsed(METRICS, scores_of([0.3, 0.2, -0.1, 0.005]), heads=heads)
    assert found.data["profiles"]["heads"] == [{"unseen": "no softmax"}] * 4
    assert found.tables["heads"][1][-1] == ""


def test_a_page_holds_as_many_samples_as_leave_it_small(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_document(samples=3)
    one = len(heads.samples[0].layers[0].weights)
    monkeypatch.setattr(drawn, "_WEIGHTS", 2 * one)
    assert [s["title"] for s in parsed(None, heads=heads).data["samples"]] == ["sample 0", "sample 1"]


def test_a_large_run_has_a_page_below_two_megabytes() -> None:
    """32 layers of 32 heads, two methods, three budgets, profiles and more samples than fit."""
    rng = np.random.default_rng(0)
    layers = [{**RUN["model"]["layers"][0], "name": f"layer.{i}", "index": i, "num_heads": 32} for i in range(32)]
    run = copy.deepcopy(RUN)
    run["model"] |= {"layers": layers, "heads": 1024}
    metrics = copy.deepcopy(METRICS)
    drop = {f"layer.{i}": list(range(16)) for i in range(32)}
    metrics["budgets"] = [
        {**metrics["budgets"][0], "kept": kept, "total": 1024, "drop": drop, "name": "2 heads"}
        for kept in (768, 512, 256)
    ]
    of = [copy.copy(LAYER) for _ in range(32)]
    for i, layer in enumerate(of):
        for name, value in (("name", f"layer.{i}"), ("index", i), ("num_heads", 32)):
            object.__setattr__(layer, name, value)
    scores = [
        HeadScores(
            method, "loss (nats) added when the head is removed", *(
                {layer.name: torch.tensor(rng.normal(size=32)) for layer in of} for _ in range(2)
            ), 512, tuple(of),
        )
        for method in ("ablation", "gradient")
    ]  # fmt: skip
    profile = HeadProfile(
        900,
        1.2345,
        0.5,
        0.9,
        3.4,
        *[0.1] * 7,
        role="attends to the previous token",
        because="0.81 of its attention goes to it",
    )
    samples = tuple(
        Sample(title=f"{i}", positions={"input": Positions(labels=("token",) * 22)}, layers=tuple(
            SampleLayer.packed(n, rng.random((32, 22, 22), np.float32), "input", "input") for n in range(32)
        )) for i in range(2)
    )  # fmt: skip
    heads = Heads(examples=1, tokens=2, unit="tokens", samples=samples, layers=tuple(
        LayerProfile(name=f"layer.{i}", index=i, kind="decoder", heads=(profile,) * 32) for i in range(32)
    ))  # fmt: skip
    text = page.render(Run.model_validate(run), scores, Metrics.model_validate(metrics), heads)
    assert len(text.encode()) < 2_000_000


def test_the_report_writes_it_and_a_new_run_replaces_it(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(REPORTS / "digits", tmp_path / "r", ignore=shutil.ignore_patterns("*.html", "*.png"))
    folder = RunFolder(tmp_path / "r")
    report.write(folder)
    first = folder.page_path.read_bytes()
    report.write(folder)
    assert folder.page_path.read_bytes() == first
    assert "[report.html](report.html)" in folder.report_path.read_text()
    from headprune.app.runs import PARTS

    assert {"report.html", "heads.json"} <= set(PARTS)
