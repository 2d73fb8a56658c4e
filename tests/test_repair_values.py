"""Repair with values: what it gives on planted heads, the weights it makes, and that it is never worse."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headprune as hp
from headprune.attention import Heads
from headprune.batches import Rows
from headprune.repairing import Weights, repair
from headprune.repairing.steps import values as values_module
from headprune.repairing.steps.outputs import fit_output
from headprune.repairing.steps.values import fit_values
from headprune.running import exact_attention
from tests.support import zoo
from tests.support.checks import hooks, same, state
from tests.support.problems import small
from tests.support.repairs import (
    attending_alike,
    batch_of,
    check_promise,
    close,
    made,
    padded,
    padding_of,
    refit_of,
    some,
)
from tests.support.zoo import randomise, sizes, text


@pytest.mark.parametrize(("rounds", "most"), [(None, 0.03), (30, 1e-5)])
@torch.no_grad()
def test_a_head_takes_the_values_of_one_that_attends_alike(
    rounds: int | None, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds come close, more come as close as one likes; on examples that it was not fitted to."""
    if rounds:
        monkeypatch.setattr(values_module, "_ROUNDS", rounds)
    model, batches, other = attending_alike()
    layers = hp.find_attention(model, other)
    drop = {layers[0].name: [1]}
    dense = model(**other).logits
    far = {}
    for values in (False, True):
        mended = copy.deepcopy(model)
        done = repair(mended, drop, batches, layers=layers, ridge=1e-9, values=values)
        assert done.layers[layers[0].name].values == values
        with hp.mask(mended, drop, layers=layers):
            far[values] = float((mended(**other).logits - dense).abs().max())
        hp.prune(mended, drop, other, layers=layers)
        assert float((mended(**other).logits - dense).abs().max()) == pytest.approx(far[values], rel=1e-3, abs=1e-8)
    assert far[True] < most
    assert far[False] > 0.5


# -- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_applied_gives_back_the_values_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model, example = zoo.ZOO[name]()
    model = model.to(dtype).train()
    example = (
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in example.items()}
        if isinstance(example, dict)
        else tuple(t.to(dtype) if t.is_floating_point() else t for t in example)
    )
    layers = hp.find_attention(model, example)
    before, pointers = state(model), {n: id(p) for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    refit = refit_of(model, layers, [batch_of(example)], ridge=0.1)
    drop = some(layers)
    weights = refit.fitted(drop)
    losing = [p for p in refit.reference.projections if p.layers[0].name in drop]
    assert {p.values.name for p in losing if p.values} <= set(weights.by_module)
    assert all(p.values for p in losing)

    def check() -> None:
        assert same(model, before)
        assert {n: id(p) for n, p in model.named_parameters()} == pointers
        assert [m.training for m in model.modules()] == modes
        assert hooks(model) == 0

    check()
    with refit.applied(weights):
        now = state(model)
        changed = {k for k, v in before.items() if not torch.equal(v, now[k])}
        assert len(changed) >= 2 * len(losing)
        with exact_attention(model):
            for place in losing:
                assert place.values is not None
                module: Any = model.get_submodule(place.values.name)
                found = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
                assert torch.equal(found, weights.by_module[place.values.name][0].to(dtype))
                # Of a fused projection, only the values of heads that stay.
                alike = (found == place.values.weight.to(dtype)).all(0)
                stays = [f for f in range(found.shape[1]) if f not in place.values.features.flatten()]
                assert alike[stays].all()
                kept = {place.values.owner[h] for h in place.heads(drop)}
                for head, features in enumerate(place.values.features):
                    assert bool(alike[features].all()) == (head not in kept)
    check()
    with pytest.raises(KeyboardInterrupt), refit.applied(weights):
        raise KeyboardInterrupt
    check()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "mha"])
def test_the_model_gives_what_the_fit_was_promised(name: str) -> None:
    """Of the first layer that loses heads: its error with the weights written, counted by hand."""
    model, example, layers = made(name)
    refit = refit_of(model, layers, [batch_of(example)], ridge=0.1, mixtures=False)
    weights = refit.fitted({layers[0].name: list(layers[0].units[0])})
    check_promise(refit, weights, example, padding_of(name, refit.reference.projections[0], example))


PRUNED = {
    "bert": ({"L0": [1], "L2": [0, 1, 2, 3]}, zoo.bert),
    "llama": ({"L0": [0, 1], "L1": [2, 3, 4, 5]}, zoo.llama),  # groups
    "llama, slices": ({"L0": [0, 2, 4], "L2": [1, 3, 5]}, zoo.llama),
    "gpt2": ({"L0": [0], "L1": [1, 2]}, zoo.gpt2),
    "vit": ({"L1": [0, 3]}, zoo.vit),
    "t5": ({"L0": [1], "L3": [0, 2], "L1": [3]}, zoo.t5),
}


@pytest.mark.parametrize("name", PRUNED)
@torch.no_grad()
def test_pruned_saved_and_loaded(name: str, tmp_path: Path) -> None:
    drop, make = PRUNED[name]
    model, example = make()
    layers = hp.find_attention(model, example)
    refit = refit_of(model, layers, [example], ridge=0.1)
    weights = refit.fitted({a.name: drop[f"L{a.index}"] for a in layers if f"L{a.index}" in drop})
    refit.reference.weights.write(weights.by_module)
    lost = {f"L{a.index}": a.name for a in layers}
    assert all(weights.facts[lost[n]].values for n, heads in drop.items() if len(heads) < 4 or name.startswith("llama"))
    whole = model(**example).logits
    with hp.mask(model, drop, layers=layers):
        masked = model(**example).logits
    torch.testing.assert_close(whole, masked, rtol=1e-4, atol=1e-4)  # their W_O rows are zero
    loaded = hp.load(hp.save(model, tmp_path / "whole"))
    torch.testing.assert_close(loaded(**example).logits, whole)
    hp.prune(model, drop, example, layers=layers)
    torch.testing.assert_close(model(**example).logits, masked, rtol=1e-3, atol=1e-3)
    loaded = hp.load(hp.save(model, tmp_path / "pruned"))
    torch.testing.assert_close(loaded(**example).logits, model(**example).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv", [1, 4])
def test_values_are_refitted_where_that_is_better_on_examples_held_out(kv: int) -> None:
    model, example = grouped(4, kv), text(20, 9)
    layers = hp.find_attention(model, example)
    refit = refit_of(model, layers, [example])
    drop = {a.name: [1] for a in layers}
    weights = refit.fitted(drop)
    for place in refit.reference.projections:
        assert place.values is not None
        moments, rank = refit.reference.moments[place.name], refit.reference.directions.along[place.name].shape[1]
        alone = fit_output(moments, place, place.kept(drop), None)
        both = fit_values(moments, place, place.values, [0, 2, 3], rank, None)
        assert alone.held_out is not None
        assert both.held_out is not None
        better = both.held_out < alone.held_out
        assert better == (kv == 4)  # what has one key/value head has no other values to take over
        assert weights.facts[place.layers[0].name] == (both if better else alone).facts
        assert (place.values.name in weights.by_module) == (place.name in weights.mixes) == better


# -- always the same -----------------------------------------------------------------------------


def grouped(heads: int, kv: int) -> nn.Module:
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=32, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv, head_dim=4
        )
    )  # fmt: skip
    return randomise(tf.LlamaForCausalLM(config)).double()


def identical(a: Weights, b: Weights) -> bool:
    return a.by_module.keys() == b.by_module.keys() and all(
        torch.equal(weight, b.by_module[n][0]) and (bias is None or torch.equal(bias, b.by_module[n][1]))  # type: ignore[arg-type]
        for n, (weight, bias) in a.by_module.items()
    )


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "mha"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_two_refits_are_the_same_to_the_bit(name: str, ridge: float | None) -> None:
    model, example, layers = made(name)
    drop = some(layers)
    batches = [batch_of(example)]
    torch.manual_seed(1)
    first = refit_of(model, layers, batches, ridge=ridge).fitted(drop)
    torch.manual_seed(2)
    refit = refit_of(model, layers, batches, ridge=ridge)
    refit.fitted({layers[0].name: list(layers[0].units[0])})  # something else before
    assert ridge is None or first.mixes
    assert identical(first, refit.fitted(drop))
    assert identical(first, refit.fitted(drop))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "one group", "two groups", "dead head"])
def test_other_batches_give_the_same_up_to_rounding(name: str) -> None:
    if name.endswith(("group", "groups")):  # fewer values than directions that there is room for
        model, example = grouped(4, 1 if name == "one group" else 2), text(5, 9)
    elif name == "dead head":
        model, (example, *_), _ = attending_alike()
    else:
        model, example, _ = made(name)
        example = text(5, 9) if name in ("bert", "gpt2", "llama") else example
    layers = hp.find_attention(model, example)
    rows = len(next(iter(example.values())))
    # So that something is lost in the first layer too.
    drop = {a.name: list(a.units[1 % len(a.units)][:1]) for a in layers}

    def found(batches: Sequence[Any]) -> Weights:
        return refit_of(model, layers, batches, ridge=0.1, mixtures=False).fitted(drop)

    whole = found([example])
    assert set(whole.mixes) == {a.output_projection.module for a in layers if a.output_projection}
    close(found([Rows().take(example, [i]) for i in range(rows)]), whole)
    close(found([Rows().take(example, [0, 1]), Rows().take(example, range(2, rows))]), whole)
    if name in ("bert", "gpt2"):
        close(found([padded(example, 4, left=False)]), whole)


# -- never worse -----------------------------------------------------------------------------------


_BERT = small()
_LLAMA = grouped(4, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=2, max_size=2),
    st.sampled_from([None, 1e-8, 1e-6, 1e-2, 1.0, 100.0]),
    st.integers(1, 3),
)
def test_never_worse_on_the_calibration_examples(gone: list[set[int]], ridge: float | None, batches: int) -> None:
    model, given_ = _BERT
    check_never_worse(model, given_[:batches], gone, ridge)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=2), st.sampled_from([None, 1e-8, 1e-2, 100.0])
)  # fmt: skip
def test_never_worse_with_groups_and_slices(gone: list[set[int]], ridge: float | None) -> None:
    check_never_worse(_LLAMA, [text(4, 6)], gone, ridge)


def check_never_worse(model: nn.Module, batches: Sequence[Any], gone: Sequence[set[int]], ridge: float | None) -> None:
    layers = hp.find_attention(model, batches[0])
    before = state(model)
    drop = {a.name: sorted(g) for a, g in zip(layers, gone, strict=True) if g}
    weights = refit_of(model, layers, batches, ridge=ridge).fitted(drop)
    assert same(model, before)
    assert set(weights.facts) == set(drop)
    for layer in layers:
        if layer.name not in drop:
            continue
        facts = weights.facts[layer.name]
        assert -1e-9 <= facts.after <= facts.before + 1e-9
        every = len(drop[layer.name]) == layer.num_heads
        assert facts.values <= (not every)
        assert facts.values or every or ridge is None
    if ridge is not None and weights.mixes:
        # More freedom, and the old values to begin with.
        alone = refit_of(model, layers, batches, ridge=ridge, values=False).fitted(drop)
        for name, facts in weights.facts.items():
            assert facts.before == pytest.approx(alone.facts[name].before, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_nothing_removed_nothing_changed(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    none: list[Heads] = [{}, {layers[0].name: []}]
    for drop in none:
        done = repair(model, drop, [example], layers=layers)
        assert done.layers == {}
    assert same(model, before)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_layer_without_heads_has_a_bias_at_most(name: str) -> None:
    model, example, layers = made(name)
    refit = refit_of(model, layers, [example], ridge=0.1)
    weights = refit.fitted({layers[1].name: list(range(layers[1].num_heads))})
    place = refit.reference.projections[1]
    assert list(weights.by_module) == [place.name]
    weight, bias = weights.by_module[place.name]
    assert not weight.any()
    moments = refit.reference.moments[place.name]
    assert bias is not None
    torch.testing.assert_close(bias, moments.xy.sum(0)[-1] / moments.xx.sum(0)[-1, -1])


def test_an_infinite_ridge_leaves_values_alone() -> None:
    model, example, layers = made("bert")
    refit = refit_of(model, layers, [example], ridge=float("inf"))
    weights = refit.fitted(some(layers))
    assert refit.reference.values == {}
    assert not weights.mixes


@pytest.mark.parametrize("ridge", [None, 1e-9])
def test_a_layer_with_heads_that_are_never_looked_at(ridge: float | None) -> None:
    """Whose values are all zero: nothing to attend to but what is made anew."""
    model, example, layers = made("bert")
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    with torch.no_grad():
        attention.self.value.weight[:8] = 0
        attention.self.value.bias[:8] = 0
        attention.output.dense.weight[:, :8] = 0
    weights = refit_of(model, layers, [example], ridge=ridge).fitted({layers[0].name: [1]})
    for weight, bias in weights.by_module.values():
        assert weight.isfinite().all()
        assert bias is None or bias.isfinite().all()
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())
