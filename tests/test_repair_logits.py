"""The step towards the dense model's answers, against least squares on gradients taken one by one."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.inputs import call
from headprune.reference import answers
from headprune.reference.answers import _basis
from headprune.repairing import Refit, Weights, repair
from headprune.repairing.coordinates import longest
from headprune.repairing.steps import logits
from headprune.repairing.steps.logits import _directions, solved
from tests.support.checks import same, state
from tests.support.problems import duplicated, small
from tests.support.repairs import classifier, close, fit_logits, made, refit_of

DROP: Heads = {"bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 2]}


def found_refit(model: nn.Module, batches: Sequence[Any], mixtures: bool = False) -> Refit:
    return refit_of(model, hp.find_attention(model, batches[0]), batches, mixtures=mixtures)


def along(model: nn.Module, problem: str | None, example: dict[str, Tensor]) -> Tensor:
    """What is compared of one example's answer: all of it, or by Gram and Schmidt what sums to nothing."""
    answer = model(**example).logits[0]
    if problem or len(answer) == 1:
        return answer
    basis: list[Tensor] = []
    for i in range(1, len(answer)):
        new = torch.zeros_like(answer)
        new[:i], new[i] = 1.0 / i, -1.0
        basis.append(new / new.norm())
    return torch.stack(basis) @ answer


def by_hand(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], refit: Refit, weights: Weights, problem: str | None
) -> tuple[Tensor, list[Tensor], dict[str, tuple[Tensor, int]]]:
    """What every example lacks, its gradients ``[answers, weights]``, and which weights these are."""
    singles = [{k: v[i : i + 1] for k, v in batch.items()} for batch in batches for i in range(len(batch["input_ids"]))]
    with torch.no_grad():
        wanted = [along(model, problem, s) for s in singles]
    lacking, gradients, where = [], [], {}
    with refit.applied(weights), hp.mask(model, DROP, layers=refit.reference.layers):
        modules = {p.name: (model.get_submodule(p.name), p.kept(DROP)) for p in refit.reference.projections}
        parameters = [p for m, _ in modules.values() for p in (m.weight, m.bias)]
        at = 0
        for name, (m, kept) in modules.items():
            where[name] = kept, at
            at += (len(kept) + 1) * m.weight.shape[0]
        for example, target in zip(singles, wanted, strict=True):
            with torch.enable_grad():
                now = along(model, problem, example)
                rows = []
                for one in now:
                    grads = torch.autograd.grad(one, parameters, retain_graph=True)
                    parts = []
                    for (_, kept), weight, bias in zip(modules.values(), grads[::2], grads[1::2], strict=True):
                        parts += [weight[:, kept].T.flatten(), bias]
                    rows.append(torch.cat(parts))
            lacking.append((target - now).detach())
            gradients.append(torch.stack(rows))
    return torch.stack(lacking), gradients, where


def ridge(lacking: Sequence[Tensor], gradients: Sequence[Tensor], strength: float) -> Tensor:
    """The change of weights, solved for in their own space: in the part of it that some gradient reaches (the rest stays)."""
    j, r = torch.cat(list(gradients)), torch.cat(list(lacking))
    basis, _ = torch.linalg.qr(j.T)
    j = j @ basis
    return basis @ torch.linalg.solve(j.T @ j + strength * torch.eye(j.shape[1], dtype=j.dtype), j.T @ r)


@pytest.mark.parametrize(("classes", "problem"), [(2, None), (4, None), (3, "multi_label_classification"), (1, None)])
def test_the_step_is_the_ridge_regression(classes: int, problem: str | None) -> None:
    model, batches = classifier(classes, problem)
    refit = found_refit(model, batches)
    plain = refit.fitted(DROP)
    found = fit_logits(refit, DROP)
    lacking, gradients, where = by_hand(model, batches, refit, plain, problem)
    unit = float(torch.cat(gradients).square().sum(1).mean())
    assert found.answers is not None
    # The strength: every example left out in turn, and the others fitted to.
    held_out = {}
    for strength in logits.STRENGTHS:
        left = []
        for i in range(len(gradients)):
            rest = [j for j in range(len(gradients)) if j != i]
            step = ridge([lacking[j] for j in rest], [gradients[j] for j in rest], strength * unit)
            left.append(lacking[i] - gradients[i] @ step)
        held_out[strength] = float(torch.stack(left).square().mean().sqrt())
    best = min(held_out, key=lambda s: held_out[s])
    assert found.answers.strength == best
    assert found.answers.held_out == pytest.approx(held_out[best], rel=1e-6)
    assert found.answers.before == pytest.approx(float(lacking.square().mean().sqrt()), rel=1e-9)
    step = found.answers.part * ridge(list(lacking), gradients, best * unit)
    for name, (kept, at) in where.items():
        (old, old_bias), (new, new_bias) = plain.by_module[name], found.by_module[name]
        assert old_bias is not None
        assert new_bias is not None
        size = len(kept) * old.shape[1]
        torch.testing.assert_close((new - old)[kept].flatten(), step[at : at + size], rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(
            new_bias - old_bias, step[at + size : at + size + len(old_bias)], rtol=1e-5, atol=1e-8
        )


def test_what_one_fold_alone_would_make() -> None:
    """By hand: the same strength, and the rows of every other example."""
    model, batches = classifier(3)
    refit = found_refit(model, batches)
    plain, found = refit.fitted(DROP), fit_logits(refit, DROP)
    lacking, gradients, where = by_hand(model, batches, refit, plain, None)
    unit = float(torch.cat(gradients).square().sum(1).mean())
    assert found.answers is not None
    assert found.on_fold is not None
    for fold in (0, 1):
        step = ridge(list(lacking[fold::2]), gradients[fold::2], found.answers.strength * unit)
        for name, (kept, at) in where.items():
            (old, _), (new, _) = plain.by_module[name], found.on_fold(fold).by_module[name]
            size = len(kept) * old.shape[1]
            torch.testing.assert_close((new - old)[kept].flatten(), step[at : at + size], rtol=1e-5, atol=1e-8)


def distance(model: nn.Module, example: Any, refit: Refit, weights: Weights, drop: Heads) -> float:
    """Mean squared difference of the logits from the dense model's."""
    with torch.no_grad():
        dense = call(model, example).logits
        with refit.applied(weights), hp.mask(model, drop, layers=refit.reference.layers):
            return float((call(model, example).logits - dense).square().mean())


@pytest.mark.parametrize("name", ["bert", "vit", "albert", "xlnet", "xlnet, square"])
def test_nearer_on_the_calibration_examples_and_removed_heads_stay_out(name: str) -> None:
    model, example, layers = made(name)
    refit, before = refit_of(model, layers, [example]), state(model)
    drop = {layers[-1].name: [0]}
    plain, found = refit.fitted(drop), fit_logits(refit, drop)
    assert found.by_module.keys() == plain.by_module.keys()
    for place in refit.reference.projections:
        if place.name in found.by_module:
            gone = torch.ones(len(place.weight), dtype=torch.bool)
            gone[place.kept(drop)] = False
            assert not found.by_module[place.name][0][gone].any()
    if found.answers is not None:
        assert found.answers.held_out < found.answers.before
        near = min(distance(model, example, refit, found.taken(part), drop) for part in (1.0, 0.25))  # type: ignore[misc]
        assert near < distance(model, example, refit, plain, drop)
    assert same(model, before)


def test_nothing_removed_nothing_changed() -> None:
    model, batches = small()
    before = state(model)
    done = repair(model, {}, batches, layers=hp.find_attention(model, batches[0]))
    assert same(model, before)
    assert done.answers is None


def test_only_projections_that_lose_heads_move() -> None:
    model, batches = classifier()
    drop = {"bert.encoder.layer.1.attention.self": [0]}
    found = fit_logits(found_refit(model, batches), drop)
    assert {n for n in found.by_module if n.endswith("output.dense")} == {"bert.encoder.layer.1.attention.output.dense"}


@torch.no_grad()
def test_a_duplicate_is_made_up_for_as_well() -> None:
    model, batches = small()
    duplicated(model)
    layers = hp.find_attention(model, batches[0])
    dense = model(**batches[0]).logits
    drop = {layers[0].name: [1]}
    repair(model, drop, batches, layers=layers)
    with hp.mask(model, drop, layers=layers):
        assert (model(**batches[0]).logits - dense).abs().max() < 1e-3


def test_a_whole_layer_gone_leaves_its_bias_to_move() -> None:
    model, batches = classifier()
    refit = found_refit(model, batches)
    found = fit_logits(refit, {"bert.encoder.layer.0.attention.self": [0, 1, 2]})
    weight, bias = found.by_module["bert.encoder.layer.0.attention.output.dense"]
    assert not weight.any()
    assert bias is not None
    assert bias.isfinite().all()


def test_little_room_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(4)
    whole = fit_logits(found_refit(model, batches), DROP)
    monkeypatch.setattr(logits, "_MOST_KEPT", 1)  # coordinates are chosen by the first batch that is seen
    parts = fit_logits(found_refit(model, batches), DROP)
    assert whole.answers is not None
    assert parts.answers is not None
    assert parts.answers.strength == whole.answers.strength
    close(parts, whole)


def test_batches_do_not_matter() -> None:
    model, batches = classifier(3)
    one_by_one = [{k: v[i : i + 1] for k, v in b.items()} for b in batches for i in range(len(b["input_ids"]))]
    close(fit_logits(found_refit(model, one_by_one), DROP), fit_logits(found_refit(model, batches), DROP))


def test_two_are_the_same_to_the_bit() -> None:
    model, batches = classifier(3)
    one, other = (fit_logits(found_refit(model, batches), DROP) for _ in range(2))
    assert all(torch.equal(one.by_module[n][0], other.by_module[n][0]) for n in one.by_module)


def test_where_every_token_has_an_answer_there_is_no_step_and_it_is_said() -> None:
    model, example, layers = made("llama")
    refit = refit_of(model, layers, [example])
    drop = {layers[0].name: list(layers[0].units[0])}
    found = fit_logits(refit, drop)
    assert found.answers is None
    close(found, refit.fitted(drop))
    assert any("more than one answer" in note for note in refit.report(found).notes)


def test_answers_that_are_not_finite_are_left_alone() -> None:
    model, batches = classifier(3)
    refit = found_refit(model, batches)
    refit.fitted(DROP)
    with torch.no_grad():
        model.classifier.bias[0] = math.inf
    found = fit_logits(refit, DROP)
    assert found.answers is None
    assert any("not all finite" in note for note in refit.report(found).notes)


def test_one_example_says_nothing_of_others() -> None:
    model, batches = classifier(2)
    found = fit_logits(found_refit(model, [{k: v[:1] for k, v in batches[0].items()}]), DROP)
    assert found.answers is None


def test_noise_that_no_gradient_explains_is_not_fitted() -> None:
    generator = torch.Generator().manual_seed(0)
    lacking = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    assert solved(torch.eye(80, dtype=torch.float64), lacking, torch.arange(40)) is None


def test_what_gradients_explain_is_fitted() -> None:
    generator = torch.Generator().manual_seed(0)
    j = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    found = solved(j, (j @ torch.ones(5, dtype=torch.float64)).view(30, 2), torch.arange(30))
    assert found is not None
    change, strength, held_out = found
    assert strength == logits.STRENGTHS[0]
    assert held_out < 1e-2
    torch.testing.assert_close(change, torch.ones(5, dtype=torch.float64), rtol=1e-2, atol=1e-2)


def noisy() -> tuple[Tensor, Tensor]:
    """Gradients ``[200, 300]`` of unequal length along their axes, and what is lacking ``[100, 2]``, half of it noise."""
    generator = torch.Generator().manual_seed(0)
    j = torch.randn(200, 300, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 300)
    y = j @ torch.randn(300, generator=generator, dtype=torch.float64)
    return j * 1e-12, (y + y.std() * torch.randn(200, generator=generator, dtype=torch.float64)).view(100, 2)


def test_float32_solves_as_float64_does() -> None:
    j, lacking = noisy()
    wide, narrow = (solved(g, lacking, torch.arange(100)) for g in (j, j.float()))
    assert wide is not None
    assert narrow is not None
    assert narrow[1] == wide[1]
    assert narrow[2] == pytest.approx(wide[2], rel=1e-4)
    torch.testing.assert_close(narrow[0], wide[0], rtol=1e-3, atol=1e-4 * float(wide[0].abs().max()))


def test_strengths_are_compared_on_some_and_solved_for_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    j, lacking = noisy()
    whole = solved(j, lacking, torch.arange(100))
    monkeypatch.setattr(logits, "_MOST_TRIED", 100)
    found = solved(j, lacking, torch.arange(100))
    assert whole is not None
    assert found is not None
    assert abs(logits.STRENGTHS.index(found[1]) - logits.STRENGTHS.index(whole[1])) <= 1
    unit = float(j.square().sum(1).mean())
    expected = torch.linalg.solve(
        j.T @ j + found[1] * unit * torch.eye(300, dtype=torch.float64), j.T @ lacking.flatten()
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))


def test_all_directions_where_they_are_few() -> None:
    gap = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(_directions(gap, torch.randn(3, 5, 5)), torch.eye(5, dtype=torch.float64).expand(3, 5, 5))
    basis = _basis(6, False)
    torch.testing.assert_close(basis @ basis.T, torch.eye(5, dtype=torch.float64))
    assert basis.sum(1).abs().max() < 1e-12
    assert torch.equal(_basis(6, True), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("some", [1, 2, 4])
def test_many_classes_are_seen_along_the_gap_and_some_others_without_bias(some: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gap, other = noise(9), noise(9)
    found = _directions(gap.expand(20_000, 9), noise(20_000, 9, some))
    products = found @ found.mT
    torch.testing.assert_close(products, torch.diag_embed(products.diagonal(dim1=1, dim2=2)))
    # What is seen of any error, on average: its mean square over all directions.
    seen = (found @ other).square().mean(1)
    assert float(seen.mean()) == pytest.approx(float(other.square().mean()), rel=0.03)
    if some > 1:  # and of the gap all, without chance
        torch.testing.assert_close((found @ gap).square().mean(1), gap.square().mean().expand(20_000))


def test_an_answer_without_a_gap_has_directions_too() -> None:
    found = _directions(torch.zeros(2, 9, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64))
    assert found.isfinite().all()


@pytest.mark.parametrize("some", [1, 2])
def test_with_some_directions_the_step_is_still_towards_the_answers(some: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(6)
    monkeypatch.setattr(answers, "MOST_ROWS", 64)  # there are 32 examples
    refit = found_refit(model, batches)
    plain, found = refit.fitted(DROP), fit_logits(refit, DROP)
    assert found.answers is not None
    with torch.no_grad():
        dense = torch.cat([model(**b).logits for b in batches])
    gaps = []
    for weights in (plain, found):
        with refit.applied(weights), hp.mask(model, DROP, layers=refit.reference.layers), torch.no_grad():
            gap = torch.cat([model(**b).logits for b in batches]) - dense
        gaps.append(float((gap - gap.mean(1, keepdim=True)).square().sum(1).mean() / 5) ** 0.5)
    # What is said of it is of all classes, all the same.
    assert gaps[0] == pytest.approx(found.answers.before, rel=1e-6)
    assert gaps[1] < gaps[0]


def test_few_coordinates_come_near_the_whole_step_as_they_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    refit = found_refit(model, batches)
    plain, whole = refit.fitted(DROP), fit_logits(refit, DROP)
    off = []
    for most in (20, 100, 10**6):
        monkeypatch.setattr(logits, "longest", lambda parts, most=most: longest(parts, most))
        found = fit_logits(refit, DROP)
        assert found.answers is not None
        change = [(found.by_module[n][0] - whole.by_module[n][0]).square().sum() for n in plain.by_module]
        off.append(float(torch.stack(change).sum()))
    assert off[0] > off[1] > off[2]
    assert off[2] < 1e-12


def test_many_examples_are_seen_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = classifier(3)
    monkeypatch.setattr(answers, "MOST_ROWS", 24)
    refit = found_refit(model, batches)
    found = fit_logits(refit, DROP)
    assert found.answers is not None
    assert 0 < found.answers.examples <= 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, batches = classifier(3)
    model = model.to(dtype)
    found = fit_logits(found_refit(model, batches), DROP)
    assert all(w.isfinite().all() for w, _ in found.by_module.values())
