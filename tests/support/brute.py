"""Repair by brute force: what W_O reads and gives by hooks, how much tokens matter by autograd, least squares by another solver."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support import zoo
from tests.support.zoo import Made, randomise, sizes, text

RIDGES = (1e-4, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # that are tried where none is given
Drop = dict[str, list[int]]


def classifier(classes: int = 2, problem: str | None = None, rows: Sequence[int] = (12, 6, 9, 5)) -> Made:
    """A BERT of two layers of three heads, and batches of different sizes."""
    small = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    config = tf.BertConfig(**sizes("sdpa", **small, num_labels=classes, problem_type=problem))
    model = randomise(tf.BertForSequenceClassification(config)).double()
    return model, [text(count, 7, seed=count) for count in rows]


def example_of(name: str, rows: int = 6) -> Any:
    def noise(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    if name == "vit":
        return {"pixel_values": noise(1, 8, 8)}
    if name == "mha":
        return noise(6, 32), torch.arange(6).expand(rows, 6) > torch.arange(3, 3 + rows)[:, None]
    if name == "tokens first":  # as many as examples, so that shapes do not tell
        return noise(rows, 32), torch.zeros(rows, rows, dtype=torch.bool)
    if name == "torch_transformer":
        return noise(6, 32), noise(5, 32)
    return text(rows, rows if name == "xlnet, square" else 9, decoder=5 if name == "t5" else 0)


def model_of(name: str, rows: int = 6) -> tuple[nn.Module, Any]:
    """A tiny model in float64, and some examples."""
    two = sizes("sdpa", num_hidden_layers=2)
    others: dict[str, Callable[[], nn.Module]] = {
        # PyTorch's order of dimensions; one attention module that runs three times.
        "tokens first": lambda: zoo.TorchEncoder(batch_first=False),
        "albert": lambda: tf.AlbertForSequenceClassification(tf.AlbertConfig(**sizes("sdpa", embedding_size=16))),
        # Tokens come before the examples, and W_O is no module.
        "xlnet": lambda: tf.XLNetForSequenceClassification(
            tf.XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=48)
        ),
        # Where an answer starts and ends: tokens are the classes, and padding is none.
        "answering": lambda: tf.BertForQuestionAnswering(tf.BertConfig(**two)),
        "numbers": lambda: classifier(3, "regression")[0],
        "labels": lambda: classifier(3, "multi_label_classification")[0],
    }
    model = others.get(name.removesuffix(", square"), lambda: zoo.ZOO[name]()[0])()
    return randomise(model).double(), example_of(name, rows)


def kl(dense: Tensor, now: Tensor) -> float:
    """Mean divergence of answers from the dense model's."""
    return float((dense.softmax(-1) * (dense.log_softmax(-1) - now.log_softmax(-1))).sum(-1).mean())


def rows_of(example: Any, index: Any) -> Any:
    """Some rows of an example."""
    if isinstance(example, Mapping):
        return {name: value[index] for name, value in example.items()}
    return tuple(value[index] for value in example) if isinstance(example, tuple) else example[index]


def size_of(example: Any) -> int:
    first = next(iter(example.values())) if isinstance(example, Mapping) else example
    return len(first[0] if isinstance(first, tuple) else first)


def batch_of(example: Any) -> Any:
    """Inputs that are a tuple come in a pair with labels."""
    return (example, torch.zeros(size_of(example))) if isinstance(example, tuple) else example


def repeated(example: Any, count: int = 100) -> Any:
    """At least so many examples, with which any gain is believed."""
    return rows_of(example, torch.arange(max(count, size_of(example) + 1)) % size_of(example))


def padded(batch: Mapping[str, Tensor], more: int, left: bool = False) -> dict[str, Tensor]:
    extra = torch.zeros(len(batch["input_ids"]), more, dtype=torch.long)
    both = {"input_ids": extra + 7, "attention_mask": extra}
    return {k: torch.cat([both[k], v] if left else [v, both[k]], 1) if k in both else v for k, v in batch.items()}


def run(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def logits(model: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        output = run(model, example)
    found: Tensor = output.logits if hasattr(output, "logits") else output
    return found


def some_heads(layers: Sequence[hp.AttentionLayer]) -> Drop:
    """A unit of every layer but the first, another each time; of the first, if there is but one."""
    return {a.name: list(a.units[i % len(a.units)]) for i, a in enumerate(layers) if i or len(layers) == 1}


def repaired(model: nn.Module, drop: Any, *batches: Any, **given: Any) -> tuple[nn.Module, hp.Repair]:
    """A copy that was repaired; by default what does better on the same examples is kept."""
    mended = copy.deepcopy(model)
    if "choose" not in given:
        given["choose"] = [batch_of(repeated(batch)) for batch in batches[:1]]
    return mended, hp.repair(mended, drop, [batch_of(batch) for batch in batches], **given)


# -- weights -----------------------------------------------------------------------------------------


def matrix(model: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """A linear module's weight ``[in, out]`` and bias, copied; the values' of PyTorch's attention are part of a larger one."""
    if name.endswith("v_proj") and isinstance(
        owner := model.get_submodule(name[: -len(".v_proj")]), nn.MultiheadAttention
    ):
        return owner.in_proj_weight.chunk(3)[2].T.detach().clone(), owner.in_proj_bias.chunk(3)[2].detach().clone()
    module: Any = model.get_submodule(name)
    weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
    return weight.detach().clone(), None if module.bias is None else module.bias.detach().clone()


def output_of(model: nn.Module, layer: hp.AttentionLayer) -> tuple[Tensor, Tensor | None]:
    """W_O's weight and bias."""
    assert layer.output_projection
    return matrix(model, layer.output_projection.module)


def columns_of(layer: hp.AttentionLayer, heads: Sequence[int]) -> list[int]:
    """W_O's inputs of some heads, in rising order."""
    assert layer.output_projection
    return sorted(f for h in heads for f in layer.output_projection.features[h])


def kept_heads(layer: hp.AttentionLayer, drop: Drop) -> list[int]:
    return [h for h in range(layer.num_heads) if h not in drop.get(layer.name, [])]


def alike(one: nn.Module, other: nn.Module, most: float = 1e-6) -> None:
    """All weights are equal up to rounding."""
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=most, atol=most)


# -- tokens ------------------------------------------------------------------------------------------


@dataclass
class Tokens:
    """What goes through one W_O: inputs ``[tokens, in]``, outputs, how much each matters, and whose it is; padding left out."""

    x: Tensor
    y: Tensor
    weight: Tensor
    example: Tensor

    @property
    def share(self) -> Tensor:
        return (self.weight / self.weight.sum())[:, None]

    def of(self, chosen: Tensor) -> Tokens:
        return Tokens(self.x[chosen], self.y[chosen], self.weight[chosen], self.example[chosen])

    def spread(self) -> float:
        """The outputs' variance."""
        return float((self.share * (self.y - (self.share * self.y).sum(0)) ** 2).sum())

    def error(self, found: Tensor) -> float:
        """Squared error of other outputs, as a share of the variance."""
        return float((self.share * (self.y - found) ** 2).sum()) / self.spread()


def probe(model: Any, output: Any, real: Tensor | None, first: int) -> Tensor:
    """A random projection of the answers, whose slope squared is on average the Fisher information.

    Noise goes by an example's number; with two classes only a sign is drawn.
    """
    answers = output.logits if hasattr(output, "logits") else output
    total = answers.new_zeros(())
    for i, row in enumerate(answers):
        own = row if real is None or row.ndim == 1 else row[real[i]]
        draw = torch.randn(own.shape, generator=torch.Generator().manual_seed(first + i)).to(own)
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        if problem == "multi_label_classification":  # a yes or no's variance
            chance = own.detach().sigmoid()
            total = total + (draw * (chance * (1 - chance)).sqrt() * own).sum()
        elif hasattr(output, "logits") and problem != "regression":
            root = own.detach().softmax(-1).sqrt()
            rest = draw - root * (root * draw).sum(-1, keepdim=True)
            rest = rest / rest.norm(dim=-1, keepdim=True) * (own.shape[-1] - 1) ** 0.5
            total = total + (rest * root * own.log_softmax(-1)).sum()
        else:
            total = total + (draw * own).sum()
    return total  # type: ignore[no-any-return]


def real_of(model: Any, example: Any, kind: str) -> Tensor | None:
    """Which tokens of a kind of layer are no padding; None: all."""
    if not isinstance(example, Mapping) or "input_ids" not in example:
        return None
    if kind == "encoder" or not model.config.is_encoder_decoder:
        return example["attention_mask"].bool()  # type: ignore[no-any-return]
    if "labels" in example:
        found: Tensor = example["labels"] != -100
        return found
    mask = example.get("decoder_attention_mask")
    return None if mask is None else mask.bool()


def tokens_of(model: nn.Module, layers: Sequence[hp.AttentionLayer], batches: Sequence[Any]) -> dict[str, Tokens]:
    """Of every layer, in a model as it is now."""
    found: dict[str, list[Tokens]] = {layer.name: [] for layer in layers}
    first = 0
    for example in batches:
        seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {layer.name: [] for layer in layers}
        handles = [_watch(model, layer, seen[layer.name]) for layer in layers]
        with torch.enable_grad():
            number = probe(model, run(model, example), real_of(model, example, "decoder"), first)
        for handle in handles:
            handle.remove()
        size = size_of(example)
        for layer in layers:
            slopes = torch.autograd.grad(number, [delta for *_, delta in seen[layer.name]], retain_graph=True)
            real = real_of(model, example, layer.kind)
            for (x, y, _), slope in zip(seen[layer.name], slopes, strict=True):
                rows = torch.arange(first, first + size).repeat_interleave(x[..., 0].numel() // size)
                chosen = torch.ones(len(rows), dtype=torch.bool) if real is None else real.flatten()
                flat = (t.flatten(0, -2)[chosen] for t in (x, y, slope))
                x, y, slope = flat
                found[layer.name].append(Tokens(x, y, slope.norm(dim=-1), rows[chosen]))
        first += size
    return {
        name: Tokens(*(torch.cat([getattr(part, key) for part in parts]) for key in ("x", "y", "weight", "example")))
        for name, parts in found.items()
    }


def _watch(model: nn.Module, layer: hp.AttentionLayer, seen: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Note W_O's input and output, and something that is added to the output, to take slopes at."""
    assert layer.output_projection
    name = layer.output_projection.module
    owner = model.get_submodule(name.rpartition(".")[0])

    def see(module: nn.Module, args: Any, out: Any) -> Any:
        y = out[0] if isinstance(out, tuple) else out
        x = args[0]
        if module is owner:  # PyTorch's own attention reads W_O's weights without calling it: its input is solved for
            weight, bias = matrix(model, name)
            x = (y - bias) @ torch.linalg.pinv(weight)
        delta = torch.zeros_like(y, requires_grad=True)
        seen.append((x.detach(), y.detach(), delta))
        return (y + delta, *out[1:]) if isinstance(out, tuple) else y + delta

    module = owner if isinstance(owner, nn.MultiheadAttention) else model.get_submodule(name)
    return module.register_forward_hook(see)


# -- least squares -------------------------------------------------------------------------------------


def ridge_regression(
    tokens: Tokens, old: Tensor, old_bias: Tensor, ridge: float, bias: bool = True, variance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Towards the old weights, the bias free: stacked tokens with rows for the pull, by an SVD.

    Args:
        ridge: As a share of the mean variance of an input (or of another ``variance``); infinite for the old weights.
    """
    if ridge == math.inf:
        return old, old_bias
    x, y, share = tokens.x, tokens.y, tokens.share
    mean = (share * x).sum(0) if bias else torch.zeros_like(x[0])
    own = float((share * (x - mean) ** 2).sum(0).mean()) if variance is None else variance
    ones = torch.full((len(x), 1), float(bias), dtype=x.dtype)
    left = share.sqrt() * torch.cat([x, ones], 1)
    right = share.sqrt() * (y - x @ old - old_bias)
    pull = torch.eye(x.shape[1] + 1, dtype=x.dtype)[:-1] * (ridge * own) ** 0.5
    rows = torch.cat([left, pull]), torch.cat([right, torch.zeros(len(pull), y.shape[1], dtype=y.dtype)])
    found = torch.linalg.lstsq(*rows, driver="gelsd").solution
    return old + found[:-1], old_bias + found[-1] * float(bias)


def best_ridge(tokens: Tokens, old: Tensor, old_bias: Tensor, bias: bool) -> float:
    """By cross-validation on every other example; infinite where the old weights are as good."""

    def held_out(ridge: float) -> float:
        total = 0.0
        for fold in (0, 1):
            rest, own = (tokens.of(tokens.example % 2 == i) for i in (1 - fold, fold))
            weight, free = ridge_regression(rest, old, old_bias, ridge, bias)
            total += float((own.weight[:, None] * (own.y - own.x @ weight - free) ** 2).sum())
        return total

    return min((math.inf, *RIDGES), key=held_out)


def squad(prediction: str, reference: str) -> tuple[float, float]:
    """Exact match and F1 of one answer, written down once more."""
    p, r = (re.findall(r"[a-z0-9]+", t.lower().replace(",", "").replace(".", "")) for t in (prediction, reference))
    p, r = ([w for w in words if w not in ("the", "a", "an")] for words in (p, r))
    common = sum((Counter(p) & Counter(r)).values())
    return float(p == r), 2 * common / (len(p) + len(r)) if common else float(p == r == [])
