"""Every model that the conformance suite runs on, what must be found in it, and the brute force that it is compared with."""

import copy
import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import headprune as hp
from tests.support import odd, textbook
from tests.support.families import built
from tests.support.plain import WIDTH, Attention, model_of, noise
from tests.support.zoo import ZOO, Made, TorchAttention, TorchEncoder, randomise, sizes, text

WRITERS = ("bloom", "mpt", "gpt_oss", "falcon")  # built with a head that writes text


def facts() -> dict[str, dict[str, str]]:
    """The rows of models.csv, and those of transformers' hand-made models once more for eager attention.

    ``layers`` has a letter for the kind of each (encoder, decoder, cross); ``width`` is that of a head; ``*`` stands for anything;
    ``output`` is how W_O's name ends, ``only_masked`` why no head can be removed.
    """
    with (Path(__file__).parent / "models.csv").open(encoding="utf-8") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    eager = [name for name in rows if name in ZOO and name not in ("mha", "torch_transformer")]
    return rows | {f"{name} eager": rows[name] for name in eager}


AS_MANY = sizes("sdpa", num_hidden_layers=2, hidden_size=64, num_attention_heads=8)
GROUPED = sizes("sdpa", num_hidden_layers=2, num_key_value_heads=1)
MORE: dict[str, Callable[[], Made]] = {
    "tokens_first": lambda: (TorchEncoder(batch_first=False, bias=False), noise(3, 6, 32)),
    "transformer_tokens_first": lambda: (nn.Transformer(32, 4, 2, 2, 48), (noise(6, 3, 32), noise(5, 3, 32))),
    "key_bias": lambda: (TorchAttention(), noise(3, 6, 32)),
    "one_key_value_head": lambda: (tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)), text()),
    "as_many_heads_as_wide": lambda: (tf.BertForSequenceClassification(tf.BertConfig(**AS_MANY)), text()),
    "Twice": lambda: (odd.Twice(), noise(2, 5, WIDTH)),
    "BareInResidual": lambda: (odd.BareInResidual(), noise(2, 5, WIDTH)),
}


def is_built(name: str) -> bool:
    """Whether it is a model type of transformers, built by `benchmarks/tiny.py`."""
    kind = name.split()[0]
    return not (kind in ZOO or kind in MORE or kind.replace("_", " ") in textbook.CLASSES or hasattr(odd, kind))


def made(name: str) -> Made:
    """A model with weights that matter, and its example; always the same."""
    torch.manual_seed(0)
    kind, _, attention = name.partition(" ")
    if kind in ZOO:
        return ZOO[kind](attention or "sdpa")
    if kind in MORE:
        model, example = MORE[kind]()
        return randomise(model), example
    if (words := kind.replace("_", " ")) in textbook.CLASSES:
        return textbook.made(words)
    return built(kind, writes=kind in WRITERS) if is_built(name) else (model_of(getattr(odd, kind)), noise(2, 5, WIDTH))


def other(example: Any) -> Any:
    """Other content of the same form; texts and noise are longer, too."""
    if isinstance(example, Mapping) and "input_ids" in example:
        long = text(2, 16, seed=5, decoder=5 * ("decoder_input_ids" in example))
        return {name: long.get(name, value) for name, value in example.items()}
    if isinstance(example, Tensor) and example.is_floating_point():
        return noise(2, 9, example.shape[-1])
    return example


def without(model: nn.Module, layers: Sequence[hp.AttentionLayer], drop: Mapping[str, Sequence[int]]) -> nn.Module:
    """The brute force: a copy whose W_O reads zeros of some heads. A head is a block of W_O's input: nothing else is asked for."""
    silent = copy.deepcopy(model)
    for layer in layers:
        module = silent.get_submodule(layer.module)
        if isinstance(module, Attention):
            module.silent = tuple(drop.get(layer.name, ()))
            continue
        place = silent.get_submodule(layer.mixer or layer.output_projection.module)
        for head in drop.get(layer.name, ()):
            zero = partial(zeroed, head=head, heads=layer.num_heads)
            if layer.concatenates:
                place.register_forward_hook(zero)
            elif layer.mixer:
                place.register_forward_pre_hook(zero)
            else:
                columns = place.weight.data.T if isinstance(place, Conv1D) else place.weight.data
                columns.tensor_split(layer.num_heads, dim=1)[head].zero_()
    return silent


def zeroed(module: nn.Module, args: Any, output: Tensor | None = None, *, head: int, heads: int) -> Tensor:
    """A hook: the features of one head are zero."""
    whole = (args[0] if output is None else output).clone()
    whole.tensor_split(heads, dim=-1)[head].zero_()
    return whole


@torch.no_grad()
def answer(model: nn.Module, example: Any) -> Tensor:
    """The first output, with the same random numbers each time."""
    torch.manual_seed(0)
    if isinstance(example, Mapping):
        output = model(**example)
    else:
        output = model(*example) if isinstance(example, tuple) else model(example)
    return output if isinstance(output, Tensor) else output[0]
