"""Scoring problems made by hand: with a store that remembers, or that fails on the way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.inputs import first_rows
from headprune.scoring import METHODS
from tests.support.zoo import ZOO, albert, labelled, randomise, sizes, swin, text


def small(heads: int = 3, layers: int = 2) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A BERT of a few heads in float64, and three batches of different sizes."""
    shape = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": layers}
    config = tf.BertConfig(**sizes("sdpa", **shape, intermediate_size=32))
    model = randomise(tf.BertForSequenceClassification(config)).double()
    return model, [labelled(model, text(rows, 7, seed=rows), seed=rows) for rows in (4, 2, 3)]


def double(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the zoo in float64, and its example with labels."""
    model, example = (ZOO | {"swin": swin, "albert": albert})[name]()
    batch = labelled(model, example)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """Of every example."""
    return F.cross_entropy(getattr(output, "logits", output), labels, reduction="none")


class Sum(nn.Module):
    """Attention whose heads write to outputs of their own, so that each adds to the loss alone."""

    def __init__(self, heads: int = 8, width: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(heads * width, heads * width) for _ in range(4))
        randomise(self)
        self.o.weight.data = torch.block_diag(*(self.o.weight.data[:width, :width],) * heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def planted(dead: Sequence[int], strong: Sequence[int] = ()) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Any]:
    """A model with heads that give nothing and heads that give much, its own outputs as labels, and the squared error."""
    model = Sum()
    for heads, factor in ((dead, 0.0), (strong, 3.0)):
        for h in heads:
            model.o.weight.data[:, 4 * h : 4 * h + 4] *= factor
    x = torch.randn(24, 5, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        batches = [(part, model(part)) for part in x.split(8)]
    return model, batches, lambda out, labels: ((out - labels) ** 2).flatten(1).mean(dim=1)


def without(model: nn.Module, batches: Sequence[dict[str, Tensor]], kept: Sequence[bool]) -> float:
    """transformers' own mean loss over all batches with W_O's columns zeroed: no gate, no hook."""
    silent, heads = copy.deepcopy(model), iter(kept)
    with torch.no_grad():
        for layer in hp.find_attention(model, batches[0]):
            for columns in layer.output_projection.features:
                if not next(heads):
                    output_weight(silent, layer)[0][:, list(columns)] = 0
        rows = [len(b["labels"]) for b in batches]
        return sum(silent(**b).loss.item() * n for b, n in zip(batches, rows, strict=True)) / sum(rows)


def duplicated(model: nn.Module) -> nn.Module:
    """The second head of the first layer made a copy of the first."""
    attention = model.bert.encoder.layer[0].attention
    for part in (attention.self.query, attention.self.key, attention.self.value):
        for p in (part.weight, part.bias):
            p.data[8:16] = p.data[:8]
    attention.output.dense.weight.data[:, 8:16] = attention.output.dense.weight.data[:, :8]
    return model


def error_of(rows: Tensor) -> Tensor:
    """Standard error of a mean over ``rows`` [examples, heads], two more of them counted: the largest deviation, each way."""
    deviations = rows - rows.mean(0)
    most = deviations.abs().amax(0)
    return torch.cat([deviations, most[None], -most[None]]).square().sum(0).sqrt() / len(rows)


def split(batch: dict[str, Any], size: int) -> list[dict[str, Any]]:
    rows = batch["labels"].shape[0]
    return [first_rows({k: v[i:] for k, v in batch.items()}, size) for i in range(0, rows, size)]


def per_example_loss(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """The model's own loss on one example alone: no padding of others, no batch."""
    length = int(row["attention_mask"].sum()) if "attention_mask" in row else None
    if length is not None:
        row = {k: v[:, :length] if v.shape == row["attention_mask"].shape else v for k, v in row.items()}
    labels = row["labels"]
    given = row if model.config.is_encoder_decoder else {k: v for k, v in row.items() if k != "labels"}
    logits = model(**given).logits
    if logits.ndim == 3 and not model.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    probabilities = torch.softmax(logits, -1)[torch.arange(len(labels)), labels.clamp(min=0)]
    return -probabilities[labels != -100].log().mean()


def output_weight(model: nn.Module, layer: hp.AttentionLayer) -> tuple[nn.Parameter, bool]:
    module = model.get_submodule(layer.output_projection.module)
    return module.weight, isinstance(module, nn.Linear)


def scaled(model: nn.Module, layer: hp.AttentionLayer, head: int, factor: float) -> nn.Module:
    """A copy in which a head's columns of W_O are multiplied: what its gate does, without any hook."""
    other = copy.deepcopy(model)
    weight, plain = output_weight(other, layer)
    columns = list(layer.output_projection.features[head])
    (weight if plain else weight.T).data[:, columns] *= factor
    return other


class TokensFirst(nn.Module):
    """Attention that works on (tokens, batch, width) inside."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        q, k, v = (p(x).unflatten(-1, (4, 4)).permute(1, 2, 0, 3) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        return self.head((x + self.o(out)).mean(dim=0))


def unlabelled(batches: Sequence[Any]) -> list[Any]:
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]


def quick(method: str, *settings: str) -> str:
    """A scoring method, with those of the settings that it has."""
    own = [each for each in settings if each.partition("=")[0] in METHODS[method].settings]
    return f"{method}:{','.join(own)}"
