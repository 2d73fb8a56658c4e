"""Local folders that look like what users have: models with tokenizers, and datasets. No network."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headprune import latency
from tests.interrupted import Processes
from tests.zoo import randomise

torch.set_num_threads(1)  # pytest-xdist runs two workers on two cores
latency.MIN_SECONDS, latency.bench = 0.02, partial(latency.bench, min_runs=5)  # tests of timing say how long themselves
os.fsync = lambda _: None  # no machine loses its power here


def pytest_collection_finish() -> None:
    """The libraries stay, so the garbage collector need not look through them: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "film",
    "plot",
    "a",
    "the",
    "is",
    "was",
    "very",
    "not",
    "great",
    "dull",
    "fun",
    "sad",
    "one",
    "two",
    "three",
    "four",
]


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


def common(**more: object) -> dict[str, object]:
    return {
        "vocab_size": 30, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48,
        "pad_token_id": 0, "max_position_embeddings": 64, **more,
    }  # fmt: skip


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    config = tf.BertConfig(**common(id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model with key/value groups."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**common(num_key_value_heads=2)))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, validation and test in JSONL."""
    folder = tmp_path_factory.mktemp("data")
    for split, count, seed in (("train", 60, 1), ("validation", 30, 2), ("test", 40, 3)):
        write_jsonl(folder / f"{split}.jsonl", sentences(count, seed))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pictures are put together, but not painted: that is a fifth of a run's time. Tests marked ``drawn`` paint."""
    with pytest.MonkeyPatch.context() as patch:  # one of its own: tests undo theirs
        if not request.node.get_closest_marker("drawn"):
            patch.setattr("headprune.app.report.figures._save", lambda _, path: path.write_bytes(b""))
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Runs commands in processes of their own, which can be stopped (`tests.interrupted`)."""
    made = Processes()
    yield made
    made.close()
