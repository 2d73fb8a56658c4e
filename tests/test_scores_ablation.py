"""Ablation: replayed against plain forwards, filled heads against changed biases, estimates against all examples."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.families import built
from tests.support.problems import per_example_loss, scaled, split
from tests.support.zoo import ZOO, bert, gpt2, labelled, randomise, text


@pytest.mark.parametrize(
    "name", ["albert", "mixtral", "swin", "xlnet", "zamba2", "longformer", "gemma3_text", "bitnet"]
)
def test_replay_of_any_model(name: str) -> None:
    """Layers that run several times, experts, windows: replayed or not, the numbers are a plain forward's."""
    model, example = built(name)
    layers = [a for a in hp.find_attention(model, example) if a.maskable]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        hidden = model(**example)[0]
    target = torch.randn(hidden.shape, generator=generator)

    def loss_fn(out: Any, labels: Tensor) -> Tensor:
        return ((out[0] - labels) ** 2).flatten(1).mean(1)

    scores = hp.score(model, [{**example, "labels": target}], "ablation", loss_fn=loss_fn, layers=layers)
    with torch.no_grad():
        dense = loss_fn(model(**example), target).double()
        for layer in (layers[0], layers[-1]):
            with hp.mask(model, {layer.name: [1]}, layers=layers):
                effect = loss_fn(model(**example), target).double() - dense
            value = scores.values[layer.name][1]
            torch.testing.assert_close(value, effect.mean(), rtol=1e-3, atol=1e-5 * float(dense.mean()))


def test_tiny_divergences_of_a_model_that_is_sure_are_replayed() -> None:
    """They are rounded like the logits that they are computed from: no relative error of theirs can be asked for."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = randomise(tf.BertForSequenceClassification(tf.BertConfig(vocab_size=100, num_labels=2, **sizes)))
    with torch.no_grad():
        model.classifier.bias += torch.tensor([8.0, 0.0])
    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in torch.randint(1, 100, (12, 24)).split(6)
    ]
    scores = hp.score(model, batches, "ablation", distil=True)
    assert 0 < scores.flat().abs().max() < 0.01
    assert scores.details["replayed"] == "every layer"


def test_a_small_memory_budget_changes_nothing() -> None:
    model, example = gpt2()
    batch = labelled(model, example)
    wide = hp.score(model, [batch], "ablation")
    tight = hp.score(model, [batch], "ablation:memory=1")
    torch.testing.assert_close(wide.flat(), tight.flat(), rtol=1e-4, atol=1e-6)


# -- what comes in a head's place --------------------------------------------------------------


HEAD = 2  # of the second layer
ByHand = tuple[nn.Module, list[dict[str, Tensor]], hp.AttentionLayer, list[Tensor], list[Tensor], Tensor]


def by_hand(name: str, method: str) -> ByHand:
    """A model in float64, its examples one by one, a layer, what its W_O reads of each, their losses, and the score of its head."""
    model, example = ZOO[name]()
    batch = labelled(model.double(), example)
    rows, layers, seen = split(batch, 1), hp.find_attention(model, example), list[Tensor]()
    score = hp.score(model, [batch], method, layers=layers, seed=3).values[layers[1].name][HEAD]
    output = model.get_submodule(layers[1].output_projection.module)
    handle = output.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        dense = [per_example_loss(model, r) for r in rows]  # without padding
    handle.remove()
    return model, rows, layers[1], seen, dense, score


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@torch.no_grad()
def test_mean_ablation_is_a_bias(name: str) -> None:
    """A head that gives its mean is a head that is gone, and W_O's bias that holds its mean."""
    model, rows, layer, seen, dense, found = by_hand(name, "mean-ablation")
    columns = list(layer.output_projection.features[HEAD])
    output = model.get_submodule(layer.output_projection.module)
    weight = output.weight if isinstance(output, nn.Linear) else output.weight.T
    shift = weight[:, columns] @ torch.cat(seen)[:, columns].mean(0)
    without = scaled(model, layer, HEAD, 0.0)
    other = without.get_submodule(layer.output_projection.module)
    other.register_forward_hook(lambda module, args, out: out + shift)
    effects = [per_example_loss(without, r) - loss for r, loss in zip(rows, dense, strict=True)]
    torch.testing.assert_close(found, torch.stack(effects).mean(), rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_resample_ablation_against_brute_force() -> None:
    """Draw the tokens here again, and put them into W_O's input by hand, example by example, in float64."""
    model, rows, layer, seen, dense, found = by_hand("bert", "resample-ablation")
    columns = list(layer.output_projection.features[HEAD])
    picked = [int(np.random.default_rng((3, i)).integers(len(tokens), size=1)[0]) for i, tokens in enumerate(seen)]
    pool = torch.stack([tokens[k] for tokens, k in zip(seen, picked, strict=True)])
    effects = []
    for i, row in enumerate(rows):
        # As many draws as the batch has tokens; those of padding are not looked at.
        drawn = np.random.default_rng((4, i)).integers(len(rows), size=row["input_ids"].shape[1])[: len(seen[i])]

        def put(module: nn.Module, args: Any, drawn: Any = drawn) -> tuple[Tensor]:
            hidden = args[0].clone()
            hidden[0][:, columns] = pool[drawn][:, columns]
            return (hidden,)

        handle = model.get_submodule(layer.output_projection.module).register_forward_pre_hook(put)
        effects.append(per_example_loss(model, row) - dense[i])
        handle.remove()
    torch.testing.assert_close(found, torch.stack(effects).mean(), rtol=1e-6, atol=1e-9)


# -- few examples ------------------------------------------------------------------------------


def many(rows: int = 96) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    model, _ = bert()
    return model, split(labelled(model, text(rows, 8)), 16)


DRAWS = 30  # of examples, for every head


def test_few_examples_estimate_all_of_them() -> None:
    """Over draws the estimate is unbiased, and its interval covers the full-data value."""
    model, batches = many()
    layers = hp.find_attention(model, text())
    full = hp.score(model, batches, "ablation", layers=layers).flat()
    values, covered, spread = [], [], []
    for seed in range(DRAWS):
        s = hp.score(model, batches, "ablation:examples=24", layers=layers, seed=seed)
        assert 8 < s.details["ablated"] < 48
        error = torch.tensor(s.details["sampling_stderr"], dtype=torch.float64)
        values.append(s.flat())
        covered.append((s.flat() - full).abs() <= 2.07 * error)
        spread.append(error**2)
        assert (s.flat_stderr() >= error).all()
    mean, error = torch.stack(values).mean(0), torch.stack(values).std(0) / DRAWS**0.5
    assert ((mean - full).abs() <= 4 * error).all()
    assert torch.stack(covered).double().mean() >= 0.92
    stated, actual = torch.stack(spread).mean(), torch.stack(values).var(0).mean()
    assert 0.7 <= stated / actual <= 3


def test_few_examples_are_spent_at_the_cut() -> None:
    model, batches = many()
    s = hp.score(model, batches, "ablation:examples=24,keep=6")
    assert s.details["ablated_most"] > 1.05 * s.details["ablated"]
    assert hp.score(model, batches, "ablation:examples=96").details.get("ablated") is None  # all


def test_a_time_limit() -> None:
    model, batches = many()
    short = hp.score(model, batches, "ablation:time=0.3")
    assert short.details["ablated"] <= 96
    assert "as many as fitted into 0.3 s here" in short.details["estimated"]
    long = hp.score(model, batches, "ablation:time=1000")
    torch.testing.assert_close(long.flat(), hp.score(model, batches, "ablation").flat(), rtol=1e-4, atol=1e-6)
    assert max(long.details["sampling_stderr"]) == 0


# -- losses ------------------------------------------------------------------------------------


def test_without_labels_the_dense_model_is_the_measure() -> None:
    model, example = bert()
    layers = hp.find_attention(model, example)
    scores = hp.score(model, [example], "ablation", layers=layers)
    assert "dense model" in scores.details["loss"]
    assert (scores.flat() > -1e-6).all()  # a divergence is never negative
    layer = layers[1]
    labelled_ = {**example, "labels": torch.tensor([0, 1, 1])}
    torch.testing.assert_close(hp.score(model, [labelled_], "ablation", distil=True).flat(), scores.flat())
    # To second order the divergence is half the Fisher information: many draws of labels, a head nearly open.
    fisher = hp.score(model, [example] * 300, "fisher", layers=layers).values[layer.name][2]
    with torch.no_grad():
        near = scaled(model, layer, 2, 0.97)(**example).logits.double().log_softmax(-1)
        dense = model(**example).logits.double().log_softmax(-1)
    divergence = (dense.exp() * (dense - near)).sum(-1).mean()
    torch.testing.assert_close(divergence, 0.03**2 / 2 * fisher, rtol=0.15, atol=1e-9)


def test_normalised_scores() -> None:
    model, example = bert()
    batch = labelled(model, example)
    plain, unit = (hp.score(model, [batch], method) for method in ("gradient", "gradient:normalise"))
    for layer in plain.layers:
        norm = plain.values[layer.name].norm()
        torch.testing.assert_close(unit.values[layer.name], plain.values[layer.name] / norm)
        torch.testing.assert_close(unit.stderr[layer.name], plain.stderr[layer.name] / norm)
    assert "L2 norm" in unit.unit


def test_fisher_and_signed_gradient_come_from_one_examples_gradients() -> None:
    model, example = bert()
    batch = labelled(model, example)
    rows = [hp.score(model, [r], "signed-gradient").flat() for r in split(batch, 1)]
    each = torch.stack(rows)
    signed, fisher = hp.score(model, [batch], "signed-gradient"), hp.score(model, [batch], "fisher")
    torch.testing.assert_close(signed.flat(), each.mean(0), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(fisher.flat(), (each**2).mean(0), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(fisher.matrix, each.T @ each / 3, rtol=1e-3, atol=1e-6)


def test_scores_say_how_far_other_examples_would_order_the_heads_alike() -> None:
    model, batches = many()
    for method in ("ablation", "ablation:examples=24"):  # of few examples as of all
        s = hp.score(model, batches, method)
        assert 0 < s.details["reliability"] < 1
        assert f"a Spearman correlation of about {s.details['reliability']:.2f}" in s.stability
    unsure = dataclasses.replace(s, details={"reliability": 0.5})
    assert (
        "for 0.8, score on about 400; signs cancel here: gradient" in unsure.stability
    )  # 4 x 96, by Spearman and Brown
    assert "score" not in dataclasses.replace(s, details={"reliability": 0.9}).stability
    assert "more than" in dataclasses.replace(s, details={"reliability": 0.0}).stability
    assert not hp.score(model, batches, "weight-norm").stability
    assert not hp.score(model, batches[:1], "shapley:permutations=2").stability  # over orders, not examples
