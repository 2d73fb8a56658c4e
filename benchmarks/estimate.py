"""What `prune` says that it will take, compared with what it takes, on five models.

    python benchmarks/estimate.py            # half an hour of one core
    python benchmarks/estimate.py --quick    # a few minutes

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"
GOAL = 0.5


def minilm(home: Path, quick: bool) -> list[str]:
    """The fine-tuned BERT on its sentences."""
    if not MINILM.is_dir():
        raise FileNotFoundError("minilm-rt is not there")
    return [
        str(MINILM),
        "-d",
        str(MINILM / "data"),
        "-L",
        "96" if quick else "512",
        "--report-limit",
        "200" if quick else "800",
        "--keep",
        "36",
    ]


def bert(home: Path, quick: bool) -> list[str]:
    """A random BERT of 6 x 8 heads, 4 classes, on random texts."""
    import transformers as tf

    config = tf.BertConfig(
        vocab_size=_WORDS + 10, hidden_size=256, num_attention_heads=8, num_hidden_layers=6, intermediate_size=1024, num_labels=4,
        initializer_range=0.1, max_position_embeddings=128,
    )  # fmt: skip
    return _saved(home, tf.BertForSequenceClassification(config), 4, 96 if quick else 512)


def llama(home: Path, quick: bool) -> list[str]:
    """A random Llama of 8 x 8 query heads, 4 of keys and values in each layer."""
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=_WORDS + 10, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=8,
        intermediate_size=768, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    return _saved(home, tf.LlamaForCausalLM(config), 0, 64 if quick else 256)


def vit(home: Path, quick: bool) -> list[str]:
    """The demo's ViT on scikit-learn's digits, with ablation too."""
    from headprune.app import demo

    model, data, _ = demo.prepare(ROOT / demo.HOME, lambda done, total: None)
    return [
        str(model),
        "-d",
        str(data),
        "-L",
        "200" if quick else "1000",
        "--keep",
        "12",
        "--keep",
        "6",
        "-m",
        "ablation",
        "-m",
        "gradient",
    ]


def t5(home: Path, quick: bool) -> list[str]:
    """A random T5 of 4 + 4 layers of 8 heads, on pairs of random texts."""
    import transformers as tf

    config = tf.T5Config(
        vocab_size=_WORDS + 10, d_model=192, d_kv=24, num_heads=8, num_layers=4, num_decoder_layers=4, d_ff=512, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return _saved(home, tf.T5ForConditionalGeneration(config), -1, 64 if quick else 256)


MODELS: dict[str, Callable[[Path, bool], list[str]]] = {
    "minilm": minilm,
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "t5": t5,
}
_WORDS = 500


def _saved(home: Path, model: Any, labels: int, examples: int) -> list[str]:
    """A random model in a folder, with a tokenizer that knows the words of random texts; and the arguments of the run."""
    import numpy as np
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, **{f"w{i}": i + 3 for i in range(_WORDS)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    own = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", model_max_length=128
    )
    draw = np.random.default_rng(0)

    def text() -> str:
        return " ".join(f"w{i}" for i in draw.integers(_WORDS, size=int(np.clip(draw.lognormal(3.2, 0.4), 6, 60))))

    def row() -> dict[str, Any]:
        if labels > 0:
            return {"text": text(), "label": int(draw.integers(labels))}
        return {"source": text(), "target": text()} if labels < 0 else {"text": text()}

    data = home / "data"
    data.mkdir(parents=True)
    for split, count in (("train", examples), ("validation", examples // 2), ("test", examples)):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))
    model.save_pretrained(home / "model")
    own.save_pretrained(home / "model")
    return [str(home / "model"), "-d", str(data), "-L", str(examples), "--keep", "50%"]


def one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a model's run was said to take, and what it took: CPU seconds, without what is timed for the report by the clock."""
    import torch
    import transformers as tf
    from typer.testing import CliRunner

    from headprune.app.workflow import cost, pruning
    from headprune.cli import app

    tf.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    cost.CLOCK = clock = time.process_time
    made: dict[str, Any] = {}
    timed = pruning._timed

    def announced(console: Any, make: Callable[[], Any], quick: Any = None) -> None:
        began = clock()
        made["cost"] = make()
        made["began"] = clock()
        made["telling"] = made["began"] - began

    def apart(*arguments: Any) -> Any:
        began = clock()
        done = timed(*arguments)
        made["began"] += clock() - began
        return done

    pruning.announce, pruning._timed = announced, apart
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        arguments = MODELS[name](home, options.quick)
        result = CliRunner().invoke(app, ["prune", *arguments, "-o", str(home / "run"), "-q"])
    if result.exit_code:
        raise RuntimeError(result.output[-400:] or repr(result.exception)) from result.exception
    told, real = made["cost"].seconds - made["cost"].timing, clock() - made["began"]
    return {
        "model": name, "examples": made["cost"].examples, "passes": round(made["cost"].passes, 1), "told": round(told, 1),
        "real": round(real, 1), "ratio": round(told / real, 2), "telling": round(made["telling"], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="these models")
    parser.add_argument("--quick", action="store_true", help="few examples")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if options.one:
        print(json.dumps(one(options.one, options)))
        return
    rows = []
    for name in options.only or MODELS:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    print(json.dumps({"rows": rows, "within half": sum(abs(row["ratio"] - 1) <= GOAL for row in rows)}))


if __name__ == "__main__":
    main()
