"""`benchmarks/quality.py`: what is measured once is kept, failures cost one row, and methods plug in."""

from __future__ import annotations

import argparse
import json
from copy import deepcopy

import numpy as np
import pytest
import quality
import torch
from quality import METHODS, Cache, Subject, measure, table

import headprune as hp
from tests.support.checks import hooks
from tests.support.problems import small


@pytest.fixture
def subject() -> Subject:
    model, batches = small()
    layers = hp.find_attention(model, {k: v for k, v in batches[0].items() if k != "labels"})
    return Subject(
        "tiny", model, layers, lambda draw: batches[:2], batches[2:3], batches[2:], "accuracy", (4, 2), "few"
    )


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
    with torch.no_grad():
        subject.model.classifier.weight.mul_(2)
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
