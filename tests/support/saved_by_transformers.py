"""Writes pruned folders with the transformers that is installed, for tests that later ones load them.

``tests/support/saved_by_transformers/VERSION.zip`` was written by it in environments of these versions:

    python -m venv old && old/bin/pip install torch==2.13.0 transformers==VERSION && old/bin/pip install -e .
    old/bin/python -m tests.support.saved_by_transformers tests/support/saved_by_transformers/VERSION.zip

The code in the folders (modeling_headprune.py) was deleted from all but 5.0.0/t5: it is 40 KB each time, and differs in names.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import transformers as tf
from safetensors.torch import save_file
from torch import Tensor

import headprune as hp
from tests.support.stays import like, logits, plan
from tests.support.zoo import Made, randomise, text

WORDS = 30


def _common() -> dict[str, int]:
    return {
        "vocab_size": WORDS, "hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 12,
        "pad_token_id": 0, "max_position_embeddings": 24,
    }  # fmt: skip


def _text(decoder: int = 0) -> dict[str, Tensor]:
    return {k: v if "mask" in k else v % WORDS for k, v in text(decoder=decoder).items()}


def _like(example: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    return {k: v if "mask" in k else v % WORDS for k, v in like(example, seed).items()}


def bert() -> Made:
    return randomise(tf.BertForSequenceClassification(tf.BertConfig(**_common()))), _text()


def llama() -> Made:
    return randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**_common(), num_key_value_heads=2))), _text()


def t5() -> Made:
    config = tf.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=2, num_heads=4, num_layers=2, d_ff=12, decoder_start_token_id=0
    )
    return randomise(tf.T5ForConditionalGeneration(config)), _text(decoder=5)


MADE = {"bert": (bert, "emptied"), "llama": (llama, "repaired"), "t5": (t5, "uneven")}


def write(target: Path) -> None:
    """A folder of each model, and beside it an input with the answers to it."""
    for name, (make, kind) in MADE.items():
        model, example = make()
        layers = hp.find_attention(model, example)
        drop = plan(layers, kind)
        if kind == "repaired":
            hp.repair(model, drop, [_like(example, seed) for seed in range(3)], values=False, mixtures=False)
        hp.prune(model, drop, example)
        hp.save(model, target / name)
        save_file({**example, "logits": logits(model, example)}, target / f"{name}.safetensors")


def unpacked(target: Path) -> Path:
    """The folders, by version and name."""
    for archive in Path(__file__).with_suffix("").glob("*.zip"):
        shutil.unpack_archive(archive, target / archive.stem)
    return target


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write(Path(made))
        shutil.make_archive(sys.argv[1].removesuffix(".zip"), "zip", made)
