"""What `headprune prune` says that it will take, compared with what it takes, on five models; to be within half.

    python benchmarks/estimate.py            # half an hour of one core, on which nothing else should run
    python benchmarks/estimate.py --quick    # a few minutes

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
UNITS = {"s": 1, "min": 60, "h": 3600}
Words = list[str]


def minilm(home: Path, quick: bool) -> Words:
    """The fine-tuned BERT on its sentences."""
    sizes = ["-L", "96", "--report-limit", "200"] if quick else ["-L", "512", "--report-limit", "800"]
    return [str(MINILM), "-d", str(MINILM / "data"), *sizes, "--keep", "36"]


def vit(home: Path, quick: bool) -> Words:
    """The demo's ViT on scikit-learn's digits, with ablation too."""
    from headprune.app import demo

    model, data, _ = demo.prepare(ROOT / demo.HOME, lambda done, total: None)
    more = ["--keep", "12", "--keep", "6", "-m", "ablation", "-m", "gradient"]
    return [str(model), "-d", str(data), "-L", "200" if quick else "1000", *more]


def bert(home: Path, quick: bool) -> Words:
    """A random BERT of 6 x 8 heads on random texts."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 6, "intermediate_size": 1024}
    return written(home, "BertForSequenceClassification", sizes, "label", 96 if quick else 512)


def llama(home: Path, quick: bool) -> Words:
    """A random Llama of 8 x 8 query heads, 4 of keys and values in each layer."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 8, "intermediate_size": 768}
    return written(home, "LlamaForCausalLM", {**sizes, "num_key_value_heads": 4}, "", 64 if quick else 256)


def t5(home: Path, quick: bool) -> Words:
    """A random T5 of 4 + 4 layers of 8 heads, on pairs of random texts."""
    sizes = {"d_model": 192, "d_kv": 24, "num_heads": 8, "num_layers": 4, "num_decoder_layers": 4, "d_ff": 512}
    return written(
        home, "T5ForConditionalGeneration", {**sizes, "decoder_start_token_id": 0}, "target", 64 if quick else 256
    )


MODELS: dict[str, Callable[[Path, bool], Words]] = {
    "minilm": minilm,
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "t5": t5,
}


def written(home: Path, cls: str, sizes: dict[str, Any], answer: str, examples: int) -> Words:
    """A random model in a folder with a tokenizer and random data; and the arguments of the run."""
    import torch
    import transformers as tf

    from tests.support.folders import WORDS, tokenizer, write_jsonl

    torch.manual_seed(0)
    words, rng = tokenizer(), random.Random(0)
    words.model_max_length = 128
    kind = getattr(tf, cls)
    kind(kind.config_class(**sizes, vocab_size=len(words), pad_token_id=0)).save_pretrained(home / "model")
    words.save_pretrained(home / "model")
    for split, count in (("train", examples), ("validation", examples // 2), ("test", examples)):
        rows: list[dict[str, Any]] = [
            {"text": " ".join(rng.choices(WORDS, k=rng.randint(6, 60)))} for _ in range(count)
        ]
        for row in rows:
            if answer == "label":
                row["label"] = int(row["text"].count("good") > row["text"].count("bad"))
            elif answer:
                row["source"], row[answer] = row.pop("text"), " ".join(rng.choices(WORDS, k=20))
        write_jsonl(home / "data" / f"{split}.jsonl", rows)
    return [str(home / "model"), "-d", str(home / "data"), "-L", str(examples), "--keep", "50%"]


def measured(name: str, quick: bool) -> dict[str, Any]:
    """Seconds that a run was said to take, and that it took after that was said."""
    with tempfile.TemporaryDirectory() as folder:
        typed = [*MODELS[name](Path(folder), quick), "-o", str(Path(folder) / "run")]
        command = [sys.executable, "-u", str(ROOT / "cli.py"), "prune", *typed]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stderr is not None
        told, began, said = None, 0.0, ""
        for said in process.stderr:
            if told is None and (line := re.search(r"Roughly ([\d.]+) (\w+): ([\d,]+) forward passes", said)):
                told, began = float(line[1]) * UNITS[line[2]], time.monotonic()
        if process.wait() or told is None:
            raise SystemExit(f"{name}: {said}")
    real = time.monotonic() - began
    return {"model": name, "told": told, "real": round(real, 1), "ratio": round(told / real, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), help="these models")
    parser.add_argument("--quick", action="store_true", help="few examples")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    rows = []
    for name in options.only:
        if name != "minilm" or MINILM.is_dir():
            rows.append(measured(name, options.quick))
            print(rows[-1], flush=True)
    print(json.dumps({"rows": rows, "within half": sum(abs(row["ratio"] - 1) <= 0.5 for row in rows)}))


if __name__ == "__main__":
    main()
