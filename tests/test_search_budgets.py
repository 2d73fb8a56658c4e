"""`headprune.search` with budgets of other kinds than a number of heads."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import headprune as hp
from headprune import latency
from headprune.budgets import budget_of
from tests.support.problems import small
from tests.support.zoo import labelled, llama, text

Problem = tuple[nn.Module, list[Any], list[Any]]


def problem(model: nn.Module) -> Problem:
    """A model, batches to fit to, and batches to choose by."""
    batches = [labelled(model, text(4, 7, seed=s), seed=s) for s in range(5)]
    return model, batches[:3], batches[3:]


@pytest.fixture
def encoder() -> Problem:
    return problem(small(4, 2)[0])


@pytest.fixture
def decoder() -> Problem:
    """Its heads share key/value heads."""
    return problem(llama()[0].double())


@pytest.fixture
def counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts parameters."""
    monkeypatch.setattr(latency, "timer", lambda model, example: lambda: latency.parameters(model) / 1000)
    monkeypatch.setattr(latency, "MIN_SECONDS", 0.0)


def test_counted_budgets_hold_on_the_pruned_model(decoder: Problem) -> None:
    """In one search with a number of heads, and nested with it."""
    model, batches, choose = decoder
    example = {key: value for key, value in batches[0].items() if key != "labels"}

    def counts(model: nn.Module) -> tuple[float, ...]:
        cache = latency.cache_bytes(model, example)
        assert cache is not None
        return latency.parameters(model), latency.flops(model, example), cache

    dense = counts(model)
    asked = ["params 97%", f"flops {0.97 * dense[1]:.0f}", "--target-kv-cache 50%"]
    plans = hp.search(model, batches, keep=6, choose=choose, budgets=asked, repair=False)
    assert [plan.budget for plan in plans] == ["keep 6", *asked[:2], "kv-cache 50%"]
    assert plans[0].kept <= 6
    for fewer, more in itertools.pairwise(sorted(plans, key=lambda plan: plan.kept)):
        assert all(set(heads) <= set(fewer.drop[name]) for name, heads in more.drop.items())
    for i, share in enumerate((0.97, 0.97, 0.5)):
        pruned = copy.deepcopy(model)
        hp.prune(pruned, plans[i + 1], example)
        assert counts(pruned)[i] <= share * dense[i]


@pytest.mark.usefixtures("counting_clock")
def test_a_budget_of_time_holds_for_the_repaired_model(encoder: Problem) -> None:
    model, batches, choose = encoder
    (plan,) = hp.search(model, batches, choose=choose, budgets=budget_of("latency 95%"), strategy="compensated")
    dense = latency.parameters(model)
    hp.repair(model, plan, batches)
    hp.prune(model, plan)
    assert latency.parameters(model) <= 0.95 * dense


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_budget_of_lost_accuracy(name: str, request: pytest.FixtureRequest) -> None:
    """It holds for the lower end of the 95 % interval that `compare` gives on the examples that choose."""
    model, batches, choose = request.getfixturevalue(name)
    (plan,) = hp.search(model, batches, choose=choose, budgets="max-drop 0.9", strategy="compensated", repair=False)
    assert plan.budget == "drop 0.9"
    assert plan.kept < plan.total
    dense = hp.evaluate(model, choose)
    hp.prune(model, plan)
    change = hp.compare(dense, hp.evaluate(model, choose))
    assert change.metric == "accuracy"
    assert change.low >= -0.9


@pytest.mark.parametrize(("given", "says"), [
    ({"budgets": "weight 80%"}, "no budget 'weight'"),
    ({"budgets": ["flops"]}, "--target-flops  is no budget"),
    ({"budgets": []}, "keep= names no number of heads, and budgets= nothing else"),
    ({"budgets": "flops 100%"}, "is met by the dense model, so"),
    ({"budgets": "params 1G"}, "is met by the dense model \\("),
    ({"budgets": "kv-cache 50%"}, "has no key/value cache"),
    ({"budgets": "keep 99"}, "more than all 8 heads"),
    ({"budgets": "params 1%", "strategy": "compensated"}, "is out of reach"),
    ({"budgets": "drop 0.1", "loss_fn": F.cross_entropy}, "needs an accuracy or a perplexity"),
])  # fmt: skip
def test_mistakes(given: dict[str, Any], says: str, encoder: Problem) -> None:
    model, batches, choose = encoder
    with pytest.raises(hp.HeadPruneError, match=says) as told:
        hp.search(model, batches, choose=choose, **given)
    assert told.value.hint


def test_lost_accuracy_needs_other_examples(encoder: Problem) -> None:
    model, batches, _ = encoder
    with pytest.raises(hp.HeadPruneError, match="measured on other examples"):
        hp.search(model, batches[:1], budgets="drop 0.1")
