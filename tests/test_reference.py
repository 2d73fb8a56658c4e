"""The dense reference: the same whenever it is measured, and not changed by what happens to the model afterwards."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref

import pytest
import torch

import headprune as hp
from headprune.planning.effects import effects
from headprune.planning.state import State
from headprune.planning.strategies import Search
from headprune.reference import DenseReference, calibrate, measure
from headprune.reference.answers import DenseAnswers
from headprune.reference.projections import at
from headprune.repairing import Refit, checked
from tests.support.checks import same, state
from tests.support.repairs import classifier, made, refit_of, some

DROP = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def equal(one: DenseReference, other: DenseReference) -> None:
    """To the bit."""
    assert one.moments.keys() == other.moments.keys() != set()
    for name, moments in one.moments.items():
        for found, expected in zip(vars(moments).values(), vars(other.moments[name]).values(), strict=True):
            assert torch.equal(found, expected)
    for name, along in one.directions.along.items():
        assert torch.equal(along, other.directions.along[name])
    assert isinstance(one.answers, DenseAnswers)
    assert isinstance(other.answers, DenseAnswers)
    assert all(map(torch.equal, one.answers.known, other.answers.known))


def test_it_makes_no_difference_when_it_is_measured() -> None:
    """Also while other weights are in the model, and after a repair: the calibration has the dense ones."""
    model, batches = classifier()
    calibration = calibrate(model, hp.find_attention(model, batches[0]), batches)
    dense = state(model)
    first = measure(calibration)
    weights = Refit(first).fitted(DROP)
    with calibration.weights.replaced(weights.by_module):
        repaired = state(model)
        assert not same(model, dense)
        equal(measure(calibration), first)
        equal(measure(calibration, answers=False).with_answers(), first)
        assert same(model, repaired)
    assert same(model, dense)


def test_a_step_depends_on_nothing_that_was_made_before() -> None:
    model, batches = classifier()
    reference = measure(calibrate(model, hp.find_attention(model, batches[0]), batches))
    alone = checked(Refit(reference), DROP)
    refit = Refit(reference)
    refit.fitted({"bert.encoder.layer.0.attention.self": [0]})
    with refit.applied(refit.fitted(DROP)):
        later = checked(refit, DROP)
    assert alone.trials == later.trials
    assert alone.by_module.keys() == later.by_module.keys()
    assert all(torch.equal(alone.by_module[n][0], later.by_module[n][0]) for n in alone.by_module)


def test_it_cannot_be_changed() -> None:
    model, batches = classifier()
    reference = measure(calibrate(model, hp.find_attention(model, batches[0]), batches), answers=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reference.moments = {}  # type: ignore[misc]


def test_what_is_not_asked_for_costs_nothing() -> None:
    model, batches = classifier()
    layers = hp.find_attention(model, batches[0])
    passes = {}
    for name, given in (
        ("all", {}),
        ("no mixtures", {"mixtures": False}),
        ("W_O", {"mixtures": False, "values": False}),
    ):
        calibration = calibrate(model, layers, batches, **given)
        assert calibration.runner.passes == 0
        reference = measure(calibration, answers=False)
        assert reference.answers is None
        assert reference.passes == calibration.runner.passes == pytest.approx(calibration.cost)
        passes[name] = reference.passes
        assert reference.with_answers().passes > reference.passes
    assert passes["all"] > passes["no mixtures"] > passes["W_O"] == 3


def test_where_nothing_is_refitted_nothing_is_measured() -> None:
    """The sums of all layers were gathered for a search without repair, which has no use for them: at 8 billion parameters 17 GB."""
    model, batches = classifier()
    layers = hp.find_attention(model, batches[0])
    calibration = calibrate(model, layers, batches, repair=False)
    ran: list[object] = []
    hook = model.register_forward_pre_hook(lambda *given: ran.append(given))
    reference = measure(calibration, answers=False)
    hook.remove()
    assert not ran
    assert reference.passes == calibration.cost == 0
    assert reference.moments == reference.directions.along == {}
    drop, units = some(layers), State(Search(layers)).units()
    gone = {(i, h) for i, layer in enumerate(layers) for h in drop.get(layer.name, ())}
    left = [unit for unit in units if not gone & {(unit.layer, h) for h in unit.heads}]
    for given, those in (({}, units), (drop, left)):
        found = effects(Refit(reference, math.inf), layers, given, those)
        torch.testing.assert_close(
            found, effects(refit_of(model, layers, batches, ridge=math.inf), layers, given, those)
        )


def test_several_answers_an_example_are_not_kept() -> None:
    model, example, layers = made("llama")
    reference = measure(calibrate(model, layers, [{k: torch.cat([v] * 4) for k, v in example.items()}]))
    assert isinstance(reference.answers, str)
    assert "more than one answer" in reference.answers


def test_a_copy_of_an_index_is_made_once_and_not_kept_alive() -> None:
    index = torch.arange(3)
    elsewhere = torch.device("meta")
    assert at(index, index.device) is index
    assert at(index, elsewhere) is at(index, elsewhere)
    kept = weakref.ref(index)
    del index
    gc.collect()
    assert kept() is None
