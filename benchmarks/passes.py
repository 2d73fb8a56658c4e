"""What `headprune prune` costs, stage by stage, in forward passes of the dense model; and whether it takes as long as it says, on five models.

    python benchmarks/passes.py                          # about an hour of one core
    python benchmarks/passes.py minilm                   # one of them (digits, minilm, bert, llama, t5)
    python benchmarks/passes.py --quick                  # few examples

A stage is what the command line shows as one line; its cost is CPU time of this process, divided by that of one forward pass
over the scoring examples (measured by the same clock, so that a busy machine changes little). Beside it stands how many passes were really
run. What the run was said to take is meant to be within half of what it took. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import real
import torch
import transformers as tf
from real import MINILM, ROOT, say
from torch import nn
from typer.testing import CliRunner

from headprune.app import demo
from headprune.cli import app
from headprune.cli.terminal import Console

UNITS = {"s": 1, "min": 60, "h": 3600}
TOLD = re.compile(r"Roughly ([\d.]+) (\w+): ([\d,]+) forward passes")
Words = list[str]


class Meter:
    """Meters every stage that the command tells of, and what comes between two of them."""

    def __init__(self) -> None:
        self.stages: dict[str, list[float]] = {}  # CPU seconds, and examples that were run through the model
        self.since, self.examples, self.track, self.say = time.process_time(), 0.0, Console.track, Console.say
        self.told, self.began = 0.0, 0.0

    def close(self, label: str) -> None:
        now, stage = time.process_time(), self.stages.setdefault(label, [0.0, 0.0])
        stage[0] += now - self.since
        stage[1] += self.examples
        self.since, self.examples = now, 0.0

    def count(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, tf.PreTrainedModel) and getattr(output, "logits", None) is not None:
            self.examples += len(output.logits)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count while the context lasts."""
        meter = self

        @contextmanager
        def track(console: Console, label: str) -> Iterator[Any]:
            meter.close("between stages")
            with meter.track(console, label) as progress:
                yield progress
            meter.close(label)

        def said(console: Console, *texts: str) -> None:
            if found := TOLD.search(" ".join(texts)):
                meter.told, meter.began = float(found[1]) * UNITS[found[2]], time.monotonic()
            meter.say(console, *texts)

        handle = nn.modules.module.register_module_forward_hook(self.count)
        Console.track, Console.say = track, said  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Console.track, Console.say = self.track, self.say  # type: ignore[method-assign]
            handle.remove()
            self.close("between stages")


# -- models ------------------------------------------------------------------------------------


def minilm(home: Path, quick: bool) -> Words:
    """The fine-tuned BERT on its sentences."""
    sizes = ["-L", "96", "--report-limit", "200"] if quick else ["-L", "1024"]
    return [str(MINILM), "-d", str(MINILM / "data"), *sizes, "-m", "gradient", "--keep", "36"]


def digits(home: Path, quick: bool) -> Words:
    """The demo's ViT on scikit-learn's digits, with ablation too."""
    model, data, _ = demo.prepare(ROOT / demo.HOME, lambda done, total: None)
    keep = [word for count in demo.KEEP for word in ("--keep", str(count))]
    return [str(model), "-d", str(data), "-L", "200" if quick else "1000", "-m", "ablation", "-m", "gradient", *keep]


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
    sizes["decoder_start_token_id"] = 0
    return written(home, "T5ForConditionalGeneration", sizes, "target", 64 if quick else 256)


SUBJECTS = {each.__name__: each for each in (digits, minilm, bert, llama, t5)}


def written(home: Path, cls: str, sizes: dict[str, Any], answer: str, examples: int) -> Words:
    """A random model in a folder with a tokenizer and random data; and the arguments of the run."""
    import made_up

    torch.manual_seed(0)
    rng, kind, parts = random.Random(0), getattr(tf, cls), {}
    model = kind(kind.config_class(**sizes, vocab_size=len(made_up.tokenizer()), pad_token_id=0))
    for split, count in (("train", examples), ("validation", examples // 2), ("test", examples)):
        rows = [{"text": made_up.text(rng, rng.randint(6, 60))} for _ in range(count)]
        if answer == "label":
            rows = [made_up.labelled(row) for row in rows]
        elif answer:
            rows = [{"source": row["text"], answer: made_up.text(rng, 20)} for row in rows]
        parts[split] = rows
    return [*made_up.folders(home, model, 128, parts), "-L", str(examples), "--keep", "50%"]


# -- measuring ---------------------------------------------------------------------------------


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A whole `headprune prune`, by stage."""
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        typed = SUBJECTS[name](Path(folder), options.quick)
        with meter.running():
            result = CliRunner().invoke(app, ["prune", *typed, "-o", str(Path(folder) / "run"), "--dtype", "float32"])
        assert result.exit_code == 0, result.output
        took = time.monotonic() - meter.began
        found = json.loads((Path(folder) / "run" / "metrics.json").read_text())
        unit, examples = one_pass(Path(typed[0]), Path(typed[2]), int(typed[4]))
    stages = {label: (seconds / unit, run / examples) for label, (seconds, run) in meter.stages.items()}
    about = f"a pass takes {unit:.2f} s of CPU time; told {meter.told:.0f} s, took {took:.0f} s"
    say(f"\n{name}, {examples:,} examples: {about}\n")
    say("| stage | passes' time | forward passes |\n|:--|--:|--:|")
    for label, (cost, run) in (*stages.items(), ("all", tuple(map(sum, zip(*stages.values(), strict=True))))):
        say(f"| {label} | {cost:.1f} | {run:.1f} |")
    accuracy = {b["kept"]: b["pruned"]["metrics"].get("accuracy") for b in found["budgets"]}
    facts = {"examples": examples, "pass_seconds": unit, "stages": stages, "accuracy": accuracy}
    return {**facts, "told": meter.told, "took": took, "told by took": round(meter.told / took, 2)}


def one_pass(model: Path, data: Path, limit: int) -> tuple[float, int]:
    """CPU seconds of one forward pass over the scoring examples (the least of three), and how many these are."""
    loaded, parts = real.load_folder(model, data, limit=limit)
    batches, times = list(parts.score.batches()), []
    for _ in range(3):
        started = time.process_time()
        with torch.inference_mode():
            for batch in batches:
                loaded.model(**batch)
        times.append(time.process_time() - started)
    return min(times), len(parts.score)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help=f"{', '.join(SUBJECTS)} [all]")
    parser.add_argument("--quick", action="store_true", help="few examples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in options.which or SUBJECTS if n != "minilm" or MINILM.exists()]
    print(json.dumps({name: measured(name, options) for name in names}))


if __name__ == "__main__":
    main()
