"""The scripts beside headprune: licences, and `benchmarks/quality.py`."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from quality import METHODS, Subject, leads, table

import headprune as hp
from tests.support.problems import small

ROOT = Path(__file__).parent.parent


def test_every_pinned_package_has_a_line() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    for pin in (ROOT / "constraints.txt").read_text().split():
        name, _, version = pin.partition("==")
        assert f"| {name} | {version} | " in page, f"{pin}: run `make licences`"
    assert not [line for line in page.splitlines() if "not known" in line and line.endswith("| yes |")]


@pytest.fixture
def subject() -> Subject:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    parts = (lambda draw: batches[:2]), batches[2:3], batches[2:]
    return Subject("tiny", model, layers, *parts, "accuracy", (4, 2), "few")


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


def test_the_lead_is_over_the_best_peer_of_each_count(subject):
    def row(method, draw, each):
        return {"method": method, "draw": draw, "keep": 4, "each": each * 10}

    peers = [row("weak", 0, "0000"), row("strong", 0, "1010"), row("headprune compensated", 0, "1111")]
    rows = [row("dense", 0, "1111"), *peers, row("headprune auto", 0, "1111"), row("headprune auto", 1, "1101")]
    spread = np.tile([0, 1, -0.5, 1], 10) - 0.375
    half = 2.0227 * np.sqrt((spread**2).sum() + 2) / 40
    assert leads(subject, rows)[5:] == [f"| 4 | strong | +0.375 | {0.375 - half:+.3f} to {0.375 + half:+.3f} |"]
    assert leads(subject, rows[:3]) == []


def test_auto_is_the_search_and_the_repair_that_users_get(subject):
    score, choose = subject.score(0), subject.choose
    (plan,) = hp.search(subject.model, score, 2, choose=choose, layers=subject.layers)
    smaller = deepcopy(subject.model)
    hp.repair(smaller, plan, score, choose=choose, layers=subject.layers)
    with hp.mask(smaller, dict(plan.drop), layers=subject.layers):
        expected = hp.evaluate(smaller, subject.report).metrics
    with METHODS["headprune auto"](subject.model, score, choose, subject.layers, 2, 0) as pruned:
        assert hp.evaluate(pruned, subject.report).metrics == expected
