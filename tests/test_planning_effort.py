"""Work is counted before it is done, and rightly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

import headprune as hp
from headprune.planning import Search, arrange
from headprune.planning.effects import effects
from headprune.planning.effort import EFFORTS, Effort, flops_of_pass, spread
from headprune.planning.search import work_of
from headprune.planning.units import Unit
from headprune.reference import Calibration, calibrate, measure
from headprune.repairing import Refit
from tests.support.problems import small
from tests.support.zoo import labelled, randomise, text


def searched(effort: Effort = EFFORTS["normal"]) -> tuple[Calibration, Search]:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    return calibrate(model, layers, batches), Search(layers, model=model, batches=batches, effort=effort)


@pytest.mark.parametrize("strategy", ["compensated", "re-scored"])
def test_a_search_costs_what_was_counted(strategy: str) -> None:
    calibration, search = searched()
    work = work_of(search, lambda: calibration, strategy, [2])
    assert calibration.runner.passes == 0
    arrange(replace(search, refit=Refit(measure(calibration, answers=False))), strategy, [2])
    assert work.passes == pytest.approx(calibration.runner.passes, rel=0.1)
    assert work.flops == pytest.approx(work.passes * flops_of_pass(calibration.runner.model, search.batches))


def test_scores_alone_cost_nothing() -> None:
    calibration, search = searched()
    assert work_of(search, lambda: calibration, "one-shot", [2]).passes == 0


def test_a_12_by_4_model_is_looked_at_again_on_1024_examples() -> None:
    """Such a BERT kept .877 with `re-scored`, .808 without."""
    config = tf.BertConfig(
        vocab_size=100,
        hidden_size=256,
        num_attention_heads=4,
        num_hidden_layers=12,
        intermediate_size=1024,
        num_labels=10,
    )
    model = randomise(tf.BertForSequenceClassification(config))
    batch = labelled(model, text(2, 64, seed=0), seed=0)
    layers = hp.find_attention(model, batch)
    batches: list[Any] = [batch] * 512
    calibration = calibrate(model, layers, batches)
    search = Search(layers, model=model, batches=batches)
    work = work_of(search, lambda: calibration, "re-scored", [6, 12, 16, 18, 24, 30, 36, 42])
    assert work.examples == 1024
    assert EFFORTS["normal"].allows(work)
    assert EFFORTS["high"].allows(work)


def test_batches_to_look_at_are_from_everywhere() -> None:
    assert spread(32, 1000, 512) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30]
    assert spread(32, 1000, 10**6) == list(range(32))
    assert spread(3, 3000, 10) == [0]


def test_a_look_takes_as_many_examples_as_it_may() -> None:
    calibration, search = searched(Effort("some", 5, None))
    refit = Refit(measure(calibration, answers=False))
    units = [Unit(0.0, i, (h,)) for i in range(2) for h in range(3)]
    every = effects(refit, search.layers, {}, units)
    some = effects(refit, search.layers, {}, units, examples=5)
    assert [len(every), len(some)] == [9, 4]  # the first batch of three
    torch.testing.assert_close(some, every[:4])
