"""Strategies, constraints, and plans that a person reads and edits."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from headprune.attention import AttentionLayer
from headprune.planning import STRATEGIES, Constraints, Search, arrange
from headprune.planning.units import GROUPS, SLICES, addresses
from headprune.trace import find_attention
from tests.support.plans import any_search, scores_of
from tests.support.zoo import bert, labelled, llama


@given(any_search())
def test_uniform_is_uniform(search: Search) -> None:
    """Layers of one size keep the same number, whatever must stay; where nothing must, all heads can go."""
    order = STRATEGIES["uniform"].run(search, [])
    for plan in order.plans():
        shares = {}
        for layer in search.layers:
            left = layer.num_heads - len(plan.drop.get(layer.name, ()))
            size = (layer.num_heads, layer.num_kv_heads)
            assert shares.setdefault(size, left) == left
    assert STRATEGIES["uniform"].run(replace(search, constraints=Constraints()), []).least == 0


@given(any_search())
def test_per_layer_takes_as_large_a_share_of_every_layer(search: Search) -> None:
    """No layer that could lose more is behind another by more than half a unit of each: no rounding comes nearer at every size."""
    order = STRATEGIES["per-layer"].run(search, [])
    reach = {a.name: len(list(order.plans())[-1].drop.get(a.name, ())) for a in search.layers}
    for plan in order.plans():
        gone = {a.name: len(plan.drop.get(a.name, ())) for a in search.layers}
        for ahead, behind in itertools.permutations(search.layers, 2):
            if gone[behind.name] < reach[behind.name] and gone[ahead.name]:
                slack = sum(unit_of(a, search.kind) / a.num_heads for a in (ahead, behind)) / 2
                lead = gone[ahead.name] / ahead.num_heads - gone[behind.name] / behind.num_heads
                assert lead <= slack + 1e-12


def unit_of(layer: AttentionLayer, kind: str) -> int:
    """How many heads of a layer go together."""
    shared = layer.num_kv_heads < layer.num_heads and layer.num_kv_heads > 1
    if not shared:
        return 1
    return layer.num_kv_heads if kind == SLICES else layer.num_heads // layer.num_kv_heads


def test_uniform_and_a_protected_layer() -> None:
    scores = scores_of([(4, 4)] * 3, [float(i) for i in range(12)])
    plan = hp.plan(scores, 9, "uniform", protect="L1.H0,L1.H1")
    assert [len(plan.drop[f"l{i}"]) for i in range(3)] == [1, 1, 1]
    assert plan.drop["l1"] == [2]
    with pytest.raises(hp.HeadPruneError, match=r"6 heads cannot be pruned by uniform \(.*l1 can lose no more"):
        hp.plan(scores, 5, "uniform", protect="L1.H0,L1.H1")


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_layers_keep_their_share(layers: int, heads: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(-2, 2), min_size=layers * heads, max_size=layers * heads))
    order = STRATEGIES["per-layer"].run(Search((s := scores_of([(heads, heads)] * layers, values)).layers, s), [])
    for plan in order.plans():
        left = [heads - len(plan.drop.get(f"l{i}", ())) for i in range(layers)]
        assert max(left) - min(left) <= 1
        for layer in s.layers:
            gone = plan.drop.get(layer.name, [])
            stay = [v for h, v in enumerate(s.values[layer.name].tolist()) if h not in gone]
            assert all(s.values[layer.name][h] <= v for h in gone for v in stay)


def test_layers_of_different_sizes_keep_their_share() -> None:
    scores = scores_of([(2, 2), (4, 4), (8, 8)], [0.0] * 14)
    plan = hp.plan(scores, 7, "per-layer")
    assert [len(plan.drop[f"l{i}"]) for i in range(3)] == [1, 2, 4]


def test_whole_layers_by_their_mean() -> None:
    scores = scores_of([(2, 2), (4, 4), (2, 2)], [5, 5, 1, 1, 1, 9, 2, 2])
    assert hp.plan(scores, 6, "layers").drop == {"l2": [0, 1]}
    assert hp.plan(scores, 5, "layers").drop == {"l1": [0, 1, 2, 3], "l2": [0, 1]}
    assert hp.plan(scores, 6, "layers", protect="L2.H1").drop == {"l1": [0, 1, 2, 3]}


def test_addresses() -> None:
    layers = scores_of([(2, 2), (4, 4), (4, 4)], [0.0] * 10).layers
    found = Constraints.parse("L0, l1.H2,L1.H0,l2", layers)
    assert found.protect == {"l0": [0, 1], "l1": [0, 2], "l2": [0, 1, 2, 3]}
    assert addresses(found.protect, layers) == "L0, L1.H0, L1.H2, L2"
    assert Constraints.parse(["L0"], layers, 2) == Constraints({"l0": [0, 1]}, 2)
    assert Constraints.parse("", layers) == Constraints()


@pytest.mark.parametrize(("text", "message"), [
    ("L9", "no attention layer named 'L9'"), ("L0.H2", "Layer l0 has no head 2"), ("L0.7", "no attention layer named 'L0.7'"),
    ("H1", "no attention layer"), ("L9.H0", "no attention layer named 'L9'"),
])  # fmt: skip
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=message):
        Constraints.parse(text, scores_of([(2, 2)], [0.0, 0.0]).layers)


def test_a_wrong_address_is_answered_in_addresses() -> None:
    layers = scores_of([(2, 2)] * 6, [0.0] * 12).layers
    for text, there in (("L9.H1", "layers L0 to L5"), ("L9", "layers L0 to L5")):
        with pytest.raises(hp.HeadPruneError) as caught:
            Constraints.parse(text, layers)
        assert f"This model has {there} " in caught.value.hint
    with pytest.raises(hp.HeadPruneError) as caught:  # what cannot be masked is left out
        Constraints.parse("L1", [layers[0], layers[2], layers[5]])
    assert "layers L0, L2, L5 " in caught.value.hint


def test_a_protected_head_protects_its_group_but_not_in_slices() -> None:
    scores = scores_of([(6, 2)], [0, 1, 2, 3, 4, 5])
    search = Search(scores.layers, scores, Constraints({"l0": [0]}))
    assert [p.drop for p in STRATEGIES["one-shot"].run(search, []).plans()] == [{}, {"l0": [3, 4, 5]}]
    sliced = STRATEGIES["one-shot"].run(Search(scores.layers, scores, search.constraints, SLICES), [])
    assert [p.drop for p in sliced.plans()] == [{}, {"l0": [1, 3]}, {"l0": [1, 2, 3, 4]}]


def test_constraints_hold_in_a_pruned_model() -> None:
    model, example = llama()
    scores = hp.score(model, [labelled(model, example)], "gradient")
    plan = hp.plan(scores, 10, protect="L1", min_heads_per_layer=2)
    hp.prune(model, plan, example)
    left = {layer.name: layer.num_heads for layer in find_attention(model, example)}
    assert left["model.layers.1.self_attn"] == 6
    assert min(left.values()) >= 2
    with pytest.raises(hp.HeadPruneError, match=r"heads cannot be pruned by one-shot \(protected: L1; at least 2 in"):
        hp.plan(scores, 9, protect="L1", min_heads_per_layer=2)


def test_unknown_strategies_and_scores_of_another_model() -> None:
    model, example = bert()
    scores = hp.score(model, [labelled(model, example)], "gradient")
    with pytest.raises(hp.HeadPruneError, match=r"no strategy 'luck'. Choose from one-shot"):
        hp.plan(scores, 3, "luck")
    with torch.no_grad():
        model.classifier.weight.add_(1)
    with pytest.raises(hp.HeadPruneError, match="another model's"):
        arrange(Search(scores.layers, scores, model=model), "one-shot", [3])
    with pytest.raises(hp.HeadPruneError, match="make no sense"):
        hp.plan(scores, 3, min_heads_per_layer=-1)


def test_measured_quality_decides_between_groups_and_slices() -> None:
    scores = scores_of([(6, 2)], [1, 5, 5, 5, 1, 5])
    search = Search(scores.layers, scores)
    assert arrange(search, "one-shot", [4]).plan(4).kept == 4
    assert arrange(search, "one-shot", [4], quality=lambda plan: -plan.kept).plan(4).kept == 3
    assert arrange(search, "one-shot", [4], kinds=[GROUPS]).plan(4).kept == 3


# -- files ------------------------------------------------------------------------------------


def edited(path: Path, drop: object, **more: object) -> Path:
    path.write_text(json.dumps({"headprune": "plan", "schema": 1, "drop": drop, **more}))
    return path


def test_a_plan_is_written_a_line_per_layer(tmp_path: Path) -> None:
    model, example = bert()
    plan = hp.plan(hp.score(model, [labelled(model, example)]), 6)
    plan.save(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    for name, heads in plan.drop.items():
        assert f'"{name}": {heads}' in [line.strip().rstrip(",") for line in lines]
    assert hp.PruningPlan.load(tmp_path / "plan.json") == plan


def test_a_plan_edited_by_hand(tmp_path: Path) -> None:
    model, example = bert()
    layers = find_attention(model, example)
    plan = hp.plan(hp.score(model, [labelled(model, example)]), 6)
    document = {**plan.to_json(), "drop": {"L2": [3], layers[0].name: [2, 0]}}
    loaded = hp.PruningPlan.load(edited(tmp_path / "plan.json", **document)).on(layers)
    assert loaded.drop == {layers[0].name: [0, 2], layers[2].name: [3]}
    assert loaded == hp.PruningPlan(loaded.drop, 9, 12, 9, model=plan.model)  # nothing else is true of it any more
    bare = hp.PruningPlan.load(edited(tmp_path / "bare.json", {"L0": [0, 2], "L2": [3]}))
    assert bare.on(layers).drop == loaded.drop
    hp.prune(model, bare, example)
    assert [layer.num_heads for layer in find_attention(model, example)] == [2, 4, 3]


@pytest.mark.parametrize(("drop", "message"), [
    ({"nowhere": [0]}, "no attention layer named 'nowhere'"),
    ({"L0": [6]}, "Layer L0 has no head 6"),
    ({"L0": [-1]}, "Layer L0 has no head -1"),
    ({"L0": [0, 0]}, "Layer L0: head 0 is listed twice"),
    ({"L0": [0, 1], "model.layers.0.self_attn": [2]}, "named twice"),
    ({"L0": [3]}, r"Layer model.layers.0.self_attn: head 3 cannot go alone: .* keep 2, 1, 2 query heads"),
    ({"L0": [1.5]}, "Layer L0: .* is no list of heads"),
    ({"L0": [True]}, "Layer L0: .* is no list of heads"),
    ({"L0": "all"}, "Layer L0: 'all' is no list of heads"),
    ([0, 1], "damaged plan"),
])  # fmt: skip
def test_wrong_edits_name_the_layer_and_the_head(drop: object, message: str, tmp_path: Path) -> None:
    model, example = llama()
    layers = find_attention(model, example)
    with pytest.raises(hp.HeadPruneError, match=message) as refused:
        hp.PruningPlan.load(edited(tmp_path / "plan.json", drop)).on(layers)
    assert "\n" not in str(refused.value)


def test_plans_of_an_older_headprune(tmp_path: Path) -> None:
    old = {"kept": 3, "total": 4, "asked": 3, "method": "gradient", "model": "", "notes": ["said"]}
    plan = hp.PruningPlan.load(edited(tmp_path / "plan.json", {"a": [1]}, **old))
    assert plan == hp.PruningPlan({"a": [1]}, 3, 4, 3, "gradient", "", ("said",))


def test_a_plan_that_was_changed_says_so(tmp_path: Path) -> None:
    """A person may edit it; a disk should not."""
    plan = hp.PruningPlan({"bert.encoder.layer.0.attention.self": [1]}, 7, 8, 7)
    plan.save(tmp_path / "plan.json")
    assert hp.PruningPlan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    note = "plan.json was changed after headprune had written it."
    for old, new in (("[1]", "[3]"), ("[1]", "[0, 3]")):
        (tmp_path / "plan.json").write_text(text.replace(old, new))
        loaded = hp.PruningPlan.load(tmp_path / "plan.json")
        assert loaded.notes == (note,)
        model, example = bert()
        assert note in loaded.on(hp.find_attention(model, example)).notes
