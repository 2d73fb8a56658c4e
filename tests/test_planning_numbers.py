"""What planning counts and says, by numbers that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import headprune as hp
from headprune import latency
from headprune.attention import Heads
from headprune.fingerprint import fingerprint
from headprune.inputs import inputs_of, tensors
from headprune.planning import STRATEGIES, Constraints, Order, Search, arrange, heads_to_keep
from headprune.planning.effects import _effects, _Removal
from headprune.planning.effort import EFFORTS, Effort, Work, flops_of_pass, spread
from headprune.planning.search import _sliced, stages, work_of
from headprune.planning.state import State
from headprune.planning.uniform import _kinds, _tied
from headprune.planning.units import SLICES, Unit, units_of, why_stay, within
from headprune.reference import calibrate
from tests.support.plans import scores_of
from tests.support.problems import small


def test_what_strategies_need() -> None:
    assert {name: (s.needs_scores, s.runs_model) for name, s in STRATEGIES.items()} == {
        "re-scored": (False, True), "compensated": (False, True), "auto": (False, True), "greedy": (False, True),
        "one-shot": (True, False), "per-layer": (True, False), "layers": (True, False), "uniform": (True, False), "swap": (True, False),
    }  # fmt: skip
    assert all(s.about and s.name == name for name, s in STRATEGIES.items())


def test_auto_is_no_order_of_its_own() -> None:
    with pytest.raises(hp.HeadPruneError, match="auto makes several orders"):
        STRATEGIES["auto"].run(Search(()), [])


# -- work ---------------------------------------------------------------------------------------


def test_efforts() -> None:
    assert [EFFORTS[n].limit for n in ("low", "normal", "high")] == ["50 TFLOPs", "500 TFLOPs", "any number of FLOPs"]
    assert Effort("x", None, 1.7e12).limit == "1.7 TFLOPs"
    assert [Effort("x", None, 5.0).allows(Work(1, flops, 1)) for flops in (4.0, 5.0, 6.0)] == [True, True, False]
    assert Effort("x", None, None).allows(Work(1, 1e30, 1))


def test_work_in_words() -> None:
    work = Work(12.345, 2.5e12, 1000)
    assert str(work) == "12 forward passes over 1,000 examples (2.5 TFLOPs)"
    assert work.to_json() == {"passes": 12.3, "flops": 2.5e12, "examples": 1000}


def test_batches_that_are_looked_at() -> None:
    assert spread(10, 100, 35) == [0, 3, 6]
    assert spread(10, 100, 100) == spread(10, 100, 101) == list(range(10))
    assert spread(10, 100, 0) == spread(10, 100, 19) == [0]
    assert spread(3, 30, 20) == [0, 1]


def test_a_pass_is_counted_on_the_batch_of_median_size() -> None:
    model, batches = small()  # of 4, 2 and 3 rows
    middle = sorted(batches, key=lambda b: sum(t.numel() for t in tensors(b)))[1]
    assert len(middle["input_ids"]) == 3
    assert flops_of_pass(model, batches) == pytest.approx(latency.flops(model, inputs_of(model, middle)) / 3 * 9)


@pytest.mark.parametrize("values", [False, True])
def test_work_is_counted_by_hand(values: bool) -> None:
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    calibration = calibrate(model, layers, batches, values=values)
    flops = flops_of_pass(model, batches)
    for strategy, levels, looks, tries in (
        ("compensated", [2], 1, 0), ("re-scored", [2], 4, 0), ("re-scored", [], 1, 0), ("greedy", [2], 4, 4), ("greedy", [4, 5], 2, 2),
        ("greedy", [], 1, 0),
    ):  # fmt: skip
        for examples, share in ((None, 1.0), (5, 4 / 9)):  # the first batch alone
            search = Search(layers, model=model, batches=batches, effort=Effort("some", examples, None))
            # Two passes forward and one backward, one more where values are refitted too; greedy tries six heads for each that goes.
            each = looks * (4 if values else 3) * share + 6 * tries
            for times in (1, 2):
                work = work_of(search, lambda: calibration, strategy, levels, times)
                assert work.passes == pytest.approx(calibration.cost + times * each)
                assert work.flops == pytest.approx(work.passes * flops)
                assert work.examples == 9
            assert work_of(search, lambda: calibration, strategy, levels).passes == pytest.approx(
                calibration.cost + each
            )
        assert work_of(search, lambda: calibration, "one-shot", levels) == Work(0.0, 0.0, 9)


def test_stages_go_by_sixths_and_at_least_by_one() -> None:
    assert stages(6, [2]) == [5, 4, 3, 2]
    assert stages(13, [1])[:3] == [11, 10, 9]
    assert stages(12, [10]) == [10]
    assert stages(24, [20, 20, 24, 30]) == [20]


@pytest.mark.parametrize("strategy", ["re-scored", "greedy"])
def test_progress_goes_from_one_to_all(strategy: str) -> None:
    model, batches = small()
    heard: list[tuple[Any, ...]] = []
    layers = hp.find_attention(model, batches[0])
    STRATEGIES[strategy].run(
        Search(layers, model=model, batches=batches[1:2], progress=lambda *a: heard.append(a)), [4]
    )
    assert heard == [(1, 2), (2, 2)]


# -- effects --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(4,), (4, 3), (12,), (4, 2, 3)])
def test_an_effect_is_summed_over_the_tokens_of_each_example(lead: tuple[int, ...]) -> None:
    """Also where tokens are flattened into rows: those of an example stand together."""
    generator = torch.Generator().manual_seed(1)
    x, slope, left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((*lead, 5), (*lead, 6), (4, 2, 3), (2, 3, 6))
    )
    kept, mean = torch.tensor([4, 0, 1, 3]), torch.arange(4.0, dtype=torch.float64)
    found = _effects(4, _Removal(kept, mean, left, right, [0, 1]), x, slope)
    for u in range(2):
        each = torch.einsum("...d,do,...o->...", x[..., kept] - mean, left[:, u] @ right[u], slope)
        torch.testing.assert_close(found[:, u], each.reshape(4, -1).sum(1))


def test_what_is_not_per_example_counts_for_all_alike() -> None:
    x, slope = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    removal = _Removal(torch.tensor([0, 1]), torch.zeros(2), torch.eye(2)[:, None], torch.eye(2)[None], [0])
    found = _effects(4, removal, x, slope)
    torch.testing.assert_close(
        found, torch.full((4, 1), float((x * slope).double().sum() / 4), dtype=torch.float64), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("given", "wanted"), [
    (torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("own", [torch.float64, torch.float32])
def test_effects_are_multiplied_in_the_inputs_type_and_no_less_than_float32(
    given: torch.dtype, wanted: torch.dtype, own: torch.dtype
) -> None:
    removal = _Removal(torch.tensor([0]), *(torch.ones(1, 1, 1, dtype=own) for _ in range(3)), [0])
    near = removal.near(torch.ones(1, dtype=given))
    assert {near.mean.dtype, near.left.dtype, near.right.dtype} == {wanted}
    assert (near is removal) == (own == wanted)


def test_slices_are_the_sums_of_their_heads() -> None:
    """Of each group the heads of least effect go together; heads that share nothing go alone."""
    layers = scores_of([(6, 2), (2, 2)], [0.0] * 8).layers
    units = [Unit(0.0, 0, (h,)) for h in (0, 1, 2, 3, 5)] + [Unit(0.0, 1, (h,)) for h in (0, 1)]
    found = torch.tensor([[3.0, -1, 2, -5, 4, 7, 8], [3, 1, 2, 5, -4, -7, 9]])
    made, columns = _sliced(Search(layers), units, found)
    assert [(u.layer, u.heads) for u in made] == [(0, (1, 5)), (0, (2, 3)), (1, (0,)), (1, (1,))]
    assert columns.tolist() == [[3, -3, 7, 8], [-3, 7, -7, 9]]
    none, empty = _sliced(Search(layers), [], found[:, :0])
    assert (none, empty.shape) == ([], (2, 0))


# -- what may go ---------------------------------------------------------------------------------------


def test_as_many_units_as_there_is_room_for() -> None:
    units = [Unit(0.0, 0, (0, 1)), Unit(1.0, 0, (2, 3)), Unit(2.0, 0, (4,))]
    assert [len(list(within(units, room))) for room in range(7)] == [0, 0, 1, 1, 2, 3, 3]


def test_a_unit_counts_by_the_mean_of_its_heads() -> None:
    (groups,) = units_of(
        scores_of([(6, 2)], [1, 2, 6, 0, 4, 5]).layers, {"l0": torch.tensor([1.0, 2, 6, 0, 4, 5])}, Constraints()
    )
    assert groups == [Unit(3.0, 0, (0, 1, 2)), Unit(3.0, 0, (3, 4, 5))]
    (slices,) = units_of(
        scores_of([(6, 2)], [0.0] * 6).layers, {"l0": torch.tensor([1.0, 2, 6, 0, 4, 5])}, Constraints(), SLICES
    )
    assert slices == [Unit(0.5, 0, (0, 3)), Unit(3.0, 0, (1, 4)), Unit(5.5, 0, (2, 5))]


def test_room() -> None:
    (layer,) = scores_of([(4, 4)], [0.0] * 4).layers
    assert [Constraints({}, least).room(layer) for least in (0, 1, 4, 5)] == [4, 3, 0, 0]
    assert Constraints().room(replace(layer, prunable=False)) == 0
    assert Constraints() == Constraints({}, 0)
    assert Constraints.parse("", [layer]).min_heads == 0


def test_why_heads_stay() -> None:
    layers = [replace(a, reason=f"reason {a.index}") for a in scores_of([(2, 2)] * 3, [0.0] * 6, prunable=False).layers]
    assert why_stay(layers[:1], Constraints()) == ("l0: reason 0",)
    assert why_stay(layers[1:], Constraints()) == ("l1 and 1 more: reason 1",)
    assert why_stay([replace(layers[0], prunable=True), *layers[1:]], Constraints()) == ("l1 and 1 more: reason 1",)
    free = [replace(a, prunable=True) for a in layers]
    assert why_stay(free, Constraints()) == ()
    assert why_stay(free, Constraints({"l1": [0]}, 2)) == ("protected: L1.H0", "at least 2 in every layer")


def test_a_wrong_head_is_answered_with_those_there_are() -> None:
    with pytest.raises(hp.HeadPruneError) as wrong:
        Constraints.parse("L0.H4", scores_of([(4, 4)], [0.0] * 4).layers)
    assert wrong.value.hint == "It has 4: 0 to 3."


def test_a_layer_whose_name_looks_like_a_head_is_a_layer() -> None:
    layers = [replace(a, name=f"block.H{a.index}") for a in scores_of([(2, 2)] * 2, [0.0] * 4).layers]
    assert Constraints.parse("block.H1", layers).protect == {"block.H1": [0, 1]}
    assert Constraints.parse("block.H1.H1", layers).protect == {"block.H1": [1]}


def test_what_has_gone_fits_no_more() -> None:
    scores = scores_of([(4, 4), (2, 2)], [0.0] * 6)
    state = State(Search(scores.layers, scores, Constraints({}, 1)))
    state.take(Unit(0.0, 0, (1,)), Unit(0.0, 1, (0,)))
    assert (state.kept, state.drop, state.steps) == (4, {"l0": [1], "l1": [0]}, [{"l0": [1]}, {"l1": [0]}])
    assert [state.fits(Unit(0.0, 0, heads)) for heads in ((0,), (1,), (0, 1), (0, 2), (0, 2, 3))] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not state.fits(Unit(0.0, 1, (1,)))
    other = state.copy([Unit(0.0, 0, (3,))])
    assert (other.kept, other.drop["l0"], len(other.steps)) == (3, [1, 3], 3)
    assert (state.kept, state.drop["l0"], len(state.steps)) == (4, [1], 2)
    assert [u.heads for u in state.units()] == [(0,), (2,), (3,)]
    state.remove([Unit(0.0, 0, (0,)), Unit(0.0, 0, (2,)), Unit(0.0, 0, (3,))], 3)
    assert state.kept == 3


def test_layers_behind_one_that_stays_may_lose_heads() -> None:
    first, second = scores_of([(4, 2)] * 2, [0.0] * 8).layers
    layers = [replace(first, prunable=False), second]
    assert State(Search(layers)).units() == [Unit(0.0, 1, (0, 1)), Unit(0.0, 1, (2, 3))]
    sliced = State(Search(layers, constraints=Constraints({"l1": [2]}), kind=SLICES)).units()
    assert sliced == [Unit(0.0, 1, (0,)), Unit(0.0, 1, (1,)), Unit(0.0, 1, (3,))]


# -- orders and plans ------------------------------------------------------------------------------------


STEPS: tuple[Heads, ...] = ({"a": [1]}, {"b": [0, 2], "a": [0]}, {"b": [1]})


def test_an_order_counts_its_heads() -> None:
    order = Order({"a": 2, "b": 4}, STEPS, "by hand", stays=("one", "two", "three", "four"))
    assert (order.total, order.kept(), order.least) == (6, (6, 5, 2, 1), 1)
    assert [order.plan(keep).kept for keep in range(1, 8)] == [1, 2, 2, 2, 5, 6, 6]
    assert order.plan(3).notes[0] == "2 of 6 heads are kept, not 3: they go 3 at a time."
    assert (order.plan(3).asked, order.plan(2).asked) == (3, 2)
    assert order.plan(2).drop == {"a": [0, 1], "b": [0, 2]}
    assert [p.kept for p in order.plans()] == [6, 5, 2, 1]
    with pytest.raises(
        hp.HeadPruneError, match=r"^1 heads cannot be pruned by by hand \(one; two; three\), so 0 is"
    ) as refused:
        order.plan(0)
    assert refused.value.hint == "Keep at least 1."
    assert not order.stock
    assert not Order.from_json({k: v for k, v in order.to_json().items() if k != "stock"}).stock


def test_the_kind_that_reaches_more_budgets_is_taken() -> None:
    """Whole groups can all go; slices stop at the protected heads, or the other way round."""
    scores = scores_of([(6, 2)], [0, 1, 2, 3, 4, 5])
    search = Search(scores.layers, scores, Constraints({"l0": [0, 3]}))  # of every group one: no group can go
    assert arrange(search, "one-shot", [4, 2]).least == 2
    one = Search(scores.layers, scores, Constraints({"l0": [0, 1, 2]}))  # a whole group: no slice can go
    assert arrange(one, "one-shot", [5, 3]).least == 3
    # Where both reach the budget, it is quality that decides, at the levels that are judged.
    free = Search(scores.layers, scores)
    for judged, kept in (((), 4), ([3], 3), ([4], 4)):
        assert arrange(free, "one-shot", [4], quality=lambda p: p.kept, judged=judged).plan(4).kept == kept
    assert arrange(free, "one-shot", [4], quality=lambda p: -p.kept, judged=[4]).plan(4).kept == 3


def test_budgets_in_words() -> None:
    for keep, total, hint in (
        (2, 1, "instance 1."),
        (80, 72, "instance 36."),
        (3, 2, "instance 1."),
        ("150%", 8, "instance 4."),
    ):
        with pytest.raises(hp.HeadPruneError, match="is more than all") as refused:
            heads_to_keep(keep, total)
        assert refused.value.hint.endswith(hint)
    with pytest.raises(hp.HeadPruneError, match="leaves no head") as refused:
        heads_to_keep("1%", 72)
    assert refused.value.hint == "Keep at least 1 of the 72."
    assert [heads_to_keep(k, 7) for k in ("50%", 0.5, "99.9%", 1.0, " 50% ", "1.0", 2.0)] == [3, 3, 6, 7, 3, 7, 2]
    assert heads_to_keep(0.1 + 0.2, 10) == 3  # a hair above .3
    assert heads_to_keep(0.29, 100) == 29  # a hair below 29 in binary


def test_a_plan_for_the_model_it_names() -> None:
    model, _ = small()
    other, _ = small(heads=2)
    named = hp.PruningPlan({}, model=fingerprint(model))
    named.check_model(model)
    hp.PruningPlan({}).check_model(other)
    with pytest.raises(hp.HeadPruneError, match="for another model"):
        replace(named, model="another").check_model(model)


@pytest.mark.parametrize(
    ("kept", "total", "same"), [(3, 4, True), (2, 4, False), (4, 4, False), (3, 5, False), (4, 5, False)]
)
def test_a_plan_with_other_heads_than_it_says_was_edited(kept: int, total: int, same: bool) -> None:
    layers = scores_of([(4, 4)], [0.0] * 4).layers
    plan = hp.PruningPlan({"l0": [2]}, kept, total, 1, "gradient", "", ("note",), "one-shot", "keep 3")
    assert plan.on(layers) == (plan if same else hp.PruningPlan({"l0": [2]}, 3, 4, 3))


@pytest.mark.parametrize("heads", ["all", [1.0], [True], ["1"], (1,), None])
def test_heads_of_a_file_are_lists_of_whole_numbers(heads: Any) -> None:
    with pytest.raises(hp.HeadPruneError, match="is no list of heads"):
        hp.PruningPlan.from_json({"drop": {"a": heads}})


# -- as many heads in every layer -------------------------------------------------------------------------


def test_layers_that_lose_the_same_go_by_their_sum() -> None:
    columns = units_of(
        (scores := scores_of([(3, 3)] * 3, [0.0, 1, 5, 9, 2, 0, 4, 4, 4])).layers,
        scores.values,
        Constraints({"l2": [1]}),
    )
    tied = _tied(columns, [[0, 1]])
    assert [[u.heads[0] for u in column] for column in tied] == [[1, 2, 0], [1, 2, 0], [0, 2]]
    assert [[u.score for u in column] for column in tied[:2]] == [[1, 5, 0], [2, 0, 9]]
    assert [u.layer for u in tied[1]] == [1, 1, 1]
    assert [[u.heads[0] for u in column] for column in _tied(columns, [[2]])] == [[0, 1, 2], [2, 1, 0], [0, 2]]
    assert [[u.heads[0] for u in column] for column in _tied(columns, [[0, 2]])] == [[0, 2], [2, 1, 0], [0, 2]]
    assert _tied(columns, []) == columns


def test_layers_of_a_kind_differ_by_numbers_alone() -> None:
    layers = [
        replace(a, name=name)
        for a, name in zip(
            scores_of([(2, 2)] * 4, [0.0] * 8).layers, ("e.0.a", "d.0.a", "e.1.a", "e.12.a"), strict=True
        )
    ]
    assert _kinds(Search(layers), [0, 1, 2, 3]) == [[0, 2, 3], [1]]
    assert _kinds(Search(layers), [1, 2]) == [[1], [2]]


def test_uniform_says_which_layer_holds_the_others() -> None:
    scores = scores_of([(4, 4)] * 3, [float(i) for i in range(12)])
    order = STRATEGIES["uniform"].run(Search(scores.layers, scores, Constraints({"l1": [0], "l2": [1, 3]})), [])
    assert order.stays == ("protected: L1.H0, L2.H1, L2.H3", "l2 can lose no more, and every layer keeps as many")
    assert order.kept() == (12, 9, 6)
    assert not order.stock
    free = STRATEGIES["uniform"].run(Search(scores.layers, scores), [])
    assert (free.stays, free.kept(), free.least) == ((), (12, 9, 6, 3, 0), 0)
    mixed = scores_of([(2, 2), (4, 4)], [0.0] * 6)  # layers of two sizes lose as large a share
    assert STRATEGIES["uniform"].run(Search(mixed.layers, mixed), []).steps == (
        {"l1": [0]}, {"l0": [0]}, {"l1": [1]}, {"l1": [2]}, {"l0": [1]}, {"l1": [3]},
    )  # fmt: skip


def test_a_strategy_gets_its_levels_from_the_most_heads_to_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    run = STRATEGIES["one-shot"].run
    spy = replace(STRATEGIES["one-shot"], run=lambda search, levels: asked.append(list(levels)) or run(search, levels))  # type: ignore[func-returns-value]
    monkeypatch.setitem(STRATEGIES, "one-shot", spy)
    scores = scores_of([(4, 4)], [1.0, 2, 3, 4])
    arrange(Search(scores.layers, scores), "one-shot", [1, 3, 2])
    assert asked == [[3, 2, 1]]
