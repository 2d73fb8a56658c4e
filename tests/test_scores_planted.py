"""Heads that were made useless, harmful or equal are found, by gates that are learned too; and scoring under the conditions that models come in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import headprune as hp
from tests.support.problems import duplicated, planted, quick, scaled
from tests.support.zoo import ZOO, bert, labelled, llama, text

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
    s = hp.score(model, [example], quick(name, "permutations=16", "steps=16"), layers=layers)
    assert s.signed
    assert s.values[layers[2].name][1] < 0
    assert int(s.flat().argmin()) == 2 * 4 + 1


@pytest.mark.parametrize("name", [
    "ablation", "mean-ablation", "gradient", "signed-gradient", "fisher", "integrated-gradients", "entropy", "confidence", "output-norm",
    "weight-norm",
])  # fmt: skip
def test_equal_heads_have_equal_scores(name: str) -> None:
    model = duplicated(bert()[0])
    first, second, *_ = hp.score(model, [labelled(model, text(8, 8))], name).flat()
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# -- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gradient", "ablation", "fisher", "integrated-gradients"])
def test_half_precision(name: str) -> None:
    """bfloat16 gives float32's scores to its own precision, and sums them in float64."""
    model, _ = llama()
    batch = labelled(model, text(16, 8))
    full, half = (hp.score(m, [batch], quick(name, "steps=8")) for m in (model, copy.deepcopy(model).bfloat16()))
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
    batch, layers = labelled(model, example), hp.find_attention(model, example)

    def scored() -> tuple[torch.Tensor, int]:
        """The scores, and how often the last layer ran."""
        runs: list[int] = []
        handle = model.get_submodule(layers[-1].module).register_forward_hook(lambda *_: runs.append(1))
        scores = hp.score(model, [batch], "gradient", layers=layers).flat()
        handle.remove()
        return scores, len(runs)

    expected, plain = scored()
    model.gradient_checkpointing_enable()
    scores, checkpointed = scored()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert checkpointed > plain


def test_examples_longer_than_the_model_allows() -> None:
    model, _ = bert()
    fits, long = labelled(model, text(2, 9)), labelled(model, text(2, 9))
    most = model.config.max_position_embeddings
    long = {**long, **{k: torch.ones(2, most + 3, dtype=torch.long) for k in ("input_ids", "attention_mask")}}
    for name in ("gradient", "ablation", "entropy", "l0"):
        with pytest.raises(hp.HeadPruneError, match=f"does not run on.*{most + 3} tokens.*{most} positions"):
            hp.score(model, [fits, long], quick(name, "steps=4"))


def test_a_single_example_has_no_standard_error_and_says_so() -> None:
    model, _ = bert()
    batch = labelled(model, text(1, 7))
    for name in ("gradient", "ablation", "entropy"):
        s = hp.score(model, [batch], name)
        assert s.flat_stderr().isnan().all()
        assert "single example" in s.details["stderr"]


DEAD, STRONG = [1, 4, 6], [0, 5]


@pytest.mark.parametrize(("keep", "seed"), [(None, 0), (5, 1), (3, 2)])
@pytest.mark.parametrize("method", ["l0", "dsp"])
def test_planted_heads(method: str, keep: int | None, seed: int) -> None:
    """Heads that give nothing rank below all others, and those that give much are among the kept."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    s = hp.score(model, batches, f"{method}:keep={keep}" if keep else method, loss_fn=loss_fn, seed=seed)
    order = s.flat().argsort().tolist()
    assert set(order[:3]) == set(DEAD)
    assert set(STRONG) <= set(order[-(keep or 4) :])
    assert s.flat_stderr().isnan().all()
    assert "one training run" in s.details["stderr"]


@pytest.mark.parametrize("keep", [None, 1, 2, 5, 8])
def test_l0_keeps_as_many_as_it_is_told(keep: int | None) -> None:
    model, batches, loss_fn = planted(DEAD, STRONG)
    scores = hp.score(model, batches, f"l0:keep={keep},sparsity=9" if keep else "l0", loss_fn=loss_fn)
    assert scores.details["open"] == pytest.approx(4 if keep is None else keep, abs=0.3)


def test_l0_at_a_price() -> None:
    """The higher the price of a head, the fewer stay open; at none, those that help do."""
    model, batches, loss_fn = planted(DEAD, STRONG)
    methods = [f"l0:sparsity={price},steps=300" for price in (0.0, 0.1, 100.0)]
    free, some, dear = (hp.score(model, batches, method, loss_fn=loss_fn) for method in methods)
    assert free.details["open"] > 7.5 > some.details["open"] > 1.9 > 0.5 > dear.details["open"]
    assert set(some.flat().argsort().tolist()[:3]) == set(DEAD)
