"""What `headprune prune` is run on where nothing real is needed: a model with a tokenizer of a few words, and made-up texts of these."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests are not installed

import torch

from tests.support.folders import WORDS, tokenizer, write_jsonl

Row = dict[str, Any]


def text(rng: random.Random, length: int, follows: bool = False) -> str:
    """Words at random; where they follow, nine in ten are told by the two before."""
    found = rng.choices(range(len(WORDS)), k=length)
    for i in range(2, length if follows else 0):
        found[i] = (3 * found[i - 1] + 5 * found[i - 2] + 1) % len(WORDS) if rng.random() < 0.9 else found[i]
    return " ".join(WORDS[i] for i in found)


def labelled(row: Row) -> Row:
    """With whether it has more good than bad."""
    return {**row, "label": int(row["text"].count("good") > row["text"].count("bad"))}


def trained(model: Any, rows: Callable[[int], list[Row]], steps: int, size: int, rate: float) -> float:
    """Train a model on batches of ``rows(size)``, by their labels or as a language model; the loss of the last one."""
    words, optimizer = tokenizer(), torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    for step in range(steps):
        drawn = rows(size)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, step / 30, 2 * (1 - step / steps))
        given = words([row["text"] for row in drawn], padding=True, return_tensors="pt").to(model.device)
        given.pop("token_type_ids", None)
        labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
        if "label" in drawn[0]:
            labels = torch.tensor([row["label"] for row in drawn], device=model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model.train()(**given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return loss.item()


def folders(home: Path, model: Any, longest: int, parts: Mapping[str, list[Row]]) -> list[str]:
    """Save the model, its tokenizer and parts of data below ``home``; the words of the command line that name them."""
    words = tokenizer()
    words.model_max_length = longest
    for saved in (model, words):
        saved.save_pretrained(home / "model")
    for split, rows in parts.items():
        write_jsonl(home / "data" / f"{split}.jsonl", rows)
    return [str(home / "model"), "-d", str(home / "data")]
