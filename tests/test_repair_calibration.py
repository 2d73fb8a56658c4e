"""The dense model, measured once: the same whenever that is, in whatever room there is, and never changed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from headprune.attention import Heads
from headprune.repairing import Calibration, RepairWeights, answers, calibrate, calibration, checked_repair, directions
from headprune.repairing import fit_layers, gauss_newton
from tests.support import brute
from tests.support.checks import same, state

DROP: Heads = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def calibrated(classes: int = 3, **given: Any) -> Calibration:
    model, batches = brute.classifier(classes)
    return calibrate(model, hp.find_attention(model, batches[0]), batches, **given)


def sums(found: Calibration) -> dict[str, Tensor]:
    return {f"{name} {key}": value for name, own in found.statistics.moments.items() for key, value in vars(own).items()}


def equal(one: RepairWeights, other: RepairWeights) -> bool:
    pairs = [(one.by_module[name], other.by_module[name]) for name in one.by_module.keys() | other.by_module.keys()]
    return all(torch.equal(a, b) for both in pairs for a, b in zip(*both, strict=True) if a is not None)  # type: ignore[arg-type]


def test_weights_are_applied_and_taken_out_to_the_bit() -> None:
    """Within others, with a removed head masked, and whatever happens meanwhile."""
    found = calibrated()
    model, before = found.model, state(found.model)
    first, second = fit_layers(found, {**DROP, "bert.encoder.layer.1.attention.self": [1]}), fit_layers(found, DROP)
    assert first.mixes
    assert first.ridges.keys() == first.fits.keys()
    with found.applied(second.by_module, DROP):
        alone = state(model)
    with pytest.raises(KeyboardInterrupt), found.applied(first.by_module):
        assert not same(model, before)
        with found.applied(second.by_module):
            assert same(model, alone)
        assert same(model, before)  # the dense model, whichever weights there were
        with found.applied(first.by_module):
            raise KeyboardInterrupt
    assert same(model, before)


def test_a_repair_does_not_depend_on_what_was_tried_before() -> None:
    alone = checked_repair(calibrated(), DROP)
    found = calibrated()
    fit_layers(found, {"bert.encoder.layer.0.attention.self": [0]})
    with found.applied(fit_layers(found, DROP).by_module):
        pass
    again = checked_repair(found, DROP)
    assert again.trials == alone.trials
    assert equal(again, alone)


def test_where_nothing_is_refitted_nothing_is_measured() -> None:
    """The sums of all layers were gathered for a search without repair: at 8 billion parameters 17 GB."""
    found, passes = calibrated(repair=False), list[object]()
    handle = found.model.register_forward_pre_hook(lambda *given: passes.append(given))
    assert found.statistics.moments == found.statistics.directions.along == {}
    handle.remove()
    assert not passes
    assert found.statistics.passes == found.cost == 0
    costs = []
    for given in ({}, {"mixtures": False}, {"mixtures": False, "values": False}):
        found = calibrated(**given)
        assert found.statistics.passes == pytest.approx(found.cost)
        costs.append(found.cost)
    assert costs[0] > costs[1] > costs[2] == 3


def test_fits_are_made_once_and_the_oldest_is_forgotten() -> None:
    found, made = calibrated(mixtures=False, values=False), list[int]()

    def fit(i: int) -> Any:
        return found.fit("step", found.projections[0], torch.tensor([i]), lambda: made.append(i) or i)  # type: ignore[arg-type, return-value, func-returns-value]

    assert [fit(i) for i in (*range(8), *range(8))] == [*range(8), *range(8)]
    assert made == list(range(8))
    assert (fit(8), fit(0)) == (8, 0)
    assert made == [*range(8), 8, 0]


@pytest.mark.parametrize("shares", [3, 2, 1, 0])
def test_as_many_directions_as_there_is_room_for(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * 2 * 8 * (24 + 3 * 8 * shares + 1) ** 2
    monkeypatch.setattr(directions, "_MOST", room - (not shares))
    found = calibrated(mixtures=False)
    weights = fit_layers(found, DROP)
    assert {m.xx.shape for m in found.statistics.moments.values()} == {(2, 25 + 24 * shares, 25 + 24 * shares)}
    assert {len(m) for mixes in weights.mixes.values() for m in mixes.values()} <= {8 + 8 * shares}
    assert any("would not fit into memory" in note for note in found.notes) == (not shares)
    assert bool(weights.mixes) == bool(shares)
    monkeypatch.setattr(directions, "_MOST_AT_ONCE", 1)  # a layer at a time
    parts = sums(calibrated(mixtures=False))
    assert all(torch.equal(value, parts[name]) for name, value in sums(found).items())


def test_little_room_gives_the_same_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checked_repair(calibrated(mixtures=False), DROP)
    monkeypatch.setattr(gauss_newton, "_MOST_KEPT", 1)  # coordinates are chosen by the first batch that is seen
    parts = checked_repair(calibrated(mixtures=False), DROP)
    assert [t.step for t in whole.trials] == ["output projections", "values", "answers"]
    for one, other in zip(whole.trials, parts.trials, strict=True):
        assert one.after == pytest.approx(other.after, rel=1e-6)


def test_many_examples_are_seen_in_part_and_have_fewer_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, count in ((63, 0), (64, 1), (96, 2)):  # there are 32 examples
        monkeypatch.setattr(calibration, "_MOST_EXAMPLES", room)
        assert {mixed.shift for mixed in calibrated().statistics.runner.mixtures} == set(range(1, count + 1))
    monkeypatch.setattr(answers, "MOST_ROWS", 24)
    known, _ = calibrated(mixtures=False).answers
    assert not isinstance(known, str)
    assert 0 < known.examples <= 24


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_one_example_is_both_folds_by_its_tokens(name: str) -> None:
    """As a search may have it. Where there is but one token, nothing says that other weights are better."""
    model, example = brute.model_of(name)
    layers, one = hp.find_attention(model, example), brute.rows_of(example, [0])
    found, padded, single = (
        fit_layers(calibrate(model, layers, [batch], mixtures=False), {"L1": [1]} | brute.some_heads(layers))
        for batch in (one, brute.padded(one, 3), {k: v[:, :1] for k, v in one.items()})
    )
    assert min(found.ridges.values()) < math.inf
    assert set(single.ridges.values()) == {math.inf}
    for name, (weight, _) in found.by_module.items():
        torch.testing.assert_close(padded.by_module[name][0], weight, rtol=1e-6, atol=1e-6)
