"""Every JSON document that headprune reads back, with anything in it: refused in one line, or read as what it says."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headprune as hp
from headprune.app.documents import FinetuneRecord, Heads, Metrics, Run
from headprune.app.folders import Folder
from headprune.app.runs import RunFolder
from headprune.attention import AttentionLayer
from headprune.checkpoint import about, load_call
from headprune.files import dumps, loads, write_json
from headprune.plans import PruningPlan
from headprune.scoring import load_scores, save_scores
from tests.support.documents import (
    FINETUNE,
    GENERATION,
    METRICS,
    RUN,
    TIME,
    TRAINED,
    heads_document,
    repaired,
    scores_of,
)

ODD = st.sampled_from([
    None, True, False, 0, -1, 1, 2, 3, 4, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.5, 1.0, 1e308, -1e308, 5e-324, 1e16,
    math.nan, math.inf, -math.inf, "", "nan", "1", "true", "L0", "..", "../x", "/etc/passwd", "a/b", "\x00", "\ud800", "<script>", "[red]",
    "\x1b[31m", "x" * 5000, [], [0, 0], [-1], [[]], [None], [True], ["0"], {}, {"float": "NaN"}, {"float": "Infinity"}, {"L0": [0]}, {"": ""},
    {"\ud800": 1},
])  # fmt: skip
ANY = ODD | st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document, how to get to it."""
    yield place
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*place, key))
    elif isinstance(value, list):
        for i, part in enumerate(value[:6]):
            yield from places(part, (*place, i))


@st.composite
def spoilt(draw: Any, document: dict[str, Any]) -> str:
    """The text of a document with one to three other values, a lost or doubled key, or cut off."""
    made = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(sorted(places(made), key=str)))
        if not where:
            made = copy.deepcopy(draw(ANY)) if draw(st.integers(0, 9)) == 0 else made
            if not isinstance(made, dict):
                break
            continue
        inner: Any = made
        for step in where[:-1]:
            inner = inner[step]
        how = draw(st.sampled_from(["other", "other", "other", "gone", "more"]))
        if how == "gone":
            del inner[where[-1]]
        elif how == "more" and isinstance(inner, list):
            inner.append(copy.deepcopy(inner[where[-1]]))
        else:
            inner[where[-1]] = copy.deepcopy(draw(ANY))
    text = json.dumps(made)
    cut = draw(st.sampled_from(["no"] * 8 + ["cut", "deep"]))
    if cut == "cut":
        return text[: draw(st.integers(0, len(text)))]
    return text.replace("[", "[" * 5000, 1).replace("]", "]" * 5000, 1) if cut == "deep" else text


# -- what each document is, and what must be true of what was read --------------------------------------------------------------


def document(kind: str, data: Any) -> dict[str, Any]:
    return {"headprune": kind, "schema": 1, **loads(dumps(data))}


def sound(value: Any) -> None:
    """What any document may hold when it was read: the types that it says, numbers of 64 bits."""
    if isinstance(value, dict):
        for key, part in value.items():
            assert isinstance(key, str)
            sound(part)
    elif isinstance(value, list | tuple):
        for part in value:
            sound(part)
    elif isinstance(value, int):
        assert abs(value) < 2**63


def plan_is(plan: PruningPlan) -> None:
    assert all(type(h) is int and h >= 0 for heads in plan.drop.values() for h in heads)
    assert all(len(set(heads)) == len(heads) for heads in plan.drop.values())
    assert all(type(n) is int and n >= 0 for n in (plan.kept, plan.total, plan.asked))
    assert all(isinstance(t, str) for t in (plan.method, plan.model, plan.strategy, plan.budget, *plan.notes))


def scores_are(found: list[Any]) -> None:
    for scores in found:
        heads = sum(layer.num_heads for layer in scores.layers)
        assert len(scores.flat()) == len(scores.flat_stderr()) == len(scores.labels()) == heads > 0
        assert not (scores.flat_stderr() < 0).any()
        assert scores.examples >= 0
        assert isinstance(scores.method + scores.unit + scores.model + scores.basis + scores.caution, str)
        sound(scores.to_json())


def document_is(found: Any) -> None:
    sound(found.to_json())
    dumps(found.to_json())


def metrics_are(found: Metrics) -> None:
    document_is(found)
    for budget in found.budgets:
        assert 0 <= budget.kept <= budget.total
        assert all(len(set(heads)) == len(heads) and min(heads, default=0) >= 0 for heads in budget.drop.values())
        assert Path(budget.checkpoint).name == budget.checkpoint


def heads_are(found: Heads) -> None:
    document_is(found)
    for sample in found.samples:
        for layer in sample.layers:
            assert layer.unpacked().shape == layer.shape


def anything(_: Any) -> None:
    pass


PLAN = {"drop": {"block.0.attn": [0, 2], "L1": [1]}, "kept": 5, "total": 8, "asked": 5, "budget": "keep 5", "strategy": "auto",
        "method": "ablation", "model": "abc", "notes": ["A note."]}  # fmt: skip
SCORES = {
    "layers": [AttentionLayer("block.0.attn", 0, "encoder", 4, 2, 8, groups=((0, 1), (2, 3))).to_json()],
    "scores": [{**scores_of([0.1, 0.2, 0.3, 0.4]).to_json(), "details": {"carried_by": [1.0, 50.0, 60.0, 70.0], "mean_loss": 0.5},
                "matrix": [[1.0, 0, 0, 0]] * 4}],
}  # fmt: skip
FULL = {**METRICS, "time": [TIME], "generation": [GENERATION]}
FULL["budgets"] = [{**METRICS["budgets"][0], "repair": repaired(), "finetune": TRAINED}]
SIDECAR = {"class": "transformers.models.bert.modeling_bert.BertModel", "fingerprint": "abc", "about": {"from": "m"},
           "heads": {"a": 4}, "removed": [{"a": [0, 1]}], "structure": {"version": 1}, "version": "0.1.0"}  # fmt: skip

KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], Any], Callable[[Any], None]]] = {
    "plan": (PLAN, PruningPlan.load, plan_is),
    "scores": (SCORES, load_scores, scores_are),
    "run": (RUN, Run.read, document_is),
    "metrics": (FULL, Metrics.read, metrics_are),
    "finetune": (FINETUNE, FinetuneRecord.read, document_is),
    "heads": (heads_document().to_json(), Heads.read, heads_are),
    "checkpoint": (SIDECAR, lambda path: (about(path.parent), load_call(path.parent)), lambda found: sound(found[0])),
    "command": ({"key": "abc", "command": "headprune score"}, lambda path: Folder(path.parent.parent).left_by("abc"), anything),
}  # fmt: skip
NAMES = {"checkpoint": "headprune.json"}
CASES = 2000 // len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_document_is_read(kind: str, tmp_path: Path) -> None:
    data, read, right = KINDS[kind]
    path = tmp_path / ".unfinished" / NAMES.get(kind, f"{kind}.json")
    write_json(path, kind, loads(dumps(data)))
    right(read(path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_document(kind: str, tmp_path: Path) -> None:
    data, read, right = KINDS[kind]
    path = tmp_path / ".unfinished" / NAMES.get(kind, f"{kind}.json")
    path.parent.mkdir()
    tried, said = 0, list[hp.HeadPruneError]()

    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(spoilt(document(kind, data)))
    def one(text: str) -> None:
        nonlocal tried
        tried += 1
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            found = read(path)
        except hp.HeadPruneError as error:
            said.append(error)
            return
        right(found)

    one()
    assert tried >= CASES * 0.9
    assert all("\n" not in str(error.args[0]) and len(str(error)) < 1000 for error in said)
    assert said or kind in ("stage", "command")  # these two are made anew where they are damaged


@pytest.mark.slow
def test_any_report(tmp_path: Path) -> None:
    """A report of whatever can be read is written, or refused, and then no file is touched."""
    from headprune.app import report

    said, wrong = list[hp.HeadPruneError](), list[str]()
    folder = RunFolder(tmp_path / "run")
    for kind, data in (("run", RUN), ("metrics", FULL), ("heads", heads_document().to_json())):
        write_json(tmp_path / "right" / f"{kind}.json", kind, loads(dumps(data)))
    save_scores(tmp_path / "right" / "scores.json", [scores_of([0.1, 0.2, 0.3, 0.4])])

    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(["run", "metrics", "heads"]), st.data())
    def one(kind: str, data: Any) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(tmp_path / "right", folder.path)
        whole = loads((folder.path / f"{kind}.json").read_text())
        del whole["checksum"]  # else that alone would be found
        text = data.draw(spoilt(whole))
        (folder.path / f"{kind}.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            report.write(folder)
        except hp.HeadPruneError as error:
            said.append(error)
            left = sorted(p.name for p in folder.path.iterdir())
            wrong.extend(left if left != ["heads.json", "metrics.json", "run.json", "scores.json"] else ())
            return
        assert folder.page_path.exists()

    one()
    assert said
    assert not wrong
    assert not any("\n" in str(error.args[0]) for error in said)
