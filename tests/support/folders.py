"""Local folders that look like what users have: a tokenizer's words, rows of data and JSONL files. No network."""

import json
import random
from pathlib import Path

import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.zoo import randomise

WORDS = [
    "good", "bad", "fine", "poor", "film", "plot", "a", "the", "is", "was", "very", "not", "great", "dull", "fun", "sad",
    "one", "two", "three", "four",
]  # fmt: skip


def tokenizer() -> tf.PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {w: i for i, w in enumerate([*special, *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=32,
    )  # fmt: skip


def sentences(count: int, seed: int) -> list[dict[str, object]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(3, 12))
        rows.append({"text": " ".join(words), "label": int("good" in words or "great" in words)})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def tiny_world(folder: Path, counts: tuple[int, int, int], **more: object) -> Path:
    """A classifier ``m`` whose layers have four narrow heads, and so many rows of ``d``: to train on, to choose by and to test."""
    config = tf.BertConfig(**common(hidden_size=16, intermediate_size=8, **more))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(folder / "m")
    tokenizer().save_pretrained(folder / "m")
    for seed, (split, count) in enumerate(zip(("train", "validation", "test"), counts, strict=True), 1):
        write_jsonl(folder / "d" / f"{split}.jsonl", sentences(count, seed))
    return folder


def common(**more: object) -> dict[str, object]:
    return {
        "vocab_size": 30, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48,
        "pad_token_id": 0, "max_position_embeddings": 64, **more,
    }  # fmt: skip
