"""Which orders are made, used and drawn."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headprune.planning import Order
from headprune.planning.budgets import Budget, Fit
from headprune.plans import PruningPlan
from headprune.workflow import targets
from headprune.workflow.targets import Goal, _levels, _merit, orders_of, shown, trade_off


class Judge:
    """Stands in for trials: merits by strategy and heads kept."""

    def __init__(self, merits: dict[tuple[str, int], float]) -> None:
        self.merits = merits

    def merit(self, plan: PruningPlan) -> float:
        return self.merits[plan.strategy, plan.kept]


def order(strategy: str, method: str = "", steps: int = 4) -> Order:
    return Order({"a": 6}, [{"a": [i]} for i in range(steps)], strategy, method)


def fit(made: Order, keep: int, kind: str = "keep") -> Fit:
    return Fit(made.plan(keep), Budget(kind, str(keep)))


def test_of_its_own_orders_auto_draws_the_best() -> None:
    orders = {
        "re-scored": order("re-scored"),
        "compensated": order("compensated"),
        "gradient": order("one-shot", "gradient"),
    }
    fits = [fit(orders["gradient"], 4), fit(orders["gradient"], 3)]
    merits = {("re-scored", 4): 1.0, ("re-scored", 3): 5.0, ("compensated", 4): 3.0, ("compensated", 3): 2.0}
    judge: Any = Judge(merits)
    assert list(shown(Goal(), orders, fits, judge)) == ["re-scored", "gradient"]
    assert list(shown(Goal(), orders, fits[:1], judge)) == ["compensated", "gradient"]
    assert shown(Goal(strategy="one-shot"), orders, fits, judge) == orders
    short = {**orders, "re-scored": order("re-scored", steps=2)}  # does not reach 3
    assert list(shown(Goal(), short, fits, judge)) == ["compensated", "gradient"]


def test_the_order_that_is_used_is_drawn() -> None:
    """Where accuracy is the budget, an order that keeps fewer heads is used, though another is better at that number."""
    orders = {"re-scored": order("re-scored"), "compensated": order("compensated")}
    judge: Any = Judge({("re-scored", 3): 1.0, ("compensated", 3): 2.0})
    assert list(shown(Goal(), orders, [fit(orders["re-scored"], 3, "drop")], judge)) == ["re-scored"]


def test_fewer_heads_are_wanted_where_accuracy_is_the_budget() -> None:
    made = order("re-scored")
    judge: Any = Judge({("re-scored", 4): 1.0, ("re-scored", 3): 0.5})
    assert _merit([fit(made, 3, "drop")], judge) > _merit([fit(made, 4, "drop")], judge)
    assert _merit([fit(made, 3)], judge) < _merit([fit(made, 4)], judge)
    assert _merit([fit(made, 3), fit(made, 4)], judge)[1] == pytest.approx(1.5)


def test_an_order_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said; who asks for it gets it."""

    @contextmanager
    def track(text: str) -> Any:
        yield lambda *args: None

    clock = iter(range(0, 10**6, 700))  # every order takes 700 s, so that a look may take 233 s or more
    monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(targets, "arrange", lambda search, name, *args: order(name))
    scene: Any = SimpleNamespace(
        maskable=[SimpleNamespace(num_heads=100, name="a")], model=None,
        parts=SimpleNamespace(score=SimpleNamespace(batches=list)), options=SimpleNamespace(seed=0),
    )  # fmt: skip
    judge: Any = Judge({})
    judge.refit = None
    said: list[str] = []
    console: Any = SimpleNamespace(track=track, say=said.append)

    def made(keep: str, strategy: str = "auto") -> list[str]:
        return list(orders_of(scene, Goal(budgets=(Budget("keep", keep),), strategy=strategy), [], judge, console))

    assert made("80") == ["compensated", "re-scored"]
    assert not said
    assert made("10") == ["compensated"]
    assert "re-scored, which would take" in said[0]
    assert made("10", "re-scored") == ["re-scored"]


def test_the_control_is_drawn_where_it_was_asked_for_and_at_the_end() -> None:
    @contextmanager
    def track(text: str) -> Any:
        yield lambda *args: None

    made = Order({"a": 80}, [{"a": [i]} for i in range(79)], "re-scored")
    trials: Any = SimpleNamespace(point=lambda name, plan: (name, plan.asked))
    console: Any = SimpleNamespace(track=track)
    fits = [fit(made, 40), fit(made, 30)]
    curve: Any = trade_off({"re-scored": made}, [made, made], fits, trials, console)
    levels = _levels(80, [40, 30])
    assert levels == [20, 30, 40, 50, 60, 70]
    assert curve[0] == ("dense", 80)
    assert [keep for name, keep in curve if name == "re-scored"] == levels[::-1]
    assert [keep for name, keep in curve if name == "random"] == [40, 40, 30, 30, 20, 20]

    # A plan of the user's may keep another number than its file says that it was made for.
    own = Fit(PruningPlan({"a": [0, 1]}, 78, 80, 79))
    curve = trade_off({}, [made], [own], trials, console)
    assert curve == [("dense", 80), ("plan", 78), ("random", 78)]
