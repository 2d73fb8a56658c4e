"""Budgets are never exceeded, and smaller ones are inside larger ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from headprune.attention import AttentionLayer
from headprune.planning import heads_to_keep
from tests.zoo import bert, labelled


def scores_of(shapes: list[tuple[int, int]], values: list[float], prunable: bool = True) -> hp.HeadScores:
    layers = tuple(
        AttentionLayer(
            f"l{i}",
            i,
            "decoder",
            h,
            kv,
            8,
            () if kv in (1, h) else tuple(tuple(range(g * h // kv, (g + 1) * h // kv)) for g in range(kv)),
            prunable,
        )
        for i, (h, kv) in enumerate(shapes)
    )
    split = torch.split(torch.tensor(values, dtype=torch.float64), [h for h, _ in shapes])
    return hp.HeadScores(
        "m", "u", {a.name: v for a, v in zip(layers, split, strict=True)}, {a.name: v * 0 for a, v in zip(layers, split, strict=True)},
        1, layers,
    )  # fmt: skip


@st.composite
def any_scores(draw: st.DrawFn) -> hp.HeadScores:
    shapes = [
        (kv * draw(st.integers(1, 4)), kv)
        for kv in draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    ]
    total = sum(h for h, _ in shapes)
    values = draw(st.lists(st.floats(-2, 2, width=32), min_size=total, max_size=total))
    return scores_of(shapes, values)


@given(any_scores(), st.data())
def test_a_budget_holds_and_plans_are_nested(scores: hp.HeadScores, data: st.DataObject) -> None:
    total = len(scores.flat())
    keep = data.draw(st.integers(1, total))
    try:
        plan = hp.plan(scores, keep)
    except hp.HeadPruneError:
        raise AssertionError("every budget of at least one head must have a plan") from None
    dropped = {(name, h) for name, heads in plan.drop.items() for h in heads}
    assert plan.kept == total - len(dropped) <= keep
    for layer in scores.layers:
        gone = set(plan.drop.get(layer.name, ()))
        assert all(set(unit) <= gone or not set(unit) & gone for unit in layer.units)
    if keep > 1:
        smaller = hp.plan(scores, keep - 1)
        assert dropped <= {(name, h) for name, heads in smaller.drop.items() for h in heads}
    assert hp.plan(scores, keep) == plan


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12, unique=True), st.integers(1, 12))
def test_the_best_heads_stay(values: list[float], keep: int) -> None:
    scores = scores_of([(4, 4)] * 3, values)
    plan = hp.plan(scores, keep)
    kept = [v for i, v in enumerate(values) if i % 4 not in plan.drop.get(f"l{i // 4}", [])]
    assert sorted(kept, reverse=True) == sorted(values, reverse=True)[:keep]


def test_groups_go_whole_and_it_is_said() -> None:
    plan = hp.plan(scores_of([(6, 2)], [1, 1, 1, 2, 2, 2]), 4)
    assert plan.drop == {"l0": [0, 1, 2]}
    assert plan.kept == 3
    assert "not 4" in plan.notes[0]


def test_what_cannot_be_pruned_stays() -> None:
    fixed = scores_of([(4, 4)], [1, 2, 3, 4], prunable=False)
    with pytest.raises(hp.HeadPruneError, match="4 heads cannot be pruned"):
        hp.plan(fixed, 2)


@pytest.mark.parametrize(("keep", "heads"), [
    (36, 36), ("36", 36), ("50%", 36), (0.5, 36), ("0.5", 36), ("100%", 72), (1, 1), (1.0, 72), (36.0, 36), ("12.5%", 9),
])  # fmt: skip
def test_budgets(keep: object, heads: int) -> None:
    assert heads_to_keep(keep, 72) == heads  # type: ignore[arg-type]


@pytest.mark.parametrize(("keep", "message"), [
    (0, "leaves no head"), ("0%", "leaves no head"), (-3, "leaves no head"), (73, "more than the model's 72"),
    ("101%", "more than"), ("many", "not a number"), ("nan%", "not a number"), (36.5, "not a number"), ("inf", "not a number"),
])  # fmt: skip
def test_impossible_budgets(keep: object, message: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=message):
        heads_to_keep(keep, 72)  # type: ignore[arg-type]


def test_a_plan_for_another_model_is_refused() -> None:
    model, example = bert()
    plan = hp.plan(hp.score(model, [labelled(model, example)]), 6)
    with torch.no_grad():
        model.classifier.weight.add_(1)
    with pytest.raises(hp.HeadPruneError, match="another model"):
        hp.prune(model, plan, example)


def test_plans_survive_json(tmp_path: object) -> None:
    model, example = bert()
    plan = hp.plan(hp.score(model, [labelled(model, example)]), "50%")
    plan.save(f"{tmp_path}/plan.json")
    assert hp.PruningPlan.load(f"{tmp_path}/plan.json") == plan
