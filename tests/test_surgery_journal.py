"""The cut and its undo log, on single modules: what is kept, what is counted, and that everything comes back as the same object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import headprune as hp
from headprune.attention import AttentionLayer, HeadFeatures
from headprune.pruned import Features, HeadArgument, HeadArguments, Narrowing, Placement, Selection, surviving
from headprune.surgery.journal import Journal, _restore
from headprune.surgery.removal import Removal
from tests.support.checks import hooks, same, state
from tests.support.zoo import randomise

EVERY = ((0, 1), (2, 3), (4, 5))  # features of three heads


def counts(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int) and k != "training"}


@pytest.mark.parametrize(("module", "output", "expected", "set_"), [
    (nn.Linear(4, 6), True, ((4, 4), (4,)), {"out_features": 4}), (nn.Linear(6, 3), False, ((3, 4), (3,)), {"in_features": 4}),
    (Conv1D(6, 4), True, ((4, 4), (4,)), {"nf": 4}), (Conv1D(3, 6), False, ((4, 3), (3,)), {"nx": 4}),
    (nn.Conv1d(4, 6, 2), True, ((4, 4, 2), (4,)), {"out_channels": 4}), (nn.Conv1d(6, 3, 1), False, ((3, 4, 1), (3,)), {"in_channels": 4}),
])  # fmt: skip
def test_a_linear_module_keeps_two_of_three_heads(
    module: Any, output: bool, expected: tuple[Any, Any], set_: dict[str, int]
) -> None:
    randomise(module)
    weight, bias, before, journal = module.weight, module.bias, counts(module), Journal()
    journal._slice(module, surviving(EVERY, [0, 2]), output=output)
    assert (tuple(module.weight.shape), tuple(module.bias.shape)) == expected
    assert counts(module) == {**before, **set_}
    dim = next(i for i in range(weight.ndim) if weight.shape[i] == 6 and module.weight.shape[i] == 4)
    assert torch.equal(module.weight, weight.index_select(dim, torch.tensor([0, 1, 4, 5])))
    assert torch.equal(module.bias, bias[[0, 1, 4, 5]] if output else bias)
    journal.undo()
    assert module.weight is weight
    assert module.bias is bias
    assert counts(module) == before


@pytest.mark.parametrize(("groups", "width", "out", "dim", "expected"), [
    (6, 6, 6, 0, {"groups": 4, "in_channels": 4, "out_channels": 4}), (3, 9, 6, 0, {"groups": 2, "in_channels": 6, "out_channels": 4}),
    (1, 5, 6, 0, {"groups": 1, "in_channels": 5, "out_channels": 4}), (1, 6, 5, 1, {"groups": 1, "in_channels": 6, "out_channels": 5}),
])  # fmt: skip
def test_filters_of_removed_features_go_in_whole_groups(
    groups: int, width: int, out: int, dim: int, expected: dict[str, int]
) -> None:
    conv = nn.Conv1d(width, out, 3, groups=groups)
    Journal()._slice_table(conv, "weight", surviving(EVERY, [0, 2]), dim)
    assert {name: getattr(conv, name) for name in expected} == expected
    if dim == 0:
        Journal()._slice_table(conv, "bias", surviving(EVERY, [0, 2]), 0)
        assert conv(torch.ones(1, conv.in_channels, 3)).shape == (1, 4, 1)


def test_a_batch_norm_keeps_its_statistics() -> None:
    norm, journal = nn.BatchNorm1d(6), Journal()
    mean = torch.arange(6.0)
    norm.running_mean = mean
    for name in ("weight", "bias"):
        journal._slice_table(norm, name, surviving(EVERY, [1]), 0)
    assert (norm.num_features, norm.running_mean.tolist()) == (2, [2, 3])
    assert norm(torch.ones(4, 2)).shape == (4, 2)
    journal.undo()
    assert norm.running_mean is mean
    assert norm.num_features == 6


def test_what_is_not_there_is_not_cut() -> None:
    linear, journal = nn.Linear(4, 6, bias=False), Journal()
    assert journal._slice_parameter(linear, "bias", surviving(EVERY, [0]), 0) == 0
    assert journal._undo == []
    assert linear.bias is None


def test_what_is_shared_stays_shared_and_buffers_stay_what_they_are() -> None:
    first, second, journal = nn.Linear(4, 6), nn.Linear(4, 6), Journal()
    second.weight = first.weight
    first.weight.requires_grad_(False)
    for module in (first, second):
        journal._slice_parameter(module, "weight", surviving(EVERY, [0, 1]), 0)
    assert first.weight is second.weight
    assert not first.weight.requires_grad
    module = nn.Module()
    module.register_buffer("passing", torch.arange(6), persistent=False)
    module.register_buffer("stays", torch.arange(6))
    for name in ("passing", "stays"):
        assert journal._slice_parameter(module, name, surviving(EVERY, [2]), 0) == 2
    assert list(module.state_dict()) == ["passing", "stays"]  # what its class no longer makes is saved
    assert module.passing.tolist() == [4, 5]
    journal.undo()
    assert list(module.state_dict()) == ["stays"]
    assert module.passing.tolist() == list(range(6))


def test_features_that_belong_to_no_head_stay() -> None:
    linear = nn.Linear(2, 8)
    Journal()._slice(linear, surviving(EVERY, [1]), output=True)
    assert linear.out_features == 4  # two of the head, two of none


def test_a_second_prune_counts_within_the_first() -> None:
    module, journal = nn.Identity(), Journal()
    first, second = Features(frozenset({0, 3}), frozenset(range(4))), Features(frozenset({1}), frozenset(range(2)))
    journal._select(module, first)
    journal._select(module, second)
    assert Selection.of(module).stages == (first, second)
    assert module(torch.arange(6.0)).tolist() == [3, 4, 5]
    journal._narrow(module, 12, 8)
    journal._narrow(module, 8, 4)
    assert (Narrowing.of(module).width, Narrowing.of(module).claimed) == (12, 4)
    argument = (HeadArgument("bias", 1, False),)
    journal._index_arguments(module, argument, 6, [1, 3, 5])
    assert HeadArguments.of(module) == HeadArguments(argument, 6, (1, 3, 5))
    journal._index_arguments(module, argument, 3, [0, 2])
    assert HeadArguments.of(module) == HeadArguments(argument, 6, (1, 5))
    journal.undo()
    assert not Selection.of(module)
    assert not Narrowing.of(module)
    assert not HeadArguments.of(module)
    assert hooks(module) == 0


@pytest.mark.parametrize("before", [False, True])
def test_kept_heads_are_put_where_they_were(before: bool) -> None:
    module, journal, part = nn.Identity(), Journal(), HeadFeatures("m", ((4, 5), (0, 1), (2, 3)))
    journal._place(module, part, [0, 2], [0, 2], before=before)
    assert Placement.of(module) == Placement(6, (0, 1, 2, 3), (2, 3, 4, 5), before)
    assert module(torch.tensor([1.0, 2, 3, 4])).tolist() == [0, 0, 1, 2, 3, 4]
    journal._place(module, HeadFeatures("m", ((2, 3), (4, 5))), [1], [1])
    assert (Placement.of(module).width, Placement.of(module).target) == (6, (4, 5))
    ghost = nn.Identity()
    Journal()._place(ghost, part, [], [0])
    assert ghost(torch.tensor([1.0, 2])).tolist() == [0] * 6


def test_an_output_projection_that_gives_nothing() -> None:
    linear, journal = randomise(nn.Linear(3, 2)), Journal()
    old = linear.weight
    journal._zero(linear)
    assert torch.equal(linear(torch.ones(3)), linear.bias)
    journal.undo()
    assert linear.weight is old


def test_attributes_come_back_or_go() -> None:
    now = {"a": 1, "b": 2, "c": 3}
    _restore(now, {"a": 5, "d": 6}, ("a", "b"))
    assert now == {"a": 5, "c": 3}


class Uneven(nn.Module):
    """Attention whose heads together are narrower than what it gives."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        self.num_heads = 2
        self.q, self.k, self.v = (nn.Linear(12, 8) for _ in range(3))
        self.o: nn.Module = Conv1D(12, 8) if conv else nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out: Tensor = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("conv", [False, True])
def test_an_attention_without_heads_gives_the_bias_of_its_output_projection(conv: bool) -> None:
    model = randomise(nn.Sequential(Uneven(conv), nn.Tanh(), nn.Linear(12, 3)))
    x = torch.randn(2, 5, 12)
    (layer,) = hp.find_attention(model, x)
    before = state(model)
    expected = model[2](torch.tanh(model[0].o.bias)).detach()  # type: ignore[union-attr, arg-type, operator]
    one = hp.prune(model, {layer.name: [0]}, x)
    assert one.ghosts == ()
    assert not same(model, before)
    hp.prune(model, {layer.name: [0]}, x)
    torch.testing.assert_close(model(x), expected.expand(2, 5, 3))


def test_inputs_claim_the_width_of_the_heads_that_stay() -> None:
    model, x = randomise(nn.Sequential(Uneven(False), nn.Linear(12, 3))), torch.randn(2, 5, 12)
    (layer,) = hp.find_attention(model, x)
    Journal().remove(model, Removal((layer,), {layer.name: [1]}, "none", False, narrow=True))
    assert Narrowing.of(model[0]) == Narrowing(8, 4)
    Journal().remove(other := randomise(Uneven(False)), Removal((), {}, "none", False, narrow=True))
    assert not Narrowing.of(other)


def test_key_value_heads_are_called_heads_beside_the_attention_alone() -> None:
    groups = tuple(tuple(range(3 * g, 3 * g + 3)) for g in range(4))
    layer = AttentionLayer(
        "b", 0, "decoder", 12, 4, 8, groups, inner_modules=("b", "b.inner", "a"), side_modules=("c",)
    )
    for sides in (False, True):
        model: Any = nn.Module()
        for name in ("a", "b", "c"):
            setattr(model, name, nn.Module())
        model.b.inner = nn.Module()
        for module in (model.a, model.b, model.b.inner, model.c):
            module.heads, module.num_heads, module.cache = 4, 12, {"all": torch.ones(1)}
        model.b._cache = model.b.cache
        journal = Journal()
        journal._correct_counts(
            model, layer, Removal((layer,), {}, "none", False, side_modules=sides), [0, 1, 2, 6, 7, 8]
        )
        assert [(m.heads, m.num_heads) for m in (model.b, model.b.inner, model.a)] == [(4, 6), (2, 6), (2, 6)]
        assert (model.c.heads, model.c.num_heads) == ((2, 6) if sides else (4, 12))
        assert [bool(m.cache) for m in (model.b, model.a, model.c)] == [False, False, not sides]
        assert model.b._cache
        journal.undo()
        assert model.b.cache is model.b._cache
        assert model.a.heads == 4
