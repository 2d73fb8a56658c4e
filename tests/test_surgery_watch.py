"""The proof's small parts, by numbers that are known: differences, magnitudes, samples, ways, and what counts as an answer."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headprune as hp
from headprune.attention import AttentionLayer, HeadFeatures
from headprune.errors import HeadPruneError
from headprune.inputs import vocabulary_size
from headprune.pruned import HeadArgument
from headprune.surgery.proof import _is_distribution, _per_head, _sure, answers, tolerance_of
from headprune.surgery.removal import WIDTHS, Removal, left_as_ghosts, ways
from headprune.surgery.watch import ROWS, _by_head, _sampled, differing, gap, largest, watching
from tests.support.zoo import ZOO

INF, NAN = math.inf, math.nan


def t(*values: float) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(("got", "expected", "difference"), [
    (t(1, 2), t(1, 4), 2), (t(1, -2), t(1, 2), 4), (t(1, 2), t(1, 2), 0), (t(1, NAN), t(3, NAN), 2), (t(1, INF), t(1, 2), INF),
    (t(1, 2), t(1, NAN), INF), (t(NAN), t(INF), 0), (t(), t(), 0),
])  # fmt: skip
def test_gap(got: Tensor, expected: Tensor, difference: float) -> None:
    assert gap(got, expected) == difference


@pytest.mark.parametrize(("values", "most"), [
    (t(-3, 2), 3), (t(0.5, NAN), 0.5), (t(0.5, INF), 0.5), (t(0.5, -INF), 0.5), (t(NAN), 0), (t(), 0),
])  # fmt: skip
def test_largest(values: Tensor, most: float) -> None:
    assert largest(values) == most


@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (ROWS, ROWS), (ROWS + 1, ROWS), (1000, ROWS)])
def test_a_sample_is_spread_from_the_first_position_to_the_last(rows: int, kept: int) -> None:
    whole = torch.arange(2.0 * rows).view(rows, 2)
    found = _sampled(whole)
    assert found.shape == (kept, 2)
    assert torch.equal(found[[0, -1]], whole[[0, -1]])
    assert found[:, 0].diff().gt(0).all()


def test_a_sample_is_flat_and_its_own() -> None:
    values = torch.randn(2, 3, 4)
    found = _sampled(values)
    assert torch.equal(found, values.view(6, 4))
    found.zero_()
    assert values.all()
    assert _sampled(t(1, 2, 3)).shape == (1, 3)
    assert _sampled(t(1, 2).half()).dtype == torch.float32
    assert _sampled(t(1, 2).double()).dtype == torch.float64


def test_heads_are_found_again_behind_the_cut() -> None:
    features, full = ((4, 1), (2, 3), (0, 5)), torch.randn(2, 3, 8)  # 6 and 7 belong to no head
    kept = [0, 2]
    cut = full[..., [0, 1, 4, 5, 6, 7]]
    for dense, left in zip(_by_head(full, features, kept, False), _by_head(cut, features, kept, True), strict=True):
        assert torch.equal(dense, left)
    assert torch.equal(_by_head(cut, features, kept, True)[0], full[..., [4, 1]])


class WithMore(nn.Conv1d):
    """Gives something beside its output, such as attention weights."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Convolved(nn.Module):
    """Its output projection takes channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Identity(), WithMore(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.a(x))[0]
        return out


def test_heads_are_told_apart_where_channels_come_first() -> None:
    model, x = Convolved(), torch.randn(2, 4, 5)
    one = AttentionLayer("a", 0, "encoder", 2, 2, 2, output_projection=HeadFeatures("o", ((0, 3), (1, 2))))
    with watching(model, [one], {"a": [0]}, cut=False) as found:
        out = model(x)
    ((heads,), (given,)) = found["what heads of a give"], found["the output of o"]
    assert torch.equal(heads[0], x.movedim(1, -1)[..., [1, 2]].reshape(10, 2))
    assert len(given) == 1
    assert torch.equal(given[0], _sampled(out))
    model(x)
    assert len(found["the output of o"]) == 1  # nothing is watched any more


def seen(*heads: Tensor, place: str = "W_O") -> dict[str, list[list[Tensor]]]:
    return {place: [[h.view(1, -1) for h in heads]]}


@pytest.mark.parametrize(("got", "expected", "why"), [
    (seen(t(4, 1)), seen(t(4, 1)), ""),
    (seen(t(4, 1.25)), seen(t(4, 1.375)), ""),  # 0.125 of 4 is just within
    (seen(t(4, 1)), seen(t(4, 1.75)), "W_O differs from the masked model's by 0.19 of its largest value"),
    (seen(t(4), t(1)), seen(t(4), t(1.5)), r"W_O \(head 1 of those left\) differs from the masked model's by 0.33"),
    (seen(t(4), t(0.004)), seen(t(4), t(0.001)), ""),  # a faint head is compared as if it were larger: 1 % of the largest
    (seen(t(4), t(0.009)), seen(t(4), t(0.001)), "head 1 .* by 0.2 of its"),
    (seen(t(1, NAN)), seen(t(1, 2)), "W_O is not finite where the masked model's is"),
    (seen(t(1, 2, 3)), seen(t(1, 2)), "what reaches W_O has another shape"),
    (seen(t(1)), seen(t(1), t(1)), "what reaches W_O has another shape"),
    ({}, seen(t(1)), "W_O runs 0 times instead of 1"),
    ({"W_O": [[t(1)], [t(1)]]}, {"W_O": [[t(1)]]}, "W_O runs 2 times instead of 1"),
    ({**seen(t(1)), **seen(t(9), place="x")}, seen(t(1)), ""),  # places that only the pruned model has
    ({"W_O": [[]]}, {"W_O": [[]]}, ""),
    ({**seen(t(1)), **seen(t(9), place="x")}, {**seen(t(1)), **seen(t(1), place="x")}, "x differs from the masked model's by 8 of"),
])  # fmt: skip
def test_what_differs(got: Any, expected: Any, why: str) -> None:
    found = differing(got, expected, 0.125)
    assert re.search(why, found) if why else found == ""


def test_zero_outputs_differ_by_any_amount() -> None:
    assert differing(seen(t(0.5)), seen(t(0.0)), 0.1).endswith("by 5e+29 of its largest value")
    assert differing(seen(t(0.0)), seen(t(0.0)), 0.1) == ""


@pytest.mark.parametrize(("values", "expected"), [
    (torch.randn(2, 3, 5).softmax(-1), True),
    (torch.cat([torch.randn(2, 3, 5).softmax(-1), torch.zeros(2, 1, 5)], 1), True),  # a masked query
    (torch.randn(3, 5).softmax(-1), False),
    (torch.tensor([[[2.0, -1.0]]]), False), (torch.tensor([[[0.5, 0.5], [0.3, 0.3]]]), False), (torch.tensor([[[0.5, 1.0]]]), False),
    (torch.tensor([[[0.5, 0.5005]]]), True), (torch.tensor([[[0.5, 0.52]]]), False), (torch.tensor([[[0.5, -0.5]]]), False),
])  # fmt: skip
def test_what_looks_like_attention_weights(values: Tensor, expected: bool) -> None:
    assert _is_distribution(values) is expected


@pytest.mark.parametrize(("got", "expected", "fewer"), [
    ((2, 3, 5, 5), (2, 4, 5, 5), True), ((3, 5, 5), (4, 5, 5), True), ((2, 4, 5), (2, 4, 5), False), ((2, 5, 5), (2, 4, 5), False),
    ((3, 5), (4, 5), False), ((2, 3, 4), (2, 4, 5), False), ((2, 3), (2, 3, 4), False), ((2, 4, 4, 1), (2, 4, 5), False),
])  # fmt: skip
def test_what_only_has_fewer_heads(got: tuple[int, ...], expected: tuple[int, ...], fewer: bool) -> None:
    assert _per_head(torch.Size(got), torch.Size(expected)) is fewer


def test_generation_is_compared_up_to_a_near_tie() -> None:
    sure, negative = torch.tensor([[10.0, 9.85, 0.0]]), torch.tensor([[1.0, 0.9, -20.0]])
    tie = torch.tensor([[10.0, 9.95, 0.0]])
    assert len(_sure([sure, sure, sure])) == 3
    assert len(_sure([sure, tie, sure])) == 2
    assert len(_sure([tie, sure, sure])) == 1
    assert len(_sure([sure, negative, sure])) == 2  # near, beside the largest magnitude
    rows = torch.tensor([[1.0, 0.5, 0.0], [100.0, 0.0, 0.0]])
    assert len(_sure([rows, rows])) == 2  # each row by its own magnitude
    assert len(_sure([torch.cat([sure, tie]), sure])) == 1  # one row is enough


def test_answers_are_floats_but_not_attention_weights() -> None:
    weights, hidden = torch.randn(1, 2, 3, 3).softmax(-1), torch.randn(1, 3, 4)
    found = answers(
        {
            "logits": hidden.half(),
            "cross_attentions": (weights,),
            "past_key_values": (hidden,),
            "ids": torch.ones(2).long(),
        }
    )
    assert len(found) == 1
    assert found[0].dtype == torch.float32
    assert len(answers((weights, hidden, weights))) == 2  # whatever comes first is an answer
    assert len(answers(SimpleNamespace(a=hidden, b=hidden, c=weights))) == 2
    with pytest.raises(HeadPruneError, match="no floating-point tensor"):
        answers({"ids": torch.ones(2).long()})


def test_the_coarsest_type_says_how_exact_a_proof_can_be() -> None:
    def model(*kinds: torch.dtype) -> nn.Module:
        return nn.ModuleList(nn.Linear(1, 1, dtype=kind) for kind in kinds)

    assert tolerance_of(model(torch.float64)) == 1e-9
    assert tolerance_of(model(torch.float64, torch.float32)) == 1e-4
    assert tolerance_of(model(torch.float32, torch.float16)) == 1e-2
    assert tolerance_of(model(torch.bfloat16, torch.float16)) == 5e-2
    assert tolerance_of(nn.ReLU()) == 1e-4


def test_the_vocabulary_is_that_of_an_embedding() -> None:
    class Model(nn.Module):
        def __init__(self, table: Any) -> None:
            super().__init__()
            self.table = table

        def get_input_embeddings(self) -> Any:
            if self.table is None:
                raise NotImplementedError
            return self.table

    assert vocabulary_size(Model(nn.Embedding(7, 2))) == 7
    assert (
        vocabulary_size(Model(nn.Linear(7, 2))) == vocabulary_size(Model(None)) == vocabulary_size(nn.Linear(1, 1)) == 0
    )


def layer(**about: Any) -> AttentionLayer:
    return AttentionLayer("a", 0, "encoder", 4, 4, 2, **about)


def test_ways_are_tried_from_the_one_that_changes_least() -> None:
    drop = {"a": [1]}
    plain = ways([layer()], drop)
    assert [(w.by_group, w.narrow, w.own_config, w.widths) for w in plain] == [
        (by_group, narrow, own, widths) for by_group in (False, True) for narrow in (False, True) for own in (False, True)
        for widths in ("none", "inner", "all")
    ]  # fmt: skip
    assert not any(w.cut_arguments or w.side_modules for w in plain)
    assert all(w.drop == drop and w.layers == (layer(),) for w in plain)
    shaped, traced = HeadArgument("bias", 1, False), HeadArgument("bias", 1, False, ((0,), (1,), (2,), (3,)))
    assert [w.cut_arguments for w in ways([layer(arguments=(traced, shaped))], drop)[:6]] == [False] * 3 + [True] * 3
    assert len(ways([layer(arguments=(traced,))], drop)) == 24
    assert [w.side_modules for w in ways([layer(), layer(side_modules=("x",))], drop)] == ([False] * 6 + [True] * 6) * 4


@pytest.mark.parametrize(("name", "count"), [("bert", 12), ("llama", 24), ("mha", 12)])
def test_groups_are_counted_in_two_ways_only_where_there_are_some(name: str, count: int) -> None:
    """Every refusal cut all weights twice as often as there were ways that differ."""
    model, example = ZOO[name]()
    layers = hp.find_attention(model, example)
    found = ways(layers, {layer.name: [0] for layer in layers}, model)
    assert len([way for way in found if not (way.side_modules or way.cut_arguments)]) == count
    assert {way.by_group for way in found} == ({False} if count == 12 else {False, True})


def test_a_removal_reads_what_an_older_one_lacks_as_no() -> None:
    whole = Removal((layer(),), {"a": [1]}, "all", True, True, True, True, True)
    assert Removal.from_json(whole.to_json()) == whole
    old = {k: v for k, v in whole.to_json().items() if k in ("layers", "drop", "widths")}
    assert Removal.from_json(old) == Removal((layer(),), {"a": [1]}, "all", False, False, False, False, False)
    assert Removal((layer(),), {}, "all", False) == Removal((layer(),), {}, "all", False, False, False, False)


def test_which_widths_shrink() -> None:
    assert [WIDTHS[kind]("inner_dim") for kind in ("none", "inner", "all")] == [False, True, True]
    assert [WIDTHS[kind]("d_model") for kind in ("none", "inner", "all")] == [False, False, True]


def test_ghosts_are_layers_without_heads_that_must_hold_one() -> None:
    every = [0, 1, 2, 3]
    assert left_as_ghosts([layer(bypass="ghost")], {"a": every}) == ("a",)
    assert left_as_ghosts([layer(bypass="ghost")], {"a": [0, 1, 2]}) == ()
    assert left_as_ghosts([layer(bypass="stub")], {"a": every}) == ()
