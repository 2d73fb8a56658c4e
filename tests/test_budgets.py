"""Budgets on curves made up: never exceeded, met with as many heads as can be, and refused with the nearest that can be met."""

import math
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import headprune as hp
from headprune.budgets import BUDGETS, Fit, Reading, budget_of
from headprune.errors import UndefinedError
from headprune.planning import Order


def order_of(sizes: list[int]) -> Order:
    """An order whose steps drop so many heads each."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    steps = [{"a": list(range(end - size, end))} for end, size in zip(ends, sizes, strict=True)]
    return Order({"a": ends[-1]}, tuple(steps), "one-shot")


def fit(text: str, order: Order, cost: Callable[[hp.PruningPlan], Reading]) -> Fit:
    budget: Any = budget_of(text)
    with mock.patch.object(type(budget), "cost", return_value=lambda plan, measured: cost(plan)):
        return budget.fit(order, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(1, 50), st.data())
def test_the_fit_is_the_best_of_all_prefixes(sizes: list[int], amount: int, data: st.DataObject) -> None:
    order = order_of(sizes)
    kept = order.kept()
    falling = sorted(data.draw(st.lists(st.integers(1, 50), min_size=len(kept), max_size=len(kept))), reverse=True)
    costs = dict(zip(kept, falling, strict=True))

    def cost(plan: hp.PruningPlan) -> Reading:
        return Reading.exact(costs[plan.kept])

    if holding := [k for k in kept if costs[k] <= amount]:
        found = fit(f"params {amount}", order, cost)
        assert (found.plan.kept, found.plan.budget) == (max(holding), f"params {amount}")
        assert found.reading == Reading.exact(costs[found.plan.kept])
        return
    with pytest.raises(hp.HeadPruneError, match="out of reach") as refused:
        fit(f"params {amount}", order, cost)
    nearest = refused.value.hint.split("met is ")[1].rstrip(".")
    assert fit(nearest, order, cost).plan.kept in kept


def test_no_loss_has_no_sign() -> None:
    """It was "-0.0000"."""
    order, changes = order_of([1, 1]), [hp.Change("accuracy", 0.0, -0.2, 0.2, 1.0, "no measurable change")] * 2
    subject: Any = SimpleNamespace(change=lambda plan: changes[plan.kept])
    with pytest.raises(hp.HeadPruneError, match=r"the loss is 0\.0000, and with 95 % confidence no more than 0\.2000"):
        budget_of("drop 1%").fit(order, subject)


@given(st.integers(0, 2**32), st.floats(0.05, 1.2), st.integers(1, 60))
def test_a_noisy_budget_holds_when_measured_again(seed: int, amount: float, heads: int) -> None:
    """The plan's last measurement, made after it was chosen, never exceeds the budget; its upper end neither."""
    draw = torch.Generator().manual_seed(seed)

    def cost(plan: hp.PruningPlan) -> Reading:
        value = plan.kept / heads + 0.2 * torch.rand(1, generator=draw).item()
        return Reading(value, value - 0.02, value + 0.02)

    try:
        found = fit(f"latency {100 * amount}%", order_of([1] * heads), cost)
    except hp.HeadPruneError:
        assert cost(hp.PruningPlan({}, 0)).high > amount - 0.2  # even with no head left, it may be out of reach
        return
    assert found.reading is not None
    assert found.reading.high <= amount


def fewest(losses: list[float], amount: float, metric: str = "accuracy") -> tuple[Fit, list[int]]:
    """By losses after each step, an interval around each; and the steps that were looked at."""
    looked: list[int] = []
    sign = -1 if metric == "accuracy" else 1

    def change(plan: hp.PruningPlan) -> hp.Change:
        looked.append(plan.total - plan.kept)
        loss = [0.0, *losses][looked[-1]]
        return hp.Change(metric, sign * loss - 0.01 * sign, *sorted((sign * loss, sign * (loss - 0.02))), math.nan, "")

    budget: Any = budget_of(f"drop {Decimal(amount):f}")
    return budget.fit(order_of([1] * len(losses)), SimpleNamespace(change=change)), looked


@settings(max_examples=300)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_drop_never_keeps_more(losses: list[float], one: float, other: float) -> None:
    """However noisy the curve is; and the budget holds at every plan that was looked at on the way."""
    kept = []
    for amount in sorted((one, other)):
        try:
            found, looked = fewest(losses, amount)
        except hp.HeadPruneError as refused:
            kept.append(len(losses))
            if "--max-drop" in refused.hint:
                fewest(losses, float(refused.hint.split("--max-drop ")[1].split(";")[0]))  # what it says can be met
            continue
        gone = found.plan.total - found.plan.kept
        assert gone in looked
        assert all(losses[n - 1] <= amount for n in looked if n <= gone)
        assert found.plan.kept == 0 or any(losses[n - 1] > amount for n in looked if n == gone + 1)
        kept.append(found.plan.kept)
    assert kept[0] >= kept[1]


def test_a_plan_without_a_value_does_not_hold() -> None:
    """Answers that are all the same have no rank correlation: no plan with so few heads holds, and those with more still may."""
    found, looked = fewest([0.0, math.nan, 0.0], 0.1)
    assert found.plan.kept == 2
    assert 2 in looked

    def change(plan: hp.PruningPlan) -> hp.Change:
        if plan.kept < most:
            raise UndefinedError("spearman is not defined.")
        return hp.Change("accuracy", 0.0, 0.0, 0.0, 1.0, "")

    subject: Any = SimpleNamespace(change=change)
    for most in (0, 1, 2):
        assert budget_of("drop 1%").fit(order_of([1, 1, 1]), subject).plan.kept == most
    most = 3
    with pytest.raises(hp.HeadPruneError, match="spearman is not defined"):
        budget_of("drop 1%").fit(order_of([1, 1, 1]), subject)


def test_perplexity_may_rise_by_a_share() -> None:
    found, _ = fewest([0.03, 0.06, 0.21], 0.1, "perplexity")
    assert found.plan.kept == 1
    assert found.reading == Reading(pytest.approx(0.05), pytest.approx(0.04), pytest.approx(0.06))


@pytest.mark.parametrize(("text", "amount", "relative", "shown"), [
    ("latency 12.5", 12.5, False, "12.5 ms"), ("latency 1.23456ms", 1.23456, False, "1.235 ms"), ("latency 0.1 s", 100, False, "100 ms"),
    ("latency 80%", 0.8, True, "80 %"), ("flops 1.2G", 1.2e9, False, "1,200,000,000 FLOPs"), ("params 60M", 6e7, False, "60,000,000 parameters"),
    ("kv-cache 20K", 20480, False, "20,480 bytes per token"), ("kv-cache 50 %", 0.5, True, "50 %"), ("drop 0.01", 0.01, False, "0.0100"),
    ("drop 1%", 0.01, False, "0.0100"), ("drop 0", 0, False, "0.0000"),
])  # fmt: skip
def test_budgets_are_read(text: str, amount: float, relative: bool, shown: str) -> None:
    budget = budget_of(text)
    assert (budget.amount, budget.relative) == (pytest.approx(amount), relative)
    assert (str(budget), budget.show(budget.amount)) == (text, shown)


def test_budgets_of_two_kinds_differ() -> None:
    """In their fields too: a run that goes on is known by them."""
    assert asdict(budget_of("params 80%")) != asdict(budget_of("target-flops 80%"))


@given(st.sampled_from([kind for kind in BUDGETS if kind != "keep"]), st.floats(1e-6, 1e12), st.booleans())
def test_the_nearest_budget_that_is_named_can_be_met(kind: str, amount: float, relative: bool) -> None:
    """A hint that is typed as it stands holds what was measured, and asks for at most a hundredth more."""
    asked = BUDGETS[kind].parse("80%" if relative else "1")
    hinted = budget_of(asked.at_least(amount))
    assert amount <= hinted.amount <= amount * 1.01
    assert hinted.relative == asked.relative


@example("keep", Decimal("1.000"), " ", "")
@given(
    st.sampled_from(sorted(BUDGETS)),
    st.decimals(1, 10**6, places=3),
    st.sampled_from(["", " "]),
    st.sampled_from(["%", "k", "m", "s", ""]),
)
def test_any_budget_is_read_back_from_its_text(kind: str, number: Decimal, gap: str, suffix: str) -> None:
    """As plans, documents and reports hold it."""
    try:
        budget = BUDGETS[kind].parse(f"{number}{gap}{suffix}")
    except hp.HeadPruneError:
        assume(False)
    assert budget_of(str(budget)) == budget
