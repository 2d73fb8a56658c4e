"""Repair against brute force: the same regression on the stacked tokens, by another solver."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.batches import Rows
from headprune.inputs import call
from headprune.reference import OutputProjection
from headprune.repairing import Refit, repair
from headprune.running import exact_attention
from tests.support import zoo
from tests.support.checks import same, state
from tests.support.problems import duplicated, small
from tests.support.repairs import MODELS, batch_of, close, fitted, made, padded, padding_of, refit_of, some
from tests.support.zoo import text


def seen(model: nn.Module, names: Sequence[str], example: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What goes through modules, by hooks of the tests' own."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in names}
    with torch.no_grad(), exact_attention(model):
        handles = [
            model.get_submodule(n).register_forward_hook(lambda m, a, out, n=n: found[n].append((a[0], out)))
            for n in names
        ]
        call(model, example)
        for handle in handles:
            handle.remove()
    return found


def brute(
    x: Tensor, y: Tensor, weight: Tensor, old: Tensor, old_bias: Tensor, ridge: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """Least squares with rows for the ridge, on the difference from the old weights."""
    weight = weight / weight.sum()
    mean = (weight[:, None] * x).sum(0) if bias else torch.zeros_like(x[0])
    strength = ridge * float((weight[:, None] * (x - mean) ** 2).sum(0).mean())
    ones = torch.full((len(x), 1), float(bias), dtype=x.dtype)
    root = weight.sqrt()[:, None]
    left = root * torch.cat([x, ones], 1)
    right = root * (y - x @ old - old_bias)
    pull = torch.eye(x.shape[1] + 1, dtype=x.dtype) * strength**0.5
    pull = pull[:-1]  # the bias is free
    both = torch.cat([left, pull]), torch.cat([right, torch.zeros(len(pull), y.shape[1], dtype=y.dtype)])
    found = torch.linalg.lstsq(*both, driver="gelsd").solution
    return old + found[:-1], old_bias + found[-1] * float(bias)


def tokens(
    refit: Refit, place: OutputProjection, name: str, example: Any, calls: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Stacked inputs, outputs and weights of the tokens that count; the weights are of slopes taken here."""
    mask = padding_of(name, place, example)
    xs, ys, ws = [], [], []
    for n, (x, y) in enumerate(calls):
        if name.startswith("xlnet"):
            w = torch.cat(
                [
                    refit.reference.runner.recorded_with_weights(i)[2][place.name][n]
                    for i in range(len(refit.reference.runner.batches))
                ],
                dim=1,
            )
        else:
            w = refit.reference.runner.recorded_with_weights(0)[2][place.name][n]
        chosen = torch.ones(x.shape[:-1], dtype=torch.bool) if mask is None else mask
        xs, ys, ws = [*xs, x[chosen]], [*ys, y[chosen]], [*ws, w[chosen]]
    return [torch.cat(xs), torch.cat(ys), torch.cat(ws)]


@pytest.mark.parametrize("name", MODELS)
def test_the_fit_is_the_regression(name: str) -> None:
    model, example, layers = made(name)
    before = state(model)
    for ridge in (1e-3, 1.0):
        refit = refit_of(model, layers, [batch_of(example)], ridge=ridge, values=False, mixtures=False)
        drop = some(layers) or {layers[0].name: [1]}  # ALBERT has but one
        weights = refit.fitted(drop)
        assert same(model, before)
        inputs = seen(model, [p.name for p in refit.reference.projections], example)
        assert set(weights.by_module) == {
            p.name for p in refit.reference.projections if any(a.name in drop for a in p.layers)
        }
        for place in refit.reference.projections:
            if place.name not in weights.by_module:
                continue
            x, y, w = tokens(refit, place, name, example, inputs[place.name])
            assert (w > 0).any()
            kept = place.kept(drop)
            new, bias = brute(x[:, kept], y, w, place.weight[kept], place.bias, ridge, place.has_bias)
            found, found_bias = weights.by_module[place.name]
            torch.testing.assert_close(found[kept], new, rtol=1e-7, atol=1e-8)
            if place.has_bias:
                torch.testing.assert_close(found_bias, bias, rtol=1e-7, atol=1e-8)
            gone = [i for i in range(len(place.weight)) if i not in kept.tolist()]
            assert gone
            assert not found[gone].any()
            facts = weights.facts[place.layers[0].name]
            share = w[:, None] / w.sum()
            spread = (share * (y - (share * y).sum(0)) ** 2).sum()
            left = (share * (y - x[:, kept] @ new - (bias if place.has_bias else place.bias)) ** 2).sum()
            assert facts.after == pytest.approx(float(left / spread), rel=1e-6, abs=1e-9)
            assert facts.ridge == ridge


@pytest.mark.parametrize("drop", [{}, {"L0": []}])
def test_nothing_removed_nothing_changed(drop: Heads) -> None:
    for model, example in (zoo.bert(), zoo.llama()):
        before = state(model)
        done = repair(model, drop, [example], layers=hp.find_attention(model, example))
        assert same(model, before)
        assert done.layers == {}
        assert done.biases == ()


def test_layers_that_lose_nothing_keep_their_weights() -> None:
    """On the dense model's activations there is nothing to gain; a fit would only be noise."""
    model, example = zoo.bert()
    layers = hp.find_attention(model, example)
    weights = refit_of(model, layers, [batch_of(example)]).fitted({layers[1].name: [2]})
    assert list(weights.facts) == [layers[1].name]


_BERT = small()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 2)), min_size=2, max_size=2),
    st.sampled_from([None, 1e-6, 1e-2, 1.0, 100.0, float("inf")]),
    st.integers(1, 3),
)
def test_never_worse_on_the_calibration_examples(gone: list[set[int]], ridge: float | None, batches: int) -> None:
    model, given_ = _BERT
    layers = hp.find_attention(model, given_[0])
    before = state(model)
    refit = refit_of(model, layers, given_[:batches], ridge=ridge, values=False)
    weights = refit.fitted({a.name: sorted(g) for a, g in zip(layers, gone, strict=True) if g})
    for facts in weights.facts.values():
        assert facts.after <= facts.before + 1e-9
        assert facts.after >= -1e-9
    assert same(model, before)


@pytest.mark.parametrize(("ridge", "most"), [(None, 1e-3), (1e-8, 1e-5)])
@torch.no_grad()
def test_a_duplicate_is_made_up_for(ridge: float | None, most: float) -> None:
    model, batches = small()
    duplicated(model)
    model.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16] *= -0.3  # alike, but used otherwise
    layers = hp.find_attention(model, batches[0])
    dense = model(**batches[0]).logits
    drop = {layers[0].name: [1]}
    with hp.mask(model, drop, layers=layers):
        masked = model(**batches[0]).logits
    repair(model, drop, batches, layers=layers, ridge=ridge, values=False)
    with hp.mask(model, drop, layers=layers):
        repaired = model(**batches[0]).logits
    assert (repaired - dense).abs().max() < most
    assert (masked - dense).abs().max() > 20 * most


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_batches_and_padding_do_not_matter(name: str, ridge: float | None) -> None:
    model, _, _ = made(name)
    batch = text(5, 9)
    whole = fitted(model, [batch], ridge)
    close(fitted(model, [Rows().take(batch, [i]) for i in range(5)], ridge), whole)
    close(fitted(model, [Rows().take(batch, [0, 1, 2]), Rows().take(batch, [3, 4])], ridge), whole)
    close(fitted(model, [padded(batch, 4, left=False)], ridge), whole)
    if name == "llama":  # whose positions only count relatively
        close(fitted(model, [padded(batch, 3, left=True)], ridge), whole)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("ridge", [None, 0.1])
def test_one_example_only(name: str, ridge: float | None) -> None:
    model, example, _ = made(name)
    one = Rows().take(example, [0])
    weights = fitted(model, [one], ridge)
    assert min(weights.ridges.values()) < float("inf")  # its tokens are both folds
    assert all(f.after <= f.before + 1e-9 for f in weights.facts.values())
    close(fitted(model, [padded(one, 3, left=False)], ridge), weights)


def test_a_decoder_and_its_encoder_have_padding_of_their_own() -> None:
    """As long as each other, so that the shapes do not tell."""
    model, _, layers = made("t5")
    batch = text(3, 6, decoder=6)
    batch["decoder_attention_mask"] = torch.ones(3, 6, dtype=torch.long)
    batch["decoder_attention_mask"][0, 3:] = 0
    labelled = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    labelled["labels"] = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(4))
    labelled["labels"][1, 2:] = -100
    for given_, mask in (
        (batch, batch["decoder_attention_mask"].bool()),
        (labelled, labelled["labels"] != -100),
        ({k: v for k, v in batch.items() if k != "decoder_attention_mask"}, torch.ones(3, 6, dtype=torch.bool)),
    ):
        refit = refit_of(model, layers, [given_], ridge=0.1, values=False)
        drop = some(layers)
        weights = refit.fitted(drop)
        inputs = seen(model, [p.name for p in refit.reference.projections], given_)
        for place in refit.reference.projections[1:]:
            chosen = batch["attention_mask"].bool() if place.layers[0].kind == "encoder" else mask
            (x, y), (w,) = inputs[place.name][0], refit.reference.runner.recorded_with_weights(0)[2][place.name]
            kept = place.kept(drop)
            new, _ = brute(
                x[chosen][:, kept], y[chosen], w[chosen], place.weight[kept], place.bias, 0.1, place.has_bias
            )
            torch.testing.assert_close(weights.by_module[place.name][0][kept], new, rtol=1e-7, atol=1e-8)
