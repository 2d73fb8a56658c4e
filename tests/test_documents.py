"""Documents: what is written is read again, what JSON has no form for, and files with anything in them: refused in one line, or read as what they say."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headprune as hp
from headprune.app import report
from headprune.app.documents import Cut, FinetuneRecord, Heads, Metrics, ReportValues, Run
from headprune.app.runs import RunFolder
from headprune.attention import AttentionLayer
from headprune.checkpoint import about, load_call
from headprune.documents import File, from_json
from headprune.evaluation import Measurement
from headprune.files import dumps, loads, read_json, write_file, write_json
from headprune.plans import PruningPlan
from headprune.scoring import load_scores, save_scores
from tests.support.documents import ALL_METRICS, FINETUNE, HEADS, METRICS, RUN, heads_document, opened, scores_of
from tests.support.reports import COMMITTED

FULL: dict[type[File], dict[str, Any]] = {Run: RUN, Metrics: ALL_METRICS, FinetuneRecord: FINETUNE, Heads: HEADS}


def same(a: Any, b: Any) -> bool:
    """Equal, and of one type everywhere: 1 is not 1.0 in a file, and NaN is NaN."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and (a == b or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and bool(a == b)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a document, how to get to it."""
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value[:6]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*place, key))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_committed_reports_are_written_again_as_they_are(folder: Path, tmp_path: Path) -> None:
    """A key that is renamed, dropped or added breaks the folders that users have."""
    for kind in (Run, Metrics, *([Heads] if (folder / "heads.json").exists() else [])):
        name = f"{kind.kind}.json"
        kind.read(folder / name).write(tmp_path / name)
    save_scores(tmp_path / "scores.json", load_scores(folder / "scores.json"))
    for plan in folder.glob("plan*.json"):
        PruningPlan.load(plan).save(tmp_path / plan.name)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == sorted(path.name for path in folder.glob("*.json"))
    for path in written:
        assert same(loads(path.read_text()), loads((folder / path.name).read_text())), path.name


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.kind)
def test_what_was_read_is_what_is_written(kind: type[File]) -> None:
    data = loads(dumps(FULL[kind]))
    again = loads(dumps(from_json(kind, data).to_json()))
    assert from_json(kind, again) == from_json(kind, data)


def test_older_files_lack_what_was_added_later() -> None:
    """They are readable, and nothing is made up for what they lack."""
    metrics = copy.deepcopy(METRICS)
    del metrics["latency"]["bound_ghosts"], metrics["budgets"][0]["change"]["carried_by"]
    assert not from_json(Metrics, metrics).planning.work
    assert from_json(Metrics, metrics).budgets[0].change.carried_by == 0
    assert from_json(Run, copy.deepcopy(RUN)).parts.score.content_hash is None


# Objects whose keys are names of the run.
OPEN = {
    "metrics", "columns", "layers", "drop", "timings", "speedups", "history", "work", "bounds", "parts", "prefill", "token",
    "prefill_speedups", "token_speedups", "tokens_per_second", "cache", "models", "changes",
}  # fmt: skip


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.kind)
def test_an_unknown_key_is_told_with_the_file_and_its_place(kind: type[File], tmp_path: Path) -> None:
    path = tmp_path / f"{kind.kind}.json"
    for place in places(FULL[kind]):
        data = loads(dumps(FULL[kind]))
        inner: Any = data
        for step in place:
            inner = inner[step]
        if OPEN & set(place[-2:]) or not isinstance(inner, dict):
            continue
        inner["made-up"] = 1
        write_json(path, kind.kind, data)
        with pytest.raises(hp.HeadPruneError) as error:
            kind.read(path)
        key = " › ".join(map(str, (*place, "made-up")))
        assert error.value.args[0] == f"{path} is damaged, or of another version: this headprune does not know {key}."


def test_a_part_is_the_same_as_far_as_both_sides_say() -> None:
    cut = from_json(Cut, RUN["parts"])
    texts = replace(cut, score=replace(cut.score, content_hash="x"))
    assert cut.same(texts)
    assert texts.same(cut)
    assert not texts.same(replace(cut, score=replace(cut.score, content_hash="y")))
    for part in (replace(cut.report, examples=3), replace(cut.report, rows_hash="x")):
        assert not cut.same(replace(cut, report=part))


# -- what JSON has no form for ------------------------------------------------------------------

FLOATS = st.floats() | st.floats().map(np.float64)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def strict(text: str) -> Any:
    """As a reader does that knows no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@given(VALUES)
def test_whatever_is_written_is_read_back(value: Any) -> None:
    text = dumps(value)
    strict(text)
    text.encode()
    assert same(value, loads(text))


def test_the_form_of_what_json_has_not() -> None:
    document = {"a": math.inf, "b": [-math.inf, 1.5], "c": math.nan}
    assert strict(dumps(document)) == {
        "a": {"float": "Infinity"}, "b": [{"float": "-Infinity"}, 1.5], "c": {"float": "NaN"},
    }  # fmt: skip
    # A layer may have any name.
    assert loads(dumps({"float": [1, 2]})) == {"float": [1, 2]}
    assert loads(dumps({"float": "x"})) == {"float": "x"}


def test_numbers_of_numpy_and_torch() -> None:
    values = [np.float32(0.5), np.int64(3), np.bool_(True), np.array(2), torch.tensor(1.5), np.float32("inf"), (1, 2)]
    assert loads(dumps(values)) == [0.5, 3, True, 2, 1.5, math.inf, [1, 2]]
    assert loads(dumps({"path": Path("a/b")})) == {"path": "a/b"}


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", np.arange(3), torch.ones(2), 1j, {3: 4}])
def test_what_cannot_be_written_is_told_with_its_place(value: Any) -> None:
    with pytest.raises(hp.HeadPruneError, match="budgets › 1 › repair"):
        dumps({"budgets": [{}, {"repair": value}]})


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"data/caf\xe9.csv")
    write_json(tmp_path / "run.json", "run", {"command": f"prune -d {name}"})
    assert read_json(tmp_path / "run.json", "run")["command"] == f"prune -d {name}"
    write_file(tmp_path / "report.md", f"`{name}`")
    assert (tmp_path / "report.md").read_text() == "`data/caf\\udce9.csv`"


def without_fractions(value: Any, form: float) -> Any:
    """Every fraction in a document made infinite or NaN."""
    if isinstance(value, dict):
        return {k: v if k in ("fit", "options", "training") else without_fractions(v, form) for k, v in value.items()}
    if isinstance(value, list):
        return [without_fractions(v, form) for v in value]
    return form if isinstance(value, float) else value


@pytest.mark.parametrize("form", [-math.inf, math.nan])
def test_a_report_of_numbers_that_are_none(form: float, tmp_path: Path) -> None:
    """Whatever came out, it can be written, read and reported."""
    shutil.copytree(COMMITTED[0].parent / "digits", tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    metrics = without_fractions(read_json(folder.metrics_path, "metrics"), form)
    write_json(folder.metrics_path, "metrics", metrics)
    scores = opened(folder.scores_path)
    for s in scores["scores"]:
        s["values"] = {k: [form, *v[1:]] for k, v in s["values"].items()}
        s["stderr"] = without_fractions(s["stderr"], abs(form))
    write_json(folder.scores_path, "scores", {k: v for k, v in scores.items() if k not in ("headprune", "schema")})
    folder.write_run(folder.read_run())  # which names its documents
    strict(folder.metrics_path.read_text())
    read = folder.read_metrics()
    assert read is not None
    assert same(metrics, loads(dumps(read.to_json())))
    report.write(folder)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Digits are most of a document, and a flip may turn one into another: 0.31 was read as 0.71."""
    path = tmp_path / "scores.json"
    data = {"values": {"L0": [0.31, -2.5e-07, math.inf]}, "kept": 36, "text": 'é \\ "x"', "none": [None, True, {}]}
    write_json(path, "scores", data)
    whole, unnoticed = path.read_bytes(), 0
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 5  # of a digit the low bits make another digit
        path.write_bytes(bytes(content))
        try:
            values = read_json(path, "scores")
        except hp.HeadPruneError:
            continue
        unnoticed += {k: v for k, v in values.items() if k in data} != data
    assert not unnoticed


def test_a_flipped_bit_in_the_values_of_a_report(tmp_path: Path) -> None:
    """Zip, its compression and NumPy's headers raised errors of their own."""
    path, some = tmp_path / "report.npz", np.arange(3.0)
    ReportValues(some, some, {"dense": Measurement({}, some, some, some)}).write(path)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with suppress(hp.HeadPruneError):
            ReportValues.read(path)


def test_a_document_may_be_laid_out_anew_or_have_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, "run", {"a": [1.0, 2], "b": math.nan})
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert same(read_json(path, "run"), {"a": [1.0, 2], "b": math.nan})
    document = opened(path)
    path.write_text(json.dumps({**document, "a": 5}))
    assert read_json(path, "run")["a"] == 5


def test_an_edited_document_says_how_to_keep_the_edit(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, "run", {"a": 1})
    path.write_text(path.read_text().replace('"a": 1', '"a": 3'))
    with pytest.raises(hp.HeadPruneError, match=r"run.json is damaged, or was edited.*delete its line \"checksum\""):
        read_json(path, "run")


# -- anything ------------------------------------------------------------------------------------

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


@st.composite
def spoilt(draw: Any, document: dict[str, Any]) -> str:
    """The text of a document with one to three other values, a lost or doubled key, or cut off."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(sorted(places(result), key=str)))
        if not where:
            result = copy.deepcopy(draw(ANY)) if draw(st.integers(0, 9)) == 0 else result
            if not isinstance(result, dict):
                break
            continue
        inner: Any = result
        for step in where[:-1]:
            inner = inner[step]
        how = draw(st.sampled_from(["other", "other", "other", "gone", "more"]))
        if how == "gone":
            del inner[where[-1]]
        elif how == "more" and isinstance(inner, list):
            inner.append(copy.deepcopy(inner[where[-1]]))
        else:
            inner[where[-1]] = copy.deepcopy(draw(ANY))
    text = json.dumps(result)
    cut = draw(st.sampled_from(["no"] * 8 + ["cut", "deep"]))
    if cut == "cut":
        return text[: draw(st.integers(0, len(text)))]
    return text.replace("[", "[" * 5000, 1).replace("]", "]" * 5000, 1) if cut == "deep" else text


PLAN = {"drop": {"block.0.attn": [0, 2], "L1": [1]}, "kept": 5, "total": 8, "asked": 5, "budget": "keep 5", "strategy": "auto",
        "method": "ablation", "model": "abc", "notes": ["A note."]}  # fmt: skip
SCORES: dict[str, Any] = {
    "layers": [AttentionLayer("block.0.attn", 0, "encoder", 4, 2, 8, groups=((0, 1), (2, 3))).to_json()],
    "scores": [{**scores_of([0.1, 0.2, 0.3, 0.4]).to_json(), "details": {"carried_by": [1.0, 50.0, 60.0, 70.0], "mean_loss": 0.5},
                "matrix": [[1.0, 0, 0, 0]] * 4}],
}  # fmt: skip
SIDECAR = {"class": "transformers.models.bert.modeling_bert.BertModel", "fingerprint": "abc", "about": {"from": "m"},
           "heads": {"a": 4}, "removed": [{"a": [0, 1]}], "structure": {"version": 1}, "version": "0.1.0"}  # fmt: skip

KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "plan": (PLAN, PruningPlan.load), "scores": (SCORES, lambda path: load_scores(path)[0]), "run": (RUN, Run.read),
    "metrics": (ALL_METRICS, Metrics.read), "finetune": (FINETUNE, FinetuneRecord.read), "heads": (heads_document().to_json(), Heads.read),
    "checkpoint": (SIDECAR, lambda path: SimpleNamespace(to_json=lambda: (about(path.parent), str(load_call(path.parent))))),
}  # fmt: skip
NAMES = {"checkpoint": "headprune.json"}
CASES = 1000 // len(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_document(kind: str, tmp_path: Path) -> None:
    """What can be read can be written again; the rest is refused in one line."""
    data, read = KINDS[kind]
    path = tmp_path / ".unfinished" / NAMES.get(kind, f"{kind}.json")
    write_json(path, kind, right := loads(dumps(data)))
    dumps(read(path).to_json())
    tried, said = 0, list[hp.HeadPruneError]()

    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(spoilt({"headprune": kind, "schema": 1, **right}))
    def one(text: str) -> None:
        nonlocal tried
        tried += 1
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            dumps(read(path).to_json())
        except hp.HeadPruneError as error:
            said.append(error)

    one()
    assert tried >= CASES * 0.9
    assert all("\n" not in str(error.args[0]) and len(str(error)) < 1000 for error in said)
    assert said


@pytest.mark.slow
def test_any_report(tmp_path: Path) -> None:
    """A report of whatever can be read is written, or refused, and then no file is touched."""
    said, wrong = list[hp.HeadPruneError](), list[str]()
    folder = RunFolder(tmp_path / "run")
    for kind, data in (("run", RUN), ("metrics", ALL_METRICS), ("heads", heads_document().to_json())):
        write_json(tmp_path / "right" / f"{kind}.json", kind, loads(dumps(data)))
    save_scores(tmp_path / "right" / "scores.json", [scores_of([0.1, 0.2, 0.3, 0.4])])

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
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


def test_the_report_of_a_fine_tuning() -> None:
    text = report.finetune_report("r", from_json(FinetuneRecord, FINETUNE))
    assert "Kept: the weights after epoch 1, by accuracy on 50 choosing examples (`validation`): 50.0 % after 0" in text
    assert "| pruned, fine-tuned | 60.0 % (50.0 % to 70.0 %) | -10.00 points (-15.00 to -5.00) | no measurable" in text
