"""`benchmarks/quality.py`: what is measured once is kept, failures cost one row, and methods plug in."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager, nullcontext
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


def test_rows_of_other_weights_are_not_used(subject, tmp_path):
    path = tmp_path / "q.json"
    measure("tiny", subject, options(draws=1), Cache(path))
    with torch.no_grad():
        subject.model.classifier.weight.mul_(2)
    measure("tiny", subject, options(draws=1), Cache(path))
    weights = [json.loads(line)["weights"] for line in path.read_text().splitlines()]
    assert len(weights) == 10
    assert len(set(weights)) == 2


def test_a_failing_method_costs_its_own_rows(subject, monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no")

    @contextmanager
    def late(*args):
        raise RuntimeError("too late")
        yield

    monkeypatch.setitem(METHODS, "broken", broken)
    monkeypatch.setitem(METHODS, "late", late)
    rows = measure("tiny", subject, options(draws=1, methods=["broken", "late", "random"]), Cache(None))
    assert [row["method"] for row in rows] == ["dense", "random", "random"]
    assert "tiny, broken, 4: RuntimeError: no" in capsys.readouterr().err


def test_a_pruned_copy_measures_as_the_mask_does(subject, monkeypatch):
    def pruned(model, score, choose, layers, keep, seed):
        copied = deepcopy(model)
        example = {k: v for k, v in score[0].items() if k != "labels"}
        hp.prune(copied, hp.plan(hp.score(model, score, "gradient", layers=layers), keep), example)
        return nullcontext(copied)

    monkeypatch.setitem(METHODS, "pruned", pruned)
    dense, *rows = measure(
        "tiny", subject, options(draws=1, methods=["pruned", "headprune gradient", "Michel"]), Cache(None)
    )
    losses = {row["method"]: [r["loss"] for r in rows if r["method"] == row["method"]] for row in rows}
    assert losses["pruned"] == pytest.approx(losses["Michel"], abs=1e-6)
    assert losses["headprune gradient"] == pytest.approx(losses["Michel"], abs=1e-9)
    assert losses["Michel"][0] != dense["loss"]
    assert hooks(subject.model) == 0


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
