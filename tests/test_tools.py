"""The scripts beside headprune: sections of documents, licences, the tool that measures the tests, and `benchmarks/quality.py`."""

import argparse
import json
import runpy
from copy import deepcopy
from pathlib import Path

import mutations
import numpy as np
import pytest
import quality
from document import replace_section
from quality import METHODS, Cache, Subject, measure, table

import headprune as hp
from tests.support.checks import hooks
from tests.support.problems import small


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    path = tmp_path / "docs" / "b.md"
    replace_section(path, "first", "one")
    path.write_text("# Title\n\n" + path.read_text() + "\nBy hand.\n")
    replace_section(path, "second", "two")
    replace_section(path, "first", r"three \1 | x |")
    assert path.read_text() == (
        "# Title\n\n<!-- first -->\n\nthree \\1 | x |\n\n<!-- /first -->\n\nBy hand.\n\n"
        "<!-- second -->\n\ntwo\n\n<!-- /second -->\n"
    )
    before = path.read_text()
    replace_section(path, "second", "two")
    assert path.read_text() == before


ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "licences.md").read_text()


def test_every_pinned_package_has_a_line() -> None:
    for pin in (ROOT / "constraints.txt").read_text().split():
        name, _, version = pin.partition("==")
        assert f"| {name} | {version} | " in PAGE, f"{pin}: run `make licences`"
    assert not [line for line in PAGE.splitlines() if "not known" in line and line.endswith("| yes |")]


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "licences.py"))["written"](PAGE) == PAGE


def test_shares() -> None:
    assert [round(end, 3) for end in mutations.wilson(90, 100)] == [0.826, 0.945]
    assert mutations.wilson(0, 0) == (0.0, 1.0)
    low, high = mutations.wilson(5, 5)
    assert low < high == 1.0


@pytest.mark.parametrize("room", list(mutations.ROOMS))
def test_the_tests_of_a_room_guard_it(room: str, tmp_path: Path) -> None:
    """The room is that of the file that differs; its patterns name tests, and cosmic-ray.toml names the room."""
    for tree in ("copy", "original"):
        for name in mutations.ROOMS:
            (tmp_path / tree / "headprune" / name).mkdir(parents=True)
            (tmp_path / tree / "headprune" / name / "a.py").write_text("a = 1\n")
    (tmp_path / "copy" / "headprune" / room / "a.py").write_text("a = 2\n")
    assert mutations.changed(tmp_path / "copy", tmp_path / "original") == room
    assert mutations.changed(tmp_path / "copy", tmp_path / "copy") == ""
    assert all(list((ROOT / "tests").glob(pattern)) for pattern in mutations.ROOMS[room])
    assert f'"headprune/{room}"' in (ROOT / "cosmic-ray.toml").read_text()


@pytest.fixture
def subject() -> Subject:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    parts = (lambda draw: batches[:2]), batches[2:3], batches[2:]
    return Subject("tiny", model, layers, *parts, "accuracy", (4, 2), "few")


def options(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"draws": 2, "methods": ["random", "Michel"], "counts": None, "cached": False, **more})


def test_an_interrupted_run_goes_on(subject, tmp_path, monkeypatch):
    path, calls = tmp_path / "q.json", []
    evaluate = quality.evaluate

    def counted(*args):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(1)
        return evaluate(*args)

    monkeypatch.setattr(quality, "evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        measure("tiny", subject, options(), Cache(path))
    assert len(path.read_text().splitlines()) == 4
    with path.open("a") as file:
        file.write('{"model": "tiny", "wei')  # what a killed process leaves
    with pytest.raises(KeyboardInterrupt):
        measure("tiny", subject, options(), Cache(path))
    monkeypatch.setattr(quality, "evaluate", evaluate)
    rows = measure("tiny", subject, options(), Cache(path))
    assert len(rows) == 1 + 2 * 2 * 2
    monkeypatch.setattr(quality, "evaluate", None)
    assert measure("tiny", subject, options(), Cache(path)) == rows
    monkeypatch.setattr(quality, "evaluate", evaluate)
    subject.model.classifier.weight.data *= 2
    measure("tiny", subject, options(), Cache(path))  # rows of other weights are not used
    assert len({json.loads(line)["weights"] for line in path.read_text().splitlines() if line.endswith("}")}) == 2


def test_the_table_holds_means_spreads_and_a_paired_error(subject):
    def row(method, draw, keep, each):
        value = each.count("1") / len(each)
        return {"method": method, "draw": draw, "keep": keep, "value": value, "each": each, "seconds": 2.0}

    rows = [row("dense", 0, 6, "1111"), row("a", 0, 4, "1110"), row("a", 1, 4, "1100"), row("b", 0, 2, "1111")]
    text = "\n".join(table(subject, rows))
    assert "| a | 0.625 ± 0.177 | – | 2 |" in text
    assert "| b | – | 1.000 | 2 |" in text
    assert "dense 1.000" in text
    error = np.std([0, 0, -0.5, -1], ddof=1) / 2
    assert f"0 to {error:.2g} for the paired change from dense." in text


def test_auto_is_the_search_and_the_repair_that_users_get(subject):
    score, choose = subject.score(0), subject.choose
    (plan,) = hp.search(subject.model, score, 2, choose=choose, layers=subject.layers)
    smaller = deepcopy(subject.model)
    hp.repair(smaller, plan, score, choose=choose, layers=subject.layers)
    with hp.mask(smaller, dict(plan.drop), layers=subject.layers):
        expected = hp.evaluate(smaller, subject.report).metrics
    with METHODS["headprune auto"](subject.model, score, choose, subject.layers, 2, 0) as pruned:
        assert hp.evaluate(pruned, subject.report).metrics == expected
    assert hooks(subject.model) == 0
