"""Small parts of a repair, by numbers that are known or by every case there is."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import headprune as hp
from headprune.divergence import Fidelity
from headprune.errors import HeadPruneError
from headprune.reference.answers import DenseAnswers, dense_answers
from headprune.repairing import AnswersRepair, LayerRepair, Repair, Trial, Weights, held_out, repair
from headprune.repairing.held_out import better
from headprune.repairing.step import Step
from headprune.repairing.steps import STEPS, logits, outputs, values
from headprune.repairing.steps.logits import _from_everywhere, _joined, _products, _root, _rows_of_groups, _weights
from headprune.repairing.steps.outputs import _held_out, _solved, downhill
from tests.support.problems import small
from tests.support.repairs import classifier, refit_of

DROP = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- strengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strengths", [outputs.RIDGES, values.RIDGES, logits.STRENGTHS])
def test_strengths_rise(strengths: tuple[float, ...]) -> None:
    assert strengths[0] > 0
    assert all(a < b for a, b in itertools.pairwise(strengths))


def test_the_strength_tried_first_is_one_of_them() -> None:
    assert logits._START in logits.STRENGTHS
    assert round(logits._START, 3) == 0.316
    assert (logits.STRENGTHS[0], logits.STRENGTHS[-1]) == (1e-4, 100)


def test_downhill_goes_as_long_as_it_falls() -> None:
    """From every start to the floor of its own valley, first to the left; and it looks at no strength twice."""
    for start, errors in itertools.product(range(4), itertools.product(range(4), repeat=4)):
        asked: list[int] = []

        def error(strength: float, errors: tuple[int, ...] = errors, asked: list[int] = asked) -> float:
            asked.append(int(strength))
            return float(errors[int(strength) - 10])

        at = start
        while at > 0 and errors[at - 1] < errors[at]:
            at -= 1
        if at == start:
            while at < 3 and errors[at + 1] < errors[at]:
                at += 1
        assert downhill(error, (10, 11, 12, 13), start) == (10 + at, errors[at])
        assert len(asked) == len(set(asked))


# -- least squares ----------------------------------------------------------------------------------


def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return wide.T @ wide, wide.T @ y


@pytest.mark.parametrize("scale", [1.0, 0.05])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_ridge_is_a_share_of_the_inputs_variance(has_bias: bool, scale: float) -> None:
    """Against augmented least squares; also where the variance is far below 1."""
    x, y, old = scale * (draw(20, 3) + 1), draw(20, 2, seed=1), (draw(3, 2, seed=2), has_bias * draw(2, seed=3))
    weight, bias = _solved(*sums(x, y), old, has_bias, 0.3)
    mean_x, mean_y = (x.mean(0), y.mean(0)) if has_bias else (torch.zeros(3), torch.zeros(2))
    a, b = x - mean_x, y - mean_y
    unit = a.square().sum(0).mean()
    both = torch.cat([a, (0.3 * unit).sqrt() * torch.eye(3)]), torch.cat([b, (0.3 * unit).sqrt() * old[0]])
    torch.testing.assert_close(weight, torch.linalg.lstsq(*both).solution)
    torch.testing.assert_close(bias, mean_y - mean_x @ weight if has_bias else old[1])


def test_inputs_that_never_change_keep_their_weights() -> None:
    x, y, old = torch.zeros(5, 2, dtype=torch.float64), draw(5, 3), (draw(2, 3, seed=1), draw(3, seed=2))
    for has_bias, bias in ((True, y.mean(0)), (False, old[1])):
        found = _solved(*sums(x, y), old, has_bias, 0.3)
        torch.testing.assert_close(found, (old[0], bias))
    none = _solved(*sums(x[:, :0], y), (old[0][:0], old[1]), True, 0.3)
    torch.testing.assert_close(none[1], y.mean(0))


def test_a_fold_that_holds_all_tokens_says_nothing() -> None:
    x, y, old = draw(12, 3), draw(12, 2, seed=1), (draw(3, 2, seed=2), draw(2, seed=3))

    def error(*parts: slice) -> float:
        xx, xy = (torch.stack(each) for each in zip(*(sums(x[p], y[p]) for p in parts), strict=True))
        return _held_out(xx, xy, torch.stack([y[p].square().sum() for p in parts]), old, True, 0.3)

    assert error(slice(0, 12), slice(0, 0)) == error(slice(0, 0), slice(0, 12)) == math.inf
    by_hand = 0.0
    for own, rest in ((slice(0, 7), slice(7, 12)), (slice(7, 12), slice(0, 7))):
        weight, bias = _solved(*sums(x[rest], y[rest]), old, True, 0.3)
        by_hand += float((y[own] - x[own] @ weight - bias).square().sum())
    assert error(slice(0, 7), slice(7, 12)) == pytest.approx(by_hand)


# -- the last step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(1, 10))
def test_products(rows: int) -> None:
    each = draw(rows, 3)
    torch.testing.assert_close(_products(each), each @ each.T)


def test_batches_are_looked_at_far_apart() -> None:
    assert _from_everywhere(5) == [0, 2, 4, 1, 3]
    for count in range(30):
        assert sorted(_from_everywhere(count)) == list(range(count))


def test_root() -> None:
    assert _root(torch.tensor([[3.0, 4.0], [0.0, 0.0]])) == 2.5


def test_rows_of_groups() -> None:
    found = _rows_of_groups(torch.tensor([2, 0, 2, 5, 0, 2]), 2)
    assert [part.tolist() for part in found] == [[[2, 3, 8, 9]], [[0, 1, 4, 5, 10, 11]], [[6, 7]]]
    same = _rows_of_groups(torch.tensor([1, 0, 1, 0]), 1)
    assert [part.tolist() for part in same] == [[[1, 3], [0, 2]]]


def test_calls_of_a_projection_stand_behind_one_another() -> None:
    """Two calls, of which one has its tokens flattened into rows."""
    x, y = [draw(2, 3, 4), draw(4, 4, seed=1)], [draw(2, 3, 5), draw(4, 5, seed=2)]
    slopes = [[t, 2 * t] for t in y]
    kept = torch.tensor([3, 0])
    for bias in (False, True):
        inputs, out = _joined(list(zip(x, y, slopes, strict=True)), kept, bias, 2)
        expected = torch.cat([x[0][..., kept], x[1].view(2, 2, 4)[..., kept]], 1)
        torch.testing.assert_close(inputs[..., :2], expected)
        assert inputs.shape == (2, 5, 2 + bias)
        assert bool((inputs[..., 2:] == 1).all())
        torch.testing.assert_close(out, torch.stack([t := torch.cat([y[0], y[1].view(2, 2, 5)], 1), 2 * t]))
    inputs, _ = _joined(list(zip(x, y, slopes, strict=True)), kept[:0], True, 2)
    assert inputs.shape == (2, 5, 1)
    with pytest.raises(HeadPruneError, match="cannot be told apart"):
        _joined(list(zip(x, y, slopes, strict=True)), kept, True, 4)
    half = [(x[0].half(), y[0].half(), [y[0].half()])]
    assert {t.dtype for t in _joined(half, kept, True, 2)} == {torch.float32}


@pytest.mark.parametrize("has_bias", [False, True])
def test_changes_of_inputs_that_stay(has_bias: bool) -> None:
    place: Any = SimpleNamespace(weight=draw(4, 3), bias=draw(3), has_bias=has_bias)
    matrix = draw(2 + has_bias, 3, seed=1)
    weight, bias = _weights({"o": matrix}, {"o": (place, torch.tensor([3, 1]))})["o"]
    assert torch.equal(weight[[3, 1]], matrix[:2])
    assert not weight[[0, 2]].any()
    assert torch.equal(bias, matrix[-1] if has_bias else torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("part", [1.0, 0.5, 0.05])
def test_the_part_at_which_a_parabola_is_least(part: float) -> None:
    """One that falls at first as the step promises, from 4 by 3, so its slope is -6; least at this part."""
    facts = AnswersRepair(before=2.0, held_out=1.0, strength=1.0, examples=9)
    curve = [4 - 6 * x + 3 / part * x**2 for x in (0.0, 1.0)]
    assert facts.better_part(*curve) == pytest.approx(part)


def test_the_last_step_costs_a_pass_and_one_for_every_direction() -> None:
    model, batches = classifier()
    refit = refit_of(model, hp.find_attention(model, batches[0]), batches, mixtures=False)
    runner, start = refit.reference.runner, refit.fitted(DROP)
    known = dense_answers(runner)
    assert isinstance(known, DenseAnswers)
    assert known.count == 2  # differences between three classes
    before = runner.passes
    places = {p.name: (p, p.kept(DROP)) for p in refit.reference.projections}
    with refit.applied(start, DROP):
        assert logits.gauss_newton(known, places) is not None
    assert runner.passes - before == pytest.approx(3)


def test_a_part_of_a_change() -> None:
    old, new = (draw(2, 3), draw(3)), (draw(2, 3, seed=1), draw(3, seed=2))
    weights = Weights({"a": old, "b": (old[0], None), "c": old})
    moved = weights.moved({"a": new, "b": new}, 0.25).by_module
    torch.testing.assert_close(moved["a"], (old[0] + new[0] / 4, old[1] + new[1] / 4))
    torch.testing.assert_close(moved["b"][0], old[0] + new[0] / 4)
    assert moved["b"][1] is None
    assert moved["c"] is old
    assert weights.by_module["a"] is old


# -- what is kept of it --------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after", "kept"), [
    ([4.0] * 200, [1.0] * 200, True), ([1.0] * 200, [4.0] * 200, False), ([1.0] * 200, [1.0] * 200, False),
    ([4.0, 5.0, 4.0, 5.0] * 2, [1.0, 1.0, 2.0, 1.0] * 2, True),
    ([100.0] + [1.0] * 199, [0.0] + [1.2] * 199, True),  # the mean falls by one example: with many, it decides
    ([100.0] + [1.0] * 49, [0.0] + [1.2] * 49, False),  # with few, so much by one alone may be chance
    ([0.25] * 200, [0.16] * 200, True),  # all of it below 1
])  # fmt: skip
def test_what_counts_as_better(before: list[float], after: list[float], kept: bool) -> None:
    assert better(torch.tensor(before).double(), torch.tensor(after).double()) is kept


def test_outputs_without_logits_are_compared_by_squares() -> None:
    class Bare(torch.nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {
                "x": x[:, 0] + self.more,
                "ids": x[:, 0].long(),
                "scale": x.mean(),
                "other": x[0, 0],
                "y": 2 * x + self.more,
            }

    model, x = Bare(), draw(4, 2, 3)
    model.more = 0.0

    @contextmanager
    def changed() -> Iterator[None]:
        model.more = 0.5
        yield
        model.more = 0.0

    fidelity = Fidelity(model, [x])
    assert not fidelity.known
    torch.testing.assert_close(fidelity.each(changed), torch.full((4,), 0.5).double())


def test_as_few_examples_as_show_anything() -> None:
    assert (held_out._LEAST, held_out._ENOUGH) == (4, 100)


# -- what is said of it --------------------------------------------------------------------------------


def test_what_a_repair_does_unless_it_is_told_otherwise() -> None:
    given = {name: p.default for name, p in inspect.signature(repair).parameters.items()}
    assert {name: given[name] for name in ("choose", "ridge", "values", "mixtures", "answers", "biases")} == {
        "choose": None, "ridge": None, "values": True, "mixtures": True, "answers": True, "biases": True,
    }  # fmt: skip
    assert not Step("x", lambda *a: Weights()).by_layer
    assert [(step.name, step.by_layer) for step in STEPS] == [
        ("output projections", True),
        ("values", True),
        ("answers", False),
    ]


def test_nothing_to_repair_costs_nothing() -> None:
    model, batches = small()
    done = repair(model, {}, batches)
    assert done == Repair({}, 9, 0, 0, notes=done.notes)


def test_a_repair_in_json() -> None:
    answers, trial = AnswersRepair(2.0, 1.5, 0.1, 32), Trial("values", 3.0, math.inf, 8, True)
    assert not LayerRepair(1.0, 0.5, 0.1).values
    assert answers.part == 1.0
    assert replace(trial, after=1.0).gain == 2.0
    done = Repair({"a": LayerRepair(1.0, 0.5, 0.1)}, 32, 4, 7, ("o",), ("note",), answers, (trial,))
    assert done.to_json() == {
        "layers": {"a": {"before": 1.0, "after": 0.5, "ridge": 0.1, "values": False}}, "examples": 32, "mixtures": 4, "passes": 7,
        "biases": ["o"], "notes": ["note"],
        "answers": {"before": 2.0, "held_out": 1.5, "strength": 0.1, "examples": 32, "part": 1.0},
        "trials": [{"step": "values", "before": 3.0, "after": None, "examples": 8, "kept": True}],
    }  # fmt: skip
    assert replace(done, answers=None).to_json()["answers"] is None


def test_the_old_weights_have_a_bias_where_they_may_get_one() -> None:
    for of_its_own in (True, False):
        model, batches = classifier()
        if not of_its_own:
            for layer in model.bert.encoder.layer:  # type: ignore[union-attr, operator]
                layer.attention.output.dense.bias = None
        refit = refit_of(model, hp.find_attention(model, batches[0]), batches, mixtures=False, values=False)
        for biases in (False, True):
            found = refit.unrepaired(DROP, biases=biases).by_module
            assert {bias is not None for _, bias in found.values()} == {of_its_own or biases}
            assert all(bias is None or of_its_own or not bias.any() for _, bias in found.values())
        assert refit.unrepaired(DROP).by_module.keys() == refit.unrepaired(DROP, biases=True).by_module.keys()
        assert {b is not None for _, b in refit.unrepaired(DROP).by_module.values()} == {of_its_own}


def test_fits_are_remembered_and_the_oldest_is_forgotten() -> None:
    model, batches = small()
    refit = refit_of(model, hp.find_attention(model, batches[0]), batches, mixtures=False, values=False)
    place, made = refit.reference.projections[0], list[int]()

    def fit(i: int) -> Any:
        return refit.remembered(STEPS[0], place, torch.tensor([i]), lambda: made.append(i) or i)  # type: ignore[func-returns-value]

    assert [fit(i) for i in (0, 1, 0, 1)] == [0, 1, 0, 1]
    assert made == [0, 1]
    for i in range(2, 8):
        fit(i)
    assert [fit(0), made.count(0)] == [0, 1]  # eight are remembered
    fit(8)
    assert [fit(0), made.count(0), fit(2), made.count(2)] == [0, 2, 2, 1]
