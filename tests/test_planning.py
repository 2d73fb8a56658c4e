"""Budgets are never exceeded, and smaller ones are inside larger ones."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from headprune.planning import STRATEGIES, Order, Search, arrange, heads_to_keep
from headprune.planning.units import GROUPS, SLICES
from tests.support.plans import any_scores, any_search, check_plans, scores_of
from tests.support.zoo import bert, labelled, llama

PURE = [s.name for s in STRATEGIES.values() if not s.runs_model]


@pytest.mark.parametrize("name", PURE)
@given(any_search(), st.lists(st.integers(1, 20), max_size=3))
def test_every_prefix_is_a_plan(name: str, search: Search, levels: list[int]) -> None:
    """Budgets hold, plans are nested, what must stay stays, and all of it can really be pruned."""
    order = STRATEGIES[name].run(search, levels)
    assert order == STRATEGIES[name].run(search, levels)
    assert Order.from_json(order.to_json()) == order
    check_plans(order, search)
    with pytest.raises(hp.HeadPruneError, match="out of reach"):
        order.plan(order.least - 1)


@given(any_scores(), st.data())
def test_every_budget_has_a_plan(scores: hp.HeadScores, data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(scores.flat())))
    if not arrange(Search(scores.layers, scores), "one-shot", [keep]).reaches(keep):
        assert any(keep < len(unit) for layer in scores.layers for unit in layer.units)
        with pytest.raises(hp.HeadPruneError, match="none would stay"):
            hp.plan(scores, keep)
        return
    plan = hp.plan(scores, keep)
    assert 0 < plan.kept <= keep
    assert hp.plan(scores, keep) == plan


@given(any_search(), st.data())
def test_groups_or_slices_whichever_keeps_more(search: Search, data: st.DataObject) -> None:
    assert search.scores is not None
    levels = data.draw(st.lists(st.integers(1, len(search.scores.flat())), min_size=1, max_size=3))
    both = [
        STRATEGIES["one-shot"].run(Search(search.layers, search.scores, search.constraints, k), levels)
        for k in (GROUPS, SLICES)
    ]
    chosen = arrange(search, "one-shot", levels)
    kept = lambda order: sum(  # noqa: E731
        sum(float(search.scores.values[a.name][h]) for a in search.layers for h in range(a.num_heads) if h not in p.drop.get(a.name, []))
        for p in map(order.plan, levels)
    )  # fmt: skip
    reaching = [order for order in both if all(map(order.reaches, levels))]
    if reaching:
        assert kept(chosen) == pytest.approx(max(map(kept, reaching)))
    else:
        reached = [sum(map(order.reaches, levels)) for order in (chosen, *both)]
        assert reached[0] == max(reached)


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12, unique=True), st.integers(1, 12))
def test_the_best_heads_stay(values: list[float], keep: int) -> None:
    scores = scores_of([(4, 4)] * 3, values)
    plan = hp.plan(scores, keep)
    kept = [v for i, v in enumerate(values) if i % 4 not in plan.drop.get(f"l{i // 4}", [])]
    assert sorted(kept, reverse=True) == sorted(values, reverse=True)[:keep]


def test_a_weak_group_goes_whole() -> None:
    plan = hp.plan(scores_of([(6, 2)], [1, 1, 1, 2, 2, 2]), 4)
    assert plan.drop == {"l0": [0, 1, 2]}
    assert plan.kept == 3
    assert "not 4: they go 3 at a time" in plan.notes[0]


def test_a_weak_head_of_every_group_goes() -> None:
    plan = hp.plan(scores_of([(6, 2)], [1, 5, 5, 5, 1, 5]), 4)
    assert plan.drop == {"l0": [0, 4]}
    assert plan.kept == 4


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
    (0, "leaves no head"), ("0%", "leaves no head"), (-3, "leaves no head"), (73, "more than all 72 heads"),
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


@given(any_search(), st.data())
def test_any_plan_survives_its_file(search: Search, data: st.DataObject) -> None:
    """And so do edits: a file that holds the heads alone gives a plan of the same heads."""
    plan = data.draw(st.sampled_from(list(STRATEGIES["one-shot"].run(search, []).plans())))
    plan = replace(plan, notes=(data.draw(st.text()),), budget=data.draw(st.text()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        assert hp.PruningPlan.load(path) == plan
        path.write_text(json.dumps({"headprune": "plan", "schema": 1, "drop": plan.drop}))
        bare = hp.PruningPlan.load(path).on(search.layers)
    assert (bare.drop, bare.kept, bare.total) == (plan.drop, plan.kept, plan.total)


def test_a_plan_never_keeps_nothing_where_a_head_was_asked_for() -> None:
    model, example = llama()
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [labelled(model, example)], "gradient", layers=layers)
    with pytest.raises(hp.HeadPruneError, match=r"last 2 heads go together by one-shot") as refused:
        hp.plan(scores, 1)
    assert refused.value.hint == "Keep at least 2."
    assert hp.plan(scores, 2).kept == 2
    with pytest.raises(hp.HeadPruneError, match="none would stay"):
        hp.search(model, [labelled(model, example, seed) for seed in range(3)], 1, layers=layers, repair=False)
