"""Models for tests of repair, with an example in float64, and comparisons of fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.inputs import call
from headprune.reference import OutputProjection, calibrate, measure
from headprune.repairing import Refit, Weights
from headprune.repairing.step import LeftOut
from headprune.repairing.steps import logits
from headprune.running import exact_attention
from tests.support import zoo
from tests.support.problems import small
from tests.support.zoo import Made, randomise, sizes, text


def refit_of(
    model: nn.Module,
    layers: Sequence[hp.AttentionLayer],
    batches: Sequence[Any],
    *,
    ridge: float | None = None,
    values: bool = True,
    mixtures: bool = True,
    answers: bool = False,
) -> Refit:
    """Fits to the model as it is now."""
    fits = ridge != math.inf
    calibration = calibrate(model, layers, batches, values=values and fits, mixtures=mixtures and fits)
    return Refit(measure(calibration, answers=answers), ridge)


def fit_logits(refit: Refit, drop: Heads) -> Weights:
    """Every layer fitted for itself, and then the last step, to all examples."""
    start = refit.fitted(drop)
    found = logits.fit(refit.with_answers(), drop, start)
    return replace(start, note=found.note) if isinstance(found, LeftOut) else found


def albert() -> Made:
    config = tf.AlbertConfig(**sizes("sdpa", embedding_size=16))
    return randomise(tf.AlbertForSequenceClassification(config)), text()


def xlnet(rows: int = 3, length: int = 9) -> Made:
    config = tf.XLNetConfig(vocab_size=100, d_model=32, n_head=4, n_layer=2, d_inner=48)
    return randomise(tf.XLNetForSequenceClassification(config)), text(rows, length)


def square() -> Made:
    """As many rows as tokens, so that shapes do not tell which dimension is the batch."""
    return xlnet(5, 5)


MODELS: dict[str, Callable[[], Made]] = {
    **{n: zoo.ZOO[n] for n in ("bert", "gpt2", "llama", "vit", "t5", "mha", "torch_transformer")},
    "albert": albert, "xlnet": xlnet, "xlnet, square": square,
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Any, list[hp.AttentionLayer]]:
    model, example = MODELS[name]()
    model = model.double()
    example = (
        {k: v.double() if v.is_floating_point() else v for k, v in example.items()}
        if isinstance(example, dict)
        else tuple(t.double() if t.is_floating_point() else t for t in example)
    )
    return model, example, hp.find_attention(model, example)


def batch_of(example: Any) -> Any:
    """Inputs that are a tuple come in a pair with labels."""
    return (example, torch.zeros(3)) if isinstance(example, tuple) else example


def some(layers: Sequence[hp.AttentionLayer]) -> Heads:
    """A unit of every layer but the first, another each time."""
    return {a.name: list(a.units[i % len(a.units)]) for i, a in enumerate(layers) if i}


def padding_of(name: str, place: OutputProjection, example: Any) -> Tensor | None:
    """Real tokens by hand; of XLNet's the tokens come first."""
    if name in ("vit", "mha", "torch_transformer"):
        return None
    if name == "t5":
        return example["attention_mask"].bool() if place.layers[0].kind == "encoder" else None
    mask = example["attention_mask"].bool()
    return mask.T if name.startswith("xlnet") else mask


def padded(batch: Mapping[str, Tensor], more: int, left: bool) -> dict[str, Tensor]:
    extra = torch.zeros(len(batch["input_ids"]), more, dtype=torch.long)
    both = {"input_ids": extra + 7, "attention_mask": extra}
    return {
        k: torch.cat([both[k], v] if left else [v, both[k]], 1) if k in both else v for k, v in batch.items()
    }  # fmt: skip


def close(a: Weights, b: Weights, most: float = 1e-6) -> None:
    assert a.ridges == b.ridges
    assert a.by_module.keys() == b.by_module.keys() != set()
    for name, (weight, bias) in a.by_module.items():
        torch.testing.assert_close(weight, b.by_module[name][0], rtol=most, atol=most)
        if bias is not None:
            torch.testing.assert_close(bias, b.by_module[name][1], rtol=most, atol=most)


def classifier(
    classes: int = 3, problem: str | None = None, heads: int = 3
) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    config = tf.BertConfig(
        vocab_size=100, hidden_size=8 * heads, num_attention_heads=heads, num_hidden_layers=2, intermediate_size=32,
        pad_token_id=0, num_labels=classes, problem_type=problem,
    )  # fmt: skip
    model = zoo.randomise(tf.BertForSequenceClassification(config)).double()
    return model, [zoo.text(rows, 7, seed=rows) for rows in (12, 6, 9, 5)]


def attended_by_hand(refit: Refit, example: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """W_O's inputs and what heads attend to ``[..., heads, directions]``, by module, each called once.

    Of a layer at a time, every column of every head's values becomes one direction, so that W_O sees the same number in
    all of a head's inputs.
    """
    found = {}
    with torch.no_grad(), exact_attention(refit.model):
        model = refit.model.eval()
        for place in refit.reference.projections:
            values = place.values
            assert values is not None
            module: Any = model.get_submodule(values.name)
            seen: list[Tensor] = []
            handle = model.get_submodule(place.name).register_forward_pre_hook(
                lambda m, args, seen=seen: seen.append(args[0].clone())
            )
            own = [(p, p.clone()) for p in module.parameters()]
            call(model, example)
            columns = [f for features in set(place.layers[0].values.features) for f in features]  # type: ignore[union-attr]
            for direction in refit.reference.directions.along[place.name].T:
                if type(module).__name__ == "Conv1D":
                    module.weight[:, columns] = direction[:, None].to(module.weight)
                else:
                    module.weight[columns] = direction.to(module.weight)
                if module.bias is not None:
                    module.bias[columns] = 0
                call(model, example)
            handle.remove()
            for parameter, old in own:
                parameter.copy_(old)
            first, *others = seen
            features = place.layers[0].output_projection.features  # type: ignore[union-attr]
            each = [torch.stack([x[..., f] for f in features], dim=-2) for x in others]
            for x in each:
                torch.testing.assert_close(x, x[..., :1].expand_as(x))
            found[place.name] = first, torch.stack([x[..., 0] for x in each], dim=-1)
    return found


def attending_alike() -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Tensor]]:
    """Of the first layer, head 0 attends as head 1 does and is of no use; batches to fit to, and another."""
    model, _ = small()
    attention: Any = model.bert.encoder.layer[0].attention  # type: ignore[union-attr, index]
    with torch.no_grad():
        for p in (attention.self.query, attention.self.key):
            p.weight[8:16] = p.weight[:8]
            p.bias[8:16] = p.bias[:8]
        attention.output.dense.weight[:, :8] = 0
    return model, [text(20, 7, seed=s) for s in (1, 2, 3)], text(10, 7, seed=9)


def check_promise(refit: Refit, weights: Weights, example: Any, mask: Tensor | None) -> None:
    """Of the first layer: its error with the weights written, counted by hand."""
    place = refit.reference.projections[0]
    seen: list[Tensor] = []
    told = refit.reference.runner.recorded_with_weights(0)[2][place.name][0]
    with torch.no_grad(), refit.reference.runner.deterministic_eval():
        handle = refit.model.get_submodule(place.name).register_forward_hook(lambda m, a, out: seen.append(out.clone()))
        call(refit.model, example)
        with refit.applied(weights):
            call(refit.model, example)
        handle.remove()
    chosen = torch.ones(seen[0].shape[:-1], dtype=torch.bool) if mask is None else mask
    share = (told[chosen] / told[chosen].sum())[:, None]
    y, found = (out[chosen] for out in seen)
    spread = (share * (y - (share * y).sum(0)) ** 2).sum()
    facts = weights.facts[place.layers[0].name]
    assert facts.values
    assert float((share * (y - found) ** 2).sum() / spread) == pytest.approx(facts.after, rel=1e-5, abs=1e-9)


def fitted(model: nn.Module, batches: Sequence[Any], ridge: float | None = None) -> Weights:
    layers = hp.find_attention(model, batches[0])
    return refit_of(model, layers, batches, ridge=ridge, mixtures=False).fitted(some(layers))
