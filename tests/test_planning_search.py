"""Strategies that run the model: every prefix is a plan, and useless and doubled heads go first."""

import copy
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headprune as hp
from headprune.attention import Heads
from headprune.planning import STRATEGIES, Constraints, Order, Search, arrange
from headprune.planning.effects import effects
from headprune.planning.search import dense_looks, stages
from headprune.planning.units import GROUPS, SLICES
from tests.support.checks import hooks, same, state
from tests.support.plans import check_plans, scores_of, units_for
from tests.support.problems import small, unlabelled
from tests.support.repairs import made, refit_of
from tests.support.zoo import labelled, randomise, sizes, text

SEARCHES = ["re-scored", "compensated", "greedy"]


@cache
def test_units_are_counted_in_the_searchs_own_layers() -> None:
    """A search may know fewer layers than the repair."""
    model, example, layers = made("bert")
    refit = refit_of(model, layers, [labelled(model, example)])
    search = Search(layers[1:], model=model, batches=refit.reference.runner.batches, refit=refit)
    found = effects(refit, layers[1:], {}, units_for(layers[1:], {}))
    torch.testing.assert_close(found, effects(refit, layers, {}, units_for(layers, {}))[:, 4:])
    for name in SEARCHES:
        order = STRATEGIES[name].run(search, [4])
        assert set(order.plan(4).drop) <= {a.name for a in layers[1:]}


def grouped_model(heads: int, kv: int, layers: int) -> tuple[nn.Module, Any, list[hp.AttentionLayer]]:
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=8 * heads, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
            head_dim=4, intermediate_size=16,
        )
    )  # fmt: skip
    model = randomise(tf.LlamaForCausalLM(config))
    given_ = text(3, 5)
    given_["attention_mask"] = given_["attention_mask"].flip(0, 1)  # padded on the left, as for generation
    example = labelled(model, given_)
    return model, example, hp.find_attention(model, example)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_prefix_is_a_plan(data: st.DataObject) -> None:
    """Budgets hold, plans are nested, what must stay stays, the model is as it was, and plans can really be pruned."""
    kv = data.draw(st.sampled_from([1, 2, 3]))
    model, example, layers = grouped_model(kv * data.draw(st.integers(1, 3)), kv, data.draw(st.integers(1, 2)))
    name, kind = data.draw(st.sampled_from(SEARCHES)), data.draw(st.sampled_from([GROUPS, SLICES]))
    heads = [(a.name, h) for a in layers for h in range(a.num_heads)]
    chosen = data.draw(st.sets(st.sampled_from(heads), max_size=2))
    protect = {a.name: sorted(h for n, h in chosen if n == a.name) for a in layers}
    constraints = Constraints({n: h for n, h in protect.items() if h}, data.draw(st.integers(0, 2)))
    batches = [example]
    refit = data.draw(
        st.sampled_from([None, refit_of(model, layers, batches), refit_of(model, layers, batches, ridge=0.1)])
    )
    search = Search(layers, None, constraints, kind, model=model, batches=batches, refit=refit)
    levels = data.draw(st.lists(st.integers(1, len(heads)), max_size=3))
    before = state(model)
    order = STRATEGIES[name].run(search, levels)
    assert same(model, before)
    assert hooks(model) == 0
    again = STRATEGIES[name].run(replace(search, refit=refit), levels)
    assert again.steps == order.steps
    assert Order.from_json(order.to_json()) == order
    # What a strategy of pure scores reaches, this reaches.
    values = scores_of([(a.num_heads, a.num_kv_heads) for a in layers], [0.0] * len(heads)).values
    even = hp.HeadScores(
        "m", "u", dict(zip([a.name for a in layers], values.values(), strict=True)), {}, 1, tuple(layers)
    )
    assert order.least == STRATEGIES["one-shot"].run(replace(search, scores=even), []).least
    check_plans(order, search)
    if order.least < order.total:
        plan = order.plan(data.draw(st.integers(order.least, order.total - 1)))
        pruned = copy.deepcopy(model)
        hp.prune(pruned, plan.drop, example, layers=layers)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("repaired", [False, True])
def test_dead_heads_go_first(name: str, repaired: bool) -> None:
    model, batches = small(heads=4)
    batches = unlabelled(batches)  # the divergence from the dense model: no head is harmful
    dead = [(0, 2), (1, 0), (1, 3)]
    with torch.no_grad():
        for i, h in dead:
            model.bert.encoder.layer[i].attention.output.dense.weight[:, 8 * h : 8 * h + 8] = 0
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches) if repaired else None
    order = STRATEGIES[name].run(Search(layers, model=model, batches=batches, refit=refit), [5, 2])
    plan = order.plan(5)
    assert plan.drop == {layers[0].name: [2], layers[1].name: [0, 3]}


@pytest.mark.parametrize("name", [n for n in SEARCHES if n != "compensated"])  # which does not look again
def test_one_of_two_duplicates_goes_first_and_the_other_late(name: str) -> None:
    config = tf.GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=1)
    model = randomise(tf.GPT2LMHeadModel(config)).double()
    attention = model.transformer.h[0].attn
    for p in (attention.c_attn.weight, attention.c_attn.bias):
        for start in (0, 32, 64):
            p.data[..., start + 8 : start + 16] = p.data[..., start : start + 8]
    attention.c_proj.weight.data[:16] *= 2
    batches = [text(8, 20)]
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches, ridge=1e-6)
    order = STRATEGIES[name].run(Search(layers, model=model, batches=batches, refit=refit), [3, 2, 1])
    gone = [heads[0] for step in order.steps for heads in step.values()]
    assert gone[0] in (0, 1)
    assert gone[1] not in (0, 1)
    # Without repair they are as important as they look.
    plain = STRATEGIES[name].run(Search(layers, model=model, batches=batches), [3, 2, 1])
    assert next(iter(plain.steps[0].values()))[0] not in (0, 1)


def test_greedy_takes_a_harmful_head_first() -> None:
    """The true loss is signed; labels are those of the model without the head."""
    model, batches = small(heads=4, layers=1)
    layers = hp.find_attention(model, batches[0])
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] *= 3
        model.classifier.weight *= 4
        taught = []
        with hp.mask(model, {layers[0].name: [1]}, layers=layers):
            for batch in batches:
                taught.append({**batch, "labels": model(**batch).logits.argmax(-1)})
    order = STRATEGIES["greedy"].run(Search(layers, model=model, batches=taught), [3])
    assert order.plan(3).drop == {layers[0].name: [1]}


def test_greedy_takes_what_costs_least() -> None:
    """By brute force over the units it tries, the head masked and W_O refitted."""
    model, batches = small(heads=3, layers=2)  # as many heads as it tries at once
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches, ridge=0.1)
    order = STRATEGIES["greedy"].run(Search(layers, model=model, batches=batches, refit=refit), [4])
    drop: Heads = {}
    for step in order.steps[:2]:
        losses = {}
        for a, h in [(a, h) for a in layers for h in range(3) if h not in drop.get(a.name, [])]:
            tried = {**drop, a.name: sorted([*drop.get(a.name, []), h])}
            with torch.no_grad(), refit.applied(refit.fitted(tried)), hp.mask(model, tried, layers=layers):
                each = [F.cross_entropy(model(**b).logits, b["labels"], reduction="none") for b in batches]
            losses[a.name, h] = float(torch.cat(each).mean())
        name, head = min(losses, key=losses.__getitem__)
        assert step == {name: [head]}
        drop = {**drop, name: sorted([*drop.get(name, []), head])}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_cost_of_a_search_is_its_own(name: str) -> None:
    model, batches = small(heads=3, layers=2)
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches, ridge=0.1)
    search = Search(layers, model=model, batches=batches, refit=refit)
    first = STRATEGIES[name].run(search, [4])
    known = replace(search, dense_looks=dense_looks(search, ["groups"]))
    before = refit.reference.runner.passes
    second = STRATEGIES[name].run(known, [4])
    took = refit.reference.runner.passes - before
    assert first.steps == second.steps
    # Two forward passes and a backward one for each of two stages (one here); greedy tries six heads, then five.
    # Where values make up for heads too, one more to see what they could read.
    cost, look = {"compensated": (4, 4), "re-scored": (8, 4), "greedy": (8 + 11, 4)}[name]
    assert took == pytest.approx(cost - look)  # the first look at the dense model is not made again
    # What is said is the whole cost of the order, whatever other orders have made before.
    assert first.notes == second.notes
    assert f"about {refit.reference.passes + cost:.0f} forward" in first.notes[0]


def test_stages() -> None:
    assert stages(12, [6, 3]) == [10, 9, 8, 7, 6, 5, 4, 3]
    assert stages(72, [36]) == [60, 50, 42, 36]
    assert stages(5, []) == stages(5, [5, 9]) == []
    for total, levels in ((30, [29, 7, 1]), (100, [50, 49, 3])):
        found = stages(total, levels)
        assert set(levels) <= set(found)
        assert sorted(found, reverse=True) == found
        for a, b in itertools.pairwise([total, *found]):
            assert a - b <= max(1, a // 6)


@pytest.mark.parametrize("name", SEARCHES)
def test_what_a_search_needs(name: str) -> None:
    layers = scores_of([(4, 4)], [1, 2, 3, 4]).layers
    with pytest.raises(hp.HeadPruneError, match="runs the model, but got none"):
        STRATEGIES[name].run(Search(layers), [2])
    with pytest.raises(hp.HeadPruneError, match="runs the model"):
        hp.plan(scores_of([(4, 4)], [1, 2, 3, 4]), 2, name)


def test_groups_or_slices_by_measure() -> None:
    model, example, layers = grouped_model(6, 3, 2)
    search = Search(layers, model=model, batches=[example], refit=refit_of(model, layers, [example]))
    for wanted in (GROUPS, SLICES):
        target = STRATEGIES["re-scored"].run(replace(search, kind=wanted), [6]).plan(6)
        order = arrange(search, "re-scored", [6], quality=lambda plan, t=target: float(plan.drop == t.drop))
        assert order.plan(6).drop == target.drop
