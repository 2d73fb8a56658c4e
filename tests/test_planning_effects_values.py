"""What the removal of a unit costs where values are refitted, against the wider fit without the unit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor

import headprune as hp
from headprune.attention import Heads
from headprune.planning.effects import effects
from headprune.planning.units import Unit
from headprune.reference import OutputProjection
from headprune.repairing import Refit
from tests.support.checks import hooks, same, state
from tests.support.plans import units_for
from tests.support.repairs import attended_by_hand, attending_alike, made, refit_of
from tests.support.zoo import randomise, sizes, text


def anew(x: Tensor, further: Tensor, place: OutputProjection, mixes: Mapping[int, Tensor]) -> Tensor:
    """What W_O gets of the same attention once values are made anew."""
    x = x.clone()
    features = place.layers[0].output_projection.features  # type: ignore[union-attr]
    for head, mix in mixes.items():
        own = list(features[head])
        x[..., own] = torch.cat([x[..., own], further[..., head, :]], dim=-1) @ mix
    return x


Attended = dict[str, tuple[Tensor, Tensor]]


def direct(
    refit: Refit, example: Any, drop: Heads, unit: Unit, ridge: float, attended: tuple[Attended, Attended]
) -> Tensor:
    """Effect of a unit by another fit without it: to what the layer gives now, from its inputs and what heads could read.

    Weights of what they could read are zero now, and all weights are pulled towards those that there are.

    Args:
        attended: What heads attend to in the dense model, and in the repaired one (`attended_in`).
    """
    layer = refit.reference.layers[unit.layer]
    place = next(p for p in refit.reference.projections if layer in p.layers)
    weights = refit.fitted(drop)
    now = weights.by_module.get(place.name, (place.weight, None))[0]
    width, heads = layer.head_dim, layer.num_heads
    features = layer.output_projection.features  # type: ignore[union-attr]
    x, further = attended[0][place.name]
    z = torch.cat(
        [anew(x, further, place, weights.mixes.get(place.name, {})), further[..., :width].flatten(-2)], dim=-1
    )
    real = example["attention_mask"].bool()
    told = refit.reference.runner.recorded_with_weights(0)[2][place.name][0][real]
    z = z[real]
    share = (told / told.sum())[:, None]
    now = torch.cat([now, now.new_zeros(heads * width, now.shape[1])])

    def columns(kept: Sequence[int]) -> list[int]:
        further = [range((heads + h) * width, (heads + h + 1) * width) for h in kept]
        return [f for h, more in zip(kept, further, strict=True) for f in (*features[h], *more)]

    there = [h for h in range(heads) if h not in drop.get(layer.name, [])]
    both, rest = columns(there), columns([h for h in there if h not in unit.heads])
    mean = (share * z).sum(0) if place.has_bias else torch.zeros_like(z[0])
    strength = ridge * float((share * (z - mean) ** 2).sum(0)[both].mean())
    wanted = (z - mean)[:, both] @ now[both]
    pull = torch.eye(len(rest), dtype=z.dtype) * strength**0.5
    left = torch.cat([share.sqrt() * (z - mean)[:, rest], pull])
    right = torch.cat([share.sqrt() * wanted, pull @ now[rest]])
    new = torch.zeros_like(now)
    new[rest] = torch.linalg.lstsq(left, right, driver="gelsd").solution
    change = new - now
    change[[f for f in range(len(now)) if f not in both]] = 0
    x, further = attended[1][place.name]
    with refit.applied(weights):
        ((_, slope),) = refit.reference.slopes(0)[place.name]
    z = torch.cat([x, further[..., :width].flatten(-2)], dim=-1) - mean
    return ((z @ change) * slope).flatten(1).sum(1)


def attended_in(refit: Refit, example: Any, drop: Heads) -> tuple[Attended, Attended]:
    """By hand, before and after the repair for heads that are gone."""
    dense = attended_by_hand(refit, example)
    with refit.applied(refit.fitted(drop)):
        return dense, attended_by_hand(refit, example)


@pytest.mark.parametrize(("name", "single"), [("bert", False), ("gpt2", False), ("llama", False), ("llama", True)])
@pytest.mark.parametrize("gone", [False, True])
def test_effects_are_those_of_the_wider_fit_without_the_unit(name: str, single: bool, gone: bool) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = refit_of(model, layers, [example], ridge=0.05, mixtures=False)
    drop = {layers[0].name: list(layers[0].units[1]), layers[2].name: list(layers[2].units[0])} if gone else {}
    units = units_for(layers, drop, single)
    found = effects(refit, layers, drop, units)
    assert same(model, before)
    assert hooks(model) == 0
    assert found.shape == (3, len(units))
    assert found.abs().max() > 1e-4
    plain = effects(refit_of(model, layers, [example], ridge=0.05, values=False, mixtures=False), layers, drop, units)
    assert (found - plain).abs().max() > 1e-4
    attended = attended_in(refit, example, drop)
    for i in range(0, len(units), 1 + len(units) // 6):
        expected = direct(refit, example, drop, units[i], 0.05, attended)
        torch.testing.assert_close(found[:, i], expected, rtol=1e-7, atol=1e-8)
    assert same(model, before)


def test_under_a_strong_pull_values_make_no_difference() -> None:
    model, example, layers = made("bert")
    units = units_for(layers, {})
    weak, strong = (
        [effects(refit_of(model, layers, [example], ridge=r, values=v), layers, {}, units) for v in (False, True)]
        for r in (0.1, 1e9)
    )
    torch.testing.assert_close(strong[0], strong[1], rtol=1e-6, atol=1e-7)
    assert (weak[0] - weak[1]).abs().max() > 1e-3


def test_a_head_costs_less_where_another_can_read_what_it_reads() -> None:
    model, batches, _ = attending_alike()
    layers = hp.find_attention(model, batches[0])
    units = [Unit(0.0, 0, (1,))]
    wide = effects(refit_of(model, layers, batches, ridge=1e-8), layers, {}, units)
    plain = effects(refit_of(model, layers, batches, ridge=1e-8, values=False), layers, {}, units)
    assert plain.abs().mean() > 1e-3
    assert plain.abs().mean() > wide.abs().mean() > 0


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 1)])
def test_heads_wider_than_their_input(heads: tuple[int, int]) -> None:
    """There are fewer directions than a head is wide."""
    config = tf.LlamaConfig(
        **sizes(
            "sdpa", hidden_size=8, num_hidden_layers=2, num_attention_heads=heads[0], num_key_value_heads=heads[1],
            head_dim=12,
        )
    )  # fmt: skip
    model, example = randomise(tf.LlamaForCausalLM(config)).double(), text()
    layers = hp.find_attention(model, example)
    refit = refit_of(model, layers, [example], ridge=0.1)
    drop = {layers[0].name: [0]}
    weights = refit.fitted(drop)
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())
    units = units_for(layers, {}, single=True)
    found = effects(refit, layers, {}, units)
    assert found.isfinite().all()
    # Those that are missing are inputs that are always zero.
    directions = refit.reference.directions
    along = {n: F.pad(q, (0, max(0, 12 - q.shape[1]))) for n, q in directions.along.items()}
    refit.reference = replace(refit.reference, directions=replace(directions, along=along))
    attended = attended_in(refit, example, {})
    expected = torch.stack([direct(refit, example, {}, unit, 0.1, attended) for unit in units], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
