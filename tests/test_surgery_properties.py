"""What holds of every prune: on plain attention of any shape, for any heads that may go."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headprune as hp
from tests.support.checks import hooks, same, state
from tests.support.grouped import Stack, drops, stacks

few = settings(max_examples=25)


def parameters_without(model: Stack, drop: dict[str, list[int]]) -> int:
    """How many parameters are left, from the shapes alone."""
    total = sum(p.numel() for p in model.parameters())
    for i, shape in enumerate(model.shapes):
        gone = set(drop.get(f"layers.{i}", ()))
        groups = [set(range(g * shape.per_group, (g + 1) * shape.per_group)) for g in range(shape.kv)]
        left = sum(1 for group in groups if group - gone)
        total -= shape.parameters(model.width, shape.heads, shape.kv)
        total += shape.parameters(model.width, shape.heads - len(gone), left)
    return total


@torch.no_grad()
def answers(model: torch.nn.Module, x: Tensor) -> Tensor:
    return model(x)


@few
@given(stacks(), st.data())
def test_pruned_is_masked_and_as_small_as_its_shapes_say(given_: tuple[Stack, Tensor], data: st.DataObject) -> None:
    model, x = given_
    drop = data.draw(drops(model.shapes))
    expected = answers(model.without(drop), x)
    with hp.mask(model, drop, x):
        torch.testing.assert_close(answers(model, x), expected, rtol=0, atol=1e-9)
    pruned = copy.deepcopy(model)
    proof = hp.prune(pruned, drop, x)
    torch.testing.assert_close(answers(pruned, x), expected, rtol=0, atol=1e-5)
    assert proof.difference <= 1e-5
    assert sum(p.numel() for p in pruned.parameters()) == parameters_without(model, drop)
    left = {a.name: a.num_heads for a in hp.find_attention(pruned, x)} if len(drop) < len(model.shapes) else {}
    for i, shape in enumerate(model.shapes):
        if f"layers.{i}" in left:
            assert left[f"layers.{i}"] == shape.heads - len(drop.get(f"layers.{i}", ()))


@few
@given(stacks(), st.data())
def test_pruned_twice_is_pruned_at_once(given_: tuple[Stack, Tensor], data: st.DataObject) -> None:
    """The second prune counts the heads that the first one left."""
    model, x = given_
    both = data.draw(drops(model.shapes))
    layers = {a.name: a for a in hp.find_attention(model, x)}
    # First, of each layer, a part of what goes that may go alone: a whole unit, or nothing.
    first = {}
    for name, heads in both.items():
        units = [u for u in layers[name].units if set(u) <= set(heads) and len(heads) < layers[name].num_heads]
        if units:
            first[name] = list(data.draw(st.sampled_from(units)))
    second = {}
    for name, heads in both.items():
        stay = [h for h in range(layers[name].num_heads) if h not in first.get(name, ())]
        second[name] = [stay.index(h) for h in heads if h in stay]
    once, twice = copy.deepcopy(model), copy.deepcopy(model)
    hp.prune(once, both, x)
    hp.prune(twice, first, x)
    hp.prune(twice, {name: heads for name, heads in second.items() if heads}, x)
    torch.testing.assert_close(answers(twice, x), answers(once, x), rtol=0, atol=1e-9)
    assert {n: p.shape for n, p in twice.named_parameters()} == {n: p.shape for n, p in once.named_parameters()}


@few
@given(stacks(), st.data())
def test_a_prune_that_is_not_proved_leaves_no_trace(given_: tuple[Stack, Tensor], data: st.DataObject) -> None:
    """Bit by bit: values, the parameters themselves, modules' fields, and hooks."""
    model, x = given_
    drop = data.draw(drops(model.shapes).filter(bool))
    before, parameters = state(model), dict(model.named_parameters())
    fields = {n: {k: v for k, v in vars(m).items() if isinstance(v, int)} for n, m in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headprune.surgery.proof.TOLERANCE", dict.fromkeys((torch.float32, torch.float64), -1.0))
        with pytest.raises(hp.PruneError, match=r"cannot be removed exactly|differ from the masked model's"):
            hp.prune(model, drop, x)
    assert same(model, before)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert fields == {n: {k: v for k, v in vars(m).items() if isinstance(v, int)} for n, m in model.named_modules()}
    assert hooks(model) == 0
