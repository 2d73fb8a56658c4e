"""Strategies that need no model, constraints, and plans that a person reads and edits: by the public names."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune as hp
from tests.support.plans import any_scores, scores_of
from tests.support.zoo import bert, labelled, llama


def plans_of(scores: hp.HeadScores, strategy: str, **constraints: Any) -> list[hp.PruningPlan]:
    """A plan for every number of heads that the strategy reaches, the largest first."""
    found = []
    for keep in range(len(scores.flat()), 0, -1):
        try:
            found.append(hp.plan(scores, keep, strategy, **constraints))
        except hp.HeadPruneError:
            break
    return found


def unit_of(layer: hp.AttentionLayer) -> int:
    """How many heads of a layer go together, as whole groups or as one head of every group."""
    shared = 1 < layer.num_kv_heads < layer.num_heads
    return max(layer.num_kv_heads, layer.num_heads // layer.num_kv_heads) if shared else 1


@given(any_scores(), st.integers(0, 2))
def test_uniform_is_uniform(scores: hp.HeadScores, least: int) -> None:
    """Layers of one size keep the same number, whatever must stay."""
    for plan in plans_of(scores, "uniform", min_heads_per_layer=least, protect="L0.H0"):
        left: dict[tuple[int, int], int] = {}
        for layer in scores.layers:
            kept = layer.num_heads - len(plan.drop.get(layer.name, ()))
            assert left.setdefault((layer.num_heads, layer.num_kv_heads), kept) == kept
            assert kept >= min(least, layer.num_heads)
        assert 0 not in plan.drop.get("l0", ())


@given(any_scores())
def test_per_layer_takes_as_large_a_share_of_every_layer(scores: hp.HeadScores) -> None:
    """No layer is behind another by more than half a unit of each, and in each the least important heads go."""
    for plan in plans_of(scores, "per-layer"):
        gone = {a: plan.drop.get(a.name, []) for a in scores.layers}
        for ahead, behind in itertools.permutations(gone, 2):
            slack = sum(unit_of(a) / a.num_heads for a in (ahead, behind)) / 2
            able = len(gone[behind]) < behind.num_heads and gone[ahead]
            assert (
                not able or len(gone[ahead]) / ahead.num_heads - len(gone[behind]) / behind.num_heads <= slack + 1e-12
            )
        for layer in (a for a in scores.layers if unit_of(a) == 1):
            values = scores.values[layer.name].tolist()
            assert all(values[h] <= v for h in gone[layer] for i, v in enumerate(values) if i not in gone[layer])


def test_plans_by_hand() -> None:
    even = scores_of([(4, 4)] * 3, [float(i) for i in range(12)])
    plan = hp.plan(even, 9, "uniform", protect="L1.H0,L1.H1")
    assert plan.drop == {"l0": [0], "l1": [2], "l2": [0]}
    with pytest.raises(hp.HeadPruneError, match=r"6 heads cannot be pruned by uniform \(.*l1 can lose no more"):
        hp.plan(even, 5, "uniform", protect="L1.H0,L1.H1")
    sizes = hp.plan(scores_of([(2, 2), (4, 4), (8, 8)], [0.0] * 14), 7, "per-layer")
    assert [len(sizes.drop[f"l{i}"]) for i in range(3)] == [1, 2, 4]
    layers = scores_of([(2, 2), (4, 4), (2, 2)], [5, 5, 1, 1, 1, 9, 2, 2])  # whole layers by their mean
    assert hp.plan(layers, 6, "layers").drop == {"l2": [0, 1]}
    assert hp.plan(layers, 5, "layers").drop == {"l1": [0, 1, 2, 3], "l2": [0, 1]}
    assert hp.plan(layers, 6, "layers", protect="L2.H1").drop == {"l1": [0, 1, 2, 3]}
    alike = scores_of([(6, 2)], [0, 0, 0, 5, 5, 5])  # a protected head protects its group, but not in slices
    assert hp.plan(alike, 3).drop == {"l0": [0, 1, 2]}
    assert hp.plan(alike, 3, protect="L0.H0").drop != {"l0": [0, 1, 2]}
    assert hp.plan(scores_of([(6, 2)], [0, 1, 2, 3, 4, 5]), 4, protect=["l0.H0"]).drop == {"l0": [1, 3]}
    assert hp.plan(scores_of([(6, 2)], [1, 5, 5, 5, 1, 5]), 4).drop == {"l0": [0, 4]}


@pytest.mark.parametrize(("protect", "message", "there"), [
    ("L9", "no attention layer named 'L9'", "layers L0 to L2"), ("L0.H2", "Layer l0 has no head 2", "0 to 1"), ("H1", "no attention layer", ""),
    ("L0.7", "no attention layer named 'L0.7'", ""), ("L9.H0", "no attention layer named 'L9'", "layers L0 to L2"),
])  # fmt: skip
def test_wrong_addresses_are_answered_in_addresses(protect: str, message: str, there: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=message) as told:
        hp.plan(scores_of([(2, 2)] * 3, [0.0] * 6), 2, protect=protect)
    assert there in told.value.hint


def test_constraints_hold_in_a_pruned_model() -> None:
    model, example = llama()
    scores = hp.score(model, [labelled(model, example)], "gradient")
    hp.prune(model, hp.plan(scores, 10, protect="L1", min_heads_per_layer=2), example)
    left = {layer.name: layer.num_heads for layer in hp.find_attention(model, example)}
    assert left["model.layers.1.self_attn"] == 6
    assert min(left.values()) >= 2
    with pytest.raises(hp.HeadPruneError, match=r"heads cannot be pruned by one-shot \(protected: L1; at least 2 in"):
        hp.plan(scores, 9, protect="L1", min_heads_per_layer=2)
    with pytest.raises(hp.HeadPruneError, match=r"no strategy 'luck'. Choose from one-shot"):
        hp.plan(scores, 3, "luck")
    with pytest.raises(hp.HeadPruneError, match="make no sense"):
        hp.plan(scores, 3, min_heads_per_layer=-1)
    other, example = bert()
    scores = hp.score(other, [labelled(other, example)], "gradient")
    with torch.no_grad():
        other.classifier.weight.add_(1)
    with pytest.raises(hp.HeadPruneError, match="another model"):
        hp.prune(other, hp.plan(scores, 9), example)


# -- files ------------------------------------------------------------------------------------


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
    assert hp.PruningPlan.load(path) == plan
    written = path.read_text()
    path.write_text(written.replace('"kept": 6', '"kept": 7'))
    note = "plan.json was changed after headprune had written it."
    assert hp.PruningPlan.load(path).on(layers).notes == (*plan.notes, note)
    document = {**plan.to_json(), "drop": {"L2": [3], layers[0].name: [2, 0]}}
    loaded = hp.PruningPlan.load(edited(path, **document)).on(layers)
    assert loaded == hp.PruningPlan({layers[0].name: [0, 2], layers[2].name: [3]}, 9, 12, 9, model=plan.model)
    bare = hp.PruningPlan.load(edited(path, {"L0": [0, 2], "L2": [3]}))
    assert bare.on(layers).drop == loaded.drop
    hp.prune(model, bare, example)
    assert [layer.num_heads for layer in hp.find_attention(model, example)] == [2, 4, 3]


@pytest.mark.parametrize(("drop", "message"), [
    ({"nowhere": [0]}, "no attention layer named 'nowhere'"), ({"L0": [6]}, "Layer L0 has no head 6"), ({"L0": [-1]}, "Layer L0 has no head -1"),
    ({"L0": [0, 0]}, "Layer L0: head 0 is listed twice"), ({"L0": [0, 1], "model.layers.0.self_attn": [2]}, "named twice"),
    ({"L0": [3]}, r"Layer model.layers.0.self_attn: head 3 cannot go alone: .* keep 2, 1, 2 query heads"),
    ({"L0": [1.5]}, "Layer L0: .* is no list of heads"), ({"L0": [True]}, "Layer L0: .* is no list of heads"),
    ({"L0": "all"}, "Layer L0: 'all' is no list of heads"), ([0, 1], "damaged plan"),
])  # fmt: skip
def test_wrong_edits_name_the_layer_and_the_head(drop: object, message: str, tmp_path: Path) -> None:
    layers = hp.find_attention(*llama())
    with pytest.raises(hp.HeadPruneError, match=message) as refused:
        hp.PruningPlan.load(edited(tmp_path / "plan.json", drop)).on(layers)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong", [{"kept": -1}, {"total": True}, {"asked": "3"}, {"method": 7}, {"notes": [1]}, {"notes": "said"}]
)
def test_damaged_and_older_plans(wrong: dict[str, Any], tmp_path: Path) -> None:
    old = {"kept": 3, "total": 4, "asked": 3, "method": "gradient", "model": "", "notes": ["said"]}
    plan = hp.PruningPlan.load(edited(tmp_path / "plan.json", {"a": [1]}, **old))
    assert plan == hp.PruningPlan({"a": [1]}, 3, 4, 3, "gradient", "", ("said",))
    with pytest.raises(hp.HeadPruneError, match=r"plan\.json is a damaged plan"):
        hp.PruningPlan.load(edited(tmp_path / "plan.json", {"a": [1]}, **old | wrong))
