"""Metrics, intervals and tests against independent computations."""

import math

import numpy as np
import pytest
import torch

import headprune as hp
from headprune.evaluation import Measurement, compare, evaluate, interval, mcnemar
from tests.zoo import bert, gpt2, labelled, text


def measured(correct: np.ndarray) -> Measurement:
    return Measurement({}, 1 - correct.astype(float), correct.astype(float), np.ones(len(correct), dtype=int))


def test_accuracy_and_f1_by_hand() -> None:
    model, _ = bert()
    batch = labelled(model, text(rows=12))
    found = evaluate(model, [{k: v[i : i + 5] for k, v in batch.items()} for i in (0, 5, 10)])
    with torch.no_grad():
        guess = model(**batch).logits.argmax(-1)
    y = batch["labels"]
    assert found.metrics["accuracy"] == pytest.approx((guess == y).float().mean().item())
    by_class = []
    for c in y.unique():
        tp = ((guess == c) & (y == c)).sum().item()
        by_class.append(2 * tp / ((guess == c).sum().item() + (y == c).sum().item()))
    assert found.metrics["f1"] == pytest.approx(sum(by_class) / len(by_class))


def test_perplexity_by_hand() -> None:
    model, _ = gpt2()
    batch = labelled(model, text(rows=4))
    found = evaluate(model, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)])
    with torch.no_grad():
        log = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    nll = [
        -log[i, t, batch["input_ids"][i, t + 1]].item()
        for i in range(4)
        for t in range(8)
        if batch["labels"][i, t + 1] != -100
    ]
    assert found.metrics["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    assert found.tokens.sum() == len(nll)


def test_identical_models_do_not_differ() -> None:
    same = measured(np.random.default_rng(0).random(200) > 0.2)
    change = compare(same, same, "accuracy")
    assert (change.value, change.low, change.high, change.p_value) == (0, 0, 0, 1)
    assert change.verdict == "no measurable change"


def test_verdicts() -> None:
    good, bad = measured(np.ones(100)), measured(np.r_[np.ones(80), np.zeros(20)])
    assert compare(good, bad, "accuracy").verdict == "worse"
    assert compare(bad, good, "accuracy").verdict == "better"
    assert compare(good, bad, "perplexity").verdict == "worse"
    assert compare(bad, good, "perplexity").value < 0


def test_the_paired_interval_matches_theory() -> None:
    rng = np.random.default_rng(0)
    before = rng.random(2000) < 0.8
    after = np.where(rng.random(2000) < 0.1, rng.random(2000) < 0.5, before)
    change = compare(measured(before), measured(after), "accuracy")
    difference = after.astype(float) - before
    half = 1.96 * difference.std() / 2000**0.5
    assert change.value == pytest.approx(difference.mean())
    assert change.low == pytest.approx(difference.mean() - half, abs=0.1 * half)
    assert change.high == pytest.approx(difference.mean() + half, abs=0.1 * half)


def test_the_interval_covers() -> None:
    """Of 200 samples from a known truth, about 95 % of the intervals hold it."""
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(200):
        low, high = interval(measured(rng.random(150) < 0.7), "accuracy", seed)
        held += low <= 0.7 <= high
    assert 180 <= held <= 198


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (10, 10, 1.0), (1, 8, 0.0390625)])
def test_mcnemar(lost: int, gained: int, p: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(p)
    tail = sum(math.comb(lost + gained, k) for k in range(min(lost, gained) + 1)) / 2 ** (lost + gained)
    assert mcnemar(lost, gained) == pytest.approx(min(1.0, 2 * tail))


def test_nothing_to_evaluate() -> None:
    with pytest.raises(hp.HeadPruneError, match="no examples"):
        evaluate(bert()[0], [])


def test_a_loss_that_is_not_finite() -> None:
    model, example = bert()
    with torch.no_grad():
        model.classifier.bias[0] = float("inf")
    with pytest.raises(hp.HeadPruneError, match="loss of example 0"):
        evaluate(model, [labelled(model, example)])


def test_a_models_own_loss_does_not_change_its_perplexity() -> None:
    import transformers as tf

    from tests.zoo import _common, randomise

    config = tf.MixtralConfig(**_common("sdpa", num_key_value_heads=2, num_local_experts=2, output_router_logits=True))
    config.router_aux_loss_coef = 1.0
    model = randomise(tf.MixtralForCausalLM(config))
    batch = labelled(model, text(rows=4))
    with_router = evaluate(model, [batch]).metrics
    model.config.output_router_logits = False
    without = evaluate(model, [batch]).metrics
    assert with_router["perplexity"] == pytest.approx(without["perplexity"], rel=1e-4)
