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

from safetensors.torch import save_file

import headprune as hp
from tests.support.stays import logits, made_of
from tests.support.zoo import bert, llama, t5

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12, "max_position_embeddings": 24}


def write(target: Path) -> None:
    """A folder of each model, and beside it an input with the answers to it."""
    grouped = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    for name, kind, made in (
        ("bert", "emptied", bert(**TINY)), ("llama", "repaired", llama(**grouped)), ("t5", "uneven", t5(d_model=8, d_kv=2, d_ff=12)),
    ):  # fmt: skip
        model, example, _ = made_of(made, kind)
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
