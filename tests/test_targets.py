"""Which orders are made, used and drawn; what scores aim at, and what is timed."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headprune.app.data import DataOptions
from headprune.app.workflow import scoring, timing
from headprune.app.workflow.results import most_frequent
from headprune.app.workflow.scene import Options, open_scene
from headprune.app.workflow.targets import Goal, shown, trade_off, trials_of
from headprune.budgets import BUDGETS, Fit, budget_of
from headprune.divergence import Fidelity
from headprune.errors import HeadPruneError
from headprune.gates import mask
from headprune.planning import Order
from headprune.planning.effort import EFFORTS, Effort
from headprune.plans import PruningPlan
from headprune.scoring import Settings
from headprune.searching import Request, fits_of, levels_of, merit_of, orders_of
from headprune.trials import Trials
from tests.support.commands import Silent


class Judge:
    """Stands in for trials: merits by strategy and heads kept."""

    def __init__(self, merits: dict[tuple[str, int], float]) -> None:
        self.merits = merits

    def merit(self, plan: PruningPlan) -> float:
        return self.merits[plan.strategy, plan.kept]


def order(strategy: str, method: str = "", steps: int = 4) -> Order:
    return Order({"a": 6}, [{"a": [i]} for i in range(steps)], strategy, method)


def fit(made: Order, keep: int, kind: str = "keep") -> Fit:
    return Fit(made.plan(keep), BUDGETS[kind].parse(str(keep)))


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
    assert merit_of([fit(made, 3, "drop")], judge) > merit_of([fit(made, 4, "drop")], judge)
    assert merit_of([fit(made, 3)], judge) < merit_of([fit(made, 4)], judge)
    assert merit_of([fit(made, 3), fit(made, 4)], judge)[1] == pytest.approx(1.5)


def test_an_order_whose_answers_are_no_numbers_is_the_last() -> None:
    """It was used if it came first: nothing is above NaN."""
    broken, right = order("re-scored"), order("compensated")
    judge: Any = Judge({("re-scored", 3): math.nan, ("compensated", 3): -9.0})
    merits = [merit_of([fit(made, 3)], judge) for made in (broken, right)]
    assert max(merits) == merits[1] == (0, -9.0)


def never(budget: Any) -> Any:
    """Numbers of heads need nothing to be measured on."""


def planned(model: Path, data: Path, **goal: Any) -> tuple[dict[str, Order], Trials, list[str]]:
    console = Silent()
    scene = open_scene(Options(str(model), DataOptions(str(data), limit=24, batch_size=8)), console)
    trials = trials_of(scene, Goal())
    wanted = Goal(budgets=(budget_of("keep 2"),), **goal)
    return orders_of(wanted.request(scene), [], trials, console), trials, console.said


def test_a_slow_machine_plans_alike(bert_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, trials, said = planned(bert_folder, data_folder)
    clock = iter(range(0, 10**9, 3600))
    for name in ("monotonic", "time", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: float(next(clock)))
    slowed, *_ = planned(bert_folder, data_folder)
    assert list(usual) == ["compensated", "re-scored"]
    assert slowed == usual
    (line,) = [text for text in said if "Planning will take" in text]
    assert "forward passes over 24 examples" in line
    assert trials.work["re-scored"]["passes"] > trials.work["compensated"]["passes"] > 0
    assert trials.work["re-scored"]["flops"] > 0


def test_what_the_orders_were_compared_by_is_kept(bert_folder: Path, data_folder: Path) -> None:
    """The divergence of each order's plans, computed anew; the least of them is used."""
    orders, trials, _ = planned(bert_folder, data_folder)
    fits = fits_of(Request((budget_of("keep 4"), budget_of("keep 2"))), orders, trials, Silent(), never)
    assert [made["order"] for made in trials.compared] == ["compensated", "re-scored"]
    logs = []
    for made in trials.compared:
        plans = [orders[made["order"]].plan(keep) for keep in (4, 2)]
        logs.append(0.0)
        for plan, told in zip(plans, made["plans"], strict=True):
            assert (told["budget"], told["kept"]) == (f"keep {plan.kept}", plan.kept)
            near = Fidelity(trials.model, trials.choose)
            with trials.repaired(plan.drop), mask(trials.model, plan.drop, layers=trials.layers):
                assert told["divergence"] == pytest.approx(near.divergence(), rel=1e-5)
            logs[-1] += math.log(told["divergence"])
    best = trials.compared[0 if logs[0] <= logs[1] else 1]
    assert best["used"]
    assert best["order"] == fits[0].plan.strategy
    assert [made["used"] for made in trials.compared].count(True) == 1


def test_an_order_that_would_be_too_much_work_is_left_out(
    bert_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is said, and kept for the report; who asks for it gets it."""
    monkeypatch.setitem(EFFORTS, "low", Effort("low", 16, 1.0))
    orders, trials, said = planned(bert_folder, data_folder, effort="low")
    assert list(orders) == ["compensated"]
    assert any("Not tried: re-scored" in text for text in said)
    assert "left_out" in trials.work["re-scored"]
    assert "left_out" not in trials.work["compensated"]
    orders, trials, said = planned(bert_folder, data_folder, effort="low", strategy="re-scored")
    assert list(orders) == ["re-scored"]
    assert not any("Not tried" in text for text in said)
    with pytest.raises(HeadPruneError, match="no effort 'huge'"):
        planned(bert_folder, data_folder, effort="huge")


def test_the_control_is_drawn_where_it_was_asked_for_and_at_the_end() -> None:
    @contextmanager
    def track(text: str) -> Any:
        yield lambda *args: None

    made = Order({"a": 80}, [{"a": [i]} for i in range(79)], "re-scored")

    def point(name: str, plan: PruningPlan) -> dict[str, Any]:
        return {
            "method": name,
            "asked": plan.asked,
            "kept": plan.kept,
            "value": 0.5,
            "low": 0.4,
            "high": 0.6,
            "loss": 1.0,
        }

    trials: Any = SimpleNamespace(point=point)
    console: Any = SimpleNamespace(track=track)
    fits = [fit(made, 40), fit(made, 30)]
    curve = trade_off({"re-scored": made}, [made, made], fits, trials, console)
    levels = levels_of(80, [40, 30])
    assert levels == [20, 30, 40, 60]
    assert (curve[0].method, curve[0].asked) == ("dense", 80)
    assert [p.asked for p in curve if p.method == "re-scored"] == levels[::-1]
    assert [p.asked for p in curve if p.method == "random"] == [40, 40, 30, 30, 20, 20]

    other = replace(made, strategy="one-shot", method="gradient")
    curve = trade_off({"re-scored": made, "gradient": other}, [made], fits, trials, console)
    assert [p.asked for p in curve if p.method == "re-scored"] == levels[::-1]
    assert [p.asked for p in curve if p.method == "gradient"] == [40, 30, 20]

    # A plan of the user's may keep another number than its file says that it was made for.
    own = Fit(PruningPlan({"a": [0, 1]}, 78, 80, 79))
    curve = trade_off({}, [made], [own], trials, console)
    assert [(p.method, p.asked) for p in curve] == [("dense", 80), ("plan", 78), ("random", 78)]


# -- what is timed, and what scores aim at ---------------------------------------------------------


@pytest.mark.parametrize(("typical", "lengths"), [(40, [40, 126]), (20, [20, 80]), (126, [126]), (128, [128])])
def test_the_longer_input_is_longer(typical: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that fill the model were timed at all its positions, and again at two fewer, as if that were four times as long."""
    monkeypatch.setattr(timing.latency, "example_shape", lambda example: (1, typical))
    scene: Any = SimpleNamespace(
        options=SimpleNamespace(data=SimpleNamespace(batch_size=8)),
        loaded=SimpleNamespace(task=SimpleNamespace(modality="text", name="text-classification")),
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=128)),
        typical_input=dict,
    )
    assert timing._shapes(scene) == [(size, length) for length in lengths for size in (1, 8)]


def test_heads_to_keep_are_counted_among_those_that_are_scored() -> None:
    """As budgets count them: half of all heads, of which only some can be masked, was more than half of these."""
    layers = [SimpleNamespace(num_heads=4), SimpleNamespace(num_heads=12)]
    options = SimpleNamespace(keep="50%", scoring=Settings(steps=3))
    scene: Any = SimpleNamespace(options=options, layers=layers, maskable=layers[:1])
    assert scoring.settings_of(scene) == Settings(keep=2, steps=3)


@pytest.mark.parametrize(("labels", "level"), [
    ([{"labels": 0}, {"labels": 1}, {"labels": 1}], 2 / 3),
    ([{"labels": [0, -100, 0]}, {"labels": [1, -100]}], 2 / 3),
    ([{"labels": [1.0, 0.0]}, {"labels": [0.0, 0.0]}, {"labels": [1.0, 0.0]}], 5 / 6),
    ([{"start_positions": 3, "end_positions": 4}, {"start_positions": 3, "end_positions": 5}], 3 / 4),
    ([{"labels": [0.5, 0.0]}], None), ([{"labels": 1.5}], None), ([], None),
])  # fmt: skip
def test_what_a_model_that_knows_nothing_gets_right(labels: list[dict[str, Any]], level: float | None) -> None:
    """Without it, a model that gives every text the most frequent labels was recommended with fewer heads."""
    assert most_frequent(labels) == (None if level is None else pytest.approx(level))
