"""Models that were pruned in each way, for tests of what people do with a model afterwards."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from tests.support.zoo import Made, bert, gpt2, llama, qwen3, randomise, sizes, t5, vit, whisper


def sliding(attention: str = "sdpa") -> Made:
    """Every other layer sees a window of 4 tokens, so that its cache slides."""
    config = tf.Qwen3Config(
        **sizes(attention, num_key_value_heads=2, head_dim=16), use_sliding_window=True, sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return randomise(tf.Qwen3ForCausalLM(config)), llama()[1]


MODELS: dict[str, Callable[..., Made]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "qwen3": qwen3, "t5": t5, "vit": vit, "whisper": whisper, "sliding": sliding,
}  # fmt: skip
FAMILIES = [name for name in MODELS if name != "sliding"]
KINDS = ("uneven", "emptied", "repaired")


def cases(names: Iterable[str] = FAMILIES, quick: Iterable[str] = FAMILIES, kind: str = "emptied") -> list[Any]:
    """Every model pruned in each way; all but one way of the models in ``quick`` are slow tests."""
    return [
        pytest.param(name, each, marks=() if name in set(quick) and each == kind else pytest.mark.slow)
        for name in names
        for each in KINDS
    ]


def plan(layers: list[hp.AttentionLayer], kind: str) -> dict[str, list[int]]:
    """Which heads go: another number in every layer; ``emptied``: all of the first layer of each kind."""
    drop, first = {}, set()
    for i, layer in enumerate(layers):
        if kind == "emptied" and layer.kind not in first:
            first.add(layer.kind)
            drop[layer.name] = list(range(layer.num_heads))
        elif gone := [h for unit in layer.units[: (i + 1) % len(layer.units)] for h in unit]:
            drop[layer.name] = gone
    return drop


def like(example: dict[str, Tensor], seed: int, rows: int = 24) -> dict[str, Tensor]:
    """A batch of the example's form."""
    generator, batch = torch.Generator().manual_seed(seed), {}
    for name, value in example.items():
        shape = (rows, *value.shape[1:])
        if value.is_floating_point():
            batch[name] = torch.randn(shape, generator=generator)
        elif "mask" in name:
            batch[name] = torch.ones(shape, dtype=torch.long)
        else:
            batch[name] = torch.randint(3, 90, shape, generator=generator)
    return batch


def made_of(made: Made, kind: str) -> tuple[nn.Module, Any, dict[str, list[int]]]:
    """A model pruned in some way, its example, and the heads that it lost."""
    model, example = made
    drop = plan(hp.find_attention(model, example), kind)
    if kind == "repaired":
        done = hp.repair(model, drop, [like(example, seed) for seed in range(3)], values=False, mixtures=False)
        assert done.layers, "nothing was repaired"
    hp.prune(model, drop, example)
    return model, example, drop


@cache
def _changed(name: str, kind: str) -> tuple[nn.Module, Any, dict[str, list[int]]]:
    return made_of(MODELS[name](), kind)


def changed(name: str, kind: str) -> tuple[Any, dict[str, Tensor]]:
    """A copy of a pruned model, and its example."""
    model, example, _ = _changed(name, kind)
    return copy.deepcopy(model), {k: v.clone() for k, v in example.items()}


def heads_gone(name: str, kind: str) -> dict[str, list[int]]:
    """What that model lost."""
    return _changed(name, kind)[2]


def logits(model: Any, example: Any) -> Tensor:
    """A model's answers."""
    with torch.no_grad():
        found: Tensor = model(**example).logits
    return found


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value of ``b``."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def by_transformers(folder: Path, **options: Any) -> Any:
    """What transformers loads from a folder, by the call that its README.md shows."""
    call = re.search(
        r'= (\w+)\.from_pretrained\("[\w/]+"(, trust_remote_code=True)?\)', (folder / "README.md").read_text()
    )
    assert call is not None
    return getattr(tf, call[1]).from_pretrained(folder, trust_remote_code=call[2] is not None, **options).eval()


def needs_code(folder: Path) -> bool:
    """Whether a folder's README.md says that its code has to run."""
    return "trust_remote_code=True" in (folder / "README.md").read_text()


def sidecar(folder: Path) -> dict[str, Any]:
    """A folder's headprune.json."""
    found: dict[str, Any] = json.loads((folder / "headprune.json").read_text())
    return found


def edit(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file, and leave out its checksum; those that become None are removed."""
    document = {
        k: v for k, v in {**json.loads(path.read_text()), **changes}.items() if v is not None and k != "checksum"
    }
    path.write_text(json.dumps(document))


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
