"""Plans from scores, constraints, and plans that a person reads and edits."""

import itertools
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headprune as hp
from tests.support.errors import refuses
from tests.support.plans import any_constraints, any_scores, check_nested, check_plan, gone, scores_of
from tests.support.zoo import bert, labelled, llama

BY_SCORES = ["one-shot", "per-layer", "layers", "uniform", "swap"]
OUT_OF_REACH = "out of reach|none would stay"


def plans_of(scores: hp.HeadScores, strategy: str, **constraints: Any) -> list[hp.PruningPlan]:
    """A plan for every number of heads that the strategy reaches, the largest first."""
    plans = []
    for keep in range(len(scores.flat()), 0, -1):
        with suppress(hp.HeadPruneError):
            plans.append(hp.plan(scores, keep, strategy, **constraints))
    return plans


# -- what goes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BY_SCORES)
@settings(max_examples=30)
@given(st.data())
def test_every_plan_holds(strategy: str, data: st.DataObject) -> None:
    """What was asked for, and what must stay; the same again is the same. Where no heads are shared, plans are nested."""
    shared = data.draw(st.booleans())
    scores = data.draw(any_scores(shared))
    constraints = data.draw(any_constraints(scores.layers))
    plans = plans_of(scores, strategy, **constraints)
    assert plans == plans_of(scores, strategy, **constraints)
    assert [plan.asked for plan in plans] == list(range(len(scores.flat()), len(scores.flat()) - len(plans), -1))
    for plan in plans:
        check_plan(plan, scores.layers, **constraints)
        assert plan.kept > 0
        assert (plan.strategy, plan.method, plan.budget) == (strategy, "m", f"keep {plan.asked}")
    if not shared and strategy != "swap":  # which looks for the best at the number that is asked for
        check_nested(plans)


def by_hand(scores: hp.HeadScores, keep: int, protect: Sequence[str], min_heads_per_layer: int) -> float | None:
    """The score that the better of two plans keeps, whole groups going or a head of every group; None if none is possible."""
    results = []
    for sliced in (False, True):
        units: list[tuple[float, int, tuple[int, ...]]] = []
        for i, layer in enumerate(scores.layers):
            value = scores.values[layer.name].tolist()
            free = [h for h in range(layer.num_heads) if f"{layer.name}.H{h}" not in protect]
            groups = layer.groups or tuple((h,) for h in free)
            if sliced and layer.groups:
                queues = [sorted((h for h in group if h in free), key=lambda h: (value[h], h)) for group in groups]
                groups = tuple(tuple(sorted(row)) for row in zip(*queues, strict=False))
            own = sorted((sum(value[h] for h in g) / len(g), i, g) for g in groups if set(g) <= set(free))
            room = max(layer.num_heads - min_heads_per_layer, 0)
            units += own[: room // len(own[0][2])] if own else []
        left, kept = len(scores.flat()), float(scores.flat().sum())
        for mean, _, heads in sorted(units):
            if left > keep:
                left, kept = left - len(heads), kept - mean * len(heads)
        results += [kept] if 0 < left <= keep else []
    return max(results, default=None)


@settings(max_examples=150)
@given(st.data())
def test_one_shot_keeps_as_much_score_as_a_plan_by_hand(data: st.DataObject) -> None:
    """By groups or by slices, whichever keeps more; refused where neither reaches the budget."""
    scores = data.draw(any_scores())
    constraints = data.draw(any_constraints(scores.layers))
    keep = data.draw(st.integers(1, len(scores.flat())))
    expected = by_hand(scores, keep, **constraints)
    if expected is None:
        refuses(OUT_OF_REACH, hp.plan, scores, keep, **constraints)
        return
    plan = hp.plan(scores, keep, **constraints)
    lost = sum(float(scores.values[name][head]) for name, head in gone(plan))
    assert float(scores.flat().sum()) - lost == pytest.approx(expected, abs=1e-9)


@given(any_scores(), st.integers(0, 2))
def test_uniform_is_uniform(scores: hp.HeadScores, least: int) -> None:
    """Layers of one size keep the same number, whatever must stay."""
    for plan in plans_of(scores, "uniform", min_heads_per_layer=least, protect="L0.H0"):
        left: dict[tuple[int, int], int] = {}
        for layer in scores.layers:
            kept = layer.num_heads - len(plan.drop.get(layer.name, ()))
            assert left.setdefault((layer.num_heads, layer.num_kv_heads), kept) == kept


@given(any_scores())
def test_per_layer_takes_as_large_a_share_of_every_layer(scores: hp.HeadScores) -> None:
    """No layer is behind another by more than half a unit of each, and in each the least important heads go."""
    size = {a: max(a.num_kv_heads, len(a.groups[0])) if a.groups else 1 for a in scores.layers}
    for plan in plans_of(scores, "per-layer"):
        lost = {a: plan.drop.get(a.name, []) for a in scores.layers}
        for ahead, behind in itertools.permutations(lost, 2):
            slack = sum(size[a] / a.num_heads for a in (ahead, behind)) / 2 + 1e-12
            able = len(lost[behind]) < behind.num_heads and lost[ahead]
            apart = len(lost[ahead]) / ahead.num_heads - len(lost[behind]) / behind.num_heads
            assert not able or apart <= slack
        for layer in (a for a in scores.layers if not a.groups):
            values = scores.values[layer.name].tolist()
            kept = [v for h, v in enumerate(values) if h not in lost[layer]]
            assert all(values[h] <= v for h in lost[layer] for v in kept)


SHARED = scores_of([(6, 2)], [0, 1, 2, 3, 4, 5])
EVEN = scores_of([(4, 4)] * 3, [float(i) for i in range(12)])


@pytest.mark.parametrize(("scores", "keep", "options", "drop"), [
    (EVEN, 9, {"strategy": "uniform", "protect": "L1.H0,L1.H1"}, {"l0": [0], "l1": [2], "l2": [0]}),
    (scores_of([(2, 2), (4, 4)], [0.0] * 6), 4, {"strategy": "uniform"}, {"l0": [0], "l1": [0]}),  # as large a share of both
    (scores_of([(2, 2), (4, 4)], [0.0] * 6), 3, {"strategy": "uniform"}, {"l0": [0], "l1": [0, 1]}),
    (scores_of([(2, 2), (4, 4), (8, 8)], [0.0] * 14), 7, {"strategy": "per-layer"}, {"l0": [0], "l1": [0, 1], "l2": [0, 1, 2, 3]}),
    (layers := scores_of([(2, 2), (4, 4), (2, 2)], [5, 5, 1, 1, 1, 9, 2, 2]), 6, {"strategy": "layers"}, {"l2": [0, 1]}),  # by their mean
    (layers, 5, {"strategy": "layers"}, {"l1": [0, 1, 2, 3], "l2": [0, 1]}),
    (layers, 6, {"strategy": "layers", "protect": "L2.H1"}, {"l1": [0, 1, 2, 3]}),
    (scores_of([(6, 2)], [1, 1, 1, 2, 2, 2]), 4, {}, {"l0": [0, 1, 2]}),  # a weak group goes whole
    (scores_of([(6, 2)], [1, 5, 5, 5, 1, 5]), 4, {}, {"l0": [0, 4]}),  # or a weak head of every group
    (scores_of([(6, 2)], [0, 0, 0, 5, 5, 5]), 3, {}, {"l0": [0, 1, 2]}),
    (SHARED, 4, {"protect": ["l0.H0"]}, {"l0": [1, 3]}),  # a protected head protects its group, but not in slices
    (SHARED, 4, {"protect": "L0.H0,L0.H3"}, {"l0": [1, 4]}),  # one of every group: no group can go
    (SHARED, 3, {"protect": "L0.H0,L0.H1,L0.H2"}, {"l0": [3, 4, 5]}),  # a whole group: no slice can go
])  # fmt: skip
def test_plans_by_hand(scores: hp.HeadScores, keep: int, options: dict[str, Any], drop: dict[str, list[int]]) -> None:
    assert hp.plan(scores, keep, **options).drop == drop


@pytest.mark.parametrize(("scores", "keep", "options", "message", "hint"), [
    (EVEN, 5, {"strategy": "uniform", "protect": "L1.H0,L1.H1"},
     "6 heads cannot be pruned by uniform (protected: L1.H0, L1.H1; l1 can lose no more, and every layer keeps as many), so 5 is", "Keep at least 6."),
    (EVEN, 4, {"protect": "L1,L2.H0", "min_heads_per_layer": 1}, "one-shot (protected: L1, L2.H0; at least 1 in every layer)", "Keep at least 6."),
    (scores_of([(4, 4)] * 2, [1.0] * 8, prunable=False), 2, {}, "8 heads cannot be pruned by one-shot (l0 and 1 more: ", "Keep at least 8."),
    (SHARED, 1, {}, "The last 2 heads go together by one-shot, so with no more than 1 none would stay", "Keep at least 2."),
    (EVEN, 3, {"strategy": "luck"}, "no strategy 'luck'", "Choose from auto, one-shot, per-layer, layers, re-scored, compensated, greedy, swap, uniform."),
    (EVEN, 3, {"strategy": "swap"}, "The scores by m do not weigh pairs of heads", "Score with --method fisher."),
    (EVEN, 3, {"min_heads_per_layer": -1}, "make no sense", "0 or more"),
    (replace(EVEN, values={**EVEN.values, "l1": EVEN.values["l1"] * torch.nan}), 3, {}, "not finite", "Score the model again"),
    *((EVEN, 3, {"strategy": name}, f"The strategy {name} runs the model", "headprune.search(model") for name in ("auto", "re-scored", "compensated", "greedy")),
    (EVEN, 3, {"protect": "L9"}, "no attention layer named 'L9'", "layers L0 to L2"), (EVEN, 3, {"protect": "H1"}, "no attention layer", ""),
    (EVEN, 3, {"protect": "L0.H4"}, "Layer l0 has no head 4", "It has 4: 0 to 3."),
])  # fmt: skip
def test_what_cannot_be_planned(scores: Any, keep: int, options: dict[str, Any], message: str, hint: str) -> None:
    assert hint in refuses(re.escape(message), hp.plan, scores, keep, **options).hint


def test_a_layer_whose_name_looks_like_a_head_is_a_layer() -> None:
    scores = scores_of([(2, 2)] * 2, [0, 1, 2, 3])
    layers = tuple(replace(layer, name=f"block.H{layer.index}") for layer in scores.layers)
    own = {layer.name: scores.values[f"l{layer.index}"] for layer in layers}
    scores = replace(scores, layers=layers, values=own, stderr=own)
    assert hp.plan(scores, 2, protect="block.H0").drop == {"block.H1": [0, 1]}
    assert hp.plan(scores, 1, protect="block.H1.H0").drop == {"block.H0": [0, 1], "block.H1": [1]}


# -- how many ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "total", "asked"), [
    (36, 72, 36), ("36", 72, 36), ("50%", 72, 36), (0.5, 72, 36), ("0.5", 72, 36), ("100%", 72, 72), (1, 72, 1), (1.0, 72, 72),
    (36.0, 72, 36), ("12.5%", 72, 9), ("50%", 7, 3), ("99.9%", 7, 6), (" 50% ", 7, 3), ("1.0", 7, 7), (2.0, 7, 2),
    (0.1 + 0.2, 10, 3), (0.29, 100, 29),  # a hair above .3, and a hair below 29 in binary
])  # fmt: skip
def test_numbers_of_heads(keep: Any, total: int, asked: int) -> None:
    plan = hp.plan(scores_of([(total, total)], [0.0] * total), keep)
    assert (plan.kept, plan.asked) == (asked, asked)


@pytest.mark.parametrize(("keep", "total", "message", "hint"), [
    (0, 72, "leaves no head", ""), ("0%", 72, "leaves no head", ""), (-3, 72, "leaves no head", ""), ("1%", 72, "leaves no head", "Keep at least 1 of the 72."),
    (73, 72, "more than all 72 heads", "instance 36."), ("101%", 72, "more than", ""), (2, 1, "more than all", "instance 1."), (3, 2, "more than all", "instance 1."),
    ("150%", 8, "more than all", "instance 4."), ("many", 72, "not a number", ""), ("nan%", 72, "not a number", ""), (36.5, 72, "not a number", ""),
    ("inf", 72, "not a number", ""),
])  # fmt: skip
def test_impossible_numbers_of_heads(keep: Any, total: int, message: str, hint: str) -> None:
    assert refuses(message, hp.plan, scores_of([(total, total)], [0.0] * total), keep).hint.endswith(hint)


# -- pairs of heads -----------------------------------------------------------------------------------


def cost(matrix: Tensor, heads: Sequence[int]) -> float:
    return float(matrix[list(heads)][:, list(heads)].sum())


def swapped(matrix: Tensor, shapes: Sequence[tuple[int, int]], keep: int, values: Sequence[float] = ()) -> list[int]:
    """What goes by ``swap``, counted over all layers."""
    scores = scores_of(shapes, values or matrix.diagonal().tolist(), matrix=matrix)
    heads = [(a.name, h) for a in scores.layers for h in range(a.num_heads)]
    return [heads.index(head) for head in sorted(gone(hp.plan(scores, keep, "swap")))]


@settings(max_examples=60)
@given(st.data())
def test_swap_ends_where_no_exchange_helps(data: st.DataObject) -> None:
    """Never worse than greed; the best of all choices where heads do not interact, or an exchange reaches every choice."""
    seed, between = data.draw(st.integers(0, 10**6)), data.draw(st.sampled_from([0.0, 1.0]))
    shapes = data.draw(st.sampled_from([[(4, 4)], [(3, 3), (4, 4)], [(2, 2), (3, 3), (2, 2)]]))
    size = sum(heads for heads, _ in shapes)
    slopes = torch.randn(5, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = slopes.T @ slopes / 5
    matrix = whole * between + torch.diag(whole.diagonal()) * (1 - between)
    keep = data.draw(st.integers(1, size - 1))
    found, greed = swapped(matrix, shapes, keep), list[int]()
    while len(greed) < size - keep:
        greed.append(min(set(range(size)) - set(greed), key=lambda i: cost(matrix, [*greed, i])))
    assert len(found) == size - keep
    assert cost(matrix, found) <= cost(matrix, greed) + 1e-9
    for out, into in itertools.product(found, set(range(size)) - set(found)):
        assert cost(matrix, found) <= cost(matrix, [*(i for i in found if i != out), into]) + 1e-9
    if keep in (1, size - 1) or not between:
        best = min(cost(matrix, choice) for choice in itertools.combinations(range(size), size - keep))
        assert cost(matrix, found) == pytest.approx(best)


CANCEL = torch.tensor([[1.0, 2, 2], [2, 1.1, -0.9], [2, -0.9, 1.2]], dtype=torch.float64)


def test_swap_undoes_what_greed_did() -> None:
    """The cheapest head first makes the cheapest pair impossible; of groups of two, though three heads could stay."""
    assert swapped(CANCEL, [(3, 3)], 1) == [1, 2]
    groups = torch.kron(CANCEL, torch.full((2, 2), 0.25, dtype=torch.float64))
    assert swapped(groups, [(6, 3)], 3, values=[5, 5, 0, 0, 0, 0]) == [2, 3, 4, 5]


# -- plans of models, and files -------------------------------------------------------------------------


def test_a_plan_of_a_model() -> None:
    model, example = llama()
    scores = hp.score(model, [labelled(model, example)], "gradient")
    hp.prune(model, hp.plan(scores, 10, protect="L1", min_heads_per_layer=2), example)
    left = {layer.name: layer.num_heads for layer in hp.find_attention(model, example)}
    assert left["model.layers.1.self_attn"] == 6
    assert min(left.values()) >= 2
    other, example = bert()
    fisher = hp.score(other, [labelled(other, example)], "fisher")
    assert hp.plan(fisher, 3, "swap").kept == 3
    other.classifier.weight.data += 1
    refuses("another model", hp.prune, other, hp.plan(fisher, 9), example)


@settings(max_examples=20)
@given(any_scores(), st.text(), st.text(), st.data())
def test_any_plan_survives_its_file(scores: hp.HeadScores, note: str, budget: str, data: st.DataObject) -> None:
    """And so do edits: a file that holds the heads alone gives a plan of the same heads."""
    plan = replace(data.draw(st.sampled_from(plans_of(scores, "one-shot"))), notes=(note,), budget=budget)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        assert hp.PruningPlan.load(path) == plan
        bare = hp.PruningPlan.load(edited(path, plan.drop)).on(scores.layers)
    assert (bare.drop, bare.kept, bare.total) == (plan.drop, plan.kept, plan.total)


def edited(path: Path, drop: object, **more: object) -> Path:
    path.write_text(json.dumps({"headprune": "plan", "schema": 1, "drop": drop, **more}))
    return path


def test_a_plan_edited_by_hand(tmp_path: Path) -> None:
    """A file has a line for each layer; one that was edited says so, and nothing else that it says is true any more."""
    model, example = bert()
    layers, path = hp.find_attention(model, example), tmp_path / "plan.json"
    plan = hp.plan(hp.score(model, [labelled(model, example)]), 6)
    plan.save(path)
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert all(f'"{name}": {heads}' in lines for name, heads in plan.drop.items())
    for name, number in (("kept", 7), ("total", 13)):
        path.write_text(path.read_text().replace(f'"{name}": {getattr(plan, name)}', f'"{name}": {number}'))
        loaded = hp.PruningPlan.load(path)
        note = "plan.json was changed after headprune had written it."
        assert loaded.notes == (*plan.notes, note)
        assert loaded.on(layers) == hp.PruningPlan(plan.drop, 6, 12, 6, model=plan.model, notes=(note,))
    document = {**plan.to_json(), "drop": {"L2": [3], layers[0].name: [2, 0]}}
    named = hp.PruningPlan.load(edited(path, **document)).on(layers)
    assert named == hp.PruningPlan({layers[0].name: [0, 2], layers[2].name: [3]}, 9, 12, 9, model=plan.model)
    hp.prune(model, hp.PruningPlan.load(edited(path, {"L0": [0, 2], "L2": [3]})), example)
    assert [layer.num_heads for layer in hp.find_attention(model, example)] == [2, 4, 3]


@pytest.mark.parametrize(("drop", "message"), [
    ({"L0": [6]}, "Layer L0 has no head 6"), ({"L0": [0, 1], "model.layers.0.self_attn": [2]}, "named twice"),
    ({"L0": [3]}, r"Layer model.layers.0.self_attn: head 3 cannot go alone: .* keep 2, 1, 2 query heads"),
    *(({"L0": heads}, "damaged plan .drop › L0") for heads in (["1"], None)),
])  # fmt: skip
def test_wrong_edits_name_the_layer_and_the_head(drop: object, message: str, tmp_path: Path) -> None:
    """More of them are in `tests.support.bad_inputs`."""
    layers = hp.find_attention(*llama())
    path = edited(tmp_path / "plan.json", drop)
    assert "\n" not in str(refuses(message, lambda: hp.PruningPlan.load(path).on(layers)))


def test_older_plans(tmp_path: Path) -> None:
    old = {"kept": 3, "total": 4, "asked": 3, "method": "gradient", "model": "", "notes": ["said"]}
    plan = hp.PruningPlan.load(edited(tmp_path / "plan.json", {"a": [1]}, **old))
    assert plan == hp.PruningPlan({"a": [1]}, 3, 4, 3, "gradient", "", ("said",))
