"""Strategies that run the model, and swap: against brute force, and under every constraint."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.planning import STRATEGIES, Constraints, Order, Search, arrange
from headprune.planning.effects import effects
from headprune.planning.search import _least, stages
from headprune.planning.state import State
from headprune.planning.units import GROUPS, SLICES, Unit
from headprune.repairing import Refit
from headprune.repairing.probe import across as _across
from headprune.repairing.probe import noise as _noise
from headprune.rows import Rows
from tests.support.checks import hooks, same, state
from tests.support.plain import WIDTH, Attention, Pair, noise
from tests.support.plans import check_plans, scores_of, units_for
from tests.support.problems import duplicated, small
from tests.support.repairs import made, padded
from tests.support.zoo import labelled, randomise, sizes, text

SEARCHES = ["re-scored", "compensated", "greedy"]


def unlabelled(batches: Sequence[Any]) -> list[Any]:
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]


def direct(refit: Refit, drop: Heads, unit: Unit, ridge: float) -> Tensor:
    """Effect of a unit by solving the regression without it, with the same strength, and by summing over the tokens."""
    layer = refit.layers[unit.layer]
    place = next(p for p in refit.places if layer in p.layers)
    weights = refit.fitted(drop)
    old, old_bias = place.weight, place.bias
    now, now_bias = weights.by_module.get(place.name, (old, old_bias))
    moments = refit.statistics.dense[place.name]
    xx, xy = moments.xx.sum(0), moments.xy.sum(0)
    tokens = xx[-1, -1]
    kept = place.kept(drop)
    mean = xx[-1, :-1] / tokens
    if not place.has_bias:
        mean = mean * 0
    both = (xx[:-1, :-1] / tokens - torch.outer(mean, mean))[kept][:, kept]
    strength = ridge * float(both.diagonal().mean())
    rest = place.kept({**drop, layer.name: [*drop.get(layer.name, []), *unit.heads]})
    a = (xx[:-1, :-1] / tokens - torch.outer(mean, mean))[rest][:, rest]
    wanted = xy[-1] / tokens
    c = (xy[:-1] / tokens - torch.outer(mean, wanted))[rest]
    new = torch.zeros_like(old)
    eye = torch.eye(len(rest), dtype=a.dtype)
    new[rest] = torch.linalg.solve(a + strength * eye, c + strength * old[rest])
    new_bias = wanted - mean @ new if place.has_bias else old_bias
    if place.name not in weights.by_module:
        now_bias = old_bias
    out = []
    with refit.applied(weights):
        for index in range(len(refit.batches)):
            total = 0
            for x, slope in refit.slopes(index)[place.name]:
                change = x @ (new - now) + (new_bias - now_bias if place.has_bias else 0)
                total = total + (change * slope).flatten(1).sum(1)
            out.append(total)
    return torch.cat(out)


@pytest.mark.parametrize(("name", "single"), [
    ("bert", False), ("gpt2", False), ("vit", False), ("t5", False), ("llama", False), ("llama", True), ("albert", False),
])  # fmt: skip
@pytest.mark.parametrize("gone", [False, True])
def test_effects_are_the_refits_without_the_unit(name: str, single: bool, gone: bool) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = Refit(model, layers, [example, Rows().take(example, [1])], ridge=0.05, values=False)
    drop = {layers[0].name: list(layers[0].units[1])} if gone else {}
    units = units_for(layers, drop, single)
    found = effects(refit, layers, drop, units)
    assert same(model, before)
    assert hooks(model) == 0
    assert found.shape == (4, len(units))
    for i in range(0, len(units), 1 + len(units) // 8):
        torch.testing.assert_close(found[:, i], direct(refit, drop, units[i], 0.05), rtol=1e-8, atol=1e-8)


def gate_gradients(model: nn.Module, layers: Sequence[hp.AttentionLayer], batch: Any, drop: Heads) -> Tensor:
    """Minus the derivative of the probe by a factor on every head, one example at a time."""
    rows = []
    for row in range(len(batch["input_ids"])):
        one = {k: v for k, v in Rows().take(batch, [row]).items() if k != "labels"}
        factors = [torch.ones(a.num_heads, dtype=torch.float64, requires_grad=True) for a in layers]
        handles = []
        for a, factor in zip(layers, factors, strict=True):
            gate = torch.ones(a.num_heads, dtype=torch.float64)
            gate[drop.get(a.name, [])] = 0

            def hook(m: nn.Module, args: Any, factor: Tensor = factor, gate: Tensor = gate) -> Any:
                return ((args[0].unflatten(-1, (len(gate), -1)) * (factor * gate)[:, None]).flatten(-2),)

            module = model.get_submodule(a.output_projection.module)
            handles.append(module.register_forward_pre_hook(hook))
        chances = model(**one).logits.log_softmax(-1)
        real = one["attention_mask"].bool() if chances.ndim == 3 else None
        root = chances.detach().exp().sqrt()
        told = _across(root, _noise(chances.detach(), real, [row]))
        probe = (told * root * chances).sum()
        rows.append(-torch.cat(torch.autograd.grad(probe, factors)))
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_without_repair_they_are_gate_gradients(name: str) -> None:
    model, example, layers = made(name)
    refit = Refit(model, layers, [example], ridge=float("inf"))
    drop = {layers[1].name: list(layers[1].units[0])}
    units = units_for(layers, drop, single=True)
    found = effects(refit, layers, drop, units)
    offsets = [sum(a.num_heads for a in layers[:i]) for i in range(len(layers))]
    expected = gate_gradients(model, layers, example, drop)[:, [offsets[u.layer] + u.heads[0] for u in units]]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    groups = effects(refit, layers, drop, (whole := units_for(layers, drop)))
    for column, unit in zip(groups.T, whole, strict=True):
        parts = [i for i, u in enumerate(units) if u.layer == unit.layer and u.heads[0] in unit.heads]
        torch.testing.assert_close(column, found[:, parts].sum(1))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "xlnet", "xlnet, square"])
@pytest.mark.parametrize("ridge", [None, 0.1, float("inf")])
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    model, example, layers = made(name)
    if name in ("bert", "gpt2", "llama"):
        example = text(5, 7)
    rows = len(example["input_ids"])
    drop = {layers[0].name: list(layers[0].units[0])}
    units = units_for(layers, drop)

    def found(batches: Sequence[Any]) -> Tensor:
        return effects(Refit(model, layers, batches, ridge=ridge, mixtures=False), layers, drop, units)

    whole = found([example])
    assert whole.abs().max() > 1e-4
    torch.testing.assert_close(found([Rows().take(example, [i]) for i in range(rows)]), whole, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        found([Rows().take(example, [0, 1]), Rows().take(example, range(2, rows))]), whole, rtol=1e-6, atol=1e-8
    )
    if not name.startswith("xlnet"):
        torch.testing.assert_close(found([padded(example, 3, left=False)]), whole, rtol=1e-6, atol=1e-8)


def test_a_layer_that_has_lost_nothing_is_judged_with_repair() -> None:
    """Wherever it is: cross-validation has not said that its old weights are best."""
    model, example, layers = made("bert")
    refit = Refit(model, layers, [example], values=False)
    drop = {layers[0].name: [0]}
    units = units_for(layers, drop)
    found = effects(refit, layers, drop, units)
    gates = effects(Refit(model, layers, [example], ridge=float("inf")), layers, {}, units)
    behind = [i for i, u in enumerate(units) if u.layer == 2]
    assert list(refit.fitted(drop).ridges) == [refit.places[0].name]
    first = direct(refit, drop, units[behind[0]], 0.3)
    torch.testing.assert_close(found[:, behind[0]], first, rtol=1e-8, atol=1e-8)
    assert (found - gates)[:, behind].abs().max() > 1e-6


def test_dead_heads_and_duplicates() -> None:
    model, batches = small(heads=4)
    duplicated(model)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.output.dense.weight[:, 16:24] = 0
    layers = hp.find_attention(model, batches[0])
    units = units_for(layers, {})
    repaired = effects(Refit(model, layers, batches, ridge=1e-6), layers, {}, units)
    masked = effects(Refit(model, layers, batches, ridge=float("inf")), layers, {}, units)
    assert not masked[:, 6].any()
    assert repaired[:, 6].abs().max() < 1e-9
    for h in (0, 1):
        assert repaired[:, h].abs().mean() < 1e-3 * masked[:, h].abs().mean()
        # Once one is gone, the other is worth what both were.
        after = effects(Refit(model, layers, batches, ridge=1e-6), layers, {layers[0].name: [1 - h]}, [units[h]])
        assert after.abs().mean() > 100 * repaired[:, h].abs().mean()


class Classifier(nn.Module):
    """Attention blocks and a classifier of the mean."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Bare(Attention):
    """Without an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.o = None

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@pytest.mark.parametrize("blocks", ["shared", "bare"])
def test_heads_that_cannot_be_made_up_for_are_not_free(blocks: str) -> None:
    """Layers whose W_O cannot be refitted: the gate gradient, not nothing."""
    model = randomise(Classifier(*((Pair(), Attention()) if blocks == "shared" else (Bare(), Attention())))).double()
    x = noise(6, 5, WIDTH).double()
    layers = hp.find_attention(model, x)
    refit = Refit(model, layers, [x], ridge=0.1)
    units = units_for(layers, {})
    fixed = {a.name for a in layers} - {a.name for p in refit.places for a in p.layers}
    assert fixed
    drop: Heads = {layers[-1].name: [1], layers[0].name: [2]}
    for gone in ({}, drop):
        left = [u for u in units if not set(u.heads) & set(gone.get(layers[u.layer].name, ()))]
        found = effects(refit, layers, gone, left)
        plain = effects(Refit(model, layers, [x], ridge=float("inf")), layers, gone, left)
        those = [i for i, u in enumerate(left) if layers[u.layer].name in fixed]
        assert found[:, those].abs().mean(0).min() > 1e-4
        if not gone:
            torch.testing.assert_close(found[:, those], plain[:, those])
    # By finite differences of the probe, with the removed heads masked.
    weights = refit.fitted(drop)
    (at,) = [i for i, u in enumerate(left) if layers[u.layer].name in fixed][:1]
    layer, (head,) = layers[left[at].layer], left[at].heads
    gate: Any = {a.name: torch.ones(a.num_heads, dtype=torch.float64) for a in layers}
    for name, heads in drop.items():
        gate[name][heads] = 0
    with torch.no_grad(), refit.applied(weights):
        from headprune.gates import gated

        with gated(model, layers, gate):
            output = model(x)
        told = _noise(output, None, range(6))
        ends = []
        for step in (1e-6, -1e-6):
            gate[layer.name][head] = 1 + step
            with gated(model, layers, gate):
                ends.append((told * model(x)).sum(1))
    torch.testing.assert_close(found[:, at], -(ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_a_layer_that_does_not_matter_costs_nothing() -> None:
    model, batches = small()
    with torch.no_grad():
        model.classifier.weight.zero_()
    layers = hp.find_attention(model, batches[0])
    assert not effects(Refit(model, layers, batches), layers, {}, units_for(layers, {})).any()


def test_units_are_counted_in_the_searchs_own_layers() -> None:
    """A search may know fewer layers than the repair."""
    model, example, layers = made("bert")
    refit = Refit(model, layers, [labelled(model, example)])
    search = Search(layers[1:], model=model, batches=refit.batches, refit=refit)
    found = effects(refit, layers[1:], {}, units_for(layers[1:], {}))
    torch.testing.assert_close(found, effects(refit, layers, {}, units_for(layers, {}))[:, 4:])
    for name in SEARCHES:
        order = STRATEGIES[name].run(search, [4])
        assert set(order.plan(4).drop) <= {a.name for a in layers[1:]}


# -- orders ------------------------------------------------------------------------------------


@cache
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
    refit = data.draw(st.sampled_from([None, Refit(model, layers, batches), Refit(model, layers, batches, ridge=0.1)]))
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
    refit = Refit(model, layers, batches) if repaired else None
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
    refit = Refit(model, layers, batches, ridge=1e-6)
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
    refit = Refit(model, layers, batches, ridge=0.1)
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
    refit = Refit(model, layers, batches, ridge=0.1)
    assert refit.statistics.dense
    search = Search(layers, model=model, batches=batches, refit=refit)
    first, second = (STRATEGIES[name].run(search, [4]) for _ in range(2))
    assert first.steps == second.steps
    # Two forward passes and a backward one for each of two stages (one here); greedy tries six heads, then five.
    # Where values make up for heads too, one more to see what they could read.
    cost, look = {"compensated": (4, 4), "re-scored": (8, 4), "greedy": (8 + 11, 4)}[name]
    assert f"about {cost} forward" in first.notes[0]
    assert f"about {cost - look} forward" in second.notes[0]  # the first look at the dense model is remembered


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
    search = Search(layers, model=model, batches=[example], refit=Refit(model, layers, [example]))
    for wanted in (GROUPS, SLICES):
        target = STRATEGIES["re-scored"].run(replace(search, kind=wanted), [6]).plan(6)
        order = arrange(search, "re-scored", [6], quality=lambda plan, t=target: float(plan.drop == t.drop))
        assert order.plan(6).drop == target.drop


# -- swap --------------------------------------------------------------------------------------


def matrix_of(size: int, seed: int, scale: float = 1.0) -> Tensor:
    g = torch.randn(5, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    off = g.T @ g / 5
    return torch.diag(off.diagonal()) + scale * (off - torch.diag(off.diagonal()))


def scored(shapes: list[tuple[int, int]], matrix: Tensor) -> hp.HeadScores:
    return replace(scores_of(shapes, matrix.diagonal().tolist()), matrix=matrix)


def cost(matrix: Tensor, chosen: Sequence[int]) -> float:
    return float(matrix[list(chosen)][:, list(chosen)].sum())


def flat(scores: hp.HeadScores, drop: Heads) -> list[int]:
    offsets, at = {}, 0
    for a in scores.layers:
        offsets[a.name], at = at, at + a.num_heads
    return sorted(offsets[n] + h for n, heads in drop.items() for h in heads)


def by_greed(matrix: Tensor, count: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [i for i in range(len(matrix)) if i not in chosen]
        chosen.append(min(rest, key=lambda i: cost(matrix, [*chosen, i])))
    return chosen


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([[(4, 4)], [(3, 3), (4, 4)], [(2, 2), (3, 3), (2, 2)]]), st.data())
def test_swap_ends_where_no_exchange_helps(seed: int, shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    size = sum(h for h, _ in shapes)
    matrix = matrix_of(size, seed)
    scores = scored(shapes, matrix)
    keep = data.draw(st.integers(1, size - 1))
    gone = flat(scores, STRATEGIES["swap"].run(Search(scores.layers, scores), [keep]).plan(keep).drop)
    assert len(gone) == size - keep
    found = cost(matrix, gone)
    assert found <= cost(matrix, by_greed(matrix, size - keep)) + 1e-9
    for out, into in itertools.product(gone, set(range(size)) - set(gone)):
        assert found <= cost(matrix, [*(g for g in gone if g != out), into]) + 1e-9
    best = min(cost(matrix, c) for c in itertools.combinations(range(size), size - keep))
    assert found >= best - 1e-9
    if keep in (1, size - 1):  # one that goes, or one that stays: an exchange reaches every choice
        assert found == pytest.approx(best)


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_swap_is_best_where_heads_do_not_interact(seed: int, keep: int) -> None:
    matrix = matrix_of(8, seed, scale=0.0)
    scores = scored([(4, 4), (4, 4)], matrix)
    gone = flat(scores, STRATEGIES["swap"].run(Search(scores.layers, scores), [keep]).plan(keep).drop)
    best = min(cost(matrix, c) for c in itertools.combinations(range(8), 8 - keep))
    assert cost(matrix, gone) == pytest.approx(best)


def test_swap_undoes_what_greed_did() -> None:
    """The cheapest head first makes the cheapest pair impossible."""
    matrix = torch.tensor([[1.0, 2, 2], [2, 1.1, -0.9], [2, -0.9, 1.2]], dtype=torch.float64)
    assert sorted(by_greed(matrix, 2)) != [1, 2]
    scores = scored([(3, 3)], matrix)
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [1])
    assert order.plan(1).drop == {"l0": [1, 2]}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_swap_holds_budgets_and_constraints(data: st.DataObject) -> None:
    shapes = [(kv * data.draw(st.integers(1, 3)), kv) for kv in data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))]  # fmt: skip
    size = sum(h for h, _ in shapes)
    scores = scored(shapes, matrix_of(size, data.draw(st.integers(0, 999))))
    layers = scores.layers
    chosen = data.draw(st.sets(st.sampled_from([(a.name, h) for a in layers for h in range(a.num_heads)]), max_size=2))
    protect = {a.name: sorted(h for n, h in chosen if n == a.name) for a in layers}
    constraints = Constraints({n: h for n, h in protect.items() if h}, data.draw(st.integers(0, 2)))
    search = Search(layers, scores, constraints, data.draw(st.sampled_from([GROUPS, SLICES])))
    levels = data.draw(st.lists(st.integers(1, size), max_size=3))
    order = STRATEGIES["swap"].run(search, levels)
    assert order == STRATEGIES["swap"].run(search, levels)
    assert order.least == STRATEGIES["one-shot"].run(search, []).least
    check_plans(order, search)


def test_swap_counts_what_has_gone_before() -> None:
    """At the second level, heads that interact with those of the first cost more."""
    matrix = torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    matrix[0, 1] = matrix[1, 0] = 2
    scores = scored([(4, 4)], matrix)
    order = STRATEGIES["swap"].run(Search(scores.layers, scores), [3, 2])
    assert order.plan(3).drop == {"l0": [0]}
    assert order.plan(2).drop == {"l0": [0, 2]}
    state_ = State(Search(scores.layers, scores))
    assert _least([], torch.zeros(1, 1), state_, 4) == []


def test_swap_needs_a_matrix() -> None:
    scores = scores_of([(4, 4)], [1, 2, 3, 4])
    for given_ in (scores, None):
        with pytest.raises(hp.HeadPruneError, match="do not weigh pairs") as error:
            STRATEGIES["swap"].run(Search(scores.layers, given_), [2])
        assert "fisher" in str(error.value.hint)


def test_swap_on_a_real_matrix_leaves_the_model_alone() -> None:
    model, batches = small()
    before = state(model)
    scores = hp.score(model, batches, "fisher")
    plan = hp.plan(scores, 3, "swap")
    assert plan.kept == 3
    assert same(model, before)
