"""The answers that repair looks at: noise of known covariance, padding, and the weights of tokens."""

from typing import Any

import pytest
import torch
import transformers as tf
from headprune.reference.token_weights import across as _across
from headprune.reference.token_weights import noise as _noise
from headprune.reference.token_weights import probe_of
from torch import Tensor

import headprune as hp
from headprune.batches import Rows
from headprune.planning.effects import effects
from headprune.planning.units import Unit
from tests.support.folders import common
from tests.support.problems import small
from tests.support.repairs import refit_of
from tests.support.zoo import randomise, text


def across(root: Tensor, draw: Tensor) -> Tensor:
    """On the sphere of radius sqrt(classes - 1), at right angles to ``root``; row by row."""
    rows = []
    for r, d in zip(root, draw, strict=True):
        rest = d - torch.dot(r, d) * r / torch.dot(r, r)
        rows.append(rest / torch.linalg.vector_norm(rest) * (len(r) - 1) ** 0.5)
    return torch.stack(rows)


def test_the_probe_is_the_fisher_information() -> None:
    """On average the square of its slope at the logits is diag(p) - p p^T."""
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    root = chances.sqrt().expand(200_000, 4)
    draw = torch.randn(root.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    told = _across(root, draw) * root
    slopes = told - chances * told.sum(-1, keepdim=True)  # of sum(told * log_softmax(logits))
    found = slopes.T @ slopes / len(slopes)
    assert torch.allclose(found, chances.diag() - torch.outer(chances, chances), atol=3e-3)
    two = torch.tensor([[0.9, 0.1]], dtype=torch.float64).sqrt()
    for seed in range(3):  # two classes: only the sign is drawn
        draw = torch.randn(1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        told = _across(two, draw) * two
        assert abs(float(told[0, 0] - 0.9 * told.sum())) == pytest.approx((0.9 * 0.1) ** 0.5)


def test_where_an_answer_starts_and_ends_is_no_padding() -> None:
    """An example's tokens matter as much in a padded batch as alone, and what is said of padding matters to none."""
    config = tf.BertConfig(
        vocab_size=100, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=32, pad_token_id=0,
    )  # fmt: skip
    model = randomise(tf.BertForQuestionAnswering(config)).double()
    given_ = text(3, 9)
    given_["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 4 + [0] * 5])
    layers = hp.find_attention(model, given_)
    whole = refit_of(model, layers, [given_])
    alone = [{k: v[i : i + 1, :n] for k, v in given_.items()} for i, n in enumerate((9, 6, 4))]
    apart = refit_of(model, layers, alone)
    for place in whole.reference.projections:
        together = whole.reference.runner.recorded_with_weights(0)[2][place.name][0]
        for i, n in enumerate((9, 6, 4)):
            assert torch.allclose(
                together[i, :n], apart.reference.runner.recorded_with_weights(i)[2][place.name][0][0], rtol=1e-6
            )
    units = [Unit(0.0, i, (h,)) for i, a in enumerate(layers) for h in range(a.num_heads)]
    assert torch.allclose(effects(whole, layers, {}, units), effects(apart, layers, {}, units), rtol=1e-5)


def test_the_weights_of_tokens_are_slopes() -> None:
    """By finite differences of the probe, at two tokens."""
    model, batches = small()
    layers = hp.find_attention(model, batches[0])
    refit = refit_of(model, layers, batches)
    place = refit.reference.projections[1]
    x, slope = refit.reference.slopes(1)[place.name][0]
    given_ = {k: v for k, v in batches[1].items() if k != "labels"}
    module: Any = model.get_submodule(place.name)
    with torch.no_grad():
        chances = model(**given_).logits.softmax(-1)
    told = across(chances.sqrt(), _noise(chances, None, [4, 5])) * chances.sqrt()  # the second batch's examples
    for at in ((0, 1, 3), (1, 0, 5)):
        ends = []
        for step in (1e-5, -1e-5):
            moved = torch.zeros_like(slope)
            moved[at] = step
            handle = module.register_forward_hook(lambda m, a, out, moved=moved: out + moved)
            with torch.no_grad():
                ends.append(float((told * model(**given_).logits.log_softmax(-1)).sum()))
            handle.remove()
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float(slope[at]), rel=1e-5, abs=1e-9)
    assert x.shape[:2] == slope.shape[:2]


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_what_heads_are_ranked_by_is_the_fisher_information_of_such_answers(problem: str) -> None:
    """Of numbers the identity; of a yes or no its variance."""
    config = tf.BertConfig(**common(num_labels=3), problem_type=problem)
    model, batch = tf.BertForSequenceClassification(config), text(400, 7)
    logits = torch.randn(1, 3).expand(400, 3).clone().requires_grad_()
    output = tf.modeling_outputs.SequenceClassifierOutput(logits=logits)
    (slope,) = torch.autograd.grad(probe_of(model, output, batch, 0, Rows()), logits)
    chance = logits[0].detach().sigmoid()
    expected = torch.ones(3) if problem == "regression" else chance * (1 - chance)
    found = slope.T @ slope / 400
    torch.testing.assert_close(found.diagonal(), expected, rtol=0.25, atol=0)
    assert (found - found.diagonal().diag()).abs().max() < 0.2 * float(expected.max())
