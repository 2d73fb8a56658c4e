"""Heads that were made useless, harmful or equal are found; and scoring under the conditions that models come in."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import headprune as hp
from headprune.scoring import METHODS, Settings, method
from headprune.scoring.base import Estimate
from tests.support.problems import scaled, split
from tests.support.zoo import ZOO, bert, gpt2, labelled, llama, text

SIGNED = ["ablation", "mean-ablation", "integrated-gradients", "shapley"]


@pytest.mark.parametrize("name", SIGNED)
def test_a_harmful_head_has_the_lowest_score(name: str) -> None:
    """Labels that are right without the head, which then shouts: whoever removes it gains."""
    model, example = bert()
    layers = hp.find_attention(model, text(24, 8))
    example = text(24, 8)
    with torch.no_grad(), hp.mask(model, {layers[2].name: [1]}, layers=layers):
        example["labels"] = model(**example).logits.argmax(-1)
    model = scaled(model, layers[2], 1, 8.0)
    with torch.no_grad():  # the others barely say anything
        model.classifier.weight *= 2
    s = hp.score(model, [example], name, layers=layers, settings=Settings(permutations=16))
    assert s.signed
    assert s.values[layers[2].name][1] < 0
    assert int(s.flat().argmin()) == 2 * 4 + 1


def twins() -> tuple[nn.Module, Any, list[hp.AttentionLayer]]:
    """Heads 0 and 3 of the second layer are equal in all their weights."""
    model, example = bert()
    attention = model.bert.encoder.layer[1].attention
    with torch.no_grad():
        for p in (attention.self.query, attention.self.key, attention.self.value):
            p.weight[24:32] = p.weight[:8]
            p.bias[24:32] = p.bias[:8]
        attention.output.dense.weight[:, 24:32] = attention.output.dense.weight[:, :8]
    return model, labelled(model, text(8, 8)), hp.find_attention(model, example)


@pytest.mark.parametrize(
    "name", [m for m in METHODS if m not in ("random", "shapley", "l0", "dsp", "resample-ablation")]
)
def test_equal_heads_have_equal_scores(name: str) -> None:
    model, batch, layers = twins()
    values = hp.score(model, [batch], name, layers=layers).values[layers[1].name]
    torch.testing.assert_close(values[0], values[3], rtol=1e-4, atol=1e-6)


def test_the_fisher_matrix_shows_that_two_heads_are_one() -> None:
    model, batch, layers = twins()
    matrix = hp.score(model, [batch], "fisher", layers=layers).matrix
    correlation = matrix / (matrix.diagonal()[:, None] * matrix.diagonal()).sqrt()
    assert correlation[4, 7] > 0.9999
    others = correlation - torch.eye(12)
    others[4, 7] = others[7, 4] = 0
    assert others.max() < 0.9999


def test_shapley_shares_between_equal_heads() -> None:
    model, batch, layers = twins()
    s = hp.score(model, [batch], "shapley", layers=layers, settings=Settings(permutations=200))
    values, error = s.values[layers[1].name], s.stderr[layers[1].name]
    assert abs(values[0] - values[3]) <= 4 * (error[0] ** 2 + error[3] ** 2).sqrt()


# -- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gradient", "ablation", "fisher", "integrated-gradients"])
def test_half_precision(name: str) -> None:
    """bfloat16 gives float32's scores to its own precision, and sums them in float64."""
    model, _ = llama()
    batch = labelled(model, text(16, 8))
    full = hp.score(model, [batch], name, settings=Settings(steps=8))
    half = hp.score(model.bfloat16(), [batch], name, settings=Settings(steps=8))
    assert half.flat().dtype == torch.float64
    scale = full.flat().abs().max()
    assert ((half.flat() - full.flat()).abs() <= 0.1 * scale).all()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "t5"])
def test_gradient_checkpointing(name: str) -> None:
    """The same scores, from activations that are computed again: blocks run twice, with dropout off."""
    model, example = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    batch = labelled(model, example)
    expected = hp.score(model, [batch], "gradient")
    model.gradient_checkpointing_enable()
    layer = hp.find_attention(model, example)[-1]
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    handle = model.get_submodule(layer.module).register_forward_hook(count)
    scores = hp.score(model, [batch], "gradient", layers=expected.layers)
    handle.remove()
    torch.testing.assert_close(scores.flat(), expected.flat(), rtol=1e-4, atol=1e-6)
    model.gradient_checkpointing_disable()
    checkpointed, runs = runs, 0
    handle = model.get_submodule(layer.module).register_forward_hook(count)
    hp.score(model, [batch], "gradient", layers=expected.layers)
    handle.remove()
    assert checkpointed > runs


def test_gradients_halve_a_batch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from headprune.scoring import gradient

    model, _ = bert()
    batch = labelled(model, text(8, 7))
    expected = hp.score(model, [batch], "gradient")
    original = gradient.slopes

    def small(problem: Any, batch: Any, size: int, at: float = 1.0) -> Any:
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(problem, batch, size, at)

    monkeypatch.setattr(gradient, "slopes", small)
    scores = hp.score(model, [batch], "gradient")
    torch.testing.assert_close(scores.flat(), expected.flat(), rtol=1e-4, atol=1e-6)


def test_the_cache_setting_is_kept() -> None:
    model, example = gpt2()
    assert model.config.use_cache
    hp.score(model, [labelled(model, example)], "ablation")
    assert model.config.use_cache


# -- bad input -----------------------------------------------------------------------------------


def test_the_example_with_a_bad_loss_is_named() -> None:
    model, _ = bert()
    batches = split(labelled(model, text(6, 7)), 2)
    broken = copy.deepcopy(batches)

    def loss_fn(out: Any, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(out.logits, labels, reduction="none")
        return torch.where(out.logits[:, 0] == target, torch.inf, loss)

    with torch.no_grad():
        target = model(**{k: v for k, v in broken[1].items() if k != "labels"}).logits[1, 0]
    for name in ("ablation", "gradient", "shapley", "integrated-gradients"):
        with pytest.raises(hp.HeadPruneError, match=r"example 3 \(in the order given\) is inf"):
            hp.score(model, broken, name, loss_fn=loss_fn, settings=Settings(steps=8))


def test_examples_longer_than_the_model_allows() -> None:
    model, _ = bert()
    fits, long = labelled(model, text(2, 9)), labelled(model, text(2, 9))
    most = model.config.max_position_embeddings
    long = {**long, **{k: torch.ones(2, most + 3, dtype=torch.long) for k in ("input_ids", "attention_mask")}}
    for name in ("gradient", "ablation", "entropy", "l0"):
        with pytest.raises(hp.HeadPruneError, match=f"does not run on.*{most + 3} tokens.*{most} positions"):
            hp.score(model, [fits, long], name, settings=Settings(steps=4))


def test_one_label_only() -> None:
    model, _ = bert()
    batch = {**text(6, 7), "labels": torch.ones(6, dtype=torch.long)}
    for name in ("gradient", "ablation", "fisher", "shapley"):
        assert hp.score(model, [batch], name, settings=Settings(permutations=2)).flat().isfinite().all()


def test_a_single_example_has_no_standard_error_and_says_so() -> None:
    model, _ = bert()
    batch = labelled(model, text(1, 7))
    for name in ("gradient", "ablation", "entropy"):
        s = hp.score(model, [batch], name)
        assert s.flat_stderr().isnan().all()
        assert "single example" in s.details["stderr"]


def test_a_users_own_method() -> None:
    """The example of docs/methods.md, filled in."""

    @method("alternating", unit="nothing")
    def alternating(problem: Any) -> Estimate:
        """Every second head."""
        values = torch.arange(problem.heads, dtype=torch.float64) % 2
        return Estimate(values, torch.zeros_like(values), problem.examples)

    try:
        model, example = bert()
        s = hp.score(model, [labelled(model, example)], "alternating")
        assert s.flat().tolist() == [0, 1] * 6
        assert hp.plan(s, 6).kept == 6
    finally:
        METHODS.pop("alternating")
