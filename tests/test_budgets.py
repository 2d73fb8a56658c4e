"""Budgets: never exceeded, met with as many heads as can be, and refused with the nearest that can be met."""

import copy
import math
from dataclasses import asdict
from decimal import Decimal

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import headprune as hp
from headprune import latency
from headprune.app.documents import Asked
from headprune.attention import AttentionLayer
from headprune.budgets import BUDGETS, Fit, Reading, budget_of
from headprune.budgets.drop import Drop
from headprune.budgets.kv_cache import kv_cache_bytes
from headprune.budgets.latency import Latency
from headprune.budgets.limit import Cost, Limit
from headprune.budgets.subject import Subject
from headprune.documents import from_json, to_json
from headprune.evaluation import Change
from headprune.planning import Constraints, Order, Search, arrange
from headprune.plans import PruningPlan
from headprune.trace import find_attention
from tests.support.zoo import ZOO, bert, labelled, llama

LAYER = AttentionLayer("a", 0, "encoder", 60, 60, 8)


def order_of(sizes: list[int]) -> Order:
    """An order whose steps drop so many heads each."""
    steps, start = [], 0
    for size in sizes:
        steps.append({"a": list(range(start, start + size))})
        start += size
    return Order({"a": max(start, 1)}, tuple(steps), "one-shot")


def parsed(kind: str, text: str) -> Limit:
    """A budget of what a pruned model costs."""
    found = BUDGETS[kind].parse(text)
    assert isinstance(found, Limit)
    return found


def exactly(costs: dict[int, float]) -> Cost:
    """The cost of a plan by heads kept."""

    def cost(plan: PruningPlan) -> Reading:
        return Reading.exact(costs[plan.kept])

    return Cost(cost, cost)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.data())
def test_the_fit_is_the_best_of_all_prefixes(sizes: list[int], data: st.DataObject) -> None:
    order = order_of(sizes)
    kept = order.kept()
    falling = sorted(data.draw(st.lists(st.integers(1, 50), min_size=len(kept), max_size=len(kept))), reverse=True)
    costs = dict(zip(kept, falling, strict=True))
    amount = data.draw(st.integers(1, 50))
    budget = parsed("params", str(amount))
    holding = [k for k in kept if costs[k] <= amount]
    if holding:
        found = budget.most_heads(order, exactly(costs))
        assert found.plan.kept == max(holding)
        assert found.plan.budget == f"params {amount}"
        assert found.reading == Reading.exact(costs[found.plan.kept])
    else:
        with pytest.raises(hp.HeadPruneError, match="out of reach") as refused:
            budget.most_heads(order, exactly(costs))
        # What the hint says can be met, can be.
        nearest = parsed("params", refused.value.hint.split("--target-params ")[1].rstrip("."))
        assert nearest.most_heads(order, exactly(costs)).plan.kept in kept


@given(st.integers(0, 2**32), st.floats(0.05, 1.2), st.integers(1, 60))
def test_a_noisy_budget_holds_when_measured_again(seed: int, amount: float, heads: int) -> None:
    """The plan's last measurement, made after it was chosen, never exceeds the budget; its upper end neither."""
    draw = torch.Generator().manual_seed(seed)

    def cost(plan: PruningPlan) -> Reading:
        value = plan.kept / heads + 0.2 * torch.rand(1, generator=draw).item()
        return Reading(value, value - 0.02, value + 0.02)

    budget = Latency(f"{100 * amount}%", amount, True)
    try:
        found = budget.most_heads(order_of([1] * heads), Cost(cost, cost))
    except hp.HeadPruneError:
        assert cost(PruningPlan({}, 0)).high > amount - 0.2  # even with no head left, it may be out of reach
        return
    assert found.reading is not None
    assert found.reading.high <= amount


def noisy_drop(losses: list[float]) -> dict[int, Change]:
    """A change of accuracy by heads gone: a point estimate, and an interval around it."""
    return {i: Change("accuracy", -v + 0.01, -v, -v + 0.02, math.nan, "") for i, v in enumerate([-0.0, *losses])}


def drop_fit(losses: list[float], amount: float) -> tuple[Fit, list[int]]:
    order, changes, looked = order_of([1] * len(losses)), noisy_drop(losses), []

    def change_at(plan: PruningPlan) -> Change:
        looked.append(plan.total - plan.kept)
        return changes[looked[-1]]

    return Drop(str(amount), amount).fewest_heads(order, change_at), looked


@settings(max_examples=300)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_drop_never_keeps_more(losses: list[float], one: float, other: float) -> None:
    """However noisy the curve is; and the budget holds at every plan that was looked at on the way."""
    kept = []
    for amount in sorted((one, other)):
        try:
            found, looked = drop_fit(losses, amount)
        except hp.HeadPruneError as refused:
            kept.append(len(losses))
            if "--max-drop" in refused.hint:
                drop_fit(losses, float(refused.hint.split("--max-drop ")[1].split(";")[0]))  # what it says can be met
            continue
        gone = found.plan.total - found.plan.kept
        assert all(losses[n - 1] <= amount for n in looked if n <= gone)
        assert gone in looked
        assert found.plan.kept == 0 or any(losses[n - 1] > amount for n in looked if n == gone + 1)
        kept.append(found.plan.kept)
    assert kept[0] >= kept[1]


def test_perplexity_may_rise_by_a_share() -> None:
    changes = [Change("perplexity", v, v - 0.01, v + 0.01, math.nan, "") for v in (0.0, 0.02, 0.05, 0.2)]
    order = order_of([1, 1, 1])
    found = Drop("10%", 0.1).fewest_heads(order, lambda plan: changes[plan.total - plan.kept])
    assert found.plan.kept == 1
    assert found.reading == Reading(0.05, pytest.approx(0.04), pytest.approx(0.06))


@pytest.mark.parametrize(("kind", "text", "amount", "relative"), [
    ("latency", "12.5", 12.5, False), ("latency", "12.5ms", 12.5, False), ("latency", "0.1 s", 100, False),
    ("latency", "80%", 0.8, True), ("flops", "1.2G", 1.2e9, False), ("params", "60M", 6e7, False),
    ("kv-cache", "20K", 20480, False), ("kv-cache", "50 %", 0.5, True), ("drop", "0.01", 0.01, False),
    ("drop", "1%", 0.01, False), ("drop", "0", 0, False),
])  # fmt: skip
def test_budgets_are_read(kind: str, text: str, amount: float, relative: bool) -> None:
    budget = budget_of(f"{kind} {text}")
    assert budget == BUDGETS[kind].parse(text)
    assert (budget.amount, budget.relative) == (pytest.approx(amount), relative)
    assert str(budget) == f"{kind} {text}"


@pytest.mark.parametrize(("kind", "text"), [
    ("latency", "soon"), ("latency", "0"), ("latency", "-3"), ("flops", "1.2X"), ("params", "nan"), ("kv-cache", ""),
    ("params", "1..2"), ("drop", "little"), ("drop", "-0.01"), ("latency", "1e999"),
])  # fmt: skip
def test_what_is_no_budget(kind: str, text: str) -> None:
    with pytest.raises(hp.HeadPruneError, match=f"{BUDGETS[kind].flag} .* is no budget"):
        BUDGETS[kind].parse(text)


@pytest.mark.parametrize(("text", "amount", "shown"), [
    ("latency 80%", 0.8, "80 %"), ("latency 5ms", 1.23456, "1.235 ms"), ("flops 2M", 1e6, "1,000,000 FLOPs"), ("drop 1%", 0.01, "0.0100"),
])  # fmt: skip
def test_amounts_are_shown_in_a_budgets_terms(text: str, amount: float, shown: str) -> None:
    assert budget_of(text).show(amount) == shown


def test_budgets_of_two_kinds_differ() -> None:
    """In their fields too: a run that goes on is known by them."""
    one, other = budget_of("params 80%"), budget_of("target-flops 80%")
    assert one != other
    assert asdict(one) != asdict(other)
    with pytest.raises(hp.HeadPruneError, match=r"no budget 'weight'. Choose from keep, latency, flops"):
        budget_of("weight 80%")


@given(st.sampled_from([kind for kind in BUDGETS if kind != "keep"]), st.floats(1e-6, 1e12), st.booleans())
def test_the_nearest_budget_that_is_named_can_be_met(kind: str, amount: float, relative: bool) -> None:
    """A hint that is typed as it stands holds what was measured, and asks for at most a hundredth more."""
    asked = BUDGETS[kind].parse("80%" if relative else "1")
    hinted = budget_of(asked.at_least(amount))
    assert amount <= hinted.amount <= amount * 1.01
    assert hinted.relative == asked.relative


@example("keep", Decimal("1.000"), " ", "")
@given(
    st.sampled_from(sorted(BUDGETS)), st.decimals(1, 10**6, places=3), st.sampled_from(["", " "]), st.sampled_from(["%", "k", "m", "s", ""])
)  # fmt: skip
def test_any_budget_is_read_back_from_its_text(kind: str, number: Decimal, gap: str, suffix: str) -> None:
    """As plans, documents and reports hold it."""
    try:
        budget = BUDGETS[kind].parse(f"{number}{gap}{suffix}")
    except hp.HeadPruneError:
        assume(False)
    assert budget_of(str(budget)) == budget
    document = Asked.of(budget, Reading.exact(1.0))
    assert from_json(Asked, to_json(document)).parsed == budget or kind == "keep"  # whose amount is NaN


@pytest.mark.parametrize("kind", ["params", "flops"])
@pytest.mark.parametrize("text", ["97%", "absolute"])
def test_counted_budgets_on_a_model(kind: str, text: str) -> None:
    model, example = bert()
    layers = find_attention(model, example)
    scores = hp.score(model, [labelled(model, example)], "gradient", layers=layers)
    count = {"params": latency.parameters, "flops": lambda m: latency.flops(m, example)}[kind]
    dense = count(model)
    budget = parsed(kind, text if text != "absolute" else str(round(0.97 * dense)))
    order = arrange(Search(scores.layers, scores), "one-shot", [])
    found = budget.fit(order, Subject(model, layers, example, example))
    costs = []
    for plan in order.plans():
        pruned = copy.deepcopy(model)
        hp.prune(pruned, plan.drop, example, layers=layers)
        costs.append((plan.kept, count(pruned)))
    assert found.plan.kept == max(kept for kept, cost in costs if cost <= 0.97 * dense)
    assert count(model) == dense
    assert len(find_attention(model, example)) == 3
    with pytest.raises(hp.HeadPruneError, match=r"0 of 12.*nearest that can be met"):
        parsed(kind, "1%").fit(order, Subject(model, layers, example, example))


def test_latency_on_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts parameters: the search times dense against pruned, and ends with a fresh measurement."""
    timed: list[int] = []

    def arm(model: torch.nn.Module, example: object) -> object:
        timed.append(latency.parameters(model))
        return lambda: latency.parameters(model) / 1e3

    monkeypatch.setattr(latency, "timer", arm)
    monkeypatch.setattr(latency, "MIN_SECONDS", 0.0)
    model, example = bert()
    layers = find_attention(model, example)
    scores = hp.score(model, [labelled(model, example)], "gradient", layers=layers)
    order = arrange(Search(scores.layers, scores), "one-shot", [])
    for text in ("95%", f"{0.95 * latency.parameters(model) / 1e3:.3f}"):
        budget = parsed("latency", text)
        found = budget.fit(order, Subject(model, layers, example, example))
        assert found.reading is not None
        assert found.reading.high <= budget.amount
        pruned = copy.deepcopy(model)
        hp.prune(pruned, found.plan.drop, example, layers=layers)
        assert timed[-2:] == [latency.parameters(model), latency.parameters(pruned)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "t5"])
def test_cache_bytes_are_those_of_a_real_cache(name: str) -> None:
    model, example = ZOO[name]()
    layers = find_attention(model, example)
    decoders = [layer for layer in layers if layer.kind == "decoder"]
    drops = [
        {},
        {decoders[0].name: list(decoders[0].units[0])},
        {decoders[0].name: [unit[0] for unit in decoders[0].units[:1]]} if not decoders[0].groups else {},
        {layer.name: list(layer.units[-1]) for layer in decoders},
        {decoders[1].name: list(range(decoders[1].num_heads))},
    ]
    for drop in drops:
        pruned = copy.deepcopy(model)
        if drop:
            hp.prune(pruned, drop, example, layers=layers)
        assert kv_cache_bytes(layers, drop, 4) == latency.cache_bytes(pruned, example)


def test_a_slice_of_every_group_leaves_the_cache() -> None:
    model, example = llama()
    layers = find_attention(model, example)
    drop = {layers[0].name: [unit[0] for unit in layers[0].units]}
    pruned = copy.deepcopy(model)
    hp.prune(pruned, drop, example, layers=layers)
    assert kv_cache_bytes(layers, drop, 4) == kv_cache_bytes(layers, {}, 4) == latency.cache_bytes(pruned, example)


def test_a_cache_budget_on_a_model() -> None:
    model, example = llama()
    layers = find_attention(model, example)
    scores = hp.score(model, [labelled(model, example)], "gradient", layers=layers)
    order = arrange(Search(scores.layers, scores), "one-shot", [], kinds=["groups"])
    subject = Subject(model, layers, example, example)
    budget = parsed("kv-cache", "60%")
    found = budget.fit(order, subject)
    assert found.reading is not None
    assert 0.5 < found.reading.value <= 0.6
    encoder, words = bert()
    subject = Subject(encoder, find_attention(encoder, words), words, words)
    with pytest.raises(hp.HeadPruneError, match="no key/value cache"):
        budget.cost(subject)


def test_constraints_are_named_where_a_budget_fails() -> None:
    model, example = bert()
    layers = find_attention(model, example)
    scores = hp.score(model, [labelled(model, example)], "gradient", layers=layers)
    search = Search(scores.layers, scores, Constraints.parse("L0,L2.H1", layers, 1))
    order = arrange(search, "one-shot", [])
    budget = parsed("params", "50%")
    with pytest.raises(hp.HeadPruneError, match=r"protected: L0, L2\.H1; at least 1 in every layer.*6 of 12"):
        budget.fit(order, Subject(model, layers, example, example))
