"""Exported files answer in the engines that they are for as the model does, on inputs of other sizes than the traced ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.decoders import DECODERS, EXAMPLE, bytewise
from tests.support.engines import by_llama_cpp, by_onnxruntime, by_openvino
from tests.support.even import MADE
from tests.support.plain import Attention, noise
from tests.support.zoo import ZOO, randomise, sizes, text

PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino", "gguf": "xllamacpp", "stock": "transformers"}
SUFFIXES = {"onnx": ".onnx", "openvino": "", "gguf": ".gguf", "stock": ""}
# How many units (heads, or key/value groups) go of layer i, which has n.
KINDS: dict[str, Callable[[int, int], int]] = {
    "dense": lambda i, n: 0,
    "uniform": lambda i, n: 1,
    "uneven": lambda i, n: min(1 + i % 2, n - 1),
    "emptied": lambda i, n: n if i == 1 else 1,
    "repaired": lambda i, n: n if i == 1 else 1,
    "first and last emptied": lambda i, n: 0 if i == 1 else n,
    "neighbours emptied": lambda i, n: n if i else 0,
    "neighbours emptied, repaired": lambda i, n: n if i else 1,
}
FOUR = ("uniform", "uneven", "emptied", "repaired")
FAST = {
    ("onnx", "bert", "repaired"),
    ("onnx", "by size", "uniform"),
    ("openvino", "bert", "emptied"),
}  # of those that trace a model
TABLE = [("onnx", name, kind) for name in ZOO for kind in ("uneven", "emptied")]
TABLE += [("onnx", name, kind) for name in ("bert", "llama") for kind in ("dense", "uniform", "repaired")]
TABLE += [("onnx", "mixtral", "dense"), ("onnx", "whisper", "emptied")]
TABLE += [("onnx", name, "uniform") for name in ("by size", "by shape")]
TABLE += [("openvino", name, kind) for name in ("bert", "llama", "vit") for kind in FOUR]
TABLE += [("gguf", name, kind) for name in ("llama", "mistral", "qwen2") for kind in KINDS]
TABLE += [("gguf", name, "dense") for name in DECODERS if name not in ("llama", "mistral", "qwen2")]
TABLE += [("gguf", "biased llama", "emptied")]
TABLE += [("stock", name, kind) for name in ("qwen3", "gemma", "vit") for kind in ("dense", "uniform")]


def mixtral() -> tuple[nn.Module, Any]:
    config = tf.MixtralConfig(**sizes("sdpa", num_key_value_heads=2, num_local_experts=4))
    return randomise(tf.MixtralForCausalLM(config)), text()


class Sized(Attention):
    """As BLIP's: the width of a head is what the input is wide, by the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = self.sizes(x)
        split = (rows, length, self.num_heads, width // self.num_heads)
        attended = F.scaled_dot_product_attention(*(t.reshape(split).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)))
        return self.o(attended.transpose(1, 2).reshape(rows, length, width))

    def sizes(self, x: Tensor) -> torch.Size:
        return x.size()


class SizedByShape(Sized):
    """As most people write it."""

    def sizes(self, x: Tensor) -> torch.Size:
        return x.shape


def sized(attention: type[Sized]) -> tuple[nn.Module, Any]:
    return randomise(nn.Sequential(attention(), nn.LayerNorm(32))), (noise(3, 6, 32),)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **MADE, "mixtral": mixtral, "by size": lambda: sized(Sized), "by shape": lambda: sized(SizedByShape),
}  # fmt: skip


def made(to: str, name: str, kind: str) -> tuple[Any, Any]:
    """A model without the heads that go, and an example."""
    model, example = (DECODERS[name](), EXAMPLE) if to == "gguf" else MODELS[name]()
    layers = hp.find_attention(model, example)
    drop = {
        a.name: sorted(h for unit in a.units[: KINDS[kind](i, len(a.units))] for h in unit)
        for i, a in enumerate(layers)
    }
    if "repaired" in kind:
        batches = [{k: v.roll(n, 0) for k, v in example.items()} for n in range(2)]
        hp.repair(model, drop, batches, values=False, answers=False)
        for projection in (m for n, m in model.named_modules() if n.endswith(("o_proj", "output.dense"))):
            if isinstance(projection.bias, nn.Parameter):  # larger than a repair makes them, so that they count
                projection.bias.data.normal_(generator=torch.Generator().manual_seed(5))
    if kind != "dense":
        hp.prune(model, {a: heads for a, heads in drop.items() if heads}, example)
    return model, example


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found = model(**inputs)
    return [v for v in ([found] if isinstance(found, Tensor) else found.values()) if isinstance(v, Tensor)]


def other(example: Any, names: list[str]) -> dict[str, Tensor]:
    """Inputs of twice as many rows, and twice as long where they have a length; text is padded at either end."""
    given = example if isinstance(example, dict) else dict(zip(names, example, strict=True))
    times = {1: (2,), 2: (2, 2), 3: (2, 2, 1), 4: (2, 1, 1, 1)}
    twice = {k: v.repeat(times[v.ndim]) for k, v in given.items()}
    if "input_features" in twice:
        twice["input_features"] = given["input_features"].repeat(2, 1, 1)
    if "attention_mask" in twice:
        twice["attention_mask"][0, :5] = 0
        twice["token_type_ids"] = torch.zeros_like(twice["input_ids"])
    return twice


def check(own: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> None:
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize(
    ("to", "name", "kind"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in ("onnx", "openvino") and row not in FAST))
        for row in TABLE
    ],
)
def test_the_engine_gives_the_models_answers(to: str, name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[to])
    model, example = made(to, name, kind)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    coder = bytewise() if to == "gguf" else None
    done = hp.export(model, tmp_path / f"file{SUFFIXES[to]}", to, processor=coder)
    assert done.proved
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    if to == "gguf":
        return check_text(done.path, model, coder)
    if to == "stock":
        plain = type(model).from_pretrained(done.path).eval()
        assert not {"auto_map", "headprune"} & json.loads((done.path / "config.json").read_text()).keys()
        return check(outputs(plain, other(example, [])), outputs(model, other(example, [])), 1e-5)
    inputs = other(example, list(done.facts["inputs"]))
    assert all(shape[0] == "batch" for shape in done.facts["inputs"].values())
    if "input_ids" in inputs:
        assert done.facts["inputs"]["input_ids"] == ["batch", "length"]
    own = (by_onnxruntime if to == "onnx" else by_openvino)(done.path, inputs)
    return check(own, outputs(model, {k: v for k, v in inputs.items() if k in done.facts["inputs"]}))


def check_text(file: Path, model: Any, coder: Any) -> None:
    """llama.cpp writes the same greedy text, with the same log-probabilities at every token."""
    prompt = coder("Once upon a time")["input_ids"]
    size = model.config.vocab_size
    # llama.cpp tells a token only once it is whole text.
    halves = [i for i in range(size) if i >= len(coder) or i < 2 or not coder.decode([i]).isascii()]
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, suppress_tokens=halves, pad_token_id=0
    )
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0].log_softmax(-1)
    steps = by_llama_cpp(file, prompt, 20, logit_bias=[[i, False] for i in halves])
    assert [token for token, _ in steps] == ids[0, len(prompt) :].tolist()
    for place, (_, told) in enumerate(steps, len(prompt) - 1):
        close = torch.tensor(list(told.values()))
        torch.testing.assert_close(close, expected[place, list(told)], rtol=0, atol=2e-3)
