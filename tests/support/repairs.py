"""Models for tests of repair, with an example in float64, and comparisons of fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.attention import Heads
from headprune.repairing import OutputProjection, Weights
from tests.support import zoo
from tests.support.zoo import Made, randomise, sizes, text


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
