"""What heads attend to, beside their inputs: edited weights, padding, and memory."""

import pytest
import torch
from torch import Tensor

from headprune.inputs import call
from headprune.planning.effects import effects
from headprune.reference import directions as directions_module
from headprune.reference.runner import Calls
from headprune.repairing import Refit
from tests.support.checks import same, state
from tests.support.plans import units_for
from tests.support.repairs import attended_by_hand, batch_of, close, made, padded, padding_of, refit_of, some


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def widened(refit: Refit, index: int = 0) -> Calls:
    """As the refit finds them."""
    with torch.no_grad(), refit.reference.runner.deterministic_eval():
        xs, ys = refit.reference.runner.recorded(refit.reference.runner.batches[index])
        return refit.reference.directions.widened(refit.reference.runner.batches[index], xs, ys, list(xs))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer"])
def test_widened_inputs_are_what_edited_values_give(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    refit = refit_of(model, layers, [batch_of(example)])
    assert list(refit.reference.values) == [p.name for p in refit.reference.projections]
    assert len(refit.reference.projections) == len(layers)
    expected, found = attended_by_hand(refit, example), widened(refit)
    assert same(model, before)
    for place in refit.reference.projections:
        x, further = expected[place.name]
        (wide,) = found[place.name]
        assert further.shape[-2] == place.layers[0].num_heads
        assert further.abs().mean() > 1e-3
        equal(wide, torch.cat([x, further.flatten(-2)], dim=-1))
        assert wide.shape[-1] + 1 == refit.reference.moments[place.name].xx.shape[-1]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_widened_inputs_of_the_model_as_it_is_now(name: str) -> None:
    """`slopes` looks at a repaired model, along the first directions."""
    model, example, layers = made(name)
    refit = refit_of(model, layers, [example], ridge=0.1)
    weights = refit.fitted(some(layers))
    assert weights.mixes
    with refit.applied(weights):
        expected = attended_by_hand(refit, example)
        found = refit.reference.slopes(0)
    for place in refit.reference.projections:
        x, further = expected[place.name]
        ((wide, _),) = found[place.name]
        first = further[..., : place.layers[0].head_dim]
        equal(wide, torch.cat([x, first.flatten(-2)], dim=-1))


def test_moments_are_sums_over_tokens_that_are_no_padding() -> None:
    model, example, layers = made("bert")
    refit = refit_of(model, layers, [example], mixtures=False)
    real = example["attention_mask"].bool()
    for name, (x, further) in attended_by_hand(refit, example).items():
        z = torch.cat([x, further.flatten(-2), torch.ones_like(x[..., :1])], dim=-1)[real]
        told = refit.reference.runner.recorded_with_weights(0)[2][name][0][real]
        equal(refit.reference.moments[name].xx.sum(0), (z.T * told) @ z)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_directions_are_the_best_for_tokens_that_attend_to_themselves(name: str) -> None:
    """The first ones give what the best projection of that rank gives: by the SVD of all tokens' outputs."""
    model, example, layers = made(name)
    refit = refit_of(model, layers, [example])
    for place in refit.reference.projections:
        values = place.values
        assert values is not None
        seen: list[Tensor] = []
        with torch.no_grad():
            handle = model.get_submodule(values.name).register_forward_pre_hook(lambda m, a, s=seen: s.append(a[0]))
            call(model, example)
            handle.remove()
        kind = padding_of(name, place, example)
        if name == "t5" and place.layers[0].kind == "cross":
            continue  # its values' tokens are the encoder's, its own the decoder's: see the test of its padding
        x = seen[0][kind] if kind is not None else seen[0].flatten(0, 1)
        x = x - x.mean(0)
        weight = [
            values.weight[:, values.features[g]] @ place.weight[values.columns[h]] for h, g in enumerate(values.owner)
        ]
        out = torch.cat([x @ w for w in weight], dim=1)
        sizes = torch.linalg.svdvals(out).square()
        q = refit.reference.directions.along[place.name]
        for rank in (1, 4, 8):
            inner, _ = torch.linalg.qr(x @ q[:, :rank])
            left = (out - inner @ (inner.T @ out)).square().sum()
            torch.testing.assert_close(left, sizes[rank:].sum(), rtol=1e-6, atol=1e-8 * float(sizes.sum()))
        length = values.weight[:, values.features.flatten()].norm(dim=0).square().mean().sqrt()
        torch.testing.assert_close(q.norm(dim=0), length.expand(q.shape[1]))


def test_directions_of_cross_attention_do_not_see_padding() -> None:
    """What it takes its values from is the encoder's, where padding is not what the decoder's is."""
    model, example, layers = made("t5")
    refit = refit_of(model, layers, [example])
    other = refit_of(model, layers, [padded(example, 4, left=False)])
    for place in refit.reference.projections:
        a, b = refit.reference.directions.along[place.name], other.reference.directions.along[place.name]
        torch.testing.assert_close(a @ a.T, b @ b.T, rtol=1e-6, atol=1e-8)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [3, 2, 1, 0])
def test_as_many_directions_as_there_is_room_for(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, layers = made("bert")
    room = len(layers) * 2 * 8 * (32 + 4 * 8 * shares + 1) ** 2
    monkeypatch.setattr(directions_module, "_MOST", room - (not shares))
    drop = some(layers)
    refit = refit_of(model, layers, [example], ridge=0.1)
    weights = refit.fitted(drop)
    sizes = {name: tuple(m.xx.shape) for name, m in refit.reference.moments.items()}
    assert set(sizes.values()) == {(2, 33 + 32 * shares, 33 + 32 * shares)}
    alone = refit_of(model, layers, [example], ridge=0.1, values=False).fitted(drop)
    assert weights.by_module.keys() >= alone.by_module.keys()
    if shares:
        assert refit.reference.notes == ()
        assert {len(m) for mixes in weights.mixes.values() for m in mixes.values()} == {8 + 8 * shares}
        found = effects(refit, layers, drop, units_for(layers, drop))
        assert found.isfinite().all()
    else:
        assert len(refit.reference.notes) == 1
        assert "would not fit into memory" in refit.reference.notes[0]
        close(weights, alone)
    with refit.applied(weights):
        pass


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_parts_of_a_batch_give_the_same_moments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example, layers = made(name)
    whole = refit_of(model, layers, [example]).reference.moments
    for most in (1, 30_000):
        monkeypatch.setattr(directions_module, "_MOST_AT_ONCE", most)
        refit = refit_of(model, layers, [example])
        for key, found in refit.reference.moments.items():
            assert torch.equal(found.xx, whole[key].xx)
            assert torch.equal(found.xy, whole[key].xy)
            assert torch.equal(found.yy, whole[key].yy)
